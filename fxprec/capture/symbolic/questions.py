"""Finds questions about a value that Python answers without calling its proxy: ``a is b``, ``type(x)``, patterns.

``isinstance`` calls it in part only.

::

    if q is k:                      other proxies for what may be one tensor
    if type(x) is torch.Tensor:     the proxy's own type
    match x.shape: case (b, c):     no sequence

What such code asks about is read from its bytecode, backwards from the instruction that asks, and evaluated in the
running frame as far as that runs nothing but look-ups.

To change it safely: what is not known here ends the trace (``UNKNOWN``), and dynamo takes the model. So a missing case
costs a slower capture, and a case too many gives a graph that took the wrong branch, without an error. Bytecode changes
with each version of Python: opcodes that a version lacks must not be asked for by ``dis.opmap`` alone.
"""

from __future__ import annotations

import dis
import types
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from fxprec.capture.user_code import is_torchs

#: Value of what evaluation cannot tell. Whoever meets it must assume a traced value.
UNKNOWN: Final = object()
#: Where torch's own code asks for the class of a value, and not the frame that calls it.
NOT_ASKED: Final = object()

_ASKING: Final = frozenset({"type", "callable"})
_IGNORED: Final = frozenset({"CACHE", "EXTENDED_ARG", "PUSH_NULL", "PRECALL", "KW_NAMES", "NOP", "NOT_TAKEN"})
_ATTRIBUTES: Final = ("LOAD_ATTR", "LOAD_METHOD")
_PATTERNS: Final = ("MATCH_SEQUENCE", "MATCH_MAPPING")
_PAIRS: Final = frozenset({"BINARY_OP", "BINARY_SUBSCR", "COMPARE_OP", "CONTAINS_OP", "IS_OP"})
_OPCODES: Final = frozenset(dis.opmap[name] for name in ("IS_OP", *_PATTERNS))
#: What a proxy may stand for.
_KINDS: Final = (Tensor, torch.dtype, torch.layout, torch.memory_format, torch.device, int, float, str, tuple)


class Expression(NamedTuple):
    """Expression on the stack: what an instruction puts there, from these parts."""

    instruction: dis.Instruction
    parts: tuple[Expression | None, ...] = ()


class Question(NamedTuple):
    """``is`` of two, a builtin or a pattern of one; None for a part that cannot be read."""

    offset: int
    by: str
    parts: tuple[Expression | None, ...]


@lru_cache(maxsize=4096)
def questions(code: CodeType) -> tuple[Question, ...]:
    """Return the questions in one code object, but for ``is None``, which a proxy answers as its tensor does."""
    if _OPCODES.isdisjoint(code.co_code[::2]) and _ASKING.isdisjoint((*code.co_names, *code.co_freevars)):
        return ()
    # Most code asks nothing of the kind, and is not disassembled.
    found = []
    listed = _instructions(code)
    for place, instruction in enumerate(listed):
        if instruction.opname == "IS_OP":
            parts = _parts(listed, place, 2)
            if not any(part is not None and _is_none(part.instruction) for part in parts):
                found.append(Question(instruction.offset, "is", parts))
        elif instruction.opname in _PATTERNS:
            subject = place - (listed[place - 1].opname == "COPY")  # kept for the next case
            found.append(Question(instruction.offset, "case of parts", _parts(listed, subject, 1)))
        elif instruction.opname == "CALL" and instruction.arg == 1:
            parts = _parts(listed, place, 2)
            if parts[0] is not None and (asking := parts[0].instruction.argval) in _ASKING:  # x.type(dtype) too
                found.append(Question(instruction.offset, f"{asking}()", parts))
    return tuple(found)


def unheard(question: Question, frame: FrameType) -> str | None:
    """Return why a trace must not go on to a question in a frame, or None where its answer is the original's."""
    values = [_value(part, frame) for part in question.parts]
    if question.by != "is":
        wrong = isinstance(values[-1], Proxy) or values[-1] is UNKNOWN
        # A function of the user's that is merely called ``type`` or ``callable`` is no such question.
        if len(values) == 2 and values[0] is not type and values[0] is not callable:
            return None
        return f"asks for {question.by} of a traced value" if wrong else None
    one, other = values
    if one is other and one is not UNKNOWN:
        return None
    stands_in = any(value is UNKNOWN or isinstance(value, Proxy) for value in values)
    wrong = stands_in and _may_be_traced(one) and _may_be_traced(other)
    return "compares a traced value by 'is'" if wrong else None


