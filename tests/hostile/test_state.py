"""State in Python that a forward reads, outside of the model and in it."""

from tests.hostile.cases_state import CASES
from tests.hostile.harness import suite

test_case = suite(CASES)
