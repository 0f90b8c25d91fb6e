"""Imports the private names of torch that the top floor needs, each under a plain name, checked when imported.

See ``kernels/torch_internals.py`` and ``passes/torch_internals.py``, whose names are not repeated here. What belongs to
dynamo, inductor and distributed is looked up when it is first used: importing fxprec imports none of them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import operator
import sys
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from types import FunctionType, SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.fx import Graph, GraphModule
from torch.nn.modules import module as nn_module
from torch.optim import Optimizer

from fxprec.kernels.torch_internals import needed, optional

with needed:
    from torch._C import _current_autograd_node as current_autograd_node  # the node that a backward runs; else None
    from torch._C._autograd import _get_sequence_nr
    from torch._C._dynamo import eval_frame
    from torch._C._dynamo.eval_frame import _FrameAction as FrameAction  # .SKIP
    from torch._C._dynamo.eval_frame import (
        reset_code,  # dynamo looks at a code object anew
        set_eval_frame,  # dynamo's callback: sets one, gives the one before
    )
    from torch._utils import _flatten_dense_tensors as flatten_dense_tensors
    from torch._utils import _unflatten_dense_tensors as unflatten_dense_tensors
    from torch.amp.grad_scaler import _refresh_per_optimizer_state
    from torch.autograd.grad_mode import _unsafe_preserve_version_counter as preserve_version_counter
    from torch.fx import _symbolic_trace
    from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
    from torch.nn.modules.batchnorm import _NormBase as NormBase
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as dispatch_mode_stack
    from torch.utils._pytree import (  # to text and back
        tree_flatten,
        tree_leaves,
        tree_map_only,
        tree_unflatten,
        treespec_dumps,
        treespec_loads,
    )

    _TORCH: Final[Any] = torch  # its stubs leave these out
    amp_unscale_ = _TORCH._amp_foreach_non_finite_check_and_unscale_  # in place: gradients, found_inf, 1 / scale
    amp_update_scale_ = _TORCH._amp_update_scale_
    foreach_add_, foreach_sub_, foreach_copy_ = _TORCH._foreach_add_, _TORCH._foreach_sub_, _TORCH._foreach_copy_
    foreach_norm = _TORCH._foreach_norm
    _disable_dynamo = _TORCH._disable_dynamo
    negated = _TORCH._neg_view  # a view
    fused_adam_, fused_adamw_, fused_sgd_ = _TORCH._fused_adam_, _TORCH._fused_adamw_, _TORCH._fused_sgd_
    aten_to_copy, aten_foreach_copy_ = torch.ops.aten._to_copy.default, torch.ops.aten._foreach_copy_.default
    aten_flash_attention_for_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

    #: The hooks that run at the call of any module, by the name of torch's dict of them.
    global_hooks: Final[Mapping[str, dict[int, Any]]] = {
        name: getattr(nn_module, name)
        for name in (
            "_global_forward_hooks",
            "_global_forward_pre_hooks",
            "_global_backward_hooks",
            "_global_backward_pre_hooks",
        )
    }
    #: What a forward calls to set its grad mode, as (owner, attribute).
    grad_modes: Final = ((torch._C, "_set_grad_enabled"), (torch._C, "_InferenceMode"))
    for _owner, _name in grad_modes:
        getattr(_owner, _name)
    #: What applying a ``torch.autograd.Function`` calls first, also where a name holds the bound method: it makes one.
    function_apply: Final = (torch.autograd.function.BackwardCFunction, "__init__")
    getattr(*function_apply)
    #: What a batch norm checks its input with, and the ranks that it lets pass: lowest, highest, torch's words.
    checks_of_input: Final[Mapping[Any, tuple[int, int, str]]] = {
        nn.BatchNorm1d._check_input_dim: (2, 3, "2D or 3D"),
        nn.BatchNorm2d._check_input_dim: (4, 4, "4D"),
        nn.BatchNorm3d._check_input_dim: (5, 5, "5D"),
        nn.SyncBatchNorm._check_input_dim: (2, 64, "at least 2D"),
    }
    #: The file of the functions that torch.fx puts in the places of others while it traces.
    fx_tracer_file: Final = str(_symbolic_trace.__file__)
    #: What torch.fx has more to ask about before it records a call of it.
    for_fx: Final[tuple[Any, ...]] = (_TORCH._C.ScriptMethod, _TORCH._ops.HigherOrderOperator)
    #: A class's own marks of these are looked up by name: there they are.
    for _owner, _name in (
        (_symbolic_trace, "_wrapped_fns_to_patch"),
        (eval_frame, "_FrameExecStrategy"),
        (eval_frame, "set_code_exec_strategy"),
        (Graph, "_target_to_str"),
        (Tensor, "_base"),
        (Tensor, "_values"),
        (Tensor, "_backward_hooks"),
        (Tensor, "_post_accumulate_grad_hooks"),
        (GradScaler, "_lazy_init_scale_growth_tracker"),
        (nn.Module, "_compiled_call_impl"),
        (nn.Module, "_wrapped_call_impl"),
        (nn.Module, "_call_impl"),
    ):
        getattr(_owner, _name)

#: The hooks on a parameter's gradient: before, and after it was accumulated. None, or a dict.
backward_hooks_of: Final = operator.attrgetter("_backward_hooks")
late_hooks_of: Final = operator.attrgetter("_post_accumulate_grad_hooks")

#: The tensor that one is a view of, as autograd knows it.
view_base: Final[Callable[[Tensor], Tensor | None]] = operator.attrgetter("_base")
#: The values of a sparse COO tensor, coalesced or not; writing to them writes to it.
sparse_values: Final[Callable[[Tensor], Tensor]] = operator.methodcaller("_values")
#: Of torch's scaler: good steps since the scale last moved; what it knows of each optimizer since its last update.
growth_tracker: Final[Callable[[GradScaler], Tensor | int]] = operator.methodcaller("_get_growth_tracker")
scaler_states: Final[Callable[[GradScaler], dict[int, dict[str, Any]]]] = operator.attrgetter("_per_optimizer_states")
#: The device mesh that one is a part of, or itself.
root_mesh: Final[Callable[[Any], Any]] = operator.methodcaller("_get_root_mesh")

_end_allocation: Final[Any] = (
    optional("torch._C:_cuda_endAllocateToPool", "a captured step that failed keeps its memory")
    if torch.version.cuda
    else None
)


def decomposition_of(op: Any) -> Callable[..., Any] | None:
    """Return the op in terms of others, as torch has it, or None."""
    from torch._decomp import decomposition_table  # 0.1 s, for those alone who ask

    return decomposition_table.get(op)


def storage_key(tensor: Tensor) -> int:
    """Return a number that two tensors share while both live if they lie in one storage, of no elements too."""
    return tensor.untyped_storage()._cdata


def sequence_number(node: Any = None) -> int:
    """Return the number of a node of autograd, in the order in which this thread made them; None: of the next one."""
    return _get_sequence_nr() if node is None else node._sequence_nr()


def run_before(edge: Any, number: int) -> None:
    """Give a node of the backward this sequence number: the highest of those that are ready runs first."""
    edge._set_sequence_nr(number)


def wrapped_functions() -> tuple[Any, str, dict[Any, Any]]:
    """Return where torch.fx keeps what ``torch.fx.wrap`` got: owner, attribute, and (scope id, name) -> scope."""
    return _symbolic_trace, "_wrapped_fns_to_patch", _symbolic_trace._wrapped_fns_to_patch


def node_name_of(graph: Graph, name: str) -> str:
    """Return the name that a node gets which calls a function of this name."""
    return graph._target_to_str(name)


def forget_tracer(graph: Graph) -> None:
    """Have a pickled graph traced again by torch.fx's own tracer."""
    graph._tracer_cls = None


