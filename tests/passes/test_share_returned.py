"""share_returned: a returned view of a returned value is a view of what is returned."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fxprec.passes.graph.text import format_graph
from fxprec.passes.runner import run_passes
from fxprec.passes.share_returned import are_apart, share_returned
from fxprec.passes.verify import verify

X, W, V = torch.randn(2, 4), torch.randn(4, 4), torch.randn(4, 4)


@pytest.fixture
def shared(tools):
    """Return the text of a traced function's graph behind the pass, "" where nothing changed; run the pass twice."""

    def share(function, **settings):
        ctx = tools.context(**settings)
        before, gm = (tools.rewritten(tools.traced(function, X, W, V), ctx, until="keep_returned") for _ in range(2))
        changed = share_returned(gm, ctx).changed
        assert changed is (format_graph(gm) != format_graph(before))
        assert not share_returned(gm, ctx).changed
        run_passes(gm, ctx, [verify])
        for ours, theirs in zip(gm(X, W, V), before(X, W, V), strict=True):
            assert ours.dtype is theirs.dtype and torch.equal(ours, theirs)
        return format_graph(gm) if changed else ""

    return share


def first_row(x, w, v):
    h = F.linear(x, w)
    return h, h[0]


def test_the_graph_after(shared):
    lines = shared(first_row).splitlines()
    assert lines[-4:] == [
        "%linear: bfloat16 = linear(%x_bf16, %w_bf16)",
        "%linear_f32: float32 = to(%linear, torch.float32)",
        "%getitem_1: float32 = getitem(%linear_f32, 0)",
        "return (%linear_f32, %getitem_1)",
    ]


def before_its_base(x, w, v):
    h = F.linear(x, w)
    return h[0], h


def of_a_view(x, w, v):
    h = F.linear(x, w)
    return h, h.view(-1)[3:], h.t()


def of_each_other(x, w, v):
    h = F.linear(x, w)
    most = h[:, 1:]
    return h, most, most[1:]


def of_each_other_the_other_way(x, w, v):
    h, most, part = of_each_other(x, w, v)
    return part, most, h


def of_each_other_between(x, w, v):
    h, most, part = of_each_other(x, w, v)
    return most, part, h


def read_as_well(x, w, v):
    h = F.linear(x, w)
    row = h[:, :]
    return h, row, F.linear(row, v)


def some_of_several(x, w, v):
    h = F.linear(x, w)
    halves = h.chunk(2, -1)
    return h, halves[0], halves[1]


SHARING = [
    first_row, before_its_base, of_a_view, of_each_other, of_each_other_the_other_way, of_each_other_between,
    read_as_well, some_of_several,
]  # fmt: skip


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("function", SHARING)
def test_it_shares_memory_and_costs_no_cast(tools, shared, function, gradients):
    text = shared(function, gradients=gradients)
    ctx = tools.context(gradients=gradients)
    before = format_graph(tools.rewritten(tools.traced(function, X, W, V), ctx, until="keep_returned"))
    assert text.count("= to(") < before.count("= to(")
    results = tools.rewritten(tools.traced(function, X, W, V), ctx)(X, W, V)
    views = results[:2] if function is read_as_well else results
    assert len({view.untyped_storage().data_ptr() for view in views}) == 1


def overlapping(x, w, v):
    h = F.linear(x, w)
    return h[0], h[:2]


def from_both_ends(x, w, v):
    h = F.linear(x, w)
    return h[:, 1:], h[:, :-1]


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("function", [overlapping, from_both_ends])
def test_views_with_elements_in_common_share_memory(tools, shared, function, gradients):
    text = shared(function, gradients=gradients)
    assert text.count("= to(") == 3  # of x, of w, of what they are views of
    results = tools.rewritten(tools.traced(function, X, W, V), tools.context(gradients=gradients))(X, W, V)
    assert len({view.untyped_storage().data_ptr() for view in results}) == 1


def alone(x, w, v):
    h = F.linear(x, w)
    return h[0], F.linear(h, v)


def apart(x, w, v):
    h = F.linear(x, w)
    return h[:1], h[1:]


def written(x, w, v):
    h = F.linear(x, w)
    row = h[0]
    h.add_(1)
    return h, row


def copied(x, w, v):
    h = F.linear(x, w)
    return h, h[0].clone(), torch.relu(h)


def columns(x, w, v):
    h = F.linear(x, w)
    return h[:, 0], h[:, 1:3], h[:, 3]


@pytest.mark.parametrize("function", [alone, apart, written, copied, columns])
def test_others_are_as_they_were(shared, function):
    assert shared(function) == ""


def test_nothing_happens_at_o0(shared):
    assert shared(first_row, level="O0") == ""


APART = {
    "rows": (lambda h: (h[1], h[2]), True),
    "from both ends": (lambda h: (h[1], h[-1]), False),
    "a column and the rest": (lambda h: (h[:, 0], h[:, 1:]), True),
    "the last and the rest": (lambda h: (h[:, -1], h[:, :-1]), True),
    "overlapping": (lambda h: (h[:2], h[1:]), False),
    "behind a new dimension": (lambda h: (h[None, 0], h[None, 1]), False),
    "selected": (lambda h: (h.select(0, 1), h.select(0, 0)), True),
    "selected from both ends": (lambda h: (h.select(0, 1), h.select(0, -1)), False),
    "selected otherwise": (lambda h: (h.select(0, 1), h.select(1, 0)), False),
    "by two names": (lambda h: (h.select(0, 1), h[0]), False),
}


@pytest.mark.parametrize(("function", "apart"), APART.values(), ids=APART)
def test_which_views_have_no_element_in_common(tools, function, apart):
    gm = tools.rewritten(tools.traced(function, X), tools.context(), until="propagate")
    one, other = gm.graph.output_node().all_input_nodes
    assert are_apart(one, other) is are_apart(other, one) is apart
