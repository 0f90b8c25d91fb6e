"""Side effects of a forward: prints, logs, warnings, calls back, files, things made in it."""

from hostile.cases_effects import CASES
from hostile.harness import suite

test_static, test_dynamo = suite(CASES)
