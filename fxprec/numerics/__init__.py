"""Numbers explained: which op costs how much of an error, where a value stopped being finite, what a dtype can hold."""

from fxprec.numerics.audit import audit
from fxprec.numerics.ledger import Ledger, Route, Row
from fxprec.numerics.locate import Finding, Trip, locate
from fxprec.numerics.range_table import Magnitudes, Range, Ranges
from fxprec.numerics.ranges import ranges
from fxprec.numerics.tune import tune
from fxprec.numerics.tuned import Tuned
from fxprec.numerics.watching.watch import Watcher, watch
from fxprec.tape.recorder import Decision

__all__ = [
    "Decision", "Finding", "Ledger", "Magnitudes", "Range", "Ranges", "Route", "Row", "Trip", "Tuned", "Watcher",
    "audit", "locate", "ranges", "tune", "watch",
]  # fmt: skip
