"""``benchmarks.ledger``: what it measures is there and is told apart from what is not; its rows, and the command."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxprec
from benchmarks import ledger
from benchmarks.measure import ledgers
from benchmarks.measure.ledgers import added_up, planted, predicted, rounded
from benchmarks.measure.results import device_name
from benchmarks.reports.ledger import Cost, Place, Planted, Sum, Variances
from benchmarks.workloads.subjects import ADDED_UP, SMALL, Subject, small, to_add_up, unserved
from fxprec.numerics import audit
from fxprec.tape import adjoint
from fxprec.tape.attribution import Attribution

BFLOAT16 = torch.bfloat16


# -- subjects ---------------------------------------------------------------------------------------------------------


def test_each_model_has_a_subject():
    assert {each.name for name in ADDED_UP for each in to_add_up(name)} == {*ADDED_UP}
    assert [each.size for each in to_add_up("gpt")] == ["cpu", "tiny"]
    assert [each.size for each in to_add_up("gpt", ("tiny",))] == ["tiny"]
    assert [each.cheap for each in to_add_up("gpt")] == [False, True]


@pytest.mark.parametrize("name", SMALL)
def test_a_sample_is_one_of_a_batch_and_has_a_loss(name):
    subject = small(name)
    sample = subject.sample(3)
    assert {len(part) for part in sample} == {1}
    assert all(torch.equal(one, many[:1]) for one, many in zip(sample, subject.batch(3), strict=True))
    assert not all(torch.equal(one, other) for one, other in zip(sample, subject.sample(4), strict=True))
    assert subject.value(subject.seeded(), sample).isfinite()


def test_the_routed_net_routes():
    subject = small("routed")
    model = subject.seeded()
    x, _ = subject.batch(0)
    left, right = model.first(x).chunk(2, -1)
    chosen = {*model.router(torch.maximum(left, right)).argmax(-1).tolist()}
    subject.value(model, subject.batch(0)).backward()
    reached = {i for i, expert in enumerate(model.experts) if bool(expert.weight.grad.any())}
    assert len(chosen) > 1 and reached == chosen


def test_named_inputs_have_no_samples():
    [bert] = to_add_up("zoo-bert")
    with pytest.raises(TypeError, match="zoo-bert has named inputs"):
        replace(bert, batch=lambda seed: {"x": torch.ones(2)}).sample(0)


def test_what_is_not_installed_is_said(monkeypatch):
    monkeypatch.setattr("benchmarks.workloads.subjects.find_spec", lambda name: None)
    assert unserved("gpt") == ""
    assert unserved("zoo-bert").startswith("transformers, diffusers not installed: pip install 'fxprec[zoo]'")


# -- adding up --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gradients", [False, True])
def test_an_audit_that_adds_up(gradients):
    found = added_up(small("mlp"), BFLOAT16, "O2", gradients)
    assert (found.model, found.size, found.dtype, found.level) == ("mlp", "tiny", "bfloat16", "O2")
    assert found.target == ("gradients" if gradients else "loss")
    assert found.measured != 0 and found.adds_up and found.rows > 10 and found.first and found.cost is None
    assert found.as_dict()["adds_up"] is True


def test_one_that_does_not_is_noticed(monkeypatch):
    """Of a value that two ops read, the part of one is forgotten."""
    subject = small("routed")
    add, seen = adjoint._AdjointWalk.add, set()

    def first_only(self, place, gradient):
        if place.storage not in seen:
            add(self, place, gradient)
        seen.add(place.storage)

    monkeypatch.setattr(adjoint._AdjointWalk, "add", first_only)
    assert not added_up(subject, BFLOAT16, "O1", False).adds_up
    monkeypatch.undo()
    assert added_up(subject, BFLOAT16, "O1", False).adds_up


def test_six_digits_or_next_to_nothing():
    found = Sum("m", "tiny", "bfloat16", "O1", "loss", 1e-3, 0.9e-9, 0.0, "a", 1, ())
    assert found.adds_up and not replace(found, residual=-1.1e-9).adds_up
    assert replace(found, measured=0.0, residual=0.9e-10).adds_up
    assert not replace(found, measured=0.0, residual=1.1e-10).adds_up


def test_costs():
    """Of three linears of 16: weights, low copies, and AdamW's two moments."""
    cost = added_up(small("mlp"), BFLOAT16, "O1", False, rounds=2).cost
    assert cost is not None
    parameters = 3 * (16 * 16 + 16)
    assert cost.held == 4 * parameters + 2 * parameters
    assert abs(cost.step_held - 12 * parameters) <= 4 * 6  # and a count of steps each
    assert cost.seconds > cost.run_seconds > 0 and cost.step_seconds > 0 and cost.step_peak >= 4 * parameters
    assert cost.peak > 8 * 16 * 16
    assert str(Cost(6.0, 3.0, 2.0, 30, 10, 10, 30)) == "1.5 (3.0), 1.0 (3.0)"


