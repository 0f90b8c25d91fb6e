"""The converted object is the user's own: class, attributes, hooks, copies, files, wrappers."""

from __future__ import annotations

import copy
import inspect
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxprec
from fxprec.model.conversion import conversion_of

LOW = torch.bfloat16


class Net(nn.Module):
    """A docstring."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.config = {"width": width}
        self.body = nn.Sequential(nn.Linear(8, width), nn.LayerNorm(width), nn.GELU())
        self.head = nn.Linear(width, 4)
        self.unused = nn.Linear(3, 3)
        self.register_buffer("scale", torch.tensor(1.0))

    def forward(self, x: torch.Tensor, shift: float = 0.0) -> torch.Tensor:
        """Forward's docstring."""
        return self.head(self.body(x)) * self.scale + shift

    def helper(self) -> int:
        return self.config["width"]


def train(model, steps=3, optimizer=torch.optim.SGD, lr=0.1, forward=None):
    torch.manual_seed(1)
    optim = optimizer(model.parameters(), lr=lr)
    losses = []
    for _ in range(steps):
        x = torch.randn(6, 8)
        optim.zero_grad()
        loss = (forward or model)(x).square().mean()
        loss.backward()
        optim.step()
        losses.append(loss.item())
    return losses


@pytest.fixture(params=["symbolic", "dynamo"])
def net(request):
    return fxprec.convert(Net(), capture=request.param).module


def test_class_names_signature_and_docstrings_stay():
    model = Net()
    converted, _ = fxprec.convert(model)
    assert isinstance(converted, Net)
    kind = type(converted)
    assert (kind.__name__, kind.__qualname__, kind.__module__, kind.__doc__) == (
        Net.__name__, Net.__qualname__, Net.__module__, Net.__doc__,
    )  # fmt: skip
    assert inspect.signature(converted.forward) == inspect.signature(Net().forward)
    assert converted.forward.__doc__ == "Forward's docstring."
    assert converted.helper() == 8 and converted.config == {"width": 8}
    assert repr(converted) == repr(Net())


def test_keys_of_submodules_that_are_never_called_stay(net):
    assert list(net.state_dict()) == list(Net().state_dict())
    assert [name for name, _ in net.named_modules()] == [name for name, _ in Net().named_modules()]
    net(torch.randn(2, 8))
    assert list(net.state_dict()) == list(Net().state_dict())


def test_training_follows_fp32(net):
    reference = fxprec.revert(copy.deepcopy(net))
    ours, theirs = train(net), train(reference)
    assert ours == pytest.approx(theirs, rel=0.02)
    assert ours != theirs


def test_arguments_by_position_keyword_and_default(net):
    x = torch.randn(2, 8)
    assert torch.equal(net(x, 1.0), net(x, shift=1.0))
    assert torch.equal(net(x), net(x=x))
    torch.testing.assert_close(net(x, 1.0), net(x) + 1.0)


def test_hooks_on_the_model_fire_in_every_kind(net):
    seen = []
    net.register_forward_pre_hook(lambda module, args: seen.append("pre"))
    net.register_forward_hook(lambda module, args, out: seen.append("forward"))
    net.register_full_backward_hook(lambda module, gin, gout: seen.append("backward"))
    net(torch.randn(2, 8)).sum().backward()
    assert seen == ["pre", "forward", "backward"]


def test_train_and_eval_are_two_states(tools):
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.BatchNorm1d(8))
    converted, _ = fxprec.convert(model)
    x = torch.randn(16, 8)
    assert not torch.equal(converted(x), converted(x))
    converted.eval()
    assert torch.equal(converted(x), converted(x))
    converted.train()
    assert not torch.equal(converted(x), converted(x))
    assert len(fxprec.graphs(converted)) == 2
    assert tools.matmul_dtypes(converted, x) == {LOW: 1}


def test_deepcopy_pickle_and_files(net, tools):
    x = torch.randn(2, 8)
    expected = net(x)
    buffer = io.BytesIO()
    torch.save(net, buffer)
    buffer.seek(0)
    copies = [copy.deepcopy(net), pickle.loads(pickle.dumps(net)), torch.load(buffer, weights_only=False)]
    for copied in copies:
        assert isinstance(copied, Net) and type(copied) is not Net
        assert torch.equal(copied(x), expected)
        assert tools.matmul_dtypes(copied, x) == {LOW: 2}
        assert {id(p) for p in copied.parameters()}.isdisjoint({id(p) for p in net.parameters()})
    train(copies[0])
    assert torch.equal(net(x), expected)


