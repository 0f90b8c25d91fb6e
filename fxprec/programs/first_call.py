"""The form of a method's call, told from the first call that ran a graph of dynamo.

Dynamo hands over graphs of tensors alone; the rest of a method is in bytecode of its own. So that call is looked at:
where each input of the graph was among the arguments, and each of its results in what came back.
"""

from __future__ import annotations

import enum
import inspect
import keyword
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from operator import getitem
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.fx import Node

from fxprec.capture.call_key import plain_constant
from fxprec.capture.dynamo.graph import SOURCE
from fxprec.capture.pytrees import has_more_than, made_by_dataclass, made_by_namedtuple, parts_of
from fxprec.passes.graph.annotations import notes
from fxprec.programs.call_form import CallForm, Made, Result, Step, Way, arguments_of, reached
from fxprec.programs.graph_calls import ANYTHING, held_by, in_container, number_tensor
from fxprec.torch_internals import tree_flatten, treespec_dumps, treespec_loads

_CONSTANTS: Final = (str, bool, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, enum.Enum)
_NUMBERS: Final = (int, float, complex)


class NoForm(Exception):
    """Why a graph cannot be called as the method is, or cannot give what the method gives."""


@dataclass(frozen=True, slots=True)
class Placeholder:
    """An input of a graph of dynamo.

    Attributes:
        source: where dynamo took it from, as ``L['x']``.
        kind: dtype and sizes that were built into the graph, as for ``check_arguments``.
        symbolic: it is a number, or has a size, that may change.
    """

    source: str
    kind: str
    symbolic: bool

    @classmethod
    def of(cls, node: Node) -> Placeholder:
        """``node``: with what dynamo noted of it."""
        value, source = node.meta.get("example_value"), node.meta.get(SOURCE) or ""
        if not isinstance(value, Tensor):
            return cls(source, "Tensor", isinstance(value, torch.SymInt | torch.SymFloat))
        fixed = [not isinstance(size, torch.SymInt) for size in value.shape]
        sizes = ", ".join(str(size) if known else "*" for size, known in zip(value.shape, fixed, strict=True))
        return cls(source, f"{str(notes(node).dtype).removeprefix('torch.')}[{sizes}]", not all(fixed))


def form_of_call(
    placeholders: Sequence[Placeholder],
    *,
    model: nn.Module,
    owner: tuple[str, nn.Module],
    signature: inspect.Signature,
    call: tuple[Sequence[Any], Mapping[str, Any]],
    inputs: Sequence[Any],
    results: Sequence[Any],
    output: Any,
) -> CallForm:
    """That of a graph which dynamo captured for a whole call.

    Args:
        placeholders: those of the graph.
        model: whose weights there are.
        owner: the method's module, and what it is called in the method.
        signature: that of the method, without self.
        call: its positional and keyword arguments.
        inputs, results: of the graph in that call, one a placeholder and one a result.
        output: what the method gave.

    Raises:
        NoForm: there is none.
    """
    given = _by_name(signature, *call)
    for name in given:
        if not name.isidentifier() or keyword.iskeyword(name) or name == "self":
            raise NoForm(f"an argument is called {name!r}")
    ways: dict[int, list[Way]] = {}
    for name, value in given.items():
        for tensor, steps in _tensors_in(value):
            ways.setdefault(id(tensor), []).append(Way(name, steps))
    taken = [_way(each.source, value, owner, ways, given) for each, value in zip(placeholders, inputs, strict=True)]
    shapes = {id(value): each.kind for each, value in zip(placeholders, inputs, strict=True)}
    groups = {found: f"={number}" for number, (found, where) in enumerate(ways.items()) if len(where) > 1}
    dynamic = {way.name for way in taken if isinstance(way, Way) and not isinstance(given[way.name], Tensor)}

    def expected(value: Any) -> Any:
        if isinstance(value, Tensor):
            return shapes.get(id(value), "Tensor") + groups.get(id(value), "")
        if type(value) in (list, tuple):
            return [*map(expected, value)]
        if plain_constant(value):
            return (value,)
        held = held_by(value)
        of_tensors = type(value) is dict or any(True for _ in _tensors_in(held))
        return {key: expected(part) for key, part in held.items()} if of_tensors else ANYTHING

    def expected_argument(name: str, value: Any) -> Any:
        if name in dynamic and isinstance(value, _NUMBERS):
            return ANYTHING
        wanted = expected(value)
        return () if wanted is ANYTHING else wanted  # no object can be told from one that is built in

    wanted = {name: expected_argument(name, value) for name, value in given.items()}
    changing = [value for value in (*inputs, *results) if isinstance(value, _NUMBERS)]
    for each, value in zip(placeholders, inputs, strict=True):
        if isinstance(value, Tensor) and each.symbolic:
            changing += value.shape
    outputs = _Outputs(model, ways, results, changing)
    read = [(each.source, way) for each, way in zip(placeholders, taken, strict=True) if not isinstance(way, Way)]
    constants = [(source, value) for source, value in read if source.startswith("L")]
    return CallForm(arguments_of(signature, wanted), tuple(taken), (outputs.built(output),), tuple(constants))


