"""rehearse: what a call casts and keeps for its backward, and what eager autocast would, are what real calls do."""

from __future__ import annotations

import copy
import itertools
import json
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxprec
from fxprec.inspection import rehearsal
from fxprec.model.conversion import conversion_of, is_converted
from fxprec.testing import count_casts
from fxprec.torch_internals import OpMode, storage_key


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.last = nn.Conv2d(8, 4, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.dropout(F.silu(self.norm(self.first(x))), 0.2, self.training)).exp()


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        def body(x: Tensor) -> Tensor:
            return self.second(self.first(x).softmax(-1))

        inner: Any = checkpoint(body, x, use_reentrant=False)
        return self.second(self.first(inner).exp())


class Blocks(nn.Module):
    """Pre-norm blocks with attention, on (2, 5, 16)."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(16), "qkv": nn.Linear(16, 48), "out": nn.Linear(16, 16)})
            for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            assert isinstance(block, nn.ModuleDict)
            q, k, v = (
                part.unflatten(-1, (2, 8)).transpose(1, 2) for part in block["qkv"](block["norm"](x)).chunk(3, -1)
            )
            attended = (q @ k.transpose(-2, -1)).softmax(-1) @ v
            x = x + block["out"](attended.transpose(1, 2).flatten(2))
        return x.logsumexp(-1)


class TwoGraphs(nn.Module):
    """Two graphs that read one weight, whose cast autocast makes once for both."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        torch._dynamo.graph_break()
        return self.layer(hidden.relu())


def partly_frozen(model: Blocks) -> Blocks:
    """The model, of which one layer wants no gradients: autocast casts its weights at each use, and caches none."""
    model.blocks[1].requires_grad_(False)
    return model


def images() -> Tensor:
    return torch.randn(2, 3, 9, 9)


#: name -> (model, its input, how to convert)
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], dict[str, Any]]] = {
    "convolutions": (Convolutions, images, {}),
    "convolutions, regions": (Convolutions, images, {"fuse": "aten"}),
    "convolutions by dynamo": (Convolutions, images, {"capture": "dynamo"}),
    "convolutions, O2": (Convolutions, images, {"level": "O2"}),
    "blocks": (Blocks, lambda: torch.randn(2, 5, 16), {}),
    "blocks, regions": (Blocks, lambda: torch.randn(2, 5, 16), {"fuse": "aten"}),
    "blocks, as autocast": (Blocks, lambda: torch.randn(2, 5, 16), {"placement": "autocast"}),
    "checkpointed": (Checkpointed, lambda: torch.randn(4, 8), {"capture": "dynamo"}),
    "two graphs": (TwoGraphs, lambda: torch.randn(4, 8), {}),
    "frozen layers": (lambda: partly_frozen(Blocks()), lambda: torch.randn(2, 5, 16), {}),
    "eval mode": (lambda: Blocks().eval(), lambda: torch.randn(2, 5, 16), {}),
    "eval mode, regions": (lambda: Convolutions().eval(), images, {"fuse": "aten"}),
}


class CopiesOfWeights(OpMode):
    """Refers weakly to each low copy that an op makes of a weight, as autocast does."""

    def __init__(self, weights: list[Tensor]) -> None:
        super().__init__()
        self.weights = {storage_key(weight) for weight in weights}
        self.made: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and storage_key(args[0]) in self.weights:
            self.made.append(weakref.ref(result))
        return result

    def alive(self) -> list[Tensor]:
        return [copy for reference in self.made if (copy := reference()) is not None]


def of_a_real_call(model: nn.Module, x: Tensor, autocast: bool) -> tuple[int, int, int, int]:
    """Casts, those of weights apart, casts of weights, and at the end of the forward the bytes of low copies of weights
    and of what autograd keeps besides weights, copies and inputs."""
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[storage_key(tensor)] = tensor
        return tensor

    with (
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        torch.autograd.graph.saved_tensors_hooks(keep, keep),
        torch.set_grad_enabled(model.training),
    ):
        weights = [*model.parameters(), *model.buffers()]
        with count_casts() as casts, CopiesOfWeights(weights) as mode:
            output = model(x)
        copies = mode.alive()
    if is_converted(model):
        copies += [shadow for shadow in conversion_of(model).store.shadows_of(weights) if shadow is not None]
    known = {storage_key(tensor) for tensor in (*weights, *copies, x)}
    size = sum(tensor.untyped_storage().nbytes() for key, tensor in kept.items() if key not in known)
    del output
    return casts.activations, casts.weights, sum(copy.untyped_storage().nbytes() for copy in copies), size


