"""Models with a fault, in which a cure can be applied as ``locate`` prints it.

The faulty expression of each is ``call(x, y)``: a cure that is code of ``x`` and ``y`` takes its place. A cure that
converts the model in another way is evaluated as it stands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Call = Callable[..., Tensor]
F16, BF16 = torch.float16, torch.bfloat16


class Middle(nn.Module):
    """What goes wrong, in a module of its own, between two layers."""

    def __init__(self, function: Callable[[Tensor, Call], Tensor], call: Call) -> None:
        super().__init__()
        self.function, self.call = function, call

    def forward(self, h: Tensor) -> Tensor:
        return self.function(h, self.call)


class Between(nn.Module):
    def __init__(self, function: Callable[[Tensor, Call], Tensor], call: Call) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, 8), Middle(function, call), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)))


class Block(nn.Module):
    def __init__(self, norm: bool, gain: float, call: Call) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8) if norm else nn.Identity()
        self.up, self.gain, self.call = nn.Linear(8, 8), gain, call
        with torch.no_grad():
            self.up.weight.fill_(0.1).diagonal().fill_(1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x + self.up(self.norm(x)) * self.gain)


class Stream(nn.Module):
    """A residual stream of many layers, with a norm before each of them or without any."""

    def __init__(self, call: Call, layers: int = 24, norm: bool = True, gain: float = 1e4) -> None:
        super().__init__()
        self.first, self.last, self.norm = nn.Linear(8, 8), nn.Linear(8, 4), nn.LayerNorm(8)
        self.blocks = nn.ModuleList(Block(norm, gain, call) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = block(h)
        return self.last(self.norm(h))


class Attention(nn.Module):
    """torch's own attention, whose products overflow inside of it, or the layers around it."""

    def __init__(self, layers: int, gain: float, weights: bool = True) -> None:
        super().__init__()
        self.first, self.last, self.gain, self.weights = nn.Linear(8, 8), nn.Linear(8, 4), gain, weights
        self.layers = nn.ModuleList(nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)[:, None].expand(-1, 3, -1)
        for layer in self.layers:
            scaled = F.layer_norm(h, (8,)) * self.gain
            h = h + layer(scaled, scaled, scaled, need_weights=self.weights)[0]
        return self.last(F.layer_norm(h.mean(1), (8,)))