def input_check_of(norm: BatchNorm) -> Any:
    """Return a key of ``checks_of_input``, or a check of the user's own."""
    return type(norm)._check_input_dim


#: The attribute of a module that calls of it go through, if it has one: what ``module.compile()`` made.
CALLED_THROUGH: Final = "_compiled_call_impl"


@functools.cache
def _of_dynamo(path: str) -> Any:
    """Return what a module of dynamo's has: ``guards:install_guard``. It is looked up, and imported, once."""
    module, _, name = path.partition(":")
    with needed:
        return getattr(importlib.import_module(f"torch._dynamo.{module}"), name)


def torch_dynamo() -> Any:
    """Import and return the package ``torch._dynamo``, which takes seconds."""
    with needed:
        import torch._dynamo

        return torch._dynamo


@contextlib.contextmanager
def dynamo_sees_torchs_own_call() -> Iterator[None]:
    """Show dynamo torch's own ``nn.Module.__call__`` around a trace of torch.fx, which replaces it.

    What stands there when dynamo is imported, which many functions of torch do at their first call, dynamo takes for
    torch's own; of modules with another one it traces all that looks for hooks, and guards what it reads there.
    """
    own = nn.Module.__call__
    early = "torch._dynamo.utils" in sys.modules
    try:
        yield
    finally:
        for name in () if early else ("torch._dynamo.utils", "torch._dynamo.variables.nn_module"):
            if name in sys.modules:
                vars(sys.modules[name])["unpatched_nn_module_call"] = own


