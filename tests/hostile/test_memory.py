"""Memory that is shared in further ways."""

from tests.hostile.cases_memory import CASES
from tests.hostile.harness import suite

test_case = suite(CASES)
