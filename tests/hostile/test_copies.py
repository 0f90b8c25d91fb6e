"""Copies, pickles, files, other processes and threads."""

from hostile.cases_copies import CASES
from hostile.harness import suite

test_static, test_dynamo = suite(CASES)
