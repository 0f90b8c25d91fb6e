"""Find methods that call submodules and were not named when converting: by themselves they run in FP32.

Found in the bytecode by the names of submodules, without running anything::

    def encode(self, x):                        encode calls down
        return self.norm(self.down(x))
    def features(self, x):                      features calls down  (through encode)
        return self.encode(x).flatten(1)

Listed are methods that run matrix products. Modules without weights that a product reads (norms, activations,
embeddings) do not count. What a method gets at in other ways (``getattr(self, name)``, ``self.children()``) is not
found.

What reads names in bytecode is looked at in the source, where that is at hand: whether it calls a submodule or
multiplies with one. A *chain* names a value from the object on, ``*`` for any element of a container::

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
import dis
import functools
import inspect
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from types import CodeType, FunctionType
from typing import Any, Final, NamedTuple

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

#: As often is the source gone through, and as long are the chains that a name may stand for: ``child = child.next`` in
#: a loop would never end.
_ROUNDS: Final = 4
_LONGEST: Final = 8
_OF_MODULES: Final = frozenset(dir(nn.Module)) - {"forward", "__call__"}
_NOTHING: Final = frozenset({"EXTENDED_ARG", "CACHE", "PRECALL", "PUSH_NULL", "NOP", "COPY_FREE_VARS", "KW_NAMES"})
#: What takes a submodule and calls nothing: it is returned, kept, or asked for.
_NO_USE: Final = frozenset({"RETURN_VALUE", "STORE_ATTR", "IS_OP", "COMPARE_OP", "CONTAINS_OP", "POP_TOP"})
#: So the names of methods begin that change a module and give nothing back, such as timm's initializers.
_CHANGES: Final = ("set_", "init", "reset_", "fix_", "enable_", "disable_", "freeze", "load_", "save_")
#: Modules of torch's whose weights may have several dimensions, and are no factor of a product.
_NO_PRODUCTS: Final = (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.RMSNorm)


@dataclass(frozen=True, slots=True)
class SourceUses:
    """Chains that a method calls or hands on to be called, and those that it multiplies an argument with.

    A method without arguments that multiplies weights with each other, as one that joins layers does, changes the
    model.
    """

    called: tuple[Chain, ...]
    multiplied: tuple[Chain, ...]


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
                if _is_product(node.func):
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


def _is_product(function: ast.expr) -> bool:
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
        alike = f"do {self.like_it} modules" if self.like_it > 1 else "does 1 module"
        more = f" (so {alike} like it)" if self.like_it else ""
        return (
            f"{self.method} calls {', '.join(self.calls)}{more}: by itself in FP32, "
            f"unless convert(model, methods=({self.method!r},))"
        )


class _Read(NamedTuple):
    """``self.a.b`` in bytecode.

    Attributes:
        names: ``("a", "b")``.
        then: the instruction that takes it.
        gives: whether the method gives its caller something.
        code: of the method.
    """

    names: tuple[str, ...]
    then: str
    gives: bool
    code: CodeType


#: Method -> what it reads of its object, of the methods that the user's classes define.
_Methods = dict[str, list[_Read]]


def unnamed_methods(
    model: nn.Module, named: Collection[str], stays: Callable[[str], bool] = lambda path: False
) -> list[Unnamed]:
    """Return the public methods of the model that run products, and those of its submodules that no forward calls.

    Args:
        model: converted or not.
        named: the methods that are converted, by their names in the model.
        stays: whether the module at a path is meant to run in FP32.
    """
    meant = {id(module) for path, module in model.named_modules() if stays(path)}
    reads_of = functools.cache(_reads)
    methods_of = functools.cache(lambda cls: _methods(cls, reads_of))  # for this look: classes may change
    found: dict[tuple[type, str], Unnamed] = {}
    for path, module in model.named_modules():
        methods = methods_of(type(module))
        in_forward = _reached(methods, "forward") if path else ()
        for name in methods:
            if name.startswith("_") or name == "forward" or name in in_forward or _full(path, name) in named:
                continue
            if name.startswith(_CHANGES) and not any(read.gives for read in methods[name]):
                continue
            calls = _calls(path, module, name, named, methods_of, meant)
            if calls:
                known = found.setdefault((type(module), name), Unnamed(_full(path, name), calls, -1))
                found[type(module), name] = replace(known, like_it=known.like_it + 1)
    return [*found.values()]


def _full(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _calls(
    path: str,
    module: nn.Module,
    method: str,
    named: Collection[str],
    methods_of: Callable[[type], _Methods],
    meant: Collection[int],
) -> tuple[str, ...]:
    """Return the submodules with products, or methods of them, that a method calls, through other methods too.

    Those that are named do not count, nor those that are meant to run in FP32.
    """
    methods = methods_of(type(module))
    reached = _reached(methods, method, stop=[name for name in methods if _full(path, name) in named])
    return tuple(
        call
        for call in _products(module, reached, methods_of, meant)
        if not {_full(path, call), _full(path, f"{call}.forward")} & {*named}
    )


def _products(
    module: nn.Module, reached: Iterable[str], methods_of: Callable[[type], _Methods], meant: Collection[int]
) -> Iterator[str]:
    """Return the submodules with products, or methods of them, that these methods of a module call, each once."""
    methods = methods_of(type(module))
    called: dict[str, None] = {}
    for each in reached:
        reads = [read for read in methods[each] if module._modules.get(read.names[0]) is not None]
        uses = uses_in_source(reads[0].code) if reads else None
        found = (
            (_child(module, read, methods_of) for read in reads) if uses is None else _used(module, uses, methods_of)
        )
        called |= dict.fromkeys(call for call in found if call is not None)
    return (call for call in called if _multiplies(module, call, meant))


def _used(module: nn.Module, uses: SourceUses, methods_of: Callable[[type], _Methods]) -> Iterator[str]:
    """Return the submodules, or methods of them, that a method's source calls, or multiplies a weight of."""
    for chain in uses.called:
        owner, path, left = resolve(module, chain)
        if path and left in ((), ("forward",), ("__call__",)):
            yield ".".join(path)
        elif path and len(left) == 1 and left[0] not in _OF_MODULES and _computes(owner, left[0], methods_of):
            yield ".".join(path if ELEMENT in chain else (*path, *left))
    for chain in uses.multiplied:
        owner, path, left = resolve(module, chain)
        if path and len(left) == 1 and owner._parameters.get(left[0]) is not None:
            yield ".".join(path)


