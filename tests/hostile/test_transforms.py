"""torch.func: vmap, grad, jvp, jacobians, functional_call, stacked models."""

from tests.hostile.cases_transforms import CASES
from tests.hostile.harness import suite

test_case = suite(CASES)
