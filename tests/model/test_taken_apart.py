"""Who traces a converted model is told to trace first, and convert then."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxprec


def test_a_trace_of_a_converted_model_is_told_the_order():
    model, _ = fxprec.convert(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), dtype=torch.bfloat16)
    with pytest.raises(fxprec.ConversionError, match=r"create_feature_extractor .*: first those, then fxprec\.convert"):
        torch.fx.symbolic_trace(model)
    extracted = torch.fx.symbolic_trace(fxprec.revert(model))
    converted, _ = fxprec.convert(extracted, dtype=torch.bfloat16)
    assert converted(torch.randn(2, 4)).shape == (2, 4)
