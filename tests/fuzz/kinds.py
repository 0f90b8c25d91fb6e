"""The two kinds of random things, behind one face: what a seed is, whether it is right, how it reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tests.fuzz import programs, stateful
from tests.fuzz.shrink import shrunk
from tests.fuzz.source import Case, case_of

__all__ = ["Kind"]


@dataclass(frozen=True)
class Kind:
    """What to make of seeds.

    Attributes:
        what: "programs" or "stateful".
        capture: of stateful modules: "static" (what a trace declines runs unchanged), "dynamo", or "auto".
        known: stateful modules that show known faults of the library too.
        only: names of features, one of which each stateful module has.
    """

    what: str
    capture: str = "static"
    known: bool = False
    only: tuple[str, ...] = ()

    def wrong(self, seed: int) -> str | None:
        """None where all is right, else what is wrong, with the program."""
        if self.what == "programs":
            model, context, choose = programs.program_of(seed)
            why = programs.check(model, context, choose)
            return why and f"seed {seed}: {model}, {context}\n{why}"
        case = self._case(seed)
        wrong = stateful.check(case)
        if wrong is None:
            return None
        wrong = stateful.check(case, thorough=True) or wrong
        return _shown(case, wrong)

    def shown(self, seed: int) -> str:
        if self.what == "programs":
            model, context, _ = programs.program_of(seed)
            return f"{model}, {context}"
        return self._case(seed).listing()

    def _case(self, seed: int) -> Case:
        return case_of(seed, self.capture, () if self.known else stateful.KNOWN_FAULTS[self.capture], self.only)

    def smallest(self, seed: int, say: Callable[[str], None]) -> str | None:
        """As ``wrong``, with what is not needed left out."""
        if self.what == "programs":
            model, context, choose = programs.program_of(seed)
            state = choose.getstate()

            def why(steps: list[tuple[str, int, int]]) -> str | None:
                choose.setstate(state)
                return programs.check(programs.Model(steps, model.returned), context, choose)

            steps = [*model.steps]
            if why(steps) is None:
                return None
            while shorter := next((s for i in range(len(steps)) if why(s := steps[:i] + steps[i + 1 :])), None):
                steps = shorter
            return f"seed {seed}: {steps}, {model.returned}, {context}\n{why(steps)}"
        case = self._case(seed)
        if stateful.check(case) is None:
            return None

        def fails(case: Case) -> bool:
            torch._dynamo.reset()
            try:
                return stateful.check(case) is not None
            except Exception as error:  # a statement that was left out defined what another one needs
                say(f"{type(error).__name__}: {error}")
                return False

        case = shrunk(case, fails)
        wrong = stateful.check(case, thorough=True) or stateful.check(case)
        return wrong and _shown(case, wrong)


def _shown(case: Case, wrong: stateful.Wrong) -> str:
    text = case.script[wrong.statement].text
    return f"{case.listing()}\n# wrong at statement {wrong.statement}, `{text}`:\n# {wrong.what}"
