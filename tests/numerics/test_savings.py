"""What an override saves is measured: on a copy that has it, for all rows that it takes along."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxprec
from as_it_was import unchanged
from fxprec.numerics import audit
from fxprec.numerics.ledger import mean_square, saved


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.first(x).tanh()).tanh())


class Routed(nn.Module):
    """A router whose scores are nearly equal: low precision often takes the other expert, which gives another sign."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.last = nn.Linear(8, 2), nn.Linear(8, 4)
        with torch.no_grad():
            self.router.weight[1] = self.router.weight[0] * (1 + 1e-3)
            self.router.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.router(x).argmax(-1, keepdim=True)
        answers = torch.stack([x, -x], 1)
        answer = answers.gather(1, chosen.unsqueeze(-1).expand(-1, -1, x.shape[-1])).squeeze(1)
        return self.last(answer)


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(4, 8, generator=generator), torch.randint(4, (4,), generator=generator)) for _ in range(count)]


def made(kind: type[nn.Module] = Net, **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    return fxprec.convert(kind(), dtype=torch.bfloat16, **settings)[0]


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("loss", [F.cross_entropy, None])
def test_the_column_is_what_the_override_is_measured_to_save(loss: Any, gradients: bool) -> None:
    given = batches(2) if loss is not None else [(x,) for x, _ in batches(2)]
    model = made()
    model(given[0][0])
    with unchanged(model):
        ledger = audit(model, given, loss, gradients=gradients, savings=True)
    measured = {row.override: row.saves for row in ledger.rows if row.saves is not None}
    assert {("linear",), ("linear_1",), ("linear_2",)} <= {*measured}
    start = sum(mean_square(audit(model, [batch], loss, gradients=gradients)) for batch in given)
    for names in [("linear",), ("linear_2",)]:
        policy = fxprec.Policy.preset("O1").override(nodes=dict.fromkeys(names, torch.float32))
        other = made(policy=policy)
        left = sum(mean_square(audit(other, [batch], loss, gradients=gradients)) for batch in given)
        noise = 1e-9 if loss is None or gradients else 0.3  # of roundings that are the same, which are drawn anew
        assert measured[names] == pytest.approx(1 - left / start, abs=noise)


@pytest.mark.slow
def test_only_what_differs_is_compared() -> None:
    """The roundings of the first layer are drawn anew where the last is in FP32, and count for nothing."""
    model, given = made(), batches(6)
    (row,) = [each for each in audit(model, given, F.cross_entropy, savings=True).rows if each.node == "linear_2"]
    own = [audit(model, [batch], F.cross_entropy) for batch in given]
    start = sum(map(mean_square, own))
    goes = {"linear_2", "last.weight", "last.bias"}
    mine = sum(each.squares for ledger in own for each in ledger.rows if each.node in goes)
    assert row.saves == pytest.approx(mine / start, abs=1e-3) and row.saves_error is not None and row.saves_error > 0


@pytest.mark.slow
def test_rows_of_one_override_say_the_same_and_a_share_is_no_saving() -> None:
    """The low copy of a weight and the cast of an input go with the product; a tanh's rounding becomes its cast's."""
    rows = {row.node: row for row in audit(made(), batches(12), F.cross_entropy, savings=True).rows}
    assert rows["last.weight"].override == rows["linear_2"].override == ("linear_2",)
    assert rows["last.weight"].saves == rows["linear_2"].saves == rows["last.bias"].saves
    assert rows["tanh_1"].share > 0.02 and rows["tanh_1"].saves == pytest.approx(0, abs=1e-4)
    assert rows["linear_2"].saves is not None and rows["linear_2"].saves > 1.2 * rows["linear_2"].share


@pytest.mark.slow
def test_what_decides_over_a_route_is_measured_although_it_has_no_row() -> None:
    ledger = audit(made(Routed), batches(24), F.cross_entropy, savings=2)
    assert "linear" not in {row.node for row in ledger.rows}
    (gathered,) = [row for row in ledger.rows if row.override == ("linear",)]
    assert gathered.op == "gather" and gathered.saves is not None and gathered.saves > 0.5


@pytest.mark.slow
def test_as_many_overrides_as_are_asked_for_are_tried() -> None:
    plain = audit(made(), batches(2), F.cross_entropy)
    assert all(row.saves is None and row.override == () for row in plain.rows)
    assert "an override saves" not in str(plain)
    ledger = audit(made(), batches(2), F.cross_entropy, savings=2)
    assert len({row.override for row in ledger.rows if row.saves is not None}) == 2
    assert "an override saves" in str(ledger) and "of 2 overrides; savings=N tries more of the" in ledger.remarks[-1]
    assert ledger.to_dict()["rows"][0]["override"] == list(ledger.rows[0].override)
    single = audit(made(), batches(1), F.cross_entropy, savings=1)
    assert {row.saves_error for row in single.rows} == {None} and " ± " not in str(single)


@pytest.mark.parametrize(
    ("savings", "error", "words"),
    [(-1, ValueError, "not -1"), (2.5, TypeError, "not float"), ("all", TypeError, "not str")],
)
def test_other_numbers_are_refused(savings: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        audit(made(), batches(1), F.cross_entropy, savings=savings)


def test_the_standard_error_is_that_of_batches() -> None:
    assert saved([1.0, 2.0, 1.0], [0.5, 1.0, 0.5]) == (0.5, 0.0)
    assert saved([2.0], [-1.0]) == (-0.5, None)
    part, error = saved([1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 0.0, 0.0])
    assert part == 0.5 and error == pytest.approx(0.2887, abs=1e-3)  # the deviation of (0, 0, 1, 1), over its root
    assert saved([1.0, 0.0], [0.5, 0.0])[0] == 0.5
