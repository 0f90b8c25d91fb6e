"""memory: which tensors share memory, and which graphs ask at a call."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from torch import nn

import fxprec
from fxprec.programs.memory import SharedMemory, mark_all_shared, mark_shared

sizes = (4, 8)


def apart(count):
    return [torch.randn(sizes) for _ in range(count)]


def test_views_share_and_others_do_not() -> None:
    a, b = apart(2)
    memory = SharedMemory([a], [], [b, b.view(-1)])
    assert memory.holds([a], [b, b])
    assert memory.holds(apart(1), [a, a[1:3]])
    assert not memory.holds([a], [b, a])
    assert not memory.holds([a], apart(2))
    assert not memory.holds([a], [a, a])


def test_without_a_call_inputs_are_taken_to_share_nothing() -> None:
    a, b, c = apart(3)
    memory = SharedMemory([a, a.view(-1), b], [], None)
    assert memory.holds([c, c, b], apart(3))
    assert not memory.holds([c, c, b], [c])
    assert not memory.holds([a, b, c], [])


def test_weights_are_looked_at_again_when_they_move() -> None:
    a, b = apart(2)
    memory = SharedMemory([a, b], [], apart(1))
    assert memory.holds([a, b], apart(1))
    b.data = a.data
    assert not memory.holds([a, b], apart(1))
    b.data = torch.randn(sizes)
    assert memory.holds([a, b], apart(1))


def test_what_the_graph_holds_itself_counts() -> None:
    a, held = apart(2)
    memory = SharedMemory([a], [held], apart(1))
    assert memory.holds([a], apart(1))
    assert not memory.holds([a], [held[2:]])
    assert not memory.holds([held], apart(1))


def test_groups_are_closed_by_way_of_others() -> None:
    """Two slices that do not overlap, of one storage, and other storages over the same memory."""
    array = torch.randn(6, 8).numpy()
    a, b, c = (torch.from_numpy(part) for part in (array[:3], array[2:5], array[4:]))
    memory = SharedMemory([], [], [a, b, c])
    x = torch.randn(6, 8)
    assert memory.holds([], [x[:1], x[2:3], x[4:]])
    assert not memory.holds([], [x[:1], x[2:3], *apart(1)])


@pytest.mark.parametrize("nowhere", [torch.empty(0), torch.empty(3, device="meta"), 3, None])
def test_what_lies_nowhere_shares_nothing(nowhere) -> None:
    memory = SharedMemory([], [], [nowhere, nowhere])
    assert memory.holds([], [nowhere, nowhere])
    assert memory.holds([], apart(2))


def test_marks() -> None:
    gm = torch.fx.symbolic_trace(lambda a, b, c, n: a + b + c)
    a, b, c, n = gm.graph.find_nodes(op="placeholder")
    x, y = apart(2)
    mark_shared(gm, {a: x, b: y, c: x[1:], n: 3})
    assert a.meta["memory"] == c.meta["memory"]
    assert "memory" not in b.meta | n.meta
    mark_all_shared(gm)
    assert len({node.meta["memory"] for node in (a, b, c)}) == 1


class Adds(nn.Module):
    def __init__(self, writes):
        super().__init__()
        self.l, self.writes = nn.Linear(8, 8), writes

    def forward(self, a, b):
        h = self.l(b)
        c = a.mul_(2) if self.writes else a * 2
        return self.l(b) - h + c.sum() * 0


@pytest.mark.parametrize("capture", ["symbolic", "dynamo"])
def test_graphs_that_write_nothing_are_not_asked(capture, monkeypatch) -> None:
    asked = []
    monkeypatch.setattr(SharedMemory, "holds", lambda *_: asked.append(1) or True)
    for writes in (False, True):
        model, _ = fxprec.convert(Adds(writes), capture=capture)
        for _ in range(3):
            model(*apart(2))
        assert bool(asked) is writes


@pytest.mark.parametrize("capture", ["symbolic", "dynamo"])
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("settings", [{}, {"fuse": "aten"}, {"placement": "autocast"}], ids=str)
def test_each_way_of_sharing_has_a_graph(capture, level, settings) -> None:
    torch.manual_seed(0)
    plain = Adds(True)
    model, _ = fxprec.convert(Adds(True), capture=capture, level=level, **settings)
    model.load_state_dict(plain.state_dict())
    for round in range(2):
        for make in (
            lambda x: (torch.ones(sizes), x),
            lambda x: (x.view(-1), x),
            lambda x: (x, x),
            lambda x: (x[1], x),
        ):
            x = torch.randn(sizes)
            ours = x.clone()
            torch.testing.assert_close(model(*make(ours)), plain(*make(x)), rtol=2e-2, atol=3e-2)
            assert torch.equal(ours, x)
        if not round:
            captured = len(fxprec.graphs(model))
    assert len(fxprec.graphs(model)) == captured >= 2


def test_beyond_some_ways_one_graph_serves_all() -> None:
    class Many(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.Linear(8, 8)

        def forward(self, *xs):
            before = sum(self.l(x) for x in xs)
            xs[0].mul_(2)
            return sum(self.l(x) for x in xs) - before

    plain = Many()
    model, _ = fxprec.convert(Many(), capture="dynamo")
    model.load_state_dict(plain.state_dict())
    model(*apart(5))
    for number in range(16):
        ours, x = torch.randn(sizes), torch.randn(sizes)
        ours.copy_(x)
        own = [place == 0 or number >> (place - 1) & 1 for place in range(5)]
        given, wanted = ([y.view(sizes) if mine else torch.ones(sizes) for mine in own] for y in (ours, x))
        torch.testing.assert_close(model(*given), plain(*wanted), rtol=2e-2, atol=5e-2)
    assert len(fxprec.graphs(model)) <= 10


@pytest.mark.parametrize("capture", ["symbolic", "dynamo"])
def test_a_dropped_model_leaves_nothing_behind(capture) -> None:
    model, _ = fxprec.convert(Adds(True), capture=capture)
    x = torch.randn(sizes)
    model(*apart(2))
    model(x.view(-1), x)
    weight = weakref.ref(model.l.weight)
    del model
    import gc

    gc.collect()
    assert weight() is None


def test_transforms_of_torch_func() -> None:
    """Their tensors lie nowhere; what they wrap does."""
    plain = Adds(True)
    model, _ = fxprec.convert(Adds(True), capture="symbolic")
    model.load_state_dict(plain.state_dict())
    a, b = torch.randn(3, *sizes), torch.randn(3, *sizes)
    wanted = torch.func.vmap(plain)(a.clone(), b)
    torch.testing.assert_close(torch.func.vmap(model)(a, b), wanted, rtol=2e-2, atol=3e-2)


@pytest.mark.parametrize("change", [lambda m: setattr(m.fc, "bias", None), lambda m: delattr(m, "count")])
def test_a_weight_that_is_gone_is_another_graph(change) -> None:
    """Which memory tensors lie in is asked only of those that are where the trace found them."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)
            self.register_buffer("count", torch.zeros(8))

        def forward(self, x):
            if hasattr(self, "count"):
                self.count.add_(1)
                x = x + self.count
            return self.fc(x)

    torch.manual_seed(0)
    plain, (x,) = Counting(), apart(1)
    x = x[:, :1].expand(4, 8)
    model = fxprec.convert(copy.deepcopy(plain), dtype=torch.bfloat16).module
    assert model(x).allclose(plain(x), atol=0.05)
    change(model)
    change(plain)
    for _ in range(2):
        assert model(x).allclose(plain(x), atol=0.05)


class Doubling(nn.Module):
    """Writes to a buffer of a part between two reads of its input."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.fc, self.part = nn.Linear(8, 8, bias=False), name
        self.add_module(name, nn.Module())
        self.get_submodule(name).register_buffer("b", torch.ones(sizes))

    def forward(self, a):
        h = self.fc(a)
        getattr(self, self.part).b.mul_(2)
        return self.fc(a) - h


@pytest.mark.parametrize("name", ["other", "code"])
def test_weights_of_a_name_that_no_graph_module_can_have_are_watched(name: str) -> None:
    """``code`` is an attribute of every graph module: there it is ``code_``."""
    model, _ = fxprec.convert(Doubling(name), dtype=torch.bfloat16)
    with torch.no_grad():
        assert not model(torch.randn(sizes)).any()
        shared = model.get_submodule(name).b
        expected = model.fc(shared.clone())
        torch.testing.assert_close(model(shared), expected, atol=0.05, rtol=0.05)
