"""Initialize models and optimizers: models are converted in place, optimizers learn to skip, losses get scales."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fxprec.amp.fp16_optimizer import FP16_Optimizer
from fxprec.amp.loss_scale import AmpLossScaler
from fxprec.amp.models import check_models, convert_model, device_of
from fxprec.amp.properties import BRIEF, Properties, properties_of
from fxprec.amp.registered import patch_registered
from fxprec.amp.scaling import STASH, guard_step
from fxprec.amp.state import say, state


def initialize(
    models: nn.Module | list[nn.Module],
    optimizers: Optimizer | list[Optimizer] | None = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: torch.dtype | None = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float | None = 2.0**24,
) -> Any:
    """Initialize models and optimizers: ``model, optimizer = amp.initialize(model, optimizer)``, as apex's.

    Parameters stay FP32 and are the master weights, unless ``master_weights=False`` makes them low. So optimizers may
    be made before or after. A later call makes new loss scalers; earlier models and optimizers go on with these.

    Args:
        models: one, or a list; each is converted in place.
        optimizers: one, a list, or None.
        enabled: False: nothing happens, and every other call of amp is a no-op.
        opt_level: "O0" to "O3": the defaults of what follows; see ``fxprec.amp.properties``.
        cast_model_type: the dtype to lower to; None: float16 on CUDA, bfloat16 elsewhere. float32: nothing is lowered.
        patch_torch_functions: at O1, False: nothing is lowered.
        keep_batchnorm_fp32: at O2 and O3: batch norms compute in FP32 with FP32 parameters. Or "True", "False".
        master_weights: at O2 and O3, False: the parameters themselves become low.
        loss_scale: "dynamic", or a number (or its text): a static scale.
        cast_model_outputs: the dtype of all floating-point outputs; None: those of the original model.
        num_losses: how many losses have scales of their own.
        verbosity: 0: nothing is printed.
        min_loss_scale, max_loss_scale: bounds of a dynamic scale.

    Returns:
        The models, and the optimizers if they are not None, each alone or as the list that it was given as.

    Raises:
        RuntimeError: an unknown level; an override that the level cannot have; a model in a parallel wrapper, with low
            parameters, or converted in another way; an optimizer that was initialized already or is an FP16_Optimizer;
            ConversionError of ``fxprec.convert``. After a refusal everything is as before.
        TypeError: neither a model nor a list of them; the same for optimizers. AssertionError: another
            ``keep_batchnorm_fp32``. ValueError: numbers or dtypes that cannot serve.
    """
    if not enabled:
        state.opt_properties, state.low, state.verbosity = Properties(), None, verbosity
        return models if optimizers is None else (models, optimizers)
    all_optimizers = _list_of(optimizers, Optimizer, "optimizers must be either a single optimizer or a list of them")
    all_models = _list_of(models, nn.Module, "models must be either a single model or a list of them")
    check_models(all_models, low=state.allow_incoming_model_not_fp32)
    _check_outputs(cast_model_outputs)
    device = device_of(all_models)
    properties = properties_of(
        opt_level,
        torch.float16 if device == "cuda" else torch.bfloat16,
        {
            "cast_model_type": cast_model_type,
            "patch_torch_functions": patch_torch_functions,
            "keep_batchnorm_fp32": keep_batchnorm_fp32,
            "master_weights": master_weights,
            "loss_scale": loss_scale,
        },
    )
    if isinstance(num_losses, bool) or not isinstance(num_losses, int) or num_losses < 1:
        raise ValueError(f"num_losses must be a whole number of at least 1, not {num_losses!r}")
    scalers = [AmpLossScaler(properties, device, min_loss_scale, max_loss_scale) for _ in range(num_losses)]
    # Whatever refuses half-way is undone: models, patched functions and the state are as before.
    with contextlib.ExitStack() as undo:
        undo.callback(_restore, state.device, state.low)
        state.device, state.low = device, properties.dtype if properties.has_functions else None
        if properties.has_functions:
            patch_registered(undo)
        for model in all_models:
            convert_model(model, properties, cast_model_outputs, scalers[0].scaler, undo)
        if properties.level == "O3":
            for optimizer in all_optimizers:
                _recast(optimizer, undo)
        undo.pop_all()
    state.opt_properties, state.loss_scalers, state.verbosity = properties, scalers, verbosity
    state.min_loss_scale, state.max_loss_scale = min_loss_scale, max_loss_scale
    state.models.update(all_models)
    for optimizer in all_optimizers:
        guard_step(optimizer, properties)
    say(f"Selected optimization level {opt_level}:  {BRIEF[opt_level]}.", rank0=True)
    say(f"After processing overrides, optimization options are:\n{properties}", rank0=True)
    return models if optimizers is None else (models, optimizers)


def _list_of(given: Any, kind: type, message: str) -> list[Any]:
    """Return what was given as a list, an optimizer only once; None stands for no optimizers."""
    entries = [] if given is None and kind is Optimizer else given if isinstance(given, list) else [given]
    for i, entry in enumerate(entries):
        if isinstance(entry, FP16_Optimizer):
            raise RuntimeError(
                "An incoming optimizer is an instance of FP16_Optimizer. The optimizer(s) passed to amp.initialize() "
                "must be bare PyTorch optimizers: amp has masters and loss scales of its own"
            )
        if not isinstance(entry, kind):
            raise TypeError(f"{message}, not {type(entry).__name__}")
        if kind is Optimizer and (hasattr(entry, STASH) or any(entry is other for other in entries[:i])):
            raise RuntimeError(
                f"A given optimizer should only be passed through amp.initialize once. This {type(entry).__name__} was"
            )
    return entries


def _check_outputs(dtype: Any) -> None:
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"cast_model_outputs must be a floating-point torch.dtype or None, not {dtype!r}")


def _recast(optimizer: Optimizer, undo: contextlib.ExitStack) -> None:
    """Cast state that was made for FP32 parameters to the low dtype of its parameters."""
    if optimizer.state:
        before = {"state": optimizer.state, "param_groups": optimizer.param_groups}
        undo.callback(optimizer.__setstate__, before)
        optimizer.load_state_dict(optimizer.state_dict())


def _restore(device: str, low: torch.dtype | None) -> None:
    state.device, state.low = device, low
