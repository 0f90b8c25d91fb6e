"""Initialize models and optimizers: models are converted in place, optimizers learn to skip, losses get scales."""

from __future__ import annotations

import contextlib
import glob
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fxprec.amp._amp_state import AmpLossScaler, Properties, maybe_print, properties_of, state
from fxprec.amp.fp16_optimizer import FP16_Optimizer
from fxprec.amp.functions import patch_registered, with_registered
from fxprec.amp.scaling import STASH, guard_step
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
from fxprec.torch_internals import BatchNorm, tree_map_only

_BRIEF: Final = {
    "O0": "nothing is lowered",
    "O1": "matrix products and convolutions are lowered, parameters and the residual stream stay FP32",
    "O2": "the residual stream is lowered too; batch norms and the master weights, which are the parameters, stay FP32",
    "O3": "the parameters themselves become low",
}


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

    The level only sets the defaults of five options::

        opt_level                  O0        O1        O2        O3
        cast_model_type            float32   None      low       low         low: float16 on CUDA, else bfloat16
        patch_torch_functions      False     True      False     False
        keep_batchnorm_fp32        None      None      True      False
        master_weights             False     None      True      False
        loss_scale                 1.0       dynamic   dynamic   1.0

    Args:
        models: one, or a list; each is converted in place.
        optimizers: one, a list, or None.
        enabled: False: nothing happens, and every other call of amp is a no-op.
        opt_level: "O0" to "O3".
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
    # All that may refuse comes before anything changes.
    all_optimizers = _list_of(optimizers, Optimizer, "optimizers must be either a single optimizer or a list of them")
    all_models = _list_of(models, nn.Module, "models must be either a single model or a list of them")
    check_models(all_models, low=state.allow_incoming_model_not_fp32)
    outputs = cast_model_outputs
    if outputs is not None and not (isinstance(outputs, torch.dtype) and outputs.is_floating_point):
        raise TypeError(f"cast_model_outputs must be a floating-point torch.dtype or None, not {outputs!r}")
    device = device_of(all_models)
    overrides = {
        "cast_model_type": cast_model_type, "patch_torch_functions": patch_torch_functions,
        "keep_batchnorm_fp32": keep_batchnorm_fp32, "master_weights": master_weights, "loss_scale": loss_scale,
    }  # fmt: skip
    properties = properties_of(opt_level, torch.float16 if device == "cuda" else torch.bfloat16, overrides)
    if isinstance(num_losses, bool) or not isinstance(num_losses, int) or num_losses < 1:
        raise ValueError(f"num_losses must be a whole number of at least 1, not {num_losses!r}")
    scalers = [AmpLossScaler(properties, device, min_loss_scale, max_loss_scale) for _ in range(num_losses)]
    # Whatever refuses half-way is undone: models, patched functions and the state are as before.
    with contextlib.ExitStack() as undo:
        undo.callback(vars(state).update, device=state.device, low=state.low)
        state.device, state.low = device, properties.dtype if properties.has_functions else None
        if properties.has_functions:
            patch_registered(undo)
        for model in all_models:
            convert_model(model, properties, cast_model_outputs, scalers[0].scaler, undo)
        # State that was made for FP32 parameters gets the low dtype of its parameters when it is loaded.
        for optimizer in all_optimizers if properties.level == "O3" else ():
            if optimizer.state:
                before = {"state": optimizer.state, "param_groups": optimizer.param_groups}
                undo.callback(optimizer.__setstate__, before)
                optimizer.load_state_dict(optimizer.state_dict())
        undo.pop_all()
    # From here on nothing fails: the state of the process may change.
    state.opt_properties, state.loss_scalers, state.verbosity = properties, scalers, verbosity
    state.min_loss_scale, state.max_loss_scale = min_loss_scale, max_loss_scale
    state.models.update(all_models)
    for optimizer in all_optimizers:
        guard_step(optimizer, properties)
    maybe_print(f"Selected optimization level {opt_level}:  {_BRIEF[opt_level]}.", rank0=True)
    maybe_print(f"After processing overrides, optimization options are:\n{properties}", rank0=True)
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
        # Its step would be guarded twice, and skip twice after one overflow.
        if kind is Optimizer and (hasattr(entry, STASH) or any(entry is other for other in entries[:i])):
            raise RuntimeError(
                f"A given optimizer should only be passed through amp.initialize once. This {type(entry).__name__} was"
            )
    return entries


def device_of(models: Iterable[nn.Module]) -> str:
    """Return "cuda" if a parameter of any model is there, else the first model's device type, else "cpu"."""
    # A run on a GPU may have small models on the CPU beside it; one scale serves all of them.
    devices = [settled_device(model, None) for model in models]
    return "cuda" if "cuda" in devices else (devices or ["cpu"])[0]


def check_models(models: Iterable[nn.Module], low: bool = False) -> None:
    """Refuse what apex refuses, before anything changes. ``low``: low-precision parameters are meant.

    Raises:
        RuntimeError: a model in a parallel wrapper, or with low-precision parameters or buffers.
    """
    for model in models:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
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
    model: nn.Module, properties: Properties, cast_outputs: torch.dtype | None, scaler: LossScaler,
    undo: contextlib.ExitStack,
) -> None:  # fmt: skip
    """Convert a model in place; ``undo`` gets what puts it back. ``scaler``: of its first loss.

    Raises:
        ConversionError: (a RuntimeError) as ``fxprec.convert``; or it is converted already, in another way.
    """
    policy = Policy.preset(properties.level)
    if properties.has_functions:
        policy = with_registered(policy, model)
    # O3's policy lowers batch norms, O2's does not: an override only where the option says otherwise.
    otherwise: dict[tuple[str, bool | None], Rule] = {("O3", True): Rule.FULL, ("O2", False): Rule.LOW}
    rule = otherwise.get((properties.level, properties.keep_batchnorm_fp32))
    norms = [path for path, each in model.named_modules() if isinstance(each, BatchNorm) and each.affine]
    if rule is not None and norms:
        policy = policy.override(modules={glob.escape(path) or "*": rule for path in norms})  # "*": the model is one
    # A second ``initialize`` may name a model again, if it asks for the same.
    if is_converted(model):
        conversion = conversion_of(model)
        if conversion.settings != Settings(policy, properties.dtype, conversion.settings.device):
            raise ConversionError(
                f"{type(model).__name__} is converted already, to another level, dtype or policy than this "
                "amp.initialize asks for: fxprec.revert(model) first, or initialize all models in one call"
            )
        conversion.start_over()  # decorated functions may be others now
    else:
        convert(model, policy=policy, dtype=properties.dtype, scaler=scaler)
        undo.callback(put_back, model)
        if properties.level == "O3":
            undo.callback(model.register_state_dict_post_hook(_state_in_fp32).remove)
    # A hook, and not the policy: it acts outside of the graphs, on whatever the forward returns.
    if cast_outputs is not None:
        undo.callback(model.register_forward_hook(CastOutputs(cast_outputs)).remove)


def _state_in_fp32(module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    """Save low tensors as FP32, as a state_dict hook, so that a checkpoint of any level loads at any other."""
    for key, value in state.items():
        if key.startswith(prefix) and isinstance(value, Tensor) and value.dtype in LOW_DTYPES:
            state[key] = value.float()


@dataclass(frozen=True)
class CastOutputs:
    """Forward hook that casts the floating-point tensors that a model returns to ``dtype``.

    A class and no closure, so that a model with the hook can be pickled.
    """

    dtype: torch.dtype

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return tree_map_only(Tensor, lambda x: x.to(self.dtype) if x.is_floating_point() else x, output)
