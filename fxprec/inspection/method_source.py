"""Read from a method's source what it does with its object's submodules: it calls them, or multiplies with them.

A *chain* names a value from the object on, ``*`` for any element of a container::

    for layer in self.layers:          ("layers", "*")
        x = layer.attention(x)         called: ("layers", "*", "attention")
    x = checkpoint(self.head, x)       called: ("head",), since it is handed on with something to call it with
    return F.linear(x, self.w.t())     multiplied: ("w",)

What only touches a module or a weight is neither: ``len(self.layers)``, ``self.layers = self.layers[:3]``,
``nn.init.zeros_(self.head.weight)``, ``nn.Sequential(self.a, self.b)``.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Final

from torch import nn

from fxprec.passes.graph.annotations import Rule
from fxprec.passes.ops.names import canonical_name
from fxprec.passes.ops.table import facts_of

Chain = tuple[str, ...]

ELEMENT: Final = "*"
#: What gives the elements of its arguments, or of the object whose method it is.
_ELEMENTS: Final = frozenset(
    {"enumerate", "zip", "reversed", "list", "tuple", "iter", "next", "sorted", "islice", "chain"}
)
_CONTENTS: Final = frozenset(
    {"values", "items", "children", "named_children", "modules", "named_modules", "parameters"}
)
#: Methods that keep what they get, and call nothing.
_KEEP: Final = frozenset(
    {"append", "extend", "insert", "add", "update", "setdefault", "add_module", "register_module", "register_buffer"}
    | {"register_parameter", "load_state_dict"}
)
#: Python's own functions that call what they are given.
_CALL_IT: Final = frozenset({"map", "filter"})


@dataclass(frozen=True, slots=True)
class SourceUses:
    """Chains that a method calls or hands on to be called, and those that it multiplies an argument with.

    A method without arguments that multiplies weights with each other, as one that joins layers does, changes the
    model.
    """

    called: tuple[Chain, ...]
    multiplied: tuple[Chain, ...]


#: As often is the source gone through, and as long are the chains that a name may stand for: ``child = child.next`` in
#: a loop would never end.
_ROUNDS: Final = 4
_LONGEST: Final = 8


def uses_in_source(code: CodeType) -> SourceUses | None:
    """Return what a method's code does with its object's submodules; None where its source is not at hand."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, TypeError, SyntaxError):
        return None
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    function = next((node for node in functions if node.name == code.co_name), None)
    if function is None:
        return None
    return _Method(function, code.co_varnames[0] if code.co_argcount else "").uses()


