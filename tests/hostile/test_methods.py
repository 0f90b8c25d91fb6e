"""Other methods than forward, children called directly, generation loops."""

from tests.hostile.cases_methods import CASES
from tests.hostile.harness import suite

test_case = suite(CASES)
