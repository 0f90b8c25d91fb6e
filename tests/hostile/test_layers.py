"""Layers with ways of their own: norms, recurrent, lazy, scripted, shared, attention, embeddings."""

from hostile.cases_layers import CASES
from hostile.harness import suite

test_static, test_dynamo = suite(CASES)