class _Method:
    def __init__(self, function: ast.FunctionDef | ast.AsyncFunctionDef, self_name: str) -> None:
        self._nodes = [*_in_source_order(function)]
        given = function.args
        self._takes_something = len([*given.posonlyargs, *given.args]) > 1 or bool(given.kwonlyargs or given.vararg)
        self._names: dict[str, set[Chain]] = {self_name: {()}}
        known = -1
        # A name may stand for a chain that is bound further down, in a loop: a few rounds find it.
        for _ in range(_ROUNDS):
            if known == (known := sum(map(len, self._names.values()))):  # no name stands for more
                break
            for node in self._nodes:
                self._bind_names(node)

    def uses(self) -> SourceUses:
        called: dict[Chain, None] = {}
        multiplied: dict[Chain, None] = {}
        for node in self._nodes:
            # ``x @ self.weight`` runs in FP32 in a method that is not converted, as a call of a module does.
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
                multiplied |= self._in_order(node.left, node.right)
            elif isinstance(node, ast.Call):
                called |= self._in_order(node.func)
                if _multiplies(node.func):
                    owner = [node.func.value] if isinstance(node.func, ast.Attribute) else []
                    multiplied |= self._in_order(*owner, *_arguments(node))
                # ``checkpoint(self.block, x)``: a function that gets a module and something else may call it.
                elif not _calls_nothing(node.func):
                    called |= dict.fromkeys(sorted(self._handed_on(node)))
        return SourceUses((*called,), (*multiplied,) if self._takes_something else ())

    def _in_order(self, *values: ast.expr) -> dict[Chain, None]:
        return dict.fromkeys(chain for value in values for chain in sorted(self._chains(value)) if chain)

    def _handed_on(self, call: ast.Call) -> set[Chain]:
        """Return the chains among the arguments, where there is another one that they may be called with."""
        arguments = [*_arguments(call)]
        chains = [self._chains(argument) - {()} for argument in arguments]
        others = [
            argument
            for argument, own in zip(arguments, chains, strict=True)
            if not own and not isinstance(argument, ast.Constant)
        ]
        return set().union(*chains) if others else set()

    def _bind_names(self, node: ast.AST) -> None:
        if isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
            self._bind(node.target, self._elements(node.iter))
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                self._bind(target, self._chains(node.value))
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            self._bind(node.target, self._chains(node.value))

    def _bind(self, target: ast.expr, chains: set[Chain]) -> None:
        if isinstance(target, ast.Name):
            short = {chain for chain in chains if 0 < len(chain) <= _LONGEST}
            self._names.setdefault(target.id, set()).update(short)
        elif isinstance(target, ast.Tuple | ast.List):
            for each in target.elts:
                self._bind(each, chains)
        elif isinstance(target, ast.Starred):
            self._bind(target.value, chains)

    def _elements(self, *values: ast.expr) -> set[Chain]:
        chains = set().union(*map(self._chains, values)) - {()}
        return {chain if chain[-1] == ELEMENT else (*chain, ELEMENT) for chain in chains}

    def _chains(self, value: ast.expr) -> set[Chain]:
        """Return what an expression may stand for."""
        match value:
            case ast.Name():
                return self._names.get(value.id, set())
            case ast.Attribute(attr=attribute):
                same = _gives_same_numbers(attribute)
                return {chain if same and chain else (*chain, attribute) for chain in self._chains(value.value)}
            case ast.Subscript():
                return self._elements(value.value)
            case ast.Starred() | ast.NamedExpr() | ast.Await():
                return self._chains(value.value)
            case ast.IfExp():
                return self._chains(value.body) | self._chains(value.orelse)
            case ast.BoolOp():
                return set().union(*map(self._chains, value.values))
            case ast.Tuple() | ast.List():
                return set().union(*map(self._chains, value.elts))
            case ast.ListComp() | ast.GeneratorExp():
                return self._chains(value.elt)
            case ast.Call(func=ast.Name(id=name)) if name in _ELEMENTS:
                return self._elements(*_arguments(value))
            case ast.Call(func=ast.Attribute(attr=name) as method) if name in _CONTENTS:
                return self._elements(method.value)
            case ast.Call(func=ast.Attribute(attr=name) as method) if _gives_same_numbers(name):
                return self._chains(method.value)
        return set()


def _in_source_order(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _in_source_order(child)


def _arguments(call: ast.Call) -> Iterator[ast.expr]:
    yield from call.args
    yield from (keyword.value for keyword in call.keywords)


def _name_of(function: ast.expr) -> str:
    """Return the last name of what is called: ``linear`` of ``F.linear``."""
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )


def _gives_same_numbers(name: str) -> bool:
    """Return whether a method or attribute of a tensor of this name is a view or cast of it."""
    op = canonical_name(name, "call_method")
    return op is not None and (op.name == "to" or facts_of(op.name).view)


def _multiplies(function: ast.expr) -> bool:
    """Return whether a function of this name is a matrix product, a convolution or an attention."""
    return facts_of(_name_of(function)).rule is Rule.LOW


def _calls_nothing(function: ast.expr) -> bool:
    """Return whether what gets a module calls none of it: a class, a container's method, an initializer, ``len``."""
    name = _name_of(function)
    own = isinstance(function, ast.Name) and hasattr(builtins, name) and name not in _CALL_IT
    within = {each.attr for each in ast.walk(function) if isinstance(each, ast.Attribute)}
    return own or name[:1].isupper() or name in _KEEP or "init" in within or name.lstrip("_").startswith("init")


def resolve(owner: nn.Module, chain: Chain) -> tuple[nn.Module, Chain, Chain]:
    """Return the submodule that a chain leads to, its path up to a container, and the names that are left over.

    An element of a container stands for all of them: it leads to the container, or to what its first child has of the
    next name.
    """
    path: list[str] = []
    inside = False
    for number, name in enumerate(chain):
        if name == ELEMENT:
            inside = True
            continue
        homes = [owner, *owner._modules.values()] if inside and chain[number - 1] == ELEMENT else [owner]
        # A container's children are alike: what one of them has of this name stands for all.
        child = next((found for home in homes if home and (found := home._modules.get(name)) is not None), None)
        if child is None:
            within = next((each for each in homes[1:] if each is not None), owner)
            return within, tuple(path), chain[number:]
        owner = child
        if not inside:
            path.append(name)
    return owner, tuple(path), ()
