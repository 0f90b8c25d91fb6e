"""equations: every way to write an einsum is told apart into contractions, products, sums and views."""

from __future__ import annotations

import pytest
import torch
from torch.fx import Graph

from fxprec.passes.ops.equations import Form, equation_of
from fxprec.passes.ops.names import canonical_op


def call(*args, **kwargs):
    """A call of einsum whose tensors are placeholders, each written as an x."""
    graph = Graph()
    made = [graph.placeholder("x") if arg == "x" else arg for arg in args]
    return graph.call_function(torch.einsum, tuple(made), kwargs)


@pytest.mark.parametrize(
    ("arguments", "form", "summed"),
    [
        (("ij,jk->ik", "x", "x"), Form.CONTRACTION, {"j"}),
        (("ij,jk", "x", "x"), Form.CONTRACTION, {"j"}),
        ((" i j , j k -> i k ", "x", "x"), Form.CONTRACTION, {"j"}),
        (("...i,...i->...", "x", "x"), Form.CONTRACTION, {"i"}),
        (("...i,...i->i", "x", "x"), Form.CONTRACTION, {"..."}),
        (("i,ij,j", "x", "x", "x"), Form.CONTRACTION, {"i", "j"}),
        (("x", [0, 1], "x", [1, 2]), Form.CONTRACTION, {1}),
        (("x", [..., 0], "x", [..., 0], [...]), Form.CONTRACTION, {0}),
        (("i,j->ij", "x", "x"), Form.PRODUCT, set()),
        (("i,j", "x", "x"), Form.PRODUCT, set()),
        (("b...i,b...i->b...i", "x", "x"), Form.PRODUCT, set()),
        (("ii,i->i", "x", "x"), Form.PRODUCT, set()),
        (("i,j,k->kji", "x", "x", "x"), Form.PRODUCT, set()),
        ((",i->i", "x", "x"), Form.PRODUCT, set()),
        (("x", [0], "x", [1], [0, 1]), Form.PRODUCT, set()),
        (("ij->i", "x"), Form.SUM, {"j"}),
        (("ii", "x"), Form.SUM, {"i"}),
        (("ij,k->ik", "x", "x"), Form.SUM, {"j"}),
        (("x", [0, 1], [1]), Form.SUM, {0}),
        (("ii->i", "x"), Form.VIEW, set()),
        (("ba", "x"), Form.VIEW, set()),
        (("...ij->...ji", "x"), Form.VIEW, set()),
        (("x", [0, 0], [0]), Form.VIEW, set()),
        (("x", [0, 1]), Form.VIEW, set()),
        (("ij->ji", ["x"]), Form.VIEW, set()),
    ],
)
def test_forms(arguments, form, summed):
    equation = equation_of(call(*arguments))
    assert equation is not None
    assert (equation.form, equation.summed) == (form, summed)


@pytest.mark.parametrize("arguments", [("i.j->ij", "x"), ("i1->i", "x"), ("x",), ("x", "x"), ("x", [0], "x")])
def test_what_no_einsum_says_is_not_read(arguments):
    assert equation_of(call(*arguments)) is None


def test_an_op_is_named_by_its_form():
    assert canonical_op(call("ij,jk->ik", "x", "x")).name == "einsum"
    assert canonical_op(call("i,j->ij", "x", "x")).name == "einsum_product"
    assert canonical_op(call("ij->i", "x")).name == "einsum_sum"
    assert canonical_op(call("ij->ji", "x")).name == "einsum_view"
    assert canonical_op(call(equation="ij->ji")).name == "einsum_view"
    assert canonical_op(call("x", "x")).name == "einsum"
