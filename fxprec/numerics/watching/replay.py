"""Replay a step that was not finite, from what was kept of its calls."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import nn
from torch.optim import Optimizer

from fxprec.numerics.births import is_finite
from fxprec.numerics.finding import Trip
from fxprec.numerics.locate import fault_of
from fxprec.numerics.watching.kept_call import KeptCall, KeptStep


@dataclass(slots=True)
class WatchedStep:
    """Step of a training loop, with the calls that its gradients came from.

    Attributes:
        number: how many there were before.
        calls: of the model, those that its gradients came from.
        skipped: it is, if it is not finite: an optimizer has asked.
        tripped: it was told of.
        optimizers: those that have stepped in it.
        again: of a captured step, which has no calls: runs it without its graph, at a loss scale, and calls come.
        recorded: how many a graph has.
        unseen: why there are no calls.
    """

    number: int
    calls: list[KeptCall]
    skipped: bool = False
    tripped: bool = False
    optimizers: list[weakref.ref[Optimizer]] = field(default_factory=list)
    again: Callable[[float], None] | None = None
    recorded: int = 0
    unseen: str = "its gradients are not of calls that were seen (made before, or by torch.autograd.grad?)"

    @property
    def count(self) -> int:
        """Number of calls."""
        return len(self.calls) or self.recorded


def is_finite_unscaled(model: nn.Module, step: WatchedStep, scale: float) -> bool:
    """Return whether the same step is finite without the loss scale that its gradients have."""
    steps = [KeptStep(model, 1.0, call, scale) for call in step.calls]
    try:
        for call in step.calls:
            call.keep_what_came_from_outside(model)
        return bool(steps) and all(each.as_it_is().is_finite for each in steps)
    except Exception:  # of the user's code, which is not to end a training
        return False


def outputs_alone(model: nn.Module, flagged: Sequence[KeptCall]) -> bool:
    """Return whether these calls have infinite outputs again when replayed, and no gradient is touched by that."""
    if not all(is_finite(each) for call in flagged for gradients in call.gradients.values() for each in gradients):
        return False
    try:
        for call in flagged:
            call.keep_what_came_from_outside(model)
        runs = [KeptStep(model, 1.0, call, 1.0).as_it_is() for call in flagged]
    except Exception:  # as above
        return False
    return all(not run.is_finite and all(map(is_finite, run.gradients.values())) for run in runs)


def trip_of(
    model: nn.Module, step: WatchedStep, flagged: Sequence[KeptCall], scale: float, rank: int | None, elsewhere: str
) -> Trip:
    """Run the calls of a step again, one by one, until one shows where it began; ``flagged`` ones first.

    Buffers that became inf or nan get their values of before the step.

    Args:
        model: converted; its parameters as they were in the step.
        step: that was not finite.
        flagged: calls whose outputs were not.
        scale: the loss scale of its gradients.
        rank: of this process.
        elsewhere: ranks that it may have begun on, in words; "" where there are none, or they will tell.
    """
    suspects = [*flagged, *(call for call in step.calls if call not in flagged)]
    changed = next((name for call in suspects if (name := call.changed()) is not None), None)
    finding, began, why = None, None, ""
    # What fails without a loss scale is no question of the scale.
    for call, at in itertools.product(suspects, dict.fromkeys((1.0, scale))):
        kept = KeptStep(model, at, call, scale)
        try:
            call.keep_what_came_from_outside(model)
            finding = fault_of(kept, kept.watched(flushed=False))
        except Exception as error:
            why = f"the replay failed: {error}"
        if finding is not None:
            began, why = step.calls.index(call), ""
            break
    written = f"{changed} was written to since" if changed else ""
    if not suspects:
        why = step.unseen
    elif finding is None and not why:
        changes = "does something in it change from run to run?"
        if elsewhere:
            changes = f"it began on {elsewhere}, or something in it changes from run to run"
        why = f"run again, it is finite; {written or changes}"
    remarks = [f"{written}: the replay ran on other values"] if changed and finding else []
    if suspects and (mended := step.calls[0].mend_buffers()):
        remarks.append(f"buffers have their values of before the step again: {', '.join(mended)}")
    return Trip(step.number, began, step.count, rank, finding, why, step.skipped, tuple(remarks))