class Encoder(nn.Module):
    def __init__(self, layers: int, gain: float, decoder: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        kind = nn.TransformerDecoderLayer if decoder else nn.TransformerEncoderLayer
        self.layers = nn.ModuleList(kind(8, 2, 16, 0.0, batch_first=True, norm_first=True) for _ in range(layers))
        self.decoder = decoder
        with torch.no_grad():
            for layer in self.layers:
                layer.linear2.weight.mul_(gain)  # type: ignore[operator]

    def forward(self, x: Tensor) -> Tensor:
        h = memory = self.first(x)[:, None].expand(-1, 3, -1)
        for layer in self.layers:
            h = layer(h, memory) if self.decoder else layer(h)
        return self.last(F.layer_norm(h.mean(1), (8,)))


class ByHand(nn.Module):
    """Attention whose scores are divided behind the product."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.first, self.last, self.call = nn.Linear(8, 24), nn.Linear(8, 4), call

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.first(x) * 300).chunk(3, -1)
        return self.last((self.call(q @ k.T) / 1e5).softmax(-1) @ (v / 300))


class Convolved(nn.Module):
    """A residual net of convolutions."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(2, 2, 3, padding=1) for _ in range(8))
        self.norm, self.last, self.call = nn.GroupNorm(1, 2), nn.Linear(8, 4), call
        with torch.no_grad():
            for layer in self.layers:
                layer.weight.abs_()

    def forward(self, x: Tensor) -> Tensor:
        h = x.view(-1, 2, 2, 2).abs() + 1
        for layer in self.layers:
            h = self.call(h + F.relu(layer(h)) * 8)
        return self.last(self.norm(h).flatten(1))


class Fault(NamedTuple):
    """A model with a fault.

    Attributes:
        make: the model, given what stands in the place of the faulty expression.
        call: the faulty expression itself.
        settings: of ``fxprec.convert``.
        clamped: a clamp of the expression to float16's range is another cure.
    """

    make: Callable[[Call], nn.Module]
    call: Call
    settings: Mapping[str, Any]
    clamped: bool = False


def same(x: Tensor) -> Tensor:
    return x


def between(
    function: Callable[[Tensor, Call], Tensor], call: Call = same, clamped: bool = False, **settings: Any
) -> Fault:
    return Fault(lambda call: Between(function, call), call, {"dtype": F16} | settings, clamped)


def whole(make: Callable[[Call], nn.Module], clamped: bool = False, **settings: Any) -> Fault:
    return Fault(make, same, {"dtype": F16} | settings, clamped)


ONES: Final = torch.ones(8, 8)
EYE: Final = torch.eye(8)


def looped(h: Tensor, call: Call) -> Tensor:
    for _ in range(24):
        h = call(h + h.abs() * 0.6 + 3)
    return F.layer_norm(h, (8,))


def product_after_product(h: Tensor, call: Call) -> Tensor:
    for _ in range(12):
        h = call(F.linear(h.abs() * 0.4, ONES))
    return h * 1e-5


#: Low precision alone has these: a change of the conversion cures them.
NARROW: Final[dict[str, Fault]] = {
    "24 layers, low stream": whole(lambda call: Stream(call), clamped=True, level="O2"),
    "24 layers without norms": whole(lambda call: Stream(call, norm=False, gain=1.0), clamped=True),
    "layers, low stream, by dynamo": whole(lambda call: Stream(call, 6), clamped=True, level="O2", capture="dynamo"),
    "layers, unfused": whole(lambda call: Stream(call, 8), clamped=True, level="O2", fuse=False),
    "layers without norms, low stream": whole(
        lambda call: Stream(call, 10, norm=False, gain=2.0), clamped=True, level="O2"
    ),
    "autocast's casts": whole(lambda call: Stream(call, 10, norm=False, gain=2.0), clamped=True, placement="autocast"),
    "12 products in a row": between(product_after_product, clamped=True),
    "one layer 24 times": between(looped, clamped=True, level="O2"),
    "convolutions": whole(Convolved, clamped=True),
    "convolutions, low stream": whole(Convolved, clamped=True, level="O2"),
    "attention's products": whole(lambda _: Attention(1, 3e3)),
    "attention's products in 2 layers": whole(lambda _: Attention(2, 3e3)),
    "attention's products in 3 layers, low stream": whole(lambda _: Attention(3, 3e3), level="O2"),
    "attention's values": whole(lambda _: Attention(2, 1e5, weights=False)),
    "encoder layers": whole(lambda _: Encoder(2, 1e6)),
    "encoder layers, low stream": whole(lambda _: Encoder(2, 1e6), level="O2"),
    "decoder layers": whole(lambda _: Encoder(1, 1e6, decoder=True)),
    "scores by hand": whole(ByHand, clamped=True),
    "a sum by a product": between(lambda h, call: call(F.linear(h * 0 + 3e4, ONES)) * 1e-5, clamped=True),
    "a sum of squares by a product": between(
        lambda h, call: call((h * 300) @ (h.T * 300).abs()).sum(-1, keepdim=True) * 1e-8 + h, clamped=True
    ),
    "a product of large factors": between(lambda h, call: F.linear(call(F.linear(h, ONES) * 1e6), ONES) * 1e-9),
    "a cast for a product": between(lambda h, call: F.linear(call(h.exp() + 1e5), ONES / 100) * 1e-3, clamped=True),
    "an in-place product": between(lambda h, call: F.linear(F.linear(h, ONES).mul_(1e6), ONES) * 1e-6),
    "a norm's input": between(
        lambda h, call: F.layer_norm(call(F.linear(F.linear(h, EYE * 300), EYE * 300)), (8,)), clamped=True, level="O2"
    ),
    "an exponential at O3": between(lambda h, call: call((h * 0 + 12).exp()).log(), level="O3"),
    "a cube at O3": between(lambda h, call: call((h.abs() + 50) ** 3) * 1e-6, level="O3", clamped=True),
    "a softmax by hand at O3": between(
        lambda h, call: (h + 12).exp() / (h + 12).exp().sum(-1, keepdim=True), level="O3"
    ),
    "bfloat16's zeros under a logarithm": between(
        lambda h, call: (F.linear(h.abs() + 1, EYE) * 1e-4 * 1e-4).log(),
        policy={"mul": F16},
    ),
}

#: FP32 has these as well: the code has to change.
WIDE: Final[dict[str, Fault]] = {
    "to float16": between(lambda h, call: call(h * 1e6).float() * 1e-6, lambda x: x.to(F16)),
    "half": between(lambda h, call: call(h * 1e6).float() * 1e-6, lambda x: x.half(), dtype=BF16),
    "type": between(lambda h, call: call(h * 1e6).float() * 1e-6, lambda x: x.type(F16), dtype=BF16),
    "half of a product": between(
        lambda h, call: call(F.linear(h, ONES) * 1e6).float() * 1e-6, lambda x: x.half(), level="O2"
    ),
    "sqrt's slope at 0": between(lambda h, call: call(h * 0) * h, lambda x: x.sqrt()),
    "sqrt's slope behind a where": between(
        lambda h, call: torch.where(h > 99, h, call(h * 0)), lambda x: x.sqrt(), dtype=BF16
    ),
    "sqrt of negatives": between(lambda h, call: call(-h.abs() - 1), lambda x: x.sqrt()),
    "sqrt in place": between(lambda h, call: call(h * 0) * h, lambda x: x.clone().sqrt_()),
    "rsqrt of 0": between(lambda h, call: call(h * 0) * h, lambda x: x.rsqrt()),
    "reciprocal of 0": between(lambda h, call: call(h * 0), lambda x: x.reciprocal()),
    "0 / 0": between(lambda h, call: call(h * 0, h * 0), lambda x, y: x / y),
    "a small divisor": between(lambda h, call: call(h, h * 0 + 1e-42), lambda x, y: x / y),
    "1 / 0": between(lambda h, call: call(h * 0), lambda x: 1 / x),
    "a norm by hand": between(
        lambda h, call: call(h * 0, (h * 0).square().mean(-1, keepdim=True) + 0), lambda x, y: x / y
    ),
    "divided by a norm of 0": between(
        lambda h, call: call(h * 0, (h * 0).norm(dim=-1, keepdim=True)), lambda x, y: x / y
    ),
    "an RMS norm's root": between(
        lambda h, call: h / (call((h * 0).square().mean(-1, keepdim=True)) + 1), lambda x: x.sqrt()
    ),
    "std of one value": between(lambda h, call: h / (call(h[:, :1]) + 1), lambda x: x.std(-1, keepdim=True)),
    "var of one value": between(lambda h, call: h / (call(h[:, :1]) + 1), lambda x: x.var(-1, keepdim=True)),
    "log of 0": between(lambda h, call: call(h * 0), lambda x: x.log(), dtype=BF16),
    "log of negatives": between(lambda h, call: call(-h.abs()), lambda x: x.log()),
    "log of a softmax": between(lambda h, call: call((h * 1e4).softmax(-1)), lambda x: x.log()),
    "log of a sigmoid": between(lambda h, call: call((h * 0 - 200).sigmoid()), lambda x: x.log2()),
    "log10 of 0": between(lambda h, call: call(h * 0), lambda x: x.log10()),
    "log1p of -1": between(lambda h, call: call(h * 0 - 1), lambda x: x.log1p()),
    "logit of 1": between(lambda h, call: call(h * 0 + 1), lambda x: x.logit()),
    "acos' slope at 1": between(lambda h, call: call(h * 0 + 1), lambda x: x.acos()),
    "asin of 2": between(lambda h, call: call(h * 0 + 2), lambda x: x.asin(), dtype=BF16),
    "atanh of 1": between(lambda h, call: call(h * 0 + 1), lambda x: x.atanh()),
    "acosh' slope at 1": between(lambda h, call: call(h * 0 + 1), lambda x: x.acosh()),
    "erfinv of 1": between(lambda h, call: call(h * 0 + 1), lambda x: x.erfinv()),
    "a root as a power": between(lambda h, call: call(h * 0, 0.5), lambda x, y: x**y),
    "a power of negatives": between(lambda h, call: call(-h.abs() - 1, 0.3), lambda x, y: x**y),
    "a negative power": between(lambda h, call: call(h * 0, -1.0), lambda x, y: x.pow(y)),
    "an exponential": between(lambda h, call: call(h * 0 + 100), lambda x: x.exp()),
    "a softmax by hand": between(
        lambda h, call: call(h + 100) / call(h + 100).sum(-1, keepdim=True), lambda x: x.exp(), dtype=BF16
    ),
    "powers of 2": between(lambda h, call: call(h * 0 + 200), lambda x: x.exp2()),
    "expm1": between(lambda h, call: call(h * 0 + 100), lambda x: x.expm1()),
    "sinh": between(lambda h, call: call(h * 0 - 100), lambda x: x.sinh()),
    "cosh": between(lambda h, call: call(h * 0 - 100), lambda x: x.cosh()),
    "a square": between(lambda h, call: call(((h.abs() + 1) * 1e25) ** 2) * 1e-3),
    "a product of products": between(lambda h, call: call((h.abs() + 1) * 1e30 * 1e30) * 1e-3),
    "a mask by a product": between(lambda h, call: h + call(h * 0, -torch.inf), lambda x, y: x * y),
    "inf - inf": between(
        lambda h, call: h + call(h.masked_fill(h > -99, torch.inf), h.masked_fill(h > -99, -torch.inf)),
        lambda x, y: x + y,
    ),
    "hypot's slope at 0": between(lambda h, call: call(h * 0, h * 0), torch.hypot),
    "the rest by 0": between(lambda h, call: call(h, h * 0), lambda x, y: x % y),
    "the truncated rest by 0": between(lambda h, call: call(h, h * 0), torch.fmod),
    "a floored quotient by 0": between(lambda h, call: h + call(h.detach(), h.detach() * 0), lambda x, y: x // y),
    "std and mean of one value": between(
        lambda h, call: h / (call(h[:, :1])[0] + 1), lambda x: torch.std_mean(x, -1, keepdim=True)
    ),
    "a mean of nan alone": between(lambda h, call: h + call(h.masked_fill(h > -99, torch.nan)), torch.nanmean),
    "singular values that are equal": between(
        lambda h, call: h @ call(h.sum() * EYE).U + call(h.sum() * EYE).S, torch.linalg.svd
    ),
    "lgamma of 0": between(lambda h, call: call(h * 0), torch.lgamma),
    "digamma of 0": between(lambda h, call: call(h * 0), torch.digamma),
    "xlogy at 0": between(lambda h, call: call(h.exp(), h * 0), torch.xlogy),
    "a mean of nothing": between(lambda h, call: h + call(h[:0]), lambda x: x.mean()),
    "a layer norm without eps": between(lambda h, call: call(h * 0), lambda x: F.layer_norm(x, (8,), eps=0.0)),
    "an RMS norm without eps": between(lambda h, call: call(h * 0), lambda x: F.rms_norm(x, (8,), eps=0.0)),
    "a group norm without eps": between(lambda h, call: call(h * 0), lambda x: F.group_norm(x, 2, eps=0.0)),
    "normalized without eps": between(lambda h, call: call(h * 0), lambda x: F.normalize(x, dim=-1, eps=0.0)),
    "a cosine without eps": between(
        lambda h, call: h + call(h * 0, h)[:, None], lambda x, y: F.cosine_similarity(x, y, eps=0.0)
    ),
    "targets that are all ignored": between(
        lambda h, call: h + call(h, torch.full((4,), -100)), lambda x, y: F.cross_entropy(x, y)
    ),
    "likelihoods of targets that are all ignored": between(
        lambda h, call: h + call(h.log_softmax(-1), torch.full((4,), -100)), lambda x, y: F.nll_loss(x, y)
    ),
    "a Poisson loss": between(lambda h, call: h * call(h * 0 + 100, h * 0 + 1), F.poisson_nll_loss),
    "eigenvalues that are equal": between(
        lambda h, call: h @ call(h.sum() * EYE).eigenvectors + call(h.sum() * EYE).eigenvalues,
        torch.linalg.eigh,
    ),
}


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(4, 8, generator=generator), torch.randint(0, 4, (4,), generator=generator)
