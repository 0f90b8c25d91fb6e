"""Copies, pickles, files, other processes and threads."""

from tests.hostile.cases_copies import CASES
from tests.hostile.harness import suite

test_case = suite(CASES)
