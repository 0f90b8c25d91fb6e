"""What is unscaled: every kind of gradient, grouped by device and dtype, and the names in messages."""

import pytest
import torch
from torch import nn

from fxprec.scaling.gradients import ParameterNames, grouped, local, parameters_of, refuse_dtypes


def names_of(optimizer):
    return ParameterNames()(optimizer)


def with_gradients(*gradients):
    parameters = []
    for gradient in gradients:
        parameter = nn.Parameter(torch.zeros(gradient.shape, dtype=gradient.dtype))
        parameter.grad = gradient
        parameters.append(parameter)
    return parameters, torch.optim.SGD(parameters, lr=0.1)


def test_groups_are_of_one_device_and_dtype():
    gradients = [torch.ones(2), torch.ones(2, dtype=torch.float64), torch.ones(3), torch.ones(1, dtype=torch.bfloat16)]
    _, optimizer = with_gradients(*gradients)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})  # no gradient
    groups = grouped(optimizer, False, names_of)
    cpu = torch.device("cpu")
    assert {key: [id(t) for t in tensors] for key, tensors in groups.items()} == {
        (cpu, torch.float32): [id(gradients[0]), id(gradients[2])],
        (cpu, torch.float64): [id(gradients[1])],
        (cpu, torch.bfloat16): [id(gradients[3])],
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_duplicate_indices_are_added_up_before_the_check(dtype):
    """Each of the values is finite in float16, their sum is not."""
    gradient = torch.sparse_coo_tensor([[1, 1]], torch.full((2, 2), 6e4, dtype=dtype), (3, 2))
    (parameter,), optimizer = with_gradients(gradient)
    ((values,),) = grouped(optimizer, True, names_of).values()
    assert parameter.grad.is_coalesced() and values.shape == (1, 2)
    assert bool(values.isfinite().all()) is (dtype is torch.float32)
    values.zero_()
    assert not parameter.grad.to_dense().any()  # the gradient itself


def test_other_layouts_are_unscaled_in_place():
    parameter = nn.Parameter(torch.eye(2).to_sparse_csr())
    parameter.grad = torch.eye(2).to_sparse_csr()
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    ((values,),) = grouped(optimizer, False, names_of).values()
    values.mul_(3)
    assert torch.equal(parameter.grad.to_dense(), 3 * torch.eye(2))


def test_refusals_come_before_any_change():
    sparse = torch.sparse_coo_tensor([[1, 1]], torch.ones(2, 2), (3, 2))
    parameters, optimizer = with_gradients(sparse, torch.ones(2, dtype=torch.complex64))
    for refuse in (grouped, refuse_dtypes):
        with pytest.raises(TypeError, match=r"of shape \(2,\) \(torch.complex64\)"):
            refuse(optimizer, True, names_of)
    assert not parameters[0].grad.is_coalesced()
    _, halves = with_gradients(torch.ones(2, dtype=torch.float16))
    for refuse in (grouped, refuse_dtypes):
        with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
            refuse(halves, False, names_of)
        refuse(halves, True, names_of)


def test_sparse_float16_gradients_are_refused_too():
    sparse = torch.sparse_coo_tensor([[1]], torch.ones(1, 2, dtype=torch.float16), (3, 2))
    _, optimizer = with_gradients(sparse)
    with pytest.raises(ValueError, match="FP16"):
        grouped(optimizer, False, names_of)


def test_parameters_and_local_of_plain_tensors():
    parameters, optimizer = with_gradients(torch.ones(2), torch.ones(3))
    assert [id(p) for p in parameters_of(optimizer)] == [id(p) for p in parameters]
    assert local(parameters[0]) is parameters[0]
