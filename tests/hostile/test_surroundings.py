"""What surrounds a forward: environment, clocks, random sources, patched functions, default dtype, iterators."""

from hostile.cases_surroundings import CASES
from hostile.harness import suite

test_static, test_dynamo = suite(CASES)
