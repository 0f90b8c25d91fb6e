"""One pass at a time, on graphs of a few nodes written as text: what it does, and what it leaves alone."""

from __future__ import annotations

import textwrap

import pytest
import torch

from fxprec.passes.canonical.rotary import recognize_rotary
from fxprec.passes.canonicalize import canonicalize
from fxprec.passes.decide import decide
from fxprec.passes.fold_casts import fold_casts
from fxprec.passes.fusion.functional import make_functional
from fxprec.passes.fusion.kernel_calls import call_kernels
from fxprec.passes.fusion.wide_sums import accumulate_wide
from fxprec.passes.graph.annotations import notes
from fxprec.passes.graph.text import format_graph
from fxprec.passes.insert_casts import insert_casts
from fxprec.passes.propagate import propagate
from graph_text import graph_of

F32, BF16, I64 = torch.float32, torch.bfloat16, torch.int64


def test_a_graph_reads_as_it_was_written():
    text = textwrap.dedent("""\
        %x: float32 = placeholder
        %n: int64 = placeholder
        %x_bf16: bfloat16 = to(%x, torch.bfloat16)
        %parts: bfloat16 = chunk(%x_bf16, 2, dim=-1)
        %half: bfloat16 = getitem(%parts, 0)
        %relu_: bfloat16 = relu_(%half)
        %cat: bfloat16 = cat([%relu_, %half], -1)
        return (%cat, %n)""")
    assert format_graph(graph_of(text)) == text


SAME = None

