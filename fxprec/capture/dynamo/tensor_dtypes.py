"""Follows the dtypes that a forward asks of its tensors, while dynamo traces it, to the calls that they end in.

dynamo traces under the net, where the result of a linear has the low dtype, and writes what ``h.dtype`` is there into
the graph as if the user had named it. So the variables that dynamo makes of such a dtype are marked, and a node of a
call that gets one says so::

    y = x.to(h.dtype)                       %y = to(%x, torch.bfloat16)              # meta["names_tensors_dtype"]
    p.clamp(torch.finfo(p.dtype).eps)       %clamp = clamp(%p, 1.1920929e-07)        # in FP32, as p is without the net

A dtype that the user named (``torch.bfloat16``, an attribute that holds it) is not marked, and is obeyed. ``min`` and
``max`` of ``torch.finfo(h.dtype)`` stay those of the low dtype: masks are filled with them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch.fx import Node

from fxprec.capture.tripwires import replaced
from fxprec.kernels.launch.operands import LOW_DTYPES
from fxprec.passes.ops.names import dtype_among
from fxprec.torch_internals import dynamo_classes

#: Numbers of ``torch.finfo`` that tell how fine a dtype is.
_FINE: Final = frozenset({"eps", "tiny", "smallest_normal", "smallest_subnormal", "resolution"})


@contextlib.contextmanager
def tensor_dtypes_followed(first: bool) -> Iterator[None]:
    """Within the block, which traces a frame, nodes tell whether a dtype that they name was asked of a tensor.

    Args:
        first: the frame is the method's own, and its inputs have the dtypes that the user gave them.
    """
    classes = dynamo_classes()
    create_node, make_class = classes.graph.create_node, classes.user_class.call_function
    ask_dtype, run_method = classes.tensor.method_attr_dtype, classes.tensor.call_method
    run_function = classes.torch_function.call_function
    attribute_of_constant = getattr(classes.constant, classes.attribute)
    # Variables by id, which keeps them alive: they cannot be hashed, and hold no other attributes.
    dtypes: dict[int, Any] = {}
    limits: dict[int, Any] = {}
    made_low: dict[Node, bool] = {}
    naming = False

    def any_marked(args: Any, kwargs: Any) -> bool:
        return any(id(each) in dtypes for each in (*args, *kwargs.values()))

    def mark(found: Any) -> Any:
        made = classes.constant.create(found.as_python_constant())
        dtypes[id(made)] = made
        return made

    def marked(variable: Any, found: Any) -> Any:
        """Return a variable of its own for the dtype of a tensor, or for its name, if it is the net's."""
        device = getattr(variable.device, "type", "")
        if found is None or device not in ("cpu", "cuda") or variable.dtype is not torch.get_autocast_dtype(device):
            return found
        return mark(found) if _is_low_by_net(variable.as_proxy().node, first, made_low) else found

    def dtype(variable: Any, frame: Any) -> Any:
        return marked(variable, ask_dtype(variable, frame))

    def call_method(variable: Any, frame: Any, name: str, args: Any, kwargs: Any) -> Any:
        with followed(args, kwargs):
            found = run_method(variable, frame, name, args, kwargs)
        return marked(variable, found) if name == "type" and found.is_python_constant() else found

    def call_function(variable: Any, frame: Any, args: Any, kwargs: Any) -> Any:
        with followed(args, kwargs):
            found = run_function(variable, frame, args, kwargs)
        promoted = variable.value is torch.promote_types and any_marked(args, kwargs)
        return mark(found) if promoted and found.is_python_constant() else found

    @contextlib.contextmanager
    def followed(args: Any, kwargs: Any) -> Iterator[None]:
        nonlocal naming
        outer = naming
        naming = outer or any_marked(args, kwargs)
        try:
            yield
        finally:
            naming = outer

    def create(tracer: Any, op: str, target: Any, args: Any = None, kwargs: Any = None, *rest: Any) -> Any:
        node = create_node(tracer, op, target, args, kwargs, *rest)
        if naming and dtype_among((*(args or ()), *(kwargs or {}).values())) is not None:
            node.meta["names_tensors_dtype"] = True
        return node

    def make(variable: Any, frame: Any, args: Any, kwargs: Any) -> Any:
        made = make_class(variable, frame, args, kwargs)
        if variable.value is torch.finfo and any_marked(args, kwargs):
            limits[id(made)] = made
        return made

    def attribute(variable: Any, frame: Any, name: str) -> Any:
        if name in _FINE and id(variable) in limits:
            return classes.constant.create(getattr(torch.finfo(torch.float32), name))
        return attribute_of_constant(variable, frame, name)

    with replaced(
        [
            (classes.tensor, "method_attr_dtype", dtype),
            (classes.tensor, "call_method", call_method),
            (classes.torch_function, "call_function", call_function),
            (classes.graph, "create_node", create),
            (classes.user_class, "call_function", make),
            (classes.constant, classes.attribute, attribute),
        ]
    ):
        yield


def _is_low_by_net(node: Node, first: bool, known: dict[Node, bool]) -> bool:
    """Return whether a low tensor of the traced graph would be FP32 without the net.

    Low are what the user gave (inputs of the first frame, parameters) and casts that name the dtype, and what is made
    of these alone. Of what comes from elsewhere (an earlier frame, the caller of a body) nobody can tell: the net made
    it.
    """
    if node not in known:
        known[node] = True  # of a value that is made of itself, which there is not
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
