"""The ways of convert and of what goes with it, in hostile order: example inputs, freeze, accumulate, wrappers."""

from tests.hostile.cases_settings import CASES
from tests.hostile.harness import suite

test_case = suite(CASES)
