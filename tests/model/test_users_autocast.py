"""Regions of the user's own autocast within a forward: what they compute, and the dtypes of what they give."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxprec

F16, BF16 = torch.float16, torch.bfloat16


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)


class Whole(Layers):
    def forward(self, x):
        with torch.autocast("cpu", F16):
            return self.a(x)


class Part(Layers):
    def forward(self, x):
        x = self.b(x)
        with torch.autocast("cpu", F16):
            h = F.relu(self.a(x))
            y = self.norm(h)
        return h, y, self.b(h.float())


class SameDtype(Layers):
    def forward(self, x):
        with torch.autocast("cpu", BF16):
            h = F.gelu(self.a(x))
            y = F.softmax(h, -1)
        return h, y, self.b(h.float()), h + x


class Default(Layers):
    def forward(self, x):
        with torch.autocast("cpu"):
            return self.a(x)


class Off(Layers):
    def forward(self, x):
        h = self.a(x)
        with torch.autocast("cpu", enabled=False):
            return self.b(h)


class Nested(Layers):
    def forward(self, x):
        with torch.autocast("cpu", F16):
            h = self.a(x)
            with torch.autocast("cpu", enabled=False):
                y = self.b(h.float())
            with torch.autocast("cpu", BF16):
                z = self.c(h)
        return h, y, z


class Decorated(Layers):
    @torch.autocast("cpu", dtype=F16)
    def forward(self, x):
        return self.a(x)


class DecoratedParts(Layers):
    @torch.autocast("cpu", dtype=F16)
    def inside(self, x):
        return self.a(x)

    @torch.autocast("cpu", enabled=False)
    def outside(self, x):
        return self.b(x)

    def forward(self, x):
        return self.inside(x), self.outside(self.c(x))


class Checkpointed(Layers):
    def forward(self, x):
        def inside(t: Tensor) -> Tensor:
            with torch.autocast("cpu", F16):
                return self.a(t)

        with torch.autocast("cpu", F16):
            y = checkpoint(lambda t: F.relu(self.b(t)), x, use_reentrant=False)
        return checkpoint(inside, x, use_reentrant=False), y


def inside(m: Layers, x: Tensor) -> Tensor:
    with torch.autocast("cpu", F16):
        return m.a(x)


def inside_low(m: Layers, x: Tensor) -> tuple[Tensor, Tensor]:
    with torch.autocast("cpu", BF16):
        h = m.a(x)
    return h, h.float() * 8


def inside_again(m: Layers, x: Tensor) -> Tensor:
    return checkpoint(lambda t: inside(m, t).float() * 8, x, use_reentrant=False)


def inside_other_regions(m: Layers, x: Tensor) -> tuple[Tensor, ...]:
    with torch.autocast("cpu", enabled=False):
        y = m.a(x) * 8
    with torch.autocast("cpu", BF16):
        z = m.b(x)
    return y, z, m.c(x)


class OtherDevice(Layers):
    def forward(self, x):
        with torch.autocast("cpu", F16):
            h = self.a(x)
            with torch.autocast("cuda", enabled=False):
                h = self.b(h.float())
            return h.exp()


class Broken(Layers):
    def forward(self, x):
        with torch.autocast("cpu", F16):
            h = self.a(x)
            print(end="")
            y = self.b(h)
        return h, y


class NotCompiled(Layers):
    @torch.compiler.disable
    def inside(self, x):
        with torch.autocast("cpu", F16):
            return self.a(x)

    def forward(self, x):
        return self.inside(self.b(x))


class SetByHand(Layers):
    def forward(self, x):
        before, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        torch.set_autocast_enabled("cpu", True)
        torch.set_autocast_dtype("cpu", F16)
        try:
            return self.a(x)
        finally:
            torch.set_autocast_enabled("cpu", before)
            torch.set_autocast_dtype("cpu", dtype)


class DefaultSetByHand(Layers):
    def forward(self, x):
        dtype = torch.get_autocast_dtype("cpu")
        torch.set_autocast_dtype("cpu", F16)
        try:
            with torch.autocast("cpu"):
                return self.a(x)
        finally:
            torch.set_autocast_dtype("cpu", dtype)


class Power(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, gradient):
        x, w = ctx.saved_tensors
        return gradient @ w.T, x.T @ gradient


class CustomForward(Layers):
    def forward(self, x):
        with torch.autocast("cpu", F16):
            y = Power.apply(self.b(x), self.a.weight)
        return Power.apply(self.b(x), self.a.weight), y


class Asked(Layers):
    def forward(self, x):
        with torch.autocast("cpu", F16):
            inside = 3 if torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") is F16 else 1
        return self.a(x) * (2 if torch.is_autocast_enabled("cpu") else 1) * inside


class Written(Layers):
    def forward(self, x):
        with torch.autocast("cpu", F16):
            h = self.a(x)
            h += 1
            h[:, :2] *= 2
        return h * 2, h


class Decomposed(Layers):
    def forward(self, x):
        with torch.autocast("cpu", BF16):
            return torch.fft.rfft(self.a(x)).abs()


class Sizes(Layers):
    def forward(self, x):
        with torch.autocast("cpu", F16):
            h = self.a(x)
            n = h.shape[0]
        return h.view(n * 2, 4), self.b(x)


class Failed(Layers):
    def forward(self, x):
        try:
            with torch.autocast("cpu", F16):
                h = self.a(x[:, :3])
        except RuntimeError:
            h = self.a(x)
        return h


KINDS = (
    Whole, Part, SameDtype, Default, Off, Nested, OtherDevice, Decorated, DecoratedParts, Checkpointed, Broken,
    NotCompiled, SetByHand, DefaultSetByHand, CustomForward, Asked, Written, Decomposed, Sizes, Failed,
)  # fmt: skip


def run(model: nn.Module, x: Tensor) -> tuple[tuple[Tensor, ...], list[Tensor | None]]:
    outputs = model(x)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    sum(output.float().square().sum() for output in outputs).backward()
    return tuple(output.detach() for output in outputs), [parameter.grad for parameter in model.parameters()]


def check(kind: type[nn.Module], inputs: Tensor | None = None, **options) -> nn.Module:
    torch.manual_seed(0)
    original, x = kind(), torch.randn(4, 8) if inputs is None else inputs
    converted = fxprec.convert(copy.deepcopy(original), **{"dtype": BF16, **options})[0]
    (want, gradients), (got, own) = run(original, x), run(converted, x)
    assert [output.dtype for output in got] == [output.dtype for output in want]
    tolerance = 0 if options.get("level") == "O0" else 2**-5
    for ours, theirs in zip((*got, *own), (*want, *gradients), strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance * float(theirs.abs().max()))
    assert not torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") is BF16
    return converted


@pytest.mark.parametrize("options", [{}, {"level": "O2"}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_it_runs_as_the_user_says(kind, options):
    check(kind, **options)


@pytest.mark.parametrize("options", [{"level": "O0"}, {"placement": "autocast"}, {"fuse": True}], ids=str)
@pytest.mark.parametrize("kind", [Whole, Part, SameDtype, Nested, DecoratedParts, Checkpointed, Written, Decomposed])
def test_whatever_the_settings(kind, options):
    check(kind, **options)


@pytest.mark.parametrize("options", [{}, {"level": "O0"}, {"level": "O2"}], ids=str)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("function", [
    lambda m, x: inside(m, x).float() * 8,
    lambda m, x: inside(m, x).to(torch.float32) * 8,
    lambda m, x: inside(m, x).type(torch.float32) * 8,
    lambda m, x: inside(m, x).to(x.dtype) * 8,
    lambda m, x: inside(m, x).type_as(x) * 8,
    inside_low,
    inside_again,
])  # fmt: skip
def test_what_a_checkpoint_casts_behind_a_region(function, reentrant, options):
    class Checkpointing(Layers):
        def forward(self, x):
            return checkpoint(functools.partial(function, self), x, use_reentrant=reentrant)

    check(Checkpointing, inputs=torch.randn(4, 8, requires_grad=True), **options)


@pytest.mark.parametrize("options", [{}, {"level": "O0"}, {"level": "O2"}], ids=str)
@pytest.mark.parametrize("function", [lambda m, x: m.a(x).float() * 8, inside_low, inside_other_regions])
def test_a_checkpoint_within_a_region(function, options):
    class Within(Layers):
        def forward(self, x):
            with torch.autocast("cpu", F16):
                return checkpoint(functools.partial(function, self), x, use_reentrant=False)

    check(Within, **options)


@pytest.mark.filterwarnings("ignore::fxprec.SlowDtypeWarning")
def test_a_region_without_a_dtype_has_torchs_default():
    """And not the dtype that the net, which is around it, has set."""
    check(Default, dtype=F16)


def test_the_report_says_whose_it_is():
    nodes = str(fxprec.report(check(Part)).nodes)
    assert "inside the user's own autocast: float16" in nodes and "the user's own autocast: float16" in nodes
    outside = str(fxprec.report(check(SetByHand)))
    reasons = "torch.set_autocast_enabled: what follows runs under it", "Attempted to call function marked as skipped"
    assert reasons[torch.__version__ < "2.12"] in outside  # which breaks the graph there by itself
    assert "it runs as the user's own torch.autocast says" in outside
    assert "torch.autocast says (runs" not in outside.replace("\n", " ")


def test_further_calls_find_their_graphs():
    converted = check(Part)
    graphs = len(fxprec.graphs(converted))
    for _ in range(3):
        converted(torch.randn(4, 8))
    assert len(fxprec.graphs(converted)) == graphs


class Counted(Layers):
    def __init__(self, asks):
        super().__init__()
        self.asks, self.n = asks, 0

    def forward(self, x):
        self.n += 1
        with torch.autocast("cpu", BF16, enabled=self.asks(self, x)):
            return self.a(x)


@pytest.mark.parametrize(
    "asks",
    [
        lambda self, x: x.shape[0] > 2,
        lambda self, x: self.n > 3,
        lambda self, x: not x.size(0) > 2,
        lambda self, x: 2 < x.shape[0] < 5,
    ],
    ids=["a size", "a counter", "not", "a range"],
)
def test_whether_it_is_enabled_may_come_from_a_size_or_a_counter(asks):
    """dynamo makes symbols of them, which no region takes."""
    torch._dynamo.reset()
    original = Counted(asks)
    converted = fxprec.convert(copy.deepcopy(original), dtype=BF16, capture="dynamo").module
    seen = set()
    for rows in (2, 3, 1, 6, 2, 7, 4):
        x = torch.randn(rows, 8)
        want, got = original(x), converted(x)
        seen.add(want.dtype)
        assert got.dtype is want.dtype
        torch.testing.assert_close(got, want, rtol=0, atol=0.05)
    assert seen == {torch.float32, BF16} and len(fxprec.graphs(converted)) <= 5
