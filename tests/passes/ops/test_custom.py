from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import fxprec
from fxprec.passes import torch_internals
from fxprec.passes.ops.custom import registered, registered_autocast


@pytest.fixture(scope="module")
def library() -> Iterator[torch.library.Library]:
    """Ops of the two kinds that torch knows: of a Library, and by the custom_op decorator (fxtest::decorated)."""
    made = torch.library.Library("fxtest", "FRAGMENT")

    @torch.library.custom_op("fxtest::decorated", mutates_args=())
    def decorated(x: Tensor) -> Tensor:
        return x.clone()

    made.define("plain(Tensor x) -> Tensor")
    made.define("silent(Tensor x) -> Tensor")
    torch.library.register_autocast("fxtest::decorated", "cpu", torch.bfloat16)
    torch.library.register_autocast("fxtest::plain", "cpu", torch.float32, lib=made)
    yield made
    made._destroy()


def test_only_ops_that_torch_has_are_registered(library):
    for name in ("fxtest::plain", "fxtest::decorated", "fxtest::decorated.default", "aten::mm"):
        assert registered(name) is not None
    for name in ("fxtest::absent", "nowhere::op", "linear", "::", "aten::", "::mm", ""):
        assert registered(name) is None
    assert not {"linear", ""} & set(vars(torch.ops))  # asking leaves no namespaces behind


def test_register_autocast_is_honoured(library):
    assert registered_autocast("fxtest::decorated", "cpu") is torch.bfloat16
    assert registered_autocast("fxtest::decorated.default", "cpu") is torch.bfloat16
    assert registered_autocast("fxtest::plain", "cpu") is torch.float32
    assert registered_autocast("fxtest::plain", "cuda") is None
    assert registered_autocast("fxtest::plain") is torch.float32
    for other in ("fxtest::silent", "fxtest::absent", "nowhere::op", "linear", "::", "aten::mm"):
        assert registered_autocast(other) is None
    with torch.autocast("cpu"):
        assert torch.ops.fxtest.decorated(torch.ones(1)).dtype is torch.bfloat16  # the promise that we keep


def test_older_versions_of_torch_keep_the_registration_elsewhere(library, monkeypatch):
    old = SimpleNamespace(_autocast_cpu_dtype=torch.float16, _autocast_cuda_dtype=None)
    monkeypatch.setattr(torch_internals, "_definitions", {"fxtest::silent": old})
    assert registered_autocast("fxtest::silent", "cpu") is torch.float16
    assert registered_autocast("fxtest::silent", "cuda") is None


class Doubled(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        y = torch.ops.fxtest_low.twice(self.fc(x))
        return y, torch.ops.fxtest_low.twice(x), torch.relu(y), y + x


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("capture", ["symbolic", "dynamo"])
@pytest.mark.parametrize("placement", ["mincut", "autocast"])
def test_its_results_leave_the_graph_in_their_original_dtype(low, capture, placement):
    """dynamo sees the op under autocast, where its results are low although an FP32 input came in."""
    made = torch.library.Library("fxtest_low", "FRAGMENT")
    try:
        made.define("twice(Tensor x) -> Tensor")
        made.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        torch.library.register_autocast("fxtest_low::twice", "cpu", low, lib=made)
        model, x = Doubled(), torch.randn(2, 4)
        want = model(x)
        got = fxprec.convert(model, dtype=torch.bfloat16, capture=capture, placement=placement)[0](x)
        for ours, theirs in zip(got, want, strict=True):
            assert ours.dtype is torch.float32
            torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02)
    finally:
        made._destroy()
