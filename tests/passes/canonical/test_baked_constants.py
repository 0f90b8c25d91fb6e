"""baked_constants: what dynamo wrote because a tensor was low when it traced is told from what the user wrote."""

from __future__ import annotations

import operator
import textwrap

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule

import fxprec
from fxprec.passes.canonicalize import canonicalize

BF16 = torch.bfloat16
EPS, FULL_EPS = torch.finfo(BF16).eps, torch.finfo(torch.float32).eps
TINY, FULL_TINY = torch.finfo(torch.float16).tiny, torch.finfo(torch.float32).tiny
LITERAL, DERIVED = "y = x.to(torch.bfloat16)\n    ~~~~^^^^^", "y = x.to(other.dtype)\n    ~~~~^^^^^"


def called(target, *args, **kwargs):
    """A graph of one call on a placeholder; and that call."""
    graph = Graph()
    x = graph.placeholder("x")
    node = graph.create_node(
        "call_method" if isinstance(target, str) else "call_function",
        target,
        tuple(x if each == "x" else each for each in args),
        kwargs,
    )
    graph.output(node)
    return GraphModule({}, graph), node


@pytest.mark.parametrize(
    ("call", "line", "dynamo", "derived"),
    [
        (("to", "x", BF16), DERIVED, True, True),
        (("to", "x", BF16), "half = x.to(other.dtype)", True, True),  # a name
        (("to", "x", BF16), "y = x.to(other.dtype)  # float16 later", True, True),
        (("to", "x", BF16), LITERAL, True, False),
        (("to", "x", BF16), "y = x.to(bfloat16)", True, False),
        (("to", "x", BF16), "y = x.half()", True, False),
        (("to", "x", BF16), "y = x.to(torch.half)", True, False),
        (("to", "x", BF16), "", True, False),
        (("to", "x", BF16), None, True, False),
        (("to", "x", BF16), DERIVED, False, False),  # only dynamo bakes dtypes
        (("to", "x", torch.float16), DERIVED, True, False),  # not the low dtype
        (("bfloat16", "x"), DERIVED, True, False),  # the method's name says it
        ((torch.linspace, 0, 4, 5, BF16), "y = torch.linspace(0, 4, 5, dtype=x.dtype)", True, True),
        ((torch.linspace, 0, 4, 5, BF16), "y = torch.linspace(0, 4, 5, dtype=torch.bfloat16)", True, False),
    ],
)
def test_casts_to_the_dtype_of_another_tensor_are_marked(tools, call, line, dynamo, derived):
    gm, node = called(*call)
    node.meta |= {"stack_trace": line} | ({"example_value": None} if dynamo else {})
    canonicalize(gm, tools.context())
    assert node.meta.get("derived_cast", False) is derived


#: Functions that ask for an eps, by themselves or for those that they call; and what only looks like it.
ASKED = """
    def clamped(probs):
        eps = torch.finfo(probs.dtype).eps

        return probs.clamp(min=eps, max=1 - eps)
"""
HELD = """
    def clamped(
        probs,
    ):
        limits = torch.finfo(probs.dtype)
        return probs.clamp(min=limits.eps, max=1 - limits.eps)
"""
BY_THE_CALLER = """
    def clamped(probs, low):
        return probs.clamp(low, 1 - low)

    def caller(probs):
        return clamped(probs, torch.finfo(probs.dtype).eps)
"""
SCALED = """
    def scaled(self, x):
        return x.clamp(self.lo, 1 - self.lo)

    def other(x):
        return x + torch.finfo(x.dtype).eps
"""
MASKED = """
    def attend(self, x, mask):
        x = x.clamp(self.lo, 1 - self.lo)
        return x.masked_fill(mask, torch.finfo(x.dtype).min)
"""


@pytest.mark.parametrize(
    ("source", "lines", "restored"),
    [(ASKED, [5], True), (HELD, [6], True), (BY_THE_CALLER, [6, 3], True), (BY_THE_CALLER, [3], False),
     (SCALED, [3], False), (MASKED, [3], False)],
    ids=["asked", "held", "by the caller", "nobody asks", "another function asks", "asks for another number"],
)  # fmt: skip
def test_the_eps_of_a_low_tensor_is_that_of_the_original(tools, tmp_path, source, lines, restored):
    file = tmp_path / "model.py"
    file.write_text(textwrap.dedent(source))
    text = file.read_text().splitlines()
    gm, node = called("clamp", "x", EPS, 1 - EPS)
    trace = "".join(f'  File "{file}", line {each}, in f\n    {text[each - 1].strip()}\n' for each in lines)
    node.meta |= {"stack_trace": trace, "example_value": None}
    assert canonicalize(gm, tools.context()).changed is restored
    assert node.args[1:] == ((FULL_EPS, 1 - FULL_EPS) if restored else (EPS, 1 - EPS))


@pytest.mark.parametrize(
    ("call", "line", "dynamo", "low", "numbers"),
    [
        (("clamp", "x", EPS - 1, 1 - EPS), "x.clamp(-1 + eps, 1 - eps)", True, BF16, (FULL_EPS - 1, 1 - FULL_EPS)),
        (("clamp", "x", TINY), "x.clamp(tiny)", True, torch.float16, (FULL_TINY,)),
        ((operator.add, "x", EPS), "x + 0.0078125", True, BF16, (EPS,)),
        ((operator.add, "x", 0.5), "x + half", True, BF16, (0.5,)),
        ((operator.add, "x", EPS), "x + eps", False, BF16, (EPS,)),
        ((operator.add, "x", EPS), "", True, BF16, (EPS,)),
    ],
)
def test_where_a_function_asks_for_it(tools, tmp_path, call, line, dynamo, low, numbers):
    file = tmp_path / "model.py"
    file.write_text(
        f"def f(x):\n    eps, tiny = torch.finfo(x.dtype).eps, torch.finfo(x.dtype).tiny\n    return {line}\n"
    )
    gm, node = called(*call)
    trace = f'File "{file}", line 3, in f\n    {line}' if line else ""
    node.meta |= {"stack_trace": trace} | ({"example_value": None} if dynamo else {})
    assert canonicalize(gm, tools.context(low=low)).changed is (numbers != call[2:])
    assert node.args[1:] == numbers


class Scaled(nn.Module):
    """A scale that is eps in bfloat16, and limits that are one low and one high."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.scale = 1 / 128

    def forward(self, x):
        return (self.fc(x) * self.scale).clamp(-self.scale, 1 - self.scale)


class Asking(Scaled):
    def forward(self, x):
        probs = self.fc(x).sigmoid()
        eps = torch.finfo(probs.dtype).eps
        return probs.clamp(eps, 1 - eps).log()


@pytest.mark.parametrize(("kind", "capture"), [(Scaled, "symbolic"), (Scaled, "dynamo"), (Asking, "dynamo")])
def test_a_model_computes_with_its_own_numbers(kind, capture):
    torch.manual_seed(0)
    model, x = kind().eval(), 30 * torch.randn(64, 4)
    with torch.no_grad():
        y = model(x)
        lowered, _ = fxprec.convert(model, dtype=BF16, capture=capture)
        error = (lowered(x) - y).abs().max() / y.abs().max()
    assert error < 0.05