def test_a_state_dict_is_fp32_and_portable(net):
    train(net)
    state = net.state_dict()
    assert {v.dtype for v in state.values()} == {torch.float32}
    plain = Net()
    plain.load_state_dict(state)
    x = torch.randn(2, 8)
    torch.testing.assert_close(net(x), plain(x), atol=0.05, rtol=0.05)


def test_revert_gives_back_the_very_class():
    model = Net()
    converted, _ = fxprec.convert(model)
    converted(torch.randn(2, 8))
    assert fxprec.revert(converted) is model
    assert type(model) is Net and "_fxprec" not in model.__dict__


def test_an_instance_forward_is_respected():
    model = Net()
    model.forward = lambda x: F.linear(x, model.head.weight) * 2
    x = torch.randn(2, 8)
    expected = model(x)
    converted, _ = fxprec.convert(model)
    torch.testing.assert_close(converted(x), expected, atol=0.05, rtol=0.05)
    fxprec.revert(converted)
    assert torch.equal(model(x), expected)


def test_a_model_that_has_a_graph_of_its_own_keeps_it():
    class Graphy(nn.Module):
        def __init__(self):
            super().__init__()
            self.graph = "mine"
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            return self.fc(x)

    converted, _ = fxprec.convert(Graphy())
    assert converted.graph == "mine"
    plain, _ = fxprec.convert(Net())
    assert isinstance(plain.graph, torch.fx.Graph)
    plain.graph = "set later"
    assert plain.graph == "set later"
    assert isinstance(fxprec.graph_module(converted), torch.fx.GraphModule)
    assert len(fxprec.graphs(converted)) == 1


@pytest.mark.parametrize("capture", ["symbolic", "dynamo"])
def test_the_graph_module_stands_on_its_own(capture):
    net, _ = fxprec.convert(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), capture=capture)
    x = torch.randn(2, 8)
    expected = net(x)
    gm = fxprec.graph_module(net)
    assert torch.equal(gm(x), expected)
    assert {id(p) for p in gm.parameters()} == {id(p) for p in net.parameters()}
    assert isinstance(gm.graph, torch.fx.Graph)


def test_super_forward_of_a_subclass(tools):
    class Sub(Net):
        def forward(self, x):
            return super().forward(x) * 2

    model = Sub()
    x = torch.randn(2, 8)
    expected = model(x)
    converted, _ = fxprec.convert(model)
    torch.testing.assert_close(converted(x), expected, atol=0.1, rtol=0.05)
    assert tools.matmul_dtypes(converted, x) == {LOW: 2}


def test_a_model_inside_an_unconverted_one(tools):
    inner, _ = fxprec.convert(nn.Linear(8, 8))
    outer = nn.Sequential(inner, nn.Linear(8, 8))
    x = torch.randn(2, 8)
    assert tools.matmul_dtypes(outer, x) == {LOW: 1, torch.float32: 1}
    assert torch.equal(copy.deepcopy(outer)(x), outer(x))


# -- shadows


def test_ema_weights_swapped_in_before_eval(net):
    ema = {name: p.detach() * 0.5 for name, p in net.named_parameters()}
    x = torch.randn(2, 8)
    with torch.no_grad():
        before = net(x)
        for name, p in net.named_parameters():
            p.copy_(ema[name])
        copied = net(x)
        for p in net.parameters():
            p.data = p.data * 2
        back = net(x)
    assert not torch.equal(copied, before)
    assert torch.equal(back, before)


def test_a_write_through_data_is_seen_by_a_training_forward_and_by_refresh(net):
    x = torch.randn(2, 8)
    with torch.no_grad():
        before = net(x)
    for p in net.parameters():
        p.data.mul_(0.5)
    assert not torch.equal(net(x), before)
    for p in net.parameters():
        p.data.mul_(2.0)
    fxprec.refresh(net)
    with torch.no_grad():
        assert torch.equal(net(x), before)


def test_load_state_dict_and_train_eval_refresh(net):
    x = torch.randn(2, 8)
    other = Net().state_dict()
    with torch.no_grad():
        before = net(x)
        net.load_state_dict(other)
        assert not torch.equal(net(x), before)
        loaded = net(x)
        for p in net.parameters():
            p.data.mul_(0.5)
        net.eval()
        assert not torch.equal(net(x), loaded)


def test_accumulation_refreshes_once(net):
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    x = torch.randn(2, 8)
    net(x).sum().backward()
    store = conversion_of(net).store
    for _ in range(2):
        optimizer.step()
        before = store.refreshes
        with fxprec.accumulate(net):
            for _ in range(4):
                net(x).sum().backward()
        assert store.refreshes == before + 1


