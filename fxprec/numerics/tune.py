"""Tune a policy by measurement: the fastest within an error of the loss, or the most exact within a time."""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
import time as clock
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final

import torch
from torch import nn

from fxprec.errors import ConversionError
from fxprec.model.module import conversion_of
from fxprec.numerics.audit import ledger_of
from fxprec.numerics.problem import Batch, Loss, Problem, kept, not_in_inference_mode, under
from fxprec.numerics.study import Study
from fxprec.numerics.tuned import Figures, Tuned
from fxprec.passes.costs.device_costs import DeviceCosts
from fxprec.passes.placement.budget import cheapest_within, most_exact_within
from fxprec.settings import Settings

#: Of the batches, one in so many is held out, to measure on.
_HELD_OUT: Final = 4
#: Steps that are timed, of each of the two models in turns: at least so many, and for so many seconds.
_STEPS, _SECONDS = 5, 0.5


@not_in_inference_mode
def tune(
    model: nn.Module,
    batches: Iterable[Batch],
    loss: Loss | None = None,
    *,
    error: float | None = None,
    time: float | None = None,
) -> Tuned:
    """Find the policy that keeps the loss's error within a budget in the least time, or the time with the least error.

    A copy of the model in which all is low that may be is audited: so the squared error is known that each op adds
    where it rounds its result, and each reader where it reads a value rounded. With the costs of the device that gives
    a minimum cut of time + weight * squared error, for any weight; the weight is found by bisection on the curve of the
    best that can be had (``passes.placement.budget``). Ops become FP32 where that is worth its time, and low where
    the policy keeps them in FP32 for little. What overrides of the model's policy say stays, and pins of safety do. Of
    a model at level O0, which is all FP32, the policy is one of level O1.

    Of the batches every fourth is held out: they tell what is measured. Errors are per batch; those of few batches are
    noise: a hundred are a good start, of the size that is trained on. The model is left as it was.

    Args:
        model: converted.
        batches: at least two, each ``(*inputs, target)``, without a loss ``inputs``; or dicts of named inputs.
        loss: as ``fxprec.numerics.audit`` takes it; without any, the error is the length of the outputs'.
        error: the most that the root mean square of the error over batches may be, in units of the loss (or output).
        time: the most that a step may take, as a fraction of what it takes now.

    Returns:
        The policy, as ``convert`` takes it with the other settings unchanged; with predicted and measured figures.

    Raises:
        ConversionError: the model is not converted, or frozen; at level O3; placed as autocast does.
        TypeError: arguments of other types.
        ValueError: both budgets or none, one that is not positive, or that cannot be met: says what can; fewer than two
            batches; an error that is inf or nan.

    Sources: Eisner and Severance, JACM 1976 (the curve); Hutchinson, Communications in Statistics 19, 1990 (the length
        of outputs' errors, by random signs); DESIGN 11.
    """
    return search(model, batches, loss, error, time, lambda _: None)


class _Told(list[Batch]):
    """List of batches that reports whenever one is taken."""

    def __init__(self, what: str, batches: Iterable[Batch], say: Callable[[str], None]) -> None:
        super().__init__(batches)
        self._what, self._say = what, say

    def __iter__(self) -> Iterator[Batch]:
        for number, batch in enumerate(super().__iter__(), 1):
            self._say(f"{self._what}: batch {number} of {len(self)}")
            yield batch


def search(
    model: nn.Module,
    batches: Iterable[Batch],
    loss: Loss | None,
    error: float | None,
    time: float | None,
    say: Callable[[str], None],
) -> Tuned:
    """Search as ``tune`` does; ``say`` is told what is done, as that takes a while."""
    problem = Problem.of(model, loss, "tune")
    settings = _settings_of(model)
    lowering = replace(settings.policy, level="O1") if settings.policy.level == "O0" else settings.policy
    _check_budget(error, time)
    calibration, held_out = _split([*problem.batches(batches)])
    calibration, held_out = _Told("auditing", calibration, say), _Told("measuring", held_out, say)
    study = Study.of(problem, replace(settings, policy=lowering), calibration)
    start = study.decided(settings.policy)
    base = start if lowering is settings.policy else study.decided(lowering)
    say("deciding")
    if error is not None:
        found, asked = cheapest_within(study.trade, error**2 - study.constant), f"an error of at most {error:g}"
    else:
        assert time is not None
        found, asked = most_exact_within(study.trade, time * start.seconds), f"at most {time:g} of the time"
    if found is None:
        raise ValueError(study.why_not(error, time, start))
    # The bisection ends near a budget, not at the best within it: the start may be better in both.
    if start.square <= found.square and start.seconds <= found.seconds:
        found = start
    policy, lines, reached = study.policy_for(found, base)
    models = [under(model, policy=each) for each in (settings.policy, policy)]
    ledgers = [ledger_of(Problem(each, loss), held_out) for each in models]
    seconds = _times(models, loss, held_out)
    before, after = (
        Figures(math.sqrt(each.square + study.constant), abs(ledger.measured), each.seconds, taken)
        for each, ledger, taken in zip((start, reached), ledgers, seconds, strict=True)
    )
    target = "outputs" if ledgers[0].target == "outputs" else "loss"
    remarks = (*study.remarks(start, base, found, reached, error), *_missed(before, after, error, time, len(held_out)))
    against = "the start" if lowering is settings.policy else "O1"
    return Tuned(policy, lines, before, after, asked, remarks, target, against, _call_of(settings))


