"""Static capture: one symbolic trace of a forward, with what it read as guards, or a reason why not.

::

    class Net(nn.Module):                            %x = placeholder
        def forward(self, x, mask=None):             %fc_weight = get_attr[fc.weight]
            x = F.relu(self.fc(x))                   %fc_bias = get_attr[fc.bias]
            if mask is not None:             ->      %linear = linear(%x, %fc_weight, %fc_bias)
                x = x * mask                         %relu = relu(%linear)
            return x / self.scale                    %truediv = truediv(%relu, 2.0)
                                                     return %truediv        (guard: scale is 2.0)

The trace goes through modules of torch.nn down to functionals, and takes any input shape. The model is left as it was:
whatever the forward wrote is undone, and declines the capture, since the graph would not write it. What is left to
dynamo, each with a reason that names module or line: control flow on values, hooks on submodules, activation
checkpointing, regions of autocast or of a grad mode, autograd functions, recurrent layers, randomness drawn in Python.

What it read outside of the model is guarded too, or declines the capture (see ``surroundings``): globals, closures,
defaults, classes, and whatever is reached from them. What it wrote there is undone, and declines.
"""

from __future__ import annotations

import contextlib
import inspect
import traceback
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx import GraphModule
from torch.fx import traceback as fx_traceback

from fxprec.capture.capturing import CAPTURING, CaptureDeclined
from fxprec.capture.lazy_code import graph_module_with
from fxprec.capture.symbolic.guards import Guards
from fxprec.capture.symbolic.opaque_code import trips
from fxprec.capture.symbolic.recorder import unfit
from fxprec.capture.symbolic.tracer import ForwardTracer
from fxprec.capture.untouched import ModelState, RandomState
from fxprec.kernels.launch.operands import LOW_DTYPES
from fxprec.kernels.torch_internals import disable_current_modes, is_fx_tracing
from fxprec.passes.graph.annotations import SPARSE, notes
from fxprec.passes.ops.names import canonical_op
from fxprec.passes.ops.table import row_of
from fxprec.passes.torch_internals import FakeTensorMode, unlogged
from fxprec.torch_internals import dynamo_sees_torchs_own_call, forget_tracer, global_hooks


@dataclass(frozen=True)
class StaticCapture:
    """A traced forward.

    Attributes:
        gm: the graph; get_attr nodes name parameters and buffers by their path in the model, and hold the same tensors.
        guards: what must still hold for the graph to be right.
        owners: path of each parameter and buffer -> the dict of its module that holds it.
    """

    gm: fx.GraphModule
    guards: Guards
    owners: Mapping[str, dict[str, Any]]


def trace_static(
    root: nn.Module,
    tensor_arguments: Sequence[str],
    constants: Mapping[str, object],
    method: Callable[..., Any] | None = None,
    path: str = "",
) -> StaticCapture:
    """Trace a method of a module.

    Args:
        root: the module; its own ``forward`` attribute counts.
        tensor_arguments: the arguments that become placeholders.
        constants: values of the others; arguments in neither keep their defaults.
        method: bound, in the place of the module's forward.
        path: of the submodule that has the method.

    Raises:
        CaptureDeclined: the forward cannot be captured so; the model is as it was.
    """
    with CAPTURING, contextlib.ExitStack() as stack:
        if is_fx_tracing():
            raise CaptureDeclined("another torch.fx trace is running")
        # Constants made now serve every later call, whatever modes the caller of this one is in: they must be no
        # inference tensors, and may need gradients.
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for device in filter(torch.is_autocast_enabled, ("cpu", "cuda")):
            stack.enter_context(torch.autocast(device, enabled=False))
        # Hooks of all modules run user code around every call, which a trace through modules passes by.
        if any(global_hooks.values()):
            raise CaptureDeclined("hooks are registered for all modules")
        if (why := unfit(root)) is not None:
            raise CaptureDeclined(f"the model {why}")
        forward = method or root.forward
        arguments = _bound(forward, tensor_arguments, constants)
        tracer = ForwardTracer(root, _interpreted(root, forward) or forward, arguments, tensor_arguments, path)
        graph = _trace(tracer, root)
        _check_constants(tracer, graph)
        guards = tracer.recorder.guards()
        owners = {slot.path: slot.owner for _, slot in tracer.recorder.slots.values()}
        gm = _graph_module(tracer, graph, type(root).__name__, root.get_submodule(path).training)
        return StaticCapture(gm, guards, owners)


def _bound(
    forward: Callable[..., Any], tensor_arguments: Sequence[str], constants: Mapping[str, object]
) -> inspect.BoundArguments:
    try:
        signature = inspect.signature(forward)
    except ValueError as error:
        raise CaptureDeclined(str(error)) from None
    for name in (*tensor_arguments, *constants):
        if name not in signature.parameters:
            raise TypeError(f"the forward has no argument {name!r}: {signature}")
    return inspect.BoundArguments(signature, OrderedDict(constants))


def _interpreted(root: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any] | None:
    """Run a GraphModule node by node, so that new nodes take over the old ones' module paths and source lines."""
    if not isinstance(root, fx.GraphModule) or getattr(forward, "__func__", None) is not type(root).forward:
        return None
    for node in root.graph.nodes:
        if (what := trips(node.target)) is not None:
            raise CaptureDeclined(what)
    interpreter = fx.Interpreter(root)

    def run(*args: Any) -> Any:
        with fx_traceback.preserve_node_meta():
            return interpreter.run(*args)

    return run


