"""Checkpoints, autograd functions of one's own, hooks of saved tensors, anomaly mode."""

from hostile.cases_functions import CASES
from hostile.harness import suite

test_static, test_dynamo = suite(CASES)
