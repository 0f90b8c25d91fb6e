"""Inputs and outputs in containers, by keyword, by default, in classes of one's own."""

from hostile.cases_containers import CASES
from hostile.harness import suite

test_static, test_dynamo = suite(CASES)
