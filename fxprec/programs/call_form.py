"""How a method is called, and in which form it gives its results."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor, nn

from fxprec.capture.call_key import Constants, plain_constant, same_constant
from fxprec.passes.graph.annotations import clean_path
from fxprec.programs.graph_calls import ANYTHING, LEFT_OUT

#: One step in what dynamo writes as ``L['self']._modules['drop'].p``.
_STEPS: Final = re.compile(r"\.(\w+)|\['([^']+)'\]|\[(\d+)\]")

#: ``operator.getitem`` or the like, and its second argument.
Step = tuple[Callable[[Any, Any], Any], Any]


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of the method.

    Attributes:
        default: (value,) where it may be left out, else ().
        expected: what it must be, as for ``check_arguments``.
    """

    name: str
    default: tuple[Any, ...]
    expected: Any


@dataclass(frozen=True, slots=True)
class Way:
    """Where a value is: which argument, and from there inwards."""

    name: str
    steps: tuple[Step, ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """Which result of the graph."""

    number: int


@dataclass(frozen=True, slots=True)
class Made:
    """What a function makes of such parts."""

    function: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class CallForm:
    """The form of a method's call.

    Attributes:
        arguments: those of the method, in its order.
        inputs: of each placeholder where it is among them; or the tensor, or number, where it is none of theirs.
        output: what the method gives, with a ``Result``, a ``Way`` or a weight in the place of each tensor; None: what
            the graph gives.
        constants: of what the graph read of the method's module, and has built in: where it is, and what it was.
    """

    arguments: tuple[Argument, ...]
    inputs: tuple[Way | Tensor | float, ...]
    output: tuple[Any] | None = None
    constants: tuple[tuple[str, Any], ...] = ()

    def changed(self, owner: nn.Module) -> str | None:
        """The constant that the method's module has another value of by now; None: they are as they were."""
        for source, value in self.constants:
            found = reached(owner, source)
            if found is not value and not same_constant(found, value):
                return clean_path(source)
        return None


def reached(owner: nn.Module, source: str) -> Any:
    """What dynamo's ``L['self']._modules['drop'].p`` is now; None where nothing is."""
    found: Any = owner
    for attribute, key, number in _STEPS.findall(source.partition("]")[2]):
        try:
            found = getattr(found, attribute) if attribute else found[key or int(number)]
        except (AttributeError, LookupError, TypeError):
            return None
    return found


def form_of_key(signature: inspect.Signature, names: Sequence[str], constants: Constants) -> CallForm:
    """That of a static graph, which has a placeholder for each argument that is a tensor."""
    known = dict(constants)
    expected = {name: (known[name],) if name in known else () for name in signature.parameters}
    return CallForm(arguments_of(signature, expected | dict.fromkeys(names, "Tensor")), tuple(map(Way, names)))


def arguments_of(signature: inspect.Signature, expected: Mapping[str, Any]) -> tuple[Argument, ...]:
    """In the order of the signature; those that its ``*args`` and ``**kwargs`` took have names of their own."""
    found: list[Argument] = []
    named = {*signature.parameters}
    optional = False
    for name, parameter in signature.parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            of_stars = f"{name}_" if parameter.kind is parameter.VAR_POSITIONAL else ""
            rest = [key for key in expected if key not in named and key.startswith(of_stars)]
            named.update(rest)
            found += [Argument(key, (LEFT_OUT,) if optional else (), expected[key]) for key in rest]
            continue
        default = (parameter.default,) if plain_constant(parameter.default) else ()
        wanted = expected.get(name, default)
        as_captured = type(wanted) is tuple and len(wanted) == 1 and same_constant(parameter.default, wanted[0])
        if wanted == ():
            default = (LEFT_OUT,)
        elif not as_captured and wanted is not ANYTHING:
            default = ()
        optional = optional or default != ()
        found.append(Argument(name, default or ((LEFT_OUT,) if optional else ()), wanted))
    return tuple(found)
