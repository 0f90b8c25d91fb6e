"""The properties of a run: what each ``opt_level`` sets, what the caller overrides, and the conversion they ask for.

    opt_level                  O0        O1        O2        O3
    cast_model_type            float32   None      low       low
    patch_torch_functions      False     True      False     False
    keep_batchnorm_fp32        None      None      True      False
    master_weights             False     None      True      False
    loss_scale                 1.0       dynamic   dynamic   1.0

*low* is float16 on CUDA and bfloat16 elsewhere. The level only sets defaults; the properties decide. Names, defaults,
accepted types and the types of the refusals are those of NVIDIA apex (``apex.amp``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any, Final

import torch

from fxprec.passes.graph.annotations import CASTABLE
from fxprec.passes.policy.policy import Level

_DEFAULTS: Final[dict[str, dict[str, Any]]] = {
    "O0": {"cast_model_type": torch.float32, "master_weights": False, "loss_scale": 1.0},
    "O1": {"patch_torch_functions": True, "loss_scale": "dynamic"},
    "O2": {"keep_batchnorm_fp32": True, "master_weights": True, "loss_scale": "dynamic"},
    "O3": {"keep_batchnorm_fp32": False, "master_weights": False, "loss_scale": 1.0},
}
BRIEF: Final = {
    "O0": "nothing is lowered",
    "O1": "matrix products and convolutions are lowered, parameters and the residual stream stay FP32",
    "O2": "the residual stream is lowered too; batch norms and the master weights, which are the parameters, stay FP32",
    "O3": "the parameters themselves become low",
}


@dataclass(frozen=True, slots=True)
class Properties:
    """Options of a run, apex's ``opt_properties``; ``enabled=False`` turns every call of the package into a no-op.

    Attributes:
        cast_model_type: dtype of the lowering; None at O1, where it is ``low``; False and float32: nothing is lowered.
        low: the dtype of this device.
    """

    enabled: bool = False
    opt_level: str | None = None
    cast_model_type: torch.dtype | bool | None = None
    patch_torch_functions: bool = False
    keep_batchnorm_fp32: bool | None = None
    master_weights: bool | None = None
    loss_scale: float | str = 1.0
    low: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        return "\n".join(f"{name:22} : {value}" for name, value in self.options.items())

    @property
    def options(self) -> Mapping[str, Any]:
        """Options as apex keeps them, to read."""
        return MappingProxyType(
            {field.name: getattr(self, field.name) for field in fields(self) if field.name != "low"}
        )

    @property
    def dynamic(self) -> bool:
        """Flag of loss scales that move."""
        return self.loss_scale == "dynamic"

    @property
    def level(self) -> Level:
        """Level of ``fxprec.convert`` that these properties ask for."""
        # The properties decide, not the level by name: an O2 with cast_model_type=torch.float32 lowers nothing.
        if self.opt_level == "O1":
            return "O1" if self.patch_torch_functions else "O0"
        if not self.cast_model_type or self.cast_model_type is torch.float32:
            return "O0"
        return "O2" if self.master_weights else "O3"

    @property
    def dtype(self) -> torch.dtype:
        """Dtype that the conversion lowers to, where it lowers something."""
        # At O1 there is no cast_model_type, and False and float32 lower nothing: then the device's dtype serves.
        chosen = self.cast_model_type
        return chosen if isinstance(chosen, torch.dtype) and chosen in CASTABLE - {torch.float32} else self.low

    @property
    def has_functions(self) -> bool:
        """Flag of casts by decorated and registered functions: where something is lowered and parameters are FP32."""
        return self.level in ("O1", "O2")


def properties_of(opt_level: Any, low: torch.dtype, overrides: dict[str, Any]) -> Properties:
    """Return the defaults of a level with the overrides that are not None.

    Raises:
        RuntimeError: an unknown level; an override that the level cannot have.
        AssertionError: ``keep_batchnorm_fp32`` is neither a bool nor "True" or "False".
        TypeError: ``cast_model_type`` is no dtype. ValueError: a dtype or a loss scale that cannot serve.
    """
    # The letter, and errors of apex's types: scripts catch these.
    if not isinstance(opt_level, str) or opt_level not in _DEFAULTS:
        raise RuntimeError(
            f"Unexpected optimization level {opt_level!r}. Options are 'O0', 'O1', 'O2', 'O3': the letter O, not the "
            "number zero"
        )
    properties = Properties(enabled=True, opt_level=opt_level, low=low)
    # The low dtype depends on the device, so that no table of defaults can hold it.
    if opt_level in ("O2", "O3"):
        properties = replace(properties, cast_model_type=low)
    properties = replace(properties, **_DEFAULTS[opt_level])
    changed = {name: _CHECKS[name](value, opt_level) for name, value in overrides.items() if value is not None}
    return replace(properties, **changed)


def _cast_model_type(value: Any, opt_level: str) -> torch.dtype | bool:
    # apex takes False for "cast nothing", beside None for "as the level says".
    if value is False:
        return False
    if not isinstance(value, torch.dtype):
        raise TypeError(f"cast_model_type must be a torch.dtype, False or None, not {value!r}")
    if value not in CASTABLE:
        raise ValueError(
            f"cast_model_type={value}: models are lowered to torch.float16 or torch.bfloat16; torch.float32 lowers "
            "nothing. For another dtype, model.to(dtype) and train without amp"
        )
    return value


def _patch_torch_functions(value: Any, opt_level: str) -> bool:
    if opt_level != "O1" and value:
        raise RuntimeError(
            "Currently, patch_torch_functions=True should only be set by selecting opt_level='O1': "
            f"at {opt_level} the model is lowered by cast_model_type"
        )
    return bool(value)


def _keep_batchnorm_fp32(value: Any, opt_level: str) -> bool:
    if opt_level == "O1":
        raise RuntimeError(
            "With opt_level O1 batch norms compute in FP32 and their parameters are FP32, so keep_batchnorm_fp32 "
            f"should be None. keep_batchnorm_fp32 was {value!r}"
        )
    # Texts as well: apex's scripts pass command-line arguments through.
    known = {"True": True, "False": False, True: True, False: False}
    if not isinstance(value, bool | str) or value not in known:
        raise AssertionError(
            "keep_batchnorm_fp32 must be a boolean, the string 'True' or 'False', or None, found "
            f"keep_batchnorm_fp32={value!r}"
        )
    return known[value]


def _master_weights(value: Any, opt_level: str) -> bool:
    if opt_level == "O1":
        raise RuntimeError(
            "It doesn't make sense to use master_weights with O1: there the parameters are FP32, and are the masters. "
            f"master_weights was {value!r}"
        )
    return bool(value)


def _loss_scale(value: Any, opt_level: str) -> float | str:
    if value == "dynamic":
        return "dynamic"
    # A number may come as its text, from a command line.
    try:
        scale = float(value)
    except (TypeError, ValueError):
        scale = math.nan
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"loss_scale must be 'dynamic' or finite and greater than 0, not {value!r}")
    return scale


_CHECKS: Final[dict[str, Callable[[Any, str], Any]]] = {
    "cast_model_type": _cast_model_type,
    "patch_torch_functions": _patch_torch_functions,
    "keep_batchnorm_fp32": _keep_batchnorm_fp32,
    "master_weights": _master_weights,
    "loss_scale": _loss_scale,
}
