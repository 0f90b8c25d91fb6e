"""Scale losses; and ``scale_loss`` blocks: scale, backward, unscale, for any number of losses a step.

Each loss has a scale of its own, so its gradients must be unscaled before those of the next one are added: what is
there on entry is put aside, and added again on exit. (apex.amp's ``scale_loss`` has the same contract.)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from fxprec.scaling.gradients import parameters_of
from fxprec.scaling.optimizer_state import Block, KeptGradient, OptimizerState, Records
from fxprec.scaling.unscale import GradientChecks, claim, holds_any
from fxprec.torch_internals import foreach_add_


def scaled(outputs: Any, times_scale: Callable[[Tensor], Tensor]) -> Any:
    """Return ``outputs`` times the scale; low precision is cast to FP32 first: in float16 65536 times a loss is inf.

    Args:
        outputs: a floating-point tensor, or an iterable of them, nested or not. Lists, tuples and namedtuples come back
            as what they were, other iterables as an iterator (as torch's scaler does).
        times_scale: a tensor -> its product with the scale.

    Raises:
        TypeError: anything else.
    """
    if isinstance(outputs, Tensor):
        if not (outputs.is_floating_point() or outputs.is_complex()):
            raise TypeError(f"a loss of {outputs.dtype} has no gradient: scale floating-point tensors")
        return times_scale(outputs.float() if outputs.dtype.itemsize < 4 else outputs)
    if isinstance(outputs, (str, bytes, Mapping)) or not isinstance(outputs, Iterable):
        raise TypeError(f"outputs must be a Tensor or an iterable of Tensors, not {type(outputs).__name__}")
    parts = (scaled(part, times_scale) for part in outputs)
    if isinstance(outputs, (list, tuple)):
        return type(outputs)(*parts) if hasattr(outputs, "_fields") else type(outputs)(parts)
    return parts


def refuse_loss(records: Records, owners: list[Optimizer], loss_id: int) -> None:
    """Raise what ``LossScaler.scale_loss`` does before anything is scaled."""
    losses = len(records.scales.losses)
    if not 0 <= loss_id < losses:
        raise IndexError(f"loss_id={loss_id}: this scaler has {losses} losses; LossScaler(num_losses=...) makes more")
    # Gradients that are there must be unscaled, or scaled by the same loss, before others are added to them.
    for optimizer in owners:
        state = records.state_of(optimizer, "scale_loss")
        if state.stage is OptState.STEPPED:
            raise RuntimeError(f"{type(optimizer).__name__} has stepped: scaler.update() before the next scale_loss")
        if state.delayed not in (None, loss_id):
            raise RuntimeError(
                f"gradients of loss {state.delayed} are there, still scaled (delay_unscale=True): unscale them "
                f"before the backward of loss {loss_id}, or they cannot be told apart"
            )
        if records.scaled_outside and state.delayed is None and state.stage is OptState.READY:
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
    """Put gradients of earlier losses aside for a backward in the block; all is as before if the block fails."""
    before = [(owner, *_put_aside(records, owner)) for owner in owners]
    try:
        yield
        # What unscaling would refuse is refused here, where all can still be restored.
        if not delay_unscale:
            claimed: dict[int, weakref.ref[Optimizer]] = {}
            for owner in owners:
                checks.refuse(records.spoiled, owner, claimed)
                claim(owner, claimed)
    except BaseException:
        _restore(records, before)
        raise
    for owner, was, gradients in before:
        state = records.state_of(owner)
        # Gradients of the same loss that were still scaled may be added at once: they have its scale.
        if was.delayed is not None:
            add_back(gradients)
        else:
            state.aside = gradients
        state.block, state.delayed = Block.CLOSED, loss_id


@torch.no_grad()
def add_back(kept: list[KeptGradient]) -> None:
    """Add gradients that were put aside to those that are there now, in the tensors that were there before.

    Plain ones in one multi-tensor addition.
    """
    # Sparse gradients, DTensors and buckets of DDP go one by one.
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
    """Return each optimizer once."""
    given = optimizers if isinstance(optimizers, Iterable) else [optimizers]
    owners = {id(owner): owner for owner in given}
    for owner in owners.values():
        if not isinstance(owner, Optimizer):
            raise TypeError(f"scale_loss takes an optimizer or a list of them, not {type(owner).__name__}")
    return [*owners.values()]


@torch.no_grad()
def _put_aside(records: Records, optimizer: Optimizer) -> tuple[OptimizerState, list[KeptGradient]]:
    """Open a block, and take away the gradients, so that no backward adds to them; return state and gradients before.

    Gradients that are there are unscaled, or are restored if the block fails.
    """
    state = records.state_of(optimizer)
    gradients = [KeptGradient.of(p, p.grad) for p in parameters_of(optimizer) if p.grad is not None]
    for kept in gradients:
        kept.parameter.grad = None
    before = replace(state)
    state.stage, state.block = OptState.READY, Block.OPEN
    return before, gradients


@torch.no_grad()
def _restore(records: Records, before: list[tuple[Optimizer, OptimizerState, list[KeptGradient]]]) -> None:
    """Restore states and gradients of the entry."""
    for owner, was, _ in before:
        records.states[id(owner)] = was
        for parameter in parameters_of(owner):
            parameter.grad = None
    # After all are set to None: a parameter may be in two optimizers.
    for _, _, gradients in before:
        for kept in gradients:
            kept.put_back()
