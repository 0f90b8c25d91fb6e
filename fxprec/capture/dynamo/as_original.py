"""Makes a dynamo trace that runs under our autocast (the net) give the graph that it would give without it.

dynamo traces under the net, where the result of a linear has the low dtype, and writes what ``h.dtype`` is there into
the graph as if the user had named it. So the variables that dynamo makes of such a dtype are marked, and a node of a
call that gets one says so::

    y = x.to(h.dtype)                       %y = to(%x, torch.bfloat16)              # meta["names_tensors_dtype"]
    p.clamp(torch.finfo(p.dtype).eps)       %clamp = clamp(%p, 1.1920929e-07)        # in FP32, as p is without the net

A dtype that the user named (``torch.bfloat16``, an attribute that holds it) is not marked, and is obeyed. ``min`` and
``max`` of ``torch.finfo(h.dtype)`` stay those of the low dtype: masks are filled with them.

A frame in which more shows is traced once more from its start, with autocast as it is outside of the net; nothing of it
ran yet, and its guards still are those of a call under the net. So are traced frames that

- read bits: ``h.view(torch.int32)`` would have another shape, and an ``h.dtype`` that takes the bits back would name
  the low dtype; both are baked into the graph;
- enter ``torch.autocast`` by themselves: what they compute there has the dtypes that the user's own autocast gives it;
- ask for autocast's state, in the user's code: ``torch.is_autocast_enabled("cpu")``. (Installed packages may ask
  because their kernels take what arrives, which is low: they see the net.)

To change it safely: a dtype that is marked wrongly is taken for the net's, and what the user lowered on purpose becomes
FP32; one that is not marked is obeyed, and FP32 work is done in the low dtype. Neither raises. A second trace must not
repeat effects: it may only begin where nothing of the frame ran yet (``_NetShows`` is raised while dynamo traces).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch.fx import Node

from fxprec.capture.capturing import before, instead_of, replaced
from fxprec.capture.user_code import is_installed, is_torchs
from fxprec.kernels.launch.operands import LOW_DTYPES
from fxprec.passes.ops.names import canonical_name, dtype_among
from fxprec.passes.ops.table import facts_of
from fxprec.passes.torch_internals import enter_autocast, wrap_with_autocast
from fxprec.torch_internals import dynamo_classes

#: Functions of torch that tell autocast's state.
_QUESTIONS: Final = frozenset({
    "is_autocast_enabled", "is_autocast_cpu_enabled", "is_autocast_cache_enabled",
    "get_autocast_dtype", "get_autocast_cpu_dtype", "get_autocast_gpu_dtype",
})  # fmt: skip


class _NetShows(BaseException):
    """Signal that a trace shows the net. No ``Exception``: dynamo would take it for a failure, and skip the frame."""


def traced(
    trace: Callable[[], Any], without_net: Callable[[], contextlib.AbstractContextManager[Any]], first: bool
) -> Any:
    """Let dynamo trace a frame, and once more without the net if the frame shows whether it is there.

    Args:
        first: the frame is the method's own.
    """
    classes = dynamo_classes()

    def run_without_net(run: Callable[..., Any], frame: Any) -> None:
        with without_net():
            try:
                run(frame)
            finally:
                # They leave the autocast regions that the frame is in where its trace ends, and so come first.
                frame.output.call_cleanup_hooks()

    # The dtypes' patches come last, and so around these: they see a call before one of these ends the trace.
    looking = [
        instead_of(classes.graph, "create_node", _create_unless_it_shows),
        before(classes.torch_function, "call_function", _refuse_to_tell),
    ]
    try:
        with replaced(looking), tensor_dtypes_followed(first):
            return trace()
    except _NetShows:
        naming = instead_of(classes.graph, "create_node", _create_with_autocasts_own_dtype)
        with replaced([naming, instead_of(classes.frame, "run", run_without_net)]):
            return trace()


def _create_unless_it_shows(
    create: Callable[..., Any], tracer: Any, op: str, target: Any, args: Any = None, kwargs: Any = None, *rest: Any
) -> Any:
    if op.startswith("call") and (_enters_autocast(target, args, kwargs) or _reads_low(op, target, args, kwargs)):
        raise _NetShows
    return create(tracer, op, target, args, kwargs, *rest)


def _refuse_to_tell(variable: Any, frame: Any, *_: Any, **__: Any) -> None:
    """End a trace in which the user's own code asks for autocast's state."""
    asks = getattr(variable.value, "__name__", "") in _QUESTIONS and is_torchs(variable.value)
    if asks and not is_installed(frame.f_code.co_filename):
        raise _NetShows


def _create_with_autocasts_own_dtype(
    create: Callable[..., Any], tracer: Any, op: str, target: Any, args: Any = None, *rest: Any, **more: Any
) -> Any:
    # Without a dtype the region has autocast's default. The graph runs in the net, whose default is another one.
    if target is enter_autocast and args[1] is None:
        args = (args[0], torch.get_autocast_dtype(args[0]), *args[2:])
    return create(tracer, op, target, args, *rest, **more)


def _enters_autocast(target: Any, args: Any, kwargs: Any) -> bool:
    if target is not enter_autocast and target is not wrap_with_autocast:
        return False
    return bool(args[2] if len(args) > 2 else (kwargs or {}).get("enabled", True))


def _reads_low(op: str, target: Any, args: Any, kwargs: Any) -> bool:
    """Return whether a call reads bits from, or makes them into, the dtype of the autocast that is on."""
    if not args or not isinstance(args[0], Node):
        return False
    named = canonical_name(target, op)
    if named is None or not facts_of(named.name).bits:
        return False
    value, dtype = args[0].meta.get("example_value"), dtype_among((*args, *(kwargs or {}).values()))
    device = value.device.type if isinstance(value, torch.Tensor) else ""
    if dtype is None or device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return False
    return torch.get_autocast_dtype(device) in (dtype, value.dtype)


#: Numbers of ``torch.finfo`` that tell how fine a dtype is.
_FINE: Final = frozenset({"eps", "tiny", "smallest_normal", "smallest_subnormal", "resolution"})


def tensor_dtypes_followed(first: bool) -> contextlib.AbstractContextManager[None]:
    """Within the block, which traces a frame, nodes tell whether a dtype that they name was asked of a tensor.

    Args:
        first: the frame is the method's own, and its inputs have the dtypes that the user gave them.
    """
    classes, followed = dynamo_classes(), _FollowedDtypes(first)
    return replaced(
        [
            instead_of(classes.tensor, "method_attr_dtype", followed.dtype),
            instead_of(classes.tensor, "call_method", followed.call_method),
            instead_of(classes.torch_function, "call_function", followed.call_function),
            instead_of(classes.graph, "create_node", followed.create_node),
            instead_of(classes.user_class, "call_function", followed.call_of_class),
            instead_of(classes.constant, classes.attribute, followed.attribute),
        ]
    )


class _FollowedDtypes:
    """The variables of dynamo that hold a dtype of the net's, while one frame is traced.

    Each method stands in the place of one of dynamo's, its first argument.
    """

    def __init__(self, first: bool) -> None:
        self._first = first
        # Variables by id, and kept alive, so that no other gets it: they cannot be hashed, and take no attributes.
        self._dtypes: dict[int, Any] = {}
        self._limits: dict[int, Any] = {}
        self._made_low: dict[Node, bool] = {}
        self._naming = False

    def dtype(self, ask: Callable[..., Any], variable: Any, frame: Any) -> Any:
        return self._marked(variable, ask(variable, frame))

    def call_method(self, run: Callable[..., Any], variable: Any, frame: Any, name: str, args: Any, kwargs: Any) -> Any:
        with self._named_by(args, kwargs):
            found = run(variable, frame, name, args, kwargs)
        return self._marked(variable, found) if name == "type" and found.is_python_constant() else found

    def call_function(self, run: Callable[..., Any], variable: Any, frame: Any, args: Any, kwargs: Any) -> Any:
        with self._named_by(args, kwargs):
            found = run(variable, frame, args, kwargs)
        promoted = variable.value is torch.promote_types and self._any_marked(args, kwargs)
        return self._mark(found) if promoted and found.is_python_constant() else found

    def create_node(
        self,
        create: Callable[..., Any],
        tracer: Any,
        op: str,
        target: Any,
        args: Any = None,
        kwargs: Any = None,
        *rest: Any,
    ) -> Any:
        node = create(tracer, op, target, args, kwargs, *rest)
        if self._naming and dtype_among((*(args or ()), *(kwargs or {}).values())) is not None:
            node.meta["names_tensors_dtype"] = True
        return node

    def call_of_class(self, call: Callable[..., Any], variable: Any, frame: Any, args: Any, kwargs: Any) -> Any:
        made = call(variable, frame, args, kwargs)
        if variable.value is torch.finfo and self._any_marked(args, kwargs):
            self._limits[id(made)] = made
        return made

    def attribute(self, read: Callable[..., Any], variable: Any, frame: Any, name: str) -> Any:
        if name in _FINE and id(variable) in self._limits:
            return dynamo_classes().constant.create(getattr(torch.finfo(torch.float32), name))
        return read(variable, frame, name)

    def _any_marked(self, args: Any, kwargs: Any) -> bool:
        return any(id(each) in self._dtypes for each in (*args, *kwargs.values()))

    def _mark(self, found: Any) -> Any:
        made = dynamo_classes().constant.create(found.as_python_constant())
        self._dtypes[id(made)] = made
        return made

    def _marked(self, variable: Any, found: Any) -> Any:
        """Return a variable of its own for the dtype of a tensor (of ``x.type()``, for its name) if it is the net's."""
        device = getattr(variable.device, "type", "")
        if found is None or device not in ("cpu", "cuda") or variable.dtype is not torch.get_autocast_dtype(device):
            return found
        is_nets = _is_low_by_net(variable.as_proxy().node, self._first, self._made_low)
        return self._mark(found) if is_nets else found

    @contextlib.contextmanager
    def _named_by(self, args: Any, kwargs: Any) -> Iterator[None]:
        """Within the block nodes are made for a call, which may name such a dtype."""
        outer = self._naming
        self._naming = outer or self._any_marked(args, kwargs)
        try:
            yield
        finally:
            self._naming = outer


