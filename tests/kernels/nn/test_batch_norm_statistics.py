"""Statistics of channels: no digits lost to a large mean or to an outlier, and running statistics as torch has them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import kernel_tools
from fxprec.kernels.nn.batch_norm_statistics import STATISTICS, channel_statistics

#: Where there is no Triton, or on a CPU, the op is plain torch: both forms are held to the same.
FORMS = [*kernel_tools.DEVICES, *([] if kernel_tools.INTERPRETING else [pytest.param("cpu", id="plain")])]
every_form = pytest.mark.parametrize("device", FORMS)
#: Several parts with several steps each; a few steps in one part; planes.
LAYOUTS = [((2, 16, 61, 83), True), ((37, 200), False), ((5, 3, 31, 77), False), ((3, 9, 45, 29), False)]
EPS = 1e-5


@pytest.mark.slow
def test_the_kernels_in_the_interpreter() -> None:
    kernel_tools.run_in_the_interpreter(__file__)


def laid_out(x: Tensor, last: bool) -> Tensor:
    return x.movedim(1, -1).contiguous().movedim(-1, 1) if last else x.contiguous()


def check(x: Tensor, tolerance: float) -> None:
    """Mean to the deviation's digits and rstd to its own, relative to float64."""
    mean, rstd = STATISTICS(x, None, None, 0.1, EPS)
    assert mean.dtype == rstd.dtype == torch.float32
    var, center = torch.var_mean(x.double(), dim=[0, *range(2, x.dim())], correction=0)
    away = (mean.double() - center).abs() * (var + EPS).rsqrt()
    assert float(away.max()) <= tolerance + 2.0**-23 * float((center.abs() * (var + EPS).rsqrt()).max())
    assert float((rstd.double() * (var + EPS).sqrt() - 1).abs().max()) <= tolerance


@every_form
@pytest.mark.parametrize(("shape", "last"), LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_statistics_are_float64s(device: str, shape: tuple[int, ...], last: bool, dtype: torch.dtype) -> None:
    check(laid_out(torch.randn(shape).to(device, dtype), last), 2e-6)


@every_form
@pytest.mark.parametrize(("shape", "last"), LAYOUTS)
def test_a_mean_of_ten_thousand_deviations_costs_nothing(device: str, shape: tuple[int, ...], last: bool) -> None:
    """``E[x**2] - E[x]**2`` in FP32 would be all noise: x**2 is 1e8, of which FP32 holds no more than units."""
    check(laid_out((torch.randn(shape) + 1e4).to(device), last), 4e-5)


@every_form
@pytest.mark.parametrize("place", [0, -1])
def test_one_outlier_does_not_hide_the_others(device: str, place: int) -> None:
    """A shift by the first value would be a shift by the outlier."""
    x = torch.randn(4000, 3)
    x[place] = 30000.0
    check(x.to(device), 1e-5)


@every_form
def test_a_constant_channel_has_no_variance_at_all(device: str) -> None:
    x = torch.full((2, 16, 61, 83), 1234.567).to(device).to(memory_format=torch.channels_last)
    mean, rstd = STATISTICS(x, None, None, 0.1, EPS)
    assert torch.equal(mean, x[0, :, 0, 0])
    # A root and a division, each rounded: at most a unit from 1 / sqrt(eps). Any noise in the mean makes a thousand.
    expected = torch.full_like(rstd, EPS).double().rsqrt().float()
    assert kernel_tools.ulps(rstd, expected) <= 1


@every_form
def test_values_near_the_end_of_the_range_of_fp32_do_not_overflow(device: str) -> None:
    x = (torch.rand(3, 4, 30, 50) * 1e12 + 1e25).to(device)
    mean, rstd = STATISTICS(x, None, None, 0.1, EPS)
    torch.testing.assert_close(mean, torch.full_like(mean, 1e25), rtol=1e-6, atol=0)
    assert rstd.isfinite().all() and (rstd > 0).all()


@every_form
@pytest.mark.parametrize("momentum", [0.0, 1 / 3, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("which", ["both", "mean", "var"])
def test_running_statistics_are_torchs(device: str, momentum: float, dtype: torch.dtype, which: str) -> None:
    x = (torch.randn(3, 20, 4, 5) * 3 + 2).to(device)
    ours = [torch.linspace(-2, 2, 20).to(device, dtype), torch.linspace(0.5, 3, 20).to(device, dtype)]
    torchs = [r.float() for r in ours]
    F.batch_norm(x, *torchs, training=True, momentum=momentum)
    before = [r.clone() for r in ours]
    given = [r if which in ("both", name) else None for r, name in zip(ours, ("mean", "var"), strict=True)]
    STATISTICS(x, *given, momentum, EPS)
    for running, expected, old, handed in zip(ours, torchs, before, given, strict=True):
        expected = old if handed is None else expected.to(dtype)
        tolerance = 2e-6 if dtype == torch.float32 else 2.0**-10
        torch.testing.assert_close(running, expected, rtol=tolerance, atol=tolerance)
        assert running._version == (0 if handed is None else running._version) and (handed is None or running._version)


@every_form
def test_the_statistics_of_two_values_are_exact(device: str) -> None:
    running = torch.zeros(1, device=device)
    mean, rstd = STATISTICS(torch.tensor([[1.0], [4.0]], device=device), None, running, 1.0, 0.0)
    assert mean.item() == 2.5 and rstd.item() == pytest.approx(1 / 1.5, rel=1e-7) and running.item() == 4.5


def test_the_plain_form_can_be_differentiated() -> None:
    x = torch.randn(3, 2, 4, dtype=torch.float32, requires_grad=True)
    mean, var = channel_statistics(x)
    (mean.sum() + var.sum()).backward()
    expected = (1 + 2 * (x.detach() - mean.detach().view(1, 2, 1))) / 12
    assert x.grad is not None
    torch.testing.assert_close(x.grad, expected)
