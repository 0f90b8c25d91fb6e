"""Device costs: interpolation between measured sizes, what tables must hold, and their plain form."""

from __future__ import annotations

import json
import math

import pytest
import torch

from fxprec.passes.costs.device_costs import Curve, DeviceCosts, Work

FP32, BF16 = torch.float32, torch.bfloat16


def table(**seconds: float) -> dict[Work, Curve]:
    """Every kind of work at a microsecond a unit, but for those named."""
    return {work: Curve(((1.0, seconds.get(work.name.lower(), 1e-6)),)) for work in Work}


def costs(curves: dict[torch.dtype, dict[Work, Curve]]) -> DeviceCosts:
    return DeviceCosts("cpu", "a test", 2, "made by hand", curves)


def test_a_curve_runs_through_its_points_and_is_a_power_law_between():
    curve = Curve(((10.0, 1.0), (1000.0, 10.0), (4000.0, 40.0)))
    assert [curve(10.0), curve(1000.0), curve(4000.0)] == pytest.approx([1.0, 10.0, 40.0])
    assert curve(100.0) == pytest.approx(math.sqrt(10.0)), "half way between logarithms"
    assert curve(2000.0) == pytest.approx(20.0)


def test_beyond_its_ends_a_curve_is_a_call_s_time_and_a_rate():
    curve = Curve(((10.0, 3.0), (100.0, 5.0)))
    assert curve(1.0) == curve(0.0) == 3.0
    assert curve(1000.0) == pytest.approx(50.0)


@pytest.mark.parametrize(
    "points",
    [(), ((2.0, 1.0), (1.0, 2.0)), ((1.0, 1.0), (1.0, 2.0)), ((0.0, 1.0),), ((1.0, 0.0),), ((1.0, math.inf),)],
)
def test_points_that_are_no_curve(points):
    with pytest.raises(ValueError, match="ascending in work"):
        Curve(points)


def test_a_curve_of_an_overhead_and_a_rate():
    curve = Curve.linear(5e-6, 1e12)
    for work in (1.0, 1e5, 5e6, 3e8, 1e12):
        assert curve(work) == pytest.approx(5e-6 + work / 1e12, rel=0.1)


def test_a_faster_device_does_more_in_the_same_time():
    slow = Curve(((10.0, 3.0), (100.0, 5.0)))
    fast = slow.faster(4.0)
    assert (fast(40.0), fast(400.0), fast(4.0)) == pytest.approx((3.0, 5.0, 3.0))


def test_a_product_is_limited_by_arithmetic_or_by_memory():
    found = costs({FP32: table(matmul=1e-9, stream=1e-6), BF16: table()})
    assert found.product(FP32, 10_000.0, 5.0) == pytest.approx(1e-5)
    assert found.product(FP32, 10_000.0, 50.0) == pytest.approx(5e-5)


def test_a_table_holds_every_kind_of_work():
    without = {work: curve for work, curve in table().items() if work is not Work.ATTENTION}
    with pytest.raises(ValueError, match="bfloat16 has no curve for attention"):
        costs({FP32: table(), BF16: without})
    with pytest.raises(ValueError, match="bfloat16 has no curve for cast"):
        costs({FP32: table(), BF16: {work: curve for work, curve in table().items() if work is not Work.CAST}})
    with pytest.raises(ValueError, match="none of float32"):
        costs({BF16: table()})
    costs({FP32: {work: curve for work, curve in table().items() if work is not Work.CAST}, BF16: table()})


def test_the_plain_form_is_json_and_comes_back():
    found = costs({FP32: table(matmul=1.2345678901e-7), BF16: table(cast=2e-6)})
    assert DeviceCosts.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    with pytest.raises(ValueError, match="format 7"):
        DeviceCosts.from_dict({**found.to_dict(), "format": 7})


def test_what_it_says_of_itself():
    assert str(costs({FP32: table(), BF16: table()})) == "a test, 2 threads, made by hand"
    gpu = DeviceCosts("cuda", "a GPU", 0, "shipped", {FP32: table()})
    assert str(gpu) == "a GPU, shipped"
