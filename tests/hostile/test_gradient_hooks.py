"""Hooks on the way back: of modules, tensors, parameters, nodes."""

from hostile.cases_gradient_hooks import CASES
from hostile.harness import suite

test_static, test_dynamo = suite(CASES)
