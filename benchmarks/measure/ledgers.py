"""Is the error ledger right? Three measurements on it, which share none of its arithmetic.

- ``added_up``: the columns against the error that was measured, and an audit's time and memory against a step's.
- ``planted``: a node's result is rounded to a few bits; the node should be the first row where that matters in the run,
  and in a float64 run as well.
- ``predicted``: what rows say of some samples against the errors of others, whose reference is a plain float64 copy of
  the model, run as PyTorch runs it.
"""

from __future__ import annotations

import contextlib
import copy
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, Literal
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fxprec
from benchmarks.measure.peak import HostMeter, Marks
from benchmarks.reports.ledger import Cost, Place, Planted, Sum, Variances
from benchmarks.workloads.subjects import Subject
from fxprec.inspection.nodes import NamedNode
from fxprec.numerics import Ledger, audit
from fxprec.numerics.problem import Batch
from fxprec.tape.attribution import Attribution

__all__ = ["BITS", "added_up", "planted", "predicted", "rounded"]

#: Significant ones that are left where rounding is planted.
BITS: Final = 4
_RESAMPLED: Final = 2000


# -- adding up --------------------------------------------------------------------------------------------------------


def added_up(subject: Subject, dtype: torch.dtype, level: Literal["O1", "O2"], gradients: bool, rounds: int = 0) -> Sum:
    """One batch, audited.

    Args:
        subject: the model.
        dtype, level: of the conversion.
        gradients: explain those of the parameters.
        rounds: times that audit and FP32 step run in turns, of which the fastest count; 0: no cost is measured.
    """
    batch = subject.batch(0)
    model = _converted(subject, dtype, level)

    def run() -> Ledger:
        return audit(model, [batch], subject.loss, gradients=gradients)

    ledger = run()
    bends, roundings = (sum(abs(getattr(row, each)) for row in ledger.rows) for each in ("bend", "rounding"))
    cost = _cost(subject, model, batch, run, rounds) if rounds else None
    return Sum(
        subject.name, subject.size, str(dtype).removeprefix("torch."), level, "gradients" if gradients else "loss",
        ledger.measured, ledger.explained - ledger.measured, bends / (bends + roundings) if bends else 0.0,
        ledger.rows[0].node if ledger.rows else "", len(ledger.rows), ledger.remarks, cost,
    )  # fmt: skip


def _converted(subject: Subject, dtype: torch.dtype = torch.bfloat16, level: Literal["O1", "O2"] = "O1") -> nn.Module:
    return fxprec.convert(subject.seeded(), dtype=dtype, level=level).module


def _cost(subject: Subject, model: nn.Module, batch: Batch, run: Callable[[], object], rounds: int) -> Cost:
    trained = subject.seeded()
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        subject.value(trained, batch).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()  # makes the optimizer's state
    calls = [run, lambda: subject.value(model, batch), step]
    seconds, run_seconds, step_seconds = (min(times) for times in zip(*_timed(calls, rounds), strict=True))
    weights = _bytes([*model.parameters(), *model.buffers()])
    state = _bytes(x for each in optimizer.state.values() for x in each.values())
    shadows = fxprec.report(model).headline.weights.shadow_bytes
    return Cost(seconds, run_seconds, step_seconds, _peak(run), _peak(step), weights + shadows, weights + state)


def _timed(calls: Sequence[Callable[[], object]], rounds: int) -> Iterator[list[float]]:
    for _ in range(rounds):
        times = []
        for call in calls:
            started = time.process_time()
            call()
            times.append(time.process_time() - started)
        yield times


def _peak(run: Callable[[], object]) -> int:
    return max(segment.peak for segment in HostMeter().measure(run, Marks()))


def _bytes(values: Iterable[Tensor]) -> int:
    storages = [value.untyped_storage() for value in values]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


# -- planting ---------------------------------------------------------------------------------------------------------


@torch.library.custom_op("benchmarks::rounded", mutates_args=())
def rounded(x: Tensor, bits: int, wide: bool) -> Tensor:
    """To so many significant bits: if ``wide`` what is float64, and nothing else; otherwise all but that."""
    if (x.dtype is torch.float64) is not wide:
        return x.clone()
    mantissa, exponent = torch.frexp(x if wide else x.float())
    return torch.ldexp((mantissa * 2**bits).round(), exponent - bits).to(x.dtype)


