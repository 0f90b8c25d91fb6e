"""How a method is called, and in which form it gives its results; and the functions by which a graph does the same.

A static graph knows both from its capture. Dynamo hands over graphs of tensors alone; the rest of a method is in
bytecode of its own. So the first call that ran such a graph is looked at: where each input of the graph was among the
arguments, and each of its results in what came back. ``graph_modules`` writes that into the graph that users get.
"""

from __future__ import annotations

import enum
import inspect
import keyword
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from operator import getitem
from typing import Any, Final

import torch
from torch import Tensor, dtype, nn
from torch.fx import Node
from torch.fx.node import has_side_effect

from fxprec.capture.call_key import Constants, plain_constant, same_constant
from fxprec.capture.dynamo.graph import SOURCE
from fxprec.capture.pytrees import (
    has_low_input,
    has_more_than,
    made_by_dataclass,
    made_by_namedtuple,
    parts_of,
    restore_dtypes,
)
from fxprec.errors import OtherCallError
from fxprec.kernels.launch.graph_call import graph_call
from fxprec.passes.graph.annotations import clean_path, notes
from fxprec.torch_internals import tree_flatten, tree_unflatten, treespec_dumps, treespec_loads

#: Default of a placeholder that marks an argument as not given: it may, or must, be left out of a call.
LEFT_OUT: Final = ...
#: What ``check_arguments`` expects of an argument: that it was not given; what it does not look at.
NOT_GIVEN: Final = ()
ANYTHING: Final = None


@graph_call
def restored(output: Any, low: dtype, *inputs: Any) -> Any:
    """Return ``output`` with every low tensor as FP32, unless an input is low, as the model does with results."""
    return output if has_low_input(inputs, low) else restore_dtypes(output, low)


@graph_call
def in_container(leaves: Sequence[Any], spec: str) -> Any:
    """Make of these leaves what ``torch.utils._pytree`` does, a ``ModelOutput``, say; ``spec``: ``treespec_dumps``."""
    return tree_unflatten([*leaves], treespec_loads(spec))


@graph_call
def number_tensor(value: float, dtype: dtype) -> Tensor:
    """Return a number as dynamo has it where it may change: a 0-dim tensor."""
    return torch.tensor(value, dtype=dtype)


@graph_call
def check_arguments(given: dict[str, Any], expected: dict[str, Any]) -> None:
    """Raise unless a call is like the one that a graph was captured for: what was no tensor is a constant in the graph.

    What an argument must be is written so::

        "Tensor", "float32[4, *]"       a tensor; of this dtype and these sizes
        "Tensor=1", "float32[4, *]=1"   likewise; all that have one number must be the very same tensor
        (3,)                            the constant 3
        ()                              not given
        [...], {...}                    a sequence; a dict, or an object by its attributes
        None                            anything

    Args:
        given: the arguments.
        expected: of each what it must be.

    Raises:
        OtherCallError: one is another.
    """
    same: dict[str, tuple[str, Tensor]] = {}
    for name, value in given.items():
        _check(value, expected[name], name, same)


# Registered so, or the elimination of dead code would drop the node: nobody reads its result.
has_side_effect(check_arguments)


def _check(value: Any, expected: Any, where: str, same: dict[str, tuple[str, Tensor]]) -> None:
    if expected is ANYTHING:
        return
    if isinstance(expected, str):
        kind, _, group = expected.partition("=")
        _check_tensor(value, kind, group, where, same)
    elif isinstance(expected, tuple):
        if not (same_constant(value, expected[0]) if expected else value is LEFT_OUT):
            raise _refusal(where, f"{expected[0]!r}" if expected else "nothing", value)
    elif isinstance(expected, list):
        if not isinstance(value, tuple | list) or len(value) != len(expected):
            raise _refusal(where, f"a sequence of {len(expected)}", value)
        for number, (part, wanted) in enumerate(zip(value, expected, strict=True)):
            _check(part, wanted, f"{where}[{number}]", same)
    else:
        held = held_by(value)
        if held.keys() != expected.keys():
            raise _refusal(where, f"an object with {[*expected]}", value)
        for key, wanted in expected.items():
            _check(held[key], wanted, f"{where}[{key!r}]", same)


def held_by(value: Any) -> dict[str | int, Any]:
    """Return what a dict or an object holds, by key or attribute."""
    return {key: part for parts in parts_of(value) or () for key, part in parts.items() if type(key) in (str, int)}


