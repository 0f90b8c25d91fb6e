"""Writes to weights past their version counters: by collectives, buffers, storages and raw memory."""

from __future__ import annotations

import copy
import ctypes
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.utils import dlpack
from torch.utils.flop_counter import FlopCounterMode

import fxprec
import fxprec.optim
from fxprec.kernels.cpu.words import SAMPLES
from fxprec.model.conversion import conversion_of
from fxprec.shadows import ShadowStore
from fxprec.testing import count_casts

Write = Callable[[Tensor, Tensor], object]


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of one."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("group") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def model_of(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 9), nn.ReLU(), nn.Linear(9, 3))
    return fxprec.convert(net, dtype=torch.bfloat16, **options)[0]


def exact(model: nn.Module, x: Tensor) -> Tensor:
    """What the weights give as they are now."""
    with torch.no_grad(), fxprec.original(model):
        return model(x)


def assert_fresh(model: nn.Module, x: Tensor, forward: Callable[[], Tensor]) -> None:
    """Two forwards in a row compute with the weights as they are."""
    truth = exact(model, x)
    for _ in range(2):
        assert torch.allclose(forward(), truth, atol=0.02 * float(truth.abs().max()) + 1e-6)


def forward_of(model: nn.Module, x: Tensor, mode: str) -> Callable[[], Tensor]:
    contexts = {"training": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}

    def forward() -> Tensor:
        with contexts[mode]():
            return model(x).detach()

    return forward


def _to_self(p: Tensor, new: Tensor, collective: Callable[[Tensor], object]) -> None:
    """For a collective whose result, in a group of one, is what it was given: by raw memory what it is to send."""
    ctypes.memmove(p.data_ptr(), new.data_ptr(), p.numel() * 4)
    collective(p.detach())


