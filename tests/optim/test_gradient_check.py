"""One read of the gradients: flags and norm."""

import pytest
import torch
from torch import nn

from fxprec.optim import gradient_check
from fxprec.optim.kernel_updates import Plans

CPU = torch.device("cpu")


def check(parameters, scale, norm):
    return gradient_check.check(parameters, scale, norm, Plans())


def with_gradients(*gradients):
    parameters = []
    for gradient in gradients:
        parameter = nn.Parameter(torch.zeros(gradient.shape, dtype=gradient.dtype))
        parameter.grad = gradient
        parameters.append(parameter)
    return parameters


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan"), 0.0])
def test_inf_and_nan_are_found_in_any_dtype(dtype, bad, norm):
    gradients = [torch.randn(3, 5), torch.randn(17).to(dtype), torch.randn(())]
    gradients[1][16] += bad
    found = check(with_gradients(*gradients), None, norm).found_inf
    assert found.keys() == {CPU}
    assert bool(found[CPU] > 0) is (bad != 0)
    assert found[CPU].dtype is torch.float32


def test_large_finite_gradients_are_no_overflow():
    result = check(with_gradients(torch.full((10,), 3e38)), None, norm=True)
    assert result.found_inf[CPU] == 0
    assert result.norm == float("inf")  # in FP32, as torch's norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan"), 0.0])
def test_sums_tell_it_on_a_cpu(dtype, bad):
    """Of one dtype; a sum that overflows is looked at closely, and infinities do not cancel each other."""
    most = torch.finfo(dtype).max
    for large in (most, -most, 1.0):
        gradients = [torch.full((5000,), large, dtype=dtype), torch.ones(3, dtype=dtype), torch.ones(0, dtype=dtype)]
        gradients[1][1:] += bad
        gradients[0][7] -= bad
        assert bool(check(with_gradients(*gradients), None, norm=False).found_inf[CPU]) is (bad != 0)


def test_the_norm_is_that_of_all_gradients_in_fp32():
    torch.manual_seed(1)
    gradients = [torch.randn(300), torch.randn(7, 3).bfloat16(), torch.zeros(0), torch.randn(())]
    exact = torch.cat([g.double().flatten() for g in gradients]).norm()
    result = check(with_gradients(*gradients), None, norm=True)
    assert result.norm.dtype is torch.float32
    assert result.norm.item() == pytest.approx(exact.item(), rel=1e-6)


def test_the_divisor_is_scale_over_clip_coefficient():
    result = check(with_gradients(torch.tensor([300.0, 400.0])), torch.tensor(10.0), norm=True)
    assert result.norm == 50
    assert result.divisor(1000.0, torch.tensor(10.0)) == 10
    assert result.divisor(5.0, torch.tensor(10.0)).item() == pytest.approx(100, rel=1e-6)
    plain = check(with_gradients(torch.tensor([300.0, 400.0])), None, norm=True)
    assert plain.divisor(50.0, None).item() == pytest.approx(10, rel=1e-6)


@pytest.mark.parametrize("norm", [False, True])
def test_empty_and_no_gradients(norm):
    result = check(with_gradients(torch.zeros(0)), None, norm)
    assert result.found_inf[CPU] == 0
    nothing = check([], torch.tensor(2.0), norm)
    assert nothing.found_inf == {}
    assert (nothing.norm == 0) if norm else (nothing.norm is None)


def test_gradients_are_only_read():
    parameters = with_gradients(torch.randn(9), torch.randn(4).bfloat16())
    before = [(p.grad.clone(), p.grad._version) for p in parameters]
    check(parameters, torch.tensor(4.0), norm=True)
    assert all(torch.equal(p.grad, g) and p.grad._version == v for p, (g, v) in zip(parameters, before, strict=True))


def test_a_norm_that_overflows_only_with_the_scale_in_it():
    result = check(with_gradients(torch.full((4,), 2.0**66), torch.ones(3)), torch.tensor(2.0**16), norm=True)
    assert result.found_inf[CPU] == 0
    assert result.norm == 2.0**51


@pytest.mark.parametrize("place", [0, 5, 9])
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan"), 1.0])
def test_large_and_small_tensors_beside_each_other(place, bad):
    gradients = [torch.zeros(5000 if i in (5, 7) else i) for i in range(10)]
    if gradients[place].numel():
        gradients[place][-1] = bad
    found = check(with_gradients(*gradients), None, norm=False).found_inf[CPU]
    assert bool(found > 0) is (place > 0 and bad != 1.0)
