"""Find methods that call submodules and were not named when converting: by themselves they run in FP32.

Nothing is run: the source of each public method is read, and what its names may stand for is followed to the modules
that the model has::

    def encode(self, x):                        encode calls down
        return self.norm(self.down(x))
    def features(self, x):                      features calls down  (through encode)
        return self.encode(x).flatten(1)
    def looped(self, x):                        looped calls layers: elements of a container go by its name
        for layer in self.layers:
            x = checkpoint(layer, x)            handed on with something that it may be called with

Listed are methods that run matrix products: they call a submodule with weights of several dimensions, or multiply one.
What only touches a module or a weight is neither (``len(self.layers)``, ``nn.init.zeros_(self.head.weight)``,
``nn.Sequential(self.a, self.b)``). Not found: ``getattr(self, name)``, and methods whose source is not at hand.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import linecache
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from types import CodeType, FunctionType
from typing import Final, NamedTuple

from torch import nn

from fxprec.passes.graph.annotations import Rule
from fxprec.passes.ops.names import canonical_name
from fxprec.passes.ops.table import facts_of

#: Functions that give the elements of their arguments, and methods that give those of their object.
_ELEMENTS: Final = frozenset("enumerate zip reversed list tuple iter next sorted islice chain".split())
_CONTENTS: Final = frozenset({"values", "items", "children", "named_children", "modules", "named_modules"})
#: Methods that keep what they get, and call nothing; and Python's own functions that call what they are given.
_KEEP: Final = frozenset({
    "append", "extend", "insert", "add", "update", "setdefault", "add_module", "register_module", "register_buffer",
    "register_parameter", "load_state_dict",
})  # fmt: skip
_CALL_IT: Final = frozenset({"map", "filter"})
_FORWARD: Final = ("forward", "__call__")
#: So often is a source gone through: ``child = child.next`` in a loop might never end.
_ROUNDS: Final = 4
_OF_MODULES: Final = frozenset(dir(nn.Module)) - {*_FORWARD}
#: So the names of methods begin that change a module and give nothing back, such as timm's initializers.
_CHANGES: Final = ("set_", "init", "reset_", "fix_", "enable_", "disable_", "freeze", "load_", "save_")
#: Modules of torch's whose weights may have several dimensions, and are no factor of a product.
_NO_PRODUCTS: Final = (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.RMSNorm)

_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Unnamed:
    """Method that calls children and was not named.

    Attributes:
        method: as ``convert(methods=...)`` takes it.
        calls: paths of the submodules that it calls, from the method's module.
        like_it: how many further modules of the model have it in common.
    """

    method: str
    calls: tuple[str, ...]
    like_it: int = 0

    def __str__(self) -> str:
        # Layers of one class are one line: a model of 48 blocks would fill the report.
        alike = f"do {self.like_it} modules" if self.like_it > 1 else "does 1 module"
        more = f" (so {alike} like it)" if self.like_it else ""
        return (
            f"{self.method} calls {', '.join(self.calls)}{more}: by itself in FP32, "
            f"unless convert(model, methods=({self.method!r},))"
        )


def unnamed_methods(
    model: nn.Module, named: Collection[str], stays: Callable[[str], bool] = lambda path: False
) -> list[Unnamed]:
    """Return the public methods of the model that run products, and those of its submodules that no forward calls.

    Args:
        model: converted or not.
        named: the methods that are converted, by their names in the model.
        stays: whether the module at a path is meant to run in FP32.
    """
    sources = _Sources(frozenset(id(module) for path, module in model.named_modules() if stays(path)))
    found: dict[tuple[type, str], Unnamed] = {}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        methods = sources.methods(type(module))
        # A submodule's forward is converted with the model, and so are the methods that it calls.
        in_forward = sources.reached(type(module), "forward") if path else ()
        for name, function in methods.items():
            if name.startswith("_") or name in ("forward", *in_forward) or prefix + name in named:
                continue
            calls = tuple(
                call
                for call in sources.products(module, name, [own for own in methods if prefix + own in named])
                if not {prefix + call, f"{prefix}{call}.forward"} & {*named}
            )
            if calls and not (name.startswith(_CHANGES) and not sources.gives(function)):
                known = found.setdefault((type(module), name), Unnamed(prefix + name, calls, -1))
                found[type(module), name] = replace(known, like_it=known.like_it + 1)
    return [*found.values()]


class _Sources:
    """Sources of the methods of a model, each file parsed once, for one look: classes and files may change.

    Args:
        meant: ids of modules that are meant to run in FP32.
    """

    def __init__(self, meant: Collection[int]) -> None:
        self._meant = meant
        self._functions = functools.cache(_functions_in)
        self.methods = functools.cache(_methods)
        self.names = functools.cache(_names_in)
        self._known: dict[tuple[int, str], bool] = {}

    def source(self, function: FunctionType) -> _Function | None:
        code = function.__code__
        found = self._functions(code.co_filename).get(code.co_firstlineno)
        return found if found is not None and found.name == code.co_name else None

    def gives(self, function: FunctionType) -> bool:
        """Return whether a method returns anything but None."""
        source = self.source(function)
        returned = (node.value for node in ast.walk(source) if isinstance(node, ast.Return)) if source else ()
        return any(not isinstance(value, ast.Constant | None) for value in returned)

    def reached(self, cls: type, name: str, stop: Collection[str] = ()) -> list[str]:
        """Return the methods that one calls on its own object, itself too; forward and ``stop`` are other entries."""
        methods = self.methods(cls)
        reached = [name] if name in methods else []
        for each in reached:
            for called in sorted(self.names(methods[each].__code__) & methods.keys()):
                if called not in (*reached, *stop, "forward"):
                    reached.append(called)
        return reached

    def products(self, module: nn.Module, name: str, stop: Collection[str] = ()) -> list[str]:
        """Return the submodules with products, or methods of them, that a method calls, each once."""
        methods = self.methods(type(module))
        # To read a source takes long: only those that name a submodule are read.
        named = (methods[each] for each in self.reached(type(module), name, stop))
        sources = [self.source(each) for each in named if self.names(each.__code__) & module._modules.keys()]
        calls = (call for source in sources if source is not None for call in _Method(self, module, source).products())
        return [*dict.fromkeys(calls)]

    def runs_products(self, module: nn.Module, name: str) -> bool:
        """Return whether a module's method runs products of submodules."""
        key = id(module), name
        if key not in self._known:
            self._known[key] = False  # meanwhile, as modules that hold each other lead back here
            self._known[key] = bool(self.products(module, name))
        return self._known[key]

    def multiplies(self, module: nn.Module) -> bool:
        """Return whether a module holds weights that products read, by what its parameters look like."""
        return any(
            parameter is not None and parameter.ndim > 1 and parameter.is_floating_point()
            for each in module.modules()
            if id(each) not in self._meant and not isinstance(each, _NO_PRODUCTS)
            for parameter in each._parameters.values()
        )