def _check_tensor(value: Any, kind: str, group: str, where: str, same: dict[str, tuple[str, Tensor]]) -> None:
    if not isinstance(value, Tensor):
        raise _refusal(where, "a tensor", value)
    name, _, sizes = kind.rstrip("]").partition("[")
    if name != "Tensor":
        wanted = sizes.split(", ") if sizes else []
        if value.dim() != len(wanted) or f"{value.dtype}" != f"torch.{name}":
            raise _refusal(where, kind, value)
        compared = zip(value.shape, wanted, strict=True)
        if torch.jit.is_tracing():  # type: ignore[attr-defined]  # it warns of comparing sizes, and keeps those it sees
            compared = ()
        if any(fixed != "*" and size != int(fixed) for size, fixed in compared):
            raise _refusal(where, kind, value)
    if group:
        other, tensor = same.setdefault(group, (where, value))
        if tensor is not value:
            raise _refusal(where, f"the very tensor that {other} is", value)


def _refusal(where: str, captured: str, value: Any) -> OtherCallError:
    if isinstance(value, Tensor):
        got = f"{str(value.dtype).removeprefix('torch.')}{[*value.shape]}"
    else:
        got = "nothing" if value is LEFT_OUT else repr(value) if isinstance(value, int | float | str) else ""
        got = got or f"{value}"[:60]
    return OtherCallError(
        f"{where}: this graph was captured with {captured}, which is built into it, and is called with {got}. "
        "Call the model so, and ask for its graph again"
    )


#: One step in what dynamo writes as ``L['self']._modules['drop'].p``.
_STEPS: Final = re.compile(r"\.(\w+)|\['([^']+)'\]|\[(\d+)\]")

_CONSTANTS: Final = (str, bool, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, enum.Enum)
_NUMBERS: Final = (int, float, complex)

#: ``operator.getitem`` or the like, and its second argument.
Step = tuple[Callable[[Any, Any], Any], Any]


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of the method.

    Attributes:
        default: (value,) where it may be left out, else (): it is required.
        expected: what it must be, as for ``check_arguments``.
    """

    name: str
    default: tuple[Any, ...]
    expected: Any


@dataclass(frozen=True, slots=True)
class Way:
    """Path to a value in the arguments of a call: an argument, and the steps from there inwards."""

    name: str
    steps: tuple[Step, ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """Result of the graph, by its number."""

    number: int


@dataclass(frozen=True, slots=True)
class Made:
    """Object that a function makes of such parts."""

    function: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class CallForm:
    """The form of a method's call.

    Attributes:
        arguments: those of the method, in its order.
        inputs: of each placeholder the way to it from the arguments; or the value itself, of the module or a global.
        output: what the method gives, with a ``Result``, a ``Way`` or a weight in the place of each tensor; None: what
            the graph gives.
        constants: (source as dynamo writes it, value) of the module's attributes that are constants in the graph.
    """

    arguments: tuple[Argument, ...]
    inputs: tuple[Way | Tensor | float, ...]
    output: tuple[Any] | None = None
    constants: tuple[tuple[str, Any], ...] = ()

    def changed(self, owner: nn.Module) -> str | None:
        """Return the constant that the method's module has another value of by now; None: they are as they were."""
        for source, value in self.constants:
            found = reached(owner, source)
            if found is not value and not same_constant(found, value):
                return clean_path(source)
        return None


def reached(owner: nn.Module, source: str) -> Any:
    """Return what dynamo's ``L['self']._modules['drop'].p`` is now; None where nothing is."""
    found: Any = owner
    for attribute, key, number in _STEPS.findall(source.partition("]")[2]):
        try:
            found = getattr(found, attribute) if attribute else found[key or int(number)]
        except (AttributeError, LookupError, TypeError):
            return None
    return found


def form_of_key(signature: inspect.Signature, names: Sequence[str], constants: Constants) -> CallForm:
    """Return the form of a static graph, which has a placeholder for each argument that is a tensor."""
    # Of a static graph all is known from its key: tensors by name, and the constants that were built in.
    known = dict(constants)
    expected = {name: (known[name],) if name in known else NOT_GIVEN for name in signature.parameters}
    return CallForm(arguments_of(signature, expected | dict.fromkeys(names, "Tensor")), tuple(map(Way, names)))


