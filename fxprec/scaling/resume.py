"""What a checkpoint within an accumulation by ``scale_loss`` adds: how each optimizer's gradients stand.

The gradients themselves are the user's to save. After loading, an optimizer takes up the first entry that was made with
as many parameters and elements, provided that it has gradients by then: else the iteration is a new one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from fxprec.errors import LossScaleError
from fxprec.scaling.gradients import parameters_of
from fxprec.scaling.stages import ASIDE, BLOCKS, BY_LOSS, DELAYED, OPEN


def saved_blocks(states: Iterable[tuple[Optimizer, Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """An entry for each optimizer that ``scale_loss`` gave gradients and that has not stepped. Reads the device.

    Raises:
        RuntimeError: gradients are put aside within the scaler, where nobody can save them.
    """
    blocks: list[dict[str, Any]] = []
    for optimizer, state in states:
        if OPEN in state or (DELAYED in state and state.get(ASIDE)):
            raise RuntimeError(
                "gradients of earlier losses are put aside until the scaled ones are unscaled, and cannot be saved: "
                "save after the scale_loss block that unscales"
            )
        if BLOCKS in state and state["stage"] is not OptState.STEPPED:
            found = state.get(BY_LOSS, {})
            overflow = {loss_id: any(bool(flag > 0) for flag in flags) for loss_id, flags in found.items()}
            blocks.append({"sizes": _sizes(optimizer), "delayed": state.get(DELAYED), "overflow": overflow})
    return blocks


def checked_blocks(blocks: Any, num_losses: int) -> list[dict[str, Any]]:
    """The entries of a loaded state; a LossScaleError if they are none."""

    def is_loss(value: object) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < num_losses

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


def resume(optimizer: Optimizer, blocks: list[dict[str, Any]], device: torch.device, state: dict[str, Any]) -> None:
    """Take the optimizer's entry out of ``blocks``, if there is one, and bring its new ``state`` to it."""
    sizes = _sizes(optimizer)
    block = next((block for block in blocks if block["sizes"] == sizes), None)
    if block is None:
        return
    blocks.remove(block)
    if all(parameter.grad is None for parameter in parameters_of(optimizer)):
        return
    state[BLOCKS] = True
    if block["delayed"] is None:
        state["stage"] = OptState.UNSCALED
    else:
        state[DELAYED] = block["delayed"]
    flags = {i: torch.full((), float(bad), device=device) for i, bad in block["overflow"].items()}
    if flags:
        state[BY_LOSS] = {i: [flag] for i, flag in flags.items()}
        state["found_inf_per_device"] = {device: torch.stack([*flags.values()]).amax()}


def _sizes(optimizer: Optimizer) -> list[int]:
    """Return how many parameters and elements there are."""
    numbers = [parameter.numel() for parameter in parameters_of(optimizer)]
    return [len(numbers), sum(numbers)]