def _functions_in(file: str) -> dict[int, _Function]:
    """Return the functions of a file by their first line, that of a decorator; none where there is no source."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return {}
    functions = (node for node in ast.walk(tree) if isinstance(node, _Function))
    return {min([node.lineno, *(each.lineno for each in node.decorator_list)]): node for node in functions}


def _names_in(code: CodeType) -> set[str]:
    """Return the names of attributes and globals in the bytecode of a function, and of functions within."""
    return {*code.co_names}.union(*(_names_in(each) for each in code.co_consts if isinstance(each, CodeType)))


def _methods(cls: type) -> dict[str, FunctionType]:
    """Return the methods that users' classes define, or libraries other than torch."""
    methods = {}
    for base in reversed(cls.__mro__):
        if base.__module__.partition(".")[0] not in ("torch", "fxprec", "builtins"):
            for name, value in vars(base).items():
                function = inspect.unwrap(value) if isinstance(value, FunctionType) else None
                if isinstance(function, FunctionType) and name not in _OF_MODULES:
                    methods[name] = function
    return methods


class _Thing(NamedTuple):
    """Module that an expression may stand for, or a method or parameter of it.

    Attributes:
        path: from the method's module; "" for that itself, "layers.*" for an element of a container.
        module: that is there.
        name: of its method or parameter; "": the module itself.
    """

    path: str
    module: nn.Module
    name: str = ""

    @property
    def is_weight(self) -> bool:
        return self.module._parameters.get(self.name) is not None


