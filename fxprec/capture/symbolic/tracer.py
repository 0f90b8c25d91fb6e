"""Traces a forward into an fx graph: through torch.nn modules down to functionals, declining what a graph cannot hold.

What runs on real tensors while tracing would be a constant of the graph (``RealTensorOps``).
"""

from __future__ import annotations

import dis
import inspect
import itertools
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from types import CodeType, FunctionType, MethodType
from typing import Any, Final, NoReturn

import torch
from torch import Tensor, fx, nn
from torch.fx.immutable_collections import immutable_dict, immutable_list
from torch.fx.node import has_side_effect
from torch.fx.traceback import has_preserved_node_meta
from torch.overrides import handle_torch_function, has_torch_function

from fxprec.capture.capturing import CaptureDeclined, replaced
from fxprec.capture.originals import original_class
from fxprec.capture.pytrees import has_more_than, made_by_dataclass, made_by_namedtuple
from fxprec.capture.stepwise import close_steps, is_stepwise
from fxprec.capture.symbolic.opaque_code import tripwires
from fxprec.capture.symbolic.recorder import Recorder
from fxprec.capture.symbolic.source import CHECKPOINTS, SourceLines
from fxprec.capture.symbolic.traced_value import CheckedInput, TracedTensor, TracedValue
from fxprec.capture.user_code import is_torchs
from fxprec.kernels.rows.run.region import FusedRegion
from fxprec.passes.graph.annotations import notes
from fxprec.passes.graph.new_node import new_node
from fxprec.passes.torch_internals import HigherOrderOperator
from fxprec.torch_internals import BatchNorm, OpMode, checks_of_input, input_check_of, tree_leaves, wrapped_functions


class RealTensorOps(OpMode):
    """Lets constants be made (``torch.arange(n)``), and declines before a weight is read or written, or a number drawn.

    Attributes:
        tensors: those that were made while tracing, by id.
    """

    def __init__(self, decline: Callable[[str], NoReturn]) -> None:
        super().__init__()
        self._decline = decline
        self.tensors: dict[int, Tensor] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._decline(f"draws random numbers while tracing ({func})")
        # This one brings in a tensor made of Python numbers.
        if func is not torch.ops.aten.lift_fresh.default:
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, Tensor) and id(leaf) not in self.tensors:
                    self._decline(f"computes with the values of a tensor while tracing ({func})")
        result = func(*args, **kwargs)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.tensors[id(leaf)] = leaf
        return result


_PLAIN: Final = frozenset({type(None), bool, int, float, complex, str, torch.dtype, torch.device, type(...)})
_DECLINED_METHODS: Final = {"numpy": "leaves torch for numpy", "backward": "runs a backward pass"}


def check_dim(dim: int, lowest: int, highest: int, expected: str) -> None:
    """Check the rank as torch's batch norms do, at run time: the graph calls it with ``x.dim()``."""
    # Fx traces the graph's code again, for instance when it is unpickled.
    if has_torch_function((dim,)):
        return handle_torch_function(check_dim, (dim,), dim, lowest, highest, expected)
    if not lowest <= dim <= highest:
        raise ValueError(f"expected {expected} input (got {dim}D input)")


has_side_effect(check_dim)


