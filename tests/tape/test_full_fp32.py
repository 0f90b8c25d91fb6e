"""A reference in FP32 is FP32, whatever rounding a user allows in the products of the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fxprec.tape.adjoint import terms
from fxprec.tape.exact_ops import EXACT
from fxprec.tape.operation import full_fp32
from fxprec.tape.recorder import OpRecorder

backends: Any = torch.backends
KINDS: dict[str, Any] = {
    "matmul on CUDA": backends.cuda.matmul, "convolution on CUDA": backends.cudnn.conv,
    "RNN on CUDA": backends.cudnn.rnn, "matmul on a CPU": backends.mkldnn.matmul,
    "convolution on a CPU": backends.mkldnn.conv, "RNN on a CPU": backends.mkldnn.rnn,
}  # fmt: skip


def set_precision() -> dict[str, str]:
    return {kind: backend.fp32_precision for kind, backend in KINDS.items()}


def by_the_older_way() -> None:
    torch.set_float32_matmul_precision("medium")


def by_the_newer_way() -> None:
    for backend in KINDS.values():
        backend.fp32_precision = "tf32"


@pytest.fixture(params=[by_the_older_way, by_the_newer_way])
def allowed(request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    """What a user allows."""
    before = set_precision()
    request.param()
    found = set_precision()
    assert "tf32" in found.values()
    yield found
    torch.set_float32_matmul_precision("highest")
    for kind, precision in before.items():
        KINDS[kind].fp32_precision = precision


def test_all_of_it_is_full_within_and_as_it_was_behind(allowed: dict[str, str]) -> None:
    with pytest.raises(KeyError), full_fp32():
        assert set(set_precision().values()) <= {"ieee", "none"}
        raise KeyError
    assert set_precision() == allowed


def test_run_and_reference_each_have_their_own(allowed: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, str]] = []

    def noted(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*args: Any) -> Tensor:
            seen.append(set_precision())
            return function(*args)

        return call

    monkeypatch.setitem(EXACT, "aten::silu", noted(torch.ops.aten.silu.default))
    recorder = OpRecorder(torch.float32)
    with recorder, torch.no_grad():
        result = torch.nn.functional.silu(torch.randn(5).bfloat16())
        assert set_precision() == allowed
    [*terms(recorder, [(recorder.memory.place(result), torch.ones(5))])]
    assert len(seen) == 3, "beside the run, at its inputs, and at the midpoint"
    assert all(set(each.values()) <= {"ieee", "none"} for each in seen)
    assert set_precision() == allowed
