"""Casts of arguments and results: floating-point tensors only, whatever they are in."""

from __future__ import annotations

import pickle
from typing import NamedTuple

import pytest
import torch
from torch import nn

from fxprec.amp.functions import cast_arguments, widest
from fxprec.amp.initialize import CastOutputs

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


class Pair(NamedTuple):
    a: torch.Tensor
    b: int


@pytest.mark.parametrize("dtype", [F16, BF16, F32])
def test_floats_are_cast_wherever_they_are(dtype):
    x = torch.ones(2)
    value = {"k": (x, [x.half()]), "pair": Pair(x.bfloat16(), 3), "n": 7, "s": "text"}
    cast = cast_arguments(value, dtype, "cpu")
    assert cast["k"][0].dtype is dtype and cast["k"][1][0].dtype is dtype
    assert isinstance(cast["pair"], Pair) and cast["pair"].a.dtype is dtype and cast["pair"].b == 3
    assert cast["n"] == 7 and cast["s"] == "text"
    assert value["k"][1][0].dtype is F16  # the caller's own is as it was


def test_whole_numbers_float64_and_other_devices_are_left_alone():
    kept = [torch.ones(2, dtype=torch.int64), torch.ones(2, dtype=F64), torch.ones(2, device="meta")]
    assert all(a is b for a, b in zip(cast_arguments(kept, BF16, "cpu"), kept, strict=True))


@pytest.mark.parametrize(
    "dtypes, expected",
    [((F32,), None), ((BF16, BF16), None), ((BF16, F32), F32), ((F16, BF16), F32), ((F64, BF16), None), ((), None)],
)
def test_the_widest_is_asked_for_only_where_dtypes_differ(dtypes, expected):
    tensors = [torch.ones(1, dtype=dtype) for dtype in dtypes]
    assert widest([tensors, {"mask": torch.ones(1, dtype=torch.bool)}]) == expected


def test_the_hook_casts_what_a_model_returns_and_travels_with_it():
    hook = pickle.loads(pickle.dumps(CastOutputs(BF16)))
    model = nn.Linear(2, 2)
    out = hook(model, (), {"logits": torch.ones(2), "wide": torch.ones(2, dtype=F64), "ids": torch.arange(2)})
    assert (out["logits"].dtype, out["wide"].dtype, out["ids"].dtype) == (BF16, BF16, torch.int64)