@pytest.mark.parametrize("name", CASES)
def test_it_is_what_real_calls_do(name: str) -> None:
    make, make_input, how = CASES[name]
    torch.manual_seed(0)
    model, x = make(), make_input()
    plain = copy.deepcopy(model)
    converted = fxprec.convert(model, (x,), dtype=torch.bfloat16, **how).module
    converted(x)  # makes the shadows
    found = fxprec.report(converted).headline.rehearsal
    assert not found.unknown
    ours, theirs = found.memory, found.autocast_memory
    for told, held, model, autocast in (
        (found.ours, ours, converted, False),
        (found.autocast, theirs, plain, True),
    ):
        casts, weight_casts, copies, kept = of_a_real_call(model, x, autocast)
        assert (told.casts, told.weight_casts, held.copies) == (casts, weight_casts, copies)
        # A kernel of the CPU may keep a vector that its fake does not: 32 bytes of a batch norm's.
        assert 0 <= kept - held.kept <= 32
        assert held.weights == sum(weight.nbytes for weight in model.parameters())
    assert found.ours.cast_bytes > 0 and found.autocast.weight_casts > 0 and (ours.kept > 0) == plain.training
    if name not in ("two graphs", "frozen layers"):
        assert ours.copies == theirs.copies == found.autocast.weight_bytes, "each weight has one low copy on both sides"


def test_bytes_of_casts() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.Softmax(-1))
    ours = fxprec.report(fxprec.convert(model, (torch.randn(3, 8),)).module).headline.rehearsal.ours
    assert (ours.casts, ours.cast_bytes) == (2, 3 * 8 * 2 + 3 * 4 * 4), "the input is lowered, the logits widened"


class Twice(nn.Module):
    """Two results, of which one is read further as well."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.first(x)
        return hidden, self.second(hidden.pow(2) * hidden.view(-1, 8)).exp()


@pytest.mark.parametrize("fuse", [False, "aten"])
def test_why_there_are_more(fuse: bool | str) -> None:
    model = fxprec.convert(Twice(), (torch.randn(2, 8),), dtype=torch.bfloat16, fuse=fuse).module
    headline = fxprec.report(model).headline
    found = headline.rehearsal
    assert found.wider == {"pow": 1, "mul": 1, "exp": 1}, "mul reads both as they come, and gives FP32 to a cast"
    assert found.results == (0 if fuse else 1), "regions give results in the dtype that is wanted"
    assert found.ours.casts == 4 + headline.on_path and found.autocast.casts == 1


def test_what_moves_values_is_no_reason() -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            first, second = self.layer(x).exp().chunk(2)
            return self.layer(first) * second

    found = fxprec.report(fxprec.convert(Parts(), (torch.randn(2, 8),), dtype=torch.bfloat16).module).headline
    assert found.rehearsal.wider == {"exp": 1}


def test_what_autocast_casts_as_well_is_no_reason() -> None:
    class Squares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(F.mse_loss(self.layer(x), x, reduction="none"))

    found = fxprec.report(fxprec.convert(Squares(), (torch.randn(3, 8),)).module).headline.rehearsal
    assert (found.ours.casts, found.autocast.casts, found.results, found.wider) == (4, 3, 1, {})


def test_of_eval_mode_nothing_is_told_to_be_kept() -> None:
    x = torch.randn(2, 5, 16)
    headline = fxprec.report(fxprec.convert(Blocks().eval(), (x,)).module).headline
    assert headline.rehearsal.memory.kept == 0 < headline.rehearsal.ours.casts and "backward" not in str(headline)


def test_the_model_and_the_random_numbers_are_as_they_were() -> None:
    x = torch.randn(2, 3, 9, 9)
    model = fxprec.convert(Convolutions(), (x,)).module
    model(x)
    before, drawn = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    fxprec.report(model)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_what_cannot_be_told_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    without_shapes = fxprec.report(fxprec.convert(Convolutions(), dtype=torch.bfloat16).module)
    assert "example_inputs" in without_shapes.headline.rehearsal.unknown
    assert "example_inputs" in str(without_shapes)

    def fails(*arguments: Any) -> None:
        raise NotImplementedError("no fake of my_op\nand more")

    x = torch.randn(2, 3, 9, 9)
    model = fxprec.convert(Convolutions(), (x,)).module
    monkeypatch.setattr(rehearsal._Player, "run", fails)
    why = "unknown, as a graph does not run on fake tensors (NotImplementedError: no fake of my_op)"
    assert fxprec.report(model).headline.rehearsal.unknown == why and why in str(fxprec.report(model))


@pytest.mark.slow
def test_where_parameters_became_low_autocast_is_told_with_fp32_ones() -> None:
    """At O3 and when frozen they take half the memory that autocast's masters take, which has copies on top."""
    torch.manual_seed(0)
    plain = Blocks()
    x = torch.randn(2, 5, 16)
    masters = sum(weight.nbytes for weight in plain.parameters())
    _, weight_casts, copies, kept = of_a_real_call(copy.deepcopy(plain), x, autocast=True)
    low = fxprec.convert(copy.deepcopy(plain), (x,), dtype=torch.bfloat16, level="O3").module
    found = fxprec.report(low).headline.rehearsal
    assert (found.memory.weights, found.memory.copies) == (masters // 2, 0)
    assert (found.autocast_memory.weights, found.autocast_memory.copies) == (masters, copies)
    assert found.autocast.weight_casts == weight_casts and found.autocast_memory.kept == kept
    frozen = fxprec.freeze(fxprec.convert(plain.eval(), (x,), dtype=torch.bfloat16).module)
    found = fxprec.report(frozen).headline.rehearsal
    assert found.autocast_memory.weights == masters > found.memory.total
    assert found.autocast.weight_casts == weight_casts
    frozen(x)
    packed = fxprec.report(frozen).headline.rehearsal.memory
    state = conversion_of(frozen).packed
    assert packed.copies == (0 if state is None else state.nbytes), "packed copies are copies"


def test_the_line_of_memory_names_the_same_categories_on_both_sides() -> None:
    model = fxprec.convert(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), (torch.randn(3, 8),)).module
    (line,) = [line for line in str(fxprec.report(model)).split("\n") if line.startswith("memory")]
    assert line == (
        "memory       at the end of a forward: 432 B of weights, 216 B of low copies of them and 96 B kept for the "
        "backward, 744 B in all; eager autocast: 432 B, 216 B and 96 B, 744 B in all"
    )
    (line,) = [line for line in str(fxprec.report(model)).split("\n") if line.startswith("a forward")]
    assert line == (
        "a forward    runs 2 casts writing 96 B, and refreshes 4 shadows in one call writing 216 B; eager autocast 1 "
        "cast writing 48 B, and 4 of weights writing 216 B"
    )
    told = fxprec.report(model).to_dict()["headline"]["rehearsal"]
    assert told["memory"] == told["autocast_memory"] == {"weights": 432, "copies": 216, "kept": 96}


