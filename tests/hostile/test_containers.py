"""Inputs and outputs in containers, by keyword, by default, in classes of one's own."""

from tests.hostile.cases_containers import CASES
from tests.hostile.harness import suite

test_case = suite(CASES)
