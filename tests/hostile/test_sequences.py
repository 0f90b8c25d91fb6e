"""Recurrent layers, attention, embeddings, losses."""

from tests.hostile.cases_sequences import CASES
from tests.hostile.harness import suite

test_case = suite(CASES)