def _trace(tracer: ForwardTracer, root: nn.Module) -> fx.Graph:
    """Run the trace; put the model and the random number generators back, whatever happens."""
    # Whatever the forward writes while it is traced is undone, and declines the trace.
    model, random = ModelState(root), RandomState()
    graph: fx.Graph | None = None
    reason = ""
    try:
        with dynamo_sees_torchs_own_call():
            graph = tracer.trace(root)
    except CaptureDeclined as declined:
        reason = declined.reason
        _leave_contexts(declined)
    except (KeyboardInterrupt, SystemExit):  # the user's, not the forward's
        raise
    except BaseException as error:  # such as asyncio.CancelledError, which a forward may raise at its first call only
        where = tracer.lines.place_of_error(error.__traceback__)
        message = (str(error).splitlines() or [""])[0]
        reason = f"tracing failed with {type(error).__name__}: {message}" + (f", at {where}" if where else "")
        _leave_contexts(error)
    finally:
        moved, written, outside = random.restore(), model.restore(), tracer.recorder.surroundings.contents.restore()
    # A forward may have caught the exception of a decline.
    if tracer.declined is not None:
        reason = tracer.declined.reason
    elif written is not None and not reason:
        reason = f"the forward writes {written} of the model"
    elif outside is not None and not reason:
        reason = f"the forward writes {outside}"
    elif moved is not None and not reason:
        reason = f"the forward draws random numbers in Python ({moved})"
    if reason or graph is None:
        raise CaptureDeclined(reason)
    forget_tracer(graph)
    return graph


def _leave_contexts(error: BaseException) -> None:
    """Clear the frames of a trace that was interrupted, so that generators in them end.

    That of a checkpoint would otherwise keep its saved-tensor hooks.
    """
    traceback.clear_frames(error.__traceback__)
    error.__traceback__ = None


def _check_constants(tracer: ForwardTracer, graph: fx.Graph) -> None:
    """Decline a graph that writes to a constant, or returns one that the forward makes anew at each call.

    Constants of a graph live across its calls.
    """
    # Views of a constant are constants: the list grows on the way.
    constants = {node for node in graph.find_nodes(op="get_attr", sort=False) if notes(node).kind == "constant"}
    if not constants:
        return
    # Made while tracing, as by ``torch.arange``; the others are attributes of modules.
    fresh = {node for node in constants if node.target in tracer.constant_targets}
    for node in graph.nodes:
        if node.op == "get_attr":
            continue
        if node.op == "output":
            if fresh.intersection(node.all_input_nodes):
                raise CaptureDeclined("the forward returns a tensor that it makes anew at each call")
            return
        first = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
        out = node.kwargs.get("out")
        writes = isinstance(out, fx.Node) and out in constants
        if first in constants:
            op = canonical_op(node)
            writes = writes or bool((op is not None and op.in_place) or node.kwargs.get("inplace"))
            rule = row_of(op.name) if op is not None else None
            if rule is None or rule.view:
                constants.add(node)
                if first in fresh:
                    fresh.add(node)
        if writes:
            line = (node.stack_trace or "").rpartition("\n")[2].strip()
            raise CaptureDeclined(f"the forward writes into a tensor that the graph would keep, at `{line}`")


def _graph_module(tracer: ForwardTracer, graph: fx.Graph, name: str, training: bool) -> fx.GraphModule:
    used: set[object] = set()
    for node in graph.find_nodes(op="get_attr", sort=False):
        if node.users:
            used.add(node.target)
        else:  # for instance of `if self.bias is not None`
            graph.erase_node(node)
    gm = graph_module_with({path: tensor for path, tensor in tracer.attributes.items() if path in used}, graph, name)
    gm.training = training
    return gm


def propagate_shapes(gm: GraphModule, tensors: Sequence[Tensor]) -> bool:
    """Set ``meta["val"]`` on every node and ``meta["dtype"]`` on the placeholders. No real tensor is read or written.

    Low tensors count as FP32 on the way, since casts that reconcile them with the weights are not in yet. Where an op
    fails on the fake tensors, the nodes are left without shapes: the call itself will say what is wrong.

    Returns:
        whether shapes are known now.
    """
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    alike: dict[object, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        # Of an alias: the mode, which the values keep alive, has weak references to what it saw, and
        # ``torch.utils.swap_tensors`` refuses a tensor with such.
        with disable_current_modes():
            alias = tensor.detach()
        return _widened(mode.from_tensor(alias).requires_grad_(tensor.requires_grad))

    class Shapes(FakeTensorProp):
        def fetch_attr(self, target: str) -> object:
            value = super().fetch_attr(target)
            if not isinstance(value, Tensor):
                return value
            if type(value) is not nn.Parameter or value.layout is not torch.strided:
                return fake(value)
            # The layers of a model are many of a kind, and nothing here tells two such parameters apart.
            kind = (value.shape, value.stride(), value.dtype, value.device, value.requires_grad)
            if kind not in alike:
                alike[kind] = fake(value)
            return alike[kind]

    for node, tensor in zip(gm.graph.find_nodes(op="placeholder"), tensors, strict=True):
        notes(node).dtype = tensor.dtype
        if tensor.layout in SPARSE:
            notes(node).sparse = True
    try:
        with unlogged(), torch.no_grad(), torch.random.fork_rng(devices=[]):
            Shapes(gm, mode).propagate(*[_widened(tensor.detach()) for tensor in tensors])
    except Exception:
        for node in gm.graph.nodes:
            node.meta.pop("val", None)
        return False
    return True


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in LOW_DTYPES else tensor
