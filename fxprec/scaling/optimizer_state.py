"""Keep what a scaler knows of each optimizer between two updates, and put gradients aside in ``scale_loss`` blocks.

    READY --unscale_--> UNSCALED --step--> STEPPED --update--> READY        stage, as torch's scaler has it
    NONE --scale_loss--> OPEN --exit--> CLOSED --update--> NONE             block
                              delayed: the exit left gradients of a loss scaled, until the next block of it or ``step``

Each loss has a scale of its own, so its gradients must be unscaled before those of the next one are added: what is
there when a block is entered is put aside, and added again on exit. (apex.amp's ``scale_loss`` has the same contract.)

A checkpoint within an accumulation by ``scale_loss`` adds how each optimizer's gradients stand. The gradients
themselves are the user's to save. After loading, an optimizer takes up the first entry that was made with as many
parameters and elements, provided that it has gradients by then: else the iteration is a new one.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from fxprec.errors import LossScaleError
from fxprec.scaling.gradients import parameters_of
from fxprec.scaling.scale import FloorWatch, LossScale, Scales
from fxprec.scaling.skips import Skips, combined_flag
from fxprec.scaling.unscale import Flags, GradientChecks, SpoiledGradients, claim, holds_any
from fxprec.torch_internals import foreach_add_, view_base


class Block(Enum):
    """Progress of ``scale_loss`` blocks on an optimizer since the last update."""

    #: There was none.
    NONE = 0
    #: One is open: gradients of its loss may be there, scaled.
    OPEN = 1
    #: The last one was left; there may be others.
    CLOSED = 2


class KeptGradient(NamedTuple):
    """Gradient that was put aside.

    Attributes:
        parameter, gradient: the tensors.
        values: the gradient, or a copy of it where a backward may write into the tensor. (DDP's
            ``gradient_as_bucket_view`` makes gradients views of the memory where it will reduce the next ones.)
    """

    parameter: Tensor
    gradient: Tensor
    values: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, parameter: Tensor, gradient: Tensor) -> KeptGradient:
        return cls(parameter, gradient, gradient if view_base(gradient) is None else gradient.clone())

    @torch.no_grad()
    def put_back(self) -> None:
        """Make it the parameter's gradient again."""
        if self.values is not self.gradient:
            self.gradient.copy_(self.values)
        self.parameter.grad = self.gradient

    def add_back(self) -> None:
        """Add it to what is there now, in the tensor that was there before."""
        # The tensor of before stays the gradient where it can: it may be a view of a bucket of DDP's.
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


@dataclass(slots=True)
class OptimizerState:
    """State of one optimizer between two updates of the scaler.

    Torch's scaler, and optimizers that take it, read and write ``state["stage"]`` and ``state["found_inf_per_device"]``
    of a dict: attributes are items, too.

    Attributes:
        stage: READY, UNSCALED or STEPPED.
        found_inf_per_device: one flag a device, which decide on the step.
        found_inf_by_loss: loss -> flags of its gradients, which move its scale; empty: all are those of loss 0.
        block: whether a ``scale_loss`` block is open, or was.
        delayed: the loss whose gradients a block left scaled.
        aside: gradients of earlier losses, put aside until those of a block are unscaled.
        check: result of the optimizer's own ``check_gradients``.
    """

    stage: OptState = OptState.READY
    found_inf_per_device: Flags = field(default_factory=dict)
    found_inf_by_loss: dict[int, list[Tensor]] = field(default_factory=dict)
    block: Block = Block.NONE
    delayed: int | None = None
    aside: list[KeptGradient] = field(default_factory=list)
    check: Any = None

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self, name, value)

    @property
    def holds_scaled(self) -> bool:
        """Return whether gradients of ``scale_loss`` are, or may be, still scaled: no scale may move."""
        return self.block is Block.OPEN or self.delayed is not None

    def record(self, losses: Iterable[int], found: Flags) -> None:
        """Add flags to those of the optimizer, which decide on its step, and to those of the losses."""
        for loss_id in [*losses]:
            self.found_inf_by_loss.setdefault(loss_id, []).extend(found.values())
        flags = self.found_inf_per_device
        # A new dict: the given one may belong to the optimizer's own check.
        self.found_inf_per_device = {
            device: torch.maximum(flags[device], flag) if device in flags else flag for device, flag in found.items()
        } | {device: flag for device, flag in flags.items() if device not in found}