class FromData(nn.Module):
    """A size that depends on data, and numbers as arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, scale: float = 1.0, rows: int = 2) -> Tensor:
        hidden = self.first(x) * scale
        return self.second(hidden[:rows]).exp() + hidden.shape[0]


def marked(mark: Callable[[Tensor, int], None]) -> Callable[[nn.Module, int], None]:
    def call(model: nn.Module, batch: int) -> None:
        x = torch.randn(batch, 8)
        mark(x, 0)
        model(x)

    return call


def trained_then_evaluated(model: nn.Module, batch: int) -> None:
    model.train()(torch.randn(batch, 8)).sum().backward()
    with torch.no_grad():
        model.eval()(torch.randn(batch + 2, 8))
    model.train()(torch.randn(batch + 2, 8))


#: name -> (model, calls that make sizes or numbers symbolic for a batch, the call that makes a static graph)
SYMBOLIC: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, int], Any], tuple[Any, ...]]] = {
    "train and evaluate": (Checkpointed, trained_then_evaluated, (torch.randn(6, 8),)),
    "marked dynamic": (Checkpointed, marked(torch._dynamo.mark_dynamic), (torch.randn(4, 8),)),
    "a float": (FromData, lambda m, b: [m(torch.randn(b, 8), s) for s in (2.5, 3.5)], (torch.randn(4, 8), 3.5)),
    "an integer": (FromData, lambda m, b: [m(torch.randn(b, 8), 2.0, n) for n in (2, 3)], (torch.randn(4, 8), 2.0, 3)),
    "several graphs": (TwoGraphs, lambda m, b: [m(torch.randn(n, 8)) for n in (b, b + 1)], (torch.randn(5, 8),)),
}


@pytest.mark.parametrize("fuse", [False, "aten"])
@pytest.mark.parametrize("name", SYMBOLIC)
def test_of_symbolic_sizes_it_tells_what_a_static_graph_does(name: str, fuse: bool | str) -> None:
    """dynamo makes the graph for any size at the second batch: its figures are those of the size then, plain."""
    make, call, example = SYMBOLIC[name]
    torch._dynamo.reset()
    model = fxprec.convert(make(), dtype=torch.bfloat16, capture="dynamo", fuse=fuse).module
    call(model, 4)
    symbolic = fxprec.report(model)
    assert any(isinstance(each, torch.SymInt | torch.SymFloat) for each in _numbers(model)), "made for any of them"
    torch._dynamo.reset()
    static = fxprec.report(fxprec.convert(make(), example, dtype=torch.bfloat16, capture="dynamo", fuse=fuse).module)
    found, wanted = symbolic.headline.rehearsal, static.headline.rehearsal
    assert not found.unknown and found == wanted and found.memory.kept > 0
    json.dumps(symbolic.to_dict()), pickle.dumps(copy.deepcopy(symbolic))


def _numbers(model: nn.Module) -> Iterator[Any]:
    """The sizes of the graphs' values, and those that are no tensors."""
    for node in itertools.chain(*(gm.graph.nodes for gm in fxprec.graphs(model))):
        value = node.meta.get("val")
        yield from value.shape if isinstance(value, Tensor) else (value,)


def test_a_size_that_nobody_knows_is_counted_apart() -> None:
    torch._dynamo.reset()
    model = fxprec.convert(FromData(), dtype=torch.bfloat16, capture="dynamo").module
    marked(torch._dynamo.decorators.mark_unbacked)(model, 4)
    report = fxprec.report(model)
    found = report.headline.rehearsal
    assert not found.unknown and found.ours.casts >= 2 and found.unsized > 0
    assert f"sizes that depend on data ({found.unsized}) are left out" in str(report)
    json.dumps(report.to_dict())
