"""What a forward writes: counters, caches, nested containers, buffers, prints, other objects."""

from hostile.cases_writes import CASES
from hostile.harness import suite

test_static, test_dynamo = suite(CASES)
