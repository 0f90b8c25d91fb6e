"""Lightning's precision plugin: ``Trainer(plugins=MixedPrecision())`` converts the module, its steps included."""

from __future__ import annotations

import contextlib
from typing import Any, Final

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import precision
from torch import nn

from fxprec.convert import convert
from fxprec.errors import ConversionError
from fxprec.model.conversion import conversion_of, is_converted
from fxprec.scaling.loss_scaler import LossScaler
from fxprec.torch_internals import hide_from_dynamo

_STEPS: Final = ("training_step", "validation_step", "test_step", "predict_step")
#: What steps call that reaches into the trainer, where there is nothing to lower and much that dynamo cannot take.
_OF_THE_TRAINER: Final = (
    "log", "log_dict", "print", "all_gather", "optimizers", "lr_schedulers", "manual_backward", "clip_gradients",
    "toggle_optimizer", "untoggle_optimizer",
)  # fmt: skip


class MixedPrecision(precision.MixedPrecision):
    """Precision plugin as Lightning's of that name, with ``fxprec.convert`` in the place of autocast.

    The module is converted when the trainer sets up: ``forward`` and the steps that it defines run rewritten graphs.
    What calls the trainer (``self.log``, ``self.manual_backward``) runs between them. Clipping, accumulation and
    checkpoints are Lightning's; a checkpoint goes from its own plugin to this one and back.

    Args:
        dtype: ``torch.bfloat16`` or ``torch.float16``.
        scaler: for float16; None: a dynamic one. Of a module that was converted before: what ``convert`` returned.
        **options: of ``fxprec.convert``; ``methods`` are those besides the steps.

    Raises:
        ConversionError: when the trainer sets up; see ``fxprec.convert``. Or the module was converted before in
            float16, and the scaler is not given.
    """

    def __init__(self, dtype: torch.dtype = torch.bfloat16, scaler: LossScaler | None = None, **options: Any) -> None:
        # Lightning refuses a scaler for bf16, and wants one for float16 before there is a model to convert.
        low = dtype is torch.float16
        super().__init__("16-mixed" if low else "bf16-mixed", "cpu", LossScaler("cpu", enabled=False) if low else None)
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None  # else convert makes one
        self._options = {"dtype": dtype, **options}

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert a module in place, unless that is done."""
        if is_converted(module):
            if conversion_of(module).settings.dtype is torch.float16 and self.scaler is None:
                raise ConversionError(
                    f"{type(module).__name__} was converted before, in float16: give its scaler, "
                    "MixedPrecision(torch.float16, scaler=scaler), or leave its conversion to this plugin"
                )
            return module
        # dynamo would break at, or guard on, whatever of the trainer these read.
        for name in _OF_THE_TRAINER:
            if (function := getattr(LightningModule, name, None)) is not None:
                hide_from_dynamo(function, f"Lightning's {name} reaches into the trainer", callees=True)
        options = dict(self._options)
        steps = [name for name in _STEPS if getattr(type(module), name) is not getattr(LightningModule, name)]
        methods = (*options.pop("methods", ()), *steps)
        converted, scaler = convert(module, methods=methods, scaler=self.scaler, **options)
        self.scaler = scaler if scaler.is_enabled() else None
        return converted

    def forward_context(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        """Do nothing: the graphs know their dtypes."""
        return contextlib.nullcontext()