def arguments_of(signature: inspect.Signature, expected: Mapping[str, Any]) -> tuple[Argument, ...]:
    """Return arguments in the order of the signature; what ``*args`` and ``**kwargs`` took gets names of its own.

    Of ``forward(x, n, scale=2, mask=None, hook=print)``, by what is expected of each:

    ============================  =====================================  ======================================
    expected                      default of the placeholder             so that a call
    ============================  =====================================  ======================================
    x: ``"Tensor"``               none                                   gives it
    scale: ``(2,)``               2                                      may leave it out
    scale: ``(3,)``               none                                   gives 3
    mask: ``"Tensor"``            none                                   gives it
    mask: not given               LEFT_OUT                               leaves it out
    hook: not given               LEFT_OUT: no constant that pickles     leaves it out
    n: anything, being a number   its own, or none                       may give any number
    ============================  =====================================  ======================================

    Behind a placeholder with a default the next ones need one, too, as Python has it: LEFT_OUT, where they have none.
    """
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
        # A default that pickles and compares becomes the placeholder's own, where the graph was captured with it.
        default = (parameter.default,) if plain_constant(parameter.default) else ()
        wanted = expected.get(name, default or NOT_GIVEN)
        with_default = type(wanted) is tuple and len(wanted) == 1 and same_constant(parameter.default, wanted[0])
        if wanted == NOT_GIVEN:
            default = (LEFT_OUT,)
        elif not with_default and wanted is not ANYTHING:
            default = ()
        optional = optional or default != ()
        found.append(Argument(name, default or ((LEFT_OUT,) if optional else ()), wanted))
    return tuple(found)


class NoForm(Exception):
    """Reason why a graph cannot be called as the method is, or cannot give what the method gives."""


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
        """Read an input from its node, which must still have dynamo's own notes."""
        value, source = node.meta.get("example_value"), node.meta.get(SOURCE) or ""
        if not isinstance(value, Tensor):
            return cls(source, "Tensor", isinstance(value, torch.SymInt | torch.SymFloat))
        # Sizes that dynamo made symbols of may change; the others are built in.
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
    """Return the form of a graph which dynamo captured for a whole call.

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
    # Placeholders are arguments in the Python source of the graph: their names must be names there.
    given = _by_name(signature, *call)
    for name in given:
        if not name.isidentifier() or keyword.iskeyword(name) or name == "self":
            raise NoForm(f"an argument is called {name!r}")
    # A graph's inputs are matched with the call's arguments by identity: dynamo passes the very tensors on.
    ways: dict[int, list[Way]] = {}
    for name, value in given.items():
        for tensor, steps in _tensors_in(value):
            ways.setdefault(id(tensor), []).append(Way(name, steps))
    pairs = [*zip(placeholders, inputs, strict=True)]
    taken = [_origin_of(each.source, value, owner, ways, given) for each, value in pairs]
    # What each argument must be in a later call: of tensors dtype and sizes, and which of them are one.
    kinds = {id(value): each.kind for each, value in pairs}
    for number, (tensor, where) in enumerate(ways.items()):
        if len(where) > 1:
            kinds[tensor] = f"{kinds.get(tensor, 'Tensor')}={number}"
    numbers = {way.name for way in taken if isinstance(way, Way) and isinstance(given[way.name], _NUMBERS)}
    wanted = {name: ANYTHING if name in numbers else _expected(value, kinds) for name, value in given.items()}
    # An argument that is an object without tensors cannot be compared with the one that is built into the graph: it
    # must not be given. (Within another argument anything is taken: see ``_expected``.)
    wanted |= {name: NOT_GIVEN for name, each in wanted.items() if each is ANYTHING and name not in numbers}
    # Numbers and sizes that dynamo has symbols for change from call to call: an output must not have them as constants.
    # They are known by their value: a constant of the output that happens to equal one is refused as well.
    changing = [value for value in (*inputs, *results) if isinstance(value, _NUMBERS)]
    for each, value in pairs:
        if isinstance(value, Tensor) and each.symbolic:
            changing += value.shape
    outputs = _Outputs(model, ways, results, changing)
    # What is read of the module itself is a constant too, compared when somebody asks for the graph (``changed``).
    read = [(each.source, way) for each, way in zip(placeholders, taken, strict=True) if not isinstance(way, Way)]
    constants = [(source, value) for source, value in read if source.startswith("L")]
    return CallForm(arguments_of(signature, wanted), tuple(taken), (outputs.described(output),), tuple(constants))


def _expected(value: Any, kinds: Mapping[int, str]) -> Any:
    """Return what an argument, or a part of one, must be in a later call; ``kinds``: of the tensors, by id."""
    if isinstance(value, Tensor):
        return kinds.get(id(value), "Tensor")
    if type(value) in (list, tuple):
        return [_expected(part, kinds) for part in value]
    if plain_constant(value):
        return (value,)
    # Of an object without tensors nothing is compared: the graph has it built in, if it read it.
    held = held_by(value)
    of_tensors = type(value) is dict or any(True for _ in _tensors_in(held))
    return {key: _expected(part, kinds) for key, part in held.items()} if of_tensors else ANYTHING


def _by_name(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's arguments under the names that their placeholders get; of ``*args`` each one."""
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
    """Yield the tensors in an argument, each with the way to it."""
    if isinstance(value, Tensor):
        yield value, steps
    elif id(value) not in around:
        items, attributes = parts_of(value) or ({}, getattr(value, "__dict__", {}))
        # What a module holds is the model's, and no argument.
        if isinstance(value, type | nn.Module):
            return
        for take, parts in ((getitem, items), (getattr, attributes)):
            for key, part in parts.items():
                if type(key) in (str, int):
                    yield from _tensors_in(part, (*steps, (take, key)), (*around, id(value)))


