"""Numbers explained: which op costs how much of an error, where a value stopped being finite, what a dtype can hold."""

from fxprec.numerics.audit import audit
from fxprec.numerics.ledger import Ledger, Row

__all__ = ["Ledger", "Row", "audit"]