class _Method:
    """Source of a method of one module."""

    def __init__(self, sources: _Sources, module: nn.Module, function: _Function) -> None:
        self._sources, self._nodes = sources, [*_in_source_order(function)]
        given = function.args
        arguments = [*given.posonlyargs, *given.args]
        # What multiplies weights with each other alone, as one that joins layers does, changes the model.
        self._takes_something = len(arguments) > 1 or bool(given.kwonlyargs or given.vararg)
        self._names = {argument.arg: {_Thing("", module)} for argument in arguments[:1]}
        # A name may be bound further down in a loop: a few rounds find it.
        for _ in range(_ROUNDS):
            for node in self._nodes:
                self._bind(node)

    def products(self) -> Iterator[str]:
        """Yield the submodules, or methods of them, that are called or handed on, or whose weights are multiplied."""
        for node in self._nodes:
            called: list[ast.expr] = []
            factors: list[ast.expr] = []
            match node:
                case ast.BinOp(op=ast.MatMult()):
                    factors = [node.left, node.right]
                case ast.Call() if facts_of(_name_of(node.func)).rule is Rule.LOW:
                    owner = [node.func.value] if isinstance(node.func, ast.Attribute) else []
                    called, factors = [node.func], [*owner, *_arguments(node)]
                case ast.Call():
                    called = [node.func]
                    # Beside an input an argument is likely to be called with that; a module alone is kept, or returned.
                    given = [*_arguments(node)]
                    others = [each for each in given if not self._all(each) and not isinstance(each, ast.Constant)]
                    called += given if others and not _calls_nothing(node.func) else []
            for thing in self._all(*called):
                if not thing.is_weight:
                    yield from self._called(thing)
            for thing in self._all(*factors) if self._takes_something else ():
                if thing.is_weight and thing.path and self._sources.multiplies(thing.module):
                    yield thing.path.partition(".*")[0]

    def _called(self, thing: _Thing) -> Iterator[str]:
        path, inside, _ = thing.path.partition(".*")
        if path and thing.name in ("", *_FORWARD):
            yield from [path] * self._sources.multiplies(thing.module)
        elif path and self._sources.runs_products(thing.module, thing.name) and self._sources.multiplies(thing.module):
            yield path if inside else f"{path}.{thing.name}"

    def _bind(self, node: ast.AST) -> None:
        """Let the names on the left stand for what is on the right, of loops for its elements."""
        match node:
            case ast.For() | ast.AsyncFor() | ast.comprehension():
                targets, things = [node.target], self._elements(node.iter)
            case ast.Assign():
                targets, things = node.targets, self._all(node.value)
            case ast.AnnAssign(value=ast.expr()) | ast.NamedExpr():
                targets, things = [node.target], self._all(node.value)
            case _:
                return
        for name in (each for target in targets for each in ast.walk(target)):
            if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store):
                self._names.setdefault(name.id, set()).update(thing for thing in things if thing.path)

    def _all(self, *values: ast.expr | None) -> list[_Thing]:
        """Return what expressions may stand for, in an order that does not change from run to run."""
        return sorted({each for value in values for each in self._things(value)}, key=lambda each: each[::2])

    def _things(self, value: ast.AST | None) -> set[_Thing]:
        match value:
            case ast.Name():
                return self._names.get(value.id, set())
            case ast.Attribute():
                return {found for each in self._all(value.value) if (found := self._attribute(each, value.attr))}
            case ast.Subscript():
                return self._elements(value.value)
            case ast.ListComp() | ast.GeneratorExp():
                return self._things(value.elt)
            case ast.Call(func=ast.Name(id=name)) if name in _ELEMENTS:
                return self._elements(*_arguments(value))
            case ast.Call(func=ast.Attribute(attr=name) as method) if name in _CONTENTS:
                return self._elements(method.value)
            case ast.Call(func=ast.Attribute() as method):  # a view or cast of a weight
                return {each for each in self._things(method) if each.is_weight}
            case ast.Starred() | ast.NamedExpr() | ast.Await() | ast.IfExp() | ast.BoolOp() | ast.Tuple() | ast.List():
                return set().union(*map(self._things, ast.iter_child_nodes(value)))
        return set()

    def _attribute(self, owner: _Thing, name: str) -> _Thing | None:
        if owner.name:
            # A view or a cast of a weight has its numbers.
            op = canonical_name(name, "call_method") if owner.is_weight else None
            return owner if op is not None and (op.name == "to" or facts_of(op.name).view) else None
        module = owner.module
        if (child := module._modules.get(name)) is not None:
            return _Thing(f"{owner.path}.{name}".lstrip("."), child)
        known = name in _FORWARD or name in self._sources.methods(type(module))
        return owner._replace(name=name) if known or module._parameters.get(name) is not None else None

    def _elements(self, *values: ast.expr) -> set[_Thing]:
        """Return children as elements, and what may be an element already: of a slice, or of a list of modules."""
        return {
            _Thing(thing.path.removesuffix(".*") + ".*", each, thing.name)
            for thing in self._all(*values)
            if thing.path
            for each in (thing.module, *filter(None, () if thing.name else thing.module._modules.values()))
        }


def _in_source_order(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _in_source_order(child)


def _arguments(call: ast.Call) -> Iterator[ast.expr]:
    yield from call.args
    yield from (keyword.value for keyword in call.keywords)


def _name_of(function: ast.expr) -> str:
    """Return the last name of what is called: ``linear`` of ``F.linear``."""
    return getattr(function, "attr", None) or getattr(function, "id", "")


def _calls_nothing(function: ast.expr) -> bool:
    """Return whether what gets a module calls none of it: a class, a container's method, an initializer, ``len``."""
    name = _name_of(function)
    own = isinstance(function, ast.Name) and hasattr(builtins, name) and name not in _CALL_IT
    within = {each.attr for each in ast.walk(function) if isinstance(each, ast.Attribute)}
    return own or name[:1].isupper() or name in _KEEP or "init" in within or name.lstrip("_").startswith("init")
