"""Layouts: which dimensions are rows and columns, and where each tensor lies in them."""

from __future__ import annotations

import itertools

import pytest
import torch

from fxprec.kernels.launch.operands import is_dense
from fxprec.kernels.rows.program.layout import Layout, dense_strides, find_layout, merged, place
from fxprec.kernels.rows.program.values import Declined


def of(*tensors: torch.Tensor, reduced: int = 0) -> Layout:
    shape = torch.broadcast_shapes(*[x.shape for x in tensors])
    return find_layout(shape, [(tuple(x.shape), x.stride()) for x in tensors], reduced)


def test_the_examples_of_the_docstring() -> None:
    found = of(torch.empty(8, 512, 768), torch.empty(768))
    assert (found.rows, found.columns, found.flat) == (4096, 768, False)
    last = torch.empty(8, 64, 32, 32).to(memory_format=torch.channels_last)
    found = of(last, torch.empty(64, 1, 1))
    assert (found.rows, found.columns, found.column_dims) == (8192, 64, (1,))
    x, mask = torch.empty(8, 12, 5, 512), torch.empty(8, 1, 1, 512)
    found = of(x, mask, reduced=1)
    sizes, places = merged(found, [place(found, t.shape, t.stride()) for t in (x, mask)])
    assert sizes == (8, 60) and [rows for rows, _ in places] == [[12 * 5 * 512, 512], [512, 0]]


def test_equal_dense_tensors_are_flat() -> None:
    x = torch.empty(3, 4, 5)
    assert of(x, x).flat and of(x, x).columns == 60 and of(x, x).rows == 1
    assert not of(x, x.transpose(0, 1).contiguous().transpose(0, 1)).flat
    assert not of(x, torch.empty(5)).flat and not of(x[..., :4]).flat
    for shape in ((), (1,), (1, 1)):
        assert of(torch.empty(shape)).flat and of(torch.empty(shape)).columns == 1


def test_memory_order_is_that_of_a_tensor_that_is_not_expanded() -> None:
    x, row = torch.empty(5, 6), torch.empty(6)
    assert of(row.expand(5, 6), x).column_dims == (1,)
    assert of(x.t(), x.t()).flat and of(x.t(), torch.empty(6, 1)).column_dims == (0,)


def test_reduced_columns_must_be_innermost() -> None:
    with pytest.raises(Declined, match="not the innermost in memory"):
        of(torch.empty(5, 6).t(), reduced=1)
    assert of(torch.empty(5, 6, 1).transpose(0, 1), reduced=1).columns == 1


def test_columns_that_are_not_evenly_spaced_are_declined() -> None:
    found = of(torch.empty(2, 3, 6), reduced=2)
    with pytest.raises(Declined, match="not evenly spaced"):
        place(found, (2, 3, 6), (36, 12, 1))
    with pytest.raises(Declined, match="not evenly spaced"):
        place(found, (1, 6), (6, 1))
    assert place(found, (2, 3, 6), (40, 12, 2)) == ([40], 2) and place(found, (2, 1, 1), (1, 1, 1)) == ([1], 0)


def test_every_element_is_found_where_it_lies() -> None:
    tensors = [torch.randn(2, 3, 4, 5), torch.randn(3, 1, 5), torch.randn(2, 1, 4, 1), torch.randn(5), torch.randn(())]
    for order in itertools.permutations(range(3)):
        tensors[0] = torch.randn(2, 3, 4, 5).permute(*order, 3).contiguous().permute(*torch.tensor(order).argsort(), 3)
        layout = of(*tensors, reduced=1)
        sizes, places = merged(layout, [place(layout, x.shape, x.stride()) for x in tensors])
        for x, (rows, column) in zip(tensors, places, strict=True):
            walked = x.as_strided((*sizes, layout.columns), (*rows, column))
            whole = x.expand(layout.shape)
            assert torch.equal(layout.torch_shaped(walked.reshape(layout.rows, layout.columns)), whole)
            seen = layout.two_dimensional(x).expand(layout.rows, layout.columns)
            assert torch.equal(layout.torch_shaped(seen), whole)


def test_two_dimensions_are_no_more_than_a_tensor_has() -> None:
    layout = of(torch.empty(2, 3, 5), reduced=1)
    shapes = [tuple(layout.two_dimensional(torch.empty(s)).shape) for s in ((2, 3, 5), (5,), (3, 1), (), (1, 1, 1))]
    assert shapes == [(6, 5), (1, 5), (6, 1), (1, 1), (1, 1)]
    assert layout.torch_shaped(torch.empty(6, 1), columns=False).shape == (2, 3, 1)


def test_dense_strides() -> None:
    last = torch.empty(2, 8, 3, 5).to(memory_format=torch.channels_last)
    layout = of(last, torch.empty(8, 1, 1))
    assert dense_strides(layout, (2, 8, 3, 5)) == last.stride() and is_dense(last.shape, last.stride())
    assert dense_strides(layout, (8, 1, 1)) == (1, 8, 8) or is_dense((8, 1, 1), dense_strides(layout, (8, 1, 1)))
    assert not is_dense((4, 6), (12, 2)) and not is_dense((4, 6), (0, 1)) and is_dense((4, 1), (1, 99))
