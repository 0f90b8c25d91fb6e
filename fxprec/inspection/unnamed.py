"""Methods that call submodules and were not named when converting: by themselves they run in FP32.

Found in the bytecode by the names of submodules, without running anything::

    def encode(self, x):                        encode calls down, norm
        return self.norm(self.down(x))
    def features(self, x):                      features calls down, norm  (through encode)
        return self.encode(x).flatten(1)

What a method gets at in other ways (``getattr(self, name)``, ``self.children()``) is not found; the warning of the
first such run names it (see ``fxprec.model.reminders``).
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from types import CodeType, FunctionType
from typing import Any, Final, NamedTuple

from torch import nn

_OF_MODULES: Final = frozenset(dir(nn.Module)) - {"forward", "__call__"}
_NOTHING: Final = frozenset({"EXTENDED_ARG", "CACHE", "PRECALL", "PUSH_NULL", "NOP", "COPY_FREE_VARS", "KW_NAMES"})
#: What takes a submodule and calls nothing: it is returned, kept, or asked for.
_NO_USE: Final = frozenset({"RETURN_VALUE", "STORE_ATTR", "IS_OP", "COMPARE_OP", "CONTAINS_OP", "POP_TOP"})

#: So the names of methods begin that change a module and give nothing back, such as timm's initializers.
_CHANGES: Final = ("set_", "init", "reset_", "fix_", "enable_", "disable_", "freeze", "load_", "save_")


@dataclass(frozen=True, slots=True)
class Unnamed:
    """One method.

    Attributes:
        method: as ``convert(methods=...)`` takes it.
        calls: paths of the submodules that it calls, from the method's module.
        like_it: how many further modules of the model have it in common.
    """

    method: str
    calls: tuple[str, ...]
    like_it: int = 0

    def __str__(self) -> str:
        more = f" (so do {self.like_it} modules like it)" if self.like_it else ""
        return (
            f"{self.method} calls {', '.join(self.calls)}{more}: by itself in FP32, "
            f"unless convert(model, methods=({self.method!r},))"
        )


class _Read(NamedTuple):
    """``self.a.b``: the names, the instruction that takes it, and whether the method gives its caller something."""

    names: tuple[str, ...]
    then: str
    gives: bool


#: Method -> what it reads of its object, of the methods that the user's classes define.
_Methods = dict[str, list[_Read]]


def unnamed_methods(model: nn.Module, named: Collection[str]) -> list[Unnamed]:
    """The public methods of the model, and those of its submodules that no forward calls.

    Args:
        model: converted or not.
        named: the methods that are converted, by their names in the model.
    """
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
            calls = _calls(path, module, name, named, methods_of)
            if calls:
                known = found.setdefault((type(module), name), Unnamed(_full(path, name), calls, -1))
                found[type(module), name] = replace(known, like_it=known.like_it + 1)
    return [*found.values()]


def _full(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _calls(
    path: str, module: nn.Module, method: str, named: Collection[str], methods_of: Callable[[type], _Methods]
) -> tuple[str, ...]:
    """The submodules, or methods of them, that a method calls, through other methods too. Those named do not count."""
    methods = methods_of(type(module))
    reached = _reached(methods, method, stop=[name for name in methods if _full(path, name) in named])
    called = dict.fromkeys(
        call
        for each in reached
        for read in methods[each]
        if (call := _child(module, read, methods_of)) is not None
        and not {_full(path, call), _full(path, f"{call}.forward")} & {*named}
    )
    return tuple(called)


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
    """The methods that this one calls on its own object, itself too; forward and ``stop`` are other entries."""
    reached = [name] if name in methods else []
    for each in reached:
        for read in methods[each]:
            called = read.names[0]
            if called in methods and called not in (*reached, *stop, "forward"):
                reached.append(called)
    return reached


def _child(module: nn.Module, read: _Read, methods_of: Callable[[type], _Methods]) -> str | None:
    """The path of the submodule, or of its method, that is called or whose weight goes into what the method gives."""
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
    """Whether a method of a submodule calls submodules of its own."""
    methods = methods_of(type(module))
    return any(_child(module, read, methods_of) for each in _reached(methods, name) for read in methods[each])


def _reads(code: CodeType) -> list[_Read]:
    gives = _gives(code)
    return [_Read(names, then, gives) for names, then in _chains(code)]


def _gives(code: CodeType) -> bool:
    """Whether it returns anything but None: what does not, such as an initializer, computes nothing with weights."""
    before: Any = None
    for instruction in dis.get_instructions(code):
        if instruction.opname == "RETURN_CONST" and instruction.argval is not None:
            return True
        if instruction.opname == "RETURN_VALUE" and (before.opname != "LOAD_CONST" or before.argval is not None):
            return True
        before = instruction
    return False


def _chains(code: CodeType, self_name: str = "") -> Iterator[tuple[tuple[str, ...], str]]:
    """Every ``self.a.b`` of the code and of the functions within, with the instruction that comes after all loads."""
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
