"""Hostile cases: a case is a function that builds a model, converts it, calls it and changes things in between.

It runs as it stands (FP32), in float64, under eager autocast, and converted: as ``convert`` captures by itself, and by
dynamo where that made static graphs (where it made none, dynamo has had all of it already). What it saw
(outputs, inputs afterwards, gradients, the state of model and surroundings, random states) must be what the original
saw: equal in every fact, and in numbers at most twice as far from float64 as eager autocast is. Products that autocast
lowers are lowered.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy
import pytest
import torch

from fxprec.model.captured import Captured
from fxprec.model.static import StaticEntry, StaticGraphs
from tests.hostile.counting import counted
from tests.hostile.known import KNOWN
from tests.hostile.portrait import Leaf, error, size
from tests.hostile.run import LOW, Run

#: Beside twice autocast's error: an ulp of bfloat16 of the largest value, for both may round differently.
EPS = 2.0**-7
#: How far float64 and FP32 may be apart; further, the float64 run is no twin.
TWIN = 1e-3


@dataclasses.dataclass(frozen=True)
class Case:
    """One case and what is special about it; every ``no_...`` is the reason why a part does not apply.

    Attributes:
        run: the case itself.
        no_dynamo: it runs static only.
        no_twin: FP32 is the reference, the case cannot run in float64 (or draws other random numbers there).
        no_autocast: eager autocast cannot run it, or is wrong.
        wide: products stay FP32 that autocast lowers: by a rule of the op table, because the user asked for it, or
            since nobody named the method that runs them.
    """

    run: Callable[[Run], Any]
    no_dynamo: str = ""
    no_twin: str = ""
    no_autocast: str = ""
    wide: str = ""
    slow: bool = False

    @property
    def name(self) -> str:
        return self.run.__name__


class Cases(list[Case]):
    """The cases of one file; as a decorator it adds one."""

    def __init__(self, group: str) -> None:
        super().__init__()
        self.group = group

    def __call__(self, run: Callable[[Run], Any] | None = None, **special: Any) -> Any:
        if run is None:
            return functools.partial(self, **special)
        self.append(Case(run, **special))
        return run


def no_lstm_under_autocast() -> str:
    """torch casts for oneDNN's bfloat16 LSTM without asking whether the CPU has the instructions for it."""
    try:
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            torch.nn.LSTM(2, 2)(torch.zeros(1, 1, 2))
    except RuntimeError as error:
        return str(error)
    return ""


@dataclasses.dataclass(frozen=True)
class Outcome:
    seen: dict[str, Leaf]
    products: Counter[torch.dtype]


def outcome(case: Case, variant: str, products: Counter[torch.dtype]) -> Outcome:
    """Run a case in one of the variants, from the same random states."""
    torch.default_generator.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    products.clear()
    run = Run(variant)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            case.run(run)
            run.finish()
        finally:
            run.close()
    return Outcome(run.seen, Counter(products))


def check(case: Case, captures: Sequence[str], products: Counter[torch.dtype]) -> None:
    """Compare converted runs with the original's and with eager autocast's; the second one if the first was static."""
    plain = outcome(case, "fp32", products)
    twin = plain if case.no_twin else outcome(case, "fp64", products)
    cast = None if case.no_autocast else outcome(case, "autocast", products)
    for capture in captures:
        torch._dynamo.reset()
        with _static_graphs() as made:
            ours = outcome(case, capture, products)
        wrong = [*_facts(plain, cast, ours), *_numbers(plain, twin, cast, ours), *_lowered(case, cast, ours)]
        if wrong:
            pytest.fail("\n".join([f"with capture={capture!r}:", *wrong[:12]]), pytrace=False)
        if not made:
            return


@contextlib.contextmanager
def _static_graphs() -> Iterator[list[StaticEntry]]:
    """The static graphs that are made from now on."""
    made: list[StaticEntry] = []
    add = StaticGraphs.add

    def noted(graphs: StaticGraphs, entry: StaticEntry) -> list[Captured]:
        made.append(entry)
        return add(graphs, entry)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StaticGraphs, "add", noted)
        yield made


def _facts(plain: Outcome, cast: Outcome | None, ours: Outcome) -> Iterator[str]:
    """Everything but numbers is as in the original; the dtype of a state that was computed may be autocast's."""
    for path in sorted(plain.seen.keys() ^ ours.seen.keys()):
        yield f"{path}: {'missing' if path in plain.seen else 'not there in the original'}"
    for path, expected in plain.seen.items():
        got = ours.seen.get(path, expected)
        if got.facts != expected.facts:
            yield f"{path}: {got.facts}, expected {expected.facts}"
        dtypes = [expected.dtype]
        if cast is not None and path in cast.seen and path.startswith("state"):
            dtypes.append(cast.seen[path].dtype)
        if got.dtype not in dtypes:
            yield f"{path}: {got.dtype}, expected {expected.dtype}"


def _numbers(plain: Outcome, twin: Outcome, cast: Outcome | None, ours: Outcome) -> Iterator[str]:
    """At most twice as far from float64 as autocast's; a number of Python that nothing low went into is equal."""
    for path, leaf in plain.seen.items():
        original, got = leaf.number, ours.seen.get(path, leaf).number
        if original is None or got is None:
            continue
        exact = twin.seen[path].number if path in twin.seen else original
        if exact is None or error(original, exact) > TWIN * max(size(exact), 1e-3):
            yield f"{path}: the float64 run is no twin (say no_twin)"
            continue
        theirs = cast.seen[path].number if cast is not None and path in cast.seen else None
        if leaf.dtype is None and theirs is not None and repr(theirs) == repr(original):
            if repr(got) != repr(original):
                yield f"{path}: {got.item()}, expected {original.item()}"
            continue
        allowed = EPS * size(exact) * (4 if theirs is None else 1)
        allowed += 2 * error(theirs, exact) if theirs is not None else 0.0
        if (apart := error(got, exact)) > allowed:
            yield f"{path}: off by {apart:.3g}, allowed {allowed:.3g}, largest {size(exact):.3g}"


def _lowered(case: Case, cast: Outcome | None, ours: Outcome) -> Iterator[str]:
    """Say of products that autocast lowers and we do not."""
    if case.wide:
        return
    if cast is None:
        if not ours.products[LOW]:
            yield f"nothing was lowered: {dict(ours.products)}"
    elif ours.products[torch.float32] > cast.products[torch.float32] or (cast.products[LOW] and not ours.products[LOW]):
        yield f"products run in {dict(ours.products)}, under autocast in {dict(cast.products)}"


def suite(cases: Cases) -> Any:
    """``test_case = suite(CASES)``."""

    @pytest.mark.parametrize("case", [pytest.param(case, id=case.name, marks=_marks(cases, case)) for case in cases])
    def test(case: Case) -> None:
        with counted() as products:
            check(case, ["auto"] if case.no_dynamo else ["auto", "dynamo"], products)

    return test


def _marks(cases: Cases, case: Case) -> list[Any]:
    marks = [pytest.mark.slow] if case.slow else []
    if (identity := f"{cases.group}-{case.name}") in KNOWN:
        marks.append(pytest.mark.xfail(strict=True, reason=KNOWN[identity]))
    return marks
