"""Children, parameters and buffers that come, go, change places, are hidden, or whose dicts are replaced."""

from tests.hostile.cases_parts import CASES
from tests.hostile.harness import suite

test_case = suite(CASES)
