"""Arguments: starred, by keyword, by default, callables, modules, constants."""

from tests.hostile.cases_arguments import CASES
from tests.hostile.harness import suite

test_case = suite(CASES)
