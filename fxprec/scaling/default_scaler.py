"""The scaler that ``convert`` hands back."""

from __future__ import annotations

from numbers import Real
from typing import TYPE_CHECKING

import torch

from fxprec.errors import ConversionError
from fxprec.scaling.loss_scaler import LossScaler

if TYPE_CHECKING:
    from fxprec.passes.policy.policy import Level


def make_scaler(argument: object, dtype: torch.dtype, level: Level, device: str) -> LossScaler:
    """The scaler for ``convert(scaler=argument)``, on parameters of this device type.

    None: dynamic for float16, disabled for bfloat16 and O0, static 1.0 for O3. False: disabled. A number: static.

    Raises:
        TypeError: none of these, nor a LossScaler. ConversionError: float16 on CUDA, and there is no CUDA: torch's
            scaler would switch itself off.
    """
    if isinstance(argument, LossScaler):
        return argument
    if device == "cuda" and dtype is torch.float16 and level != "O0" and not torch.cuda.is_available():
        raise ConversionError(
            "float16 on CUDA was asked for, and torch sees no CUDA device: the gradients would not be scaled. "
            "Check the driver and the build of torch, or convert on the CPU"
        )
    fp16_gradients = level == "O3" and dtype is torch.float16
    if argument is None and level == "O3":
        argument = 1.0
    if argument is None:
        return LossScaler(device, enabled=level != "O0" and dtype is torch.float16)
    if argument is False:
        return LossScaler(device, enabled=False)
    if isinstance(argument, Real) and not isinstance(argument, bool):
        return LossScaler(device, float(argument), dynamic=False, fp16_gradients=fp16_gradients)
    raise TypeError(
        f"scaler is {argument!r}: give None (chosen by dtype and level), False (no scaling), a number (a static scale) "
        "or an fxprec.LossScaler"
        + (", which takes the arguments of torch's" if isinstance(argument, torch.amp.GradScaler) else "")
    )
