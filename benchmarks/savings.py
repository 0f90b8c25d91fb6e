"""Does a ledger say what an override saves? Two columns of an audit against the error of batches that it never saw.

    python -m benchmarks savings [--only gpt moe] [--of outputs] [--batches 96] [--held-out 2048] [--overrides 10]

A model is audited with ``savings``. Then each override that was measured is judged by batches that the audit never saw:
the mean square error of the loss, or of all elements of the outputs, against a float64 copy of the original, and which
part of it is gone with the override. A loss's error is one number a batch, and its square wants thousands of batches;
outputs have many, and need few.

Ranks are Spearman's, of the overrides by a column and by held-out batches. As many overrides save next to nothing,
their order is noise however many batches there are: "halves" is the rank of one half of the held-out batches by the
other, which no column can be expected to exceed. "told apart" leaves that out: of the pairs of overrides whose held-out
savings differ by more than twice the standard error of the difference, the part that a column orders rightly.
"""

from __future__ import annotations

import argparse
import copy
import pathlib
import sys
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from typing import Final

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import fxprec
from benchmarks.measure.results import environment, save
from benchmarks.measure.timing import one_core
from benchmarks.workloads.subjects import Subject, small
from benchmarks.workloads.training import named
from fxprec.numerics import audit
from fxprec.numerics.problem import Batch

__all__ = ["KINDS", "Judged", "judged", "main", "rank"]

#: Name of the kind -> the tiny model that stands for it, and how many of its batches make one: of hundreds of rows one
#: goes to another expert in low precision, and batches of a few rows would hardly show any.
KINDS: Final = {
    "gpt": ("gpt", 1), "resnet": ("resnet50", 1), "moe": ("routed", 32), "recurrent": ("loop", 1), "unet": ("unet", 1),
}  # fmt: skip
_BATCHES: Final = 96
_HELD_OUT: Final = 2048
_OVERRIDES: Final = 10
#: Whose error: what ``audit`` explains with the loss, and without one.
OF: Final = ("loss", "outputs")


@dataclass(frozen=True)
class Override:
    """One override: what the columns say of it, and what it saves of held-out batches."""

    nodes: tuple[str, ...]
    share: float
    saves: float
    saves_error: float
    held_out: float
    error: float


@dataclass(frozen=True)
class Judged:
    """A model's overrides.

    Attributes:
        overrides: with the largest of their rows' shares.
        by_share, by_saves: ranks of the two columns with what held-out batches say.
        halves: rank of what one half of these says with what the other does.
        pairs: of overrides that held-out batches tell apart; and those of them that a column orders rightly.
    """

    model: str
    overrides: tuple[Override, ...]
    by_share: float
    by_saves: float
    halves: float
    pairs: int
    right_by_share: int
    right_by_saves: int


def rank(first: list[float], second: list[float]) -> float:
    """Return Spearman's rank correlation; equal values share the mean of their ranks."""
    ranks = []
    for values in (torch.tensor(first, dtype=torch.float64), torch.tensor(second, dtype=torch.float64)):
        below, equal = (values[:, None] > values).sum(1), (values[:, None] == values).sum(1)
        ranks.append(below + (equal - 1) / 2)
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])


def judged(name: str, subject: Subject, batches: int, held_out: int, overrides: int, of: str = "loss") -> Judged:
    """Audit so many batches, and judge the columns by ``held_out`` others; ``of``: "loss" or "outputs"."""
    original = copy.deepcopy(subject.seeded()).double()
    model = _converted(subject, ())
    audited = [_plain(subject.batch(seed)) for seed in range(batches)]
    if of == "outputs":
        ledger = audit(model, [batch[:-1] for batch in audited], savings=overrides)
    else:
        ledger = audit(model, audited, subject.loss, savings=overrides)
    rows = {row.override: row for row in reversed(ledger.rows) if row.saves is not None}
    unseen = [_plain(subject.batch(seed)) for seed in range(batches, batches + held_out)]
    exact = _values(subject, original, [_widened(batch) for batch in unseen], of)

    def squares(model: nn.Module) -> Tensor:
        values = _values(subject, model, unseen, of)
        return torch.stack([(one - two).square().sum() for one, two in zip(values, exact, strict=True)])

    start, left = squares(model), {nodes: squares(_converted(subject, nodes)) for nodes in rows}
    found = tuple(
        Override(
            nodes=nodes,
            share=max(each.share for each in ledger.rows if each.override == nodes),
            saves=row.saves or 0.0,
            saves_error=row.saves_error or 0.0,
            held_out=_saved(start, left[nodes])[0],
            error=_saved(start, left[nodes])[1],
        )
        for nodes, row in rows.items()
    )
    truth = [each.held_out for each in found]
    halves = [[_saved(start[k::2], left[nodes][k::2])[0] for nodes in rows] for k in (0, 1)]
    apart = []
    for one, other in combinations(found, 2):
        difference, error = _saved(start, left[one.nodes], left[other.nodes])
        if abs(difference) > 2 * error:
            apart.append((one, other))
    right = [
        sum((getattr(a, column) - getattr(b, column)) * (a.held_out - b.held_out) > 0 for a, b in apart)
        for column in ("share", "saves")
    ]
    return Judged(
        name, found, rank([each.share for each in found], truth), rank([each.saves for each in found], truth),
        rank(*halves), len(apart), *right,
    )  # fmt: skip