COLLECTIVES: dict[str, Write] = {
    "scatter": lambda p, new: dist.scatter(p.detach(), [new], 0),
    "broadcast": lambda p, new: _to_self(p, new, lambda d: dist.broadcast(d, 0)),
    "all_reduce": lambda p, new: _to_self(p, new, dist.all_reduce),
    "all_reduce_async": lambda p, new: _to_self(p, new, lambda d: dist.all_reduce(d, async_op=True).wait()),
    "all_to_all_single": lambda p, new: dist.all_to_all_single(p.detach().view(-1), new.view(-1)),
    "reduce_scatter": lambda p, new: dist.reduce_scatter(p.detach(), [new]),
    "reduce_scatter_tensor": lambda p, new: dist.reduce_scatter_tensor(p.detach(), new),
    "all_gather": lambda p, new: dist.all_gather([p.detach()], new),
    "all_gather_into_tensor": lambda p, new: dist.all_gather_into_tensor(p.detach(), new),
    "functional": lambda p, new: p.data.copy_(functional.all_reduce(new, "sum", [0])),
}
OTHERS: dict[str, Write] = {
    "data": lambda p, new: p.data.copy_(new),
    "data_scaled": lambda p, new: p.data.mul_(1.5),
    "detached_data": lambda p, new: p.detach().data.copy_(new),
    "numpy": lambda p, new: p.detach().numpy().__setitem__(..., new.numpy()),
    "dlpack": lambda p, new: torch.from_dlpack(dlpack.to_dlpack(p.detach())).copy_(new),
    "storage": lambda p, new: p.untyped_storage().copy_(new.untyped_storage()),
    "memmove": lambda p, new: ctypes.memmove(p.data_ptr(), new.data_ptr(), p.numel() * 4),
    "frombuffer": lambda p, new: torch.frombuffer(p.detach().numpy(), dtype=torch.float32).copy_(new.view(-1)),
    "negated": lambda p, new: p.data.neg_(),
    "nan": lambda p, new: p.data.fill_(float("nan")).copy_(new),
    "from_seen_to_unseen": lambda p, new: (p.detach().mul_(2), p.data.copy_(new)),
}
OPTIMIZERS = {
    "fxprec": lambda p: fxprec.optim.AdamW(p, lr=1e-2),
    "fxprec_sgd": lambda p: fxprec.optim.SGD(p, lr=1e-2),
    "torch": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "torch_fused": lambda p: torch.optim.SGD(p, lr=1e-2, fused=True),
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, steps: int = 2) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("mode", ["training", "no_grad", "inference"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("write", [*COLLECTIVES, *OTHERS])
def test_a_write_to_all_of_the_weights_is_seen(write: str, optimizer: str, mode: str):
    model, x = model_of(), torch.randn(4, 8)
    stepping = OPTIMIZERS[optimizer](model.parameters())
    forward = forward_of(model, x, mode)
    train(model, stepping, x)
    if mode != "training":
        forward()
    for parameter in model.parameters():
        (COLLECTIVES | OTHERS)[write](parameter, torch.randn_like(parameter).detach())
    assert_fresh(model, x, forward)
    train(model, stepping, x, steps=1)
    assert_fresh(model, x, forward)


@pytest.mark.parametrize("capture", ["symbolic", "dynamo"])
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("mode", ["training", "no_grad"])
def test_whatever_captured_the_model(capture: str, level: str, mode: str):
    model, x = model_of(capture=capture, level=level), torch.randn(4, 8)
    train(model, fxprec.optim.SGD(model.parameters(), lr=0.01), x)
    forward = forward_of(model, x, mode)
    forward()
    for parameter in model.parameters():
        parameter.data.mul_(1.7)
    assert_fresh(model, x, forward)


def test_pieces_between_graph_breaks():
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            torch._dynamo.graph_break()
            return self.b(x)

    model, x = fxprec.convert(Broken(), dtype=torch.bfloat16)[0], torch.randn(4, 8)
    train(model, fxprec.optim.SGD(model.parameters(), lr=0.01), x)
    for mode in ("training", "no_grad"):
        forward = forward_of(model, x, mode)
        forward()
        for layer in (model.b, model.a):
            layer.weight.data.mul_(1.7)
            assert_fresh(model, x, forward)


def test_a_flat_buffer_that_the_weights_are_views_of():
    """Each ``.data =`` has a version counter of its own, so a write to the buffer counts nowhere."""
    model, x = model_of(), torch.randn(4, 8)
    parameters = [*model.parameters()]
    flat = torch.cat([p.detach().view(-1) for p in parameters])
    parts = flat.split([p.numel() for p in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.data = part.view_as(parameter)
    for _ in range(3):
        model.zero_grad()
        model(x).square().sum().backward()
        forward = forward_of(model, x, "no_grad")
        forward()
        flat.sub_(0.01 * torch.cat([torch.zeros(0) if p.grad is None else p.grad.view(-1) for p in parameters]))
        assert_fresh(model, x, forward)


def test_a_write_to_one_weight_has_all_looked_at():
    """Rows of an embedding that no token named get no update: its samples stay, those of others do not."""
    model = fxprec.convert(nn.Sequential(nn.Embedding(64, 8), nn.Linear(8, 3)), dtype=torch.bfloat16, level="O2")[0]
    ids = torch.tensor([5, 7])
    forward = forward_of(model, ids, "no_grad")
    forward()
    model[0].weight.data[5].add_(1)
    model[1].weight.data.mul_(1.5)
    assert_fresh(model, ids, forward)


@pytest.mark.parametrize("shape", [(), (1,), (2, 1), (7,), (3, 5), (8, 1, 3, 3), (40, 30)], ids=str)
@pytest.mark.parametrize("layout", ["plain", "transposed", "sliced"])
def test_of_any_shape_and_layout(shape: tuple[int, ...], layout: str):
    torch.manual_seed(0)
    value = torch.randn(shape)
    if layout == "transposed":
        value = value.clone().t() if value.dim() == 2 else value
    elif layout == "sliced" and value.dim():
        value = torch.randn(*shape, 3)[..., 1]
    weight = nn.Parameter(value)
    store = ShadowStore(torch.bfloat16)
    store.begin()
    store.read([weight])
    with torch.no_grad():
        for _ in range(3):
            weight.data.mul_(1.7)
            store.begin()
            (low,) = store.read([weight])
            assert torch.equal(low, weight.bfloat16())


def pruned(share: str) -> Tensor:
    """A weight of which few elements are not zero, none of them where samples lie at first."""
    value = torch.zeros(300, 400)
    keep = {"scattered": torch.rand(300, 400) < 0.05, "a row": torch.arange(300)[:, None] == 57, "one": None}[share]
    kept = torch.randn(300, 400)
    value = kept * keep if keep is not None else value.index_put((torch.tensor(123), torch.tensor(45)), kept[0, 0])
    value[[0, -1]] = value[300 * 382 // 1000] = value[300 * 724 // 1000] = 0.0
    return value * torch.where(kept < 0, -1.0, 1.0)  # some zeros are negative, as those of a mask


@pytest.mark.parametrize("when", ["when made", "when refreshed"])
@pytest.mark.parametrize("layout", ["plain", "transposed"])
@pytest.mark.parametrize("share", ["scattered", "a row", "one"])
def test_of_a_pruned_weight(share: str, layout: str, when: str):
    torch.manual_seed(0)
    value = pruned(share)
    value = value.t() if layout == "transposed" else value
    weight, others = nn.Parameter(value.clone() if when == "when made" else torch.randn(value.shape)), [
        nn.Parameter(torch.randn(7)), nn.Parameter(torch.zeros(5000)), nn.Parameter(torch.zeros(()))
    ]  # fmt: skip
    store = ShadowStore(torch.bfloat16)
    with torch.no_grad():
        store.begin()
        store.read([others[0], weight, *others[1:]])
        store.read([weight, others[0]])  # another comparison of the same weight
        weight.copy_(value)
        for read in ([others[0], weight, *others[1:]], [weight, others[0]]) * 2:
            store.begin()
            store.read(read)
            weight.untyped_storage().copy_((weight * 2).untyped_storage())
            store.begin()
            lows = store.read(read)
            assert all(torch.equal(low, each.bfloat16()) for low, each in zip(lows, read, strict=True))
            looked = store.refreshes
            store.begin()
            store.read(read)
            assert store.refreshes == looked


def test_a_weight_at_an_odd_address():
    """Words are read where four bytes begin: such a weight is copied at each forward."""
    numbers = torch.arange(41, dtype=torch.uint8)
    weight = nn.Parameter(torch.frombuffer(numbers.numpy(), dtype=torch.float32, offset=1, count=9))
    store = ShadowStore(torch.bfloat16)
    with torch.no_grad():
        for _ in range(2):
            weight.data.fill_(3.0).mul_(torch.rand(1))
            store.begin()
            (low,) = store.read([weight])
            assert torch.equal(low, weight.bfloat16())


def test_a_forward_between_a_write_and_a_backward_stays_legal():
    """As in eager, where such a write counts nowhere either: autograd is not told of it."""
    model, x = model_of(), torch.randn(4, 8)
    loss = model(x).sum()
    for parameter in model.parameters():
        parameter.data.mul_(1.01)
    with torch.no_grad():
        model(x)
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_within_accumulate():
    model, x = model_of(), torch.randn(4, 8)
    with fxprec.accumulate(model):
        model(x).sum().backward()
        for parameter in model.parameters():
            parameter.data.mul_(1.7)
        assert_fresh(model, x, lambda: model(x).detach())


def test_under_a_dispatch_mode_that_counts_ops():
    model, x = model_of(), torch.randn(4, 8)
    with torch.no_grad():
        model(x)
        with FlopCounterMode(display=False):
            model[0].weight.data.mul_(1.7)
            assert_fresh(model, x, lambda: model(x))


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_under_another_default_device(device: str):
    model, x = model_of(), torch.randn(4, 8)
    with torch.no_grad(), torch.device(device):
        model(x)
        model[0].weight.data.mul_(1.7)
        assert_fresh(model, x, lambda: model(x))


def test_memory_that_a_weight_left_is_not_read():
    """A smaller weight in the place of a larger one, whose memory is gone."""
    model, x = model_of(), torch.randn(4, 8)
    with torch.no_grad():
        for width in (4096, 2, 4096, 3):
            model[0].weight.data, model[0].bias.data = torch.randn(width, 8), torch.randn(width)
            model[2].weight.data = torch.randn(3, width)
            assert_fresh(model, x, lambda: model(x))


def test_moving_the_model_lets_go_of_the_old_memory():
    model, x = model_of(), torch.randn(4, 8)
    model(x)
    model.double()
    assert not conversion_of(model).store._entries and not conversion_of(model).store._looks


def test_rows_are_used_again():
    store = ShadowStore(torch.bfloat16)
    for _ in range(5):
        weights = [nn.Parameter(torch.randn(3)) for _ in range(100)]
        store.begin()
        store.read(weights)
        store.forget(weights)
    assert store._samples[torch.device("cpu")]._next == 100
    assert store._samples[torch.device("cpu")].values.numel() < 300 * SAMPLES


def test_a_dead_weight_is_let_go():
    store = ShadowStore(torch.bfloat16)
    weight = torch.randn(1000)
    store.begin()
    store.read([weight])
    gone = weakref.ref(weight.untyped_storage())
    del weight
    gc.collect()
    assert gone() is None and not store._entries


def test_copies_look_at_their_own_weights():
    model, x = model_of(), torch.randn(4, 8)
    model(x)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for each in (model, other):
            each(x)
            each[0].weight.data.mul_(1.7)
            assert_fresh(model, x, lambda: model(x))
            assert_fresh(other, x, lambda: other(x))


def test_a_steady_forward_copies_nothing():
    model, x = model_of(), torch.randn(4, 8)
    with torch.no_grad():
        model(x)
        store = conversion_of(model).store
        before = store.refreshes, store.looked
        for _ in range(3):
            model(x)
        assert (store.refreshes, store.looked) == before


def test_an_optimizer_of_ours_still_spares_the_copy():
    model, x = model_of(), torch.randn(4, 8)
    optimizer = fxprec.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, x)
    before = conversion_of(model).store.refreshes
    train(model, optimizer, x, steps=3)
    assert conversion_of(model).store.refreshes == before


def numpy_with_out(weight: Tensor) -> None:
    array = weight.detach().numpy()
    np.multiply(array, 2, out=array)


def numpy_with_positional_out(weight: Tensor) -> None:
    array = np.asarray(weight.detach())
    np.add(array, array, array)


def numpy_through_a_view(weight: Tensor) -> None:
    array = weight.detach().numpy().reshape(-1).T
    array[:] = array * 2


def numpy_augmented(weight: Tensor) -> None:
    weight.detach().numpy()[...] *= 2


def numpy_filled(weight: Tensor) -> None:
    array = weight.detach().numpy()
    array.T.fill(0.5)


NUMPY_WRITES: tuple[Callable[[Tensor], object], ...] = (
    numpy_with_out,
    numpy_with_positional_out,
    numpy_through_a_view,
    numpy_augmented,
    numpy_filled,
    lambda weight: torch.from_numpy(weight.detach().numpy()).mul_(2),
    lambda weight: torch.as_tensor(weight.detach()).mul_(2),
)


@pytest.mark.parametrize("write", NUMPY_WRITES, ids=lambda write: write.__name__)
def test_a_forward_sees_what_it_writes_by_numpy(write: Callable[[Tensor], object]) -> None:
    """dynamo traces NumPy into the graph, whose ops do not say what they write."""

    def hook(layer: nn.Linear, _: object) -> None:
        write(layer.weight)

    def net() -> nn.Module:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        layers[1].register_forward_pre_hook(hook)
        return layers

    plain, model, x = net(), fxprec.convert(net(), dtype=torch.bfloat16).module, torch.randn(4, 8)
    for _ in range(3):
        expected, found = plain(x), model(x)
        assert (found - expected).norm() < 0.02 * expected.norm()


def test_a_forward_that_reads_by_numpy_keeps_its_shadows() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            scale = np.multiply(self.layer.weight.detach().numpy().sum(), 2) if self.numpy else 2.0
            return self.layer(x) * torch.as_tensor(scale)

    counts = []
    for numpy in (True, False):
        net = Scaled()
        net.numpy = numpy
        model = fxprec.convert(net, dtype=torch.bfloat16).module
        model(torch.randn(4, 8))
        with count_casts() as casts:
            model(torch.randn(4, 8))
        counts.append(casts.total)
    assert counts[0] == counts[1]
