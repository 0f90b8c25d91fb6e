"""Train a converted model by transformers' Trainer: the scaler in its backward, clipping, steps and checkpoints.

In bfloat16 any Trainer takes a converted model as it is. In float16 losses have to be scaled.
"""

from __future__ import annotations

from typing import Any

import transformers

from fxprec.errors import ConversionError
from fxprec.integrations.accelerate import use_scaler
from fxprec.model.conversion import is_converted
from fxprec.scaling.loss_scaler import LossScaler


class ScalerMixin:
    """Mixin for a Trainer class, before it: ``class Mine(ScalerMixin, Seq2SeqTrainer)``; see ``Trainer`` below.

    Args:
        scaler: what ``fxprec.convert`` returned beside the model.

    Raises:
        ConversionError: the model is not converted, or the arguments ask for a precision too (``bf16``, ``fp16``).
        TypeError: the scaler is none of fxprec's.
    """

    def __init__(self, *args: Any, scaler: LossScaler, **kwargs: Any) -> None:
        # Set before the Trainer's constructor, which makes the Accelerator.
        self._scaler = scaler
        super().__init__(*args, **kwargs)
        model: Any = self.model  # type: ignore[attr-defined]
        if not is_converted(model):
            raise ConversionError(
                f"{type(model).__name__} is not converted: model, scaler = fxprec.convert(model) comes first, then "
                "Trainer(model, args, scaler=scaler, ...)"
            )

    def create_accelerator_and_postprocess(self) -> None:
        """Give each Accelerator the scaler: a Trainer makes its Accelerator here, for some arguments more than once."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        use_scaler(self.accelerator, self._scaler)  # type: ignore[attr-defined]


class Trainer(ScalerMixin, transformers.Trainer):
    """Trainer ``transformers.Trainer(model, args, scaler=scaler, ...)``: every other argument is its own."""
