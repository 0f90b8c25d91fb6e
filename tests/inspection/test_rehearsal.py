"""rehearse: what a call casts and keeps for its backward, and what eager autocast would, are what real calls do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxprec
from fxprec.inspection import rehearsal
from fxprec.model.module import conversion_of, is_converted
from fxprec.testing import count_casts
from fxprec.torch_internals import storage_key


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
}


def of_a_real_call(model: nn.Module, x: Tensor, autocast: bool) -> tuple[int, int, int]:
    """Casts, those of weights apart, casts of weights, and bytes that autograd keeps besides weights and inputs."""
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[storage_key(tensor)] = tensor
        return tensor

    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), torch.autograd.graph.saved_tensors_hooks(keep, keep):
        with count_casts() as casts:
            output = model(x)
    weights = [*model.parameters(), *model.buffers()]
    if is_converted(model):
        weights += [shadow for shadow in conversion_of(model).store.shadows_of(weights) if shadow is not None]
    known = {storage_key(tensor) for tensor in (*weights, x)}
    size = sum(tensor.untyped_storage().nbytes() for key, tensor in kept.items() if key not in known)
    del output
    return casts.activations, casts.weights, size


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
    ours, theirs = found.ours, found.autocast
    for told, model, autocast in ((ours, converted, False), (theirs, plain, True)):
        casts, weight_casts, kept = of_a_real_call(model, x, autocast)
        assert (told.casts, told.weight_casts) == (casts, weight_casts)
        # A kernel of the CPU may keep a vector that its fake does not: 32 bytes of a batch norm's.
        assert 0 <= kept - told.kept <= 32
    assert ours.cast_bytes > 0 and theirs.weight_casts > 0 and 0 < ours.kept < theirs.kept


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
    found = fxprec.report(model).headline.rehearsal
    assert found.wider == {"pow": 1, "mul": 1, "exp": 1}, "mul reads both as they come, and gives FP32 to a cast"
    assert found.results == (0 if fuse else 1), "regions give results in the dtype that is wanted"
    assert found.ours.casts == 4 and found.autocast.casts == 1


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
    assert headline.rehearsal.ours.kept == 0 < headline.rehearsal.ours.casts and "backward" not in str(headline)


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
    why = "unknown: it does not run on fake tensors (NotImplementedError: no fake of my_op)"
    assert fxprec.report(model).headline.rehearsal.unknown == why and why in str(fxprec.report(model))