#: name -> (pass, before, after).
CASES = {
    "canonicalize: a write in another dtype becomes a copy": (
        canonicalize,
        """
        %x: float32 = placeholder
        %y = exp_(%x)
        return %y
        """,
        """
        %x: float32 = placeholder
        %exp: - = exp(%x)
        %copy_: - = copy_(%x, %exp)
        return %copy_
        """,
    ),
    "insert_casts: one cast for two readers": (
        insert_casts,
        """
        %x: float32 = placeholder
        %w: float32 = placeholder
        %a: bfloat16 = linear(%x, %w)
        %b: bfloat16 = linear(%x, %a)
        %c: float32 = exp(%b)
        return (%c, %b)
        """,
        """
        %x: float32 = placeholder
        %w: float32 = placeholder
        %x_bf16: bfloat16 = to(%x, torch.bfloat16)
        %w_bf16: bfloat16 = to(%w, torch.bfloat16)
        %a: bfloat16 = linear(%x_bf16, %w_bf16)
        %b: bfloat16 = linear(%x_bf16, %a)
        %b_f32: float32 = to(%b, torch.float32)
        %c: float32 = exp(%b_f32)
        return (%c, %b)
        """,
    ),
    "insert_casts: integers and what fits stay": (
        insert_casts,
        """
        %n: int64 = placeholder
        %x: float32 = placeholder
        %m: int64 = add(%n, 1)
        %y: float32 = exp(%x)
        return (%m, %y)
        """,
        SAME,
    ),
    "insert_casts: a cast is good until its memory is written": (
        insert_casts,
        """
        %x: float32 = placeholder
        %w: float32 = placeholder
        %a: bfloat16 = linear(%x, %w)
        %y: float32 = mul_(%x, 2.0)
        %b: bfloat16 = linear(%y, %w)
        return (%a, %b)
        """,
        """
        %x: float32 = placeholder
        %w: float32 = placeholder
        %x_bf16: bfloat16 = to(%x, torch.bfloat16)
        %w_bf16: bfloat16 = to(%w, torch.bfloat16)
        %a: bfloat16 = linear(%x_bf16, %w_bf16)
        %y: float32 = mul_(%x, 2.0)
        %y_bf16: bfloat16 = to(%y, torch.bfloat16)
        %b: bfloat16 = linear(%y_bf16, %w_bf16)
        return (%a, %b)
        """,
    ),
    "fold_casts: the user's round trip": (
        fold_casts,
        """
        %x: bfloat16 = placeholder
        %to: float32 = to(%x, torch.float32)
        %to_bf16: bfloat16 = to(%to, torch.bfloat16)
        %y: bfloat16 = relu(%to_bf16)
        return %y
        """,
        """
        %x: bfloat16 = placeholder
        %y: bfloat16 = relu(%x)
        return %y
        """,
    ),
    "fold_casts: what rounds stays": (
        fold_casts,
        """
        %x: float32 = placeholder
        %x_bf16: bfloat16 = to(%x, torch.bfloat16)
        %x_f32: float32 = to(%x_bf16, torch.float32)
        %y: float32 = relu(%x_f32)
        return %y
        """,
        SAME,
    ),
    "wide sums: a sum that reads low": (
        accumulate_wide,
        """
        %x: bfloat16 = placeholder
        %y: float32 = mean(%x, -1)
        return %y
        """,
        """
        %x: bfloat16 = placeholder
        %y: float32 = mean(%x, -1, dtype=torch.float32)
        return %y
        """,
    ),
    "wide sums: a sum of FP32": (
        accumulate_wide,
        """
        %x: float32 = placeholder
        %y: float32 = mean(%x, -1)
        return %y
        """,
        SAME,
    ),
    "functional: an in-place row operation": (
        make_functional,
        """
        %x: bfloat16 = placeholder
        %w: bfloat16 = placeholder
        %a: bfloat16 = linear(%x, %w)
        %y: bfloat16 = mul_(%a, 2.0)
        return %y
        """,
        """
        %x: bfloat16 = placeholder
        %w: bfloat16 = placeholder
        %a: bfloat16 = linear(%x, %w)
        %y: bfloat16 = mul(%a, 2.0)
        return %y
        """,
    ),
    "functional: one that somebody else sees": (
        make_functional,
        """
        %x: bfloat16 = placeholder
        %y: bfloat16 = mul_(%x, 2.0)
        return %y
        """,
        SAME,
    ),
    "kernel calls: cross entropy reads what its cast read": (
        call_kernels,
        """
        %x: bfloat16 = placeholder
        %t: int64 = placeholder
        %x_f32: float32 = to(%x, torch.float32)
        %loss: float32 = cross_entropy(%x_f32, %t)
        return %loss
        """,
        """
        %x: bfloat16 = placeholder
        %t: int64 = placeholder
        %loss: float32 = cross_entropy(%x, target=%t)
        return %loss
        """,
    ),
    "rotary: the rotation is one call": (
        recognize_rotary,
        """
        %x: float32 = placeholder
        %cos: float32 = placeholder
        %sin: float32 = placeholder
        %high: float32 = getitem(%x, (Ellipsis, slice(4, None, None)))
        %low: float32 = getitem(%x, (Ellipsis, slice(None, 4, None)))
        %neg: float32 = neg(%high)
        %cat: float32 = cat((%neg, %low), dim=-1)
        %plain: float32 = mul(%x, %cos)
        %turned: float32 = mul(%cat, %sin)
        %y: float32 = add(%plain, %turned)
        return %y
        """,
        """
        %x: float32 = placeholder
        %cos: float32 = placeholder
        %sin: float32 = placeholder
        %y: float32 = rope(%x, %cos, %sin, 4)
        return %y
        """,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_before_and_after(tools, case):
    step, before, after = CASES[case]
    gm = graph_of(before, casts=step is not insert_casts)
    regions = {call_kernels: "triton", recognize_rotary: "triton", make_functional: "aten"}.get(step, "")
    changed = step(gm, tools.context(regions=regions)).changed
    gm.graph.lint()
    assert changed is (after is not SAME)
    assert format_graph(gm) == textwrap.dedent(before if after is SAME else after).strip()


def test_propagate_states_the_dtypes_of_the_original_program(tools):
    gm = graph_of("""
        %x: float32 = placeholder
        %n: int64 = placeholder
        %a = linear(%x, %x)
        %b = add(%n, 1)
        %c = sum(%n)
        %d = max(%a, -1)
        %e = getitem(%d, 1)
        %f = eq(%a, %x)
        return (%a, %b, %c, %e, %f)
    """)
    propagate(gm, tools.context())
    assert {node.name: notes(node).dtype for node in gm.graph.nodes if node.op == "call_function"} == {
        "a": F32, "b": I64, "c": I64, "d": (F32, I64), "e": I64, "f": torch.bool,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("level", "dtypes"),
    [
        ("O0", {"a": F32, "b": F32, "c": F32, "d": F32}),
        ("O1", {"a": BF16, "b": BF16, "c": F32, "d": F32}),
        ("O3", {"a": BF16, "b": BF16, "c": BF16, "d": BF16}),
    ],
)
def test_decide_gives_every_value_a_dtype(tools, level, dtypes):
    gm = graph_of("""
        %x: float32 = placeholder
        %a: float32 = linear(%x, %x)
        %b: float32 = relu(%a)
        %c: float32 = softmax(%b, -1)
        %d: float32 = mul(%c, 2.0)
        return %d
    """)
    decide(gm, tools.context(level))
    found = {node.name: notes(node).precision.output for node in gm.graph.nodes}
    assert {name: found[name] for name in dtypes} == dtypes
