"""torch.func: vmap, grad, jvp, jacobians, functional_call, stacked models."""

from hostile.cases_transforms import CASES
from hostile.harness import suite

test_static, test_dynamo = suite(CASES)
