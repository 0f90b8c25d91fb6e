"""The report at a glance: its verdict, what stays FP32 by reason, equal layers as one, and no more than 40 lines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxprec
from fxprec.inspection.headline import Stay
from fxprec.passes.graph.annotations import Rule


class Deep(nn.Module):
    """Twelve blocks on (2, 8)."""

    def __init__(self, layers: int = 12) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()) for _ in range(layers))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x).softmax(-1)


def printed(model: nn.Module, *inputs: Tensor, **how: Any) -> list[str]:
    """The lines of its report."""
    return str(fxprec.report(fxprec.convert(model, inputs, dtype=torch.bfloat16, **how).module)).split("\n")


def test_the_first_line_is_a_verdict() -> None:
    lines = printed(Deep(), torch.randn(2, 8))
    assert lines[0].startswith("Deep: O1, bfloat16, mincut: all 13 matrix products in bfloat16, 14 casts a forward, ")
    assert "nothing outside the graphs" in lines[0]


def in_fp32(*modules: str) -> fxprec.Policy:
    return fxprec.Policy.preset("O1").override(modules=dict.fromkeys(modules, Rule.FULL))


@pytest.mark.parametrize(
    ("model", "how", "words"),
    [
        (Deep, {"policy": in_fp32("head")}, "12 of 13 matrix products in bfloat16"),
        (Deep, {"policy": in_fp32("head", "blocks")}, "13 matrix products in float32"),
        (lambda: nn.Linear(8, 4), {}, "the matrix product in bfloat16"),
        (nn.GELU, {}, "no matrix products"),
    ],
)
def test_the_verdict_counts_what_was_lowered(model: Callable[[], nn.Module], how: dict[str, Any], words: str) -> None:
    assert words in printed(model(), torch.randn(2, 8), **how)[0]


def test_what_stays_is_told_by_reason_and_equal_layers_as_one() -> None:
    lines = printed(Deep(), torch.randn(2, 8))
    stays = [line for line in lines if line.startswith("stays FP32")]
    (norms,) = [line for line in lines if "12 layer_norm: the variance sums squares" in line]
    assert norms.endswith("(in blocks.0-11.0)")
    assert any("1 softmax: exponentials" in line and "(in the model itself)" in line for line in stays)
    assert not any("view" in line for line in stays)
    by_policy = printed(Deep(), torch.randn(2, 8), policy=in_fp32("blocks.*.1"))
    (line,) = [line for line in by_policy if "12 linear" in line]
    assert "override" in line and line.endswith("(in blocks.0-11.1)")


def test_what_is_low_around_fp32_arithmetic_is_told() -> None:
    """It does not "stay FP32": its kernel reads and writes low."""

    def norms() -> nn.Module:
        return nn.Sequential(nn.Conv2d(2, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.LayerNorm(3))

    lines = printed(norms(), torch.randn(2, 2, 3, 3), level="O2")
    (inside,) = [line for line in lines if "batch_norm" in line]
    assert inside.startswith("FP32 inside  1 batch_norm, 1 layer_norm: the variance sums")
    assert inside.endswith("affine parameters stay FP32; reads and writes bfloat16 (in modules 1,4)")
    (inside,) = [line for line in printed(norms(), torch.randn(2, 2, 3, 3), level="O0") if "batch_norm" in line]
    assert inside.startswith("stays FP32 ") and "bfloat16" not in inside
    summed = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.Softmax(-1))
    stays = fxprec.report(fxprec.convert(summed, (torch.randn(2, 4),), dtype=torch.bfloat16).module).headline.stays
    assert [(stay.label, *stay.ops, stay.around) for stay in stays] == [
        ("FP32 inside", "layer_norm", "reads and writes bfloat16"), ("stays FP32", "softmax", ""),
    ]  # fmt: skip


def test_why_there_are_more_casts_than_under_autocast_is_told() -> None:
    class Powers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.layer(x).pow(2))

    x = torch.randn(2, 8)
    (line,) = [line for line in printed(Powers(), x) if line.startswith("more casts")]
    assert line == (
        "more casts   than eager autocast: 1 gives a result its original dtype back (keep_output_dtype=False leaves "
        "them low); 1 pow is FP32 here and bfloat16 there"
    )
    (line,) = [line for line in printed(Powers(), x, keep_output_dtype=False) if line.startswith("more casts")]
    assert line == "more casts   than eager autocast: 1 pow is FP32 here and bfloat16 there"
    norm = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    wide = fxprec.Policy.preset("O1").override(ops={"layer_norm": torch.float32})
    (line,) = [line for line in printed(norm, x, policy=wide) if line.startswith("more casts")]
    assert line.endswith("; 2 layer_norm are FP32 here and bfloat16 there")
    lowered = fxprec.Policy.preset("O1").override(ops={"pow": "low"})
    lines = printed(Powers(), x, keep_output_dtype=False, policy=lowered)
    assert not [line for line in lines if line.startswith("more casts")]


def test_fewer_casts_want_no_reason() -> None:
    class Thrice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) + self.b(x) + self.c(x)

    headline = fxprec.report(fxprec.convert(Thrice(), (torch.randn(2, 8),), dtype=torch.bfloat16).module).headline
    assert headline.rehearsal.results == 1 and "more casts" not in str(headline)


def test_few_places_are_named() -> None:
    many: tuple[str, ...] = ("a", "b", "c", "d", "e")
    assert str(Stay("it sums", {"sum": 5}, {"sum": many})) == "5 sum: it sums (in a, b, c and 2 more)"
    two = Stay("it sums", {"sum": 5, "mean": 1}, {"sum": many, "mean": ("norm",)})
    assert str(two) == "5 sum (in a, b, c and 2 more), 1 mean (in norm): it sums"
    few = Stay("it sums", {"sum": 2, "mean": 1}, {"sum": ("a", ""), "mean": ("2",)})
    assert str(few) == "2 sum, 1 mean: it sums (in a, the model itself, module 2)"


def test_views_are_apart() -> None:
    class Viewing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return F.gelu(self.layer(x).view(4, 4).t().reshape(2, 8))

    headline = fxprec.report(fxprec.convert(Viewing(), (torch.randn(2, 8),), dtype=torch.bfloat16).module).headline
    assert headline.computes == {"bfloat16": 2} and headline.views == {"bfloat16": 3}
    assert "computing    2 in bfloat16; views: 3 in bfloat16" in str(headline)


def test_it_is_short_and_never_wrapped() -> None:
    """However many reasons, places and methods there are: the rest is counted."""

    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a_module_with_a_name_that_is_longer_than_a_terminal_is_wide_by_itself = Deep(40)

        def forward(self, x: Tensor) -> Tensor:
            x = self.a_module_with_a_name_that_is_longer_than_a_terminal_is_wide_by_itself(x)
            for function in (
                torch.exp,
                torch.log,
                torch.sin,
                torch.cumsum,
                torch.prod,
                torch.var,
                F.mse_loss,
                torch.tan,
            ):
                x = x + function(*{torch.cumsum: (x, 0), F.mse_loss: (x, x)}.get(function, (x,)))
            return x

    for number in range(20):
        setattr(Many, f"method{number}", lambda self, x: self.a_module_with_a_name_that_is_longer_than_a_terminal_is(x))
    lines = printed(Many(), torch.randn(2, 8))
    assert 10 <= len(lines) <= 40
    assert max(map(len, lines)) > 160 and all(line and not line.startswith(" ") for line in lines)
    assert any(line.startswith("stays FP32") and "more, in to_dict()" in line for line in lines)


def test_risks() -> None:
    policy = fxprec.Policy.preset("O1").override(ops={"softmax": Rule.LOW})
    model = fxprec.convert(Deep(), (torch.randn(2, 8),), dtype=torch.bfloat16, policy=policy).module
    (risk,) = [risk for risk in fxprec.report(model).headline.risks if "softmax" in risk]
    assert risk.startswith("1 softmax in bfloat16, which autocast keeps in FP32")
    assert f"risk         {risk}" in str(fxprec.report(model))
    assert not any("softmax" in risk for risk in fxprec.report(fxprec.convert(Deep()).module).headline.risks)


def test_capturing_again_and_again_is_a_risk() -> None:
    class Scaling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor, scale: float) -> Tensor:
            return self.layer(x) * scale

    model = fxprec.convert(Scaling(), dtype=torch.bfloat16).module
    for scale in range(3):
        model(torch.randn(2, 4), float(scale))
    assert not any("captured" in risk for risk in fxprec.report(model).headline.risks)
    for scale in range(3, 12):
        model(torch.randn(2, 4), float(scale))
    headline = fxprec.report(model).headline
    assert any(risk.startswith(f"captured {headline.captures} times, ") for risk in headline.risks)


def test_what_is_slow_is_told_where_something_is_lowered() -> None:
    model = fxprec.convert(nn.Sequential(nn.ReLU(), nn.Linear(2, 2)), dtype=torch.float16).module
    assert "hundreds of times slower" in fxprec.report(model).headline.slow
    model = fxprec.convert(nn.Sequential(nn.ReLU(), nn.Flatten()), dtype=torch.float16).module
    headline = fxprec.report(model).headline
    assert headline.slow == "" and "risk" not in str(headline)
