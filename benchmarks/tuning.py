"""Tuned policies beside those of other methods, at equal time: error of the loss on batches that none of them has seen.

    python -m benchmarks tuning [--only gpt resnet] [--calibration 32] [--held-out 128] [--budgets 0.7 0.4 0.15]

All methods get the same figures: of each op the squared error that its rounding adds (``fxprec.numerics.tune``'s), and
the costs of a device: the bounds that the data sheet of an A100 gives (19.5 TFLOP/s in FP32, 312 low, 1,555 GB/s;
NVIDIA, 2020), calls not counted, so that small models have the proportions of large ones. All begin with everything
low. A budget is the fraction of the root mean square error of that which may be left. Each method keeps ops in FP32
until what is predicted is within the budget:

- greedy: those with the largest error first, one after another (the fallback of ONNX Runtime and Neural Compressor);
- prefix: the first k ops of the graph, k by bisection (Polygraphy);
- integer program: the least time of the ops, casts not counted, with the squares of those that are low within the
  budget (AMPT, arXiv 2505.13060), solved by dynamic programming over 4,000 steps of the budget.

Then ``tune`` is given the time that the method's policy takes, with its casts, and the errors of both are measured:
loss of the model as it runs minus that of the reference in float64. "worse": the bootstrap of the samples says in 95 of
100 that tune's mean square is the larger one. "missed": convert came to more time or error than tune had decided.

A second study, of as many other batches, says how far tune's decisions are those of the batches that it saw: both get
the same budgets, and the share of the graph's choices is told that they decide alike.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import fxprec
from benchmarks.measure.results import save
from benchmarks.workloads.convnets import ResNet
from benchmarks.workloads.models import MLP, Decoder, Llama, ViT
from benchmarks.workloads.training import named
from fxprec.model.conversion import conversion_of
from fxprec.numerics.audit import ledger_of
from fxprec.numerics.problem import Problem, under
from fxprec.numerics.tune import Study
from fxprec.passes.costs.device_costs import Curve, DeviceCosts, Work
from fxprec.passes.placement.tradeoff import EXACT, Outcome, TradeOff, cheapest_within, most_exact_within

__all__ = ["METHODS", "Agreement", "Comparison", "compare", "main"]

_STEPS: Final = 4000
_BOOTSTRAPS: Final = 2000

Batch = tuple[Tensor, ...]


def _tokens(outputs: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), target.flatten())


@dataclass(frozen=True)
class Case:
    """A model, its loss and how a batch is drawn."""

    build: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    draw: Callable[[torch.Generator], Batch]


def _codes(generator: torch.Generator) -> Batch:
    return torch.randint(65, (2, 64), generator=generator), torch.randint(65, (2, 64), generator=generator)


def _images(channels: int, side: int, classes: int) -> Callable[[torch.Generator], Batch]:
    def draw(generator: torch.Generator) -> Batch:
        x = torch.randn(4, channels, side, side, generator=generator)
        return x, torch.randint(classes, (4,), generator=generator)

    return draw


def _vectors(generator: torch.Generator) -> Batch:
    return torch.randn(128, 512, generator=generator), torch.randn(128, 512, generator=generator)


CASES: Final[Mapping[str, Case]] = {
    "mlp": Case(lambda: MLP(512, 6), F.mse_loss, _vectors),
    "resnet": Case(lambda: ResNet((1, 1, 1, 1), 16, 10), F.cross_entropy, _images(3, 64, 10)),
    "vit": Case(
        lambda: ViT(layers=2, dim=192, heads=4, side=32, patch=8, classes=10), F.cross_entropy, _images(3, 32, 10)
    ),
    "gpt": Case(lambda: Decoder(layers=2, dim=192, heads=4, vocabulary=65, context=64), _tokens, _codes),
    "llama": Case(lambda: Llama(layers=2, dim=192, heads=4, inner=512, vocabulary=65, context=64), _tokens, _codes),
}


def _bounds() -> DeviceCosts:
    curves: dict[torch.dtype, dict[Work, Curve]] = {}
    for dtype, flops, size in ((torch.float32, 19.5e12, 4), (torch.bfloat16, 312e12, 2)):
        products, passes = Curve.linear(1e-12, flops), Curve.linear(1e-12, 1555e9 / size)
        twice, elements = Curve.linear(1e-12, flops / 2), Curve.linear(1e-12, 1555e9 / (2 * size))
        curves[dtype] = {
            Work.MATMUL: products, Work.STREAM: passes, Work.POINTWISE: elements,
            Work.CAST: Curve.linear(1e-12, 1555e9 / 6),
            Work.CONVOLUTION: products, Work.THIN_CONVOLUTION: products, Work.ATTENTION: products,
            Work.CONVOLUTION_BACKWARD: twice, Work.THIN_CONVOLUTION_BACKWARD: twice, Work.ATTENTION_BACKWARD: twice,
        }  # fmt: skip
    return DeviceCosts("cpu", "an A100", 0, "by its data sheet", curves)


# -- other methods ----------------------------------------------------------------------------------------------------


def _greedy(trade: TradeOff, low: Outcome, square: float) -> Outcome:
    own = _own(trade, low)
    return _first_within(trade, low, sorted(own, key=lambda variable: -own[variable]), square)


def _prefix(trade: TradeOff, low: Outcome, square: float) -> Outcome:
    return _first_within(trade, low, [*_own(trade, low)], square)


def _first_within(trade: TradeOff, low: Outcome, order: Sequence[int], square: float) -> Outcome:
    """The first so many of these in FP32."""
    full = [*low.full]
    found = low
    for variable in order:
        if found.square <= square:
            break
        full[variable] = True
        found = trade.outcome(full)
    return found


def _integer_program(trade: TradeOff, low: Outcome, square: float) -> Outcome:
    own = {variable: error for variable, error in _own(trade, low).items() if error > 0}
    prices = _prices(trade)
    room = max(0.0, square - (low.square - sum(own.values())))
    best = np.full(_STEPS + 1, 0.0)  # room -> seconds that ops take longer in FP32 than low
    chosen: dict[int, np.ndarray] = {}
    for variable, error in own.items():
        weight, price = min(_STEPS + 1, int(np.ceil(error / room * _STEPS)) if room else _STEPS + 1), prices[variable]
        as_low = np.full(_STEPS + 1, np.inf)
        as_low[weight:] = best[: _STEPS + 1 - weight]
        chosen[variable] = as_low <= best + price
        best = np.minimum(as_low, best + price)
    full, left = [*low.full], _STEPS
    for variable in reversed([*own]):
        if chosen[variable][left]:
            left -= int(np.ceil(own[variable] / room * _STEPS))
        else:
            full[variable] = True
    return trade.outcome(full)


METHODS: Final = {"greedy": _greedy, "prefix": _prefix, "integer program": _integer_program}


def _own(trade: TradeOff, low: Outcome) -> dict[int, float]:
    """Variable of each op, in the order of the graph -> the squared error of its own value."""
    found: dict[int, float] = {}
    for node, variable in trade.choices.items():
        square = sum(trade.squares.get(root, 0.0) for root in trade.roots(node) if root is node)
        found[variable] = found.get(variable, 0.0) + square
    return found


def _prices(trade: TradeOff) -> dict[int, float]:
    found: dict[int, float] = {}
    for node, variable in trade.choices.items():
        full, low = trade.price(node) or (0.0, 0.0)
        found[variable] = found.get(variable, 0.0) + full - low
    return found


# -- comparing --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """A method's policy, and tune's of the same time.

    Attributes:
        budget: fraction of the error with everything low that may be left.
        time: of a step under the method's policy, in units of the one with everything low. ours: under tune's.
        predicted, measured: root mean square error of the method's. our_predicted, our_measured: of tune's.
        verdict: "better", "worse" or "equal": of tune's.
        lines: overrides of tune's policy.
        missed: convert's time or error under it is above what tune decided.
    """

    model: str
    method: str
    budget: float
    time: float
    ours: float
    predicted: float
    measured: float
    our_predicted: float
    our_measured: float
    verdict: str
    lines: int
    missed: bool


@dataclass(frozen=True)
class Agreement:
    """Of two calibrations: the share of choices that they decide alike, of all and with the weight of their errors."""

    model: str
    budget: float
    choices: int
    alike: float
    of_error: float


def lowest(trade: TradeOff) -> list[bool]:
    """Return the assignment in which no choice is FP32."""
    choices = set(trade.choices.values())
    return [full and variable not in choices for variable, full in enumerate(trade.cut(0.0).full)]


def compare(
    name: str, calibration: int, held_out: int, budgets: Sequence[float]
) -> tuple[list[Comparison], list[Agreement]]:
    """All methods on one model, and two calibrations."""
    case = CASES[name]
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = fxprec.convert(case.build().eval(), lower=_bounds(), dtype=torch.bfloat16)[0]
    problem, settings = Problem(model, case.loss), conversion_of(model).settings
    study, other = (Study.of(problem, settings, [case.draw(generator) for _ in range(calibration)]) for _ in range(2))
    trade = study.trade
    start = study.decided(settings.policy)
    unseen = [case.draw(generator) for _ in range(held_out)]
    reference = _reference(model, case, unseen)
    all_low = trade.outcome(lowest(trade))
    known: dict[tuple[bool, ...], tuple[np.ndarray, Outcome, int]] = {}

    def measured(outcome: Outcome) -> tuple[np.ndarray, Outcome, int]:
        if outcome.full not in known:
            policy, lines, reached = study.policy_for(outcome, start)
            trial = Problem(under(model, policy=policy), case.loss)
            losses = [trial.run(batch).item() for batch in unseen]  # type: ignore[union-attr]  with gradients, as tuned
            known[outcome.full] = (np.array(losses) - reference) ** 2, reached, len(lines)
        return known[outcome.full]

    found = []
    for method, run in METHODS.items():
        for budget in budgets:
            theirs, their_outcome, _ = measured(run(trade, all_low, all_low.square * budget**2))
            best = most_exact_within(trade, their_outcome.seconds)
            assert best is not None
            ours, our_outcome, lines = measured(best)
            found.append(
                Comparison(
                    name, method, budget,
                    time=their_outcome.seconds / all_low.seconds, ours=our_outcome.seconds / all_low.seconds,
                    predicted=their_outcome.square**0.5, measured=float(theirs.mean()) ** 0.5,
                    our_predicted=our_outcome.square**0.5, our_measured=float(ours.mean()) ** 0.5,
                    verdict=_verdict(ours, theirs), lines=lines,
                    missed=our_outcome.square > best.square * (1 + 1e-9)
                    or our_outcome.seconds > best.seconds * (1 + 1e-9),
                )
            )  # fmt: skip
    return found, [_agreement(name, trade, other.trade, all_low.square, budget) for budget in budgets]


def _agreement(name: str, first: TradeOff, second: TradeOff, square: float, budget: float) -> Agreement:
    """Of what both decide to come within the same error, where they can."""
    decided: list[dict[str, bool]] = []
    for trade in (first, second):
        found = cheapest_within(trade, max(square * budget**2, trade.cut(EXACT).square))
        assert found is not None
        decided.append({node.name: found.full[variable] for node, variable in trade.choices.items()})
    alike = {node: decided[1].get(node) is full for node, full in decided[0].items()}
    weights = {node.name: sum(first.squares.get(root, 0.0) for root in first.roots(node)) for node in first.choices}
    return Agreement(
        name, budget, len(alike), alike=sum(alike.values()) / len(alike),
        of_error=sum(weights[node] for node, same in alike.items() if same) / sum(weights.values()),
    )  # fmt: skip


def _reference(model: nn.Module, case: Case, batches: Sequence[Batch]) -> np.ndarray:
    """The loss in float64 of each batch."""
    samples = ledger_of(Problem(model, case.loss), batches).samples
    return np.array([sample.reference for sample in samples])


def _verdict(ours: np.ndarray, theirs: np.ndarray) -> str:
    draws = np.random.default_rng(0).integers(len(ours), size=(_BOOTSTRAPS, len(ours)))
    differences = (ours - theirs)[draws].mean(1)
    return "worse" if (differences > 0).mean() > 0.95 else "better" if (differences < 0).mean() > 0.95 else "equal"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks tuning", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="*", default=[], metavar="MODEL", help=f"of {', '.join(CASES)}")
    parser.add_argument("--calibration", type=int, default=32, help="batches that are audited")
    parser.add_argument("--held-out", type=int, default=128, help="batches that errors are measured on")
    parser.add_argument("--budgets", type=float, nargs="*", default=[0.7, 0.4, 0.15])
    parser.add_argument("--save", action="store_true", help="keep the result under benchmarks/results")
    options = parser.parse_args()
    found: list[Comparison] = []
    agreements: list[Agreement] = []
    for name in named(options.only or CASES, CASES, "model"):
        comparisons, alike = compare(name, options.calibration, options.held_out, options.budgets)
        Console(width=140).print(_table(comparisons))
        print(f"{name}: two calibrations decide alike " + ", ".join(f"{each.alike:.1%}" for each in alike))
        found += comparisons
        agreements += alike
    worse = [each for each in found if each.verdict == "worse"]
    better = [each for each in found if each.verdict == "better"]
    ratios = [each.our_measured / each.measured for each in found if each.measured]
    print(
        f"{len(found)} comparisons at equal time: tune is better in {len(better)}, worse in {len(worse)}; its error is "
        f"{float(np.exp(np.mean(np.log(np.maximum(ratios, 1e-9))))):.3f} of theirs (geometric mean); convert missed "
        f"{sum(each.missed for each in found)} of its decisions"
    )
    if options.save:
        data: dict[str, Any] = {"calibration": options.calibration, "held_out": options.held_out}
        data |= {
            name: [asdict(each) for each in rows] for name, rows in (("comparisons", found), ("agreements", agreements))
        }
        save("tuning", data)
    return 0


def _table(rows: Sequence[Comparison]) -> Table:
    table = Table(
        "model", "method", "budget", "its time", "tune's", "its error", "tune's error", "predicted", "tune's", "tune is"
    )
    for row in rows:
        table.add_row(
            row.model, row.method, f"{row.budget:g}", f"{row.time:.3f}", f"{row.ours:.3f}", f"{row.measured:.2e}",
            f"{row.our_measured:.2e}", f"{row.predicted:.2e}", f"{row.our_predicted:.2e}", row.verdict,
        )  # fmt: skip
    return table


if __name__ == "__main__":
    sys.exit(main())
