"""Reasons that differ in figures only are one, which tells of all figures."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxprec
from fxprec.inspection.text import in_one, without_figures
from made_costs import device


@pytest.mark.parametrize(
    ("whys", "together"),
    [
        (["it sums"], "it sums"),
        (["takes 9.5 us in float32", "takes 16 us in float32"], "takes 9.5 to 16 us in float32"),
        (["a 64x32 @ 32x8", "a 8x32 @ 32x8", "a 64x8 @ 8x8"], "a 8x32 to 64x32 @ 8x8 to 32x8"),
        (["-1e+09 overflows", "-65504 overflows"], "-1e+09 to -65504 overflows"),
        (["modules 'a.0.up' (t.toml:3)", "modules 'a.1.up' (t.toml:4)"], "modules 'a.0-1.up' (t.toml:3 to 4)"),
        (["modules 'a.*.up'", "modules 'a.1.down'"], "modules 'a.*.up', 'a.1.down'"),
        ([f"nodes '{name}'" for name in "abcde"], "nodes 'a', 'b', 'c' and 2 more"),
        (["the user's cast, its reader's", "the user's cast, its reader's"], "the user's cast, its reader's"),
    ],
)
def test_in_one(whys: list[str], together: str) -> None:
    assert len({*map(without_figures, whys)}) == 1 and in_one(whys) == together


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("computes in float32", "computes in float16"),
        ("layer norm of h1", "layer norm of h2"),
        ("the user's a, the reader's", "the user's b, the reader's"),
        ("takes 9 us", "takes 9 ms"),
    ],
)
def test_other_reasons_are_others(one: str, other: str) -> None:
    assert without_figures(one) != without_figures(other)


def stays(**how: object) -> list[str]:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)), nn.Linear(8, 4))
    settings: dict = {"dtype": torch.bfloat16, **how}
    return [*map(str, fxprec.report(fxprec.convert(model, (torch.randn(2, 8),), **settings).module).headline.stays)]


def test_overrides_of_many_nodes_are_a_line() -> None:
    names = ("linear", "linear_1", "linear_2", "linear_3", "linear_4")
    policy = fxprec.Policy.preset("O1").override(nodes=dict.fromkeys(names, torch.float32))
    assert stays(policy=policy) == [
        "5 linear: override nodes 'linear', 'linear_1', 'linear_2' and 2 more = float32 (in modules 0-4)"
    ]


def test_ops_that_do_not_pay_are_a_line() -> None:
    (line,) = stays(lower=device(1, 30, cast=1))
    assert line.startswith("6 linear: pays: linear 2x8 @ 8x4 to 8x8 takes") and line.endswith("(in modules 0-5)")
