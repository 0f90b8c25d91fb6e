"""Recurrent layers, attention, embeddings, losses."""

from hostile.cases_sequences import CASES
from hostile.harness import suite

test_static, test_dynamo = suite(CASES)
