"""Guards that dynamo lacks, as leaves in its own tree of guards: a graph that fails one is captured once more.

It compares constants by ``==``:

==================================  ==================================================================================
``self.shift = 0.0``, then ``-0.0``  equal, and ``x / self.shift`` is another
``np.float64(0.0)``, then ``-0.0``    equal, and ``math.copysign`` tells them apart
``(2,)``, then ``(2.0,)``             equal, and integers times that are floats; likewise ``{1}``, or the key of a dict
``OrderedDict.move_to_end``          the same entries, in another order (of other dicts: where code reads all keys)
another function of the same code    equal, for dynamo, and its closure may hold something else. dynamo guards the
                                    contents of a closure, but where two modules hold one function, in one of them only
an argument that is no leaf          of the same dtype and sizes, and ``x.is_leaf`` or ``x.grad_fn`` is another
==================================  ==================================================================================

While it compiles, it also answers what code asks of the user's objects, and guards their types alone. Guarded here is:

=========================================  =============================================================================
``mode is SLOW``, ``mode in [SLOW]``       whether the two are one object; ``==``, where their class has no ``__eq__``
``mode`` and a global that are one object  that they still are one: dynamo reads one through the other
``mode in {SLOW}``, ``FACTORS.get(mode)``  which object it is, by which it is hashed
``price > Decimal(2)``                     what a class of C's says of its values
``try: config.scale``, except              that the object has no such attribute
``inspect.signature`` of an argument       all that is read of it: dynamo guards nothing there
``vars(config).get("scale")``              whether its dict has the key; if code reads all keys, the list of keys
=========================================  =============================================================================

A comparison is guarded by its result: an object that is made for each call, and is another than ``SLOW`` each time, has
one graph. One that is looked up by its hash has one graph for each object, up to dynamo's limit, and then none.

To change it safely: a guard is made by a function ``guard_on(builder, guard)``, which dynamo calls once the graph is
there. Of several by the same function for one source it keeps one; so what gives such functions is cached, and one
question has one function. A guard must not keep the user's objects alive; a guard too few leaves a stale graph in use.
"""

from __future__ import annotations

import enum
import functools
import math
import operator
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any, Final

from torch import Tensor, nn

from fxprec.capture.capturing import Replacement, instead_of
from fxprec.capture.guard_values import is_plain, same, snapshot
from fxprec.torch_internals import (
    add_guard,
    add_relation,
    dynamo_classes,
    guard_absence,
    guard_identity,
    guard_source,
    guarded_value,
    is_key_of_dict,
    looks_into,
    unwrapped,
)

_NUMBERS: Final = (bool, int, float, complex)
_SEQUENCES: Final = (tuple, list)
#: Beside numbers, dynamo compares the elements of a set, and a member of a ``(str, Enum)`` equals its string.
_OF_SETS: Final = (*_NUMBERS, str, bytes)
_SETS: Final = (set, frozenset)
#: What autograd knows of a tensor and dynamo's guard of tensors does not ask. (It does for requires_grad and grad.)
_OF_AUTOGRAD: Final = frozenset({"is_leaf", "grad_fn", "_grad_fn", "_base"})


def exact(builder: Any, guard: Any) -> None:
    """Guard a constant, which dynamo compares by ``==`` alone, by its type at every depth and its sign as well."""
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
    # dynamo compares these without their order, which code may read.
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


@functools.cache
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


#: Of which dynamo guards itself which object it is.
_GUARDED: Final = (type, ModuleType)


