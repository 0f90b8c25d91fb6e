"""One loss: scale, backward, unscale, for any number of losses a step.

Each loss has a scale of its own, so its gradients must be unscaled before those of the next one are added: what is
there on entry is put aside, and added again on exit. (apex.amp's ``scale_loss`` has the same contract.)
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from fxprec.scaling.gradient_checks import GradientChecks
from fxprec.scaling.gradients import parameters_of
from fxprec.scaling.refusals import claim
from fxprec.scaling.stages import ASIDE, BLOCKS, DELAYED, OPEN
from fxprec.torch_internals import foreach_add_, is_view

__all__ = ["add_back", "scaled_loss"]


class _Kept(NamedTuple):
    """A gradient that was put aside: the tensor, and its values, elsewhere where a backward may write into the tensor.

    (DDP's ``gradient_as_bucket_view`` makes gradients views of the memory where it will reduce the next ones.)
    """

    parameter: Tensor
    gradient: Tensor
    values: Tensor

    @classmethod
    def of(cls, parameter: Tensor, gradient: Tensor) -> _Kept:
        return cls(parameter, gradient, gradient.clone() if is_view(gradient) else gradient)

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


@contextmanager
def scaled_loss(
    scaler: GradientChecks, loss: Tensor, optimizers: Optimizer | Iterable[Optimizer], loss_id: int, delay_unscale: bool
) -> Iterator[Any]:
    """The context; see ``LossScaler.scale_loss``."""
    owners = _owners(optimizers)
    scaled = scaler._scaled_for(loss_id, loss, owners)
    before = [_put_aside(scaler, owner) for owner in owners]
    try:
        yield scaled
        if not delay_unscale:
            claimed: dict[int, weakref.ref[Optimizer]] = {}
            for owner in owners:
                scaler._refuse(owner, claimed)
                claim(owner, claimed)
    except BaseException:
        _restore(scaler, before)
        raise
    for entry in before:
        state = scaler._state_of(entry.optimizer)
        del state[OPEN]
        state[DELAYED], state[BLOCKS] = loss_id, True
        if entry.scaled:
            add_back(entry.gradients)
        else:
            state[ASIDE] = entry.gradients
    for owner in () if delay_unscale else owners:
        scaler.unscale_(owner)


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


def _owners(optimizers: Optimizer | Iterable[Optimizer]) -> list[Optimizer]:
    """Each optimizer once."""
    given = optimizers if isinstance(optimizers, Iterable) else [optimizers]
    owners = {id(owner): owner for owner in given}
    for owner in owners.values():
        if not isinstance(owner, Optimizer):
            raise TypeError(f"scale_loss takes an optimizer or a list of them, not {type(owner).__name__}")
    return [*owners.values()]


@torch.no_grad()
def _put_aside(scaler: GradientChecks, optimizer: Optimizer) -> _Before:
    """Gradients that are there are unscaled, or are restored if the block fails: no backward may add to them."""
    state = scaler._state_of(optimizer)
    gradients = [_Kept.of(p, p.grad) for p in parameters_of(optimizer) if p.grad is not None]
    for kept in gradients:
        kept.parameter.grad = None
    before = _Before(optimizer, state["stage"], gradients, DELAYED in state)
    state["stage"], state[OPEN] = OptState.READY, True
    return before


@torch.no_grad()
def _restore(scaler: GradientChecks, before: list[_Before]) -> None:
    """As on entry."""
    for entry in before:
        state = scaler._state_of(entry.optimizer)
        state["stage"] = entry.stage
        state.pop(OPEN, None)
        for parameter in parameters_of(entry.optimizer):
            parameter.grad = None
    for entry in before:  # after all that are set to None: a parameter may be in two optimizers
        for kept in entry.gradients:
            kept.put_back()