class ForwardTracer(fx.Tracer):
    """Records one run of ``forward``, in this thread; modules that other threads call go on as ever.

    Args:
        root: the module whose forward it is (an empty one for a plain function).
        forward: what is called.
        arguments: the arguments that are no tensors, bound to the forward's signature.
        names: the tensor arguments, in the order of their placeholders.
        path: of the submodule whose method ``forward`` is.

    Attributes:
        recorder: what was read of the modules.
        attributes: value of every get_attr target: parameters, buffers, and tensors made while tracing.
        constant_targets: targets of the tensors that were made while tracing.
        declined: the first decline, even if the forward caught it.
        ended: the trace is over. A trace that meets a value of it that was left behind declines.
    """

    #: Read by graph modules of ours (``passes/graph/exact_graph.py``): these run as a forward, and are not copied.
    looks_into_graphs: Final = True

    def __init__(
        self,
        root: nn.Module,
        forward: Callable[..., Any],
        arguments: inspect.BoundArguments,
        names: Sequence[str],
        path: str = "",
    ) -> None:
        super().__init__()
        self.lines = SourceLines(ForwardTracer._run_forward.__code__)
        self.recorder = Recorder(root, self.decline)
        self.attributes: dict[str, Any] = {}
        self.constant_targets: set[str] = set()
        self.declined: CaptureDeclined | None = None
        self._forward, self._arguments, self._names, self._path = forward, arguments, names, path
        self._values: dict[str, TracedValue] = {}
        self._real = RealTensorOps(self.decline)
        self._accepted: set[Any] = set()
        self._objects: dict[int, tuple[Any, fx.Node]] = {}
        self._unpacks: dict[CodeType, dict[int, int]] = {}
        self._returning = self.ended = False
        self._thread = threading.get_ident()
        namespace = sys.modules.get(getattr(forward, "__module__", None) or "")
        # There, functions imported from math by name are recorded too.
        if namespace is not None:
            self._autowrap_search.append(namespace)

    def decline(self, reason: str) -> NoReturn:
        """Give up, naming the user's line."""
        frame, why = self.lines.user_frame(sys._getframe(1))
        if why == CHECKPOINTS:
            reason = why
        error = CaptureDeclined(reason if frame is None else f"{reason}, at {self.lines.place(frame, frame.f_lineno)}")
        self.declined = self.declined or error
        raise error

    def unpacks(self, code: CodeType) -> dict[int, int]:
        """Return the instructions of ``code`` that unpack a sequence: offset -> number of targets."""
        if code not in self._unpacks:
            found = (i for i in dis.get_instructions(code) if i.opname == "UNPACK_SEQUENCE")
            self._unpacks[code] = {instruction.offset: instruction.argval for instruction in found}
        return self._unpacks[code]

    def trace(self, root: nn.Module | Callable[..., Any], concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        """Trace, through functions given to ``torch.fx.wrap`` too.

        fx would record a call of one as a single node, and what it computes would stay unseen.
        """
        owner, attribute, wrapped = wrapped_functions()
        leaves = {key: scope for key, scope in wrapped.items() if key[1] not in scope}  # builtins, such as len
        try:
            with replaced([(owner, attribute, leaves)]):
                return super().trace(root, concrete_args)
        finally:
            self.ended = True

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        for name in self._names:
            self._arguments.arguments[name] = self.create_proxy("placeholder", name, (), {})
        order = self._arguments.signature.parameters
        self._arguments.arguments = {n: self._arguments.arguments[n] for n in order if n in self._arguments.arguments}
        # A lambda, since fx takes the annotations of a method over to the graph.
        return lambda: self._run_forward(), []

    def _run_forward(self) -> Any:
        patches = [*tripwires(self.decline), (nn.Module, "__getattribute__", self.recorder.getattribute())]
        # Of a submodule's method: the modules on its path are on the stack, as if they had been called.
        owner = self.root
        for part in self._path.split(".") if self._path else ():
            owner = owner.get_submodule(part)
            path = self.path_of_module(owner)
            self.module_stack[path] = path, original_class(owner)
        with replaced(patches), self._real, self.recorder.opaque:
            forward = self._forward
            self._look_through(forward, owner)
            if isinstance(owner, BatchNorm) and getattr(forward, "__func__", None) is original_class(owner).forward:
                forward = self._with_recorded_check(owner, forward)
            output = forward(*self._arguments.args, **self._arguments.kwargs)
            self._returning = True
            return self.create_arg(output)

    def _look_through(self, forward: Callable[..., Any], owner: nn.Module) -> None:
        """Guard what the forward's code reads, before it runs; and the class must keep that forward."""
        self.recorder.traces(forward)
        if isinstance(forward, MethodType) and forward.__self__ is owner:
            self.recorder.traces_method(owner, forward.__name__)
        # A graph module calls its functions by nodes, which no bytecode shows.
        for node in self.root.graph.nodes if isinstance(self.root, fx.GraphModule) else ():
            if node.op == "call_function":
                self.recorder.traces(node.target)

    def proxy(self, node: fx.Node) -> TracedValue:
        return TracedValue(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return False

    def path_of_module(self, mod: nn.Module) -> str:
        path = (self.submodule_paths or {}).get(mod)
        return self.decline(f"calls a {type(mod).__name__} that is no submodule") if path is None else path

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        # Guards know from here on that hooks of it would have run.
        self.recorder.called(m)
        # Past Module.__call__, which runs hooks: there are none.
        forward = m.as_ops if isinstance(m, FusedRegion) else m.forward
        if isinstance(m, BatchNorm):
            forward = self._with_recorded_check(m, forward)
        path = self.path_of_module(m)
        calls = self.num_calls[path] = self.num_calls.get(path, -1) + 1
        self.module_stack[f"{path}@{calls}" if calls else path] = path, original_class(m)
        try:
            return forward(*args, **kwargs)
        finally:
            self.module_stack.popitem()

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if not isinstance(attr_val, Tensor) or threading.get_ident() != self._thread:
            return attr_val
        weight = self._weight(attr_val)
        return attr_val if weight is None else weight

    def create_node(
        self,
        kind: str,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str | None = None,
        type_expr: Any = None,
    ) -> fx.Node:
        # A forward may keep a value in a global; a later trace finds it there.
        if self.ended:
            self.decline("uses a traced value that an earlier trace left behind")
        # Each target is judged once; the same few are called in layer after layer.
        if kind == "call_function" and target not in self._accepted:
            self._accept(target)
        elif kind == "call_method" and target in _DECLINED_METHODS:
            self.decline(_DECLINED_METHODS[target])
        # A GraphModule is interpreted (``trace._interpreted``): fx copies the meta of its nodes to the new ones.
        if has_preserved_node_meta():
            node = super().create_node(kind, target, args, kwargs, name, type_expr)
        else:
            node = new_node(self.graph, kind, target, args, kwargs, name, type_expr)
        if kind not in ("placeholder", "output"):
            frame, why = self.lines.user_frame(sys._getframe(1))
            if why is not None:
                self.decline(why)
            meta = node.meta
            if frame is not None and "stack_trace" not in meta:
                meta["stack_trace"] = self.lines.stack_trace(frame)
            if self.module_stack and "nn_module_stack" not in meta:
                meta["nn_module_stack"] = dict(self.module_stack)  # the last key names the call
        return node

    def create_arg(self, a: Any) -> Any:
        kind = type(a)
        if kind in _PLAIN or kind is fx.Node:
            return a
        if issubclass(kind, fx.Proxy):
            if a.tracer is not self:
                self.decline("uses a traced value that an earlier trace left behind")
            return a.node
        # The caller gets a Size, as from the original.
        if kind is torch.Size and self._returning:
            return self._object_node(a, (tuple([self.create_arg(element) for element in a]),), {})
        # By the exact type first: these are nearly all, and isinstance asks proxies.
        if kind is tuple or kind is torch.Size:
            return tuple([self.create_arg(element) for element in a])
        if kind is list or kind is immutable_list:
            return [self.create_arg(element) for element in a]
        if (kind is dict or kind is immutable_dict) and all(type(key) is str for key in a):
            return {key: self.create_arg(value) for key, value in a.items()}
        if kind is slice:
            return slice(self.create_arg(a.start), self.create_arg(a.stop), self.create_arg(a.step))
        if isinstance(a, Tensor):
            return self._tensor(a)
        if isinstance(a, tuple) and hasattr(kind, "_fields") and made_by_namedtuple(kind) and not has_more_than(a, ()):
            return self._object_node(a, tuple([self.create_arg(element) for element in a]), {})
        if made_by_dataclass(kind):
            values = {field.name: self.create_arg(getattr(a, field.name)) for field in fields(kind)}  # type: ignore[arg-type]
            if not has_more_than(a, values):
                return self._object_node(a, (), values)
        # A coroutine that nobody awaits makes Python warn.
        if is_stepwise(a):
            close_steps(a)
            self.decline(f"returns a {kind.__name__}, which runs after the call")
        if isinstance(a, tuple | list | dict | nn.Module):
            self.decline(f"passes on or returns an object ({kind.__name__})")
        # Torch's are options of its functions.
        if is_dataclass(kind) and (self._returning or not is_torchs(kind)):
            self.decline(f"makes a {kind.__name__}, whose constructor does more than hold its fields")
        return super().create_arg(a)

    def _object_node(self, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        """Return the node that makes an object, one however often it is passed on."""
        if id(value) not in self._objects:
            self._objects[id(value)] = value, self.create_node("call_function", type(value), args, kwargs)
        return self._objects[id(value)][1]

    def to_bool(self, obj: fx.Proxy) -> bool:
        return self.decline("branches on a traced value")

    def _weight(self, tensor: Tensor) -> TracedValue | None:
        """Return the proxy of a parameter or buffer, one however often it is read; None for another tensor."""
        found = self.recorder.slots.get(id(tensor))
        if found is None:
            return None
        kind, slot = found
        if slot.path not in self._values:
            value = TracedTensor(self._attribute(slot.path, kind, tensor), self)
            value.tensor = tensor
            self._values[slot.path] = value
        return self._values[slot.path]

    def _tensor(self, tensor: Tensor) -> fx.Node:
        if (weight := self._weight(tensor)) is not None:
            return weight.node
        if type(tensor) is not Tensor or tensor.requires_grad:
            self.decline(f"uses a {type(tensor).__name__} that is no parameter or buffer")
        path = self.tensor_attrs.get(tensor)
        if path is None:
            if id(tensor) not in self._real.tensors:
                self.decline("uses a tensor that is no attribute of the model")
            # A graph module that is converted has constants of its own, under such names.
            taken = self.constant_targets.union(slot.path for _, slot in self.recorder.slots.values())
            path = next(
                p for n in itertools.count(len(self.constant_targets)) if (p := f"_tensor_constant{n}") not in taken
            )
            self.constant_targets.add(path)
            self.tensor_attrs[tensor] = path
        if path not in self._values:
            self._values[path] = self.proxy(self._attribute(path, "constant", tensor))
        return self._values[path].node

    def _attribute(self, path: str, kind: str, tensor: Tensor) -> fx.Node:
        node = self.create_node("get_attr", path, (), {})
        notes(node).kind = kind
        self.attributes[path] = tensor
        return node

    def _accept(self, target: Any) -> None:
        name = getattr(target, "__name__", str(target))
        if isinstance(target, HigherOrderOperator):
            self.decline(f"calls the higher-order operator {name}")
        if target in (torch.autograd.grad, torch.autograd.backward):
            self.decline("runs a backward pass")
        if isinstance(target, FunctionType) and target.__module__.partition(".")[0] not in ("torch", "fxprec"):
            self.decline(f"calls {name}, which is no function of torch")
        self._accepted.add(target)

    def _with_recorded_check(self, norm: BatchNorm, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Make the norm's check of the input's rank a node; while tracing, it sees a rank that passes."""
        ranks = checks_of_input.get(input_check_of(norm))
        if ranks is None or original_class(norm).forward not in (BatchNorm.forward, nn.SyncBatchNorm.forward):
            return forward
        if norm.training and norm.track_running_stats and norm.momentum is None:
            self.decline(f"'{self.path_of_module(norm)}' has momentum=None, an average over a count known at run time")
        if norm.training and isinstance(norm, nn.SyncBatchNorm):
            self.decline(f"'{self.path_of_module(norm)}' is a SyncBatchNorm in training, which asks the process group")

        def checked(input: Any) -> Any:
            if not isinstance(input, fx.Proxy):
                return forward(input)
            dim = self.create_proxy("call_method", "dim", (input,), {})
            self.create_proxy("call_function", check_dim, (dim, *ranks), {})
            proxy = CheckedInput(input.node, self)
            proxy.rank, proxy.channels = ranks[0], norm.num_features
            return forward(proxy)

        return checked
