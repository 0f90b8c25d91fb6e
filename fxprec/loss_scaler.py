"""Loss scaling: torch's ``GradScaler`` with a static mode, and the scaler that ``convert`` hands back."""

from __future__ import annotations

import math
from numbers import Real
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from fxprec.passes.policy import Level

__all__ = ["LossScaler", "make_scaler"]


class LossScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` with the same calls, stages and state.

    Args:
        device: device type of the losses; None: "cuda" where there is one, else "cpu".
        init_scale: the first scale, or with ``dynamic=False`` the only one.
        dynamic: grow after ``growth_interval`` good steps and back off after a bad one. False: the scale stays, and a
            step whose gradients hold inf or nan is skipped all the same.
        fp16_gradients: accept float16 gradients, which torch refuses to unscale: their parameters are float16 (O3).
        enabled: False: every call is a no-op, ``step`` is the optimizer's.
    """

    def __init__(
        self,
        device: str | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        dynamic: bool = True,
        fp16_gradients: bool = False,
    ) -> None:
        if not (math.isfinite(init_scale) and init_scale > 0):
            raise ValueError(f"the loss scale must be finite and greater than 0, not {init_scale!r}")
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        super().__init__(device, float(init_scale), growth_factor, backoff_factor, growth_interval, enabled)
        self._fp16_gradients = fp16_gradients
        if not dynamic:  # torch's update multiplies by one of these; its constructor would not take them
            self._growth_factor = self._backoff_factor = 1.0

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16 or self._fp16_gradients)


def make_scaler(argument: object, dtype: torch.dtype, level: Level, device: str) -> LossScaler:
    """The scaler for ``convert(scaler=argument)``, on parameters of this device type.

    None: dynamic for float16, disabled for bfloat16 and O0, static 1.0 for O3. False: disabled. A number: static.
    """
    if isinstance(argument, LossScaler):
        return argument
    fp16_gradients = level == "O3" and dtype == torch.float16
    if argument is None and level == "O3":
        argument = 1.0
    if argument is None:
        return LossScaler(device, enabled=level != "O0" and dtype == torch.float16)
    if argument is False:
        return LossScaler(device, enabled=False)
    if isinstance(argument, Real) and not isinstance(argument, bool):
        return LossScaler(device, float(argument), dynamic=False, fp16_gradients=fp16_gradients)
    raise TypeError(
        f"scaler is {argument!r}: give None (chosen by dtype and level), False (no scaling), a number (a static scale) "
        "or an fxprec.LossScaler" + (", which takes the arguments of torch's" if _is_torchs(argument) else "")
    )


def _is_torchs(argument: object) -> bool:
    return isinstance(argument, torch.amp.GradScaler)
