"""What a function's bytecode reads and writes outside of its own locals: found once a code object.

::

    def forward(self, x):                 CodeReads(
        if DEBUG:                             reads=(Read("global", "DEBUG", (), (2,)),
            log.info("called")                       Read("global", "log", ("info",), (16, 28)),
        return x / config.scale                      Read("global", "config", ("scale",), (70, 82))),
                                              writes=(), names={"info": (28,), "scale": (82,)},
                                              strings={"called"}, nested=())

A read is a name and the attributes, or elements with a constant key, that directly follow it (``config.scale``,
``TABLE["a"]``); what happens to the value afterwards (it is passed on, kept, called) is not followed. The offsets tell
whether a read was executed.
"""

from __future__ import annotations

import dis
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType
from typing import Any, Final, Literal

_GLOBALS: Final = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})
_CLOSURES: Final = frozenset({"LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"})
_ATTRIBUTES: Final = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
_SUPER: Final = frozenset({"LOAD_SUPER_ATTR", "LOAD_SUPER_METHOD", "LOAD_ZERO_SUPER_ATTR", "LOAD_ZERO_SUPER_METHOD"})
_CONSTANTS: Final = frozenset({"LOAD_CONST", "LOAD_SMALL_INT"})
_WRITES: Final[dict[str, Literal["global", "closure"]]] = {
    "STORE_GLOBAL": "global",
    "DELETE_GLOBAL": "global",
    "STORE_DEREF": "closure",
    "DELETE_DEREF": "closure",
}


@dataclass(frozen=True, slots=True)
class Key:
    """The constant in ``[...]``."""

    value: Any

    def __str__(self) -> str:
        return f"[{self.value!r}]"


@dataclass(frozen=True, slots=True)
class Read:
    """``name.attribute[key]``, at these offsets of the bytecode; or a name that is bound or deleted there.

    ``kind``: where the name is looked up. An "import" within the function names a module, and what is imported from it.
    """

    kind: Literal["global", "closure", "import"]
    name: str
    chain: tuple[str | Key, ...]
    offsets: tuple[int, ...]

    def __str__(self) -> str:
        return self.name + "".join(str(link) if isinstance(link, Key) else f".{link}" for link in self.chain)


@dataclass(frozen=True, slots=True)
class CodeReads:
    """See the module's docstring.

    Attributes:
        reads, writes: in the order of the code; the latter of a ``global`` or ``nonlocal`` name.
        names: the attributes that are read of anything, with the offsets where; those of a constant that follows a
            name (``f("".join)``) are left out: no class of the user's gives them.
        strings: the constants that may be names of attributes, as in ``getattr(cls, "scale")``.
        nested: code objects of the functions, lambdas, comprehensions and classes within.
    """

    reads: tuple[Read, ...]
    writes: tuple[Read, ...]
    names: dict[str, tuple[int, ...]]
    strings: frozenset[str]
    nested: tuple[CodeType, ...]


@lru_cache(maxsize=4096)
def code_reads(code: CodeType) -> CodeReads:
    """Search one code object (not those nested in it)."""
    reads: list[Read] = []
    writes: list[Read] = []
    names: dict[str, tuple[int, ...]] = {}
    free = frozenset(code.co_freevars)
    # Offsets of EXTENDED_ARG before an instruction: tracing may stop at either.
    prefix: tuple[int, ...] = ()
    # The read that the next attribute belongs to.
    growing: Read | None = None
    constant: tuple[Any, tuple[int, ...]] | None = None  # loaded after it: perhaps a key
    # One pass over the instructions: a chain of attributes grows until another instruction ends it.
    for instruction in dis.get_instructions(code):
        kind, argument = instruction.opname, instruction.argval
        offsets = (*prefix, instruction.offset)
        prefix = offsets if kind == "EXTENDED_ARG" else ()
        if kind in ("EXTENDED_ARG", "CACHE", "PUSH_NULL"):
            continue
        if constant is None and (kind in _ATTRIBUTES or kind in _SUPER or kind == "IMPORT_FROM"):
            names[argument] = names.get(argument, ()) + offsets
            if growing is not None and kind not in _SUPER:
                read = Read(growing.kind, growing.name, (*growing.chain, argument), growing.offsets + offsets)
                # ``from m import a, b``: a read of m.a, and others may follow, of the same module.
                if kind == "IMPORT_FROM":
                    reads.append(read)
                    read = Read(read.kind, read.name, growing.chain, read.offsets)
                growing = read
            continue
        # A constant behind a name may be the key of a subscript, or the next argument: the next instruction tells.
        if growing is not None and constant is None and kind in _CONSTANTS:
            constant = argument, offsets
            continue
        if growing is not None and constant is not None and _is_subscript(instruction):
            key, more = constant
            growing = Read(growing.kind, growing.name, (*growing.chain, Key(key)), growing.offsets + more + offsets)
            constant = None
            continue
        constant = None
        # A STORE_FAST does not end it: ``from m import a, b`` is IMPORT_FROM, STORE_FAST, IMPORT_FROM, STORE_FAST.
        if growing is not None and kind != "STORE_FAST":
            # What is left of such an import is m alone, whose names were listed already.
            if not (growing.kind == "import" and reads and reads[-1].name == growing.name and reads[-1].chain):
                reads.append(growing)
            growing = None
        # Anything else ends the chain, and may begin one.
        if kind in _GLOBALS:
            growing = Read("global", argument, (), offsets)
        elif kind in _CLOSURES and argument in free:
            growing = Read("closure", argument, (), offsets)
        elif kind == "IMPORT_NAME":
            growing = Read("import", argument, (), offsets)
        elif kind in _WRITES:
            if _WRITES[kind] == "global" or argument in free:
                writes.append(Read(_WRITES[kind], argument, (), offsets))
    if growing is not None:
        reads.append(growing)
    nested = tuple(constant for constant in code.co_consts if isinstance(constant, CodeType))
    return CodeReads(tuple(reads), tuple(writes), names, frozenset(strings_in(code.co_consts)), nested)


def strings_in(value: Any) -> Iterator[str]:
    """Yield the strings in a constant that can be names of attributes."""
    if isinstance(value, str):
        yield from filter(str.isidentifier, value.split("."))
    elif isinstance(value, tuple | list | set | frozenset | dict):
        for each in (*value, *value.values()) if isinstance(value, dict) else value:
            yield from strings_in(each)


def _is_subscript(instruction: dis.Instruction) -> bool:
    return instruction.opname == "BINARY_SUBSCR" or (instruction.opname == "BINARY_OP" and instruction.argrepr == "[]")


def names_in(code: CodeType) -> set[str]:
    """Return the names of globals and attributes in a code object and those within it."""
    nested = [each for each in code.co_consts if isinstance(each, CodeType)]
    return set(code.co_names).union(*map(names_in, nested))
