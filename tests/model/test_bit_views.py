"""``h.view(torch.int32)`` reads the bits of what ``h`` is in the original program, whatever it was lowered to."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxprec

UPPER = -65536  # the sixteen bits of an FP32 number that bfloat16 has


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.p = nn.Linear(8, 8), nn.Linear(8, 8), nn.Parameter(torch.randn(8))
        self.register_buffer("scale", torch.ones(8))
        self.scale: Tensor


class Truncated(Layers):
    def forward(self, x):
        return (self.a(x).view(torch.int32) & UPPER).view(torch.float32)


class DtypeOfTensor(Layers):
    def forward(self, x):
        h = self.a(x)
        return self.b((h.view(dtype=torch.int32) & UPPER).view(h.dtype))


class Halves(Layers):
    def forward(self, x):
        h = F.gelu(self.a(x))
        return h.view(torch.int16)[..., 1::2].float() / 2**14


class StraightThrough(Layers):
    def forward(self, x):
        h = self.a(x)
        low = (h.detach().view(torch.int32) & UPPER).view(torch.float32)
        return self.b(h + (low - h).detach())


class Aten(Layers):
    def forward(self, x):
        return torch.ops.aten.view.dtype(torch.ops.aten.view_copy.dtype(self.a(x), torch.int32) & UPPER, torch.float32)


class Bytes(Layers):
    def forward(self, x):
        h = self.a(x)
        return h.view(torch.uint8).unflatten(-1, (-1, h.element_size()))[..., 3].float() / 256


class Written(Layers):
    def forward(self, x):
        h = self.a(x).detach()
        h.view(torch.int32).bitwise_and_(UPPER)
        return h * 2


class WrittenAsComplex(Layers):
    def forward(self, x):
        h = self.a(x).detach()
        torch.view_as_complex(h.view(-1, 4, 2)).mul_(2)
        return h


class WrittenBuffer(Layers):
    def forward(self, x):
        self.scale.view(torch.int32).add_(1 << 23)  # twice as much
        return self.a(x) * self.scale


class UsersCast(Layers):
    def forward(self, x):
        h = self.a(x).to(torch.bfloat16)
        return h.view(torch.int16).view(torch.bfloat16).float()


STATIC = (
    Truncated, DtypeOfTensor, Halves, StraightThrough, Aten, Bytes, Written, WrittenAsComplex, WrittenBuffer, UsersCast
)  # fmt: skip


class Inlined(Layers):
    def forward(self, x):
        return torch.Tensor.view(torch.Tensor.view(self.a(x), torch.int32) & UPPER, torch.float32)


class Broken(Layers):
    def forward(self, x):
        h = self.a(x)
        print(end="")
        bits = self.b(h).view(torch.int32)
        print(end="")
        return (bits & UPPER).view(h.dtype)


class Checkpointed(Layers):
    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)

    def inner(self, x):
        h = self.a(x)
        return h + (h.detach().view(torch.int32) & UPPER).view(h.dtype)


class WrittenWeight(Layers):
    def forward(self, x):
        with torch.no_grad():
            self.a.weight.view(torch.int32).bitwise_and_(UPPER)
        return self.a(x)


class Numpy(Layers):
    def forward(self, x):
        return torch.from_numpy(self.a(x).detach().numpy().view("int32") & UPPER).view(torch.float32)


def run(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | None]:
    x = x.clone().requires_grad_()
    y = model(x)
    if y.requires_grad:
        y.square().sum().backward()
    return y.detach(), x.grad


def check(kind: type[nn.Module], **options) -> nn.Module:
    torch.manual_seed(0)
    model, x = kind(), torch.randn(4, 8)
    want, gradient = run(original := copy.deepcopy(model), x)
    converted = fxprec.convert(model, dtype=torch.bfloat16, **options)[0]
    got, own_gradient = run(converted, x)
    assert got.dtype is want.dtype and got.shape == want.shape
    torch.testing.assert_close(got, want, rtol=2**-6, atol=2**-6)
    torch.testing.assert_close(own_gradient, gradient, rtol=2**-5, atol=2**-5)
    for name, tensor in original.state_dict().items():
        torch.testing.assert_close(converted.state_dict()[name].float(), tensor, rtol=2**-8, atol=2**-8)
    return converted


@pytest.mark.parametrize("options", [
    {"level": "O0"}, {}, {"level": "O2"}, {"level": "O3"}, {"fuse": True}, {"placement": "autocast"},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("kind", STATIC)
def test_bits_are_those_of_the_original_dtype(kind, options):
    if kind in (WrittenAsComplex, Bytes) and options == {"level": "O3"}:
        pytest.skip("what is made of weights is bfloat16 at O3: two bytes a number, and no complex ones")
    check(kind, capture="symbolic", **options)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("kind", [*STATIC, Inlined, Broken, Checkpointed, WrittenWeight, Numpy])
def test_dynamo_traces_what_reads_bits_as_the_original(kind, level):
    if kind is WrittenWeight and level == "O3":
        pytest.skip("the weight itself is bfloat16 there, and so are its bits")
    check(kind, capture="dynamo", level=level)


def test_further_calls_find_their_graph():
    """Guards hold under the autocast that the call is in, although the graph was traced without."""
    converted = check(DtypeOfTensor, capture="dynamo")
    converted(torch.randn(4, 8))
    graphs = fxprec.graphs(converted)
    for _ in range(3):
        converted(torch.randn(4, 8))
    assert len(fxprec.graphs(converted)) == len(graphs)


@pytest.mark.parametrize("capture", ["symbolic", "dynamo"])
def test_the_report_says_why(capture):
    converted = check(Truncated, capture=capture)
    assert "it reads bits, which are those of its input's original dtype" in str(fxprec.report(converted).nodes)