def _origin_of(
    source: str,
    value: Any,
    owner: tuple[str, nn.Module],
    ways: Mapping[int, Sequence[Way]],
    given: Mapping[str, Any],
) -> Way | Tensor | float:
    """Return where an input of the graph comes from: a way from the arguments, or the value itself.

    ============================================  ========================================================
    ``L['x']``                                    an argument; if it is a number, as a 0-dim tensor
    ``L['batch']['x']``                           a part of one, found by its identity
    ``L['self'].scale``                           a float that the module holds, which dynamo passes as a
                                                  0-dim tensor, or a tensor that is no parameter
    ``G['TABLE']``                                a global tensor, which goes with the graph
    ============================================  ========================================================
    """
    if isinstance(value, Tensor) and id(value) in ways:
        return ways[id(value)][0]
    # ``L['x']`` -> ``x``, and ``L['self'].drop.p`` -> ``self'].drop``, which begins with the owner's name.
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
    """Output of a method, with the nodes in the places of its tensors."""

    def __init__(
        self, model: nn.Module, ways: Mapping[int, Sequence[Way]], results: Sequence[Any], changing: Sequence[Any]
    ) -> None:
        self._results = {id(value): Result(number) for number, value in enumerate(results) if isinstance(value, Tensor)}
        self._ways = ways
        self._weights = {id(value) for value in (*model.parameters(), *model.buffers())}
        self._changing = changing

    def described(self, value: Any) -> Any:
        """Build the output as the parts of a ``CallForm`` say it."""
        kind = type(value)
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, _NUMBERS) and kind is not bool and value in self._changing:
            raise NoForm("it gives a number that may change with its inputs")
        # What is no tensor is a constant: ``check_arguments`` looks at each call at what it depends on.
        if value is ... or isinstance(value, (*_CONSTANTS, *_NUMBERS)):
            return value
        if kind is tuple or kind is list:
            return kind([self.described(part) for part in value])
        if kind is dict and all(type(key) is str for key in value):
            return {key: self.described(part) for key, part in value.items()}
        # Classes whose constructors only hold what they are given are called with the parts again.
        if isinstance(value, tuple) and made_by_namedtuple(kind) and not has_more_than(value, ()):
            return Made(kind, tuple([self.described(part) for part in value]), {})
        if made_by_dataclass(kind):
            names = [field.name for field in fields(value)]  # type: ignore[arg-type]
            if not has_more_than(value, names):
                return Made(kind, (), {name: self.described(getattr(value, name)) for name in names})
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
        return Made(in_container, ([self.described(each) for each in leaves], text), {})


def _text_of(spec: Any) -> str:
    """Write a tree of containers as text; "" where that cannot be read again."""
    try:
        text = treespec_dumps(spec)
        return text if treespec_loads(text) == spec else ""
    except Exception:  # a container that was registered without a name to save it by, or whose keys are objects
        return ""
