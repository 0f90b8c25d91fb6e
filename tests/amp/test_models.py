"""Models through ``initialize``: what each property makes of batch norms, parameters, outputs and checkpoints."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxprec
from fxprec import amp
from fxprec.amp._amp_state import AmpState, state
from fxprec.amp.initialize import check_models, device_of
from fxprec.model.conversion import conversion_of, is_converted
from fxprec.testing import assert_precision

BF16, F32 = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def _fresh_state():
    before = dict(vars(state))
    vars(state).update(vars(AmpState()))
    yield
    vars(state).update(before)


class CNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.bn = nn.BatchNorm2d(4)
        self.plain = nn.BatchNorm2d(4, affine=False)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(F.relu(self.plain(self.bn(self.conv(x)))).mean((2, 3)))


def started(model=None, optimizer=None, **options):
    return amp.initialize(CNN() if model is None else model, optimizer, **{"verbosity": 0, **options})


def images():
    return torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(0))


def dtypes(model):
    return {name: parameter.dtype for name, parameter in model.named_parameters()}


def all_in(dtype, **others):
    return {name: others.get(name.split(".")[0], dtype) for name in dict(CNN().named_parameters())}


@pytest.mark.parametrize("opt_level, lowered", [("O0", False), ("O1", True), ("O2", True)])
def test_parameters_stay_fp32_and_are_the_masters(opt_level, lowered, tools):
    model = CNN()
    before = {name: (p, p.detach().clone()) for name, p in model.named_parameters()}
    assert started(model, opt_level=opt_level) is model
    assert tools.matmul_dtypes(model, images()) == {BF16 if lowered else F32: 2}
    assert dtypes(model) == all_in(F32)
    assert all(p is before[name][0] and torch.equal(p, before[name][1]) for name, p in model.named_parameters())


def test_o1_without_patched_functions_lowers_nothing(tools):
    model = started(opt_level="O1", patch_torch_functions=False)
    assert tools.matmul_dtypes(model, images()) == {F32: 2}


@pytest.mark.parametrize("opt_level", ["O1", "O2", "O3"])
def test_cast_model_type_is_what_it_lowers_to(opt_level, tools):
    model = started(opt_level=opt_level, cast_model_type=torch.float16)
    assert tools.matmul_dtypes(model, images()[:1]) == {torch.float16: 2}
    assert model(images()[:1]).dtype is F32


@pytest.mark.parametrize("value", [F32, False])
def test_a_cast_to_fp32_lowers_nothing(value, tools):
    model = started(opt_level="O2", cast_model_type=value)
    assert tools.matmul_dtypes(model, images()) == {F32: 2}


@pytest.mark.parametrize(
    "options, computes",
    [
        ({"opt_level": "O1"}, F32),
        ({"opt_level": "O2"}, F32),
        ({"opt_level": "O2", "keep_batchnorm_fp32": False}, BF16),
        ({"opt_level": "O2", "keep_batchnorm_fp32": "True"}, F32),
        ({"opt_level": "O3"}, BF16),
        ({"opt_level": "O3", "keep_batchnorm_fp32": "True"}, F32),
        ({"opt_level": "O2", "master_weights": False}, F32),
        ({"opt_level": "O3", "master_weights": True}, BF16),
    ],
)
def test_keep_batchnorm_fp32_decides_what_batch_norms_compute_in(options, computes):
    model = started(**options)
    model(images())
    assert_precision(model, "bn", computes)
    assert model.bn.running_mean.dtype is F32 and model.plain.running_var.dtype is F32


def test_kept_parameters_are_read_as_they_are():
    graph = fxprec.graph_module(started(opt_level="O3", keep_batchnorm_fp32=True)).graph
    (weight,) = [node for node in graph.find_nodes(op="get_attr") if node.target == "bn.weight"]
    assert [user.target for user in weight.users] == [F.batch_norm]


def test_a_batch_norm_without_parameters_is_lowered_with_the_rest():
    model = started(opt_level="O3", keep_batchnorm_fp32=True)
    assert_precision(model, "bn", F32)
    assert_precision(model, "plain", BF16)


@pytest.mark.parametrize(
    "options, expected",
    [
        ({"opt_level": "O3"}, all_in(BF16)),
        ({"opt_level": "O3", "keep_batchnorm_fp32": True}, all_in(BF16, bn=F32)),
        ({"opt_level": "O2", "master_weights": False}, all_in(BF16, bn=F32)),
        ({"opt_level": "O2", "master_weights": False, "keep_batchnorm_fp32": False}, all_in(BF16)),
        ({"opt_level": "O3", "master_weights": True}, all_in(F32)),
        ({"opt_level": "O0", "cast_model_type": BF16}, all_in(BF16)),
    ],
)
def test_without_master_weights_the_parameters_become_low(options, expected):
    original = CNN()
    values = {name: parameter.detach().clone() for name, parameter in original.named_parameters()}
    model = started(original, **options)
    assert dtypes(model) == expected
    assert all(torch.equal(p, values[name].to(p.dtype)) for name, p in model.named_parameters())
    loss = model(images()).square().mean()
    assert loss.dtype is F32
    loss.backward()
    assert all(parameter.grad.dtype is parameter.dtype for parameter in model.parameters())


@pytest.mark.parametrize("options", [{"opt_level": "O3"}, {"opt_level": "O2", "master_weights": False}])
def test_checkpoints_are_fp32_at_every_level_and_load_at_every_other(options):
    model = started(**options)
    saved = model.state_dict()
    assert {value.dtype for value in saved.values()} == {F32, torch.int64}
    assert list(saved) == list(CNN().state_dict())
    other = started(opt_level="O2")
    other.load_state_dict(saved)
    again = started(**options)
    again.load_state_dict(other.state_dict())
    assert dtypes(again) == dtypes(model)
    assert all(map(torch.equal, again.parameters(), model.parameters()))


def test_a_batch_norm_alone_is_kept_too():
    norm = started(nn.BatchNorm1d(3), opt_level="O3", keep_batchnorm_fp32=True)
    assert {p.dtype for p in norm.parameters()} == {F32}
    norm(torch.randn(4, 3))
    assert_precision(norm, "op:batch_norm", F32)


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float64])
def test_cast_model_outputs_casts_what_comes_out(dtype):
    model = started(opt_level="O1", cast_model_outputs=dtype)
    assert model(images()).dtype is dtype
    assert copy.deepcopy(model)(images()).dtype is dtype


def test_outputs_of_o0_can_be_cast_too(tools):
    model = started(opt_level="O0", cast_model_outputs=BF16)
    assert tools.matmul_dtypes(model, images()) == {F32: 2}
    assert model(images()).dtype is BF16


def test_a_wrapped_model_is_refused():
    with pytest.raises(RuntimeError, match=r"(?s)instance of torch\.nn.*\.DataParallel.*AFTER"):
        check_models([nn.DataParallel(CNN())])


@pytest.mark.parametrize("dtype", [torch.float16, BF16])
def test_a_half_model_is_refused(dtype):
    model = CNN().to(dtype)
    with pytest.raises(RuntimeError, match=rf"Found param conv\.weight with type {dtype}, expected torch.float32"):
        started(model)
    assert type(model) is CNN
    model = CNN()
    model.register_buffer("table", torch.zeros(2, dtype=dtype))
    with pytest.raises(RuntimeError, match="Found buffer table"):
        started(model)


def test_the_device_is_cuda_where_any_parameter_is(monkeypatch):
    assert device_of([CNN()]) == "cpu" and device_of([]) == "cpu"
    first, second = CNN(), CNN()
    for devices, expected in ((("cpu", "cuda"), "cuda"), (("xpu", "cpu"), "xpu")):
        where = dict(zip((first, second), devices, strict=True))
        monkeypatch.setattr(
            sys.modules[device_of.__module__], "settled_device", lambda model, _, where=where: where[model]
        )
        assert device_of([first, second]) == expected


def test_a_model_converted_in_the_same_way_is_taken_as_it_is():
    model = started()
    conversion = conversion_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert started(model, optimizer) == (model, optimizer)
    assert conversion_of(model) is conversion
    low = started(opt_level="O3")
    assert started(low, opt_level="O3") is low
    by_hand, _ = fxprec.convert(CNN())
    assert started(by_hand) is by_hand


def test_a_model_converted_in_another_way_is_refused():
    model = started()
    with pytest.raises(RuntimeError, match="CNN is converted already, to another level, dtype or policy"):
        started(model, opt_level="O2")
    assert is_converted(model)
