"""Weights that become another dtype, or go elsewhere."""

from hostile.cases_dtypes_of_weights import CASES
from hostile.harness import suite

test_static, test_dynamo = suite(CASES)
