"""Two regions share row programs if and only if their graphs do the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import region_tools as tools
from fxprec.kernels.rows.program.region_graph import structure_of


def of(function: Any) -> str:
    return structure_of(tools.graph_of(function))


def test_names_do_not_matter() -> None:
    assert of(lambda x, y: F.silu(x) * y) == of(lambda a, b: F.silu(a) * b)
    assert of(lambda x: x * 2) == of(lambda x: torch.mul(x, 2))  # one op, however it is spelled


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda x, y: x - y, lambda x, y: y - x),
        (lambda x: x * 2, lambda x: x * 3),
        (lambda x: x * 2, lambda x: x * 2.0),
        (lambda x: x * 0.0, lambda x: x * -0.0),
        (lambda x: x * 1.0, lambda x: x * True),
        (lambda x: F.gelu(x), lambda x: F.gelu(x, approximate="tanh")),
        (lambda x: (x * 2, x + 1), lambda x: (x + 1, x * 2)),
        (lambda x, y: x * 2, lambda x: x * 2),
        (lambda x: x.to(torch.float16), lambda x: x.to(torch.bfloat16)),
        (lambda x: x.sum(-1), lambda x: x.sum(-1, keepdim=True)),
        (lambda x: torch.softmax(x, -1), lambda x: torch.log_softmax(x, -1)),
        (lambda x: (x * 2) * (x * 2), lambda x: (lambda y: y * y)(x * 2)),
    ],
)
def test_what_they_compute_does(one: Any, other: Any) -> None:
    assert of(one) != of(other)


def test_casts_of_ours_are_not_the_users() -> None:
    one, other = (tools.graph_of(lambda x: x.to(torch.float16) * 2) for _ in range(2))
    next(node for node in other.graph.nodes if node.name == "to").meta["inserted"] = True
    assert structure_of(one) != structure_of(other)
    assert structure_of(one) is structure_of(one)  # found once
