"""What is accepted: the good side of the checks. (The bad one: test_scaler_bad_input.)"""

from fractions import Fraction

import numpy as np
import pytest
import torch

from fxprec.errors import LossScaleError
from fxprec.scaling import scale as arguments
from fxprec.scaling.loss_scaler import LossScaler


@pytest.mark.parametrize("value", [1, 65536.0, np.float32(8), np.int64(4), Fraction(1, 4), 2.0**-126, 2.0**127])
def test_scales(value):
    scale = arguments.checked_scale("scale", value)
    assert scale == value and type(scale) is float
    assert torch.full((), scale).item() == scale and torch.full((), scale).reciprocal().isfinite()


def test_the_limits_are_those_of_float32():
    assert arguments.LARGEST_SCALE == torch.finfo(torch.float32).max
    assert arguments.SMALLEST_SCALE == torch.finfo(torch.float32).tiny


def test_factors_and_intervals():
    assert arguments.checked_factors(1.001, np.float64(0.999)) == (1.001, 0.999)
    assert arguments.checked_count("interval", np.int32(5), 1) == 5
    assert type(arguments.checked_count("interval", np.int32(5), 1)) is int
    assert arguments.checked_bounds(None, 4.0, None) == (None, None)
    assert arguments.checked_bounds(4, 4.0, 4) == (4.0, 4.0)


def test_the_state_of_the_first_loss_is_torchs():
    state = {
        "scale": 8.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 3,
        "_growth_tracker": 2,
        "fxprec": {
            "losses": [
                {"scale": 1.0, "growth_tracker": 0, "hysteresis_left": 3},
                {"scale": 4.0, "growth_tracker": 1, "hysteresis_left": 2},
            ]
        },
    }
    assert arguments.checked_state(state, 2) == [
        {"scale": 8.0, "growth_tracker": 2, "hysteresis_left": 3},
        {"scale": 4.0, "growth_tracker": 1, "hysteresis_left": 2},
    ]
    del state["fxprec"]
    assert arguments.checked_state(state, 2) == [{"scale": 8.0, "growth_tracker": 2}] * 2


@pytest.mark.parametrize(("args", "kwargs"), [((None,), {}), ((), {"closure": None}), ((3,), {"other": len})])
def test_no_closure_is_none(args, kwargs):
    with pytest.raises(AssertionError, match="Attempted step but _scale is None"):  # which is looked at afterwards
        LossScaler("cpu").step(object(), *args, **kwargs)


def test_bounds_that_cross_say_so():
    with pytest.raises(LossScaleError, match=r"^min_scale=10 is above max_scale=1$"):
        arguments.checked_bounds(10, 5.0, 1)
