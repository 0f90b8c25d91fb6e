"""Hooks of modules, tensors, parameters, state dicts; of one module, or of all."""

from tests.hostile.cases_hooks import CASES
from tests.hostile.harness import suite

test_case = suite(CASES)
