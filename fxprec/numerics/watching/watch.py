"""Watch a training loop: a step that is not finite is skipped, and is run again to find where that began."""

from __future__ import annotations

import contextlib
import itertools
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fxprec.capture.user_code import user_level
from fxprec.errors import CaptureError, NonFiniteError, NonFiniteWarning
from fxprec.host_reads import OnHost, capturing, reading_waits
from fxprec.model.conversion import Conversion, conversion_of
from fxprec.model.entry_point import EntryPoint
from fxprec.model.warm_up import kept
from fxprec.numerics.locate import Finding, Trip
from fxprec.numerics.problem import Problem
from fxprec.numerics.watching.calls import (
    KeptCall,
    Recording,
    SeenCall,
    StepReport,
    WatchedStep,
    WrittenBuffers,
    is_finite_unscaled,
    outputs_alone,
    trip_of,
)
from fxprec.numerics.watching.verdicts import Hold, Numbers, Verdicts, is_scaled, skips_on_device
from fxprec.numerics.watching.weight_writes import WeightWrites
from fxprec.optim.gradient_check import GradientCheck, check
from fxprec.optim.kernel_updates import Plans
from fxprec.scaling.gradients import dtensor_type, parameters_of
from fxprec.scaling.loss_scaler import LossScaler
from fxprec.scaling.skips import makes_state
from fxprec.shadows.entry import is_traced
from fxprec.torch_internals import current_autograd_node, running_ddp

#: Of steps that are not finite one after another, so many are run again: each takes as long as many steps.
_MOST_REPLAYS: Final = 3
#: Calls of a step that are kept; of more (nobody steps an optimizer?) the oldest go.
_MOST_CALLS: Final = 256

_C = TypeVar("_C", bound=SeenCall)
OnFinding = Literal["warn", "raise"] | Callable[[Trip], object]


