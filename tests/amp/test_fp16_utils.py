"""The helpers for half models by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fxprec import fp16_utils
from fxprec.fp16_utils import (
    BN_convert_float,
    FP16Model,
    convert_module,
    convert_network,
    master_params_to_model_params,
    model_grads_to_master_grads,
    network_to_half,
    prep_param_lists,
    to_python_float,
    tofp16,
)

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def net():
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.BatchNorm1d(3, affine=False), nn.Linear(3, 2))


def dtypes(module):
    return [t.dtype for t in (*module.parameters(), *module.buffers()) if t.is_floating_point()]


#: weights and biases of linear, batch norm, linear; running statistics of both batch norms
KEPT = [F16, F16, F32, F32, F16, F16, F32, F32, F16, F16]


def test_a_network_becomes_half_but_for_batch_norms_with_parameters():
    model = network_to_half(net())
    assert dtypes(model) == KEPT and isinstance(model[0], tofp16)
    assert dtypes(convert_network(net(), F16)) == KEPT
    assert dtypes(FP16Model(net())) == KEPT
    assert dtypes(BN_convert_float(net().half())) == KEPT


@pytest.mark.parametrize("make", [network_to_half, FP16Model])
def test_half_models_take_fp32_inputs(make):
    assert make(net(), BF16)(torch.randn(5, 4)).dtype is BF16
    assert tofp16()(torch.ones(1)).dtype is F16


def test_an_fp16_model_leaves_whole_numbers_alone():
    model = FP16Model(nn.Embedding(5, 2), BF16)
    assert model(torch.arange(3)).dtype is BF16


def test_convert_module_converts_its_own_tensors_and_their_gradients_only():
    model = net()
    model(torch.randn(5, 4)).sum().backward()
    gradient = model[0].weight.grad.clone()
    convert_module(model, BF16)
    assert dtypes(model) == [F32] * 10
    convert_module(model[0], BF16)
    assert model[0].weight.dtype is BF16 and torch.equal(model[0].weight.grad, gradient.bfloat16())
    convert_module(model[1], F16)
    assert model[1].running_mean.dtype is F16 and model[1].num_batches_tracked.dtype is torch.int64


def test_recurrent_weights_stay_in_one_piece(monkeypatch):
    lstm, flattened = nn.LSTM(3, 2), []
    monkeypatch.setattr(
        nn.LSTM, "flatten_parameters", lambda self: flattened.append({p.dtype for p in self.parameters()})
    )
    model = convert_network(lstm, BF16)
    assert flattened == [{BF16}]
    assert model(torch.randn(4, 1, 3).to(BF16))[0].dtype is BF16


@pytest.mark.parametrize("flat", [False, True])
def test_masters_by_hand(flat):
    model = nn.Linear(4, 3).to(BF16)
    model.register_parameter("frozen", nn.Parameter(torch.zeros(2), requires_grad=False))
    params, masters = prep_param_lists(model, flat_master=flat)
    assert [id(p) for p in params] == [id(model.weight), id(model.bias)]
    assert [m.numel() for m in masters] == ([15] if flat else [12, 3])
    assert all(m.dtype is F32 and m.requires_grad and m.is_leaf for m in masters)
    model(torch.randn(5, 4).to(BF16)).float().square().sum().backward()
    model_grads_to_master_grads(params, masters, flat)
    expected = [p.grad.float() for p in params]
    given = torch.cat([m.grad.flatten() for m in masters])
    assert torch.equal(given, torch.cat([g.flatten() for g in expected]))
    torch.optim.SGD(masters, lr=0.5).step()
    before = [p.detach().clone() for p in params]
    master_params_to_model_params(params, masters, flat)
    for parameter, old, gradient in zip(params, before, expected, strict=True):
        assert torch.equal(parameter, (old.float() - 0.5 * gradient).to(BF16))


def test_a_parameter_without_gradient_has_a_master_without():
    model = nn.Linear(2, 2).to(BF16)
    params, masters = prep_param_lists(model)
    model.weight.grad = torch.ones_like(model.weight)
    masters[1].grad = torch.ones(2)
    model_grads_to_master_grads(params, masters)
    assert masters[0].grad.dtype is F32 and masters[1].grad is None
    params, flat = prep_param_lists(model, flat_master=True)
    model_grads_to_master_grads(params, flat, flat_master=True)
    assert flat[0].grad.tolist() == [1, 1, 1, 1, 0, 0]


def test_a_flat_master_of_several_dtypes_is_refused():
    with pytest.raises(TypeError, match="flat_master=True wants parameters of one dtype"):
        prep_param_lists(convert_network(net(), BF16), flat_master=True)


def test_small_things():
    assert to_python_float(torch.tensor([2.5])) == 2.5 and to_python_float([3.0, 4.0]) == 3.0
    assert fp16_utils.clip_grad_norm is torch.nn.utils.clip_grad_norm_
    assert {"FP16_Optimizer", "LossScaler", "DynamicLossScaler"} <= set(fp16_utils.__all__)
