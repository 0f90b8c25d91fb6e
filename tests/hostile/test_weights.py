"""What happens to weights after conversion: replaced, tied, frozen, cast, parametrized, loaded, swapped."""

from tests.hostile.cases_weights import CASES
from tests.hostile.harness import suite

test_case = suite(CASES)
