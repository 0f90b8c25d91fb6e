"""Run one case in all its worlds and say what differs."""

from __future__ import annotations

import contextlib
import warnings
from dataclasses import dataclass
from typing import Final

from tests.fuzz.compare import different, is_chaotic, stayed_wide
from tests.fuzz.source import Case
from tests.fuzz.unrounded import casts_that_do_not_round, no_dynamo
from tests.fuzz.worlds import OF_ORIGINAL, World

__all__ = ["KNOWN_FAULTS", "Wrong", "check"]

#: Faults of the library that are known and not yet mended, by capture: what shows them is left out.
KNOWN_FAULTS: dict[str, frozenset[str]] = {
    "static": frozenset(),
    "dynamo": frozenset(),
    "auto": frozenset(),
}

#: Other roundings that are tried where a value is off.
_NUDGES: Final = 8
_WIDE: Final = "exactly FP32's where autocast rounds: nothing was lowered"
_STATE: Final = "state afterwards: "


@dataclass(frozen=True)
class Wrong:
    """What differed first.

    Attributes:
        statement: its index in the script.
    """

    statement: int
    what: str


def check(case: Case, *, thorough: bool = False) -> Wrong | None:
    """Run the script in all worlds.

    Args:
        case: what to run.
        thorough: compare all state after every statement, not only at the end: names the statement that is at fault.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        if case.judged == "unrounded":
            stack.enter_context(casts_that_do_not_round())
        if case.capture == "static":
            stack.enter_context(no_dynamo())
        kinds = ("eager", "autocast", "ours") if case.judged == "rounded" else ("eager", "ours")
        worlds = {}
        for kind in kinds:
            worlds[kind] = World(kind, case)
            stack.callback(worlds[kind].close)
        return _run(case, worlds, thorough)


def _run(case: Case, worlds: dict[str, World], thorough: bool) -> Wrong | None:
    eager, ours, autocast = worlds["eager"], worlds["ours"], worlds.get("autocast")
    for index, statement in enumerate(case.script):
        for world in worlds.values():
            world.log.clear()
            world.execute(index, statement.text)
            if world.stopped is not None and world is not ours:
                return None  # what eager cannot run is no program
        if ours.stopped is not None:
            return Wrong(index, f"raised {ours.stopped}")
        why = _logs_differ(case, worlds)
        if why is None:
            if autocast and any(is_chaotic(a, b) for (_, a), (_, b) in zip(eager.log, autocast.log, strict=False)):
                return None  # such as steps along gradients that explode
            if thorough or index == len(case.script) - 1:
                why = _states_differ(case, worlds)
        if why is not None:
            return None if autocast and _is_rounding(case, worlds, index, why) else Wrong(index, why)
    return None


def _is_rounding(case: Case, worlds: dict[str, World], index: int, why: str) -> bool:
    """Whether rounding otherwise makes autocast as wrong, from weights that are off by its rounding.

    Its error is one of many. Where sums cancel, or steps explode, another one may be ten times as large.
    """
    for nudge in range(_NUDGES):
        with contextlib.ExitStack() as stack:
            other = {kind: World(kind, case, nudge) for kind in ("eager", "autocast")}
            for world in other.values():
                stack.callback(world.close)
                for i, statement in enumerate(case.script[: index + 1]):
                    world.log.clear()
                    world.execute(i, statement.text)
            if why.endswith(_WIDE):  # it shows nothing if no weight does
                if not all(
                    different(leaves, expected, None, "exact", outputs=True) is None
                    for (_, leaves), (_, expected) in zip(other["eager"].log, worlds["eager"].log, strict=True)
                ):
                    return False
                continue
            differ = _states_differ if why.startswith(_STATE) else _logs_differ
            if differ(case, {**worlds, "autocast": other["autocast"]}) is None:
                return True
    return why.endswith(_WIDE)


def _states_differ(case: Case, worlds: dict[str, World]) -> str | None:
    snapshots = {kind: world.snapshot() for kind, world in worlds.items()}
    why = different(snapshots["ours"], snapshots["eager"], snapshots.get("autocast"), case.judged, False)
    return None if why is None else f"{_STATE}{why}"


def _logs_differ(case: Case, worlds: dict[str, World]) -> str | None:
    eager, ours, autocast = worlds["eager"], worlds["ours"], worlds.get("autocast")
    if [_plain(kind) for kind, _ in ours.log] != [_plain(kind) for kind, _ in eager.log]:
        return f"{[kind for kind, _ in ours.log]}, expected {[kind for kind, _ in eager.log]}"
    for i, ((kind, leaves), (_, expected)) in enumerate(zip(ours.log, eager.log, strict=True)):
        other = autocast.log[i][1] if autocast is not None and i < len(autocast.log) else None
        why = different(leaves, expected, other, case.judged, outputs=_plain(kind) == "output")
        if why is None and kind == "output" and other is not None and stayed_wide(leaves, expected, other):
            why = _WIDE
        if why is not None:
            return f"{kind}: {why}"
    return None


def _plain(kind: str) -> str:
    return kind.removesuffix(OF_ORIGINAL)
