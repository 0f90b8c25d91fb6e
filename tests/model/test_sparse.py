"""Sparse matrices as inputs, buffers and parameters: their products run in FP32, and what is dense around them low."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxprec

LAYOUTS = ("sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr")
PRODUCTS = {
    "@": lambda a, x: a @ x,
    "mm": torch.mm,
    "Tensor.mm": lambda a, x: a.mm(x),
    "addmm": lambda a, x: torch.addmm(x, a, x),
    "mv": lambda a, x: torch.mv(a, x[:, 0]),
    "linear": lambda a, x: F.linear(x, a),
    "sparse.mm": torch.sparse.mm,
    "sparse.addmm": lambda a, x: torch.sparse.addmm(x, a, x),
    "transposed": lambda a, x: a.t() @ x,
    "to_dense": lambda a, x: a.to_dense() @ x,
}


def matrix(layout: str) -> Tensor:
    dense = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    dense = dense * (dense > 0)
    if layout == "sparse_coo":
        return dense.to_sparse().coalesce()
    return getattr(dense, f"to_{layout}")(*([(2, 2)] if layout == "sparse_bsr" else []))


class Graph(nn.Module):
    """Layers around a product with a matrix that is a buffer or a parameter."""

    def __init__(self, product, held: Tensor | None):
        super().__init__()
        self.first, self.last, self.product = nn.Linear(8, 8), nn.Linear(8, 8), product
        if isinstance(held, nn.Parameter):
            self.matrix = held
        else:
            self.register_buffer("matrix", held)

    def forward(self, x):
        return self.last(torch.tanh(self.product(self.matrix, self.first(x))))


class Given(Graph):
    """And with one that is an input."""

    def forward(self, x, matrix):
        return self.last(torch.tanh(self.product(matrix, self.first(x))))


class Made(nn.Module):
    """A matrix that the forward makes itself, from edges or of what it computed."""

    def __init__(self, layout):
        super().__init__()
        self.first, self.last, self.layout = nn.Linear(8, 8), nn.Linear(8, 8), layout

    def forward(self, x, edges):
        h = self.first(x)
        made = torch.sparse_coo_tensor(edges, torch.ones(edges.shape[1]), (8, 8))
        gates = (h.detach() * (h.detach().abs() > 0.1)).to_sparse()
        if self.layout == "sparse_csr":
            made, gates = made.to_sparse_csr(), gates.to_sparse_csr()
        return self.last(torch.tanh(made @ h + gates @ h))


def check(model: nn.Module, *inputs: Tensor, backward: bool = True, **options) -> nn.Module:
    want = model(*inputs)
    gradients = torch.autograd.grad(want.square().sum(), model.first.weight) if backward else ()
    converted = fxprec.convert(model, dtype=torch.bfloat16, **options)[0]
    for _ in range(2):
        got = converted(*inputs)
        own = torch.autograd.grad(got.square().sum(), model.first.weight) if backward else ()
        assert got.dtype is torch.float32
        for ours, theirs in zip((got, *own), (want, *gradients), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=2**-5 * float(theirs.abs().max()))
    return converted


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("capture", ["symbolic", "dynamo"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("product", PRODUCTS)
def test_a_buffer(product, layout, capture):
    if (product, layout) == ("transposed", "sparse_bsr"):
        pytest.skip("torch has no product for it")
    backward = layout != "sparse_bsr"  # torch has none
    check(Graph(PRODUCTS[product], matrix(layout)), torch.randn(8, 8), backward=backward, capture=capture)


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("options", [
    {"capture": "symbolic"}, {"capture": "dynamo"}, {"level": "O2"}, {"placement": "autocast"}, {"lower": "pays"},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("layout", LAYOUTS[:2])
@pytest.mark.parametrize("how", ["input", "parameter"])
def test_an_input_and_a_parameter(how, layout, options):
    given, x = matrix(layout), torch.randn(8, 8)
    if how == "parameter":
        check(Graph(torch.matmul, nn.Parameter(given)), x, **options)
    else:
        check(Given(torch.matmul, None), x, given, **options)


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("capture", ["auto", "dynamo"])
@pytest.mark.parametrize("layout", LAYOUTS[:2])
def test_made_in_the_forward(layout, capture):
    check(Made(layout), torch.randn(8, 8), torch.randint(0, 8, (2, 20)), capture=capture)


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("capture", ["symbolic", "dynamo"])
def test_dense_ones_sparse_ones_and_dense_ones_again(capture):
    model, x = Given(torch.matmul, None), torch.randn(8, 8)
    csr = matrix("sparse_csr")
    want = model(x, csr)
    converted = fxprec.convert(model, dtype=torch.bfloat16, capture=capture)[0]
    for given in (csr.to_dense(), csr, csr.to_dense(), csr.to_sparse_coo(), csr):
        torch.testing.assert_close(converted(x, given), want, rtol=0.05, atol=0.05)
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("capture", ["symbolic", "dynamo"])
def test_the_report_says_why(capture):
    torch._dynamo.reset()  # before torch 2.13 it counts what it compiled for all the models above together
    converted = check(Graph(torch.matmul, matrix("sparse_csr")), torch.randn(8, 8), capture=capture)
    report = fxprec.report(converted)
    if capture == "symbolic":
        assert dict(report.headline.products)["bfloat16"] == 2  # the layers
        assert "a sparse operand: few of its kernels take low numbers" in str(report.nodes)
    else:
        assert "runs in FP32, since autocast has few kernels for sparse tensors" in str(report)
        assert "runs under torch.autocast" not in str(report)
