import contextlib
import copy
import gc
import io
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fxprec
from fxprec.errors import StaleShadowError
from fxprec.shadows import ShadowStore
from fxprec.shadows import store as stores

LOW = torch.bfloat16


class Net(nn.Module):
    """What a converted model does with its weights: two graphs, each of which reads its own."""

    def __init__(self, store: ShadowStore | None) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.second = nn.Linear(7, 3)
        self.store = store
        self.middle: Callable[[], Any] = lambda: None
        self.shared: dict[Tensor, Tensor] | None = None

    def low(self, *weights: Tensor) -> list[Tensor]:
        if self.store is not None:
            return self.store.read(weights)
        if self.shared is None:
            return [w.to(LOW) for w in weights]
        # One cast for several forwards, as autocast's cache: their gradients meet in the low dtype.
        return [self.shared.setdefault(w, w.to(LOW)) for w in weights]

    def hidden(self, x: Tensor) -> Tensor:
        weight, bias = self.low(self.first.weight, self.first.bias)
        return nn.functional.linear(x.to(LOW), weight, bias).tanh()

    def forward(self, x: Tensor) -> Tensor:
        if self.store is not None:
            self.store.begin(self)
        hidden = self.hidden(x)
        self.middle()
        weight, bias = self.low(self.second.weight, self.second.bias)
        return nn.functional.linear(hidden, weight, bias).float()


def pair() -> tuple[Net, Net]:
    """A net on a store, and its reference with the casts in the graph."""
    net = Net(ShadowStore(LOW))
    reference = Net(None)
    reference.load_state_dict(net.state_dict())
    return net, reference


def store_of(net: Net) -> ShadowStore:
    assert net.store is not None
    return net.store


def shadow(net: Net) -> Tensor:
    """The first weight's shadow as any forward would read it, without a forward."""
    return store_of(net).read([net.first.weight, net.first.bias])[0]


def gradients(net: nn.Module) -> list[Tensor]:
    grads = [p.grad for p in net.parameters()]
    assert all(g is not None for g in grads)
    return [g.clone() for g in grads if g is not None]


