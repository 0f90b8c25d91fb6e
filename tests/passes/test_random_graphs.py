"""Random programs through the whole pipeline: invariants, dtypes, values, gradients, and the same answer every time.

A program is a list of steps over values of shape (2, 3, 4): layers, norms, pointwise and in-place ops, views, writes to
parts, casts, masks, integers and several results. Masks and indices come from the inputs, whose values no dtype rounds.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree as pytree

from fxprec.passes.context import Context
from fxprec.passes.graph.text import format_graph
from fxprec.passes.policy.policy import Policy
from fxprec.testing import assert_annotations_hold
from tests.fuzz import programs
from tests.fuzz.programs import ROUNDING, Model, Unrounded, everything, inputs, rewrite
from tests.fuzz.steps import STEPS

pytestmark = pytest.mark.slow

BF16, FP16 = torch.bfloat16, torch.float16


def some_programs(names: Iterable[str]) -> st.SearchStrategy[Model]:
    steps = st.tuples(st.sampled_from(sorted(names)), st.integers(0, 5), st.integers(0, 5))
    return st.builds(Model, st.lists(steps, min_size=1, max_size=10), st.integers(1, 3))


PROGRAMS = some_programs(STEPS)
#: Without rounding of the user's own.
FP32_PROGRAMS = some_programs(STEPS.keys() - ROUNDING)
CONTEXTS = st.builds(
    lambda level, **settings: Context(policy=Policy.preset(level), **settings),
    level=st.sampled_from(["O1", "O2", "O3"]),
    low=st.sampled_from([BF16, FP16]),
    placement=st.sampled_from(["mincut", "autocast"]),
    native_mixed=st.booleans(),
)
FEW = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def expected(model: Model) -> list[Tensor]:
    """What eager gives; what it refuses is no program."""
    values = programs.expected(model)
    assume(values is not None)
    assert values is not None
    return values


@given(PROGRAMS, CONTEXTS, st.booleans())
@FEW
def test_dtypes_are_those_of_the_program_and_of_the_annotations(model: Model, context: Context, shapes: bool) -> None:
    wanted = expected(model)
    gm = rewrite(model, context, known=True, shapes=shapes)
    assert_annotations_hold(gm, *inputs())
    assert [value.dtype for value in pytree.tree_leaves(gm(*inputs()))] == [value.dtype for value in wanted]


@given(FP32_PROGRAMS, CONTEXTS)
@FEW
def test_casts_are_the_only_change(model: Model, context: Context) -> None:
    """Where casts do not round, values, gradients and what was written to inputs and buffers are the program's."""
    expected(model)
    twin = copy.deepcopy(model)
    try:
        original = everything(model, model)
    except RuntimeError:  # its backward wants what was written over
        assume(False)
    rewritten = everything(twin, Unrounded(rewrite(twin, context)).run)
    torch.testing.assert_close(rewritten, original, rtol=1e-5, atol=1e-6)


@given(PROGRAMS, CONTEXTS)
@settings(FEW, max_examples=40)
def test_dtypes_without_knowing_those_of_the_inputs(model: Model, context: Context) -> None:
    wanted = expected(model)
    outputs = pytree.tree_leaves(rewrite(model, context)(*inputs()))
    assert [value.dtype for value in outputs] == [value.dtype for value in wanted]


@given(PROGRAMS)
@settings(FEW, max_examples=25)
def test_level_o0_changes_nothing(model: Model) -> None:
    wanted = expected(model)
    gm = rewrite(model, Context(low=BF16, policy=Policy.preset("O0")))
    with torch.no_grad():
        assert all(map(torch.equal, pytree.tree_leaves(gm(*inputs())), wanted))


@given(PROGRAMS, CONTEXTS)
@settings(FEW, max_examples=20)
def test_the_same_program_gives_the_same_graph(model: Model, context: Context) -> None:
    expected(model)
    assert format_graph(rewrite(model, context, shapes=True)) == format_graph(rewrite(model, context, shapes=True))
