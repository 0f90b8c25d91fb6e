"""Arguments: starred, by keyword, by default, callables, modules, constants."""

from hostile.cases_arguments import CASES
from hostile.harness import suite

test_static, test_dynamo = suite(CASES)
