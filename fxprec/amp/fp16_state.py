"""Save and load an ``FP16_Optimizer``, and show the optimizer that it wraps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from fxprec.amp.fp16_scaler import LossScaler
from fxprec.amp.masters import copy_masters, saved_masters


class FP16State:
    """Accessors and checkpoints of ``FP16_Optimizer``, which documents the attributes and sets them."""

    optimizer: Optimizer
    loss_scaler: LossScaler
    dynamic_loss_scale: bool
    overflow: bool
    fp32_from_fp16_groups: list[list[Tensor]]
    _pairs: list[tuple[Tensor, Tensor]]

    def __getstate__(self) -> NoReturn:
        raise RuntimeError("FP16_Optimizer should be serialized using state_dict().")

    def __setstate__(self, state: Any) -> NoReturn:
        raise RuntimeError("FP16_Optimizer should be deserialized using load_state_dict().")

    def state_dict(self) -> dict[str, Any]:
        """Return the loss scale, the wrapped optimizer's state, and ``fp32_from_fp16``, the masters by group."""
        return {
            "loss_scaler": self.loss_scaler.state_dict(),
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "overflow": self.overflow,
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_from_fp16": [[master.detach() for master in group] for group in self.fp32_from_fp16_groups],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` gave; the model's parameters become the masters', rounded. Resumes bit for bit.

        Raises:
            RuntimeError: keys, groups or shapes that do not fit, or a static scale for a dynamic one. ValueError:
                numbers out of range, or what the wrapped optimizer refuses. Nothing is changed then.
        """
        missing = [key for key in self.state_dict() if key not in state_dict]
        if missing:
            raise RuntimeError(f"the state of FP16_Optimizer lacks {missing}; it has {sorted(map(str, state_dict))}")
        if bool(state_dict["dynamic_loss_scale"]) != self.dynamic_loss_scale:
            raise RuntimeError(
                f"the state has dynamic_loss_scale={state_dict['dynamic_loss_scale']}, this FP16_Optimizer "
                f"{self.dynamic_loss_scale}: make it with the same"
            )
        # All that may refuse comes first, so that a refusal changes nothing.
        scale = self.loss_scaler.checked(state_dict["loss_scaler"])
        masters = saved_masters(state_dict["fp32_from_fp16"], self.fp32_from_fp16_groups)
        self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])  # checks before it changes anything
        self.loss_scaler.load_state_dict(scale)
        self.overflow = bool(state_dict["overflow"])
        with torch.no_grad():
            for (_, master), saved in zip(self._pairs, masters, strict=True):
                master.copy_(saved)
        copy_masters(self._pairs)

    @property
    def loss_scale(self) -> float:
        """Present loss scale; it may be set."""
        return self.loss_scaler.loss_scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self.loss_scaler.cur_scale = LossScaler(value).cur_scale

    @property
    def state(self) -> Any:
        """State of the wrapped optimizer."""
        return self.optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        self.optimizer.state = value

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups of the wrapped optimizer, with masters in place of low parameters."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = value
