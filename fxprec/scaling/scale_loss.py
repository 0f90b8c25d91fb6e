"""``with scaler.scale_loss(loss, optimizer)``: scale, backward, unscale, for any number of losses a step.

Each loss has a scale of its own, so its gradients must be unscaled before those of the next one are added: what is
there on entry is put aside, and added again on exit. (apex.amp's ``scale_loss`` has the same contract.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from fxprec.scaling.gradients import parameters_of

if TYPE_CHECKING:
    from fxprec.loss_scaler import LossScaler

__all__ = ["add_back", "scaled_loss"]

#: Keys in the scaler's state of an optimizer: parameters and gradients put aside, and the loss of a delayed unscale.
ASIDE, DELAYED = "aside", "delayed"


class _Before(NamedTuple):
    """An optimizer on entry: its stage, and the gradients that were put aside; None: they may be added to."""

    stage: OptState
    gradients: list[tuple[Tensor, Tensor]] | None


@contextmanager
def scaled_loss(
    scaler: LossScaler, loss: Tensor, optimizers: Optimizer | Iterable[Optimizer], loss_id: int, delay_unscale: bool
) -> Iterator[Any]:
    """The context; see ``LossScaler.scale_loss``."""
    owners = [optimizers] if isinstance(optimizers, Optimizer) else [*optimizers]
    for owner in owners:
        if not isinstance(owner, Optimizer):
            raise TypeError(f"scale_loss takes an optimizer or a list of them, not {type(owner).__name__}")
    scaled = scaler._scaled_for(loss_id, loss, owners)
    before = [_put_aside(scaler, owner) for owner in owners]
    try:
        yield scaled
    except BaseException:
        for owner, state in zip(owners, before, strict=True):
            _restore(scaler, owner, state)
        raise
    for owner in owners:
        state = scaler._per_optimizer_states[id(owner)]
        state[DELAYED] = loss_id
        if not delay_unscale:
            scaler.unscale_(owner)


def add_back(state: dict[str, Any]) -> None:
    """Add the gradients that were put aside to those that were unscaled meanwhile, in the tensors that were there."""
    with torch.no_grad():
        for parameter, gradient in state.pop(ASIDE, []):
            if parameter.grad is not None:
                gradient = (
                    gradient.add_(parameter.grad) if gradient.layout is torch.strided else gradient + parameter.grad
                )
            parameter.grad = gradient


def _put_aside(scaler: LossScaler, optimizer: Optimizer) -> _Before:
    """Gradients that are scaled by the same loss stay; all others are unscaled, and no backward may add to them."""
    state = scaler._per_optimizer_states[id(optimizer)]
    before = _Before(state["stage"], None)
    if DELAYED not in state:
        before = _Before(state["stage"], [(p, p.grad) for p in parameters_of(optimizer) if p.grad is not None])
        for parameter, _ in before.gradients or []:
            parameter.grad = None
        state[ASIDE] = before.gradients
    state["stage"] = OptState.READY
    return before


def _restore(scaler: LossScaler, optimizer: Optimizer, before: _Before) -> None:
    """As on entry. (What a delayed loss's failed backward added went into gradients that were there: it stays.)"""
    state = scaler._per_optimizer_states[id(optimizer)]
    state["stage"] = before.stage
    if before.gradients is None:
        return
    state.pop(ASIDE, None)
    for parameter in parameters_of(optimizer):
        parameter.grad = None
    for parameter, gradient in before.gradients:
        parameter.grad = gradient
