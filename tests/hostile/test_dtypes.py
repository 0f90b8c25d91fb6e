"""Inputs of other dtypes and shapes: float64, integers, bool, complex, low, mixed, 0-dim, empty, sparse."""

from hostile.cases_dtypes import CASES
from hostile.harness import suite

test_static, test_dynamo = suite(CASES)
