"""Hooks on the way back: of modules, tensors, parameters, nodes."""

from tests.hostile.cases_gradient_hooks import CASES
from tests.hostile.harness import suite

test_case = suite(CASES)
