"""Classes and methods that a forward goes through, and what replaces them."""

from hostile.cases_classes import CASES
from hostile.harness import suite

test_static, test_dynamo = suite(CASES)
