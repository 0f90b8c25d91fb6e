"""The harness itself: planted faults are found, and what is listed as known is there."""

from __future__ import annotations

import importlib
import pathlib
from collections import Counter
from collections.abc import Callable

import pytest
import torch

import fxprec
from tests.hostile.counting import counted
from tests.hostile.harness import Case, Run, check
from tests.hostile.known import KNOWN
from tests.hostile.models import Net, net


def wrong(run: Callable[[Run], None], capture: str = "auto", **special: str) -> str:
    """What the harness says about a case."""
    with counted() as products, pytest.raises(pytest.fail.Exception) as caught:
        check(Case(run, **special), [capture], products)
    return str(caught.value)


def planted(wrongly: Callable[[Run, torch.nn.Module, torch.Tensor], object]) -> Callable[[Run], None]:
    """A case that does something else where the model is converted."""

    def run(t: Run) -> None:
        model, x = t.convert(Net()), t.randn(4, 8)
        t(lambda x: wrongly(t, model, x) if t.ours else model(x), x)

    return run


def test_what_is_right_passes() -> None:
    with counted() as products:
        check(Case(planted(lambda t, m, x: m(x))), ["auto"], products)


def test_numbers() -> None:
    assert "call0.['out']: off by" in wrong(planted(lambda t, m, x: m(x) * 1.1))


def test_dtype() -> None:
    assert "call0.['out']: torch.bfloat16, expected torch.float32" in wrong(planted(lambda t, m, x: m(x).bfloat16()))


def test_missing_graph() -> None:
    assert "False" in wrong(planted(lambda t, m, x: m(x).detach()))


def test_an_input_that_was_written() -> None:
    assert "call0.['in'].[0]: off by" in wrong(planted(lambda t, m, x: (m(x), x.add_(1))[0]))


def test_random_state() -> None:
    assert "random.[2]" in wrong(planted(lambda t, m, x: (m(x), torch.rand(1))[0]))


def test_state_left_behind() -> None:
    assert "state model0.n: not there" in wrong(planted(lambda t, m, x: (m(x), setattr(m, "n", 1))[0]))


def test_a_forward_that_runs_twice() -> None:
    def run(t: Run) -> None:
        calls: list[int] = []
        model, x = t.convert(net(lambda s, x: (calls.append(1), s.l(x))[1])), t.randn(4, 8)
        t(model, x)
        if t.ours:
            t.quiet(model, x)
        t.see("calls", calls)

    assert "calls.[1]: not there" in wrong(run, "dynamo")


def test_fp32() -> None:
    def in_fp32(t: Run, m: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        with fxprec.original(m):
            return m(x)

    assert "products run in {torch.float32: 1}, under autocast in {torch.bfloat16: 1}" in wrong(planted(in_fp32))


def test_a_twin_that_is_none() -> None:
    def run(t: Run) -> None:
        model, x = t.convert(Net()), t.randn(4, 8)
        t(lambda x: model(x) * (2 if t.variant == "fp64" else 1), x)

    assert "no twin" in wrong(run)


def test_known_faults_are_of_cases_that_there_are() -> None:
    files = pathlib.Path(__file__).parent.glob("cases_*.py")
    groups = [importlib.import_module(f"tests.hostile.{file.stem}").CASES for file in files]
    names = [f"{group.group}-{case.name}" for group in groups for case in group]
    assert not [name for name, count in Counter(names).items() if count > 1]
    assert KNOWN.keys() <= set(names)
