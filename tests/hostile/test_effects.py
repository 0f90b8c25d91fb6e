"""Side effects of a forward: prints, logs, warnings, calls back, files, things made in it."""

from tests.hostile.cases_effects import CASES
from tests.hostile.harness import suite

test_case = suite(CASES)
