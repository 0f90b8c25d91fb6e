"""Find what dynamo wrote as a constant because a tensor was low when it traced, and undo it.

dynamo traces under autocast, where ``h.dtype`` is the low dtype and stands in the graph as if the user had written it::

    %y = to(%x, torch.bfloat16)                     # was x.to(h.dtype): marked, meta["derived_cast"]
    %p = clamp(%probs, 0.0078125, 0.9921875)        # was probs.clamp(eps, 1 - eps), eps = torch.finfo(probs.dtype).eps

The second becomes ``clamp(%probs, 1.1920929e-07, 0.99999988)``, the numbers of the original program. The user's source
tells such constants from those that the user wrote: it names no low dtype, or asks ``finfo`` for an ``eps``.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterator
from typing import Final

import torch
from torch.fx import Node
from torch.fx.node import map_aggregate

from fxprec.passes.context import Context
from fxprec.passes.graph.annotations import notes
from fxprec.passes.ops.names import cast_target

#: A low dtype, or a cast to one, in source code. A variable may be called ``half``.
_LITERAL: Final = re.compile(r"\bb?float16\b|\.half\b|\b(?:Half|BFloat16)Tensor\b")
#: ``torch.finfo(...)`` asked at once, or held under a name.
_ASKED: Final = re.compile(r"finfo\(.*?\)\s*\.\s*(?:eps|tiny|smallest_normal)\b")
_HELD: Final = re.compile(r"(\w+)\s*=\s*[\w.]*finfo\(")
_FRAME: Final = re.compile(r'File "(.+)", line (\d+), in ')


def mark_derived(node: Node, context: Context) -> None:
    """Annotate ``x.to(h.dtype)``, or ``arange(n, dtype=h.dtype)``, traced where ``h`` was low.

    A cast to a literal low dtype, which is obeyed, looks alike in the graph. In the source line stands the literal.
    """
    if "example_value" not in node.meta or cast_target(node) is not context.low or node.target in ("half", "bfloat16"):
        return
    code = _line_of(node)
    if code and not _LITERAL.search(code.partition("#")[0]):
        notes(node).derived_cast = True


def restore_eps(node: Node, context: Context) -> bool:
    """Give a call the eps, or the smallest number, of FP32 where it got those of the low dtype; return whether it did.

    Only where the line shows none of the numbers, and one of the functions that led there asks ``finfo`` for them: a
    scale of 1/128 is eps in bfloat16, too.
    """
    if "example_value" not in node.meta:
        return False
    low, full = torch.finfo(context.low), torch.finfo(torch.float32)
    baked = {sign * low.eps: sign * full.eps for sign in (1, -1)}
    baked |= {sign * (1 - low.eps): sign * (1 - full.eps) for sign in (1, -1)} | {low.tiny: full.tiny}
    numbers = [each for each in (*node.args, *node.kwargs.values()) if isinstance(each, float) and each in baked]
    code = _line_of(node) if numbers else ""
    if not code or any(repr(abs(each)) in code for each in numbers) or not any(map(_asks_eps, _functions(node))):
        return False
    node.args, node.kwargs = map_aggregate(  # type: ignore[assignment]
        (node.args, node.kwargs), lambda each: baked.get(each, each) if isinstance(each, float) else each
    )
    return True


def _line_of(node: Node) -> str:
    """Return the line of code that made a node; "" where nobody recorded it."""
    lines = (node.meta.get("stack_trace") or "").strip().splitlines()
    return next((line for line in reversed(lines) if set(line.strip()) - set("^~ ")), "")


def _functions(node: Node) -> Iterator[str]:
    """Yield the source of each function on the stack that made a node, innermost first."""
    for file, line in reversed(_FRAME.findall(node.meta.get("stack_trace") or "")):
        lines = linecache.getlines(file)
        at = int(line) - 1
        if at < len(lines):
            start = _start(lines, at)
            yield "".join(lines[start : _end(lines, start, at)])


def _start(lines: list[str], at: int) -> int:
    """Return the line of the ``def`` that a line is in: the next one above that is indented less, else the first."""
    indent = _indent(lines[at])
    for number in range(at, -1, -1):
        if lines[number].strip() and _indent(lines[number]) <= indent:
            indent = min(indent, _indent(lines[number]))
            if lines[number].lstrip().startswith(("def ", "async def ")):
                return number
    return 0


def _end(lines: list[str], start: int, at: int) -> int:
    """Return the line behind a function: the next one that is indented no more than its ``def``."""
    within = (number for number in range(at + 1, len(lines)) if lines[number].strip())
    return next((number for number in within if _indent(lines[number]) <= _indent(lines[start])), len(lines))


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _asks_eps(source: str) -> bool:
    """Return whether a function asks for the eps, or the smallest number, of a dtype."""
    held = (rf"\b{name}\s*\.\s*(?:eps|tiny|smallest_normal)\b" for name in _HELD.findall(source))
    return bool(_ASKED.search(source)) or any(re.search(each, source) for each in held)
