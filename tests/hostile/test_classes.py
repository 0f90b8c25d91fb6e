"""Classes and methods that a forward goes through, and what replaces them."""

from tests.hostile.cases_classes import CASES
from tests.hostile.harness import suite

test_case = suite(CASES)