def _missed(before: Figures, after: Figures, error: float | None, time: float | None, batches: int) -> Iterator[str]:
    """Say where what was measured on the held-out batches exceeds what was asked: the search goes by predictions."""
    on = "on the held-out batch" if batches == 1 else f"on {batches} held-out batches"
    if error is not None and not after.measured_error <= error:
        yield (
            f"the budget is missed {on}: an error of {after.measured_error:.3g} was measured, {error:g} was asked. "
            "Give more batches, as an error of few of them is noise, or ask for less"
        )
    taken = after.measured_seconds / before.measured_seconds
    if time is not None and taken > time:
        yield (
            f"the budget is missed {on}: a step takes {taken:.3f} of the time before, at most {time:g} was asked. "
            "Costs of this machine (python -m fxprec calibrate) predict better than shipped ones; or ask for less"
        )


def _call_of(settings: Settings) -> str:
    """Return the call of ``convert`` with these settings, as far as they decide which nodes are low, and a policy."""
    arguments = [f"dtype={settings.dtype}"]
    costs = ""
    if isinstance(settings.lower, DeviceCosts):
        arguments.append("lower=costs")
        costs = f"; costs are those of {settings.lower}, which DeviceCosts.from_dict reads from a file"
    elif settings.lower != "always":
        arguments.append(f'lower="{settings.lower}"')
        costs = f"; costs of the device were those of {settings.device_costs}"
    if settings.fuse != "auto":
        arguments.append(f"fuse={settings.fuse!r}")
    if not settings.keep_output_dtype:
        arguments.append("keep_output_dtype=False")
    if settings.executor != "eager":
        arguments.append(f'executor="{settings.executor}"')
    return f"fxprec.convert(model, example_inputs, {', '.join(arguments)}, policy=policy){costs}"


def _settings_of(model: nn.Module) -> Settings:
    settings = conversion_of(model).settings
    level = settings.policy.level
    if level == "O3":
        raise ConversionError(
            "at level O3 the parameters themselves are low, and their FP32 values, with which tune compares, are gone: "
            "convert the FP32 model at O2, whose activations are low, too, and tune that; or keep ops in FP32 by "
            'overrides, Policy.preset("O3").override(ops={"softmax": torch.float32})'
        )
    if settings.placement != "mincut":
        raise ConversionError('tune places casts by a minimum cut: convert with placement="mincut", the default')
    return settings


def _check_budget(error: float | None, time: float | None) -> None:
    if (error is None) == (time is None):
        raise ValueError(
            "give one budget: error=, in units of the loss (or outputs), or time=, a fraction of what a step takes now"
        )
    name, value = ("error", error) if time is None else ("time", time)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, not {type(value).__name__}")
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name}={value} must be positive and finite")


def _split(batches: Sequence[Batch]) -> tuple[list[Batch], list[Batch]]:
    """Return batches to audit, and batches to measure on."""
    if len(batches) < 2:
        raise ValueError(f"tune wants at least two batches, one of them to measure on; there is {len(batches)}")
    step = min(_HELD_OUT, len(batches))
    held_out = batches[step - 1 :: step]
    return [batch for number, batch in enumerate(batches) if (number + 1) % step], [*held_out]


def _times(models: Sequence[nn.Module], loss: Loss | None, batches: Sequence[Batch]) -> list[float]:
    """Return seconds of a step of each model, measured in turns: the median of the steps."""
    taken: list[list[float]] = [[] for _ in models]
    with contextlib.ExitStack() as stack:
        for each in models:
            stack.enter_context(kept(each))
        until = clock.perf_counter() + _SECONDS
        batches = [*itertools.islice(itertools.cycle(batches), max(_STEPS, len(batches)))]
        # In turns, so that a change of the machine's clock or load meets both models.
        while True:
            for batch in batches:
                for model, own in zip(models, taken, strict=True):
                    own.append(_seconds_of_step(Problem(model, loss), batch))
            if clock.perf_counter() > until:
                return [statistics.median(own) for own in taken]


def _seconds_of_step(problem: Problem, batch: Batch) -> float:
    """Return the seconds of forward and, where weights want gradients, backward."""
    began = clock.perf_counter()
    values, _ = problem.step(batch, 1.0)
    if values[0].is_cuda:
        torch.cuda.synchronize(values[0].device)
    return clock.perf_counter() - began
