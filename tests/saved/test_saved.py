"""What users saved by an earlier version loads, and goes on as it did; ``write_saved`` wrote the files."""

from __future__ import annotations

import importlib
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import fxprec
from fxprec.model.saved_names import _MOVED as MOVED
from write_saved import INPUT, stepped

FOLDER = Path(__file__).parent / "0.1.0"
MODELS = ("static", "policy", "O3", "float16", "dynamo", "autocast")
TRAININGS = ("adamw", "sgd")


def load(name: str) -> dict[str, Any]:
    return torch.load(FOLDER / f"{name}.pt", weights_only=False)


@pytest.mark.filterwarnings("ignore::fxprec.SlowDtypeWarning")
@pytest.mark.parametrize("name", MODELS)
def test_a_converted_model(name: str) -> None:
    saved = load(name)
    model = saved["model"]
    assert torch.equal(model(INPUT), saved["output"])
    assert fxprec.report(model).graphs
    assert torch.equal(fxprec.graph_module(model)(INPUT), saved["output"])


@pytest.mark.parametrize("name", MODELS)
def test_a_graph_of_it(name: str) -> None:
    saved = load(name)
    graph = saved["graph"]
    assert torch.equal(graph(INPUT), saved["output"])
    again = pickle.loads(pickle.dumps(graph))
    assert torch.equal(again(INPUT), saved["output"])
    assert b"fxprec.passes.ir" not in pickle.dumps(graph)


@pytest.mark.parametrize("name", TRAININGS)
def test_a_training_goes_on(name: str) -> None:
    saved = load(name)
    model, optimizer, scaler = saved["model"], saved["optimizer"], saved["scaler"]
    assert scaler.state_dict() == saved["states"]["scaler"]
    stepped(model, optimizer, scaler)
    for key, after in saved["after"].items():
        assert torch.equal(model.get_parameter(key), after), key


@pytest.mark.parametrize("name", TRAININGS)
def test_states_load_into_new_objects(name: str) -> None:
    saved = load(name)
    model, states = saved["model"], saved["states"]
    optimizer = type(saved["optimizer"])(model.parameters(), lr=1.0)
    optimizer.load_state_dict(states["optimizer"])
    scaler = fxprec.LossScaler(num_losses=2)
    scaler.load_state_dict(states["scaler"])
    stepped(model, optimizer, scaler)
    for key, after in saved["after"].items():
        assert torch.equal(model.get_parameter(key), after), key


def test_names_that_0_1_did_not_have_are_not_found() -> None:
    with pytest.raises(ModuleNotFoundError):
        import fxprec.no_such_module  # type: ignore[import-not-found]  # noqa: F401
    import fxprec.passes.ir as old  # type: ignore[import-not-found]

    with pytest.raises(AttributeError, match="has no 'nothing' in this version"):
        _ = old.nothing


@pytest.mark.parametrize("old", MOVED)
def test_modules_of_0_1_have_what_stands_elsewhere_now(old: str) -> None:
    module = importlib.import_module(old)
    there = importlib.import_module(MOVED[old])
    own = [name for name, value in vars(there).items() if getattr(value, "__module__", None) == MOVED[old]]
    assert own and all(getattr(module, name) is getattr(there, name) for name in own)