def assert_same(left: list[Tensor], right: list[Tensor]) -> None:
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def assert_same_where_present(left: nn.Module, right: nn.Module) -> None:
    """The same parameters have a gradient, and the same one."""
    left_grads, right_grads = ({name: p.grad for name, p in m.named_parameters()} for m in (left, right))
    assert [g is None for g in left_grads.values()] == [g is None for g in right_grads.values()]
    assert_same(*([g for g in grads.values() if g is not None] for grads in (left_grads, right_grads)))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "sgd_fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adamw_loop": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_training_equals_casts_in_the_graph(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    net, reference = pair()
    optimizers = [make(m.parameters()) for m in (net, reference)]
    for _ in range(4):
        x = torch.randn(6, 5)
        outputs = []
        for model, optimizer in zip((net, reference), optimizers, strict=True):
            optimizer.zero_grad()
            outputs.append(model(x))
            outputs[-1].square().sum().backward()
            optimizer.step()
        assert_same(outputs[:1], outputs[1:])
        assert_same(gradients(net), gradients(reference))
        with torch.no_grad():
            assert torch.equal(net(x), reference(x))
    assert_same([*net.parameters()], [*reference.parameters()])


def test_a_recording_forward_costs_one_multi_tensor_copy() -> None:
    net, _ = pair()
    store = store_of(net)
    x = torch.randn(2, 5)
    net(x)
    assert store.refreshes == 0
    calls = Calls()
    with calls:
        net(x)
    assert store.refreshes == 1
    assert calls.names.count("_foreach_copy_") == 1
    assert calls.names.count("_to_copy") == 2  # the input, the output


class Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_under_no_grad_nothing_is_copied_twice() -> None:
    net, _ = pair()
    with torch.no_grad():
        for _ in range(3):
            net(torch.randn(2, 5))
    net.requires_grad_(False)
    net(torch.randn(2, 5))
    net(torch.randn(2, 5))
    assert store_of(net).refreshes == 0


def ema_swap(net: Net) -> None:
    with torch.no_grad():
        net.first.weight.copy_(torch.ones(7, 5))


def data_swap(net: Net) -> None:
    net.first.weight.data.copy_(torch.ones(7, 5))
    store_of(net).mark_stale()  # as train() and eval() do


def data_scaled(net: Net) -> None:
    net.first.weight.data.mul_(2)


def new_data(net: Net) -> None:
    net.first.weight.data = torch.ones(7, 5)


def new_shape(net: Net) -> None:
    net.first.weight.data = torch.ones(9, 5)
    net.first.bias.data = torch.ones(9)


def new_parameter(net: Net) -> None:
    net.first.weight = nn.Parameter(torch.ones(7, 5))


def loaded(net: Net) -> None:
    net.load_state_dict({name: torch.full_like(value, 2.0) for name, value in net.state_dict().items()})


def loaded_by_assignment(net: Net) -> None:
    state = {name: torch.full_like(value, 2.0) for name, value in net.state_dict().items()}
    net.load_state_dict(state, assign=True)


def in_inference_mode(net: Net) -> None:
    with torch.inference_mode():
        net.first.weight.mul_(3)


def fused_step(net: Net) -> None:
    stepped(net, OPTIMIZERS["adamw_fused"])


def ema_after_step(net: Net) -> None:
    """Some optimizer stepped, and after it our weights were written in a way that shows nothing."""
    other = nn.Linear(2, 2)
    other.weight.grad = torch.ones(2, 2)
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    net.first.weight.data.mul_(3)


def refreshed(net: Net) -> None:
    net.first.weight.data.mul_(3)
    store_of(net).refresh()


def there_and_back(net: Net) -> None:
    net.double()
    assert torch.equal(shadow(net), net.first.weight.to(LOW))
    with torch.no_grad():
        net.first.weight.mul_(3)
    net.float()


def stepped(net: Net, make: Callable[[Any], torch.optim.Optimizer]) -> None:
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    make(net.parameters()).step()
    net.zero_grad()


WRITES = [
    ema_swap,
    data_swap,
    new_data,
    new_shape,
    new_parameter,
    loaded,
    loaded_by_assignment,
    in_inference_mode,
    fused_step,
    ema_after_step,
    refreshed,
    there_and_back,
]


@pytest.mark.parametrize("then", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("first", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("write", WRITES)
def test_a_write_is_seen(write: Callable[[Net], None], first: Any, then: Any) -> None:
    net, _ = pair()
    x = torch.randn(2, 5)
    with first():
        net(x)
    write(net)
    with then():
        store_of(net).begin()
        assert torch.equal(shadow(net), net.first.weight.to(LOW))
        hidden = net.hidden(x)
    if hidden.requires_grad:
        reference = Net(None)
        reference.first = copy.deepcopy(net.first)
        hidden.float().sum().backward()
        reference.hidden(x).float().sum().backward()
        assert_same_where_present(net.first, reference.first)


def test_a_frozen_weight_resized_in_place() -> None:
    store = ShadowStore(LOW)
    weight = nn.Parameter(torch.randn(4, 3), requires_grad=False)
    store.read([weight])
    address = weight.data_ptr()
    weight.resize_(2, 3)
    assert weight.data_ptr() == address
    assert torch.equal(store.read([weight])[0], weight.to(LOW))


def test_a_silent_write_is_seen_by_the_next_recording_forward() -> None:
    net, reference = pair()
    x = torch.randn(2, 5)
    net(x)
    for p in (*net.parameters(), *reference.parameters()):
        p.data.mul_(3)
    assert torch.equal(net(x), reference(x))


def test_a_write_inside_a_forward_is_seen_by_the_next_graph() -> None:
    net, reference = pair()

    def renorm() -> None:  # as max-norm layers do
        net.second.weight.data = net.second.weight.data.renorm(2, 0, 0.1)

    x = torch.randn(2, 5)
    net(x)
    net.middle = renorm
    output = net(x)
    reference.load_state_dict(net.state_dict())
    assert torch.equal(output, reference(x))


@pytest.mark.parametrize("first", [torch.no_grad, torch.inference_mode])
def test_training_after_a_first_forward_without_gradients(first: Any) -> None:
    net, reference = pair()
    x = torch.randn(2, 5)
    with first():
        assert not any(s.is_inference() for s in store_of(net).read([*net.parameters()]))
        net(x)
    net(x).sum().backward()
    reference(x).sum().backward()
    assert_same(gradients(net), gradients(reference))


def test_autocast_around_changes_nothing() -> None:
    net, reference = pair()
    x = torch.randn(2, 5)
    with torch.autocast("cpu", torch.float16):
        store_of(net).begin()
        assert {s.dtype for s in store_of(net).read([*net.parameters()])} == {LOW}
    net(x).sum().backward()
    reference(x).sum().backward()
    assert_same(gradients(net), gradients(reference))


def test_frozen_then_unfrozen_then_frozen() -> None:
    net, reference = pair()
    x = torch.randn(2, 5, requires_grad=True)
    for frozen in (True, False, True):
        for model in (net, reference):
            model.first.requires_grad_(not frozen)
            model.zero_grad()
            model(x).sum().backward()
        assert_same_where_present(net, reference)
        assert (net.first.weight.grad is None) == frozen


def test_a_frozen_model_with_gradients_on_is_inference() -> None:
    net, _ = pair()
    net.requires_grad_(False)
    net(torch.randn(2, 5))
    net(torch.randn(2, 5))
    assert store_of(net).refreshes == 0


def test_two_forwards_before_one_backward() -> None:
    net, reference = pair()
    reference.shared = {}
    x, y = torch.randn(2, 5), torch.randn(2, 5)
    for model in (net, reference):
        loss = model(x).sum()
        with torch.no_grad():
            model(y)
        if model.store is not None:
            model.store.mark_stale()  # eval() and train() between the two change no weight
        (loss + model(y).square().sum()).backward()
    assert_same(gradients(net), gradients(reference))


def test_a_step_on_other_weights_between_forward_and_backward() -> None:
    """A GAN: the discriminator steps between the generator's forward and its backward."""
    (generator, reference), discriminator = pair(), nn.Linear(3, 1)
    reference.shared = {}
    optimizer = OPTIMIZERS["adamw_fused"](discriminator.parameters())
    x, y = torch.randn(2, 5), torch.randn(2, 5)
    fake = generator(x)
    discriminator(fake.detach()).sum().backward()
    optimizer.step()
    (fake.sum() + generator(y).sum()).backward()
    (reference(x).sum() + reference(y).sum()).backward()
    assert_same(gradients(generator), gradients(reference))


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_autograd_reports_a_step_between_forward_and_backward(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    net, _ = pair()
    x = torch.randn(2, 5)
    loss = net(x).sum()
    stepped(net, make)
    net(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_retain_graph_and_double_backward() -> None:
    net, reference = pair()
    x = torch.randn(2, 5, requires_grad=True)
    results = []
    for model in (net, reference):
        weights = [*model.parameters()]
        loss = model(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        (into_x,) = torch.autograd.grad(loss, x, create_graph=True)
        into_weights = torch.autograd.grad(loss, weights, create_graph=True)
        penalty = into_x.square().sum() + sum(g.square().sum() for g in into_weights)
        results.append([*gradients(model), *torch.autograd.grad(penalty, [*weights, x])])
    assert_same(*results)


def test_every_weight_keeps_its_own_accumulator_and_hooks() -> None:
    net, _ = pair()
    x = torch.randn(2, 5)
    accumulators = {p: torch.autograd.graph.get_gradient_edge(p).node for p in net.parameters()}  # as DDP holds them
    fired: list[Tensor] = []
    for p in net.parameters():
        p.register_post_accumulate_grad_hook(fired.append)
    optimizer = OPTIMIZERS["adamw_fused"](net.parameters())
    for _ in range(3):
        fired.clear()
        net(x).sum().backward()
        assert {*map(id, fired)} == {*map(id, net.parameters())}
        optimizer.step()
        weights = [*net.parameters()]
        for p, s in zip(weights, store_of(net).read(weights), strict=True):
            assert s.grad_fn is not None
            assert s.grad_fn.next_functions[0][0] is accumulators[p]


def test_a_step_inside_the_backward() -> None:
    net, reference = pair()
    for model in (net, reference):
        for p in model.parameters():
            optimizer = torch.optim.SGD([p], lr=0.1)
            p.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    for _ in range(3):
        x = torch.randn(2, 5)
        for model in (net, reference):
            model(x).square().sum().backward()
    assert_same([*net.parameters()], [*reference.parameters()])


@pytest.mark.parametrize("part", ["model", "block"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant: bool, part: str) -> None:
    """Recomputation reads the store in the middle of a backward; a second forward of the model is pending then."""
    net, reference = pair()
    optimizer = OPTIMIZERS["sgd_fused"](net.parameters())
    hidden = net.hidden
    for _ in range(3):
        x, y = (torch.randn(2, 5, requires_grad=True) for _ in range(2))
        if part == "block":
            net.hidden = lambda x: checkpoint(hidden, x, use_reentrant=reentrant)  # type: ignore[method-assign]
            outputs = [net(x), net(y)]
        else:
            outputs = [checkpoint(net, z, use_reentrant=reentrant) for z in (x, y)]
        reference.load_state_dict(net.state_dict())
        for model, (a, b) in ((net, outputs), (reference, [reference(x), reference(y)])):
            model.zero_grad()
            (a.sum() + b.square().sum()).backward()
        optimizer.step()
        # Not the same bits: the gradients of two forwards meet before their cast to FP32, or after it.
        for a, b in zip(gradients(net), gradients(reference), strict=True):
            assert (a - b).norm() <= 0.03 * b.norm()


def test_accumulation_refreshes_once() -> None:
    net, reference = pair()
    store, x = store_of(net), torch.randn(2, 5)
    optimizers = [OPTIMIZERS["adamw_fused"](m.parameters()) for m in (net, reference)]
    net(x)
    for _ in range(3):
        before = store.refreshes
        with store.accumulating():
            for _ in range(4):
                net(x).sum().backward()
        assert store.refreshes == before + 1
        for _ in range(4):
            reference(x).sum().backward()
        assert_same(gradients(net), gradients(reference))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    before = store.refreshes
    net(x)
    net(x)
    assert store.refreshes == before + 2


def test_a_step_inside_accumulation_is_not_missed() -> None:
    net, _ = pair()
    x = torch.randn(2, 5)
    with store_of(net).accumulating():
        net(x)
        net(x)
        fused_step(net)
        store_of(net).begin()
        assert torch.equal(shadow(net), net.first.weight.to(LOW))
    net.first.weight.data.mul_(3)
    store_of(net).begin()
    assert torch.equal(shadow(net), net.first.weight.to(LOW))


def test_tied_weights_have_one_shadow_and_one_copy() -> None:
    store = ShadowStore(LOW)
    weight = nn.Parameter(torch.randn(4, 4))
    x = torch.randn(2, 4, dtype=LOW)
    for _ in range(2):
        weight.grad = None
        store.begin()
        first, second = store.read([weight, weight])
        (third,) = store.read([weight])
        assert first is second is third
        (x @ first @ second @ third).float().square().sum().backward()
        with torch.no_grad():
            tied = weight.detach().clone().requires_grad_()
        low = tied.to(LOW)
        (x @ low @ low @ low).float().square().sum().backward()
        assert weight.grad is not None
        assert tied.grad is not None
        assert torch.equal(weight.grad, tied.grad)
        torch.optim.SGD([weight], lr=0.1).step()
    assert store.refreshes == 1


def test_a_weight_in_two_graphs_is_bumped_once_a_forward() -> None:
    store = ShadowStore(LOW)
    shared, own = (nn.Parameter(torch.randn(3, 3)) for _ in range(2))
    x = torch.randn(2, 3, dtype=LOW, requires_grad=True)
    for _ in range(3):
        store.begin()
        hidden = (x @ store.read([shared])[0]).tanh()
        a, b = store.read([own, shared])
        (hidden @ a @ b).sum().backward()
        torch.optim.SGD([shared, own], lr=0.1).step()


def test_low_weights_are_handed_back_and_other_dtypes_cast() -> None:
    store = ShadowStore(LOW)
    low = nn.Parameter(torch.randn(3).to(LOW))
    double = nn.Parameter(torch.randn(3, dtype=torch.float64))
    for _ in range(2):
        a, b = store.read([low, double])
        assert a is low
        assert torch.equal(b, double.to(LOW))
        assert b.grad_fn is not None
        assert store.read([double])[0] is not b


def test_a_computed_weight_takes_its_history_along() -> None:
    store = ShadowStore(LOW)
    leaf = torch.ones(3, requires_grad=True)
    weight = 2 * leaf
    store.read([weight])
    weight.mul_(3)
    store.read([weight])[0].float().sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [6, 6, 6]


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_parametrized_weights_are_read_afresh(mode: Any) -> None:
    net, reference = pair()
    x = torch.randn(2, 5)
    net(x)
    for model in (net, reference):
        parametrize.register_parametrization(model.first, "weight", Doubled())
    with mode():
        for scale in (1.0, 3.0):
            for model in (net, reference):
                model.get_parameter("first.parametrizations.weight.original").data.fill_(scale)
            assert torch.equal(net(x), reference(x))
    if mode is torch.enable_grad:
        net(x).sum().backward()
        reference(x).sum().backward()
        assert_same(gradients(net), gradients(reference))


def test_functionally_replaced_weights() -> None:
    net, reference = pair()
    x = torch.randn(2, 5)
    for _ in range(3):
        weights = {name: torch.randn_like(p) for name, p in net.named_parameters()}
        results = []
        for model in (net, reference):
            leaves = {name: value.clone().requires_grad_() for name, value in weights.items()}
            loss = functional_call(model, leaves, (x,)).square().sum()
            results.append([loss, *torch.autograd.grad(loss, [*leaves.values()])])
            scaled = {name: 2 * value for name, value in leaves.items()}
            loss = functional_call(model, scaled, (x,)).square().sum()
            results[-1] += [loss, *torch.autograd.grad(loss, [*leaves.values()])]
            with torch.no_grad():
                results[-1].append(functional_call(model, weights, (x,)))
        assert_same(*results)
    assert torch.equal(net(x), reference(x))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own, on the way to jvp
def test_functorch_transforms() -> None:
    net, reference = pair()
    x = torch.randn(4, 5)

    def all_of_it(model: Net) -> list[Tensor]:
        weights = {name: p.detach() for name, p in model.named_parameters()}

        def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
            return functional_call(model, weights, (x,)).square().sum()

        per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, x)
        own_weights = torch.func.vmap(torch.func.grad(lambda x: model(x).sum()))(x)
        tangent = torch.func.jvp(lambda w: loss(w, x), (weights,), (weights,))[1]
        return [*per_sample.values(), own_weights, tangent]

    assert_same(all_of_it(net), all_of_it(reference))  # first seen inside a transform
    net(x).sum().backward()
    reference(x).sum().backward()
    assert_same(gradients(net), gradients(reference))
    assert_same(all_of_it(net), all_of_it(reference))


def jit_trace(net: Net, x: Tensor) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated
        return torch.jit.trace(net.eval(), x)


def fx_trace(net: Net, x: Tensor) -> Any:
    return make_fx(lambda x: net(x))(x)


def fake_run(net: Net, x: Tensor) -> Any:
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert isinstance(net(mode.from_tensor(x)), torch._subclasses.FakeTensor)
    return net


@pytest.mark.parametrize("seen", [False, True], ids=["new", "seen before"])
@pytest.mark.parametrize("trace", [jit_trace, fx_trace, fake_run])
def test_a_tracer_sees_the_weights_and_leaves_no_trace(trace: Callable[[Net, Tensor], Any], seen: bool) -> None:
    net, reference = pair()
    x = torch.randn(2, 5)
    if seen:
        net(x)
        for model in (net, reference):
            model.first.weight.data.mul_(2)
    traced = trace(net, x)
    assert type(shadow(net)) is Tensor
    assert torch.equal(net(x), reference(x))
    store_of(net).clear()  # a trace that holds a shadow is left with the old values
    with torch.no_grad():
        for model in (net, reference):
            model.first.weight.mul_(2)
    assert torch.equal(traced(x), reference(x))


@pytest.mark.parametrize("capture", ["auto", "dynamo"])
def test_a_capture_in_a_jit_trace_is_no_part_of_it(capture: Literal["auto", "dynamo"]) -> None:
    """torch traces twice and compares: the second time nothing is captured."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    fxprec.convert(model, dtype=torch.bfloat16, capture=capture)
    x = torch.randn(3, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated
        traced = torch.jit.trace(model.eval(), x)
    assert torch.equal(traced(x), model(x))


def test_subclasses_are_cast_afresh() -> None:
    class Marked(nn.Parameter):
        pass

    store = ShadowStore(LOW)
    weight = Marked(torch.randn(3))
    first, second = store.read([weight])[0], store.read([weight])[0]
    assert first is not second
    weight.data.mul_(2)
    with torch.no_grad():
        store.begin()
        assert torch.equal(store.read([weight])[0], weight.to(LOW))


def test_weights_without_storage() -> None:
    store = ShadowStore(LOW)
    meta = nn.Linear(3, 3, device="meta")
    empty = nn.Parameter(torch.empty(0, 3))
    for _ in range(2):
        low, nothing = store.read([meta.weight, empty])
        assert low.is_meta
        assert low.dtype == nothing.dtype == LOW
        assert nothing.shape == (0, 3)
    empty.data = torch.empty(0, 5)
    assert store.read([empty])[0].shape == (0, 5)
    real = meta.to_empty(device="cpu")
    nn.init.ones_(real.weight)
    assert torch.equal(store.read([real.weight])[0], torch.ones(3, 3, dtype=LOW))


def test_sparse_weights() -> None:
    weight = torch.eye(3).to_sparse()
    (low,) = ShadowStore(LOW).read([weight])
    assert low.is_sparse
    assert torch.equal(low.to_dense(), torch.eye(3, dtype=LOW))


def test_a_failed_copy_leaves_nothing_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    net, _ = pair()
    net(torch.randn(2, 5))
    ema_swap(net)
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(stores, "foreach_copy_", fail)
        shadow(net)
    assert torch.equal(shadow(net), net.first.weight.to(LOW))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_weights_on_two_devices() -> None:
    net, reference = (nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False).cuda()) for _ in range(2))
    reference.load_state_dict(net.state_dict())
    store, calls = ShadowStore(LOW), Calls()
    x = torch.randn(2, 4, dtype=LOW)
    for _ in range(2):
        store.begin()
        with calls:
            low = store.read([*net.parameters()])
        ((x @ low[0]).cuda() @ low[1]).sum().backward()
        low = [w.to(LOW) for w in reference.parameters()]
        ((x @ low[0]).cuda() @ low[1]).sum().backward()
        assert_same(gradients(net), gradients(reference))
        for model in (net, reference):
            torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert calls.names.count("_foreach_copy_") == 2
    assert store.refreshes == 1


def test_a_freed_storage_is_let_go() -> None:
    """FSDP2 frees the storage of a gathered weight, and other blocks go on reading theirs."""
    store = ShadowStore(LOW)
    gathered, other = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3))
    store.begin()
    store.read([gathered])
    store.read([other])
    gathered.untyped_storage().resize_(0)
    store.begin()
    assert torch.equal(store.read([other])[0], other.to(LOW))
    gathered.untyped_storage().resize_(12)
    with torch.no_grad():
        gathered.fill_(2)
    assert torch.equal(store.read([gathered])[0], torch.full((3,), 2, dtype=LOW))


def test_inference_weights() -> None:
    store = ShadowStore(LOW)
    with torch.inference_mode():
        weight = nn.Parameter(torch.randn(3))
        assert torch.equal(store.read([weight])[0], weight.to(LOW))
        weight.mul_(2)
        assert torch.equal(store.read([weight])[0], weight.to(LOW))


def test_copies_and_pickles_are_empty() -> None:
    net, _ = pair()
    x = torch.randn(2, 5)
    net(x)
    twin = copy.deepcopy(net)
    assert isinstance(twin.store, ShadowStore)
    assert twin.store is not net.store
    assert shadow(twin) is not shadow(net)
    twin(x).sum().backward()
    assert all(p.grad is None for p in net.parameters())
    assert all(p.grad is not None for p in twin.parameters())
    file = io.BytesIO()
    torch.save(store_of(net), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert loaded.dtype == LOW
    assert file.getbuffer().nbytes < 2000


def test_shadows_stay_the_same_tensors() -> None:
    net, _ = pair()
    optimizer = OPTIMIZERS["adamw_fused"](net.parameters())
    kept = shadow(net)
    address = kept.data_ptr()
    for _ in range(3):
        net(torch.randn(2, 5)).sum().backward()
        optimizer.step()
        store_of(net).mark_stale()
        assert shadow(net) is kept
        assert kept.data_ptr() == address


def released(store: ShadowStore, make: Callable[[], Tensor]) -> tuple[weakref.ref[Tensor], weakref.ref[Tensor]]:
    weight = make()
    (low,) = store.read([weight])
    return weakref.ref(weight), weakref.ref(low)


@pytest.mark.parametrize("dtype", [torch.float32, LOW], ids=str)
def test_a_dead_frozen_weight_takes_its_shadow_along(dtype: torch.dtype) -> None:
    store = ShadowStore(LOW)
    weight, low = released(store, lambda: torch.randn(3, dtype=dtype))
    assert weight() is None
    assert low() is None


@pytest.mark.parametrize("event", ["forward", "refresh", "new weight"])
def test_a_replaced_weight_and_its_shadow_are_released(event: str) -> None:
    store = ShadowStore(LOW)
    kept = [nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3), requires_grad=False)]
    kept_low = store.read(kept)
    weight, low = released(store, lambda: nn.Parameter(torch.randn(3)))
    if event == "forward":
        store.begin()
        store.read(kept)
    elif event == "refresh":
        store.refresh()
    else:
        with torch.no_grad():
            store.read([nn.Parameter(torch.randn(3))])
    assert weight() is None
    assert low() is None
    assert [*map(id, store.read(kept))] == [*map(id, kept_low)]


def test_a_dead_store_releases_everything() -> None:
    net, _ = pair()
    net(torch.randn(2, 5)).sum().backward()
    references = [weakref.ref(o) for o in (store_of(net), net.first.weight, shadow(net))]
    del net
    gc.collect()
    assert [r() for r in references] == [None] * 3
    torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1).step()


def test_clear_drops_the_shadows() -> None:
    net, _ = pair()
    x = torch.randn(2, 5)
    net(x)
    low = weakref.ref(shadow(net))
    store_of(net).clear()
    assert low() is None
    net(x).sum().backward()


@contextlib.contextmanager
def debugging(net: Net) -> Iterator[None]:
    store_of(net).debug = True
    yield
    store_of(net).debug = False


def test_debug_finds_a_stale_shadow() -> None:
    net, _ = pair()
    x = torch.randn(2, 5)
    with torch.no_grad():
        net.first.weight[0, 0] = float("nan")
    net(x)
    with debugging(net), torch.no_grad():
        net(x)
        for seen in (ema_swap, fused_step, new_data, data_swap, data_scaled):
            seen(net)
            net(x)
        net.first.weight.data[1, 3] = 3.0  # one element, which is no sample
        with pytest.raises(StaleShadowError, match=r"first.weight of shape \(7, 5\) on cpu.*refresh\(model\)"):
            net(x)
        store_of(net).refresh()
        net(x)


def test_the_answer_belongs_to_the_caller() -> None:
    net, _ = pair()
    weights = [*net.parameters()]
    store_of(net).read(weights).clear()
    store_of(net).read(weights).clear()
    assert len(store_of(net).read(weights)) == 4


def test_threads_make_one_shadow(monkeypatch: pytest.MonkeyPatch) -> None:
    def slowly(weight: Tensor) -> bool:
        threading.Event().wait(0.05)  # room for another thread to make it too
        return True

    monkeypatch.setattr("fxprec.shadows.store.is_lasting", slowly)
    store = ShadowStore(LOW)
    weight = nn.Parameter(torch.randn(3))
    found: list[Tensor] = []
    threads = [threading.Thread(target=lambda: found.extend(store.read([weight]))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({*map(id, found)}) == 1


def test_threads_share_a_store() -> None:
    net, reference = pair()
    x = torch.randn(3, 5)
    expected = torch.autograd.grad(reference(x).sum(), [*reference.parameters()])
    failures: list[object] = []

    def work(index: int) -> None:
        try:
            for step in range(40):
                if index % 2:
                    with torch.no_grad():
                        own = {name: p.detach().clone() for name, p in net.named_parameters()}
                        low = store_of(net).read([*own.values()])
                        assert all(torch.equal(a, b.to(LOW)) for a, b in zip(low, own.values(), strict=True))
                        if step % 8 == index:
                            store_of(net).mark_stale()
                else:
                    found = torch.autograd.grad(net(x).sum(), [*net.parameters()])
                    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


# -- steps that change nothing -----------------------------------------------------------------------------------------


def skipped_step(net: Net, optimizer: torch.optim.Optimizer) -> None:
    """As a scaler that found inf steps a fused optimizer: its kernels run, and change nothing."""
    for parameter in net.parameters():
        parameter.grad = torch.full_like(parameter, float("inf"))
    optimizer.found_inf = torch.ones(())  # type: ignore[attr-defined]
    optimizer.step()
    del optimizer.found_inf  # type: ignore[attr-defined]
    optimizer.zero_grad()


UNCHANGED: dict[str, Callable[[Net, torch.optim.Optimizer], Any]] = {
    "no gradients": lambda net, optimizer: optimizer.step(),
    "a closure without a backward": lambda net, optimizer: optimizer.step(lambda: torch.zeros(())),
    "another model's optimizer": lambda net, optimizer: torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0).step(),
    "skipped on the device": skipped_step,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("step", UNCHANGED.values(), ids=UNCHANGED)
def test_a_step_that_changes_nothing_lets_a_pending_backward_be(
    step: Callable[[Net, torch.optim.Optimizer], Any], name: str
) -> None:
    net, reference = pair()
    # A scaler does not step others at all when it skips.
    optimizer = OPTIMIZERS["adamw_fused" if step is skipped_step else name](net.parameters())
    x = torch.randn(2, 5)
    loss = net(x).sum()
    step(net, optimizer)
    net(x)  # another forward refreshes the shadows in between
    loss.backward()
    reference(x).sum().backward()
    assert_same(gradients(net), gradients(reference))


@pytest.mark.parametrize("stepped", ["first", "second"])
def test_a_step_on_some_weights_spoils_a_backward_through_those_only(stepped: str) -> None:
    net, _ = pair()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, fused=True)
    x = torch.randn(2, 5)
    net(x)
    weight, bias = net.low(net.second.weight, net.second.bias)
    loss = nn.functional.linear(torch.randn(2, 7, dtype=LOW, requires_grad=True), weight, bias).sum()
    changed = net.get_submodule(stepped).weight
    changed.grad = torch.ones_like(changed)
    optimizer.step()
    net(x)
    if stepped == "first":
        return loss.backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# -- weights in shared memory ------------------------------------------------------------------------------------------


def written_elsewhere(weight: Tensor) -> None:
    """As another process does it (Hogwild): the memory changes, and nothing of the tensor here."""
    weight.detach().numpy()[...] *= 2


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, fxprec.optim.SGD])
@pytest.mark.parametrize("recording", [True, False], ids=["training", "no_grad"])
def test_weights_that_another_process_writes_are_read_anew(
    optimizer: type[torch.optim.Optimizer], recording: bool
) -> None:
    model, _ = fxprec.convert(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)))
    x = torch.randn(2, 5)
    model(x).sum().backward()
    model.share_memory()
    model(x).sum().backward()
    optimizer(model.parameters(), lr=0.1).step()
    for _ in range(3):
        written_elsewhere(model[0].weight)
        with torch.set_grad_enabled(recording):
            ours = model(x)
        assert torch.equal(ours, copy.deepcopy(model)(x))


def test_accumulation_holds_shared_weights_too() -> None:
    model, _ = fxprec.convert(nn.Linear(5, 7))
    model.share_memory()
    x = torch.randn(2, 5)
    with fxprec.accumulate(model):
        before = model(x)
        written_elsewhere(model.weight)
        assert torch.equal(model(x), before)
    assert not torch.equal(model(x), before)


def test_what_an_optimizer_keeps_of_a_shadow_keeps_no_edge():
    """A weight's AccumulateGrad runs where it was made as long as it lives: a captured step makes shadows anew."""
    store, weight = ShadowStore(LOW), nn.Parameter(torch.ones(3))
    store.begin()
    (shadow,) = store.read([weight])
    kept = store.shadow_of(weight)
    assert kept is not None and kept.grad_fn is None and kept.data_ptr() == shadow.data_ptr()
    before = shadow._version
    kept.mul_(2)
    assert shadow._version == before + 1 and shadow.tolist() == [2, 2, 2]
    shadow.grad_fn.next_functions[0][0].metadata["made"] = "before"
    assert torch.autograd.graph.get_gradient_edge(weight).node.metadata
    del shadow
    store.clear()
    assert not torch.autograd.graph.get_gradient_edge(weight).node.metadata, "it is made anew"
