"""What distinguishes one call of a forward from another: which arguments are tensors, and what the others are."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from fxprec.capture.capturing import CaptureDeclined
from fxprec.capture.guard_values import same

#: The hashable part of a key: (name, value) pairs of the arguments that are no tensors.
Constants = tuple[tuple[str, Hashable], ...]
#: Names of the arguments that are tensors, and the constants that the others are.
Key = tuple[tuple[str, ...], Constants]

#: Types of which no program can tell two equal values apart, so that ``==`` compares them. By the exact type: an
#: instance of a subclass counts as an object, which declines the capture.
_EXACT: Final = frozenset(
    {type(None), str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format, type(...)}
)
_NUMBERS: Final = frozenset({bool, int, float, complex})
_VARIADIC: Final = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_POSITIONAL: Final = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class _Typed(tuple[str, Hashable]):
    """A (name, value) pair that equals another only where no program can tell their values apart.

    ``==`` alone takes True, 1 and 1.0 for one number, 0.0 for -0.0, and a member of a ``(str, Enum)`` for its string.
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return type(other) is _Typed and self[0] == other[0] and same(self[1], other[1])

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((self[0], _hash(self[1])))


def _hash(value: object) -> int:
    """Return a hash that agrees with ``same``.

    That takes all NaNs of a type for equal, and a member of an Enum for no other value (not for its string).
    """
    if isinstance(value, tuple):
        return hash((type(value), *map(_hash, value)))
    if isinstance(value, enum.Enum):
        return id(value)
    return hash(type(value)) if value != value else hash((type(value), value))


def call_key(
    signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Key, tuple[Tensor, ...]]:
    """Sort the arguments of a call into tensors and constants; defaults count as passed.

    Returns:
        Names of the tensor arguments and (name, value) pairs of the others; and the tensors in the order of the names.

    Raises:
        CaptureDeclined: an argument is neither (tensors in a list, an object), or goes into ``*args`` or ``**kwargs``.
        TypeError: the call does not fit the signature.
    """
    names: list[str] = []
    tensors: list[Tensor] = []
    constants: list[tuple[str, Hashable]] = []
    # By hand, and not by ``signature.bind``, which takes as long as the rest of a call.
    position, keywords, given = 0, 0, len(args)
    for name, parameter in signature.parameters.items():
        kind = parameter.kind
        if kind in _VARIADIC:
            continue
        if kind in _POSITIONAL and position < given:
            value = args[position]
            position += 1
        elif name in kwargs and kind is not inspect.Parameter.POSITIONAL_ONLY:
            value = kwargs[name]
            keywords += 1
        else:
            value = parameter.default
            if value is inspect.Parameter.empty:
                # Raises: a required argument is missing.
                signature.bind(*args, **kwargs)
            # A default that no key can hold (a list) is the same object at each call: it needs no place.
            elif (pair := _pair(name, value)) is not None:
                constants.append(pair)
            continue
        if isinstance(value, Tensor):
            names.append(name)
            tensors.append(value)
        elif (pair := _pair(name, value)) is not None:
            constants.append(pair)
        else:
            raise CaptureDeclined(f"argument '{name}' is {_described(value)}")
    if position < given or keywords < len(kwargs):
        # Raises where no *args or **kwargs takes the rest.
        signature.bind(*args, **kwargs)
        raise CaptureDeclined("the call fills *args or **kwargs")
    return (tuple(names), tuple(constants)), tuple(tensors)


def default_key(signature: inspect.Signature, method: str = "forward") -> Key:
    """Return the key of the call that one expects: required arguments are tensors, optional ones are left out.

    An optional argument must not become a placeholder: ``if mask is not None`` would take the branch of a call with a
    mask.

    Raises:
        CaptureDeclined: the signature takes ``*args`` or ``**kwargs``: nobody knows what.
    """
    names: list[str] = []
    constants: list[tuple[str, Hashable]] = []
    for name, parameter in signature.parameters.items():
        if parameter.kind in _VARIADIC:
            stars = "*" if parameter.kind is inspect.Parameter.VAR_POSITIONAL else "**"
            raise CaptureDeclined(f"{method} takes {stars}{name}, which only a call can tell")
        if parameter.default is inspect.Parameter.empty:
            names.append(name)
        elif (pair := _pair(name, parameter.default)) is not None:
            constants.append(pair)
    return tuple(names), tuple(constants)


def _pair(name: str, value: object) -> tuple[str, Hashable] | None:
    """Return the pair of a constant argument; None if the value is none that a key can hold."""
    kind = type(value)
    if kind in _EXACT:
        return (name, value)
    if kind in _NUMBERS or isinstance(value, enum.Enum):
        return _Typed((name, value))
    if kind in (tuple, torch.Size) and all(_pair(name, element) is not None for element in value):  # type: ignore[attr-defined]
        return _Typed((name, value))
    return None


def _described(value: object) -> str:
    kind = type(value).__name__
    elements = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list | tuple) else []
    return f"a {kind} that holds tensors" if any(isinstance(e, Tensor) for e in elements) else f"an object ({kind})"


def plain_constant(value: object) -> bool:
    """Return whether a value can be a constant of a graph, and part of a key."""
    return _pair("", value) is not None


def same_constant(value: object, other: object) -> bool:
    """Return whether two constants are of one type and equal, signs of zeros too; a NaN is like another."""
    return plain_constant(value) and same(value, other)
