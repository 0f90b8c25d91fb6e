"""Kernels at sizes and layouts where launches go wrong, on a pretended GPU; ``test_pretended_gpu`` runs this file.

Sizes of 1 to 17, addresses and strides that divide by nothing, no elements, grids beyond what a second dimension may
have, and more than 2**31 elements, of which nobody touches one. At each launch intervals of all of the kernel's
integers follow from its grid and arguments (``integer_intervals``): none may leave its type.

``PRETENDED_SIZES=some``: a part of it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import region_tools
from fxprec import kernels
from fxprec.kernels.optim import adam, norm, sgd
from fxprec.kernels.optim.tables import MultiTensorPlan
from integer_intervals import integers
from pretended_device import RECORD, BadLaunchError, Launchable

ALL: Final = os.environ.get("PRETENDED_SIZES") != "some"
LOW: Final = torch.bfloat16
MANY: Final = 2**31 + 16
#: Why a region may run as its ops here.
OP_BY_OP: Final = ("an empty tensor", "the reduced dimension is not the innermost in memory")


@dataclass(frozen=True)
class Call:
    """A kernel's call for a number of rows and columns.

    Attributes:
        run: of rows and columns: the function of the tensors.
        shapes: of rows and columns: each tensor's.
        dtypes: of the tensors; integers are 0.
        wanted: how many of them want gradients, the first ones; None: all that are floats.
    """

    run: Callable[[int, int], Callable[..., Any]]
    shapes: Callable[[int, int], Sequence[tuple[int, ...]]]
    dtypes: Sequence[torch.dtype]
    wanted: int | None = None


def _region(run: Callable[[int, int], Callable[..., Any]]) -> Callable[[int, int], Callable[..., Any]]:
    def make(rows: int, columns: int) -> Callable[..., Any]:
        region = region_tools.region_of(run(rows, columns))

        def call(*inputs: Tensor) -> Any:
            made = region(*inputs)
            if region.path != "triton" and not any(words in region.reason for words in OP_BY_OP):
                raise BadLaunchError(f"a region ran op by op: {region.reason}")
            return made

        return call

    return make


def _cross_entropy(rows: int, columns: int) -> Callable[..., Any]:
    return lambda logits, target: kernels.cross_entropy(logits, target)


def _matrix(count: int, vectors: int = 0) -> Callable[[int, int], Sequence[tuple[int, ...]]]:
    return lambda rows, columns: [*[(rows, columns)] * count, *[(columns,)] * vectors]


REGIONS: Final = {
    "flat": Call(_region(lambda r, c: lambda x, y: F.silu(x) * y), _matrix(2), (LOW, LOW)),
    "bias": Call(_region(lambda r, c: lambda x, b: F.gelu(x + b)), _matrix(1, 1), (LOW, torch.float32)),
    "layer norm": Call(
        _region(lambda r, c: lambda x, y, w, b: F.layer_norm(x + y.float(), (c,), w, b)),
        _matrix(2, 2), (torch.float32, LOW, torch.float32, torch.float32),
    ),
    "softmax": Call(_region(lambda r, c: lambda x, y: F.softmax(x.float() * y, -1).to(LOW)), _matrix(2), (LOW, LOW)),
    "sums": Call(_region(lambda r, c: lambda x: (torch.tanh(x.float()) * 2).sum(-1)), _matrix(1), (LOW,)),
}  # fmt: skip
BY_HAND: Final = {
    "cross_entropy": Call(_cross_entropy, lambda r, c: [(r, c), (r,)], (LOW, torch.int64)),
    "rope": Call(
        lambda r, c: kernels.rope, lambda r, c: [(1, 2, r, 2 * c), (r, 2 * c), (r, 2 * c)],
        (LOW, torch.float32, torch.float32), wanted=1,
    ),
    "batch_norm": Call(
        lambda r, c: lambda x, w, b: kernels.batch_norm(x, None, None, w, b, training=True, relu=True),
        lambda r, c: [(r, c, 2, 2), (c,), (c,)], (LOW, torch.float32, torch.float32),
    ),
    "group_norm": Call(
        lambda r, c: lambda x, w, b: kernels.group_norm(x, math.gcd(2 * c, 8), w, b, silu=True),
        lambda r, c: [(r, 2 * c, 3, 1), (2 * c,), (2 * c,)], (LOW, torch.float32, torch.float32),
    ),
}  # fmt: skip
#: How far apart elements lie, for a shape: the strides, and the elements before the first one.
LAYOUTS: Final[dict[str, Callable[[Sequence[int]], tuple[list[int], int]]]] = {
    "dense": lambda shape: (_dense(shape), 0),
    "odd address": lambda shape: (_dense(shape), 1),
    "odd rows": lambda shape: (_dense([*shape[:-1], shape[-1] + 3] if shape else []), 1),
    "every second": lambda shape: ([2 * stride for stride in _dense(shape)], 0),
    "channels last": lambda shape: (_channels_last(shape), 0),
    "channels last at an odd address": lambda shape: (_channels_last(shape), 1),
}


def _dense(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


def _channels_last(shape: Sequence[int]) -> list[int]:
    if len(shape) != 4:
        return _dense(shape)
    _, channels, height, width = shape
    return [channels * height * width, 1, width * channels, channels]


def tensor(shape: Sequence[int], dtype: torch.dtype, layout: str) -> Tensor:
    """Of memory that nobody has touched, where it is large."""
    strides, first = LAYOUTS[layout](shape)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) if 0 not in shape else 0
    return torch.empty(first + extent, dtype=dtype).as_strided(shape, strides, first)


class Untouched(TorchDispatchMode):
    """No op of torch goes through more than 2**26 elements: what is that large is for kernels alone."""

    FREE = (
        "empty", "new_empty", "as_strided", "view", "_unsafe_view", "detach", "alias", "slice", "transpose", "permute",
        "expand", "squeeze", "unsqueeze", "select", "split", "unbind", "t",
    )  # fmt: skip

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = pytree.tree_leaves((args, kwargs))
        space, _, name = func._schema.name.partition("::")
        large = any(isinstance(x, Tensor) and x.numel() > 2**26 for x in given)
        if large and space == "aten" and not name.startswith(self.FREE):
            raise BadLaunchError(f"{func} goes through a tensor that only kernels are for")
        return func(*args, **(kwargs or {}))


#: What is known of a kernel's numbers beside its arguments: an argument -> name of a variable -> its interval. What
#: optimizers read of their tables; how many elements of a row of logits lie before the first whole 16 bytes.
FACTS: Final = {"entries": {"tensor": (0, 2**20), "length": (0, 2**20)}, "logits": {"before": (0, 15)}}


@pytest.fixture(autouse=True)
def _integers_fit() -> Iterator[None]:
    """Each launch is looked into."""
    seen: set[Any] = set()

    def look(launched: Launchable, grid: Sequence[int], arguments: Sequence[Any]) -> None:
        numbers = {
            name: given
            for name, given in zip(launched.source.fn.arg_names, arguments, strict=False)
            if isinstance(given, int) and not isinstance(given, bool)
        }
        key = launched, tuple(grid), tuple(numbers.values())
        if key in seen:
            return
        seen.add(key)
        (path,) = [path for name, path in launched.files.items() if name.endswith(".ttir")]
        facts = next((FACTS[name] for name in launched.source.fn.arg_names if name in FACTS), {})
        found = integers(Path(path).read_text(), numbers, grid, facts)
        if found.wrong or found.unknown:
            text = "; ".join((*found.wrong, *found.unknown))
            RECORD.faults.append(text)
            raise BadLaunchError(f"{launched.made.name}, a grid of {tuple(grid)}, {numbers}: {text}")

    RECORD.look = look
    yield
    RECORD.look = None


def check(call: Call, rows: int, columns: int, layout: str) -> None:
    """Forward and backward, of cotangents that lie as the inputs do."""
    given = zip(call.shapes(rows, columns), call.dtypes, strict=True)
    inputs = [tensor(shape, dtype, layout) for shape, dtype in given]
    wanted = [x.requires_grad_() for x in inputs[: call.wanted] if x.is_floating_point()]
    output = call.run(rows, columns)(*inputs)
    torch.autograd.grad(output, wanted, tensor(output.shape, output.dtype, layout))


NAMED: Final = {f"region, {name}": call for name, call in REGIONS.items()} | BY_HAND
FEW: Final = ("region, bias", "region, layer norm", "cross_entropy", "batch_norm")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", range(1, 18) if ALL else (16, 17))
@pytest.mark.parametrize("name", NAMED if ALL else FEW)
def test_small(name: str, size: int, layout: str) -> None:
    check(NAMED[name], 3, size, layout)
    check(NAMED[name], size, 5, layout)


@pytest.mark.parametrize(("rows", "columns"), [(0, 5), (3, 0), (0, 0)])
@pytest.mark.parametrize("name", NAMED)
def test_empty(name: str, rows: int, columns: int) -> None:
    if name in ("cross_entropy", "group_norm", "rope") and not columns:
        pytest.skip("no classes, no groups and nothing to rotate are errors")
    check(NAMED[name], rows, columns, "dense")


@pytest.mark.parametrize("layout", ["dense", "channels last"])
@pytest.mark.parametrize(("rows", "columns"), [(70_000, 8), (2, 70_000)])
@pytest.mark.parametrize("name", NAMED if ALL else ("group_norm", "batch_norm"))
def test_beyond_a_second_dimension_of_a_grid(name: str, rows: int, columns: int, layout: str) -> None:
    if name in ("rope", "group_norm") and columns > 8:
        pytest.skip("heads of so many columns, so many channels")
    check(NAMED[name], rows, columns, layout)


#: Rows and columns: many of both, of rows alone, of columns alone.
LARGE: Final = [(2**21 + 1, 1024), (2**28 + 1, 8), (2**16 + 2, 2**15 + 8), (2, 2**30 + 8)]


def unlikely(name: str, rows: int, columns: int, layout: str) -> str:
    """Why nobody has such a tensor, or a kernel is not for it; "" where somebody may."""
    if name == "rope" and (columns > 512 or layout == "channels last"):
        return "heads of so many columns; columns apart in memory are torch's"
    if name in ("batch_norm", "group_norm") and (columns > 2**29 or rows > 2**27):
        return "so many channels, so many groups"
    if name == "region, layer norm" and columns > 2**29:
        return "column sums of two rows, which torch adds up"
    return ""


@pytest.mark.parametrize("layout", ["dense", "channels last"] if ALL else ["dense"])
@pytest.mark.parametrize(("rows", "columns"), LARGE if ALL else LARGE[:1])
@pytest.mark.parametrize("name", NAMED if ALL else FEW)
def test_more_than_2_31_elements(name: str, rows: int, columns: int, layout: str) -> None:
    if reason := unlikely(name, rows, columns, layout):
        pytest.skip(reason)
    with Untouched():
        check(NAMED[name], rows, columns, layout)


@pytest.mark.parametrize("layout", ["dense", "channels last"])
def test_a_group_norm_of_as_many_groups_as_a_grid_has_programs(layout: str) -> None:
    """One more is declined."""

    def norm_of(samples: int) -> None:
        x = tensor((samples, 2, 1, 1), LOW, layout).requires_grad_()
        y = kernels.group_norm(x, 2)
        torch.autograd.grad(y, x, tensor(y.shape, LOW, layout))

    with Untouched():
        norm_of(2**30 - 1)
        with pytest.raises(ValueError, match=r"at most 2147483647 groups of all samples.*fewer samples"):
            norm_of(2**30)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, LOW])
def test_optimizers(dtype: torch.dtype, first: int) -> None:
    sizes = [*range(18), 8191, 8193, 70_000, MANY, 2**33 + 5]

    def tensors(kind: torch.dtype) -> list[Tensor]:
        return [torch.empty(first + size, dtype=kind)[first:] for size in sizes]

    parameters, shadows, gradients = tensors(torch.float32), tensors(LOW), tensors(dtype)
    states, steps = (tensors(torch.float32), tensors(torch.float32)), [torch.zeros(()) for _ in sizes]
    plan = MultiTensorPlan(parameters, states=states, steps=steps, shadows=shadows)
    adam.launch(plan.bind(gradients), adam.AdamSettings(weight_decay=0.1), lr=0.1)
    norm.launch(plan.bind(gradients))
    sgd.launch(
        MultiTensorPlan(parameters, states=states[:1], shadows=shadows).bind(gradients), sgd.SgdSettings(0.9), lr=0.1
    )
