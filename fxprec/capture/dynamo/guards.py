"""dynamo's guards, made to tell what is equal from what is the same: it compares constants by ``==``.

==================================  ==================================================================================
``self.shift = 0.0``, then ``-0.0``  equal, and ``x / self.shift`` is another
``np.float64(0.0)``, then ``-0.0``    equal, and ``math.copysign`` tells them apart
``(2,)``, then ``(2.0,)``             equal, and integers times that are floats; likewise ``{1}``, or the key of a dict
``OrderedDict.move_to_end``          the same entries, in another order (of other dicts: where code reads all keys)
another function of the same code    equal, and its closure is another one: where two modules hold one function, dynamo
                                    asks one of them alone for what its closure holds
an argument that is no leaf          where code asks for ``x.grad_fn`` or ``x.is_leaf``: of the same dtype and sizes
==================================  ==================================================================================

The checks are leaves in dynamo's own tree of guards, where it guards such a value: a graph that fails one is captured
once more, and may serve again later.
"""

from __future__ import annotations

import enum
import functools
import math
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from types import FunctionType
from typing import Any, Final

from torch import Tensor

from fxprec.capture.guard_values import is_plain, same, snapshot
from fxprec.torch_internals import add_guard, guarded_value

_NUMBERS: Final = (bool, int, float, complex)
_SEQUENCES: Final = (tuple, list)
#: Beside numbers, dynamo compares the elements of a set, and a member of a ``(str, Enum)`` equals its string.
_OF_SETS: Final = (*_NUMBERS, str, bytes)
_SETS: Final = (set, frozenset)
#: What autograd knows of a tensor and dynamo's guard of tensors does not ask. (It does for requires_grad and grad.)
_OF_AUTOGRAD: Final = frozenset({"is_leaf", "grad_fn", "_grad_fn", "_base"})


def exact(builder: Any, guard: Any) -> None:
    """Guard a constant that dynamo guards by more: the same type at every depth, the same sign."""
    value = guarded_value(builder, guard)
    if is_ambiguous(value):
        then = snapshot(value)
        add_guard(builder, guard, lambda now: same(now, then), f"the very same as {value!r}")


def exact_contents(builder: Any, guard: Any) -> None:
    """Guard what is in a container."""
    then = snapshot(guarded_value(builder, guard))
    add_guard(builder, guard, lambda now: same(now, then), f"the same as {then!r}")


def exact_keys(builder: Any, guard: Any) -> None:
    """Guard the order and the types of the keys of dicts, where dynamo guards the type of a value."""
    value = guarded_value(builder, guard)
    if isinstance(value, OrderedDict | defaultdict) and len(value) > 1:
        order = [*value]
        add_guard(builder, guard, lambda now: [*now] == order, f"the order of {order}")
    if isinstance(value, dict | set | frozenset) and is_ambiguous((*value,)):
        keys = _ambiguous_keys(value)
        add_guard(builder, guard, lambda now: same(_ambiguous_keys(now), keys), f"the types of {[*value]}")


def _ambiguous_keys(value: Any) -> set[Any]:
    """Return the keys that are, or hold, numbers; others may be objects that a guard must not keep alive."""
    return {key for key in value if is_ambiguous((key,))}


def exact_closure(builder: Any, guard: Any) -> None:
    """Guard a function with a closure by its identity."""
    value = guarded_value(builder, guard)
    if isinstance(value, FunctionType) and value.__closure__:
        own = weakref.ref(value)
        add_guard(builder, guard, lambda now: now is own(), f"the very same function {value.__qualname__}")


@functools.cache  # dynamo makes one guard of two that are added by the same function
def exact_fact(name: str) -> Callable[[Any, Any], None] | None:
    """Return what guards an attribute of tensors that code reads; None for one that dynamo guards itself."""
    if name not in _OF_AUTOGRAD:
        return None

    def guard_on(builder: Any, guard: Any) -> None:
        value = guarded_value(builder, guard)
        if isinstance(value, Tensor):
            then = _plain(getattr(value, name))
            add_guard(builder, guard, lambda now: same(_plain(getattr(now, name)), then), f"{name} is {then}")

    return guard_on


def _plain(value: Any) -> Any:
    """Return a plain value, and of an object only that it is one: a guard must not keep it alive."""
    return value if is_plain(value) else ...


def is_zero_of_numpy(value: Any) -> bool:
    """Return whether it is a floating-point zero of NumPy's, which dynamo takes for an array and compares by ``==``."""
    return value.ndim == 0 and value.dtype.kind in "fc" and value == 0


def has_sign(zero: Any) -> bool:
    """Return whether such a zero, or a part of it, is negative."""
    return any(math.copysign(1, part) < 0 for part in (zero.real, zero.imag))


def exact_zero(builder: Any, guard: Any) -> None:
    """Guard that a zero of NumPy's without a sign does not become one with a sign."""
    add_guard(builder, guard, lambda now: not (now == 0 and has_sign(now)), "no -0.0")


def also(guard_on: Callable[..., None], further: Callable[[Any, Any], None]) -> Callable[..., None]:
    """Make a method by which dynamo adds a guard add a further one."""

    @functools.wraps(guard_on)
    def guarded(builder: Any, guard: Any, *args: Any, **kwargs: Any) -> None:
        guard_on(builder, guard, *args, **kwargs)
        further(builder, guard)

    return guarded


def is_ambiguous(value: Any) -> bool:
    """Return whether something that is not the same is equal to it, although it has the same type."""
    if type(value) is float:
        return value == 0
    if type(value) is complex:
        return 0 in (value.real, value.imag)
    if isinstance(value, _SEQUENCES):
        return any(type(part) in _NUMBERS or is_ambiguous(part) for part in value)
    if isinstance(value, _SETS):
        return any(type(part) in _OF_SETS or isinstance(part, enum.Enum) or is_ambiguous(part) for part in value)
    return False
