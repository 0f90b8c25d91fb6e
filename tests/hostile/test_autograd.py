"""Autograd: double backward, gradients of inputs, checkpoints, own functions, hooks of saved tensors, modes."""

from hostile.cases_autograd import CASES
from hostile.harness import suite

test_static, test_dynamo = suite(CASES)
