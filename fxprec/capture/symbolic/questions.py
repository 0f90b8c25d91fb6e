"""Finds questions about a value that Python answers without calling its proxy: ``a is b``, ``type(x)``, patterns.

While a forward is traced, proxies stand for its tensors, and such a question gets an answer about the proxy::

    if q is k:                      False: two proxies, for what may be one tensor
    if type(x) is torch.Tensor:     False: the proxy's own type
    match x.shape: case (b, c):     no match: a proxy is no sequence

(``isinstance`` does call the proxy, which must know what classes it is asked for: ``classes_asked_for``.) What such
code asks about is read from its bytecode, backwards from the instruction that asks, and evaluated in the running frame
as far as that runs nothing but look-ups.

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
#: In place of classes: a function of torch's asks for the class of a value, and not the code that calls this function.
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
    """Instruction that asks: ``is``, a call of ``type`` or ``callable``, or a pattern.

    ``parts``: what it asks about, None for a part that cannot be read. Of ``is`` the two operands; of a call the
    function and its argument; of a pattern its subject alone.
    """

    offset: int
    by: str
    parts: tuple[Expression | None, ...]


@lru_cache(maxsize=4096)
def questions(code: CodeType) -> tuple[Question, ...]:
    """Return the questions in one code object, but for ``is None``, which a proxy answers as its tensor does."""
    # Most code asks nothing of the kind, and is not disassembled.
    if _OPCODES.isdisjoint(code.co_code[::2]) and _ASKING.isdisjoint((*code.co_names, *code.co_freevars)):
        return ()
    found = []
    listed = _instructions(code)
    for place, instruction in enumerate(listed):
        if instruction.opname == "IS_OP":
            parts = _parts(listed, place, 2)
            if not any(part is not None and _is_none(part.instruction) for part in parts):
                found.append(Question(instruction.offset, "is", parts))
        elif instruction.opname in _PATTERNS:
            # Where another case follows, the subject is copied for it first.
            subject = place - 1 if listed[place - 1].opname == "COPY" else place
            found.append(Question(instruction.offset, "case of parts", _parts(listed, subject, 1)))
        elif instruction.opname == "CALL" and instruction.arg == 1:
            parts = _parts(listed, place, 2)
            # By name alone: ``x.type(dtype)`` gets in, and a function of the user's called ``type``. ``wrong_answer``
            # looks which function it is.
            if parts[0] is not None and (asking := parts[0].instruction.argval) in _ASKING:
                found.append(Question(instruction.offset, f"{asking}()", parts))
    return tuple(found)


def wrong_answer(question: Question, frame: FrameType) -> str | None:
    """Return why the frame must not get to a question: a proxy would give another answer than the tensor.

    None where the answer is the original's: no proxy is asked about, or both are one, or what a proxy is compared with
    can be no tensor. What cannot be told is taken for a proxy.
    """
    values = [_value(part, frame) for part in question.parts]
    if question.by == "is":
        one, other = values
        if one is other and one is not UNKNOWN:
            return None
        stands_in = any(value is UNKNOWN or isinstance(value, Proxy) for value in values)
        # Of an object that no traced value can be, "is" is False, for the proxy and for what it stands for.
        wrong = stands_in and _may_be_traced(one) and _may_be_traced(other)
        return "compares a traced value by 'is'" if wrong else None
    # Of the two parts of a call the first is the function: another one, merely called ``type``, is no such question.
    if len(values) == 2 and values[0] is not type and values[0] is not callable:
        return None
    wrong = isinstance(values[-1], Proxy) or values[-1] is UNKNOWN
    return f"asks for {question.by} of a traced value" if wrong else None


def classes_asked_for(frame: FrameType) -> Any:
    """Return the class, or classes, that ``isinstance`` or a ``case`` compares with where the frame is now.

    ===================================  ===========================================================================
    ``isinstance(x, (A, B))``            ``(A, B)``; UNKNOWN if that is more than names
    ``case A():``                        ``A``
    ``torch.add(x, 1)``                  NOT_ASKED. Functions in C have no frame of their own, so torch's ask in the
                                         name of their caller. They must be told the truth: they take what claims to be
                                         a Tensor for one in memory.
    ``any(map(isinstance, ...))``        UNKNOWN: another function in C, and nobody knows for whom it asks
    ===================================  ===========================================================================
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
    """Return what an expression gave, as far as that can be told without running it again.

    Of a forward with the argument ``x``, a traced value:

    ===========================  ===================================================================================
    ``self.mode``, ``MODES[0]``  the object
    ``x``, ``x.shape``           a proxy (of a weight's shape: the shape, or an element of it)
    ``x + 1``, ``x.shape[0]``    the proxy that it is computed from, in the place of the proxy that came out
    ``type(x)``                  the proxy, in the place of the class
    ``f(x)``, ``f()``            UNKNOWN
    ===========================  ===================================================================================
    """
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
    # Nothing is computed with a proxy here: the trace would record it as an op of the model. To read an attribute
    # records nothing yet; it may decline, or guard a weight's shape, as it does when the forward reads it.
    traced = next((part for part in parts if isinstance(part, Proxy)), None)
    calls_another = name == "CALL" and traced is not parts[0] and parts[0] is not type
    if traced is not None and not calls_another:
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
