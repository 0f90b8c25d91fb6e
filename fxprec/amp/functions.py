"""Functions that a user wants in one precision, decorated or registered by name, and regions without casts.

::

    @amp.float_function
    def contrastive_loss(a, b): ...

    amp.register_half_function(my_ops, "correlate")      # before amp.initialize

A decorated function casts its arguments and runs outside of autocast, wherever it is called. In a converted model
dynamo captures that as a region, and the passes leave what is in it in the dtypes of its arguments. A promoting
function only casts its arguments to the widest of them.

A registered function is replaced in its module by a decorated one when ``initialize`` comes. torch is not patched: its
functions and module classes become overrides of the model's policy. They act in the models, under every spelling.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

from fxprec.amp._amp_state import Kind, Registration, state
from fxprec.errors import UnusedSettingWarning
from fxprec.model.conversion import conversion_of, is_converted
from fxprec.passes.graph.annotations import Rule, notes
from fxprec.passes.ops.names import canonical_op
from fxprec.passes.ops.table import row_of
from fxprec.passes.policy.policy import Policy
from fxprec.torch_internals import tree_map_only

P = ParamSpec("P")
R = TypeVar("R")

#: Casts by name: dynamo's graphs tell a cast that was written so from one that merely follows another tensor's dtype.
#: What has another dtype (float64, whole numbers) is never cast.
_CASTS: Final = {torch.float32: Tensor.float, torch.float16: Tensor.half, torch.bfloat16: Tensor.bfloat16}
_RULES: Final[dict[Kind, Rule]] = {"half": Rule.LOW, "float": Rule.FULL, "promote": Rule.PROMOTE}

# -- decorated ---------------------------------------------------------------------------------------------------------


def half_function(fn: Callable[P, R]) -> Callable[P, R]:
    """Decorate ``fn`` so that its arguments are cast to the low dtype, and it computes in it, at O1 and O2."""
    return decorated(fn, "half")


def float_function(fn: Callable[P, R]) -> Callable[P, R]:
    """Decorate ``fn`` so that its arguments are cast to FP32, and it computes in it, at O1 and O2."""
    return decorated(fn, "float")


def promote_function(fn: Callable[P, R]) -> Callable[P, R]:
    """Decorate ``fn`` so that arguments of several float dtypes are cast to the widest, at O1 and O2."""
    return decorated(fn, "promote")


@contextlib.contextmanager
def disable_casts() -> Iterator[None]:
    """Cast nothing within the block: models from ``initialize`` run their original forward, in FP32.

    Written inside a model's forward, it is a region in FP32.

    Raises:
        RuntimeError: at O3, where the parameters themselves are low.
    """
    # FP32 could not be had by leaving casts out at O3: there are no FP32 values.
    properties = state.opt_properties
    if properties is not None and properties.enabled and properties.level == "O3":
        raise RuntimeError(
            "amp.disable_casts: the parameters themselves are low (O3, or master_weights=False), so nothing runs in "
            "FP32 by leaving casts out. Use O1 or O2"
        )
    inside = torch.compiler.is_compiling()  # the forward that is captured is the model's own already
    bypassed = [] if inside else [conversion_of(model) for model in state.models if is_converted(model)]
    # Counted, since blocks may be nested, and other threads may have some open.
    for conversion in bypassed:
        conversion.bypassed += 1
    state.disabled += 1
    try:
        with torch.autocast(state.device, enabled=False):
            yield
    finally:
        state.disabled -= 1
        for conversion in bypassed:
            conversion.bypassed -= 1


def decorated(fn: Callable[..., Any], kind: Kind) -> Callable[..., Any]:
    """Make a function cast its arguments, where ``initialize`` lowered something and no ``disable_casts`` is open."""

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if state.low is None or state.disabled:
            return fn(*args, **kwargs)
        promotes = kind == "promote"
        dtype = widest((args, kwargs)) if promotes else state.low if kind == "half" else torch.float32
        if dtype is not None:
            args, kwargs = cast_arguments((args, kwargs), dtype, state.device)
        # Promotion changes arguments alone; what the function computes in follows from them.
        with contextlib.nullcontext() if promotes else torch.autocast(state.device, enabled=False):
            return fn(*args, **kwargs)

    # Registered functions are decorated once, however often ``initialize`` is called.
    wrapper._fxprec_amp = kind  # type: ignore[attr-defined]
    return wrapper


def cast_arguments(value: Any, dtype: torch.dtype, device: str) -> Any:
    """Cast tensors on that device type to ``dtype``; looks into lists, tuples and dicts, nested or not."""

    def cast(tensor: Tensor) -> Tensor:
        return _CASTS[dtype](tensor) if tensor.dtype in _CASTS and tensor.device.type == device else tensor

    return tree_map_only(Tensor, cast, value)


def widest(value: Any) -> torch.dtype | None:
    """Return the dtype that holds all float tensors but float64 ones, where they are of more than one; else None."""
    dtypes: set[torch.dtype] = set()
    tree_map_only(Tensor, lambda tensor: dtypes.add(tensor.dtype), value)
    found = dtypes & _CASTS.keys()
    return functools.reduce(torch.promote_types, found) if len(found) > 1 else None


# -- registered --------------------------------------------------------------------------------------------------------


def register_half_function(module: Any, name: str) -> None:
    """Make ``module.name`` a ``half_function``, from the next ``initialize`` on.

    Raises:
        ValueError: the module has no such function. TypeError: it is none.
    """
    _register(module, name, "half")


def register_float_function(module: Any, name: str) -> None:
    """Make ``module.name`` a ``float_function``; as ``register_half_function``."""
    _register(module, name, "float")


def register_promote_function(module: Any, name: str) -> None:
    """Make ``module.name`` a ``promote_function``; as ``register_half_function``."""
    _register(module, name, "promote")


@dataclass(frozen=True)
class IsOp:
    """Predicate of a policy: the rule for nodes of one canonical op."""

    op: str
    rule: Rule

    def __call__(self, node: Node) -> Rule | None:
        return self.rule if notes(node).op.name == self.op else None


def with_registered(policy: Policy, model: nn.Module) -> Policy:
    """Return the policy with an override for each registered function or module class of torch."""
    classes = {type(module) for module in model.modules()}
    for entry in state.registered:
        value, rule = getattr(entry.module, entry.name), _RULES[entry.kind]
        # An op of the table is overridden by its canonical name, so that every spelling follows.
        if entry.op is not None:
            policy = policy.override(where=IsOp(entry.op, rule))
        # A policy refuses modules that the model lacks.
        elif _is_module_class(value) and any(issubclass(each, value) for each in classes):
            policy = policy.override(modules={value: rule})
    return policy


def patch_registered(undo: contextlib.ExitStack) -> None:
    """Replace the other registered functions in their modules, each once; ``undo`` gets what takes it back."""
    for entry in state.registered:
        function = getattr(entry.module, entry.name)
        if entry.op is None and not _is_module_class(function) and not hasattr(function, "_fxprec_amp"):
            setattr(entry.module, entry.name, decorated(function, entry.kind))
            undo.callback(setattr, entry.module, entry.name, function)


def _register(module: Any, name: str, kind: Kind) -> None:
    if not hasattr(module, name):
        raise ValueError(f"No function named {name} in module {module}.")
    value = getattr(module, name)
    if not callable(value) or (isinstance(value, type) and not _is_module_class(value)):
        raise TypeError(f"{name} of {module} is {value!r}: register functions, or classes of nn.Module")
    op = None
    owner = module.__module__ if isinstance(module, type) else getattr(module, "__name__", "")
    if owner.partition(".")[0] == "torch" and not _is_module_class(value):
        # The table is asked about nodes, as in a model's graph: a graph of one call is the shortest way to one.
        graph = Graph()
        x, method = graph.placeholder("x"), module is torch.Tensor
        known = canonical_op(graph.call_method(name, (x,)) if method else graph.call_function(value, (x,)))
        # torch is never patched: what has no row cannot be reached by a policy.
        if known is None or row_of(known.name) is None:
            raise ValueError(
                f"{name} of {module} is a function of torch without a row in the op table, and torch is not patched: "
                "wrap it in a function of your own, decorated with one of amp's"
            )
        op = known.name
    if state.low is not None:
        warnings.warn(
            f"amp.register_{kind}_function({name!r}) after amp.initialize: it takes effect at the next initialize. "
            "Register functions first",
            category=UnusedSettingWarning,
            stacklevel=3,
        )
    state.registered.append(Registration(module, name, kind, op))


def _is_module_class(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module)
