"""Finds the line of the user's code that runs, and the ``except`` clauses around it, while a forward is traced.

The line is the text for ``node.meta["stack_trace"]`` and for the reasons of a decline. The clauses matter since a graph
has none::

    try:
        return self.fc(x @ x)      # traced: raises nothing, whatever the sizes
    except RuntimeError:           # at run time it may, and this is then the result
        return self.fc(x)

What a frame catches at an instruction is read from the exception table of its code. ``finally``, ``with``, and clauses
for errors that no op raises (``KeyError``) let the trace go on. A clause whose classes cannot be told ends it, and a
``finally`` with a ``return`` in it.
"""

from __future__ import annotations

import dis
import inspect
import itertools
import linecache
import os
import traceback
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType, FrameType, TracebackType
from typing import Any, Final

import torch

from fxprec.capture.user_code import is_torchs

#: What torch's ops raise.
_OF_OPS: Final = (RuntimeError, NotImplementedError, IndexError, ValueError, TypeError, torch.OutOfMemoryError)
_MATCHES: Final = ("CHECK_EXC_MATCH", "CHECK_EG_MATCH")
_NAMES: Final = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FAST", "LOAD_DEREF")
#: No part of the expression after ``except``: they move the error itself, or ready a call.
_BESIDE: Final = ("PUSH_EXC_INFO", "PUSH_NULL", "COPY", "SWAP", "PRECALL")
#: How instructions begin that end a statement, or belong to none with an expression: ``finally``, ``with``.
_STATEMENTS: Final = (
    *("POP_TOP", "POP_EXCEPT", "STORE_", "DELETE_", "RETURN_", "RERAISE", "RAISE_", "JUMP_BACKWARD", "IMPORT_"),
    *("WITH_EXCEPT_START", "BEFORE_WITH", "BEFORE_ASYNC_WITH", "LOAD_SPECIAL", "LIST_APPEND", "YIELD_VALUE"),
)
#: What a clause names that is computed otherwise than by looking names up: it may be any error.
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
    """Return what the frame catches where it is now, such as ``RuntimeError``, if an op may raise it; else None."""
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
        # Handlers nest: what no clause matches goes on to the handler around this one.
        offset = target