def of_kind(name: str) -> Subject:
    """Return the model of a kind, with its batches."""
    model, count = KINDS[name]
    subject = small(model)

    def batch(seed: int) -> Batch:
        parts = [subject.batch(count * seed + each) for each in range(count)]
        return tuple(torch.cat(each) for each in zip(*parts, strict=True))

    return replace(subject, batch=batch)


def _converted(subject: Subject, nodes: tuple[str, ...]) -> nn.Module:
    policy = fxprec.Policy.preset("O1").override(nodes=dict.fromkeys(nodes, torch.float32))
    return fxprec.convert(subject.seeded(), dtype=torch.bfloat16, policy=policy).module


@torch.no_grad()
def _values(subject: Subject, model: nn.Module, batches: list[tuple[Tensor, ...]], of: str) -> list[Tensor]:
    """Return the loss or the output of each batch, in float64."""
    called = [model(*batch[:-1]) if of == "outputs" else subject.value(model, batch) for batch in batches]
    return [value.double() for value in called]


def _plain(batch: Batch) -> tuple[Tensor, ...]:
    assert not isinstance(batch, Mapping), "a tiny model's inputs have no names"
    return tuple(batch)


def _widened(batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(part.double() if part.is_floating_point() else part for part in batch)


def _saved(start: Tensor, left: Tensor, other: Tensor | None = None) -> tuple[float, float]:
    """Return the part of the errors that is gone, less that of another override; and its standard error (jackknife)."""
    gone = (start if other is None else other) - left
    without = (gone.sum() - gone) / (start.sum() - start)
    count = len(start)
    spread = (without - without.mean()).square().sum() * (count - 1) / count
    return float(gone.sum() / start.sum()), float(spread.sqrt())


def table(found: list[Judged], of: str) -> Table:
    """A row a model."""
    made = Table(title=f"What an override saves of the mean square error of the {of}: columns against held-out batches")
    names = ("model", "overrides", "rank of share", "of saves", "halves", "told apart", "right by share", "by saves")
    for name in names:
        made.add_column(name, justify="left" if name == "model" else "right")
    for each in found:
        made.add_row(
            each.model, str(len(each.overrides)), f"{each.by_share:.2f}", f"{each.by_saves:.2f}", f"{each.halves:.2f}",
            str(each.pairs), str(each.right_by_share), str(each.right_by_saves),
        )  # fmt: skip
    return made


def main(arguments: list[str] | None = None) -> int:
    """Run what the options say; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks savings", description="Compare what an audit says that overrides save with the truth"
    )
    parser.add_argument("--only", nargs="+", default=(), metavar="MODEL", help=f"of {', '.join(KINDS)}")
    parser.add_argument("--of", choices=OF, default=OF[0], help="whose error (default: %(default)s)")
    parser.add_argument("--batches", type=int, default=_BATCHES, metavar="N", help="that are audited")
    parser.add_argument("--held-out", type=int, default=_HELD_OUT, metavar="N", help="that judge")
    parser.add_argument("--overrides", type=int, default=_OVERRIDES, metavar="N", help="that are measured, at most")
    parser.add_argument("--output", type=pathlib.Path, metavar="FOLDER", help="for JSON")
    options = parser.parse_args(arguments)
    try:
        names = named(options.only, KINDS, "model") or [*KINDS]
        if min(options.batches, options.overrides) < 2 or options.held_out < 4:
            raise ValueError("--batches and --overrides are 2 at least, --held-out 4")
    except ValueError as error:
        parser.error(str(error))
    device = torch.device("cpu")
    measured = environment(device)
    found = []
    console = Console(width=None if sys.stdout.isatty() else 200)
    with warnings.catch_warnings(), one_core():
        warnings.simplefilter("ignore")
        for name in names:
            one = judged(name, of_kind(name), options.batches, options.held_out, options.overrides, options.of)
            found.append(one)
            for each in sorted(one.overrides, key=lambda each: -each.held_out):
                said = f"share {each.share:.1%}, saves {each.saves:.1%} ± {each.saves_error:.1%}"
                truth = f"held-out batches {each.held_out:.1%} ± {each.error:.1%}"
                console.print(f"{name}: {', '.join(each.nodes)}: {said}, {truth}", highlight=False, soft_wrap=True)
    console.print(table(found, options.of))
    if options.output is not None:
        data = {"environment": measured, "of": options.of, "models": [asdict(each) for each in found]}
        save("savings", data, options.output, device)
    return 0


if __name__ == "__main__":
    fxprec.keep_memory()
    sys.exit(main())