def watch(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    scaler: LossScaler | None = None,
    *,
    on_finding: OnFinding = "warn",
    wait: bool = False,
) -> Watcher:
    """Watch a training loop: what is not finite is found where it begins, and the step is skipped.

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
    or nan get their values of before. Weights are read when this begins and when it ends: one that an optimizer's step
    makes inf or nan shows in the next step, which tells the optimizer, its step, and the state that it divided by.

    Steps of ``capture_step`` hold the same work in their graph; one that was not finite runs again without it.

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


class Watcher:
    """Context of ``watch``, whose arguments these are.

    Attributes:
        trips: of the steps that were not finite, in their order.
        steps: how many were watched.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer | None, scaler: LossScaler | None, on_finding: OnFinding,
        wait: bool,
    ) -> None:  # fmt: skip
        Problem.of(model, None, "watch")
        if scaler is not None and not isinstance(scaler, LossScaler):
            raise TypeError(f"scaler must be a fxprec.LossScaler or None, not a {type(scaler).__name__}")
        if on_finding not in ("warn", "raise") and not callable(on_finding):
            raise TypeError(f"on_finding is {on_finding!r}: give 'warn', 'raise' or a function of a Trip")
        if optimizer is not None and not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer or None, not a {type(optimizer).__name__}")
        dtensor = dtensor_type()
        if dtensor is not None and any(isinstance(parameter, dtensor) for parameter in model.parameters()):
            raise ValueError(
                "watch runs a step again on the rank where it began, and this model's parameters are DTensors, of "
                "which all ranks hold a part: use fxprec.numerics.locate on all ranks together, or train with DDP"
            )
        self.trips: list[Trip] = []
        self.steps = 0
        self._model, self._optimizer, self._on_finding, self._wait = model, optimizer, on_finding, wait
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._verdicts, self._hold, self._plans = Verdicts(self._device), Hold(), Plans()
        self._buffers = WrittenBuffers(model)
        self._known: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
        self._alive: weakref.WeakSet[SeenCall] = weakref.WeakSet()
        self._stack = contextlib.ExitStack()
        self._busy = self._armed = False
        self._outputs_count = True
        self._in_a_row = 0
        self._numbers_of_calls = itertools.count()
        self._new: list[KeptCall] = []
        self._step: WatchedStep | None = None
        self._unread: list[StepReport] = []
        self._recording: Recording | None = None
        self._held = torch.zeros((), device=self._device)  # on CUDA: 1 from a fault on until the host has heard of it
        if optimizer is not None and not self._concerns(optimizer):
            raise ValueError(
                f"none of the parameters of this {type(optimizer).__name__} belongs to the model: was it made for "
                "another copy, or before model.to(), which may replace them?"
            )

    # -- the context ---------------------------------------------------------------------------------------------------

    def __enter__(self) -> Watcher:
        conversion = conversion_of(self._model)
        if conversion.watcher is not None:
            raise RuntimeError(
                f"{conversion.name} is watched already: one watch(...) around the loop sees all its steps"
            )
        with contextlib.ExitStack() as stack:
            conversion.watcher = self
            stack.callback(self._disarm, conversion)
            if self._optimizer is None:
                hooks = (register_optimizer_step_pre_hook, register_optimizer_step_post_hook)
            else:
                hooks = (self._optimizer.register_step_pre_hook, self._optimizer.register_step_post_hook)
            for register, hook in zip(hooks, (self._before_step, self._after_step), strict=True):
                stack.callback(register(hook).remove)
            if self._scaler is not None:
                self._scaler._observers.append(self)
                stack.callback(self._scaler._observers.remove, self)
            self._writes = WeightWrites(self._model, self.steps)
            self._stack, self._armed = stack.pop_all(), True
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._stack:
            if kind is None or issubclass(kind, Exception):
                self._look_at_rest()
                self._settle(wait=True, quiet=kind is not None)  # another error must not hide behind this
                self._look_at_weights(quiet=kind is not None)

    def _disarm(self, conversion: Conversion) -> None:
        self._armed = False
        conversion.watcher = None
        self._hold.release()
        for call in self._alive:
            call.let_go()
        self._new.clear()
        self._unread.clear()
        self._step = None
        self._held.zero_()

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Findings of the trips that have one."""
        return tuple(trip.finding for trip in self.trips if trip.finding is not None)

    def check(self) -> tuple[Trip, ...]:
        """Return all trips that are known by now, after waiting for the device.

        Gradients that no optimizer has taken yet are looked at, and so are the weights that the last one wrote.

        Returns:
            All trips.

        Raises:
            NonFiniteError: with ``on_finding="raise"``, of a step that nobody has heard of.
        """
        self._look_at_rest()
        self._settle(wait=True)
        self._look_at_weights()
        return tuple(self.trips)

    # -- calls of the model --------------------------------------------------------------------------------------------

    def call(self, entry: EntryPoint, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[[], Any]) -> Any:
        """Run a call, and keep what a replay of it takes."""
        if self._busy or is_traced():
            return run()
        # Calls are told apart by number: a backward comes to them in another order.
        number = next(self._numbers_of_calls)
        if self._recording is not None:
            return self._ran(SeenCall(number), self._recording.came, run)
        if capturing(self._device):
            raise CaptureError(
                "a CUDA graph of a model that is watched: its replays run unseen. Take fxprec.capture_step, which is "
                "watched, or leave watch before"
            )
        if not self._asks_ranks:
            self._settle()
        # A step that nobody has to report on holds gradients of outputs, which take memory.
        if not self._unread:
            self._step = None  # whose gradients of outputs take memory
        if (ddp := running_ddp()) is not None and ddp.process_group.size() > 1:
            self._verdicts.group = ddp.process_group
        conversion = conversion_of(self._model)
        draws_from_torch = entry.static.allowed and bool(conversion.captured)
        call = KeptCall(number, entry.name, args, kwargs, self._buffers.now(conversion), draws_from_torch)
        return self._ran(call, self._came, run)

    def _ran(self, call: _C, came: Callable[[_C], object], run: Callable[[], Any]) -> Any:
        """Run a call, and look at its outputs."""
        self._busy = True
        try:
            output = run()
        finally:
            self._busy = False
        call.look(output, came)
        self._alive.add(call)
        return output

    def _came(self, call: KeptCall) -> None:
        """Note a call that a backward has come to."""
        if self._armed and not self._busy and call not in self._new:
            self._new.append(call)
            del self._new[:-_MOST_CALLS]

    def _current_step(self) -> WatchedStep:
        """Return the training step that is taken now. Two optimizers that step on the same backward share one."""
        if self._new or self._step is None:
            # A backward comes to the last of several calls first.
            self._step, self._new = WatchedStep(self.steps, sorted(self._new, key=lambda call: call.number)), []
            self.steps += 1
            self._writes.before(self._step.number)
        return self._step

    # -- steps of optimizers -------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Look at the gradients before an optimizer's step, and hold it if need be. ``args[0]`` is the optimizer."""
        if not self._concerns(optimizer):
            return None
        given = [*args]
        closure = given[1] if len(given) > 1 else kwargs.get("closure")
        if closure is None:
            self._look(optimizer)
            return None

        # With a closure the gradients come within the step: that is when they are looked at.
        def watched() -> Any:
            result = closure()
            self._look(optimizer)
            return result

        given[1:2] = [watched]
        return tuple(given), {name: value for name, value in kwargs.items() if name != "closure"}

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Release the hold after an optimizer's step."""
        self._hold.release()
        if not self._concerns(optimizer):
            return
        self._writes.after()
        if self._step is not None:
            self._step.optimizers.append(weakref.ref(optimizer))
        if self._scaler is None:
            self._settle(together=self._asks_ranks)

    def _look(self, optimizer: Any) -> None:
        self._hold.release()  # after a step that raised
        if self._scaler is None and is_scaled(optimizer):
            raise RuntimeError(
                f"a loss scaler steps this {type(optimizer).__name__}, and watch knows of none: give it, "
                "watch(model, optimizer, scaler)"
            )
        calls = self._calls_taken()
        # An optimizer that needs the norm of its gradients need not read them again.
        clips = getattr(optimizer, "max_norm", None) is not None
        checked: GradientCheck | None = None
        if self._scaler is None and clips and hasattr(optimizer, "check_gradients"):
            checked = optimizer.check_gradients(None)
        elif self._scaler is None:
            checked = check(parameters_of(optimizer), None, False, self._plans)
        numbers = self._numbers(calls, [] if checked is None else [*checked.found_inf.values()])
        found = self._verdicts.found(numbers)
        agreed = self._verdicts.agreed(numbers, found)
        if self._scaler is None:
            self._report(numbers, ranks=agreed)
        found = found if agreed is None else agreed[0]
        # On CUDA the device decides: the flag is added to those of earlier steps that the host has not heard of.
        unread = reading_waits(self._device) or self._recording is not None
        if unread and self._scaler is None:
            found = torch.maximum(self._held, found)
            self._held.copy_(found)
        if unread and skips_on_device(optimizer) and not makes_state(optimizer):
            self._hold.tell(optimizer, found, checked if clips else None)
        elif self._recording is None and bool(found):  # warm-ups make the state, and are undone
            self._hold.hide_gradients(optimizer)

    def _calls_taken(self) -> Sequence[SeenCall]:
        """Return the calls of the step that an optimizer takes now."""
        if self._recording is not None:
            return self._recording.calls
        step = self._current_step()
        step.skipped = True
        return step.calls

    def _numbers(self, calls: Iterable[SeenCall], flags: Iterable[Tensor]) -> Numbers:
        """Gather the numbers of a step."""
        outputs = [largest for call in calls for largest in call.largest.values()] if self._outputs_count else []
        return Numbers.of(outputs, flags, self._device)

    def _report(self, numbers: Numbers, *, ranks: Tensor | None = None, scale: Tensor | None = None) -> None:
        """Report on the step that was taken last, or is recorded."""
        numbers = numbers.and_more(ranks, scale)
        if self._recording is not None:
            self._recording.seen = numbers
        else:
            assert self._step is not None
            self._unread.append(StepReport(self._step, numbers, OnHost.of(numbers.values)))

    def _look_at_rest(self) -> None:
        """Look at calls whose gradients no optimizer has taken."""
        if self._new:
            checked = check(self._model.parameters(), None, False, self._plans) if self._scaler is None else None
            flags = [] if checked is None else [*checked.found_inf.values()]
            self._report(self._numbers(self._current_step().calls, flags))

    def _look_at_weights(self, quiet: bool = False) -> None:
        """Look at weights that the last step wrote, which no call has read yet."""
        bad = next(self._writes.newly_bad(), None) if self._armed and not self._in_a_row else None
        # Only an optimizer's write is news: other code's is the user's own doing, and may be meant.
        found = None if bad is None else self._writes.explained(bad[0], "")
        if isinstance(found, Finding) and found.step is not None and str(found) not in map(str, self.findings):
            self.trips.append(Trip(found.step, None, 0, self._verdicts.rank, found))
            self._tell(self.trips[-1], quiet)

    # -- the scaler ----------------------------------------------------------------------------------------------------

    def before_update(self) -> None:
        """Take what the scaler found in this iteration."""
        assert self._scaler is not None
        flags = [flag for optimizer, found in self._scaler._found_in() if self._concerns(optimizer) for flag in found]
        if flags:
            self._report(self._numbers(self._calls_taken(), flags), scale=self._scaler._scales.first)

    def after_update(self, fallen: bool) -> str:
        """Read what has come, for the scaler; where the scale came to its floor read all, and tell of it."""
        known = len(self.trips)
        self._settle(wait=fallen, quiet=fallen, at_floor=fallen)
        return str(self.trips[-1]) if len(self.trips) > known else ""

    # -- captured steps ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Keep other calls out of the step meanwhile; see ``fxprec.model.entry_point``, as for what follows."""
        before, held = (self._new, self._step, self._unread, self._busy), self._held.clone()
        self._new, self._step, self._unread, self._busy = [], None, [], False
        self._writes.before(self.steps)
        try:
            yield
        finally:
            self._new, self._step, self._unread, self._busy = before
            self._held.copy_(held)
            self._writes.after()

    @contextlib.contextmanager
    def recording(self) -> Iterator[object]:
        self._recording = recording = Recording()
        try:
            yield recording
        finally:
            self._recording = None
            self._hold.release()
            recording.tables = self._plans.kept()
            recording.calls.clear()

    def fixed(self) -> Hashable:
        return self, self._outputs_count

    def begin(self) -> None:
        self._settle()
        self._step = None

    def written(self) -> Iterable[Tensor]:
        return self._buffers.now(conversion_of(self._model)).values()

    def replayed(self, recording: object, optimizer: Optimizer, again: Callable[[float], None]) -> None:
        assert isinstance(recording, Recording)
        if recording.seen is None:  # another optimizer's
            return
        own = weakref.ref(optimizer)
        step = WatchedStep(self.steps, [], skipped=True, optimizers=[own], again=again, recorded=recording.count)
        self.steps += 1
        self._writes.before(step.number)
        self._writes.after()
        self._unread.append(StepReport(step, recording.seen, OnHost.of(recording.seen.values)))
        if self._scaler is None:  # else it tells when
            self._settle()

    def _run_again(self, step: WatchedStep, again: Callable[[float], None], scale: float) -> None:
        """Run a captured step without its graph, and keep its calls, with their backward."""
        try:
            with kept(self._model), self.aside():
                again(scale)
                step.calls = sorted(self._new, key=lambda call: call.number)
        except Exception as error:  # of the user's code, which is not to end a training
            step.unseen = f"the replay failed: {error}"

    # -- what was found ------------------------------------------------------------------------------------------------

    @property
    def _asks_ranks(self) -> bool:
        """Flag of ranks that ask each other where a step began: then all of them read after the same step."""
        return self._verdicts.group is not None and self._scaler is None

    def _settle(self, wait: bool = False, quiet: bool = False, at_floor: bool = False, together: bool = False) -> None:
        """Read reports that have come to the host, and tell of bad steps.

        Not within a backward (where a hook steps an optimizer): a replay writes buffers, which that may still read.

        Args:
            wait: read all of it.
            quiet: warn where an error is asked for.
            at_floor: the loss scale came to its floor.
            together: all ranks are here.
        """
        while self._unread and not self._busy and current_autograd_node() is None:
            report = self._unread[0]
            came = report.found.done()
            by_chance = together and reading_waits(self._device)  # so not on each rank
            if not wait and report.step is self._unread[-1].step and (by_chance or not came):
                return
            if not came:
                report.found.wait()  # for a step that is over, while the next one runs
            del self._unread[0]
            self._busy = True
            try:
                trip = self._judged(report, at_floor and not self._unread, together)
            finally:
                self._busy = False
            if trip is not None:
                self._tell(trip, quiet)

    def _judged(self, report: StepReport, at_floor: bool, together: bool) -> Trip | None:
        step, numbers = report.step, report.numbers()
        bad_outputs = any(numbers.bad_outputs())
        *_, last_but_one, last = [0.0, 0.0, *numbers.values.tolist()]
        somewhere, of_rank = (last_but_one, int(last)) if numbers.ranks else (0.0, 0)
        if not (bad_outputs or numbers.bad_gradients() or somewhere):
            self._in_a_row = 0
            self._writes.ran(step.optimizers, step.number)
            return None
        self._held.zero_()
        if step.tripped:  # told of, by another optimizer of the same step
            return None
        scale = last if numbers.scaled else 1.0
        # A model that fails at every step would spend the rest of the run in replays.
        enough = self._in_a_row >= _MOST_REPLAYS and not at_floor
        if step.again is not None and not (enough and self._scaler is None):
            self._run_again(step, step.again, scale)
        flagged = [call for call in step.calls if bad_outputs and call.had_bad_outputs]
        # A scaler that can fall deals with overflows of the scale itself: they are no findings.
        if self._scaler is not None and self._scaler.get_backoff_factor() < 1 and not (flagged or at_floor):
            if is_finite_unscaled(self._model, step, scale):
                return None
        step.tripped = True
        self._in_a_row += 1
        rank = self._verdicts.rank
        elsewhere = f"it began on rank {of_rank - 1}" if of_rank and not flagged else ""
        if elsewhere or enough:
            why = elsewhere or f"as were the {_MOST_REPLAYS} before it; not run again"
            trip = Trip(step.number, None, step.count, rank, None, why, step.skipped)
        else:
            asks = together and numbers.ranks and not of_rank
            trip = trip_of(self._model, step, flagged, scale, rank, "" if asks else self._verdicts.elsewhere())
            began = self._verdicts.began(trip.finding is not None) if asks else None
            if trip.finding is None and began is not None:
                trip = replace(trip, why=f"it began on rank {began}")
            # Outputs that are infinite by design would trip every step.
            if flagged and trip.finding is None and outputs_alone(self._model, flagged):
                self._outputs_count = False
                why = "an output holds inf that is meant to be there: outputs are not looked at any more"
                trip = replace(trip, why=why)
        if (came := trip.finding) is not None and (came.phase, came.kind) == ("weight", "came in"):
            writer = self._writes.explained(came.node, came.reached)
            trip = replace(trip, finding=writer if isinstance(writer, Finding) else replace(came, cure=writer))
        self.trips.append(trip)
        return trip

    def _tell(self, trip: Trip, quiet: bool) -> None:
        if callable(self._on_finding):
            self._on_finding(trip)
        elif self._on_finding == "raise" and not quiet:
            raise NonFiniteError(str(trip))
        else:
            warnings.warn(str(trip), category=NonFiniteWarning, stacklevel=user_level())

    def _concerns(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer is one to look at; it is checked at first sight."""
        if self._optimizer is not None and optimizer is not self._optimizer:
            return False
        known = self._known.get(optimizer)
        if known is None:
            own = {id(parameter) for parameter in self._model.parameters()}
            # Asked once for each optimizer: a walk through all parameters at each step would take long.
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