def _multiplies(module: nn.Module, call: str, meant: Collection[int]) -> bool:
    """Return whether what is called holds weights that products read, by what its parameters look like.

    Args:
        module: whose method calls it.
        call: the path of a submodule, or of its method.
        meant: ids of modules that are meant to run in FP32.
    """
    owner, _, _ = resolve(module, tuple(call.split(".")))
    return any(
        parameter is not None and parameter.ndim > 1 and parameter.is_floating_point()
        for each in owner.modules()
        if id(each) not in meant and not isinstance(each, _NO_PRODUCTS)
        for parameter in each._parameters.values()
    )


def _methods(cls: type, reads_of: Callable[[CodeType], list[_Read]]) -> _Methods:
    methods: _Methods = {}
    for base in reversed(cls.__mro__):
        if base.__module__.partition(".")[0] in ("torch", "fxprec", "builtins"):
            continue
        for name, value in vars(base).items():
            function = inspect.unwrap(value) if isinstance(value, FunctionType) else None
            if isinstance(function, FunctionType) and name not in _OF_MODULES:
                methods[name] = reads_of(function.__code__)
    return methods


def _reached(methods: _Methods, name: str, stop: Collection[str] = ()) -> list[str]:
    """Return the methods that this one calls on its own object, itself too; forward and ``stop`` are other entries."""
    reached = [name] if name in methods else []
    for each in reached:
        for read in methods[each]:
            called = read.names[0]
            if called in methods and called not in (*reached, *stop, "forward"):
                reached.append(called)
    return reached


def _child(module: nn.Module, read: _Read, methods_of: Callable[[type], _Methods]) -> str | None:
    """Return the submodule, or method of it, that is called, or whose weight goes into what the method gives."""
    owner: Any = module
    path: list[str] = []
    for number, name in enumerate(read.names):
        child = owner._modules.get(name)
        if child is not None:
            owner = child
            path.append(name)
            continue
        last = number == len(read.names) - 1 and read.gives and read.then not in _NO_USE
        if path and ((last and owner._parameters.get(name) is not None) or name == "forward"):
            return ".".join(path)
        if path and name not in _OF_MODULES and _computes(owner, name, methods_of):
            return ".".join((*path, name))
        return None
    return ".".join(path) if path and read.then not in _NO_USE else None


def _computes(module: nn.Module, name: str, methods_of: Callable[[type], _Methods]) -> bool:
    """Return whether a method of a submodule runs products of submodules of its own."""
    reached = _reached(methods_of(type(module)), name)
    return next(iter(_products(module, reached, methods_of, ())), None) is not None


def _reads(code: CodeType) -> list[_Read]:
    gives = _gives(code)
    return [_Read(names, then, gives, code) for names, then in _chains(code)]


def _gives(code: CodeType) -> bool:
    """Return whether it returns anything but None: an initializer, which does not, computes nothing with weights."""
    before: Any = None
    for instruction in dis.get_instructions(code):
        if instruction.opname == "RETURN_CONST" and instruction.argval is not None:
            return True
        if instruction.opname == "RETURN_VALUE" and (before.opname != "LOAD_CONST" or before.argval is not None):
            return True
        before = instruction
    return False


def _chains(code: CodeType, self_name: str = "") -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield each ``self.a.b`` of the code and of functions within, with the instruction that comes after all loads."""
    self_name = self_name or (code.co_varnames[0] if code.co_argcount else "")
    waiting: list[list[str]] = []
    chain: list[str] | None = None
    for instruction in dis.get_instructions(code):
        kind, argument = instruction.opname, instruction.argval
        if kind in _NOTHING:
            continue
        if chain is not None and kind in ("LOAD_ATTR", "LOAD_METHOD"):
            chain.append(argument)
            continue
        chain = None
        if not kind.startswith("LOAD_"):
            yield from ((tuple(each), kind) for each in waiting if each)
            waiting = []
        if "LOAD_FAST" in kind or kind == "LOAD_DEREF":
            if (argument[-1] if isinstance(argument, tuple) else argument) == self_name:
                chain = []
                waiting.append(chain)
    for constant in code.co_consts:
        if isinstance(constant, CodeType) and self_name in constant.co_freevars:
            yield from _chains(constant, self_name)
