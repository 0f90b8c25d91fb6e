"""The proxies for tensors while a forward is traced: fx's Proxy without its silent wrong turns.

====================================  ==========================================================================
the forward says                      plain ``torch.fx.Proxy``, and what these do instead
====================================  ==========================================================================
``x += y``                            records ``x = x + y``, though others may see x: records ``operator.iadd``
``x[i] = y``                          fails: records ``operator.setitem``
``isinstance(x, Tensor)``             says no: the truth where it is certain, otherwise declines
``hasattr(x, "decompose")``           says yes: the truth for weights, otherwise declines
``x.requires_grad = True``            is lost: declines
``self.weight.shape``                 is a Proxy, which no ``if`` takes: the shape itself, guarded
``x.dtype in {a, b}``, ``str(x)``     looks for the proxy, prints it: declines
``a, b = x.shape``                    disassembles the forward each time: once
====================================  ==========================================================================
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.fx.proxy import Attribute, Proxy
from torch.overrides import is_tensor_method_or_property

from fxprec.capture.symbolic.questions import NOT_ASKED, asks_for_classes, classes_asked_for
from fxprec.passes.ops.names import canonical_op
from fxprec.passes.ops.table import row_of
from fxprec.torch_internals import for_fx, node_name_of

#: Torch turns warnings off and on to answer.
_is_method: Final = functools.lru_cache(4096)(is_tensor_method_or_property)
#: Attributes of the proxies themselves. To set any other is the forward's doing.
_OWN: Final = frozenset({"tracer", "node", "root", "attr", "_node", "tensor", "rank", "channels"})
_IN_PLACE: Final = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift".split()
#: What autograd keeps beside a tensor's values: set or None, depending on earlier calls.
_OF_AUTOGRAD: Final = frozenset({"grad", "grad_fn", "_grad", "_grad_fn", "_base", "_version", "names"})
_NUMBER_METHODS: Final = frozenset({"size", "dim", "ndimension", "numel", "nelement", "stride", "item"})
#: torch's own Python code that asks what a value is on the user's behalf.
_ASKS_FOR_USER: Final = frozenset({torch.is_tensor.__code__, type(nn.Parameter).__instancecheck__.__code__})


class TracedValue(Proxy):
    """Proxy of what an operation gave: mostly a tensor, but a size or a tuple too."""

    tracer: Any  # a ForwardTracer, which makes these

    @classmethod
    def __torch_function__(
        cls, orig_method: Any, types: Any, args: tuple[Any, ...] | None = None, kwargs: dict[str, Any] | None = None
    ) -> Any:
        # As fx has it, without its search of all arguments for proxies of other tracers: create_arg meets and declines
        # those.
        if not args or not issubclass(type(args[0]), TracedValue) or isinstance(orig_method, for_fx):
            return super().__torch_function__(orig_method, types, args, kwargs)
        tracer, name = args[0].tracer, orig_method.__name__
        if _is_method(orig_method):
            return tracer.create_proxy("call_method", name, args, kwargs or {})
        return tracer.create_proxy(
            "call_function", orig_method, args, kwargs or {}, name=node_name_of(tracer.graph, name)
        )

    @property
    def __class__(self) -> type:  # type: ignore[override]
        """Return the class that ``isinstance`` and ``case`` ask for where the real type does not match.

        ==============================================  ============================================================
        who asks                                        what they get
        ==============================================  ============================================================
        ``isinstance``, ``case`` in the user's code     Tensor (of a weight its type), where the answer is certain;
                                                        else the trace is declined, as for ``x.__class__``
        a function of torch's that this code calls      the real type: it would take a Tensor for one in memory
        ``torch.is_tensor``, ``nn.Parameter``           likewise Tensor, or declined if it may be no tensor
        ``functools.singledispatch``                    declined: it keeps the function that it found for a class
        other code of torch, fx and libraries           the real type
        ==============================================  ============================================================
        """
        frame = asking = sys._getframe(1)
        code = frame.f_code
        # A metaclass with an ``__instancecheck__`` in Python asks on behalf of the code that called isinstance.
        if code.co_name == "__instancecheck__" and frame.f_back is not None:
            asking = frame.f_back
        if (asking is not frame or asks_for_classes(code)) and self.tracer.lines.is_user(asking.f_code):
            if (classes := classes_asked_for(asking)) is NOT_ASKED:
                return type(self)
            self._belongs_to(classes)
            return self._claimed()
        if code.co_filename == functools.__file__:
            self.tracer.decline("chooses a function by the type of a traced value")
        return self._claimed() if code in _ASKS_FOR_USER else type(self)

    def _belongs_to(self, classes: Any) -> None:
        """Decline where it takes more than being a tensor to tell whether this is an instance."""
        several = classes if isinstance(classes, tuple) else getattr(classes, "__args__", (classes,))
        if not all(isinstance(each, type) and self._is_clear(each) for each in several):
            self.tracer.decline("asks for the type of a traced value")

    def _is_clear(self, cls: type) -> bool:
        """Return whether each tensor is an instance of ``cls``, or none, and the proxy gives the same answer."""
        # A traced value may be a Parameter, say, in one call and none in another.
        if issubclass(cls, Tensor):
            return cls is Tensor
        # torch.FloatTensor's metaclass asks a tensor in memory for its dtype.
        if isinstance(cls, type(torch.FloatTensor)):
            return False
        # Clear: ``object`` (all are one) and ``dict`` (none is). Not clear: ``Callable`` (only proxies are one).
        return issubclass(Tensor, cls) or not issubclass(type(self), cls)

    def _claimed(self) -> type:
        if not _is_tensor(self.node):
            self.tracer.decline("asks for the type of a traced value")
        return Tensor

    def __getattr__(self, name: str) -> Any:
        """Record an attribute that tensors have, or whatever this value may have if it is perhaps no tensor.

        One that tensors lack declines the trace where the user's code asks; torch's and libraries' code is told that
        there is none, as all are of names like ``__array__`` that the class has not.
        """
        if not name.startswith("__") and not hasattr(Tensor, name) and _is_tensor(self.node):
            if self.tracer.lines.is_user(sys._getframe(1).f_code):
                self.tracer.decline(f"asks for the attribute '{name}', which only a caller may have set on a tensor")
        elif not name.startswith("__"):
            return self._attribute(name)
        raise AttributeError(f"'Tensor' object has no attribute '{name}'")

    def _attribute(self, name: str) -> TracedAttribute:
        if name in _OF_AUTOGRAD:
            self.tracer.decline(f"reads .{name} of a tensor")
        return TracedAttribute(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _OWN:
            self.tracer.decline(f"sets the attribute '{name}' of a traced tensor")
        object.__setattr__(self, name, value)

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, index, value), {})

    def __iter__(self) -> Iterator[Any]:
        frame = sys._getframe(1)
        # Unpacking tells how many values there are; a loop does not.
        count = self.tracer.unpacks(frame.f_code).get(frame.f_lasti)
        if count is None:
            return self.tracer.decline("iterates over a traced value")
        create = self.tracer.create_proxy
        return iter([create("call_function", operator.getitem, (self, i), {}) for i in range(count)])

    def __len__(self) -> int:
        return self.tracer.decline("takes len() of a traced value")

    def __hash__(self) -> int:
        return object.__hash__(self) if self.tracer.ended else self.tracer.decline("hashes a traced value")

    # What str() and format() call; a scripted function's error too.
    def __repr__(self) -> str:
        return super().__repr__() if self.tracer.ended else self.tracer.decline("makes text of a traced value")

    def __int__(self) -> int:
        return self.tracer.decline("makes a Python number of a traced value")

    def __float__(self) -> float:
        return self.tracer.decline("makes a Python number of a traced value")


def _in_place(target: Callable[[Any, Any], Any], otherwise: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def method(self: TracedValue, other: Any) -> Any:
        # fx prints iadd as a statement, which would rebind the name that later users of a number read
        recorded = otherwise if _is_number(self.node) else target
        return self.tracer.create_proxy("call_function", recorded, (self, other), {})

    return method


for _name in _IN_PLACE:
    _bare = f"{_name}_" if _name in ("and", "or") else _name
    setattr(TracedValue, f"__i{_name}__", _in_place(getattr(operator, f"i{_name}"), getattr(operator, _bare)))


def _is_tensor(node: Node) -> bool:
    """Return whether the value is certainly one tensor."""
    if node.op == "placeholder":
        return True
    op = canonical_op(node)
    rule = None if op is None or _is_number(node) else row_of(op.name)
    if rule is None or not isinstance(rule.result, str):
        return False
    return rule.result not in ("none", "unknown") and not rule.result.endswith("*")  # "*": several tensors


def _is_number(node: Node) -> bool:
    """Return whether it is a size, or computed from nothing but sizes."""
    if node.op == "call_method":
        return node.target in _NUMBER_METHODS
    if node.target is getattr:
        return node.args[1] in ("shape", "ndim")
    if node.op != "call_function" or not node.all_input_nodes:
        return False
    computes = getattr(node.target, "__module__", None) in ("_operator", "math", "builtins")
    return computes and all(map(_is_number, node.all_input_nodes))


class TracedAttribute(Attribute, TracedValue):  # type: ignore[misc]
    """``x.shape`` or ``x.relu``, before it is known whether it is called."""

    def _attribute(self, name: str) -> TracedAttribute:
        if self.attr == "device" and name == "index":
            self.tracer.decline("reads .index of a device, which may be None")
        return super()._attribute(name)


class TracedTensor(TracedValue):
    """A parameter or buffer: its shape is known, and guarded where the forward asks for it."""

    tensor: Tensor

    def _is_clear(self, cls: type) -> bool:
        # It is the same tensor at each call, so its own class tells of all kinds of tensors.
        return issubclass(cls, Tensor) or super()._is_clear(cls)

    def _claimed(self) -> type:
        return type(self.tensor)

    def _shape(self) -> torch.Size:
        self.tracer.recorder.asks_shape(self.tensor)
        return self.tensor.shape

    @property
    def shape(self) -> torch.Size:
        return self._shape()

    @property
    def ndim(self) -> int:
        return len(self._shape())

    def size(self, dim: int | None = None) -> Any:
        return self._shape() if dim is None else self._shape()[dim]

    def dim(self) -> int:
        return len(self._shape())

    def numel(self) -> int:
        return self._shape().numel()

    nelement = numel

    def __len__(self) -> int:
        return self._shape()[0]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(type(self.tensor), name):
            if name in vars(self.tensor):
                self.tracer.decline(f"reads the attribute '{name}' that somebody set on a parameter or buffer")
            self.tracer.recorder.asks_missing(self.tensor, name)
            raise AttributeError(f"'{type(self.tensor).__name__}' object has no attribute '{name}'")
        return self._attribute(name)


class CheckedInput(TracedValue):
    """The input of a batch norm whose rank a recorded call checks: torch's own check, run while tracing, must pass."""

    rank: int
    channels: int

    def dim(self) -> int:
        return self.rank

    def size(self, dim: int | None = None) -> Any:
        return self.channels if dim is not None else self.tracer.decline("asks for the size of a traced value")
