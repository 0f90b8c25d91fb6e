"""What a forward writes: counters, caches, nested containers, buffers, prints, other objects."""

from tests.hostile.cases_writes import CASES
from tests.hostile.harness import suite

test_case = suite(CASES)
