"""The levels' defaults are apex's, every override has its effect, and refusals have apex's exception types."""

from __future__ import annotations

import pytest
import torch

from fxprec.amp._amp_state import Properties, properties_of

LOW = torch.bfloat16
F32 = torch.float32


def made(opt_level: str = "O1", **overrides: object) -> Properties:
    return properties_of(opt_level, LOW, overrides)


@pytest.mark.parametrize(
    "opt_level, cast, patch, batch_norm, masters, scale",
    [
        ("O0", F32, False, None, False, 1.0),
        ("O1", None, True, None, None, "dynamic"),
        ("O2", LOW, False, True, True, "dynamic"),
        ("O3", LOW, False, False, False, 1.0),
    ],
)
def test_defaults_are_those_of_apex(opt_level, cast, patch, batch_norm, masters, scale):
    properties = made(opt_level)
    assert properties.enabled and properties.opt_level == opt_level
    assert properties.cast_model_type == cast
    assert properties.patch_torch_functions is patch
    assert properties.keep_batchnorm_fp32 is batch_norm
    assert properties.master_weights is masters
    assert properties.loss_scale == scale
    assert properties.dynamic == (scale == "dynamic")
    assert properties.level == opt_level and properties.dtype is LOW


@pytest.mark.parametrize(
    "opt_level, overrides, level, dtype",
    [
        ("O1", {"patch_torch_functions": False}, "O0", LOW),
        ("O1", {"cast_model_type": torch.float16}, "O1", torch.float16),
        ("O1", {"cast_model_type": F32}, "O1", LOW),
        ("O2", {"cast_model_type": torch.float16}, "O2", torch.float16),
        ("O2", {"cast_model_type": F32}, "O0", LOW),
        ("O2", {"cast_model_type": False}, "O0", LOW),
        ("O2", {"master_weights": False}, "O3", LOW),
        ("O3", {"master_weights": True}, "O2", LOW),
        ("O0", {"cast_model_type": torch.float16}, "O3", torch.float16),
        ("O0", {"cast_model_type": torch.float16, "master_weights": True}, "O2", torch.float16),
        ("O0", {"master_weights": True}, "O0", LOW),
    ],
)
def test_properties_decide_the_conversion_not_the_level(opt_level, overrides, level, dtype):
    properties = made(opt_level, **overrides)
    assert (properties.level, properties.dtype) == (level, dtype)
    assert properties.has_functions == (level in ("O1", "O2"))


@pytest.mark.parametrize("given, kept", [("True", True), ("False", False), (True, True), (False, False)])
def test_keep_batchnorm_fp32_may_be_text(given, kept):
    assert made("O2", keep_batchnorm_fp32=given).keep_batchnorm_fp32 is kept


@pytest.mark.parametrize("given, scale", [("dynamic", "dynamic"), ("128.0", 128.0), (64, 64.0), (2.5, 2.5)])
def test_loss_scale_may_be_text(given, scale):
    assert made("O3", loss_scale=given).loss_scale == scale


def test_none_is_no_override():
    assert made("O2", master_weights=None, loss_scale=None, keep_batchnorm_fp32=None) == made("O2")


@pytest.mark.parametrize(
    "opt_level, overrides, error, words",
    [
        ("O4", {}, RuntimeError, "Unexpected optimization level 'O4'. Options are 'O0', 'O1', 'O2', 'O3'"),
        ("01", {}, RuntimeError, "the letter O, not the number zero"),
        (1, {}, RuntimeError, "Unexpected optimization level 1"),
        ("O2", {"patch_torch_functions": True}, RuntimeError, "only be set by selecting opt_level='O1'"),
        ("O1", {"keep_batchnorm_fp32": True}, RuntimeError, "keep_batchnorm_fp32 should be None"),
        ("O1", {"keep_batchnorm_fp32": "False"}, RuntimeError, "keep_batchnorm_fp32 was 'False'"),
        ("O1", {"master_weights": False}, RuntimeError, "doesn't make sense to use master_weights with O1"),
        ("O2", {"keep_batchnorm_fp32": "yes"}, AssertionError, "keep_batchnorm_fp32='yes'"),
        ("O2", {"keep_batchnorm_fp32": 1}, AssertionError, "keep_batchnorm_fp32=1"),
        ("O2", {"cast_model_type": "half"}, TypeError, "cast_model_type must be a torch.dtype"),
        ("O2", {"cast_model_type": torch.float64}, ValueError, "cast_model_type=torch.float64"),
        ("O1", {"loss_scale": "high"}, ValueError, "loss_scale must be 'dynamic' or finite"),
        ("O1", {"loss_scale": 0}, ValueError, "finite and greater than 0, not 0"),
        ("O1", {"loss_scale": float("inf")}, ValueError, "finite and greater than 0, not inf"),
    ],
)
def test_refusals_have_the_types_of_apex(opt_level, overrides, error, words):
    with pytest.raises(error) as refusal:
        made(opt_level, **overrides)
    assert words in str(refusal.value)


def test_printed_as_a_table_of_names_and_values():
    lines = str(made("O2")).splitlines()
    assert lines[1] == "opt_level              : O2" and lines[-1] == "loss_scale             : dynamic"
    assert len(lines) == 7