class Records:
    """Records of one scaler: one object, so that iterations which leave no trace get their own (``LossScaler._aside``).

    Args:
        scales: whose device the flags come to.
        known: id -> every optimizer that the scaler has seen.
        skips: the skipped steps, those before among them.
        on_floor: what to do when overflows take a scale to its floor: "raise", "warn", or None, nothing.

    Attributes:
        states: id of an optimizer -> its state since the last update.
        blocks: what a checkpoint within an accumulation said, until its optimizers are seen.
        scaled: something was scaled since the last update; ``scaled_outside``: by ``scale``, not by ``scale_loss``.
        captured: a CUDA graph holds a ``scale``: its replays scale, and run backward, unseen.
        floor, skips, spoiled: what is known of the scales' floor, of skipped steps, of gradients not to be unscaled.
    """

    def __init__(
        self, scales: Scales, known: MutableMapping[int, Optimizer], *, skips: Skips | None = None,
        on_floor: str | None = None,
    ) -> None:  # fmt: skip
        self.scales, self.known, self.on_floor = scales, known, on_floor
        self.floor, self.skips, self.spoiled = FloorWatch(scales.rule.min_scale), skips or Skips(), SpoiledGradients()
        self.captured = False
        self.states: defaultdict[int, OptimizerState] = defaultdict(OptimizerState)
        self.forget_iteration()

    def forget_iteration(self) -> None:
        """Begin the next iteration."""
        self.states.clear()
        self.spoiled.claimed.clear()
        self.scaled = self.scaled_outside = False
        self.blocks: list[dict[str, Any]] = []

    def state_of(self, optimizer: Optimizer, call: str | None = None) -> OptimizerState:
        """Return the iteration's state of an optimizer; with ``call``: raise RuntimeError within its ``scale_loss``."""
        # Wrappers need not be subclasses of torch's class: an optimizer is what has groups.
        if not hasattr(optimizer, "param_groups"):
            kind = type(optimizer).__name__
            raise TypeError(
                f"{call or 'the scaler'} wants an optimizer, not a {kind}: scaler.{call or 'step'}(optimizer)"
            )
        self.known[id(optimizer)] = optimizer
        if self.blocks and id(optimizer) not in self.states:
            self._resume(optimizer, self.states[id(optimizer)])
        state = self.states[id(optimizer)]
        if call is not None and state.block is Block.OPEN:
            raise RuntimeError(f"{call} within a scale_loss of the same {type(optimizer).__name__}: leave its block")
        return state

    def found(self) -> Iterable[tuple[LossScale, Tensor]]:
        """Yield each loss that was checked since the last update, with one flag on the device of its scale."""
        # A loss may have given gradients to several optimizers: its scale backs off if any of them overflowed.
        flags: dict[int, list[Tensor]] = {}
        for state in self.states.values():
            by_loss = state.found_inf_by_loss or {0: [*state.found_inf_per_device.values()]}
            for loss_id, found in by_loss.items():
                flags.setdefault(loss_id, []).extend(found)
        for loss_id, found in flags.items():
            loss = self.scales.losses[loss_id]
            if loss.scale is not None and found:
                yield loss, combined_flag(found, loss.scale.device)

    def found_by(self, optimizer: Optimizer) -> Tensor:
        """Return one flag of what was found in this optimizer's gradients since the last update; 0-dim FP32."""
        return combined_flag(self.states[id(optimizer)].found_inf_per_device.values(), self.scales.first.device)

    def before_update(self, used: Iterable[int] | None = None) -> None:
        """Note what a new scale would spoil. ``used``: ids of optimizers that were unscaled; None: by their stages."""
        if used is None:
            used = (id_ for id_, state in self.states.items() if state.stage is not OptState.READY)
        self.spoiled.before_update(self.scales.first, self.known, {*used})

    def saved_blocks(self) -> list[dict[str, Any]]:
        """Return an entry for each optimizer that ``scale_loss`` gave gradients and that has not stepped.

        Reads the device.

        Raises:
            RuntimeError: gradients are put aside within the scaler, where nobody can save them.
        """
        blocks: list[dict[str, Any]] = []
        for optimizer, state in ((self.known[i], state) for i, state in self.states.items() if i in self.known):
            if state.block is Block.OPEN or (state.delayed is not None and state.aside):
                raise RuntimeError(
                    "gradients of earlier losses are put aside until the scaled ones are unscaled, and cannot be "
                    "saved: save after the scale_loss block that unscales"
                )
            if state.block is Block.CLOSED and state.stage is not OptState.STEPPED:
                found = state.found_inf_by_loss
                overflow = {loss_id: any(bool(flag > 0) for flag in flags) for loss_id, flags in found.items()}
                blocks.append({"sizes": _sizes(optimizer), "delayed": state.delayed, "overflow": overflow})
        return blocks + self.blocks

    def _resume(self, optimizer: Optimizer, state: OptimizerState) -> None:
        """Take the optimizer's entry out of ``blocks``, if there is one, and bring its new ``state`` to it."""
        # Optimizers have no names that a file could hold; their sizes tell them apart, in order.
        sizes = _sizes(optimizer)
        block = next((block for block in self.blocks if block["sizes"] == sizes), None)
        if block is None:
            return
        self.blocks.remove(block)
        if all(parameter.grad is None for parameter in parameters_of(optimizer)):
            return
        state.block, state.delayed = Block.CLOSED, block["delayed"]
        # Flags as they were: an overflow before the checkpoint still skips the step after it.
        if state.delayed is None:
            state.stage = OptState.UNSCALED
        device = self.scales.first.device
        flags = {i: torch.full((), float(bad), device=device) for i, bad in block["overflow"].items()}
        if flags:
            state.found_inf_by_loss = {i: [flag] for i, flag in flags.items()}
            state.found_inf_per_device = {device: torch.stack([*flags.values()]).amax()}


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
    before: list[tuple[Optimizer, OptimizerState, list[KeptGradient]]] = []
    for owner in owners:
        state = records.state_of(owner)
        gradients = [KeptGradient.of(p, p.grad) for p in parameters_of(owner) if p.grad is not None]
        before.append((owner, replace(state), gradients))
        # Without gradients there, no backward of the block adds to them.
        for kept in gradients:
            kept.parameter.grad = None
        state.stage, state.block = OptState.READY, Block.OPEN
    try:
        yield
        # What unscaling would refuse is refused here, where all can still be restored.
        if not delay_unscale:
            claimed: dict[int, weakref.ref[Optimizer]] = {}
            for owner in owners:
                checks.refuse(records.spoiled, owner, claimed)
                claim(owner, claimed)
    except BaseException:
        for owner, was, _ in before:
            records.states[id(owner)] = was
            for parameter in parameters_of(owner):
                parameter.grad = None
        # After all are set to None: a parameter may be in two optimizers.
        for _, _, gradients in before:
            for kept in gradients:
                kept.put_back()
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
        foreach_add_([k.gradient for k in plain], [k.parameter.grad for k in plain])
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


def checked_blocks(blocks: Any, num_losses: int) -> list[dict[str, Any]]:
    """Return the entries of a loaded state; raise LossScaleError if they are none."""

    def is_loss(value: object) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < num_losses

    # A file of another tool, or of a scaler with fewer losses, must not fail in the middle of a step.
    for block in blocks if isinstance(blocks, list) else [None]:
        if (
            not isinstance(block, Mapping)
            or not isinstance(block.get("sizes"), list)
            or not (block.get("delayed") is None or is_loss(block["delayed"]))
            or not isinstance(block.get("overflow"), Mapping)
            or not all(is_loss(loss_id) for loss_id in block["overflow"])
        ):
            raise LossScaleError(f"the saved blocks of scale_loss are malformed: {block!r}")
    return [dict(block) for block in blocks]


def _sizes(optimizer: Optimizer) -> list[int]:
    """Return how many parameters and elements there are."""
    numbers = [parameter.numel() for parameter in parameters_of(optimizer)]
    return [len(numbers), sum(numbers)]