# -- planting ---------------------------------------------------------------------------------------------------------


def test_rounding():
    x = torch.tensor([1.0, 1.03, 1.07, 1.3125, -3.3, 0.0, 1e-30, 1e30])
    found = rounded(x, 4, False)
    assert found[:6].tolist() == [1.0, 1.0, 1.125, 1.25, -3.25, 0.0]  # 21 sixteenths lie between 20 and 22
    assert bool(((found - x).abs() <= 2**-4 * x.abs()).all())
    assert torch.equal(rounded(x.double(), 4, False), x.double()) and torch.equal(rounded(x, 4, True), x)
    assert torch.equal(rounded(x[:6].double(), 4, True).float(), found[:6])
    assert rounded(x.bfloat16(), 4, False).dtype is torch.bfloat16
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(rounded(x, 4, False).sum(), x)
    assert torch.equal(gradient, torch.ones_like(x))


def test_what_is_planted_is_found():
    found = planted(small("mlp"))
    assert found.due >= 5 and found.found == found.due
    assert {"linear", "linear_1", "linear_2"} <= {place.node for place in found.places if place.due}
    assert len({place.rows for place in found.places}) == 1


def test_planting_goes_away():
    look = Attribution.look
    with pytest.raises(ZeroDivisionError), ledgers._planted(0, "linear", 4, False):
        assert Attribution.look is not look
        _ = 1 / 0
    assert Attribution.look is look


def test_planting_elsewhere_changes_nothing():
    subject = small("mlp")
    model = fxprec.convert(subject.seeded()).module
    x, y = subject.batch(0)
    plain = audit(model, [(x, y)], subject.loss)
    with ledgers._planted(0, "no such node", 4, False):
        found = audit(model, [(x, y)], subject.loss)
    assert [row.rounding for row in found.rows] == pytest.approx([row.rounding for row in plain.rows])
    with ledgers._planted(0, "linear_1", 4, wide=False):
        found = audit(model, [(x, y)], subject.loss)
    assert found.rows[0].node == "linear_1" and _reference(found) == pytest.approx(_reference(plain), rel=1e-9)
    with ledgers._planted(0, "linear_1", 4, wide=True):
        wide = audit(model, [(x, y)], subject.loss)
    assert wide.samples[0].low == plain.samples[0].low
    assert _reference(wide) != pytest.approx(_reference(plain), rel=1e-5)


def _reference(ledger):
    return ledger.samples[0].reference


def test_ranks_where_they_are_due_and_elsewhere():
    places = (
        Place("a", "linear", -3.1, 3.1, 1.0, 1, 9), Place("b", "linear", 3.1, 9.0, 1.0, 2, 9),
        Place("c", "relu", 3.0, -9.0, 1.0, 1, 9), Place("d", "relu", 9.0, 2.9, 1.0, 6, 9),
    )  # fmt: skip
    found = Planted("m", 4, places)
    assert (found.due, found.found, found.first, found.median_elsewhere) == (2, 1, 2, 3.5)
    assert (found.by_run, found.by_float64) == ((3, 2), (3, 1))
    assert Planted("m", 4, places[:2]).median_elsewhere is None
    assert [place["due"] for place in found.as_dict()["places"]] == [True, True, False, False]


# -- predicting -------------------------------------------------------------------------------------------------------


