"""What changes between conversion, or capture, and a call: attributes, submodules, forwards, flags."""

from tests.hostile.cases_changes import CASES
from tests.hostile.harness import suite

test_case = suite(CASES)
