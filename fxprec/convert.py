"""``convert``: from a user's model to the same model running a rewritten graph, and the scaler that belongs to it."""

from __future__ import annotations

import copy
import functools
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, Literal, NamedTuple, NoReturn, TypedDict, TypeVar, Unpack, overload

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule

from fxprec.capture.originals import has_signature
from fxprec.errors import SlowDtypeWarning
from fxprec.host_memory import keep_some_memory
from fxprec.model.checks import check_module_overrides, named_methods, refuse_unfit, settled_device
from fxprec.model.swapped import attach, put_back
from fxprec.model.unscaled import handed_back, scales
from fxprec.model.warm_up import warm_up
from fxprec.passes.graph.annotations import Rule
from fxprec.passes.policy.policy import Policy
from fxprec.scaling.loss_scaler import LossScaler, make_scaler
from fxprec.settings import Capture, Executor, Fuse, Lower, Placement, Settings

#: The class of the model, which an editor goes on to know.
_Model = TypeVar("_Model", bound=nn.Module)
_Module = TypeVar("_Module", bound=nn.Module, covariant=True)


class Converted(NamedTuple, Generic[_Module]):
    """Result of ``convert``: ``model, scaler = fxprec.convert(model)``."""

    module: _Module
    scaler: LossScaler

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"convert returns two things, model, scaler = fxprec.convert(model): this has no {name!r}")

    def __call__(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("convert returns two things: model, scaler = fxprec.convert(model)")


class _Options(TypedDict, total=False):
    """The other arguments of ``convert``, for type checkers."""

    level: str | None
    dtype: torch.dtype | None
    policy: Policy | None
    placement: Placement
    lower: Lower
    fuse: Fuse
    capture: Capture
    executor: Executor
    keep_output_dtype: bool
    scaler: LossScaler | float | Literal[False] | None
    methods: Sequence[str]


_Inputs = Sequence[Any] | Mapping[str, Any] | None


@overload
def convert(
    model: GraphModule | ExportedProgram,
    example_inputs: _Inputs = None,
    *,
    loss: None = None,
    **options: Unpack[_Options],
) -> Converted[GraphModule]: ...


@overload
def convert(
    model: _Model, example_inputs: _Inputs = None, *, loss: None = None, **options: Unpack[_Options]
) -> Converted[_Model]: ...


@overload
def convert(
    model: nn.Module | GraphModule | ExportedProgram | Callable[..., Any],
    example_inputs: _Inputs = None,
    *,
    loss: nn.Module | Callable[..., Any] | None = None,
    **options: Unpack[_Options],
) -> Converted[nn.Module]: ...


def convert(
    model: nn.Module | GraphModule | ExportedProgram | Callable[..., Any],
    example_inputs: Sequence[Any] | Mapping[str, Any] | None = None,
    *,
    level: str | None = None,
    dtype: torch.dtype | None = None,
    policy: Policy | None = None,
    placement: Placement = "mincut",
    lower: Lower = "always",
    fuse: Fuse = "auto",
    capture: Capture = "auto",
    executor: Executor = "eager",
    keep_output_dtype: bool = True,
    loss: nn.Module | Callable[..., Any] | None = None,
    scaler: LossScaler | float | Literal[False] | None = None,
    methods: Sequence[str] = (),
) -> Converted[Any]:
    """Rewrite a model to mixed precision; returns ``(module, scaler)``.

    Args:
        model: an ``nn.Module`` is converted in place: the same object comes back. A GraphModule, an ExportedProgram or
            a function of tensors gives a new module. On a CPU glibc's malloc keeps more of what is freed from then on,
            as after any large tensor (``fxprec.keep_memory``: all of it).
        example_inputs: tuple of positional or dict of keyword inputs: the graph exists at once, and casts are placed
            by their size. The forward runs on copies of them; parameters, buffers and random state are as before
            afterwards. While it runs, a copy of the weights is held, on their devices.
        level: "O0" (nothing lowered), "O1" (default), "O2" (the residual stream too), "O3" (parameters too).
        dtype: ``torch.float16`` or ``torch.bfloat16``; None: float16 for parameters on CUDA, else bfloat16.
        policy: a ``Policy``, which carries its level.
        placement: "mincut": the cheapest casts; "autocast": where torch.autocast has them.
        lower: "always": every op that the level lowers. "pays": an op stays FP32 where lowering it, with the casts that
            it takes, loses time on this device, by the costs that ``python -m fxprec calibrate`` measured or else
            shipped ones; the report names those ops, and which costs. The sizes are those of example_inputs or of the
            first call, also for later calls with other sizes; forward alone counts where gradients are off then.
            Or costs of one's own, a ``fxprec.passes.costs.device_costs.DeviceCosts``.
        fuse: "auto": regions between matmuls become Triton kernels on CUDA, but for those of few ops and few elements,
            which would keep the device waiting for Python; elsewhere native mixed kernels serve;
            True: Triton regions of any size, or an error; on a CPU regions and attention as C++ that the first call
            compiles and, with example inputs, convolutions with channels last in memory; "aten": regions that run op
            by op, to look at; False: neither, every node stays visible; ``{"fused_*gelu*": False}``: as "auto", but
            not the regions with such names.
        capture: "auto", "symbolic" (torch.fx, at once, no inputs) or "dynamo" (at the first call).
        executor: "eager" runs the rewritten graph, "inductor" compiles it.
        keep_output_dtype: outputs keep the dtypes of the original program.
        loss: a loss module or function: a new module ``(*inputs, target) -> loss`` around model and loss comes back,
            converted as one graph; ``model`` itself stays as it is.
        scaler: None: dynamic for float16, disabled for bfloat16; False: disabled; a number: static; or a LossScaler.
            The first step on float16 gradients of a loss that no scaler has scaled warns, unless it is False or 1.
        methods: other methods, by name or dotted path, that run rewritten graphs as forward does, such as
            ``("encode", "vae.decode")``; the path of a module means its forward. Called by themselves, others run as
            they did before; ``report`` lists them.

    Raises:
        TypeError: model, example inputs or scaler of a type that cannot serve.
        ValueError: an unknown level, dtype, placement, capture or executor; PolicyError for a policy that disagrees
            with the level or matches nothing; ``lower="pays"`` with placement "autocast" or level O3.
        ConversionError: converted already; wrapped in DDP, FSDP or DataParallel; only low, float64, quantized or
            complex weights; an active torch.autocast; ``fuse=True`` where no kernel runs, or no C++ compiler is. The
            model is left as it was.
        CaptureError: ``capture="symbolic"`` and the forward depends on data; names the line.

    Sources: DESIGN of torch.autocast (https://docs.pytorch.org/docs/stable/amp.html); Micikevicius et al.,
    "Mixed Precision Training", ICLR 2018.
    """
    policy = _policy(level, policy)
    device = settled_device(model, example_inputs)
    settings = Settings(
        policy=policy,
        dtype=dtype or (torch.float16 if device == "cuda" else torch.bfloat16),
        device=device,
        placement=placement,
        lower=lower,
        fuse=fuse,
        capture=capture,
        executor=executor,
        keep_output_dtype=keep_output_dtype,
    )
    made = make_scaler(scaler, settings.dtype, policy.level, device)
    settings = replace(settings, scales=scales(made))
    refuse_unfit(model, settings)
    if settings.why_slow:
        _warn_slow(settings.why_slow)
    module = _as_module(model, loss)
    check_module_overrides(policy, module)
    conversion = attach(module, replace(settings, methods=named_methods(module, methods)))
    conversion.converting = True
    try:
        if policy.level == "O3":
            conversion.undo = _lower_parameters(module, settings.dtype, policy)
        if example_inputs is not None:
            warm_up(module, conversion, example_inputs)
        conversion.capture_now(module)
        conversion.check_policy(module)
    except BaseException:
        put_back(module)
        raise
    conversion.converting = False
    if settings.device == "cpu":
        keep_some_memory()
    made.name_parameters(module)
    handed_back(made)
    return Converted(module, made)


def _policy(level: str | None, policy: Policy | None) -> Policy:
    if policy is None:
        return Policy.preset(level if level is not None else "O1")
    if not isinstance(policy, Policy):
        raise TypeError(
            f"policy must be a fxprec.Policy, not {type(policy).__name__}: Policy.preset('O1').override(...) "
            "or Policy.from_toml(path)"
        )
    if level is not None and Policy.preset(level).level != policy.level:
        raise ValueError(
            f"level={level!r} and a policy of level {policy.level!r}: a policy carries its level, leave one of them out"
        )
    return policy


@functools.cache
def _warn_slow(why: str) -> None:
    """Warn once a process: the cache remembers."""
    warnings.warn(why, category=SlowDtypeWarning, stacklevel=3)


class _Function(nn.Module):
    """A plain function of tensors as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.__dict__["forward"] = function if has_signature(function) else lambda *args, **kw: function(*args, **kw)


class _WithLoss(nn.Module):
    """Model and loss as one forward: ``(*inputs, target) -> loss``."""

    def __init__(self, model: nn.Module, loss: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        # Named arguments let static capture tell inputs from the target.
        names = _required(model)
        if names:
            self.__dict__["forward"] = _LossOf(self, names)

    def forward(self, *inputs: Any) -> Tensor:
        return self.loss(self.model(*inputs[:-1]), inputs[-1])


class _LossOf:
    """The forward of ``_WithLoss`` with names for its arguments, by which static capture tells them apart.

    It asks the module for model and loss at each call: either may have been replaced.
    """

    def __init__(self, around: _WithLoss, names: Sequence[str]) -> None:
        self._around = around
        plain = inspect.Parameter.POSITIONAL_OR_KEYWORD
        self.__signature__ = inspect.Signature([inspect.Parameter(name, plain) for name in (*names, "target")])

    def __call__(self, *inputs: Any, **named: Any) -> Tensor:
        if named:
            inputs = self.__signature__.bind(*inputs, **named).args
        return _WithLoss.forward(self._around, *inputs)


def _required(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the arguments if all are plain and required: a target can follow them in one way only."""
    parameters = inspect.signature(model.forward).parameters.values()
    plain = all(p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty for p in parameters)
    names = tuple(parameter.name for parameter in parameters)
    return names if plain and "target" not in names else ()


def _as_module(model: Any, loss: Any) -> nn.Module:
    # What is no module yet, or shared with others, becomes a module of ours, and the argument stays as it is.
    if isinstance(model, ExportedProgram):
        module: nn.Module = model.module()
    elif isinstance(model, GraphModule):
        module = GraphModule(model, copy.deepcopy(model.graph), class_name=type(model).__name__)
        module.train(model.training)
    elif isinstance(model, nn.Module):
        module = model
    else:
        module = _Function(model)
    if loss is None:
        return module
    if not callable(loss):
        raise TypeError(f"loss must be a module or a function of (output, target), not {type(loss).__name__}")
    around = _WithLoss(module, loss)
    # Not around.train(): an exported program's module refuses it.
    around.training = module.training
    if isinstance(loss, nn.Module):
        loss.train(module.training)
    return around


def _lower_parameters(module: nn.Module, dtype: torch.dtype, policy: Policy) -> Callable[[], None]:
    """Lower the parameters themselves (O3), but for those of modules that the policy keeps in FP32.

    Buffers (running statistics) stay FP32. Returns what undoes it.
    """
    modules = dict(module.named_modules())
    # By the parameter and not by the module: a tied weight that one module keeps stays FP32.
    kept = {
        id(parameter)
        for path, each in modules.items()
        if policy.of_module(path, modules) in (torch.float32, Rule.FULL, Rule.KEEP)
        for parameter in each.parameters(recurse=False)
    }
    lowered = [p for p in module.parameters() if p.dtype is torch.float32 and id(p) not in kept]
    masters = [(parameter, parameter.data, parameter._version) for parameter in lowered]
    for parameter, master, _ in masters:
        parameter.data = master.to(dtype)

    def undo() -> None:
        # Unless other values were loaded meanwhile.
        for parameter, master, version in masters:
            parameter.data = master if parameter._version == version else parameter.data.float()

    return undo
