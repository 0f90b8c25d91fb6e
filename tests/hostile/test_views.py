"""Views, outputs that share memory, tied weights, strides."""

from tests.hostile.cases_views import CASES
from tests.hostile.harness import suite

test_case = suite(CASES)
