"""Our type promotion is torch's."""

import itertools

import pytest
import torch
from torch.fx import Graph, Node

from fxprec.passes.dtypes.promotion import NUMBERS, RESULT_KINDS, Operands, promote
from fxprec.passes.graph.annotations import NON_TENSOR, UNKNOWN

DTYPES = (torch.bool, torch.int32, torch.int64, torch.bfloat16, torch.float16, torch.float32, torch.float64,
          torch.complex64)  # fmt: skip
SHAPES = ((), (1,), (3,))


def tensor_node(dtype: torch.dtype, shape: tuple[int, ...]) -> Node:
    node = Graph().placeholder("x")
    node.meta.update(dtype=dtype, val=torch.empty(shape, dtype=dtype, device="meta"))
    return node


def operands(*nodes: Node, numbers: type | None = None, equal: bool = False) -> Operands:
    return Operands(tuple((node.meta["dtype"], node) for node in nodes), numbers, equal)


@pytest.mark.parametrize("shapes", list(itertools.product(SHAPES, SHAPES)), ids=str)
def test_two_tensors(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    for left, right in itertools.product(DTYPES, DTYPES):
        a, b = tensor_node(left, shapes[0]), tensor_node(right, shapes[1])
        assert promote(operands(a, b)) is torch.result_type(a.meta["val"], b.meta["val"]), (left, right)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("number", NUMBERS)
def test_a_tensor_and_a_number(shape: tuple[int, ...], number: type) -> None:
    for dtype in DTYPES:
        a = tensor_node(dtype, shape)
        assert promote(operands(a, numbers=number)) is torch.result_type(a.meta["val"], number(1)), dtype


def test_three_tensors_of_different_rank() -> None:
    for dtypes in itertools.product(DTYPES, repeat=3):
        a, b, c = (tensor_node(dtype, shape) for dtype, shape in zip(dtypes, SHAPES, strict=True))
        want = torch._prims_common.elementwise_dtypes(
            *(node.meta["val"] for node in (a, b, c)),
            type_promotion_kind=torch._prims_common.ELEMENTWISE_TYPE_PROMOTION_KIND.NO_OPMATH,
        )[1]
        assert promote(operands(a, b, c)) is want, dtypes


def test_what_nobody_knows() -> None:
    known, unknown = tensor_node(torch.float32, (3,)), Graph().placeholder("x")
    unknown.meta["dtype"] = UNKNOWN
    assert promote(operands(known, unknown)) is UNKNOWN
    assert promote(operands(known, unknown, equal=True)) is torch.float32
    assert promote(operands(unknown, equal=True)) is UNKNOWN
    assert promote(operands(tensor_node(torch.int64, (3,)), unknown, equal=True)) is UNKNOWN
    assert promote(operands(numbers=float)) is NON_TENSOR
    for kind in ("first", "float", "accumulate", "real", "complex", "float_real"):
        assert RESULT_KINDS[kind](operands(unknown)) is UNKNOWN


@pytest.mark.parametrize(
    ("kind", "dtypes"),
    [
        ("first", (torch.int64, torch.bfloat16, torch.complex64)),
        ("float", (torch.float32, torch.bfloat16, torch.complex64)),
        ("accumulate", (torch.int64, torch.bfloat16, torch.complex64)),
        ("real", (torch.int64, torch.bfloat16, torch.float32)),
        ("float_real", (torch.float32, torch.bfloat16, torch.float32)),
        ("complex", (torch.complex64, torch.bfloat16.to_complex(), torch.complex64)),  # bcomplex32 from torch 2.14 on
        ("float64", (torch.float64, torch.float64, torch.complex128)),
        ("default", (torch.float32,) * 3),
        ("bool", (torch.bool,) * 3),
        ("int64", (torch.int64,) * 3),
    ],
)
def test_kinds_of_results(kind: str, dtypes: tuple[torch.dtype, ...]) -> None:
    given = (torch.int64, torch.bfloat16, torch.complex64)
    assert tuple(RESULT_KINDS[kind](operands(tensor_node(dtype, (3,)))) for dtype in given) == dtypes
