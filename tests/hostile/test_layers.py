"""Layers with ways of their own: norms, recurrent, lazy, scripted, shared, attention, embeddings."""

from tests.hostile.cases_layers import CASES
from tests.hostile.harness import suite

test_case = suite(CASES)
