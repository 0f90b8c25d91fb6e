"""What surrounds a forward: environment, clocks, random sources, patched functions, default dtype, iterators."""

from tests.hostile.cases_surroundings import CASES
from tests.hostile.harness import suite

test_case = suite(CASES)