def classes_asked_for(frame: FrameType) -> Any:
    """Return the class, or classes, that ``isinstance`` or a ``case`` compares with where the frame is now.

    C code has no frame of its own, so whoever it is asks in the name of its caller. torch's own must be told the truth
    (NOT_ASKED): it takes what claims to be a Tensor for one in memory. Of others nobody knows for whom they ask
    (``any(map(isinstance, ...))``): UNKNOWN.
    """
    listed = _instructions(frame.f_code)
    # A call that ran often is at its PRECALL in Python 3.11, which is not listed: the CALL comes next.
    place = next((place for place, each in enumerate(listed) if each.offset >= frame.f_lasti), len(listed) - 1)
    name, argument = listed[place].opname, listed[place].argval
    if name == "MATCH_CLASS":
        return _value(_parts(listed, place, 2)[0], frame)
    if name not in ("CALL", "CALL_KW"):
        return UNKNOWN
    called, *_, classes = (_value(part, frame) for part in _parts(listed, place, argument + 1 + (name == "CALL_KW")))
    if called is isinstance:
        return classes
    return NOT_ASKED if called is not UNKNOWN and is_torchs(called) else UNKNOWN


@lru_cache(maxsize=4096)
def asks_for_classes(code: CodeType) -> bool:
    """Return whether code names ``isinstance`` or ``__class__``, or has a ``case Class():``."""
    return not {"isinstance", "__class__"}.isdisjoint(code.co_names) or dis.opmap["MATCH_CLASS"] in code.co_code[::2]


@lru_cache(maxsize=1024)
def _instructions(code: CodeType) -> list[dis.Instruction]:
    found = []
    for each in dis.get_instructions(code):
        if each.opname.startswith("LOAD_FAST") and isinstance(each.argval, tuple):  # two at once
            found += [each._replace(argval=name) for name in each.argval]
        elif each.opname not in _IGNORED:
            found.append(each)
    return found


def _parts(listed: list[dis.Instruction], place: int, count: int) -> tuple[Expression | None, ...]:
    """Return what the last ``count`` expressions before a place put on the stack."""
    found: list[Expression | None] = []
    end = place
    for _ in range(count):
        expression, end = _expression(listed, end - 1)
        found.append(expression)
    return tuple(reversed(found))


def _expression(listed: list[dis.Instruction], place: int) -> tuple[Expression | None, int]:
    """Return the expression that ends at a place, and where it begins; None where it has an unknown instruction.

    Then nothing before it can be read either: nobody knows where that instruction's operands begin.
    """
    # How many values an instruction takes from the stack tells where its expression begins.
    if place < 0:
        return None, 0
    instruction = listed[place]
    name, count = instruction.opname, None
    if name in _ATTRIBUTES:
        count = 1
    elif name.startswith("LOAD_") and "SUPER" not in name and "FROM" not in name:
        count = 0
    elif name in _PAIRS:
        count = 2
    elif name == "BUILD_TUPLE":
        count = instruction.arg
    elif name == "CALL" and instruction.arg is not None:
        count = 1 + instruction.arg
    if count is None:
        return None, 0
    parts = []
    begin = place
    for _ in range(count):
        part, begin = _expression(listed, begin - 1)
        if part is None:
            return None, 0
        parts.append(part)
    return Expression(instruction, tuple(reversed(parts))), begin


def _is_none(instruction: dis.Instruction) -> bool:
    return instruction.opname == "LOAD_CONST" and instruction.argval is None


def _value(expression: Expression | None, frame: FrameType) -> Any:
    """Return what an expression gave; of an operation on a proxy that proxy, for whatever came out."""
    if expression is None:
        return UNKNOWN
    instruction = expression.instruction
    name, argument = instruction.opname, instruction.argval
    parts = [_value(part, frame) for part in expression.parts]
    if name in ("LOAD_CONST", "LOAD_SMALL_INT"):
        return argument
    if name.startswith("LOAD_") and not parts:
        scopes = (frame.f_locals, frame.f_globals, frame.f_builtins)
        return next((scope[argument] for scope in scopes if argument in scope), UNKNOWN)
    if any(part is UNKNOWN for part in parts):
        return UNKNOWN
    if name == "BUILD_TUPLE":
        return tuple(parts)
    # Nothing is computed with a proxy here: the trace would record it as an op of the model.
    traced = next((part for part in parts if isinstance(part, Proxy)), None)
    if traced is not None and (traced is parts[0] or parts[0] is type or name != "CALL"):
        return getattr(traced, argument, UNKNOWN) if name in _ATTRIBUTES else traced
    try:
        if name in _ATTRIBUTES:
            return getattr(parts[0], argument)
        if name == "CALL" and parts[0] is type and len(parts) == 2:
            return type(parts[1])
        if name == "BINARY_SUBSCR" or instruction.argrepr == "[]":
            return parts[0][parts[1]] if isinstance(parts[0], tuple | list | dict | nn.ModuleList) else UNKNOWN
        if instruction.argrepr == "|" and isinstance(parts[0], type | types.UnionType):
            return parts[0] | parts[1]
    except Exception:  # the forward itself meets it
        pass
    return UNKNOWN


def _may_be_traced(value: Any) -> bool:
    """Return whether the original may have there what a proxy stands for, or its class."""
    if value is UNKNOWN or isinstance(value, (Proxy, *_KINDS)):
        return True
    return isinstance(value, type) and issubclass(value, _KINDS)
