"""Scale losses in timm's training script, which calls this in place of ``loss.backward()`` and ``optimizer.step()``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import Tensor, nn

from fxprec.scaling.loss_scaler import LossScaler


class NativeScaler:
    """Scaler as ``timm.utils.NativeScaler``, around that of ``convert``: the same call, key and state.

    Attributes:
        state_dict_key: under which timm's CheckpointSaver keeps the state.
    """

    state_dict_key: Final = "amp_scaler"

    def __init__(self, scaler: LossScaler) -> None:
        if not isinstance(scaler, LossScaler):
            raise TypeError(f"scaler is {scaler!r}: give the LossScaler that fxprec.convert returned")
        self._scaler = scaler

    def __call__(
        self,
        loss: Tensor,
        optimizer: torch.optim.Optimizer,
        clip_grad: float | None = None,
        clip_mode: str = "norm",
        parameters: Iterable[nn.Parameter] | None = None,
        create_graph: bool = False,
        need_update: bool = True,
    ) -> None:
        """Run the backward; and where ``need_update``, clip unscaled gradients, step, and update the scale.

        Args:
            clip_mode: "norm", "value", or "agc" (adaptive clipping, which is timm's).
            parameters: whose gradients are clipped.

        Raises:
            ValueError: gradients are to be clipped, and no parameters are given.
        """
        if clip_grad is not None and parameters is None:
            raise ValueError("clip_grad wants the parameters whose gradients it clips: parameters=model.parameters()")
        self._scaler.scale(loss).backward(create_graph=create_graph)
        if not need_update:
            return
        if clip_grad is not None:
            # Clipping compares with true norms.
            self._scaler.unscale_(optimizer)
            _clip(parameters, clip_grad, clip_mode)
        self._scaler.step(optimizer)
        self._scaler.update()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the scaler."""
        return self._scaler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this scaler, or of timm's own."""
        self._scaler.load_state_dict(state_dict)


def _clip(parameters: Any, limit: float, mode: str) -> None:
    if mode == "norm":
        nn.utils.clip_grad_norm_(parameters, limit)
    elif mode == "value":
        nn.utils.clip_grad_value_(parameters, limit)
    else:
        from timm.utils.clip_grad import dispatch_clip_grad

        dispatch_clip_grad(parameters, limit, mode=mode)