class Independent(nn.Module):
    """Two products of the input with weights that bfloat16 holds: only inputs and results are rounded."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Linear(8, 8, bias=False) for _ in range(2))
        with torch.no_grad():
            for layer in (self.a, self.b):
                layer.weight.copy_(layer.weight.bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x)


@pytest.mark.slow
def test_squares_predict_the_errors_of_other_samples():
    def batch(seed: int) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(2, 8, generator=generator), torch.randn(2, 8, generator=generator)

    subject = Subject("independent", "tiny", Independent, batch, F.mse_loss)
    found = predicted(subject, 96)
    assert len(found.errors) == found.samples == 96
    assert found.low < found.measured < found.high < 2 * found.low
    assert found.ratio_low < found.explained / found.measured < found.ratio_high < 3 * found.ratio_low
    assert found.accounted_for and abs(found.off_diagonal) < 0.6
    root = math.sqrt(sum(error**2 for error in found.errors) / 96)
    assert found.measured == pytest.approx(root)


def test_errors_are_those_of_the_converted_model_against_float64():
    subject = small("mlp")
    model = fxprec.convert(subject.seeded()).module
    [expected] = audit(model, [subject.sample(5)], subject.loss).samples
    found = ledgers._error(subject, model, subject.seeded().double(), subject.sample(5))
    assert found == pytest.approx(expected.measured, rel=1e-7)


def test_what_correlates_is_told():
    found = Variances("m", 4, 1.0, 2.0, 2.1, 2.05, 1.9, 2.2, 0.9, 1.1, (2.0,))
    assert not found.inside and found.accounted_for and found.off_diagonal == 3.0
    assert replace(found, predicted=2.0).inside
    assert not replace(found, ratio_high=0.99).accounted_for and not replace(found, ratio_low=1.01).accounted_for
    assert math.isnan(replace(found, predicted=0.0).off_diagonal)


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command(tmp_path, capsys):
    arguments = ["--only", "mlp", "--size", "tiny", "--samples", "3", "--output", str(tmp_path)]
    assert ledger.main(arguments) == 0
    shown = capsys.readouterr().out
    assert "Do the columns add up?" in shown and "Is what was planted found?" in shown and "held" not in shown
    folder = tmp_path / device_name(torch.device("cpu"))
    found = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in folder.iterdir()}
    assert found.keys() == {"ledger-adds-up-mlp", "ledger-planted-mlp", "ledger-variances-mlp"}
    sums = found["ledger-adds-up-mlp"]["sums"]
    assert [(each["dtype"], each["level"], each["target"]) for each in sums] == [
        (dtype, level, target)
        for dtype in ("bfloat16", "float16")
        for level in ("O1", "O2")
        for target in ("loss", "gradients")
    ]
    assert found["ledger-planted-mlp"]["found"] == found["ledger-planted-mlp"]["due"]
    assert found["ledger-variances-mlp"]["samples"] == 3


def test_the_status_is_1_where_the_ledger_is_wrong(monkeypatch):
    wrong = Sum("mlp", "tiny", "bfloat16", "O1", "loss", 1.0, 0.1, 0.0, "a", 1, ())
    monkeypatch.setattr(ledger, "added_up", lambda *_: wrong)
    assert ledger.main(["adds-up", "--only", "mlp", "--size", "tiny"]) == 1
    missed = Planted("mlp", 4, (Place("a", "linear", 1.0, 1.0, 0.1, 2, 9),))
    monkeypatch.setattr(ledger, "planted", lambda *_: missed)
    assert ledger.main(["planted", "--only", "mlp", "--size", "tiny"]) == 1


def test_a_run_at_other_settings_writes_nothing(monkeypatch, capsys):
    monkeypatch.setattr(ledger, "save", lambda *_: 1 / 0)
    assert ledger.main(["variances", "--only", "mlp", "--samples", "2"]) == 0
    assert "wants --output FOLDER" in capsys.readouterr().out
    found = Variances("mlp", 1, *[1.0] * 8, (1.0,))
    with pytest.raises(ZeroDivisionError):
        monkeypatch.setattr(ledger, "predicted", lambda *_: found)
        ledger.main(["variances", "--only", "mlp"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["add-up"], "no question 'add-up'; did you mean adds-up?"),
        (["--only", "zoo-brt"], "no model 'zoo-brt'; did you mean zoo-bert?"),
        (["--samples", "1"], "--samples is 2 at least"),
    ],
)
def test_unknown_names(arguments, message, capsys):
    with pytest.raises(SystemExit) as raised:
        ledger.main(arguments)
    assert raised.value.code == 2
    assert message in capsys.readouterr().err
