"""Let Hugging Face's Accelerate run its ``backward``, clipping, steps and checkpoints by a scaler of fxprec.

Accelerate has a scaler of its own with ``mixed_precision="fp16"`` only, together with autocast, and never on a CPU.
"""

from __future__ import annotations

from types import MethodType
from typing import Any, Final

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer

from fxprec.errors import ConversionError
from fxprec.scaling.loss_scaler import LossScaler

#: What scales losses by itself, and asks nobody.
_THEIR_OWN: Final = ("DEEPSPEED", "MEGATRON_LM")


def use_scaler(accelerator: Accelerator, scaler: LossScaler) -> None:
    """Let an Accelerator scale, unscale, clip, skip and save by the scaler that ``convert`` returned.

    Call it before ``accelerator.prepare(model, optimizer, ...)``. A disabled scaler (bfloat16) changes nothing: there
    is nothing to scale.

    Raises:
        TypeError: the scaler is none of fxprec's.
        ConversionError: the Accelerator has a precision of its own, an optimizer is prepared already, or DeepSpeed or
            Megatron scales. Nothing was changed.
    """
    if not isinstance(scaler, LossScaler):
        raise TypeError(f"scaler is {scaler!r}: give the LossScaler that fxprec.convert returned")
    if accelerator.mixed_precision != "no":
        raise ConversionError(
            f"this Accelerator has mixed_precision={accelerator.mixed_precision!r} (its argument, its configuration "
            "file or ACCELERATE_MIXED_PRECISION), which would run autocast around the converted model: make it with "
            "mixed_precision='no' (of a Trainer: bf16=False, fp16=False)"
        )
    if accelerator.distributed_type.value in _THEIR_OWN:
        raise ConversionError(f"{accelerator.distributed_type.value} scales losses by itself: train without it")
    if accelerator._optimizers:
        raise ConversionError("an optimizer was prepared before, without this scaler: call use_scaler before prepare")
    # Accelerate asks ``scaler is None``: with one set it scales, clips, skips and saves by it.
    if scaler.is_enabled():
        accelerator.scaler = scaler
        accelerator.unscale_gradients = MethodType(_unscale_gradients, accelerator)


def _unscale_gradients(self: Accelerator, optimizer: Any = None) -> None:
    """Unscale gradients; the class's own method does nothing without autocast. ``clip_grad_norm_`` calls it."""
    if optimizer is None:
        optimizer = self._optimizers
    for each in optimizer if isinstance(optimizer, tuple | list) else [optimizer]:
        while isinstance(each, AcceleratedOptimizer):
            each = each.optimizer
        self.scaler.unscale_(each)  # type: ignore[union-attr]
