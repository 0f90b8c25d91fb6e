"""Follows the dtypes that a forward asks of its tensors, while dynamo traces it, to the calls that they end in.

dynamo traces under the net, where the result of a linear has the low dtype, and writes what ``h.dtype`` is there into
the graph as if the user had named it. So the variables that dynamo makes of such a dtype are marked, and a node of a
call that gets one says whose dtype it was::

    y = x.to(h.dtype)                       %y = to(%x, torch.bfloat16)              # meta["dtype_of"] = "linear"
    p.clamp(torch.finfo(p.dtype).eps)       %clamp = clamp(%p, 1.1920929e-07)        # in FP32, as p is without the net

A dtype that the user named (``torch.bfloat16``, an attribute that holds it) is not marked, and is obeyed. ``min`` and
``max`` of ``torch.finfo(h.dtype)`` stay those of the low dtype: masks are filled with them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final

import torch

from fxprec.capture.tripwires import replaced
from fxprec.passes.ops.names import dtype_among
from fxprec.torch_internals import dynamo_classes

#: Numbers of ``torch.finfo`` that tell how fine a dtype is.
_FINE: Final = frozenset({"eps", "tiny", "smallest_normal", "smallest_subnormal", "resolution"})


@contextlib.contextmanager
def tensor_dtypes_followed() -> Iterator[None]:
    """Within the block, which traces a frame, nodes tell of the tensors whose dtypes they name."""
    classes = dynamo_classes()
    create_node, make_class = classes.graph.create_node, classes.user_class.call_function
    ask_dtype, run_method = classes.tensor.method_attr_dtype, classes.tensor.call_method
    run_function = classes.torch_function.call_function
    attribute_of_constant = getattr(classes.constant, classes.attribute)
    # By id, with the variable, which must stay alive: variables cannot be hashed, and hold no other attributes.
    names: dict[int, tuple[Any, str]] = {}
    limits: dict[int, Any] = {}
    naming = ""

    def marked(variable: Any, found: Any) -> Any:
        """Return a variable of its own for the dtype of a tensor, or for its name, if it is the net's."""
        device = getattr(variable.device, "type", "")
        if found is None or device not in ("cpu", "cuda") or variable.dtype is not torch.get_autocast_dtype(device):
            return found
        found = classes.constant.create(found.as_python_constant())
        names[id(found)] = found, variable.as_proxy().node.name
        return found

    def dtype(variable: Any, frame: Any) -> Any:
        return marked(variable, ask_dtype(variable, frame))

    def call_method(variable: Any, frame: Any, name: str, args: Any, kwargs: Any) -> Any:
        with followed(args, kwargs):
            found = run_method(variable, frame, name, args, kwargs)
        return marked(variable, found) if name == "type" and found.is_python_constant() else found

    def call_function(variable: Any, frame: Any, args: Any, kwargs: Any) -> Any:
        with followed(args, kwargs):
            return run_function(variable, frame, args, kwargs)

    @contextlib.contextmanager
    def followed(args: Any, kwargs: Any) -> Iterator[None]:
        nonlocal naming
        outer = naming
        naming = next((names[id(each)][1] for each in (*args, *kwargs.values()) if id(each) in names), outer)
        try:
            yield
        finally:
            naming = outer

    def create(tracer: Any, op: str, target: Any, args: Any = None, kwargs: Any = None, *rest: Any) -> Any:
        node = create_node(tracer, op, target, args, kwargs, *rest)
        if naming and dtype_among((*(args or ()), *(kwargs or {}).values())) is not None:
            node.meta["dtype_of"] = naming
        return node

    def make(variable: Any, frame: Any, args: Any, kwargs: Any) -> Any:
        made = make_class(variable, frame, args, kwargs)
        if variable.value is torch.finfo and any(id(each) in names for each in (*args, *kwargs.values())):
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