@rounded.register_fake
def _(x: Tensor, bits: int, wide: bool) -> Tensor:
    return torch.empty_like(x)


rounded.register_autograd(lambda ctx, gradient: (gradient, None, None))


@contextlib.contextmanager
def _planted(graph: int, name: str, bits: int, wide: bool) -> Iterator[None]:
    """Within, what a node gives is rounded, as if the node did it: in the ledger's reference, or in the run."""
    look = Attribution.look

    def plant(watcher: Attribution, node: NamedNode, run: Callable[[], Any]) -> Any:
        def run_and_round() -> Any:
            return pytree.tree_map_only(Tensor, lambda x: rounded(x, bits, wide) if x.is_floating_point() else x, run())

        return look(watcher, node, run_and_round if (node.graph, node.name) == (graph, name) else run)

    with mock.patch.object(Attribution, "look", plant):
        yield


def planted(subject: Subject, bits: int = BITS) -> Planted:
    """Rounding planted at each node that has a part in the loss, one after the other, each with a ledger of its own."""
    batch = subject.batch(0)
    model = _converted(subject)

    def ledger() -> tuple[Ledger, float, float]:
        found = audit(model, [batch], subject.loss)
        [sample] = found.samples
        assert sample.low is not None and sample.reference is not None, "the target is a loss"
        return found, sample.low, sample.reference

    before, low, exact = ledger()
    places = []
    for row in before.rows:
        if row.kind != "node":
            continue
        with _planted(row.graph, row.node, bits, wide=True):
            _, _, moved = ledger()
        with _planted(row.graph, row.node, bits, wide=False):
            found, run, _ = ledger()
        own = [each for each in found.rows if (each.kind, each.graph, each.node) == ("node", row.graph, row.node)]
        others = [abs(each.contribution) for each in found.rows if each not in own]
        rank = 1 + sum(each > abs(own[0].contribution) for each in others) if own else len(found.rows) + 1
        places.append(
            Place(row.node, row.op, moved - exact, run - low, max(others, default=0.0), rank, len(found.rows))
        )
    return Planted(subject.name, bits, tuple(places))


# -- predicting -------------------------------------------------------------------------------------------------------


def predicted(subject: Subject, samples: int) -> Variances:
    """Rows of so many samples, and errors of as many others."""
    original = copy.deepcopy(subject.seeded()).double()
    model = _converted(subject)
    squares: dict[tuple[Any, ...], float] = {}
    roundings, contributions = [], []
    for seed in range(samples):
        rows = audit(model, [subject.sample(seed)], subject.loss).rows
        for row in rows:
            key = row.kind, row.graph, row.node
            squares[key] = squares.get(key, 0.0) + row.rounding**2
        roundings.append(sum(row.rounding for row in rows))
        contributions.append(sum(row.contribution for row in rows))
    errors = [_error(subject, model, original, subject.sample(seed)) for seed in range(samples, 2 * samples)]
    found, expected = _drawn_again(errors, 0), _drawn_again(contributions, 1)
    return Variances(
        subject.name, samples, math.sqrt(sum(squares.values()) / samples), _root_mean_square(roundings),
        _root_mean_square(contributions), _root_mean_square(errors), *_interval(found), *_interval(expected / found),
        tuple(errors),
    )  # fmt: skip


@torch.no_grad()
def _error(subject: Subject, model: nn.Module, original: nn.Module, sample: tuple[Tensor, ...]) -> float:
    wide = tuple(part.double() if part.is_floating_point() else part for part in sample)
    return float(subject.value(model, sample)) - float(subject.value(original, wide))


def _root_mean_square(values: list[float]) -> float:
    return math.sqrt(sum(value * value for value in values) / len(values))


def _drawn_again(values: list[float], seed: int) -> Tensor:
    """Root mean squares of the values, drawn with repetition (Efron, "Bootstrap methods", Ann. Stat. 1979)."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(values), (_RESAMPLED, len(values)), generator=generator)
    return torch.tensor(values, dtype=torch.float64).square()[drawn].mean(1).sqrt()


def _interval(values: Tensor) -> tuple[float, float]:
    """95 % of them lie in it."""
    low, high = values.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high
