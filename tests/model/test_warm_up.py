"""Example inputs: the graph exists, and nothing else of the model or of the process moved."""

from __future__ import annotations

import copy
import functools
import logging
import random

import pytest
import torch
from torch import nn
from torch.fx import symbolic_trace

import fxprec
from fxprec.model.warm_up import values_kept
from fxprec.passes.context import Context
from fxprec.passes.policy.policy import Policy
from fxprec.passes.runner import run_passes

LOW = torch.bfloat16


class Busy(nn.Module):
    """Writes whatever a forward can write."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.calls = 0
        self.seen = []
        self.last = None
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mask", None)
        self.register_buffer("wide", torch.zeros(1).expand(4))  # several elements in one place: no copy into it

    def forward(self, x):
        self.calls += 1
        self.seen.append(1)
        self.last = x
        self.count += 1
        if self.mask is None:
            self.mask = torch.ones(x.shape[0], 1)
        x = x * random.choice([1.0, 1.0]) + torch.rand(()) * 0
        return self.norm(self.fc(x)) * self.mask + self.wide.sum()


@pytest.mark.slow
@pytest.mark.parametrize("capture", ["auto", "dynamo"])
@pytest.mark.filterwarnings("error", "ignore::fxprec.errors.SlowDtypeWarning")
def test_nothing_moves(tools, capture):
    model = Busy()
    state = copy.deepcopy(model.state_dict())
    attributes = dict(model.__dict__)
    random.seed(3)
    generators = random.getstate(), torch.get_rng_state()
    x = torch.randn(4, 8, generator=torch.Generator())
    fxprec.convert(model, (x,), capture=capture)
    assert (random.getstate(), model.calls, model.seen, model.last, model.mask) == (generators[0], 0, [], None, None)
    assert torch.equal(torch.get_rng_state(), generators[1])
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(model.__dict__[name] is value for name, value in attributes.items())
    model(x)
    assert (model.calls, model.seen, model.count.item()) == (1, [1], 1)
    assert tools.matmul_dtypes(model, x) == {LOW: 1}


def test_lazy_modules_take_their_shapes(tools):
    for capture in ("auto", "dynamo"):
        model = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.ReLU(), nn.Linear(8, 4))
        fxprec.convert(model, (torch.randn(3, 5),), capture=capture)
        assert type(model[0]) is nn.Linear and model[0].weight.shape == (8, 5)
        assert model[1].num_batches_tracked == 0 and torch.equal(model[1].running_var, torch.ones(8))
        assert tools.matmul_dtypes(model, torch.randn(3, 5)) == {LOW: 2}


class Writing(nn.Module):
    """Writes a parameter in its forward, as momentum encoders and codebooks do."""

    def __init__(self, how):
        super().__init__()
        self.query, self.key, self.tied = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.tied.weight = self.query.weight
        self.codebook = nn.Parameter(torch.rand(3, 4), requires_grad=False)
        self.unset = nn.Parameter(torch.full((2,), torch.nan))
        self.how = how

    def forward(self, x):
        self.how(self, x)
        return self.key(self.tied(self.query(x))) @ self.codebook.t() + self.unset.nan_to_num().sum()


def scale_data(model, x):
    model.query.weight.data.mul_(0.9)


def assign_data(model, x):
    model.key.weight.data = model.key.weight.data * 0.5 + model.query.weight.data * 0.5


@torch.no_grad()
def average(model, x):
    model.key.weight.mul_(0.5).add_(model.query.weight * 0.5)


def move_codebook(model, x):
    with torch.no_grad():
        model.codebook.lerp_(x.mean(0).expand_as(model.codebook), 0.1)


def set_nan(model, x):
    model.codebook.data[0] = torch.nan


def fill_nan(model, x):
    model.unset.data.fill_(0.0)


WRITES = [scale_data, assign_data, average, move_codebook, set_nan, fill_nan]


def states(model):
    """Bits, addresses and version counters of the parameters."""
    return {
        name: (parameter.detach().view(torch.int32).tolist(), parameter.data_ptr(), parameter._version)
        for name, parameter in model.named_parameters()
    }


@pytest.mark.parametrize("capture", ["auto", "dynamo"])
@pytest.mark.parametrize("how", WRITES)
def test_parameters_that_the_forward_writes(how, capture):
    model, x = Writing(how), torch.randn(2, 4)
    before, plain = states(model), copy.deepcopy(model)
    fxprec.convert(model, (x,), capture=capture)
    assert states(model) == before
    with torch.no_grad():
        torch.testing.assert_close(model(x), plain(x), rtol=0.05, atol=0.05, equal_nan=True)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), equal_nan=True)


def test_parameters_that_a_symbolic_capture_writes():
    class Averaging(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.mean = nn.Parameter(torch.zeros(4), requires_grad=False)

        def forward(self, x):
            self.mean.mul_(0.5).add_(x.detach().mean(0))
            return self.fc(x) + self.mean

    model = Averaging()
    before = states(model)
    fxprec.convert(model, (torch.randn(2, 4),), capture="symbolic")
    assert states(model) == before


@pytest.mark.parametrize("capture", ["auto", "dynamo"])
def test_shadows_follow_a_weight_that_was_put_back(capture):
    """Its version counter goes back too, and comes again with another value, of which nothing else tells."""

    class Marking(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(64, 64, bias=False)

        def forward(self, x):
            self.mark(x)
            return self.fc(x)

        @torch.compiler.disable
        def mark(self, x):
            with torch.no_grad():
                self.fc.weight[5, 3] = x[0, 0]

    model, x = Marking(), torch.ones(2, 64)
    with torch.no_grad():
        fxprec.convert(model, (x * 100,), capture=capture)
        found = model(x)
        torch.testing.assert_close(found, nn.functional.linear(x, model.fc.weight), rtol=0.02, atol=0.02)


def test_parameters_of_a_forward_that_fails():
    def fail(model, x):
        average(model, x)
        raise RuntimeError("no")

    model = Writing(fail)
    before = states(model)
    with pytest.raises(ValueError, match="no"):
        fxprec.convert(model, (torch.randn(2, 4),))
    assert states(model) == before


def test_parameters_beside_lazy_ones():
    class Growing(Writing):
        def __init__(self):
            super().__init__(average)
            self.late = nn.LazyLinear(4)

        def forward(self, x):
            return self.late(super().forward(x))

    model = Growing()
    before = {name: (p.clone(), p._version) for name, p in model.named_parameters() if "late" not in name}
    fxprec.convert(model, (torch.randn(2, 4),))
    assert model.late.weight.shape == (4, 3)
    for name, (value, version) in before.items():
        torch.testing.assert_close(model.get_parameter(name), value, rtol=0, atol=0, equal_nan=True)
        assert model.get_parameter(name)._version == version


def test_parameters_of_level_o3_come_back():
    model, x = Writing(average), torch.randn(2, 4)
    before = {name: p.detach().bfloat16() for name, p in model.named_parameters()}
    fxprec.convert(model, (x,), level="O3")
    for name, value in before.items():
        torch.testing.assert_close(model.get_parameter(name).bfloat16(), value, rtol=0, atol=0, equal_nan=True)


def test_nothing_is_copied_where_nothing_runs(monkeypatch):
    copied = []
    monkeypatch.setattr(torch.Tensor, "clone", lambda self, **_: copied.append(self) or self.detach() * 1)
    fxprec.convert(nn.Sequential(nn.Linear(4, 4)))
    assert not copied


def test_values_of_every_kind_of_tensor_are_kept():
    inference = torch.inference_mode()(lambda: torch.ones(2))()
    tensors = [
        torch.ones(2, dtype=dtype) for dtype in (torch.float64, LOW, torch.float8_e4m3fn, torch.complex64, torch.bool)
    ]
    tensors.append(torch.tensor([torch.nan, -1.0]))
    tensors += [torch.ones(()), torch.ones(0), torch.eye(2).to_sparse(), inference, torch.arange(6.0).view(2, 3).t()]
    before = [tensor.clone() for tensor in tensors]
    others = [torch.ones(2, device="meta"), nn.UninitializedParameter()]
    with values_kept([*tensors, *others]) as written, torch.inference_mode():
        for tensor in tensors:
            tensor.copy_(torch.zeros_like(tensor))
    assert {id(tensor) for tensor in written} == {id(tensor) for tensor in tensors}
    for tensor, value in zip(tensors, before, strict=True):
        torch.testing.assert_close(tensor.to_dense().cfloat(), value.to_dense().cfloat(), equal_nan=True)
    with values_kept(tensors[:6]) as written:
        pass
    assert not written


def test_shards_are_kept():
    """Of a DTensor the shard that this rank holds: nothing is gathered."""
    distributed = pytest.importorskip("torch.distributed.tensor")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        model = Writing(average)
        for part in (model.query, model.key):
            weight = distributed.distribute_tensor(part.weight.detach(), mesh, [distributed.Shard(0)])
            part.weight = nn.Parameter(weight)
        shards = [part.weight.to_local().detach().clone() for part in (model.query, model.key)]
        versions = [parameter._version for parameter in model.parameters()]
        with values_kept(model.parameters()) as written:
            average(model, None)
        assert written
        assert [parameter._version for parameter in model.parameters()] == versions
        for part, shard in zip((model.query, model.key), shards, strict=True):
            assert torch.equal(part.weight.to_local(), shard)
    finally:
        torch.distributed.destroy_process_group()


def test_lazy_modules_without_examples(tools):
    model, _ = fxprec.convert(nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.Linear(8, 4)))
    x = torch.randn(3, 5)
    model(x).sum().backward()
    assert list(fxprec.report(model).headline.net) == ["the whole forward"]
    assert model[0].weight.grad is not None
    assert tools.matmul_dtypes(model, x) == {LOW: 2}


def test_an_error_of_the_model_puts_everything_back():
    model = Busy()
    attributes = dict(model.__dict__)
    hook = model.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"\(4, 9\)"):
        fxprec.convert(model, (torch.randn(4, 9),))
    hook.remove()
    assert type(model) is Busy
    assert model.__dict__.keys() == attributes.keys()
    assert all(model.__dict__[name] is value for name, value in attributes.items())
    assert (model.calls, model.seen) == (0, [])


@pytest.mark.parametrize("capture", ["auto", "dynamo"])
def test_an_error_of_the_model_is_told_once(capture: str):
    """Without what torch logs of an op that fails on fake tensors: twenty lines before the error."""
    logged: list[logging.LogRecord] = []

    class Listening(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            logged.append(record)

    log, listening = logging.getLogger("torch._subclasses.fake_tensor"), Listening()
    log.addHandler(listening)
    try:
        with pytest.raises(ValueError, match="mat1 and mat2"):
            fxprec.convert(nn.Sequential(nn.Linear(4, 4)), (torch.randn(2, 5),), capture=capture)
    finally:
        log.removeHandler(listening)
    assert not logged
    assert not log.disabled


def test_shapes_that_depend_on_values(tools):
    """Fake tensors cannot know them: the costs go without, the call does not fail."""

    class Select(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x):
            return self.fc(x[x[:, 0] > 0])

    model, _ = fxprec.convert(Select(), (torch.randn(4, 8),))
    x = torch.randn(6, 8)
    assert model(x).shape == (int((x[:, 0] > 0).sum()), 8)
    assert tools.matmul_dtypes(model, x) == {LOW: 1}


@pytest.mark.parametrize("capture", ["symbolic", "dynamo"])
def test_an_error_of_a_pass_is_not_told_as_one_of_the_model(capture: str, monkeypatch: pytest.MonkeyPatch):
    def fuse(gm, context):
        raise KeyError("linear")

    torch._dynamo.reset()  # or what other tests compiled of nn.Linear may have reached dynamo's limit
    monkeypatch.setattr("fxprec.programs.packed_weights.run_passes", functools.partial(run_passes, passes=[fuse]))
    model = nn.Linear(4, 4)
    with pytest.raises(
        fxprec.InvariantError, match=r"^the pass fuse failed: KeyError: 'linear'. This is a bug in fxprec"
    ):
        fxprec.convert(model, (torch.ones(2, 4),), capture=capture)
    assert type(model) is nn.Linear


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError])
def test_memory_that_runs_out_in_a_pass_is_no_fault_of_it(error: type[Exception]):
    def fuse(gm, context):
        raise error("none is left")

    with pytest.raises(error, match="none is left"):
        run_passes(symbolic_trace(nn.Linear(4, 4)), Context(LOW, Policy()), [fuse])
