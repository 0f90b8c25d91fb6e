"""Other methods than forward, children called directly, generation loops."""

from hostile.cases_methods import CASES
from hostile.harness import suite

test_static, test_dynamo = suite(CASES)
