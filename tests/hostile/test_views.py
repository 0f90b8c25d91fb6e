"""Views, outputs that share memory, tied weights, strides."""

from hostile.cases_views import CASES
from hostile.harness import suite

test_static, test_dynamo = suite(CASES)
