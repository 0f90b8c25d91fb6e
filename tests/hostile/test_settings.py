"""The ways of convert and of what goes with it, in hostile order: example inputs, freeze, accumulate, wrappers."""

from hostile.cases_settings import CASES
from hostile.harness import suite

test_static, test_dynamo = suite(CASES)