def guarding_objects() -> list[Replacement]:
    """Return what to put in the places of dynamo's methods for one compilation, so that they guard what they answer."""
    classes = dynamo_classes()
    identities = _Identities()
    # Classes and methods of dynamo's (``dynamo_classes`` says which), and what stands in their place, which gets the
    # method itself as its first argument.
    found = [
        # An object is met by a second name: dynamo guards that two arguments are one, but no local and global.
        (classes.arguments, "make_dupe_guard", identities.met_again),
        # ``is``, and ``in`` of a list: dynamo compares the variables that it has for the two.
        *((module, "vt_identity_compare", identities.compared) for module in classes.comparing),
        # A hash of an object of the user's: dynamo takes that of the object at hand.
        (classes.object, classes.hash, _hashed),
        # ``==``, ``<`` of a class of C's: dynamo calls it on the objects at hand.
        (classes.object, classes.comparison, _compared_by_its_class),
        # An attribute that is not there: dynamo raises the AttributeError.
        (classes.object, classes.attribute, _attribute),
        # A look into ``__dict__`` of an object: dynamo answers by its keys now.
        (classes.instance_dict, "install_dict_contains_guard", _guard_key),
        (classes.instance_dict, "install_dict_keys_match_guard", _guard_keys),
        # ``inspect.signature`` of an argument: dynamo has a variable without guards; without it each read is guarded.
        (classes.signature, "is_matching_object", lambda _original, _value: False),
    ]
    if not classes.comparing:  # before torch 2.13 the same answers are given in other places
        found += [
            (classes.builtin, "call_function", identities.compared_by_builtin),
            (classes.object, "call_method", identities.compared_by_method),
            (classes.object, "has_key_in_generic_dict", _has_key_in_dict),
        ]
    # What a torch has not, it does in another way.
    return [instead_of(owner, name, call) for owner, name, call in found if hasattr(owner, name)]


class _Identities:
    """Guards whether two objects are one; each method stands in the place of one of dynamo's, its first argument."""

    def __init__(self) -> None:
        self._same_as = functools.cache(lambda source: _related(operator.is_, source))

    def met_again(self, make_guard: Callable[..., Any], source: Any, first: Any) -> Any:
        """Guard also that a local and a global are one object, which dynamo takes for granted once they were."""
        guard = make_guard(source, first)
        return self._same_as(first) if guard is None and first is not None and first != source else guard

    def compared(self, compare: Callable[..., Any], left: Any, right: Any) -> Any:
        answer = compare(left, right)
        if answer is not None:
            self._guard(left, right)
        return answer

    def compared_by_builtin(
        self, call: Callable[..., Any], builtin: Any, frame: Any, arguments: Any, *more: Any
    ) -> Any:
        answer = call(builtin, frame, arguments, *more)
        if builtin.fn in (operator.is_, operator.is_not):
            self._guard(*arguments)
        return answer

    def compared_by_method(
        self, call: Callable[..., Any], variable: Any, frame: Any, name: str, arguments: Any, *more: Any
    ) -> Any:
        kind = type(variable.value)
        if name == "__ne__" and kind.__ne__ is object.__ne__:  # dynamo does not implement it
            raise dynamo_classes().graph_break(f"__ne__ of a {kind.__name__}, which its class has not")
        answer = call(variable, frame, name, arguments, *more)
        if name == "__eq__" and kind.__eq__ is object.__eq__:
            self._guard(variable, *arguments)
        return answer

    def _guard(self, left: Any, right: Any) -> None:
        one, other = unwrapped(left), unwrapped(right)
        if _may_be_one(one, other) and one.source != other.source:
            guard_source(one.source, self._same_as(other.source))


def _hashed(hash_of: Callable[..., Any], variable: Any, *args: Any) -> Any:
    by_identity = not isinstance(type(variable.value).__hash__, FunctionType)
    if variable.source is not None and by_identity and not is_key_of_dict(variable.source):
        guard_identity(variable.source)  # dynamo guards keys with their dict
    return hash_of(variable, *args)


def _compared_by_its_class(compare: Callable[..., Any], variable: Any, frame: Any, other: Any, operation: str) -> Any:
    method = getattr(type(variable.value), operation)
    if _is_of_c(variable, method, operation):
        operands = variable, unwrapped(other)
        if any(each.source is None and not each.is_python_constant() for each in operands):
            kind = type(variable.value).__name__
            raise dynamo_classes().graph_break(f"{operation} of a {kind} that the code makes")
        _guard_result(functools.partial(_asked, method), *operands)
    return compare(variable, frame, other, operation)