def test_gradients_of_micro_batches_add_up_in_fp32(net):
    x = torch.randn(8, 8)
    net(x).sum().backward()
    whole = {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
    net.zero_grad()
    with fxprec.accumulate(net):
        for part in x.split(2):
            net(part).sum().backward()
    for name, gradient in whole.items():
        torch.testing.assert_close(net.get_parameter(name).grad, gradient, atol=0.05, rtol=0.05)


def test_two_forwards_before_one_backward(net):
    x, y = torch.randn(2, 8), torch.randn(2, 8)
    (net(x).sum() + net(y).sum()).backward()
    assert net.head.weight.grad is not None


def test_a_step_between_forward_and_backward_is_reported(net):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x = torch.randn(2, 8)
    net(x).sum().backward()
    loss = net(x).sum()
    optimizer.step()
    net(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_tied_weights_have_one_shadow():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(self.a(x))

    model = Tied()
    x = torch.randn(2, 8)
    model(x).sum().backward()
    expected = model.a.weight.grad.clone()
    model.zero_grad()
    for capture in ("symbolic", "dynamo"):
        converted, _ = fxprec.convert(copy.deepcopy(model), capture=capture)
        assert converted.a.weight is converted.b.weight
        converted(x).sum().backward()
        torch.testing.assert_close(converted.a.weight.grad, expected, atol=0.1, rtol=0.05)
        assert len(conversion_of(converted).store._entries) == 1


def test_functional_call_and_parametrizations(net):
    x = torch.randn(2, 8)
    replaced = {name: p.detach() * 0.5 for name, p in net.named_parameters()}
    expected = torch.func.functional_call(fxprec.revert(copy.deepcopy(net)), replaced, (x,))
    before = net(x)
    torch.testing.assert_close(torch.func.functional_call(net, replaced, (x,)), expected, atol=0.05, rtol=0.05)
    assert torch.equal(net(x), before)

    nn.utils.parametrizations.weight_norm(net.head)
    out = net(x)
    torch.testing.assert_close(out, before, atol=0.05, rtol=0.05)
    out.sum().backward()
    assert all(p.grad is not None for p in net.head.parameters())


def test_gradients_through_functional_call(net):
    x = torch.randn(2, 8)
    parameters = {name: p.detach().clone().requires_grad_() for name, p in net.named_parameters()}
    torch.func.functional_call(net, parameters, (x,)).sum().backward()
    assert parameters["head.weight"].grad is not None
    assert net.head.weight.grad is None


def test_torch_func_grad(net, tools):
    x = torch.randn(2, 8)
    parameters = dict(net.named_parameters())

    def loss(parameters):
        return torch.func.functional_call(net, parameters, (x,)).sum()

    gradients = torch.func.grad(loss)(parameters)
    net(x).sum().backward()
    torch.testing.assert_close(gradients["head.weight"], net.head.weight.grad, atol=0.05, rtol=0.05)
    net(x)  # and dynamo's frame was not given up
    assert tools.matmul_dtypes(net, x) == {LOW: 2}


def test_to_another_dtype_and_back(net):
    x = torch.randn(2, 8)
    before = net(x)
    net.double()
    net.float()
    assert torch.equal(net(x), before)


def test_double_backward(net):
    x = torch.randn(2, 8, requires_grad=True)
    (gradient,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    gradient.square().sum().backward()
    assert net.body[0].weight.grad.abs().sum() > 0


@pytest.mark.slow
def test_the_inductor_executor_trains():
    torch.manual_seed(0)
    model = Net()
    reference = copy.deepcopy(model)
    converted, _ = fxprec.convert(model, executor="inductor")
    assert train(converted) == pytest.approx(train(reference), rel=0.03)


def test_a_wrapper_says_to_pass_what_is_inside():
    model, _ = fxprec.convert(nn.Linear(2, 2))
    with pytest.raises(fxprec.ConversionError, match=r"DataParallel is a wrapper: pass the converted Linear inside it"):
        fxprec.report(nn.DataParallel(model))


def test_graph_is_a_name_of_the_model_once_there_is_one() -> None:
    """Who goes through all names, as ``torch.jit.trace`` does, meets no error."""
    net, _ = fxprec.convert(nn.Sequential(nn.Linear(2, 2)), dtype=torch.bfloat16, capture="dynamo")
    assert "graph" not in dir(net) and {"forward", "training"} <= {*dir(net)}
    net(torch.randn(2, 2))
    assert dir(net).count("graph") == 1 and all(hasattr(net, name) for name in dir(net))
    assert "graph" not in dir(fxprec.revert(net))
