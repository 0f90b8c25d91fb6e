"""Convert the models given to ``initialize``, refuse what cannot be, and take conversions back."""

from __future__ import annotations

import contextlib
import glob
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fxprec.amp.casting import CastOutputs
from fxprec.amp.properties import Properties
from fxprec.amp.registered import with_registered
from fxprec.convert import convert
from fxprec.errors import ConversionError
from fxprec.kernels.launch.operands import LOW_DTYPES
from fxprec.model.checks import settled_device
from fxprec.model.conversion import conversion_of, is_converted
from fxprec.model.swapped import put_back
from fxprec.passes.graph.annotations import Rule
from fxprec.passes.policy.policy import Policy
from fxprec.scaling.loss_scaler import LossScaler
from fxprec.settings import Settings
from fxprec.torch_internals import BatchNorm


def device_of(models: Iterable[nn.Module]) -> str:
    """Return "cuda" if a parameter of any model is there, else the first model's device type, else "cpu"."""
    devices = [settled_device(model, None) for model in models]
    return "cuda" if "cuda" in devices else (devices or ["cpu"])[0]


def check_models(models: Iterable[nn.Module], low: bool = False) -> None:
    """Refuse what apex refuses, before anything changes. ``low``: low-precision parameters are meant.

    Raises:
        RuntimeError: a model in a parallel wrapper, or with low-precision parameters or buffers.
    """
    for model in models:
        for wrapper in (nn.parallel.DistributedDataParallel, nn.DataParallel):
            if isinstance(model, wrapper):
                raise RuntimeError(
                    f"Incoming model is an instance of {type(model).__module__}.{type(model).__name__}. Parallel "
                    "wrappers should only be applied to the model(s) AFTER the model(s) have been returned from "
                    "amp.initialize"
                )
        if low or is_converted(model):
            continue  # at O3 its parameters are low; ``convert_model`` compares what it was converted to
        for kind, tensors in (("param", model.named_parameters()), ("buffer", model.named_buffers())):
            for name, tensor in tensors:
                if tensor.dtype in LOW_DTYPES:
                    raise RuntimeError(
                        f"Found {kind} {name} with type {tensor.dtype}, expected torch.float32. When using "
                        "amp.initialize, you do not need to call .half() on your model before passing it, no matter "
                        "what optimization level you choose: its FP32 values are the master weights. (For a model "
                        "that must be half: amp.FP16_Optimizer)"
                    )


def convert_model(
    model: nn.Module,
    properties: Properties,
    cast_outputs: torch.dtype | None,
    scaler: LossScaler,
    undo: contextlib.ExitStack,
) -> None:
    """Convert a model in place; ``undo`` gets what puts it back. ``scaler``: of its first loss.

    Raises:
        ConversionError: (a RuntimeError) as ``fxprec.convert``; or it is converted already, in another way.
    """
    policy = Policy.preset(properties.level)
    if properties.has_functions:
        policy = with_registered(policy, model)
    kept = _batch_norms(model) if properties.keep_batchnorm_fp32 and properties.level == "O3" else {}
    if kept:
        # O3's policy lowers norms; apex keeps their parameters FP32 if asked to.
        policy = _override(policy, kept, Rule.FULL)
    if properties.keep_batchnorm_fp32 is False and properties.level == "O2" and (lowered := _batch_norms(model)):
        policy = _override(policy, lowered, Rule.LOW)
    # A second ``initialize`` may name a model again, if it asks for the same.
    if is_converted(model):
        _check_same(model, Settings(policy=policy, dtype=properties.dtype, device=conversion_of(model).settings.device))
        conversion_of(model).start_over()  # decorated functions may be others now
    else:
        convert(model, policy=policy, dtype=properties.dtype, scaler=scaler)
        undo.callback(put_back, model)
        if properties.level == "O3":
            undo.callback(model.register_state_dict_post_hook(_state_in_fp32).remove)
    if cast_outputs is not None:
        undo.callback(model.register_forward_hook(CastOutputs(cast_outputs)).remove)


def _batch_norms(model: nn.Module) -> dict[str, BatchNorm]:
    """Return path -> batch norm, of those with parameters: as in apex, only these are kept."""
    return {path: each for path, each in model.named_modules() if isinstance(each, BatchNorm) and each.affine}


def _override(policy: Policy, norms: Iterable[str], rule: Rule) -> Policy:
    return policy.override(modules={glob.escape(path) or "*": rule for path in norms})  # "*": the model is one itself


def _state_in_fp32(module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    """Save low tensors as FP32, as a state_dict hook, so that a checkpoint of any level loads at any other."""
    for key, value in state.items():
        if key.startswith(prefix) and isinstance(value, Tensor) and value.dtype in LOW_DTYPES:
            state[key] = value.float()


def _check_same(model: nn.Module, wanted: Settings) -> None:
    if conversion_of(model).settings != wanted:
        raise ConversionError(
            f"{type(model).__name__} is converted already, to another level, dtype or policy than this amp.initialize "
            "asks for: fxprec.revert(model) first, or initialize all models in one call"
        )
