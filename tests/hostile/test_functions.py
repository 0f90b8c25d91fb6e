"""Checkpoints, autograd functions of one's own, hooks of saved tensors, anomaly mode."""

from tests.hostile.cases_functions import CASES
from tests.hostile.harness import suite

test_case = suite(CASES)
