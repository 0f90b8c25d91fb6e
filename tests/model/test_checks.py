"""Models that are refused as they stand: each is left as it was, and told what to do. (More in test_convert.)"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

import fxprec


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class OwnDDP(DistributedDataParallel):
    """As other packages derive theirs."""


@pytest.mark.parametrize("wrapper", [DistributedDataParallel, nn.DataParallel, OwnDDP])
def test_wrapped_models(wrapper, process_group):
    wrapped = wrapper(nn.Linear(2, 2))
    x = torch.randn(3, 2)
    expected = wrapped(x)
    for model in (wrapped, nn.Sequential(wrapped)):
        kind = type(model)
        with pytest.raises(fxprec.ConversionError, match="convert first, then wrap"):
            fxprec.convert(model)
        assert type(model) is kind and torch.equal(model(x), expected)


def test_a_model_inside_fsdp1():
    wrapped = FullyShardedDataParallel.__new__(FullyShardedDataParallel)  # making one takes an accelerator
    nn.Module.__init__(wrapped)
    wrapped.training_state, wrapped._fsdp_wrapped_module = None, nn.Linear(2, 2)
    with pytest.raises(fxprec.ConversionError, match="convert first, then wrap"):
        fxprec.convert(wrapped)
    assert type(wrapped) is FullyShardedDataParallel


@pytest.mark.filterwarnings("ignore:.*quant")
@pytest.mark.parametrize("layer", [nn.Linear(4, 4), nn.LSTM(4, 4)])
def test_quantized_models(layer):
    model = torch.ao.quantization.quantize_dynamic(nn.Sequential(layer), {type(layer)}, dtype=torch.qint8)
    with pytest.raises(fxprec.ConversionError, match=r"0 is a quantized .*FP32 models"):
        fxprec.convert(model)
    assert type(model) is nn.Sequential


def test_quantized_tensors():
    model = nn.Linear(2, 2)
    model.register_buffer("packed", torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8))
    with pytest.raises(fxprec.ConversionError, match=r"Linear\.packed is quantized"):
        fxprec.convert(model)
    assert type(model) is nn.Linear


def test_integer_weights_beside_nothing_else_are_no_reason():
    """Weights that the forward itself makes FP32 are lowered like any."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4, dtype=torch.int8), requires_grad=False)

        def forward(self, x):
            return x @ (self.weight.float() * 0.1)

    model, _ = fxprec.convert(Scaled())
    assert model(torch.ones(2, 4)).dtype is torch.float32
    fxprec.testing.assert_precision(model, "matmul", torch.bfloat16)


@pytest.mark.parametrize(
    ("dtype", "compiler", "why"),
    [
        (torch.float16, "", "C\\+\\+ kernels are of bfloat16"),
        (torch.bfloat16, "no compiler", "no compiler"),
        (torch.bfloat16, "", ""),
    ],
)
def test_compiled_kernels_on_a_cpu(
    dtype: torch.dtype, compiler: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fxprec import settings

    monkeypatch.setattr(settings, "why_no_compiler", lambda: compiler)
    model = nn.Linear(2, 2)
    if not why:
        assert "bfloat16" in str(fxprec.report(fxprec.convert(model, dtype=dtype, fuse=True).module))
        return
    with pytest.raises(fxprec.ConversionError, match=f"fuse=True: {why}.*fuse='auto'"):
        fxprec.convert(model, dtype=dtype, fuse=True)
    assert type(model) is nn.Linear


def test_fusion_where_no_kernel_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """ "auto" on CUDA warns and goes on without; True is refused with the same words."""
    from fxprec import settings
    from fxprec.model import checks

    for module in (checks, settings):
        monkeypatch.setattr(module, "why_no_kernels", lambda device: "a test kernel failed: no compiler")
    policy = fxprec.Policy.preset("O1")
    auto = settings.Settings(policy, torch.bfloat16, device="cuda")
    assert auto.regions == ""
    with pytest.warns(UserWarning, match="no fused kernels: a test kernel failed: no compiler; torch's own serve"):
        checks.refuse_unfit(nn.Linear(2, 2), auto)
    with pytest.raises(fxprec.ConversionError, match="fuse=True: a test kernel failed: no compiler"):
        checks.refuse_unfit(nn.Linear(2, 2), settings.Settings(policy, torch.bfloat16, device="cuda", fuse=True))
    monkeypatch.setattr(settings, "why_no_kernels", lambda device: "")
    assert settings.Settings(policy, torch.bfloat16, device="cuda").regions == "triton"
    for options, words in [
        ({"policy": fxprec.Policy.preset("O0")}, "bit for bit"),
        ({"executor": "inductor"}, "leave"),
    ]:
        given = {"policy": policy, "dtype": torch.bfloat16, "device": "cuda", "fuse": True} | options
        with pytest.raises(fxprec.ConversionError, match=words):
            checks.refuse_unfit(nn.Linear(2, 2), settings.Settings(**given))
