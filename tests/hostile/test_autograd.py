"""Autograd: double backward, gradients of inputs, checkpoints, own functions, hooks of saved tensors, modes."""

from tests.hostile.cases_autograd import CASES
from tests.hostile.harness import suite

test_case = suite(CASES)
