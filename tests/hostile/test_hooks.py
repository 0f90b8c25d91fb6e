"""Hooks of modules, tensors, parameters, state dicts; of one module, or of all."""

from hostile.cases_hooks import CASES
from hostile.harness import suite

test_static, test_dynamo = suite(CASES)