class OpMode(TorchDispatchMode):
    """Sees every op below autograd; compiled code runs below it, and dynamo compiles nothing of what handles an op."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if torch.__version__ < "2.11" and "__torch_dispatch__" in cls.__dict__:  # later torch does so
            cls.__torch_dispatch__ = _disable_dynamo(cls.__torch_dispatch__, recursive=True)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: without this, dynamo runs no compiled code below the mode, and skips the frame for good."""
        return True


def hide_from_dynamo(function: Any, why: str, callees: bool = False) -> None:
    """Do what ``torch._dynamo.disable`` does without importing dynamo: a flag for its inliner, the frame skipped.

    Args:
        why: what an outer ``fullgraph=True`` says.
        callees: what it calls is left alone too.
    """
    function.__dict__.pop("_torchdynamo_inline", None)  # if it wraps a compiled one
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = why
    within = FrameAction.SKIP if callees else FrameAction.DEFAULT
    skip = eval_frame._FrameExecStrategy(FrameAction.SKIP, within)
    eval_frame.set_code_exec_strategy(function.__code__, skip)


@contextlib.contextmanager
def shown_to_dynamo(functions: Sequence[Any]) -> Iterator[None]:
    """Let dynamo look, within the block, into these functions that are hidden from it.

    It goes by attributes of the functions, which all threads see: no other thread compiles meanwhile.
    """
    with _of_dynamo("convert_frame:compile_lock"):
        for function in functions:
            function._torchdynamo_disable = False
        try:
            yield
        finally:
            for function in functions:
                function._torchdynamo_disable = True


def disabled_for_dynamo(function: Callable[..., Any]) -> bool:
    """Return whether a function went through ``torch._dynamo.disable`` (``torch.compiler.disable``)."""
    return getattr(function, "_torchdynamo_disable", False)


def original_of_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what ``torch.compile`` was applied to, or the function itself."""
    return getattr(function, "_torchdynamo_orig_callable", function)


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module is what ``torch.compile(model)`` gives. (Without dynamo there is none.)"""
    eval_frame_of_dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return eval_frame_of_dynamo is not None and isinstance(module, eval_frame_of_dynamo.OptimizedModule)


def skipped_frame(why: str) -> Any:
    """Return what a compile callback of dynamo's gives for a frame that is left to the interpreter."""
    ConvertFrameReturn = _of_dynamo("types:ConvertFrameReturn")
    tells = "skip_reason" in inspect.signature(ConvertFrameReturn).parameters  # since torch 2.13
    return ConvertFrameReturn(skip_reason=why) if tells else ConvertFrameReturn()


def passed_frame() -> Any:
    """Return what a compile callback gives for a frame that is left to the interpreter this once."""
    again = eval_frame._FrameExecStrategy(FrameAction.DEFAULT, FrameAction.DEFAULT)
    return _of_dynamo("types:ConvertFrameReturn")(frame_exec_strategy=again)


