"""Weights that become another dtype, or go elsewhere."""

from tests.hostile.cases_dtypes_of_weights import CASES
from tests.hostile.harness import suite

test_case = suite(CASES)
