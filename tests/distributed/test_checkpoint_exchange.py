"""Checkpoints that change hands: other levels and dtypes, plain torch training, ``torch.distributed.checkpoint``."""

from __future__ import annotations

import copy
import io
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import fxprec
from fxprec import optim

pytestmark = [
    pytest.mark.filterwarnings("ignore:float16 on a CPU:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]

HOUSES: dict[str, tuple[Any, torch.dtype] | None] = {
    "plain torch": None,
    "O0": ("O0", torch.bfloat16),
    "O1 bfloat16": ("O1", torch.bfloat16),
    "O1 float16": ("O1", torch.float16),
    "O2 bfloat16": ("O2", torch.bfloat16),
    "O2 float16": ("O2", torch.float16),
}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3))


class Training:
    """A model, an optimizer and an enabled scaler; ``house`` None: plain torch ones."""

    def __init__(self, house: str, adam: Callable[..., Any], seed: int) -> None:
        torch.manual_seed(seed)
        self.model, how = net(), HOUSES[house]
        if how is None:
            self.scaler: Any = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        else:
            scaler = fxprec.LossScaler("cpu", init_scale=1024.0, growth_interval=2)
            self.model, self.scaler = fxprec.convert(self.model, level=how[0], dtype=how[1], scaler=scaler)
        self.optimizer = adam(self.model.parameters())

    def steps(self, first: int, last: int, overflow: int | None = None) -> None:
        for step in range(first, last):
            data = torch.Generator().manual_seed(step)
            x, y = torch.randn(4, 6, generator=data), torch.randint(3, (4,), generator=data)
            self.optimizer.zero_grad()
            self.scaler.scale(F.cross_entropy(self.model(x), y)).backward()
            if step == overflow:
                next(self.model.parameters()).grad[0, 0] = float("nan")  # type: ignore[index]
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def checkpoint(self) -> dict[str, Any]:
        parts = {"model": self.model, "optimizer": self.optimizer, "scaler": self.scaler}
        return {name: part.state_dict() for name, part in parts.items()}

    def load(self, saved: dict[str, Any]) -> None:
        for name, part in (("model", self.model), ("optimizer", self.optimizer), ("scaler", self.scaler)):
            part.load_state_dict(saved[name])


def same(a: Any, b: Any) -> bool:
    """Bit for bit; keys in the same order."""
    if isinstance(a, Tensor):
        as_bytes = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
        return a.dtype is b.dtype and a.shape == b.shape and torch.equal(*as_bytes)
    if isinstance(a, dict):
        return [*a] == [*b] and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def through_a_file(values: Any) -> Any:
    file = io.BytesIO()
    torch.save(values, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def torchs(parameters: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=0.01, fused=True)


def ours(parameters: Any) -> optim.AdamW:
    return optim.AdamW(parameters, lr=0.01)


@pytest.mark.parametrize("source, target", [*itertools.permutations(HOUSES, 2)])
def test_a_checkpoint_of_one_house_is_one_of_every_other(source, target):
    """Same keys, same FP32 masters and moments, same scale and tracker; training goes on, also after an overflow."""
    writer = Training(source, ours if source.startswith("O1") else torchs, seed=1)
    writer.steps(0, 4, overflow=1)
    saved = through_a_file(writer.checkpoint())
    reader = Training(target, ours if target.startswith("O2") else torchs, seed=2)
    assert [*reader.model.state_dict()] == [*saved["model"]] == [*net().state_dict()]
    assert {v.dtype for k, v in saved["model"].items() if "num_batches" not in k} == {torch.float32}
    reader.load(saved)
    now = reader.checkpoint()
    assert same(now["model"], saved["model"])
    assert same(now["optimizer"]["state"], saved["optimizer"]["state"])
    assert [*now["optimizer"]["param_groups"][0]] == [*saved["optimizer"]["param_groups"][0]]
    common = [key for key in now["scaler"] if key in saved["scaler"] and key != "fxprec"]
    assert common == ["scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"]
    assert all(now["scaler"][key] == saved["scaler"][key] for key in common)
    assert (now["scaler"]["scale"], now["scaler"]["_growth_tracker"]) == (1024, 0)  # grown again after the overflow
    reader.steps(4, 7, overflow=5)
    assert all(bool(p.isfinite().all()) for p in reader.model.parameters())
    assert not same(reader.model.state_dict(), saved["model"])
    assert reader.scaler.get_scale() == 512


@pytest.mark.parametrize("adam", [torchs, ours], ids=["torch's", "ours"])
def test_there_and_back_is_a_straight_run(adam):
    """A checkpoint that went through another level, dtype and plain torch, untrained there, is what it was."""
    straight, first = (Training("O1 bfloat16", adam, seed=1) for _ in range(2))
    straight.steps(0, 6, overflow=2)
    first.steps(0, 3, overflow=2)
    saved = through_a_file(first.checkpoint())
    for house, other in (("O2 float16", ours), ("plain torch", torchs), ("O2 bfloat16", ours)):
        via = Training(house, other, seed=2)
        via.load(saved)
        saved = through_a_file(via.checkpoint())
    back = Training("O1 bfloat16", adam, seed=3)
    back.load(saved)
    back.steps(3, 6)
    for part in ("model", "optimizer"):
        assert same(back.checkpoint()[part], straight.checkpoint()[part])
    assert back.scaler.get_scale() == straight.scaler.get_scale() == 2048
    assert straight.scaler.skipped_steps == 1 and back.scaler.skipped_steps == 0  # torch's scaler does not count them


def test_a_model_may_be_loaded_before_it_is_converted():
    writer = Training("plain torch", torchs, seed=1)
    writer.steps(0, 3)
    early, late = net(), fxprec.convert(net())[0]
    early.load_state_dict(writer.model.state_dict())
    fxprec.convert(early)
    late.load_state_dict(writer.model.state_dict())
    with torch.no_grad():
        assert same(early(torch.ones(4, 6)), late(torch.ones(4, 6)))


ADAMS: dict[str, Callable[[Any], Any]] = {
    "torch AdamW fused": torchs,
    "torch SGD momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "AdamW": ours,
    "AdamW bfloat16 state, clipped": lambda p: optim.AdamW(p, lr=0.01, state_dtype=torch.bfloat16, max_norm=0.3),
    "SGD momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flattened"])