#: Classes and modules of dynamo's that decide what it takes, and what it looks at before it uses a graph again.
_OF_DYNAMO: Final[Mapping[str, str]] = {
    "absent": "exc:ObservedAttributeError",  # what it raises where an object has no attribute
    # makes a variable of a value from outside of the frame: wrap_symfloat, of a float
    "argument": "variables.builder:VariableBuilder",
    "array": "variables.tensor:NumpyNdarrayVariable",  # an array or scalar of NumPy's: ndim, what ``attribute`` names
    "autograd_function": "variables.misc:AutogradFunctionVariable",  # a class of autograd.Function: fn_cls, call_apply
    # one whose gradients are recorded: call_function
    "applied_function": "variables.higher_order_ops:AutogradFunctionApplyVariable",
    "builtin": "variables.builtin:BuiltinVariable",  # a builtin of Python's: fn, call_function
    "constant": "variables.constant:ConstantVariable",  # a value that is known: create
    "tensor": "variables.tensor:TensorVariable",  # a tensor: what ``attribute`` names
    "symbol": "variables.tensor:SymNodeVariable",  # a number that is not known, or a question about one: evaluate_expr
    "torch_context": "variables.torch:TorchCtxManagerClassVariable",  # a class of torch's for ``with``: call_function
    "torch_function": "variables.torch:TorchInGraphFunctionVariable",  # a function of torch's: value, call_function
    # a call of a functools.lru_cache: call_function, wrapper_obj
    "cached_function": "variables.functions:WrapperUserFunctionVariable",
    # what traces a frame: run, replace_tos_if_return_is_generator, what ``end`` names
    "frame": "symbolic_convert:InstructionTranslator",
    # an object of the user's: value, and what ``attribute``, ``comparison`` and ``hash`` name
    "object": "variables.user_defined:UserDefinedObjectVariable",
    "generator": "variables.functions:LocalGeneratorObjectVariable",  # one that a frame gives away: reconstruct
    "inference_mode": "variables.ctx_manager:InferenceModeVariable",  # torch.inference_mode in a forward: create
    # build_inline_tracer, for each function that is traced within a frame
    "inliner": "symbolic_convert:InliningInstructionTranslator",
    "random": "variables.misc:RandomVariable",  # a random.Random: is_supported_random_obj
    # getitem_const_raise_exception_if_absent, install_dict_..._guard, call_method
    "dictionary": "variables.dicts:ConstDictVariable",
    "list": "variables.lists:CommonListMethodsVariable",  # a list or deque: call_method
    "guards": "guards:GuardBuilder",  # what makes the guards: EQUALS_MATCH of constants, TYPE_MATCH
    "user_class": "variables.user_defined:UserDefinedClassVariable",  # of the user's: call_function, var_getattr, value
    "graph_break": "exc:Unsupported",  # the error that breaks a graph
    "graph": "output_graph:SubgraphTracer",  # the graph that is made: create_node
}


@functools.cache
def dynamo_classes() -> Any:
    """Return dynamo's classes by the names of ``_OF_DYNAMO``, and what differs by version of torch."""
    found = SimpleNamespace(**{name: _of_dynamo(path) for name, path in _OF_DYNAMO.items()})
    with needed:
        from torch._dynamo import guards
        from torch._dynamo.variables import builder, builtin, dicts, user_defined
    objects = sys.modules.get("torch._dynamo.variables.object_protocol")  # torch 2.13 and later
    # Where the builder is: is_int_specialization_case, which integers are constants; make_dupe_guard.
    found.arguments = builder
    found.guard_module = guards  # makes tensors of numpy's values to guard them: from_numpy
    found.end = found.frame._return.__name__  # for the end of a frame
    # Where vt_identity_compare(left, right) is: whether two variables are one object, a constant or None. Before torch
    # 2.13, which has neither this nor ``instance_dict``, objects have call_method and has_key_in_generic_dict.
    found.comparing = [each for each in (objects, builtin) if hasattr(each, "vt_identity_compare")]
    found.instance_dict = getattr(
        dicts, "DunderDictVariable", None
    )  # of an object: items.item is the object's variable
    # Of a signature from outside, without guards: is_matching_object.
    found.signature = getattr(user_defined, "InspectVariable", None)
    # Names of methods: the first three are those of torch 2.14, 2.13 and 2.14, and later ones.
    found.attribute = "var_getattr" if hasattr(found.array, "var_getattr") else "tp_getattro_impl"
    found.hash = "hash_impl" if hasattr(found.object, "hash_impl") else "get_python_hash"
    found.comparison = "tp_" * hasattr(found.object, "tp_richcompare_impl") + "richcompare_impl"
    return found


