"""What happens to weights after conversion: replaced, tied, frozen, cast, parametrized, loaded, swapped."""

from hostile.cases_weights import CASES
from hostile.harness import suite

test_static, test_dynamo = suite(CASES)
