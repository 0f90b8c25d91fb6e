"""Finds private names of torch and Triton in source: what ``torch_internals.py`` of each floor is to hold, alone.

Private is an import or an attribute of theirs with one leading underscore. What an object is, source does not say; so
an attribute with a leading underscore is taken for theirs unless it is read from ``self``, ``cls`` or ``super()``, or
this package defines one of that name (``_fxprec...`` says so itself), or it stands in a table below. So is a name in a
string: the second argument of ``getattr`` and its kind, or a dotted path such as ``"torch._C"``.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final, TypeVar

__all__ = [
    "FLOORS",
    "ROOT",
    "contract",
    "contracts",
    "defined_names",
    "private_names",
    "sources",
    "taken_names",
    "unused_names",
]

ROOT: Final = Path(__file__).resolve().parents[2]
FLOORS: Final = ("kernels", "passes", "fxprec")
BASES: Final = ("torch", "triton")

#: nn.Module's own dicts and Tensor's counter of writes: as good as public, subclasses everywhere use them.
AS_GOOD_AS_PUBLIC: Final = frozenset({
    "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_version",
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
})  # fmt: skip
#: Of Python itself: namedtuple's, and sys's.
OF_PYTHON: Final = frozenset({"_replace", "_fields", "_asdict", "_make", "_getframe"})
#: Of Accelerate: the optimizers that it prepared, of which it has no public list.
OF_ACCELERATE: Final = frozenset({"_optimizers"})

_BY_NAME: Final = frozenset({"getattr", "setattr", "hasattr", "delattr", "attrgetter", "import_module"})
_DOTTED: Final = re.compile(r"(torch|triton)(\.\w+)*\._[a-zA-Z]\w*(\.\w+)*")


Test = TypeVar("Test", bound=Callable[..., object])


def contract(floor: str, *names: str) -> Callable[[Test], Test]:
    """The test below is of what is relied on of these names of a floor's ``torch_internals``."""
    return lambda test: test


@functools.cache
def _tree(path: Path) -> ast.Module:
    """A file parsed, once for all who look into it."""
    return ast.parse(path.read_text())


@functools.cache
def contracts() -> dict[str, list[str]]:
    """Floor -> the names that a test has ``contract`` of."""
    found: dict[str, list[str]] = {floor: [] for floor in FLOORS}
    for path in (ROOT / "tests").rglob("test_torch_internals*.py"):
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "contract":
                floor, *names = (ast.literal_eval(argument) for argument in node.args)
                found[floor] += names
    return {floor: sorted(names) for floor, names in found.items()}


@functools.cache
def taken_names() -> dict[str, list[str]]:
    """Floor -> the names that other files import from its ``torch_internals``."""
    found: dict[str, set[str]] = {floor: set() for floor in FLOORS}
    for path in _files():
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").endswith(".torch_internals"):
                *_, floor, _ = (node.module or "").split(".")
                found[floor] |= {each.name for each in node.names}
    return {floor: sorted(names) for floor, names in found.items()}


def unused_names(floor: str) -> set[str]:
    """What a floor's ``torch_internals`` imports, and neither uses nor hands on."""
    tree = ast.parse((ROOT / floor / "torch_internals.py").read_text())
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom))
    bound = {(each.asname or each.name).partition(".")[0] for node in imports for each in node.names}
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    return bound - used - {"annotations", *taken_names()[floor]}


def sources() -> Iterator[Path]:
    """The files of the three floors that must hold no private name."""
    return (path for path in _files() if path.name != "torch_internals.py")


def _files() -> Iterator[Path]:
    for floor in FLOORS:
        for path in sorted((ROOT / floor).rglob("*.py")):
            part = path.relative_to(ROOT / floor).parts[0]
            if not (floor == "fxprec" and part in ("passes", "kernels")):
                yield path


def defined_names(paths: Iterable[Path]) -> set[str]:
    """Private names that this package defines: functions, attributes of classes, and of ``self``."""
    names: set[str] = set()
    for path in paths:
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_own(node.value):
                names.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
    return {name for name in names if _is_private(name)}


def private_names(source: str, own: Iterable[str] = ()) -> list[tuple[int, str]]:
    """Line and name of each private name of torch or Triton; ``own``: names that this package defines."""
    allowed = AS_GOOD_AS_PUBLIC | OF_PYTHON | OF_ACCELERATE | frozenset(own)
    tree = ast.parse(source)
    theirs = _imported(tree)
    found = []
    for node in ast.walk(tree):
        for name in _names(node, theirs, allowed):
            found.append((node.lineno, name))  # type: ignore[attr-defined]
    return sorted(found)


def _names(node: ast.AST, theirs: set[str], allowed: frozenset[str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (each.name for each in node.names if _is_theirs(each.name) and _has_private(each.name))
    elif isinstance(node, ast.ImportFrom) and _is_theirs(node.module or ""):
        full = [f"{node.module}.{each.name}" for each in node.names]
        yield from (name for name in full if _has_private(name))
    elif isinstance(node, ast.Attribute) and _is_private(node.attr):
        if _root(node) in theirs or not (_is_own(node.value) or node.attr in allowed or _is_ours(node.attr)):
            yield f".{node.attr}"
    elif isinstance(node, ast.Call) and _called(node) in _BY_NAME:
        for argument in node.args[:2]:
            text = _text(argument)
            if _is_private(text) and text not in allowed and not _is_ours(text):
                yield f'"{text}"'
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _DOTTED.fullmatch(node.value):
        yield f'"{node.value}"'


def _imported(tree: ast.AST) -> set[str]:
    """Names that an import of torch or Triton binds to a module or a class."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {each.asname or each.name.partition(".")[0] for each in node.names if _is_theirs(each.name)}
        elif isinstance(node, ast.ImportFrom) and _is_theirs(node.module or ""):
            names |= {each.asname or each.name for each in node.names}
    return names


def _is_theirs(module: str) -> bool:
    return module.partition(".")[0] in BASES


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def _is_ours(name: str) -> bool:
    return name.startswith("_fxprec")


def _has_private(dotted: str) -> bool:
    return any(map(_is_private, dotted.split(".")))


def _root(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def _is_own(node: ast.expr) -> bool:
    """Whether it is an object whose private names a file may use: its own, and its class's."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "super"
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _called(node: ast.Call) -> str:
    return node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")


def _text(node: ast.expr) -> str:
    """A string, or the beginning of one that is put together."""
    if isinstance(node, ast.JoinedStr) and node.values:
        node = node.values[0]
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
