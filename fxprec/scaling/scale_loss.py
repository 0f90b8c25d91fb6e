"""One loss: scale, backward, unscale, for any number of losses a step.

Each loss has a scale of its own, so its gradients must be unscaled before those of the next one are added: what is
there on entry is put aside, and added again on exit. (apex.amp's ``scale_loss`` has the same contract.)
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from fxprec.scaling.gradient_checks import GradientChecks
from fxprec.scaling.gradients import parameters_of
from fxprec.scaling.old_scale import holds_any
from fxprec.scaling.records import Records
from fxprec.scaling.refusals import claim
from fxprec.scaling.stages import ASIDE, BLOCKS, DELAYED, OPEN
from fxprec.torch_internals import foreach_add_, view_base


class _Kept(NamedTuple):
    """A gradient that was put aside: the tensor, and its values, elsewhere where a backward may write into the tensor.

    (DDP's ``gradient_as_bucket_view`` makes gradients views of the memory where it will reduce the next ones.)
    """

    parameter: Tensor
    gradient: Tensor
    values: Tensor

    @classmethod
    def of(cls, parameter: Tensor, gradient: Tensor) -> _Kept:
        return cls(parameter, gradient, gradient if view_base(gradient) is None else gradient.clone())

    def put_back(self) -> None:
        if self.values is not self.gradient:
            self.gradient.copy_(self.values)
        self.parameter.grad = self.gradient

    def add_back(self) -> None:
        """Add it to what is there now, in the tensor that was there before."""
        new = self.parameter.grad
        if new is None:
            self.put_back()
        elif new is self.gradient or (self.values is not self.gradient and new.data_ptr() == self.gradient.data_ptr()):
            new.add_(self.values)
        elif self.gradient.layout is torch.strided:
            self.put_back()
            self.gradient.add_(new)
        else:
            self.parameter.grad = new + self.gradient  # sparse: out of place, the dense one first


class _Before(NamedTuple):
    """An optimizer on entry: its stage, its gradients, and whether they are scaled, by the same loss."""

    optimizer: Optimizer
    stage: OptState
    gradients: list[_Kept]
    scaled: bool


def refuse_loss(records: Records, owners: list[Optimizer], loss_id: int) -> None:
    """Raise what ``LossScaler.scale_loss`` does before anything is scaled."""
    losses = len(records.scales.losses)
    if not 0 <= loss_id < losses:
        raise IndexError(f"loss_id={loss_id}: this scaler has {losses} losses; LossScaler(num_losses=...) makes more")
    for optimizer in owners:
        state = records.state_of(optimizer, "scale_loss")
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError(f"{type(optimizer).__name__} has stepped: scaler.update() before the next scale_loss")
        if state.get(DELAYED, loss_id) != loss_id:
            raise RuntimeError(
                f"gradients of loss {state[DELAYED]} are there, still scaled (delay_unscale=True): unscale them "
                f"before the backward of loss {loss_id}, or they cannot be told apart"
            )
        if records.scaled_outside and DELAYED not in state and state["stage"] is OptState.READY:
            # Reads from the device, where scale and scale_loss are used in one iteration only.
            if any(p.grad is not None and holds_any(p.grad) for p in parameters_of(optimizer)):
                raise RuntimeError(
                    f"{type(optimizer).__name__} has gradients, and scale() was called since the last update: they "
                    "may still be scaled. scaler.unscale_ the optimizer before scale_loss, or use scale_loss for "
                    "all its losses; or zero_grad() it"
                )


@contextmanager
def gradients_aside(
    records: Records, checks: GradientChecks, owners: list[Optimizer], loss_id: int, delay_unscale: bool
) -> Iterator[None]:
    """Around a backward of a scaled loss: gradients of earlier ones are aside, and as before if the block fails."""
    before = [_put_aside(records, owner) for owner in owners]
    try:
        yield
        if not delay_unscale:
            claimed: dict[int, weakref.ref[Optimizer]] = {}
            for owner in owners:
                checks.refuse(records, owner, claimed)
                claim(owner, claimed)
    except BaseException:
        _restore(records, before)
        raise
    for entry in before:
        state = records.state_of(entry.optimizer)
        del state[OPEN]
        state[DELAYED], state[BLOCKS] = loss_id, True
        if entry.scaled:
            add_back(entry.gradients)
        else:
            state[ASIDE] = entry.gradients


@torch.no_grad()
def add_back(kept: list[_Kept]) -> None:
    """Add gradients that were put aside to those that are there now, in the tensors that were there before.

    Plain ones in one multi-tensor addition.
    """
    plain = [k for k in kept if k.values is k.gradient and type(k.gradient) is type(k.parameter.grad) is Tensor]
    plain = [k for k in plain if k.gradient.layout is torch.strided and k.parameter.grad is not k.gradient]
    if plain:
        news = [k.parameter.grad for k in plain]
        foreach_add_([k.gradient for k in plain], news)
        for k in plain:
            k.parameter.grad = k.gradient
    done = {id(k) for k in plain}
    for k in kept:
        if id(k) not in done:
            k.add_back()


def owners_of(optimizers: Optimizer | Iterable[Optimizer]) -> list[Optimizer]:
    """Each optimizer once."""
    given = optimizers if isinstance(optimizers, Iterable) else [optimizers]
    owners = {id(owner): owner for owner in given}
    for owner in owners.values():
        if not isinstance(owner, Optimizer):
            raise TypeError(f"scale_loss takes an optimizer or a list of them, not {type(owner).__name__}")
    return [*owners.values()]


@torch.no_grad()
def _put_aside(records: Records, optimizer: Optimizer) -> _Before:
    """Gradients that are there are unscaled, or are restored if the block fails: no backward may add to them."""
    state = records.state_of(optimizer)
    gradients = [_Kept.of(p, p.grad) for p in parameters_of(optimizer) if p.grad is not None]
    for kept in gradients:
        kept.parameter.grad = None
    before = _Before(optimizer, state["stage"], gradients, DELAYED in state)
    state["stage"], state[OPEN] = OptState.READY, True
    return before


@torch.no_grad()
def _restore(records: Records, before: list[_Before]) -> None:
    """Restore the state of the entry."""
    for entry in before:
        state = records.state_of(entry.optimizer)
        state["stage"] = entry.stage
        state.pop(OPEN, None)
        for parameter in parameters_of(entry.optimizer):
            parameter.grad = None
    for entry in before:  # after all that are set to None: a parameter may be in two optimizers
        for kept in entry.gradients:
            kept.put_back()
