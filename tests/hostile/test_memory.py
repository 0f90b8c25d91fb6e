"""Memory that is shared in further ways."""

from hostile.cases_memory import CASES
from hostile.harness import suite

test_static, test_dynamo = suite(CASES)
