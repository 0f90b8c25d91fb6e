"""The text form of a graph: a line a node, with the canonical op, or the callee where there is none."""

from __future__ import annotations

import expecttest
import torch
from torch.fx import symbolic_trace, wrap

from fxprec.passes.graph.text import dtype_name, format_graph


@wrap
def stranger(x):
    return x


def test_calls_with_and_without_an_op(tools):
    def f(x):
        return stranger(x.mul_(2.0)), x.size(0)

    gm = symbolic_trace(f)
    tools.rewritten(gm, tools.context(), until="propagate")
    expecttest.assert_expected_inline(
        format_graph(gm),
        """\
%x: unknown = placeholder
%mul_: unknown = mul_(%x, 2.0)
%stranger: unknown = stranger(%mul_)
%size: - = size(%x, 0)
return (%stranger, %size)""",
    )


def test_names_of_dtypes():
    assert dtype_name(torch.float16) == "float16" and dtype_name(None) == "-"
    assert dtype_name((torch.float32, (torch.int64,))) == "(float32, (int64))"