def _by_name(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call, under the names that their placeholders get; of ``*args`` each one."""
    named: dict[str, Any] = {}
    defaults = {name: each.default for name, each in signature.parameters.items() if plain_constant(each.default)}
    for name, value in (defaults | signature.bind(*args, **kwargs).arguments).items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            named |= {f"{name}_{number}": each for number, each in enumerate(value)}
        else:
            named |= value if kind is inspect.Parameter.VAR_KEYWORD else {name: value}
    return named


def _tensors_in(value: Any, steps: tuple[Step, ...] = (), around: tuple[int, ...] = ()) -> Iterator[tuple[Tensor, Any]]:
    """The tensors in an argument, each with the way to it."""
    if isinstance(value, Tensor):
        yield value, steps
    elif id(value) not in around:
        items, attributes = parts_of(value) or ({}, getattr(value, "__dict__", {}))
        if isinstance(value, type | nn.Module):
            return
        for take, parts in ((getitem, items), (getattr, attributes)):
            for key, part in parts.items():
                if type(key) in (str, int):
                    yield from _tensors_in(part, (*steps, (take, key)), (*around, id(value)))


def _way(
    source: str,
    value: Any,
    owner: tuple[str, nn.Module],
    ways: Mapping[int, Sequence[Way]],
    given: Mapping[str, Any],
) -> Way | Tensor | float:
    if isinstance(value, Tensor) and id(value) in ways:
        return ways[id(value)][0]
    name = source[3:-2] if source.startswith("L['") else ""
    if isinstance(value, Tensor) and source.startswith("G"):
        return value
    if isinstance(value, Tensor) and name.partition("'")[0] == owner[0]:
        held = reached(owner[1], source)
        if held is value or type(held) is float:
            return held
    if name not in given or not isinstance(given[name], _NUMBERS):
        raise NoForm(f"it reads {source or 'a value from somewhere'}, which is no argument")
    return Way(name, ((number_tensor, value.dtype),) if isinstance(value, Tensor) else ())


class _Outputs:
    """What a method gives, with the nodes in the places of its tensors."""

    def __init__(
        self, model: nn.Module, ways: Mapping[int, Sequence[Way]], results: Sequence[Any], changing: Sequence[Any]
    ) -> None:
        self._results = {id(value): Result(number) for number, value in enumerate(results) if isinstance(value, Tensor)}
        self._ways = ways
        self._weights = {id(value) for value in (*model.parameters(), *model.buffers())}
        self._changing = changing

    def built(self, value: Any) -> Any:
        """As the parts of a ``CallForm`` say it."""
        kind = type(value)
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, _NUMBERS) and kind is not bool and value in self._changing:
            raise NoForm("it gives a number that may change with its inputs")
        if value is ... or isinstance(value, (*_CONSTANTS, *_NUMBERS)):
            return value
        if kind is tuple or kind is list:
            return kind([self.built(part) for part in value])
        if kind is dict and all(type(key) is str for key in value):
            return {key: self.built(part) for key, part in value.items()}
        if isinstance(value, tuple) and made_by_namedtuple(kind) and not has_more_than(value, ()):
            return Made(kind, tuple([self.built(part) for part in value]), {})
        if made_by_dataclass(kind):
            names = [field.name for field in fields(value)]  # type: ignore[arg-type]
            if not has_more_than(value, names):
                return Made(kind, (), {name: self.built(getattr(value, name)) for name in names})
        return self._container(value)

    def _tensor(self, value: Tensor) -> Any:
        if id(value) in self._results:
            return self._results[id(value)]
        if id(value) in self._weights:
            return value
        if id(value) not in self._ways:
            raise NoForm("it gives a tensor that is neither made in the graph nor an argument")
        return self._ways[id(value)][0]

    def _container(self, value: Any) -> Made:
        leaves, spec = tree_flatten(value)
        text = "" if len(leaves) == 1 and leaves[0] is value else _text_of(spec)
        if not text:
            raise NoForm(f"it gives an object ({type(value).__name__}) that is no container known to torch's pytrees")
        return Made(in_container, ([self.built(each) for each in leaves], text, tuple(sorted(_modules_of(spec)))), {})


def _text_of(spec: Any) -> str:
    """A tree of containers as text; "" where that cannot be read again."""
    try:
        text = treespec_dumps(spec)
        return text if treespec_loads(text) == spec else ""
    except Exception:  # a container that was registered without a name to save it by, or whose keys are objects
        return ""


def _modules_of(spec: Any) -> set[str]:
    """Where the classes of the containers are defined."""
    own = {spec.type.__module__} if isinstance(spec.type, type) and spec.type.__module__ != "builtins" else set()
    return own.union(*map(_modules_of, spec.children()))
