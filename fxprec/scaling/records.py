"""What a scaler notes of optimizers and their gradients: within an iteration, and from one to the next."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from fxprec.scaling.floor import FloorWatch
from fxprec.scaling.loss_scale import LossScale
from fxprec.scaling.old_scale import OldGradients
from fxprec.scaling.resume import resume
from fxprec.scaling.scales import Scales
from fxprec.scaling.skips import Skips
from fxprec.scaling.stages import BY_LOSS, OPEN
from fxprec.torch_internals import fresh_states


class Records:
    """Records of one scaler: one object, so that iterations which leave no trace get their own (``LossScaler._aside``).

    Args:
        scales: whose device the flags come to.
        known: id -> every optimizer that the scaler has seen.
        skips: the skipped steps, those before among them.
        on_floor: what to do when overflows take a scale to its floor: "raise", "warn", or None, nothing.

    Attributes:
        states: id of an optimizer -> its stage and flags since the last update, as torch's scaler keeps them.
        claimed: id of a parameter -> the optimizer that unscaled it, since the last ``scale``.
        blocks: what a checkpoint within an accumulation said, until its optimizers are seen.
        scaled: something was scaled since the last update; ``scaled_outside``: by ``scale``, not by ``scale_loss``.
        captured: a CUDA graph holds a ``scale``: its replays scale, and run backward, unseen.
    """

    def __init__(
        self,
        scales: Scales,
        known: MutableMapping[int, Optimizer],
        *,
        skips: Skips | None = None,
        on_floor: str | None = None,
    ) -> None:
        self.scales, self.known, self.on_floor = scales, known, on_floor
        self.floor, self.skips, self.old = FloorWatch(scales.bounds[0]), skips or Skips(), OldGradients()
        self.captured = False
        self.states = fresh_states()
        self.claimed: dict[int, weakref.ref[Optimizer]] = {}
        self.forget_iteration()

    def forget_iteration(self) -> None:
        """The next iteration begins."""
        self.states.clear()
        self.claimed.clear()
        self.scaled = self.scaled_outside = False
        self.blocks: list[dict[str, Any]] = []

    def state_of(self, optimizer: Optimizer, call: str | None = None) -> dict[str, Any]:
        """The iteration's state of an optimizer; with ``call``: a RuntimeError within its ``scale_loss``."""
        if not hasattr(optimizer, "param_groups"):
            kind = type(optimizer).__name__
            raise TypeError(
                f"{call or 'the scaler'} wants an optimizer, not a {kind}: scaler.{call or 'step'}(optimizer)"
            )
        self.known[id(optimizer)] = optimizer
        if self.blocks and id(optimizer) not in self.states:
            resume(optimizer, self.blocks, self.scales.first.device, self.states[id(optimizer)])
        state = self.states[id(optimizer)]
        if call is not None and OPEN in state:
            raise RuntimeError(f"{call} within a scale_loss of the same {type(optimizer).__name__}: leave its block")
        return state

    def record(self, state: dict[str, Any], losses: Iterable[int], found: dict[torch.device, Tensor]) -> None:
        """Add flags to those of the optimizer, which decide on its step, and to those of the losses."""
        by_loss = state.setdefault(BY_LOSS, {})
        for loss_id in [*losses]:
            by_loss.setdefault(loss_id, []).extend(found.values())
        flags = state["found_inf_per_device"]
        state["found_inf_per_device"] = {
            device: torch.maximum(flags[device], flag) if device in flags else flag for device, flag in found.items()
        } | {device: flag for device, flag in flags.items() if device not in found}

    def found(self) -> Iterable[tuple[LossScale, Tensor]]:
        """Each loss that was checked since the last update, with one flag on the device of its scale."""
        flags: dict[int, list[Tensor]] = {}
        for state in self.states.values():
            by_loss = state.get(BY_LOSS) or {0: [*state["found_inf_per_device"].values()]}
            for loss_id, found in by_loss.items():
                flags.setdefault(loss_id, []).extend(found)
        for loss_id, found in flags.items():
            loss = self.scales.losses[loss_id]
            if loss.scale is not None and found:
                yield loss, _highest(found, loss.scale.device)

    def found_by(self, optimizer: Optimizer) -> Tensor:
        """Return one flag of what was found in this optimizer's gradients since the last update; 0-dim FP32."""
        return _highest([*self.states[id(optimizer)]["found_inf_per_device"].values()], self.scales.first.device)

    def before_update(self, used: Iterable[int] | None = None) -> None:
        """The scale may change. ``used``: ids of the optimizers that were unscaled; None: as their stages say."""
        if used is None:
            used = (id_ for id_, state in self.states.items() if state["stage"] is not OptState.READY)
        self.old.before_update(self.scales.first, self.known, {*used})


def _highest(flags: list[Tensor], device: torch.device) -> Tensor:
    """Return one 0-dim flag for several, on that device."""
    here = [flag.view(()).to(device, non_blocking=True) for flag in flags]
    return here[0] if len(here) == 1 else torch.stack(here).amax()