def ends_errors(code: CodeType) -> bool:
    """Return whether a ``with`` around ops may end what they raise by this function.

    That is an ``__exit__`` that returns anything but None or False, or a generator (``contextlib.contextmanager``) that
    has an ``except`` clause.
    """
    instructions = _read(code).instructions
    if code.co_flags & inspect.CO_GENERATOR:
        return any(each.opname in _MATCHES for each in instructions) or any(
            before.opname == "PUSH_EXC_INFO" and each.opname == "POP_TOP"  # except: ...
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
    # ``exception_entries`` is missing from the stubs.
    bytecode: Any = dis.Bytecode(code)
    instructions = tuple(each for each in bytecode if each.opname not in ("CACHE", "EXTENDED_ARG", "NOP"))
    places = {instruction.offset: place for place, instruction in enumerate(instructions)}
    return _Code(instructions, places, bytecode.exception_entries)


def _clauses(code: _Code, target: int, frame: FrameType) -> list[Any]:
    """Return what each ``except`` of the handler at ``target`` names; BaseException where it names nothing.

    So are ``except A: ... except (B, C): ... except: ...`` compiled, and read here::

        PUSH_EXC_INFO                                                    begins each handler
        LOAD_GLOBAL A, CHECK_EXC_MATCH                                   found: A
        POP_JUMP_IF_FALSE x                                              no match: the next clause
     x: LOAD_GLOBAL B, LOAD_GLOBAL C, BUILD_TUPLE 2, CHECK_EXC_MATCH     found: A, B, C
        POP_JUMP_IF_FALSE y
     y: POP_TOP                                                          found: A, B, C, BaseException

    Without the bare ``except:`` there is a RERAISE at ``y``. A ``finally`` or ``with`` has its own code where a handler
    of clauses has the first class. ``except*`` has CHECK_EG_MATCH; there a clause that did not match leaves a None, and
    the next one begins by dropping it.
    """
    found: list[Any] = []
    place = code.places.get(target)
    if place is None or code.instructions[place].opname != "PUSH_EXC_INFO":
        return found  # the compiler's own: it puts something back, and raises the error again
    starred = False
    while place is not None:
        # The expression after ``except`` is evaluated as the interpreter would, as far as it only looks names up.
        stack: list[Any] = []
        matched = False
        following: int | None = None
        for instruction in code.instructions[place:]:
            name = instruction.opname
            if matched:
                if name.startswith("POP_JUMP"):
                    following = code.places.get(instruction.argval)
                    break
            elif name in _MATCHES:
                # A clause names one class, or a tuple of them.
                named = _UNKNOWN if any(each is _UNKNOWN for each in stack) else stack[-1]
                found += named if isinstance(named, tuple) else (named,)
                matched, starred = True, name == "CHECK_EG_MATCH"
            elif name == "POP_TOP" and not stack:
                if not starred:
                    return [*found, BaseException]
            elif name.startswith(_STATEMENTS):
                return found or ([BaseException] if _may_be_left(code, target) else [])
            else:
                _evaluate(instruction, stack, frame)
        place = following
    return found


def _may_be_left(code: _Code, target: int) -> bool:
    """Return whether a ``finally`` may end the error, by a ``return`` or ``break``; otherwise it raises it again."""
    rest = (each.opname for each in code.instructions[code.places[target] :])
    return next((name for name in rest if name in ("POP_EXCEPT", "RERAISE")), "") == "POP_EXCEPT"


def _evaluate(instruction: dis.Instruction, stack: list[Any], frame: FrameType) -> None:
    """Run one instruction of the expression after ``except``, or put _UNKNOWN on the stack: the whole is unknown."""
    name, argument = instruction.opname, instruction.argval
    if name in _NAMES or name.startswith("LOAD_FAST"):
        scopes = (frame.f_locals, frame.f_globals, frame.f_builtins)
        stack.append(next((scope[argument] for scope in scopes if argument in scope), _UNKNOWN))
    elif name in ("LOAD_ATTR", "LOAD_METHOD") and stack:
        stack[-1] = getattr(stack[-1], argument, _UNKNOWN)
    elif name == "BUILD_TUPLE" and instruction.arg and instruction.arg <= len(stack):
        stack[-instruction.arg :] = [tuple(stack[-instruction.arg :])]
    elif name not in _BESIDE and not (name == "BUILD_LIST" and not instruction.arg):  # an empty one, in ``except*``
        stack.append(_UNKNOWN)


def _may_be_raised(caught: Any) -> bool:
    """Return whether an op may raise what a clause names."""
    if not isinstance(caught, type):
        return True
    return is_torchs(caught) or any(issubclass(error, caught) for error in _OF_OPS)


#: Why ops within an activation checkpoint are not traced.
CHECKPOINTS: Final = "uses activation checkpointing"

_TORCH: Final = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_OURS: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_STDLIB: Final = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_CHECKPOINT_FILE: Final = os.path.join(_TORCH, "utils", "checkpoint.py")

#: What a frame is to the search for the user's line: of no interest, the user's (with ``try`` or ``with`` in its code),
#: torch's checkpoint, the ``forward`` of a library, or the frame that began the trace.
_NOTHING, _USER, _USER_WITH_HANDLERS, _CHECKPOINT, _FORWARD, _STOP = range(6)


class SourceLines:
    """Finds the innermost frame of user code below ``stop`` (the code object that calls the traced forward).

    fx's own ``record_stack_traces`` formats whole stacks, which costs more than the rest of tracing; one line is enough
    to say where a node comes from, and the lines repeat.
    """

    def __init__(self, stop: CodeType) -> None:
        self._stop = stop
        #: id of a code object -> what its frames are, and the code object: it must live as long as its id is a key.
        self._kinds: dict[int, tuple[int, CodeType]] = {id(stop): (_STOP, stop)}
        self._texts: dict[tuple[str, int], str] = {}

    def is_user(self, code: CodeType) -> bool:
        """Return whether code is neither torch's, nor the standard library's, nor that of the capture."""
        known = self._kinds.get(id(code))
        return (self._kind(code) if known is None else known[0]) in (_USER, _USER_WITH_HANDLERS)

    def user_frame(self, frame: FrameType | None) -> tuple[FrameType | None, str | None]:
        """Return the innermost user frame from ``frame`` outwards, and why no op can be recorded here, if so.

        Reasons: an activation checkpoint lies on the way, or a handler that would catch what the op raises. In models
        made of torch's own modules only, no frame is the user's: the innermost ``forward`` stands in.
        """
        found: FrameType | None = None
        forward: FrameType | None = None
        why: str | None = None
        # At hand: this loop runs over some ten frames for every node.
        kinds = self._kinds
        while frame is not None:
            known = kinds.get(id(frame.f_code))
            kind = self._kind(frame.f_code) if known is None else known[0]
            if kind == _STOP:
                break
            if kind == _CHECKPOINT:
                why = CHECKPOINTS
            elif kind == _FORWARD:
                forward = forward or frame
            elif kind != _NOTHING:  # the user's
                found = found or frame
                if kind == _USER_WITH_HANDLERS and why is None and (caught := catches(frame)) is not None:
                    why = f"catches {caught} around ops"
            frame = frame.f_back
        return found or forward, why

    def _kind(self, code: CodeType) -> int:
        file = code.co_filename
        installed = "site-packages" in file or "dist-packages" in file
        library = file.startswith((_TORCH, _OURS, "<frozen")) or (file.startswith(_STDLIB) and not installed)
        if not library:
            kind = _USER_WITH_HANDLERS if has_handlers(code) else _USER
        elif file == _CHECKPOINT_FILE:
            kind = _CHECKPOINT
        else:
            kind = _FORWARD if code.co_name == "forward" else _NOTHING
        self._kinds[id(code)] = kind, code
        return kind

    def stack_trace(self, frame: FrameType) -> str:
        """Return one entry in the form of ``traceback``: file, line, function and the source line."""
        code, line = frame.f_code, frame.f_lineno
        key = (code.co_filename, line)
        text = self._texts.get(key)
        if text is None:
            source = linecache.getline(code.co_filename, line, frame.f_globals).strip()
            text = f'File "{code.co_filename}", line {line}, in {code.co_name}\n    {source}'
            self._texts[key] = text
        return text

    def place(self, frame: FrameType, line: int) -> str:
        """Return ``model.py:12 `x = self.fc(x)```, for a reason."""
        file = frame.f_code.co_filename
        source = linecache.getline(file, line, frame.f_globals).strip()
        return f"{os.path.basename(file)}:{line}" + (f" `{source}`" if source else "")

    def place_of_error(self, trace: TracebackType | None) -> str:
        """Return the innermost user line below ``stop`` that an exception passed through; '' if there is none."""
        place = ""
        inside = False
        for frame, line in traceback.walk_tb(trace):
            inside = inside or frame.f_code is self._stop
            if inside and self.is_user(frame.f_code):
                place = self.place(frame, line)
        return place
