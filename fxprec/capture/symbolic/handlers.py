"""Which ``except`` clause around a traced op would catch what the op raises when it runs.

::

    try:
        return self.fc(x @ x)      # traced: raises nothing, whatever the sizes
    except RuntimeError:           # at run time it may, and this is then the result
        return self.fc(x)

A graph has no handlers: the op's error would reach the caller. What a frame catches at an instruction is read from the
exception table of its code; ``finally``, ``with``, and clauses for errors that no op raises (``KeyError``) pass.
"""

from __future__ import annotations

import dis
import inspect
import itertools
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any, Final

import torch

from fxprec.capture.trusted import is_torchs

#: What torch's ops raise.
_OF_OPS: Final = (RuntimeError, NotImplementedError, IndexError, ValueError, TypeError, torch.OutOfMemoryError)
_MATCHES: Final = ("CHECK_EXC_MATCH", "CHECK_EG_MATCH")
_NAMES: Final = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FAST", "LOAD_DEREF")
_UNKNOWN: Final = object()


@dataclass(frozen=True, slots=True)
class _Code:
    """A code object's instructions, their places by offset, and its exception table: where errors go, from where."""

    instructions: tuple[dis.Instruction, ...]
    places: dict[int, int]
    ranges: list[Any]


def has_handlers(code: CodeType) -> bool:
    """Return whether a code object has any ``try`` or ``with``."""
    return bool(code.co_exceptiontable)


def catches(frame: FrameType) -> str | None:
    """``RuntimeError``: what the frame catches where it is now, if an op may raise it; None if nothing."""
    code = _read(frame.f_code)
    offset, seen = frame.f_lasti, set()
    while True:
        target = next((each.target for each in code.ranges if each.start <= offset < each.end), None)
        if target is None or target in seen:
            return None
        seen.add(target)
        for caught in _clauses(code, target, frame):
            if _may_be_raised(caught):
                return caught.__name__ if isinstance(caught, type) else "errors"
        offset = target  # what no clause matches goes on to the handler around this one


def ends_errors(code: CodeType) -> bool:
    """Return whether a ``with`` around ops may end what they raise by this function.

    That is an ``__exit__`` that returns anything but None or False, or a generator (``contextlib.contextmanager``) that
    has an ``except`` clause.
    """
    instructions = _read(code).instructions
    if code.co_flags & inspect.CO_GENERATOR:
        return any(each.opname in _MATCHES for each in instructions) or any(
            before.opname == "PUSH_EXC_INFO" and each.opname == "POP_TOP"
            for before, each in itertools.pairwise(instructions)
        )
    if code.co_name != "__exit__":
        return False
    constants = ("LOAD_CONST", "RETURN_CONST")
    returned = (
        each if each.opname == "RETURN_CONST" else before
        for before, each in itertools.pairwise(instructions)
        if each.opname in ("RETURN_VALUE", "RETURN_CONST")
    )
    return any(each.opname not in constants or each.argval for each in returned)


@lru_cache(maxsize=1024)
def _read(code: CodeType) -> _Code:
    bytecode: Any = dis.Bytecode(code)  # exception_entries is missing from the stubs
    instructions = tuple(each for each in bytecode if each.opname not in ("CACHE", "EXTENDED_ARG", "NOP"))
    places = {instruction.offset: place for place, instruction in enumerate(instructions)}
    return _Code(instructions, places, bytecode.exception_entries)


def _clauses(code: _Code, target: int, frame: FrameType) -> list[Any]:
    """Return what each ``except`` of the handler at ``target`` names; BaseException where it names nothing."""
    found: list[Any] = []
    place: int | None = code.places.get(target)
    while place is not None:
        stack: list[Any] = []
        for instruction in code.instructions[place:]:
            name = instruction.opname
            if name == "POP_TOP" and not stack and not found:
                return [BaseException]  # except: ...
            if name in _MATCHES:
                found += stack.pop() if stack and isinstance(stack[-1], tuple) else stack[-1:]
                place = None
            elif name.startswith("POP_JUMP") and place is None:  # no match: the next clause
                place = code.places.get(instruction.argval)
                break
            elif not _evaluate(instruction, stack, frame):
                return found
    return found


def _evaluate(instruction: dis.Instruction, stack: list[Any], frame: FrameType) -> bool:
    """Run one instruction of the expression after ``except``; False where it is none of such an expression."""
    name, argument = instruction.opname, instruction.argval
    if name in _NAMES or name.startswith("LOAD_FAST"):
        scopes = (frame.f_locals, frame.f_globals, frame.f_builtins)
        stack.append(next((scope[argument] for scope in scopes if argument in scope), _UNKNOWN))
    elif name in ("LOAD_ATTR", "LOAD_METHOD") and stack:
        stack[-1] = getattr(stack[-1], argument, _UNKNOWN)
    elif name == "BUILD_TUPLE" and instruction.arg:
        stack[-instruction.arg :] = [tuple(stack[-instruction.arg :])]
    elif name not in ("PUSH_EXC_INFO", "PUSH_NULL", "COPY", "SWAP"):
        return False
    return True


def _may_be_raised(caught: Any) -> bool:
    """Return whether an op may raise what a clause names."""
    if not isinstance(caught, type):
        return True
    return is_torchs(caught) or any(issubclass(error, caught) for error in _OF_OPS)
