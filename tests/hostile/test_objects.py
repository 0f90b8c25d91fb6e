"""What a forward reaches from the module: objects, classes, descriptors, properties, slots, bound methods."""

from hostile.cases_objects import CASES
from hostile.harness import suite

test_static, test_dynamo = suite(CASES)
