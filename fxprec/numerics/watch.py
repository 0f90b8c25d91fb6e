"""Watch a training loop: a step that is not finite is skipped, and is run again to find where that began."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fxprec.capture.user_line import user_level
from fxprec.errors import CaptureError, NonFiniteError, NonFiniteWarning
from fxprec.model.conversion import Conversion
from fxprec.model.entry_point import EntryPoint
from fxprec.model.module import conversion_of
from fxprec.numerics.finding import Finding
from fxprec.numerics.hold import Hold, skips_on_device
from fxprec.numerics.kept_call import KeptCall, KeptStep
from fxprec.numerics.locate import fault_of
from fxprec.numerics.problem import Problem
from fxprec.numerics.trip import Trip
from fxprec.numerics.written_buffers import WrittenBuffers
from fxprec.optim.gradient_check import GradientCheck, check
from fxprec.optim.triton_update import Plans
from fxprec.scaling.cuda_graphs import capturing, reading_waits
from fxprec.scaling.device_step import makes_state
from fxprec.scaling.gradients import dtensor_type, parameters_of
from fxprec.scaling.loss_scaler import LossScaler
from fxprec.scaling.on_host import OnHost
from fxprec.shadows.entry import is_traced
from fxprec.torch_internals import running_ddp, scaler_states

#: Steps whose numbers are on their way to the host: with more, the host waits for the oldest, which is one step old.
_MOST_UNREAD: Final = 1
#: Of steps that are not finite one after another, so many are run again: each takes as long as many steps.
_MOST_REPLAYS: Final = 3
#: Calls of a step that are kept; of more (nobody steps an optimizer?) the oldest go.
_MOST_CALLS: Final = 256

OnFinding = Literal["warn", "raise"] | Callable[[Trip], object]


def watch(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    scaler: LossScaler | None = None,
    *,
    on_finding: OnFinding = "warn",
    wait: bool = False,
) -> Watcher:
    """A context for a training loop: what is not finite is found where it begins, and the step is skipped.

    ::

        with fxprec.numerics.watch(model, optimizer, scaler) as watcher:
            for x, y in loader:
                ...                                       # the usual loop, unchanged
        for trip in watcher.trips: print(trip)

    Each output of the model that a gradient comes to is looked at for nan and inf (-inf alone is a mask), and so are
    the gradients before the optimizer steps: one reduction for an output, one read of all gradients (with a scaler
    none: it looks itself). If one is not finite, the step changes nothing: no parameter, no state, no step count.
    Values are the same, bit for bit, as without this. On CUDA nothing waits: the device skips by itself, and the host
    hears of it at the next step, which is skipped too, so that parameters stay as they were until the fault is found.

    Then the model's call and its backward run again, op by op, on what was kept: the call's arguments (no copies), the
    gradients that came to the outputs, the random numbers, and the buffers that a call writes. Buffers that became inf
    or nan get their values of before.

    A scaler that is enabled decides on gradients itself. An overflow that a smaller scale cures is its daily business,
    and no finding, unless the scale cannot fall (a static one) or came to its floor: then the scaler's error tells the
    finding. Several processes (DDP) skip together, by an all-reduce of two numbers before each step.

    Args:
        model: converted; under DDP what it wraps.
        optimizer: of the model's parameters; None: any that steps one of them.
        scaler: the loop's; None, or disabled: gradients are not scaled.
        on_finding: "warn": a ``NonFiniteWarning`` for each step that was skipped. "raise": a ``NonFiniteError`` after
            it. A function is called with each ``Trip``.
        wait: an optimizer on CUDA that cannot skip by itself is allowed: the host waits for the gradients before each
            of its steps.

    Raises:
        ConversionError: the model is not converted, or frozen.
        TypeError: arguments of other types.
        ValueError: an optimizer of other parameters, one that cannot skip (on CUDA without ``wait``; LBFGS), DTensors.
    """
    return Watcher(model, optimizer, scaler, on_finding, wait)


@dataclass(slots=True)
class _Taken:
    """A step: the calls that its gradients came from."""

    number: int
    calls: list[KeptCall]
    tripped: bool = False


class _Report(NamedTuple):
    """What was found before a step: the largest of each output, flags of gradients, then two numbers more."""

    step: _Taken
    found: OnHost
    outputs: list[KeptCall]
    gradients: int
    scaled: bool
    ranks: bool


class Watcher:
    """See ``watch``, whose arguments these are.

    Attributes:
        trips: of the steps that were not finite, in their order.
        steps: how many were watched.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        scaler: LossScaler | None,
        on_finding: OnFinding,
        wait: bool,
    ) -> None:
        Problem.of(model, None, "watch")
        if scaler is not None and not isinstance(scaler, LossScaler):
            raise TypeError(f"scaler must be a fxprec.LossScaler or None, not a {type(scaler).__name__}")
        if on_finding not in ("warn", "raise") and not callable(on_finding):
            raise TypeError(f"on_finding is {on_finding!r}: give 'warn', 'raise' or a function of a Trip")
        _refuse_shards(model)
        self.trips: list[Trip] = []
        self.steps = 0
        self._model, self._optimizer, self._on_finding, self._wait = model, optimizer, on_finding, wait
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._home = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._buffers = WrittenBuffers(model)
        self._plans, self._hold, self._stack = Plans(), Hold(), contextlib.ExitStack()
        self._known: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
        self._alive: weakref.WeakSet[KeptCall] = weakref.WeakSet()
        self._limits: dict[tuple[int, int], Tensor] = {}
        self._group: Any = None
        self._busy = self._active = False
        self._outputs_count = True
        self._in_a_row = 0
        self._new: list[KeptCall] = []
        self._step: _Taken | None = None
        self._unread: list[_Report] = []
        self._held: Tensor | None = None  # on CUDA: 1 from a fault on until the host has seen it
        if optimizer is not None:
            if not isinstance(optimizer, Optimizer):
                raise TypeError(f"optimizer must be a torch.optim.Optimizer or None, not a {type(optimizer).__name__}")
            if not self._concerns(optimizer):
                raise ValueError(
                    f"none of the parameters of this {type(optimizer).__name__} belongs to the model: was it made for "
                    "another copy, or before model.to(), which may replace them?"
                )

    # -- the context ---------------------------------------------------------------------------------------------------

    def __enter__(self) -> Watcher:
        conversion = conversion_of(self._model)
        if conversion.watcher is not None:
            raise RuntimeError(
                f"{conversion.name} is watched already: leave that context first (it tells of all steps in it)"
            )
        with self._stack as stack:
            conversion.watcher = self._call
            stack.callback(self._disarm, conversion)
            if self._optimizer is None:
                hooks = (register_optimizer_step_pre_hook, register_optimizer_step_post_hook)
            else:
                hooks = (self._optimizer.register_step_pre_hook, self._optimizer.register_step_post_hook)
            for register, hook in zip(hooks, (self._before_step, self._after_step), strict=True):
                stack.callback(register(hook).remove)
            if self._scaler is not None:
                stack.enter_context(self._scaler._observed_by(self))
            self._stack = stack.pop_all()
        self._active = True
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._stack:
            if kind is None:
                self.check()
            else:  # which must not hide behind another error
                self._look_at_rest()
                self._settle(wait=True, quiet=self._on_finding == "raise")

    def _disarm(self, conversion: Conversion) -> None:
        self._active = False
        conversion.watcher = None
        self._hold.release()
        for call in self._alive:
            call.let_go()
        self._new.clear()
        self._unread.clear()
        self._step = self._held = None

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Of the trips, those that are known."""
        return tuple(trip.finding for trip in self.trips if trip.finding is not None)

    def check(self) -> tuple[Trip, ...]:
        """All that is known by now: waits for the device, and looks at gradients that no optimizer has taken yet.

        Returns:
            All trips.

        Raises:
            NonFiniteError: with ``on_finding="raise"``, of a step that nobody has heard of.
        """
        self._look_at_rest()
        self._settle(wait=True)
        return tuple(self.trips)

    # -- calls of the model --------------------------------------------------------------------------------------------

    def _call(self, entry: EntryPoint, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[[], Any]) -> Any:
        """In the place of a call: run it, and keep what a replay takes."""
        if self._busy or is_traced():
            return run()
        if capturing(self._home):
            raise CaptureError(
                "a CUDA graph of a model that is watched: its replays would run unseen. Leave watch first"
            )
        self._settle()
        if not self._unread:
            self._step = None  # whose gradients of outputs take memory
        if (ddp := running_ddp()) is not None and ddp.process_group.size() > 1:
            self._group = ddp.process_group
        conversion = conversion_of(self._model)
        graphs_only = entry.static.allowed and bool(conversion.captured)
        call = KeptCall(entry.name, args, kwargs, self._buffers.now(conversion), graphs_only)
        self._busy = True
        try:
            output = run()
        finally:
            self._busy = False
        if self._active:
            call.look(output, self._came)
            self._alive.add(call)
        return output

    def _came(self, call: KeptCall) -> None:
        """A backward has come to a call."""
        if self._active and call not in self._new:
            self._new.append(call)
            del self._new[:-_MOST_CALLS]

    def _taken(self) -> _Taken:
        """The step that the calls since the last one make; without any, the last one: another optimizer steps in it."""
        if self._new or self._step is None:
            self._step = _Taken(self.steps, self._new)
            self._new = []
            self.steps += 1
        return self._step

    # -- steps of the optimizer ----------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Hook of optimizers: look at the gradients, and hold the step if need be."""
        if not self._concerns(optimizer):
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._look(optimizer)
            return None

        def watched() -> Any:
            result = closure()
            self._look(optimizer)
            return result

        rest = {name: value for name, value in kwargs.items() if name != "closure"}
        return (args[0], watched, *args[2:]), rest

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Hook of optimizers: all is as before."""
        self._hold.release()
        if self._scaler is None and self._concerns(optimizer):
            self._settle()

    def _look(self, optimizer: Optimizer) -> None:
        self._hold.release()  # of a step that raised
        if self._scaler is None and hasattr(optimizer, "found_inf"):
            raise RuntimeError(
                f"a loss scaler steps this {type(optimizer).__name__}, and watch knows of none: give it, "
                "watch(model, optimizer, scaler)"
            )
        step = self._taken()
        checked = None if self._scaler is not None else self._checked(optimizer)
        numbers, outputs, gradients = self._numbers(step, [] if checked is None else [*checked.found_inf.values()])
        on_host = not reading_waits(self._home)
        found = self._found(numbers, len(outputs), gradients, on_host)
        agreed = self._agreed(found, numbers, len(outputs))
        if self._scaler is None:
            extra = [] if agreed is None else [agreed]
            self._report(step, torch.cat([numbers, *extra]) if extra else numbers, outputs, gradients, bool(extra))
        if agreed is not None:
            found = agreed[0]
        if on_host or not skips_on_device(optimizer) or makes_state(optimizer):
            if bool(found > 0) or (self._held is not None and bool(self._held)):
                self._hold.hide_gradients(optimizer)
            return
        if self._scaler is None:
            self._held = found = found if self._held is None else torch.maximum(self._held, found)
        told = getattr(optimizer, "found_inf", None)
        own = checked if getattr(optimizer, "max_norm", None) is not None else None
        self._hold.tell(optimizer, found if told is None else torch.maximum(told.view(()), found), own)

    def _checked(self, optimizer: Any) -> GradientCheck:
        """Read all gradients once; an optimizer that needs their norm need not read them again."""
        if getattr(optimizer, "max_norm", None) is not None and hasattr(optimizer, "check_gradients"):
            return optimizer.check_gradients(None)
        return check(parameters_of(optimizer), None, False, self._plans)

    def _numbers(self, step: _Taken, flags: Iterable[Tensor]) -> tuple[Tensor, list[KeptCall], int]:
        """The largest of each output, then flags of gradients, on one device; and whose the outputs are."""
        outputs = [(call, largest) for call in step.calls for largest in call.largest.values()]
        found = [flag.view(()) for flag in flags]
        here = [each.to(self._home, non_blocking=True) for each in (*(largest for _, largest in outputs), *found)]
        numbers = torch.stack(here) if here else torch.zeros(0, device=self._home)
        return (
            numbers.float() if numbers.dtype in (torch.float16, torch.bfloat16) else numbers,
            [call for call, _ in outputs],
            len(found),
        )

    def _found(self, numbers: Tensor, outputs: int, gradients: int, on_host: bool) -> Tensor:
        """1 where one of them says that the step is not finite; 0-dim FP32."""
        if not self._outputs_count:
            numbers, outputs = numbers[outputs:], 0
        if on_host:
            values = numbers.tolist()
            return torch.tensor(float(any(map(_is_bad, values[:outputs])) or any(values[outputs:])))
        key = outputs, gradients
        if key not in self._limits:
            self._limits[key] = torch.tensor([torch.inf] * outputs + [0.5] * gradients, device=self._home)
        return (numbers < self._limits[key]).logical_not().any().float()

    def _agreed(self, found: Tensor, numbers: Tensor, outputs: int) -> Tensor | None:
        """What all ranks found: 0 or 1; of an output that is not finite the rank, counted from 1. None: no ranks."""
        if self._group is None:
            return None
        bad = (numbers[:outputs] < torch.inf).logical_not().any() if outputs else torch.zeros((), device=self._home)
        mine = bad * (dist.get_rank(self._group) + 1.0)
        both = torch.stack([found, mine.to(found)])
        dist.all_reduce(both, dist.ReduceOp.MAX, group=self._group)
        return both

    def _report(
        self, step: _Taken, numbers: Tensor, outputs: list[KeptCall], gradients: int, ranks: bool = False
    ) -> None:
        scaled = self._scaler is not None
        self._unread.append(_Report(step, OnHost.of(numbers), outputs, gradients, scaled, ranks))

    def _look_at_rest(self) -> None:
        """At calls whose gradients no optimizer has taken."""
        if not self._new:
            return
        flags: list[Tensor] = []
        if self._scaler is None:
            flags = [*check(self._model.parameters(), None, False, self._plans).found_inf.values()]
        step = self._taken()
        numbers, outputs, gradients = self._numbers(step, flags)
        if self._scaler is not None:
            numbers = torch.cat([numbers, torch.ones(1, device=self._home)])
        self._report(step, numbers, outputs, gradients)

    # -- the scaler ----------------------------------------------------------------------------------------------------

    def before_update(self) -> None:
        """For the scaler: take what it found in this iteration."""
        assert self._scaler is not None
        states = scaler_states(self._scaler)
        chosen = states.values() if self._optimizer is None else [states[id(self._optimizer)]]
        flags = [flag for state in [*chosen] for flag in state["found_inf_per_device"].values()]
        if not flags:
            return
        step = self._taken()
        numbers, outputs, gradients = self._numbers(step, flags)
        scale = self._scaler._scales.first.view(1).to(numbers)
        self._report(step, torch.cat([numbers, scale]), outputs, gradients)

    def after_update(self, fallen: bool) -> str:
        """For the scaler: read what has come; at the floor all, of which it tells."""
        known = len(self.trips)
        self._settle(wait=fallen, quiet=fallen and self._on_finding == "raise", at_floor=fallen)
        return str(self.trips[-1]) if fallen and len(self.trips) > known else ""

    # -- what was found ------------------------------------------------------------------------------------------------

    def _settle(self, wait: bool = False, quiet: bool = False, at_floor: bool = False) -> None:
        """Read what has come to the host; ``wait``: all. ``quiet``: warn in the place of an error."""
        while self._unread and not self._busy:
            report = self._unread[0]
            if not report.found.done():
                if not wait and len(self._unread) <= _MOST_UNREAD:
                    return
                report.found.wait()
            del self._unread[0]
            self._judge(report, quiet, at_floor and not self._unread)

    def _judge(self, report: _Report, quiet: bool, at_floor: bool) -> None:
        values = report.found.values.tolist()
        count = len(report.outputs)
        flagged = [call for call, value in zip(report.outputs, values[:count], strict=True) if _is_bad(value)]
        flagged = [*dict.fromkeys(flagged)] if self._outputs_count else []
        by_gradients = any(values[count : count + report.gradients])
        agreed, of_rank = values[-2:] if report.ranks else (0.0, 0.0)
        if not (flagged or by_gradients or agreed):
            self._in_a_row = 0
            return
        step = report.step
        if step.tripped:  # another optimizer of the same step
            return
        scale = values[-1] if report.scaled else 1.0
        self._busy = True
        try:
            searches = report.scaled and not flagged and not at_floor
            if searches and self._scaler_goes_on(step, scale):
                return
            step.tripped = True
            trip = self._trip(step, flagged, scale, int(of_rank))
        finally:
            self._busy = False
            self._held = None if self._held is None else torch.zeros_like(self._held)
        self._in_a_row += 1
        self.trips.append(trip)
        self._tell(trip, quiet)

    def _scaler_goes_on(self, step: _Taken, scale: float) -> bool:
        """Whether it is a scale that is too large for a while: the same step is finite without one."""
        assert self._scaler is not None
        if self._scaler.get_backoff_factor() >= 1 or not step.calls:
            return False
        return all(_runs_finite(KeptStep(self._model, 1.0, call, scale)) for call in step.calls)

    def _trip(self, step: _Taken, flagged: list[KeptCall], scale: float, of_rank: int) -> Trip:
        calls, rank = step.calls, None
        if self._group is not None:
            rank = dist.get_rank(self._group)
        finding, call, why = None, None, ""
        suspects = [*flagged, *(each for each in calls if each not in flagged)]
        changed = next((name for each in suspects if (name := each.changed()) is not None), None)
        if not suspects:
            why = "the gradients are not of calls that were seen: their graphs were made before, or elsewhere"
        elif of_rank and not flagged:
            why = f"it began on rank {of_rank - 1}"
        elif self._in_a_row >= _MOST_REPLAYS:
            why = f"as the {_MOST_REPLAYS} before it; not looked into"
        else:
            for each in suspects:
                try:
                    kept = KeptStep(self._model, scale, each, scale)
                    finding = fault_of(kept, kept.watched(flushed=False))
                except RuntimeError as error:
                    why = f"the replay failed: {error}"
                if finding is not None:
                    call = calls.index(each)
                    break
        if finding is None and not why:
            why = "run again, it is finite" + (f": {changed} was written to meanwhile" if changed else "")
            if flagged and self._only_outputs(flagged):
                self._outputs_count = False
                why = "an output holds inf that is meant to be there: outputs are not looked at any more"
        remarks = [f"{changed} was written to since: the replay ran on other values"] if changed and finding else []
        if calls and (mended := calls[0].mend_buffers()):
            remarks.append(f"buffers have their values of before the step again: {', '.join(mended)}")
        return Trip(step.number, call, len(calls), rank, finding, why, tuple(remarks))

    def _only_outputs(self, flagged: list[KeptCall]) -> bool:
        """Whether nothing but the outputs is not finite, in another run."""
        steps = (KeptStep(self._model, 1.0, call, 1.0) for call in flagged)
        return all(all(bool(g.isfinite().all()) for g in step.as_it_is().gradients.values()) for step in steps)

    def _tell(self, trip: Trip, quiet: bool) -> None:
        if callable(self._on_finding):
            self._on_finding(trip)
        elif self._on_finding == "raise" and not quiet:
            raise NonFiniteError(str(trip))
        else:
            warnings.warn(str(trip), category=NonFiniteWarning, stacklevel=user_level())

    def _concerns(self, optimizer: Optimizer) -> bool:
        """Whether it is one to look at; checked at first sight."""
        if self._optimizer is not None and optimizer is not self._optimizer:
            return False
        known = self._known.get(optimizer)
        if known is None:
            own = {id(parameter) for parameter in self._model.parameters()}
            known = any(id(parameter) in own for parameter in parameters_of(optimizer))
            if known:
                self._refuse(optimizer)
            self._known[optimizer] = known
        return known

    def _refuse(self, optimizer: Optimizer) -> None:
        name = type(optimizer).__name__
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError(f"{name} moves the parameters several times a step: watch cannot skip such a step")
        waits = any(reading_waits(parameter.device) for parameter in parameters_of(optimizer))
        if waits and self._scaler is None and not (self._wait or skips_on_device(optimizer)):
            raise ValueError(
                f"{name} on CUDA cannot skip a step by itself, without the host: take one of fxprec.optim, or a fused "
                "one of torch's (AdamW(..., fused=True)); or watch(..., wait=True), by which the host waits for the "
                "gradients before each step"
            )


def _is_bad(largest: float) -> bool:
    return not largest < torch.inf


def _runs_finite(step: KeptStep) -> bool:
    try:
        return step.as_it_is().is_finite
    except RuntimeError:
        return False


def _refuse_shards(model: nn.Module) -> None:
    dtensor = dtensor_type()
    if dtensor is not None and any(isinstance(parameter, dtensor) for parameter in model.parameters()):
        raise ValueError(
            "watch runs a step again on the rank where it began, and this model's parameters are DTensors, of which "
            "all ranks hold a part: use fxprec.numerics.locate on all ranks together, or train with DDP"
        )
