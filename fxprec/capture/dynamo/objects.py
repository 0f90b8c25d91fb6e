"""What code asks of objects of the user's that dynamo answers as it compiles, and guards by their types alone.

=========================================  =============================================================================
``mode is SLOW``, ``mode in [SLOW]``       whether the two are one object; ``==``, where their class has no ``__eq__``
``mode`` and a global that are one object  that they are, as the code reads the one by the other
``mode in {SLOW}``, ``FACTORS.get(mode)``  which object it is, by which it is hashed
``price > Decimal(2)``                     what a class of C's says of its values
``try: config.scale``, except              that the object has no such attribute
``inspect.signature`` of an argument       all that is read of it, as of any object
``vars(config).get("scale")``              whether its dict has the key; where all of them are read, which they are
=========================================  =============================================================================

A comparison is guarded by its result: an object that is made for each call, and is another than ``SLOW`` each time, has
one graph. One that is looked up by its hash has one graph for each object, up to dynamo's limit, and then none.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any, Final

from torch import nn

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

#: Of which dynamo guards itself which object it is.
_GUARDED: Final = (type, ModuleType)


def guarding_objects() -> list[tuple[Any, str, Any]]:
    """Return what to put in the places of dynamo's for one compilation: owner, name and replacement."""
    classes = dynamo_classes()
    one_as = functools.cache(lambda source: _related(operator.is_, source))  # dynamo makes one guard of two by the same

    def again(make_guard: Callable[..., Any]) -> Callable[..., Any]:
        def met_again(source: Any, first: Any) -> Any:
            """Guard also that a local and a global are one object, which dynamo takes for granted once they were."""
            guard = make_guard(source, first)
            return one_as(first) if guard is None and first is not None and first != source else guard

        return met_again

    def guard_whether_one(left: Any, right: Any) -> None:
        one, other = unwrapped(left), unwrapped(right)
        if _may_be_one(one, other) and one.source != other.source:
            guard_source(one.source, one_as(other.source))

    def identity(compare: Callable[..., Any]) -> Callable[..., Any]:
        def compared(left: Any, right: Any) -> Any:
            answer = compare(left, right)
            if answer is not None:
                guard_whether_one(left, right)
            return answer

        return compared

    def identity_by_builtin(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(builtin: Any, frame: Any, arguments: Any, kwargs: Any) -> Any:
            answer = call(builtin, frame, arguments, kwargs)
            if builtin.fn in (operator.is_, operator.is_not):
                guard_whether_one(*arguments)
            return answer

        return called

    def identity_by_method(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(variable: Any, frame: Any, name: str, arguments: Any, kwargs: Any) -> Any:
            if name == "__ne__" and type(variable.value).__ne__ is object.__ne__:  # dynamo: what it does not implement
                raise classes.graph_break(f"__ne__ of a {type(variable.value).__name__}, which its class has not")
            answer = call(variable, frame, name, arguments, kwargs)
            if name == "__eq__" and type(variable.value).__eq__ is object.__eq__:
                guard_whether_one(variable, *arguments)
            return answer

        return called

    def hashed(hash_of: Callable[..., Any]) -> Callable[..., Any]:
        def found(variable: Any, *args: Any) -> Any:
            by_identity = not isinstance(type(variable.value).__hash__, FunctionType)
            if variable.source is not None and by_identity and not is_key_of_dict(variable.source):
                guard_identity(variable.source)  # dynamo guards keys with their dict
            return hash_of(variable, *args)

        return found

    def compared_by_its_class(compare: Callable[..., Any]) -> Callable[..., Any]:
        def compared(variable: Any, frame: Any, other: Any, operation: str) -> Any:
            method = getattr(type(variable.value), operation)
            if _is_of_c(variable, method, operation):
                operands = variable, unwrapped(other)
                if any(each.source is None and not each.is_python_constant() for each in operands):
                    raise classes.graph_break(f"{operation} of a {type(variable.value).__name__} that the code makes")
                _guard_result(functools.partial(_asked, method), *operands)
            return compare(variable, frame, other, operation)

        return compared

    def attribute(read: Callable[..., Any]) -> Callable[..., Any]:
        def found(variable: Any, frame: Any, name: str) -> Any:
            value, lacks = variable.value, hasattr(type(variable.value), "__getattr__")  # perhaps: it is called then
            try:
                return read(variable, frame, name)
            except classes.absent:
                lacks = True
                raise
            finally:
                if lacks and variable.source is not None and not isinstance(value, nn.Module):
                    guard_absence(variable.source, value, name)

        return found

    def has_key(variable: Any, _frame: Any, arguments: list[Any]) -> None:
        if variable.source is not None:
            guard_source(variable.items.item.source, _has_key(arguments[0].as_python_constant()))

    def has_keys(variable: Any) -> None:
        if variable.source is not None:
            guard_source(variable.items.item.source, _has_keys)

    def key_of_object(has: Callable[..., Any]) -> Callable[..., Any]:
        def has_key_in_dict(variable: Any, frame: Any, key: Any) -> Any:
            there = has(variable, frame, key)
            if variable.source is not None and there is (key in vars(variable.value)):  # else the code has set it
                guard_source(variable.source, _has_key(key))
            return there

        return has_key_in_dict

    around = [
        (classes.arguments, "make_dupe_guard", again),
        *((module, "vt_identity_compare", identity) for module in classes.comparing),
        (classes.object, classes.hash, hashed),
        (classes.object, classes.comparison, compared_by_its_class),
        (classes.object, classes.attribute, attribute),
        (classes.instance_dict, "install_dict_contains_guard", lambda _: has_key),
        (classes.instance_dict, "install_dict_keys_match_guard", lambda _: has_keys),
        (classes.signature, "is_matching_object", lambda _: staticmethod(lambda value: False)),
    ]  # what a torch has not, it does in another way
    if not classes.comparing:  # before torch 2.13
        around += [
            (classes.builtin, "call_function", identity_by_builtin),
            (classes.object, "call_method", identity_by_method),
            (classes.object, "has_key_in_generic_dict", key_of_object),
        ]
    return [(owner, name, wrap(getattr(owner, name))) for owner, name, wrap in around if hasattr(owner, name)]


def _may_be_one(one: Any, other: Any) -> bool:
    """Return whether two of dynamo's variables may be one object in another call: both come from outside of the frame.

    Not where their types differ, which dynamo guards.
    """
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


@functools.cache  # dynamo makes one guard of two that are added by the same function
def _has_key(key: str) -> Callable[[Any, Any], None]:
    def guard_on(builder: Any, guard: Any) -> None:
        there = key in vars(guarded_value(builder, guard))
        text = f"{key!r} is {'' if there else 'not '}in its __dict__"
        add_guard(builder, guard, lambda now: (key in vars(now)) is there, text)

    return guard_on


def _has_keys(builder: Any, guard: Any) -> None:
    keys = [*vars(guarded_value(builder, guard))]
    add_guard(builder, guard, lambda now: [*vars(now)] == keys, f"its __dict__ has {keys}")
