"""mincut: as cheap as brute force on random problems, finite on contradictions, the same every time, near linear."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxprec.passes.placement.solver import CutProblem, Tensor, cost_of, solve


@st.composite
def problems(draw) -> CutProblem:
    count = draw(st.integers(1, 8))
    variable = st.integers(0, count - 1)
    users = st.lists(variable, min_size=1, max_size=4).map(tuple)
    tensors = []
    for _ in range(draw(st.integers(0, 8))):
        read = draw(users)
        promoters = frozenset(draw(st.sets(st.sampled_from(read))))
        tensors.append(Tensor(draw(variable), read, draw(st.integers(0, 5)), promoters))
    return CutProblem(
        count,
        draw(st.dictionaries(variable, st.booleans(), max_size=4)),
        tuple(tensors),
        tuple(draw(st.lists(st.tuples(variable, variable), max_size=4))),
        draw(st.dictionaries(variable, st.integers(-3, 3), max_size=count)),
    )


def lawful(problem: CutProblem, full: list[bool]) -> bool:
    """Pins hold, and so do all closures but those into a low pin."""
    pinned = all(full[variable] is pin for variable, pin in problem.pins.items())
    closed = all(full[y] or not full[x] or problem.pins.get(y) is False for x, y in problem.closures)
    return pinned and closed


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(problems())
def test_costs_what_brute_force_costs(problem):
    answers = ([*bits] for bits in itertools.product((False, True), repeat=problem.variables))
    best = min(cost_of(problem, answer) for answer in answers if lawful(problem, answer))
    found = solve(problem)
    assert lawful(problem, found)
    assert cost_of(problem, found) == best


@settings(max_examples=100, deadline=None)
@given(problems())
def test_the_same_every_time(problem):
    assert solve(problem) == solve(problem)


def test_a_cast_is_charged_once_however_many_read_it():
    many = CutProblem(5, {0: True, 2: False, 3: False, 4: False}, (Tensor(0, (1,), 4.0), Tensor(1, (2, 3, 4), 3.0)))
    assert solve(many)[1]  # one cast of 3 behind it beats one of 4 before it


def test_several_low_tensors_are_cast_once_each():
    problem = CutProblem(4, {0: False, 1: False, 3: True}, (Tensor(0, (2,), 3), Tensor(1, (2,), 3), Tensor(2, (3,), 4)))
    assert not solve(problem)[2]


def test_a_promoting_kernel_reads_low_for_nothing():
    free = Tensor(1, (2,), 5.0, frozenset({2}))
    problem = CutProblem(4, {0: True, 1: False, 3: True}, (Tensor(0, (2,), 1.0), free, Tensor(2, (3,), 1.0)))
    assert solve(problem)[2]
    charged = CutProblem(4, problem.pins, (Tensor(0, (2,), 1.0), Tensor(1, (2,), 5.0), Tensor(2, (3,), 1.0)))
    assert not solve(charged)[2]


@pytest.mark.parametrize("end", ["both", "producer", "user"])
def test_a_tensor_that_its_reader_widens_is_a_pair_of_one_direction(end):
    """It costs where the one that makes it is FP32 and the one that reads it low: for ``tradeoff``, a rounding."""
    pair = Tensor(0, (1,), 5.0, frozenset({1}))
    costs = {bits: cost_of(CutProblem(2, {}, (pair,)), [*bits]) for bits in itertools.product((True, False), repeat=2)}
    assert costs == {(True, False): 5.0, (True, True): 0, (False, True): 0, (False, False): 0}
    for price in (4.0, 6.0):  # of leaving what the pins ask for
        pins, unary = {
            "both": ({}, {0: -price, 1: 7.0}),
            "producer": ({0: True}, {1: price}),
            "user": ({1: False}, {0: -price}),
        }[end]
        apart = [True, False]
        assert (solve(CutProblem(2, pins, (pair,), unary=unary)) == apart) is (price > 5)


def test_ties_go_where_the_unary_cost_says():
    tensors = (Tensor(0, (1,), 2.0), Tensor(1, (2,), 2.0))
    assert not solve(CutProblem(3, {0: True, 2: False}, tensors, unary={1: 0.001}))[1]
    assert solve(CutProblem(3, {0: True, 2: False}, tensors, unary={1: -0.001}))[1]


@pytest.mark.parametrize("hops", [0, 1, 5])
def test_contradictory_pins_stay_finite(hops):
    """An FP32 pin closes, through free variables, into a low pin: the last closure gives way."""
    last = hops + 1
    closures = tuple((i, i + 1) for i in range(last))
    tensors = tuple(Tensor(i, (i + 1,), 1.0) for i in range(last))
    assert solve(CutProblem(last + 1, {0: True, last: False}, tensors, closures)) == [True] * last + [False]


def test_closures_in_a_circle_stay_finite():
    circle = ((0, 1), (1, 2), (2, 0), (2, 3))
    tensors = (Tensor(4, (0,), 1.0), Tensor(2, (3,), 5.0))
    assert solve(CutProblem(5, {3: False, 4: True}, tensors, circle)) == [False, False, False, False, True]


def test_nothing_to_solve():
    assert solve(CutProblem(0, {}, ())) == []
    assert solve(CutProblem(2, {}, ())) == [False, False]


def test_a_long_stream_with_conflicting_neighbours():
    """One part of thousands of variables that no local argument settles: networkx has to, and must not be quadratic."""
    rng = random.Random(0)
    count, previous = 2000, 2
    tensors = []
    for i in range(3, count - 1, 2):
        tensors.append(Tensor(previous, (i, i + 1), rng.choice((60.0, 600.0))))
        tensors.append(Tensor(i, (rng.randint(0, 1),), rng.choice((600.0, 1200.0))))
        tensors.append(Tensor(rng.randint(0, 1), (i + 1,), rng.choice((300.0, 600.0, 1000.0))))
        previous = i + 1
    problem = CutProblem(count, {0: True, 1: False}, tuple(tensors), unary={i: 0.5 for i in range(2, count)})
    found = solve(problem)
    for i in range(2, count):  # no single flip improves a minimum
        flipped = [full is not (at == i) for at, full in enumerate(found)]
        if i % 50 == 0:
            assert cost_of(problem, flipped) >= cost_of(problem, found)
    assert 0 < sum(found) < count
