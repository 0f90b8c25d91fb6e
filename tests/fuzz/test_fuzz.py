"""A part of the random programs and modules by seed, and proof that the checker notices what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.fx import GraphModule

from fxprec.capture.symbolic.guards import Guards
from fxprec.capture.untouched import ModelState
from fxprec.model.conversion import Conversion
from fxprec.model.entry_point import EntryPoint
from fxprec.model.method import Call
from fxprec.passes.graph.casts import CASTS
from fxprec.shadows import ShadowStore
from tests.fuzz import programs, stateful
from tests.fuzz.__main__ import main
from tests.fuzz.feature import Feature
from tests.fuzz.features import FEATURES
from tests.fuzz.kinds import Kind
from tests.fuzz.source import Case, Judged, Part, Statement, case_of
from tests.fuzz.worlds import World

ARGUMENTS = {"other": "other=x(2, 1)", "ids": "ids=i(2, 2)", "bag": "bag=[1]"}


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 150, 50))
def test_random_programs_are_right(first: int) -> None:
    wrong = [text for seed in range(first, first + 50) if (text := Kind("programs").wrong(seed))]
    assert not wrong, "\n\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 100, 50))
def test_random_stateful_modules_are_right(first: int) -> None:
    wrong = [text for seed in range(first, first + 50) if (text := Kind("stateful").wrong(seed))]
    assert not wrong, "\n\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 8, 4))
def test_random_stateful_modules_are_right_by_dynamo(first: int) -> None:
    wrong = [text for seed in range(first, first + 4) if (text := Kind("stateful", "dynamo").wrong(seed))]
    assert not wrong, "\n\n".join(wrong)


# -- a check that cannot fail proves nothing ------------------------------------------------------------------------


def case(features: list[str], script: list[str], judged: Judged = "unrounded", capture: str = "static") -> Case:
    """A root that uses these features, numbered from 1."""
    by_name = {feature.name: feature for feature in FEATURES}
    parts = tuple(Part(i, i, by_name[name]) for i, name in enumerate(features, 1))
    level = "O0" if judged == "exact" else "O1"
    return Case(0, capture, judged, level, (parts,), tuple(map(Statement, script)), True)


NUMBER = ["m = convert(m)", "run(m, x(2, 0))", "m.k1 = 7.0", "run(m, x(2, 0))"]


def blind(guards: Guards) -> bool:
    """Guards that always hold."""
    return True


@pytest.mark.parametrize("judged", ["exact", "unrounded", "rounded"])
def test_a_guard_that_always_holds_is_noticed(judged: Judged) -> None:
    number = case(["number", "linear"], NUMBER, judged)
    assert stateful.check(number) is None
    with mock.patch.object(Guards, "hold", blind):
        wrong = stateful.check(number)
    assert wrong is not None and wrong.statement == 3 and "output" in wrong.what


def test_a_trace_that_leaves_its_writes_behind_is_noticed() -> None:
    counter = case(["counter_only"], ["m = convert(m)"])
    assert stateful.check(counter) is None

    def moved(state: ModelState) -> str:
        return "n1"

    with mock.patch.object(ModelState, "restore", moved):
        wrong = stateful.check(counter)
    assert wrong is not None and "state afterwards" in wrong.what and "n1" in wrong.what


def test_shadows_that_are_never_renewed_are_noticed() -> None:
    script = ["m = convert(m)", "run(m, x(2, 0))", "m.load_state_dict(scaled(m.state_dict(), 0.5))", "run(m, x(2, 0))"]
    trained = case(["linear"], script)
    assert stateful.check(trained) is None
    with mock.patch.object(ShadowStore, "read", keep_the_first(ShadowStore.read)):
        wrong = stateful.check(trained)
    assert wrong is not None and wrong.statement == 3


def keep_the_first(read: Callable[..., list[torch.Tensor]]) -> Callable[..., list[torch.Tensor]]:
    first: list[torch.Tensor] = []

    def stale(store: ShadowStore, weights: list[torch.Tensor]) -> list[torch.Tensor]:
        first[:] = first or [shadow.detach().clone().requires_grad_() for shadow in read(store, weights)]
        return first

    return stale


@pytest.mark.parametrize("capture", ["static", "dynamo"])
def test_a_model_that_stays_in_fp32_is_noticed(capture: str) -> None:
    linear = case(["linear"], ["m = convert(m)", "run(m, x(2, 0))"], "rounded", capture)
    assert stateful.check(linear) is None
    with mock.patch.object(Conversion, "_run", unchanged):
        wrong = stateful.check(linear)
    assert wrong is not None and "lower" in wrong.what


def unchanged(conversion: Conversion, entry: EntryPoint, call: Call) -> Any:
    return call.untouched()


def test_an_output_that_no_weight_changes_is_not_taken_for_fp32s() -> None:
    cancels = Feature(
        "cancels", "h = self.l$n(h)\nh = h - h.clone() + torch.rand_like(h)", init="self.l$n = nn.Linear(4, 4)"
    )
    script = ("m = convert(m)", "run(m, x(2, 0))")
    made = replace(case([], [*script], "rounded"), classes=((Part(1, 1, cancels),),))
    with mock.patch.object(stateful, "_is_rounding", lambda *given: False):
        wrong = stateful.check(made)
    assert wrong is not None and "lower" in wrong.what
    assert stateful.check(made) is None


def test_a_forward_that_runs_twice_is_noticed() -> None:
    counted = case(["buffer_count"], ["m = convert(m)", "run(m, x(2, 0))"])
    assert stateful.check(counted) is None
    run = Conversion._run

    def twice(self: Conversion, *args: object) -> object:
        run(self, *args)
        return run(self, *args)

    with mock.patch.object(Conversion, "_run", twice):
        wrong = stateful.check(counted)
    assert wrong is not None and "n1" in wrong.what


def test_a_cast_too_few_is_noticed() -> None:
    model, context, choose = programs.program_of(1)
    model.steps = (("linear", 0, 0), ("add_", 0, 1), ("layer_norm", 0, 0))
    assert programs.check(model, context, choose) is None
    with mock.patch.object(programs, "rewrite", without_casts(programs.rewrite)):
        wrong = programs.check(model, context, choose)
    assert wrong is not None


def without_casts(rewrite: Callable[..., GraphModule]) -> Callable[..., GraphModule]:
    def rewritten(*args: Any, **kwargs: Any) -> GraphModule:
        gm = rewrite(*args, **kwargs)
        cast = next(node for node in gm.graph.nodes if node.target in CASTS)
        cast.replace_all_uses_with(cast.args[0])
        gm.recompile()
        return gm

    return rewritten


# -- the command ----------------------------------------------------------------------------------------------------


def test_the_command_goes_on_where_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    progress = tmp_path / "progress.jsonl"
    arguments = ["programs", "--jobs", "0", "--progress", str(progress)]
    assert main([*arguments, "--seeds", "0:3"]) == 0
    lines = progress.read_text()
    assert main([*arguments, "--seeds", "0:3"]) == 0
    assert progress.read_text() == lines
    progress.write_text(lines + '{"kind": {"wh')  # it was ended while it wrote
    assert main([*arguments, "--seeds", "0:5"]) == 0
    assert "3:5 done, 0 left" in capsys.readouterr().out


@pytest.mark.slow
def test_a_wrong_seed_is_shown_made_small_and_exits_with_one(capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch.object(Guards, "hold", blind):
        seed = next(seed for seed in range(200) if Kind("stateful").wrong(seed))
        assert main(["stateful", "--seed", str(seed)]) == 1
        shown = capsys.readouterr().out
        assert len(shown) < len(str(Kind("stateful").wrong(seed)))
    assert main(["stateful", "--seed", str(seed)]) == 0
    assert "is right" in capsys.readouterr().out


def test_a_case_is_the_same_every_time() -> None:
    assert case_of(7, "static") == case_of(7, "static")
    assert len({case_of(seed, "static").source for seed in range(50)}) == 50


def test_every_feature_runs_by_itself() -> None:
    """Eager takes it: a feature that always fails tests nothing."""
    failing = []
    for feature in FEATURES:
        world = World("eager", replace(case_of(0, "static"), classes=((Part(1, 1, feature),),)))
        arguments = [ARGUMENTS[name] for name in signature(world.scope["Root"].forward).parameters if name in ARGUMENTS]
        world.execute(0, f"run(m, x(2, 0), {', '.join(arguments)})")
        if world.stopped is not None or [kind for kind, _ in world.log if kind.startswith("raised")]:
            failing.append((feature.name, world.stopped))
        world.close()
    assert not failing
