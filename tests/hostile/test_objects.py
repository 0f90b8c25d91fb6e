"""What a forward reaches from the module: objects, classes, descriptors, properties, slots, bound methods."""

from tests.hostile.cases_objects import CASES
from tests.hostile.harness import suite

test_case = suite(CASES)
