"""Children, parameters and buffers that come, go, change places, are hidden, or whose dicts are replaced."""

from hostile.cases_parts import CASES
from hostile.harness import suite

test_static, test_dynamo = suite(CASES)