def _is_low_by_net(node: Node, first: bool, known: dict[Node, bool]) -> bool:
    """Return whether a low tensor of the traced graph would be FP32 without the net.

    Low without it, too, are what the user gave (inputs of the first frame, parameters) and casts that name the dtype,
    and what is made of these alone. Of what comes from elsewhere (an earlier frame, the caller of a body) nobody can
    tell: it counts as made by the net.
    """
    if node not in known:
        # What the user gave is low by the user's will; what comes from an earlier frame may be the net's.
        value = node.meta.get("example_value")
        if node.op in ("placeholder", "get_attr"):
            known[node] = not (isinstance(value, torch.nn.Parameter) or (first and "grapharg" in node.meta))
        elif "names_tensors_dtype" not in node.meta and _names_low(node):
            known[node] = False
        else:
            known[node] = any(
                any(each.dtype not in LOW_DTYPES for each in floats) or _is_low_by_net(source, first, known)
                for source in node.all_input_nodes
                if (floats := _floats_of(source.meta.get("example_value")))
            )
    return known[node]


def _floats_of(value: object) -> list[torch.Tensor]:
    """Return the float tensors of a value, which may be a list of them."""
    parts = value if isinstance(value, tuple | list) else (value,)
    return [each for each in parts if isinstance(each, torch.Tensor) and each.is_floating_point()]


def _names_low(node: Node) -> bool:
    """Return whether a call names a low dtype: among its arguments, or by its name, as ``x.bfloat16()`` does."""
    return dtype_among((*node.args, *node.kwargs.values())) in LOW_DTYPES or str(node.target) in ("half", "bfloat16")