def tables_of_weights(gm: GraphModule) -> list[Any]:
    """Return dynamo's tables that hold weights weakly while it calls its backend: ``swap_tensors`` refuses those.

    torch 2.11 and later clear them (``invalidate_compile_context_weakrefs``).
    """
    if torch.__version__ >= "2.11":
        return []
    with needed:
        from torch._guards import TracingContext
    context = TracingContext.get()
    values = [node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder")]
    modes = {id(mode): mode for each in (context, *values) if (mode := getattr(each, "fake_mode", None)) is not None}
    describers = [mode.fake_tensor_converter.meta_converter.describer for mode in modes.values()]
    return [context.tensor_to_context, *(t for d in describers for t in (d.lookup_tensor, d.lookup_storage))]


#: Whether dynamo guards the constants that it reads of classes.
GUARDS_CLASSES: Final = torch.__version__ >= "2.13"


def guard_class_attribute(
    variable: Any, found: Any, name: str, guard_on: Callable[[Any, Any], None] | None = None
) -> None:
    """Guard the constant that dynamo reads of a class (``GUARDS_CLASSES`` where it does so itself).

    A value that wants another guard has it made by ``guard_on(builder, guard)``.
    """
    builder = _of_dynamo("guards:GuardBuilder")
    if variable.source is None or found.source is not None or name in ("__name__", "__qualname__"):
        return
    if guard_on is not None:
        kind = guard_on
    elif isinstance(found, _of_dynamo("variables:ConstantVariable")):
        kind = builder.CONSTANT_MATCH
    elif type(found).__name__ == "EnumVariable":  # which is a constant since
        kind = builder.ID_MATCH
    else:
        return
    guard_source(_of_dynamo("source:AttrSource")(variable.source, name), kind)


def guarded_value(builder: Any, guard: Any) -> Any:
    """Return the value that a guard of dynamo's is about, when it is made."""
    return builder.get(guard)


def add_guard(builder: Any, guard: Any, check: Callable[[Any], bool], text: str) -> None:
    """Add a check of what a guard of dynamo's is about. ``text``: what it says of itself."""
    manager = builder.get_guard_manager(guard)
    try:
        try:
            manager.add_lambda_guard(check, [text], guard.user_stack)
        except TypeError:  # torch < 2.11
            manager.add_lambda_guard(check, [text])
    except RuntimeError:  # a dict, whose guards have no room for it: after all others
        _add_to_root(builder, f"___fxprec_check({builder.arg_ref(guard)})", check, text)


def _add_to_root(builder: Any, expression: str, check: Callable[..., bool], text: str) -> None:
    """Add a guard that runs after all others: an expression that calls ``___fxprec_check``."""
    known = {**_of_dynamo("guards:_get_closure_vars")(), "___fxprec_check": check}
    builder.add_python_lambda_leaf_guard_to_root([expression], [text], known)


def function_behind(variable: Any) -> FunctionType | None:
    """Return the function that a variable of dynamo's stands for; None for one that is made in the frame."""
    try:
        function = variable.get_function()
    except NotImplementedError:
        return None
    return function if isinstance(function, FunctionType) else None


def guard_identity(source: Any) -> bool:
    """Have dynamo guard that a source gives the very same object. Return whether there is one."""
    if source is not None:
        guard_source(source, _of_dynamo("guards:GuardBuilder").ID_MATCH)
    return source is not None


def guard_source(source: Any, guard_on: Callable[[Any, Any], None]) -> None:
    """Have dynamo guard what comes from a source of its own in a way of ours: by ``guard_on(builder, guard)``."""
    _of_dynamo("guards:install_guard")(source.make_guard(guard_on))


def guard_absence(source: Any, value: Any, name: str) -> None:
    """Have dynamo guard that an object has no attribute of a name; where its class has a ``__getattr__``, its dict.

    Nothing where it or its class has one, or a property of its class fails: dynamo traces that.
    """
    builder = _of_dynamo("guards:GuardBuilder")
    found = inspect.getattr_static(value, name, None)
    if not hasattr(type(value), "__getattr__") and (found is None or inspect.ismemberdescriptor(found)):
        if "attr" in inspect.signature(builder.HASATTR).parameters:
            guard_source(source, functools.partial(builder.HASATTR, attr=name))
        else:  # torch < 2.13
            guard_source(_of_dynamo("source:AttrSource")(source, name), builder.HASATTR)
    elif found is None and hasattr(value, "__dict__"):
        guard_source(source, functools.partial(builder.NOT_PRESENT_IN_GENERIC_DICT, attr=name))


def add_relation(builder: Any, guard: Any, source: Any, relation: Callable[[Any, Any], Any]) -> None:
    """Add a check that a guard's value has the same relation to what ``source`` gives as it has now.

    After all other checks, of which each is about one of the two.
    """
    other = source.make_guard(guard.create_fn)
    then = relation(builder.get(guard), builder.get(other))
    expression = f"___fxprec_check({builder.arg_ref(guard)}, {builder.arg_ref(other)})"
    _add_to_root(builder, expression, lambda left, right: relation(left, right) is then, expression)


def looks_into(variable: Any) -> bool:
    """Return whether dynamo compares an object's built-in part (of a subclass of ``dict``) by a variable for it."""
    names = ("_base_vt", "_dict_vt", "_list_vt", "_set_vt", "_tuple_vt")  # the latter before torch 2.13
    return any(getattr(variable, name, None) is not None for name in names)


def is_key_of_dict(source: Any) -> bool:
    """Return whether a value comes from the keys of a dict, which dynamo guards with the dict."""
    return bool(source.is_dict_key())


def guard_order(variable: Any) -> None:
    """Have dynamo guard the order of the keys where it guards the keys of a dict."""
    if variable.source is not None and not _of_dynamo("source:is_constant_source")(variable.source):
        _of_dynamo("symbolic_convert:InstructionTranslator").current_tx().output.guard_on_key_order.add(variable.source)


def guard_argument(variable: Any, frame: Any, guard_on: Callable[[Any, Any], None]) -> None:
    """Have dynamo guard a tensor from outside of the frame in a way of ours: by ``guard_on(builder, guard)``.

    Nothing for one that the frame computes, unless it is an argument again, such as ``x.contiguous()`` may be.
    """
    source = variable.source
    if source is None:
        value = variable.as_proxy().node.meta.get("example_value")
        same = (each for each in frame.output.placeholders if each.meta.get("example_value") is value)
        note = next(same, SimpleNamespace(meta={})).meta.get("grapharg")
        source = None if note is None else note.source
    if source is not None:
        guard_source(source, guard_on)


def with_function(variable: Any, function: FunctionType) -> Any:
    """Return the variable of another function, called like that of ``variable``, which may be bound to an object."""
    bound = getattr(variable, "obj", None)
    return type(variable)(function) if bound is None else type(variable)(function, bound)


def value_behind(variable: Any) -> tuple[Any, list[type]]:
    """Return the value and the class that a variable of dynamo's stands for; None for a value that is not there yet."""
    if hasattr(variable, "is_realized"):
        if not variable.is_realized():
            value = variable.peek_value()
            return value, [type(value)]
        variable = variable.unwrap()
    value = vars(variable).get("value")  # what has a property of that name would make a constant of itself
    if isinstance(value, type):
        return value, [value, type(value)]
    try:
        return value, [variable.python_type()]
    except NotImplementedError:
        return value, []


def unwrapped(variable: Any) -> Any:
    """Return a variable of dynamo's, past the one that stands for it until somebody looks."""
    return variable.unwrap() if hasattr(variable, "is_realized") and variable.is_realized() else variable


def type_of_error(variable: Any) -> type[BaseException] | None:
    """Return the class of the exception that a variable of dynamo's stands for; None for anything else."""
    kind = getattr(variable, "exc_type", None)
    return kind if isinstance(kind, type) and issubclass(kind, BaseException) else None


def outlives_call(variable: Any, kept: Container[str]) -> bool:
    """Return whether a variable's value was there before the call, and is there after it.

    Args:
        kept: locals of the frame of which that is known; others are arguments, or made by the code before a break.
    """
    source: Any = getattr(variable, "source", None)
    while hasattr(source, "base"):
        source = source.base
    return source is not None and (not hasattr(source, "local_name") or source.local_name in kept)


#: The dict behind ``os.environ`` (Python's, not torch's), which is compared 30 times faster.
raw_environment: Final = operator.attrgetter("_data")


def skipped_by_dynamo(function: Callable[..., Any]) -> bool:
    """Return whether dynamo leaves its frame to the interpreter unless a graph calls it: it is torch's own code."""
    return bool(_of_dynamo("trace_rules:check")(function))


def wrap_inline(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a frame around a function of torch's own, in which dynamo captures it."""
    return _of_dynamo("external_utils:wrap_inline")(function)


def tag_activation_checkpoint() -> Any:
    """Return dynamo's operator for activation checkpointing."""
    with needed:
        from torch._higher_order_ops.wrap import tag_activation_checkpoint as operator_of_dynamo
    return operator_of_dynamo


def checkpoint_context(body: Any) -> Callable[[], Any] | None:
    """Return the ``context_fn`` of a checkpointed region of dynamo's."""
    return body.meta.get("_checkpoint_context_fn")


def is_wrapped_by_scheduler(step: Any) -> bool:
    """Return whether a learning rate scheduler of torch's counts the calls of this ``step``."""
    return getattr(step, "_wrapped_by_lr_sched", False)


def was_called(optimizer: Optimizer) -> bool | None:
    """Return the mark by which torch's schedulers tell that an optimizer has stepped; None: none has asked yet."""
    return getattr(optimizer, "_opt_called", None)


def set_called(optimizer: Any, called: bool | None) -> None:
    """Set what ``was_called`` gives."""
    if called is not None:
        optimizer._opt_called = called
    elif hasattr(optimizer, "_opt_called"):
        del optimizer._opt_called


def step_hooks(optimizer: Any) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return the hooks of this one optimizer: before a step, and after it."""
    return optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks


def place_scale(scaler: GradScaler, device: torch.device) -> None:
    """Make the tensors of a scaler's scale and growth tracker on a device, unless there are some."""
    if scaler._scale is None:
        scaler._lazy_init_scale_growth_tracker(device)


def has_scaled(scaler: GradScaler) -> bool:
    """Return whether a scaler scaled something so far: its scale is a tensor from then on."""
    return scaler._scale is not None


#: The attributes of torch's scaler that hold them.
scale_names: Final = ("_scale", "_growth_tracker")


def set_scaler_states(scaler: GradScaler, states: dict[int, dict[str, Any]]) -> None:
    """Set what ``scaler_states`` gives, of torch's own scaler."""
    scaler._per_optimizer_states = states


def fresh_states() -> dict[int, dict[str, Any]]:
    """Return what ``scaler_states`` gives after an update."""
    return defaultdict(_refresh_per_optimizer_state)


def end_allocation(device: int, pool: Any) -> None:
    """End the allocation of a CUDA graph's memory, which a capture that failed leaves open."""
    if _end_allocation is not None:
        _end_allocation(device, pool)


def running_ddp() -> Any:
    """Return the DistributedDataParallel whose forward runs, or None."""
    parallel = sys.modules.get("torch.nn.parallel.distributed")
    return None if parallel is None else parallel.DistributedDataParallel._active_ddp_module


def sharded_modules() -> list[nn.Module]:
    """Return every living module that ``fully_shard`` was applied to.

    Raises:
        ImportError: torch keeps them elsewhere.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not (states := _states_of_modules()):  # as a rule there are none, and every call asks
        return []
    return [each for each in states if isinstance(each, fsdp.FSDPModule)]


@functools.cache
def _states_of_modules() -> Mapping[nn.Module, Any]:
    with needed:
        from torch.distributed._composable_state import _module_state_mapping as states
    return states