def _attribute(read: Callable[..., Any], variable: Any, frame: Any, name: str) -> Any:
    value = variable.value
    # A ``__getattr__`` answers for attributes that are not there: then, too, it matters that this one is not.
    lacks = hasattr(type(value), "__getattr__")
    try:
        return read(variable, frame, name)
    except dynamo_classes().absent:
        lacks = True
        raise
    finally:
        if lacks and variable.source is not None and not isinstance(value, nn.Module):
            guard_absence(variable.source, value, name)


# Variables of a ``__dict__``: ``items.item`` is the variable of the object that has it.
def _guard_key(_original: Any, variable: Any, _frame: Any, arguments: list[Any]) -> None:
    if variable.source is not None:
        guard_source(variable.items.item.source, _has_key(arguments[0].as_python_constant()))


def _guard_keys(_original: Any, variable: Any) -> None:
    if variable.source is not None:
        guard_source(variable.items.item.source, _has_keys)


def _has_key_in_dict(has: Callable[..., Any], variable: Any, frame: Any, key: Any) -> Any:
    there = has(variable, frame, key)
    if variable.source is not None and there is (key in vars(variable.value)):  # else the code has set it
        guard_source(variable.source, _has_key(key))
    return there


def _may_be_one(one: Any, other: Any) -> bool:
    """Return whether two of dynamo's variables may be one object in another call: both come from outside of the frame.

    Not where their types differ, which dynamo guards.
    """
    # What the frame makes itself is the same at each call.
    if one.source is None or other.source is None or isinstance(getattr(one, "value", None), _GUARDED):
        return False
    try:
        return one.python_type() is other.python_type()
    except NotImplementedError:
        return True


def _is_of_c(variable: Any, method: Any, operation: str) -> bool:
    """Return whether C code compares objects of a class by state that dynamo does not look at."""
    of_python = isinstance(method, FunctionType) or method is getattr(object, operation)
    return not of_python and not looks_into(variable)


def _asked(method: Callable[[Any, Any], Any], one: Any, other: Any) -> Any:
    try:
        return method(one, other)
    except Exception:  # as dynamo has it
        return NotImplemented


def _guard_result(relation: Callable[[Any, Any], Any], one: Any, other: Any) -> None:
    """Guard what a relation of two objects gives; one that the frame makes is the same at each call."""
    if one.source is not None and other.source is not None:
        guard_source(one.source, _related(relation, other.source))
    elif one.source is not None:
        value = other.get_real_python_backed_value()
        guard_source(one.source, _answers(lambda now: relation(now, value)))
    elif other.source is not None:
        value = one.get_real_python_backed_value()
        guard_source(other.source, _answers(lambda now: relation(value, now)))


def _related(relation: Callable[[Any, Any], Any], source: Any) -> Callable[[Any, Any], None]:
    def guard_on(builder: Any, guard: Any) -> None:
        add_relation(builder, guard, source, relation)

    return guard_on


def _answers(ask: Callable[[Any], Any]) -> Callable[[Any, Any], None]:
    def guard_on(builder: Any, guard: Any) -> None:
        then = ask(guarded_value(builder, guard))
        add_guard(builder, guard, lambda now: ask(now) is then, f"another object answers {then}")

    return guard_on


@functools.cache
def _has_key(key: str) -> Callable[[Any, Any], None]:
    def guard_on(builder: Any, guard: Any) -> None:
        there = key in vars(guarded_value(builder, guard))
        text = f"{key!r} is {'' if there else 'not '}in its __dict__"
        add_guard(builder, guard, lambda now: (key in vars(now)) is there, text)

    return guard_on


def _has_keys(builder: Any, guard: Any) -> None:
    keys = [*vars(guarded_value(builder, guard))]
    add_guard(builder, guard, lambda now: [*vars(now)] == keys, f"its __dict__ has {keys}")