@pytest.mark.parametrize("adam", ADAMS)
@pytest.mark.parametrize("house", ["O1 bfloat16", "O2 float16"])
def test_distributed_checkpoint_round_trip(tmp_path: Path, house, adam, flat):
    """One process. The scaler is a ``Stateful``: it goes into the dict as it is."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    straight = Training(house, ADAMS[adam], seed=1)
    straight.steps(0, 3, overflow=1)
    model, optimizer = get_state_dict(straight.model, straight.optimizer, options=options)
    assert [*model] == [*net().state_dict()]
    dcp.save({"model": model, "optimizer": optimizer, "scaler": straight.scaler}, checkpoint_id=tmp_path, no_dist=True)
    saved = copy.deepcopy(straight.checkpoint())
    straight.steps(3, 6, overflow=4)

    resumed = Training(house, ADAMS[adam], seed=2)
    model, optimizer = get_state_dict(resumed.model, resumed.optimizer, options=options)
    dcp.load({"model": model, "optimizer": optimizer, "scaler": resumed.scaler}, checkpoint_id=tmp_path, no_dist=True)
    set_state_dict(
        resumed.model, resumed.optimizer, model_state_dict=model, optim_state_dict=optimizer, options=options
    )
    assert same(resumed.model.state_dict(), saved["model"])
    assert same(resumed.scaler.state_dict(), saved["scaler"])
    resumed.steps(3, 6, overflow=4)
    now, end = resumed.checkpoint(), straight.checkpoint()
    assert same(now["model"], end["model"])
    assert same(now["scaler"], end["scaler"])
    for mine, theirs in zip(now["optimizer"]["state"].values(), end["optimizer"]["state"].values(), strict=True):
        assert all(same(mine[name], theirs[name]) for name in theirs)


def test_distributed_checkpoint_takes_a_scalers_state_as_a_plain_dict(tmp_path: Path):
    scaler = fxprec.LossScaler("cpu", init_scale=64.0, hysteresis=2, num_losses=3)
    scaler.scale(torch.ones(()))
    scaler.update(32.0)
    dcp.save({"scaler": scaler.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    other = fxprec.LossScaler("cpu", hysteresis=2, num_losses=3)
    loaded = {"scaler": other.state_dict()}
    dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    other.load_state_dict(loaded["scaler"])
    assert same(other.state_dict(), scaler.state_dict())
    assert [other.get_scale(i) for i in range(3)] == [32, 32, 32]


def test_distributed_checkpoint_of_a_disabled_scaler_is_empty_and_loads(tmp_path: Path):
    model, scaler = fxprec.convert(net())
    dcp.save({"model": model.state_dict(), "scaler": scaler}, checkpoint_id=tmp_path, no_dist=True)
    other, disabled = fxprec.convert(net())
    values = other.state_dict()
    dcp.load({"model": values, "scaler": disabled}, checkpoint_id=tmp_path, no_dist=True)
    assert same(values, model.state_dict()) and disabled.state_dict() == {}
