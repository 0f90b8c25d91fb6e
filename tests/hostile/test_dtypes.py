"""Inputs of other dtypes and shapes: float64, integers, bool, complex, low, mixed, 0-dim, empty, sparse."""

from tests.hostile.cases_dtypes import CASES
from tests.hostile.harness import suite

test_case = suite(CASES)
