"""Describe one op of a run, its arguments and results as places in memory, and run it in the reference's dtype.

A user may allow TF32 or bfloat16 for FP32 products; a reference does not (``full_fp32``).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import torch
from torch import Tensor
from torch.fx import Node

from fxprec.passes.torch_internals import schema_of
from fxprec.tape.exact_ops import DRAWN, EXACT, draws
from fxprec.tape.memory import TensorPlace
from fxprec.torch_internals import aten_to_copy, decomposition_of, tree_leaves, tree_unflatten

_cudnn: Any = torch.backends.cudnn
_mkldnn: Any = torch.backends.mkldnn
#: What has a precision of its own for FP32, https://docs.pytorch.org/docs/stable/notes/cuda.html#tf32-on-ampere
_BACKENDS: Final[tuple[Any, ...]] = (
    torch.backends.cuda.matmul, _cudnn.conv, _cudnn.rnn, _mkldnn.matmul, _mkldnn.conv, _mkldnn.rnn,
)  # fmt: skip
#: "none": a backend's own, which is that of FP32.
_FULL: Final = ("ieee", "none")
_COPIES: Final = (aten_to_copy, torch.ops.aten.clone.default)
#: Given a place, and whether the op writes there: the tensor to call the op with.
Read = Callable[[TensorPlace, bool], Tensor]


@dataclass(frozen=True, slots=True)
class OpOrigin:
    """Owner of an op. Two of them are equal where they mean the same place of the model.

    Attributes:
        kind: "node" of a graph; "weight": the making of a low copy of one; "outside" of the graphs: in Python code
            between them, the loss among it.
        name: of the node ("body.relu" in the body of a higher-order op); the path of the weight; the op.
        graph: the position of the graph, -1 outside of them.
        backward: it computes gradients of what that place computes.
        source: ``model.py:12``, where it is known.
        node: of the graph.
    """

    kind: Literal["node", "weight", "outside"]
    name: str
    graph: int = -1
    backward: bool = False
    source: str = ""
    node: Node | None = field(default=None, compare=False, repr=False)


@contextlib.contextmanager
def full_fp32() -> Iterator[None]:
    """Compute matrix products, convolutions and RNNs of FP32 tensors in FP32 while the context lasts, on all devices.

    Set is the newer of torch's two ways, which kernels ask; by the older one a user may ask for TF32 as well.
    """
    changed = [(each, each.fp32_precision) for each in _BACKENDS if each.fp32_precision not in _FULL]
    for backend, _ in changed:
        backend.fp32_precision = "ieee"
    try:
        yield
    finally:
        for backend, precision in changed:
            backend.fp32_precision = precision


def is_place(leaf: object) -> bool:
    """Return whether a leaf of arguments stands for a tensor."""
    return isinstance(leaf, TensorPlace)


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """Call of a torch op.

    Attributes:
        function: the overload.
        leaves: of its arguments, places where they are tensors; ``spec`` puts them together.
        fresh: which leaves of its results are new memory.
        written: which of ``leaves`` it writes to.
        outputs: the places of the former, then of the latter.
        before: of each written place what stood there before: in the run, and in the reference.
        origin: whom it belongs to.
        why_inexact: why the reference runs it in the dtypes of the run; "" where it has its own.
        inputs: of the places that it reads, those that were handed to its node -> at which position.
    """

    function: Any
    leaves: tuple[Any, ...]
    spec: Any
    fresh: tuple[int, ...]
    written: tuple[int, ...]
    outputs: tuple[TensorPlace, ...]
    before: tuple[tuple[Tensor, Tensor], ...]
    origin: OpOrigin
    why_inexact: str = ""
    inputs: Mapping[TensorPlace, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the op, ``aten::mm``."""
        return self.function.name().partition(".")[0]

    def argument(self, place: TensorPlace) -> str:
        """Return the name of the first argument that is, or holds, the tensor at a place."""
        args, kwargs = tree_unflatten(list(self.leaves), self.spec)
        given = [*zip([each.name for each in schema_of(self.function).arguments], args, strict=False), *kwargs.items()]
        return next(name for name, value in given if place in tree_leaves(value, is_leaf=is_place))

    @property
    def draws(self) -> bool:
        """Flag of ops whose results are random numbers, which the reference takes from the run."""
        return draws(self.function, *tree_unflatten(list(self.leaves), self.spec))

    @property
    def keeps_values(self) -> bool:
        """Flag of casts and clones of the first argument: the reference has the same values there."""
        place = self.leaves[0] if self.fresh == (0,) and self.function in _COPIES else None
        if not isinstance(place, TensorPlace) or not (place.is_float and self.outputs[0].is_float):
            return False
        return place.dtype.is_complex == self.outputs[0].dtype.is_complex

    def drawn(self, low: Callable[[TensorPlace], Tensor]) -> tuple[Tensor, ...]:
        """Return copies of the run's results if the op computes on numbers that it draws; ``low``: of the memory."""
        return tuple(low(place).clone() for place in self.outputs) if self.name in DRAWN else ()

    def run(
        self, read: Read, reference: torch.dtype, drawn: Sequence[Tensor] = (), decomposed: bool = False
    ) -> list[Any]:
        """Run the op on other tensors, and return what it gives at ``outputs``.

        Args:
            read: gives the arguments; what the op writes to must be its own.
            reference: the dtype that every float dtype among the arguments becomes. An inexact op runs as it ran.
            drawn: as ``drawn`` gives it.
            decomposed: in terms of other ops, where torch has such a form.
        """
        leaves = [
            read(leaf, number in self.written) if isinstance(leaf, TensorPlace) else leaf
            for number, leaf in enumerate(self.leaves)
        ]
        function: Any = self.function
        if self.why_inexact:
            # Without a kernel for the reference's dtype the op runs as it ran, on the reference's values rounded.
            dtypes = [leaf.dtype if isinstance(leaf, TensorPlace) else None for leaf in self.leaves]
            leaves = [x if dtype is None else x.to(dtype) for x, dtype in zip(leaves, dtypes, strict=True)]
        else:
            leaves = [reference if isinstance(x, torch.dtype) and x.is_floating_point else x for x in leaves]
            function = EXACT.get(self.name, function)
            if decomposed:
                function = decomposition_of(function) or function
            if drawn:
                function = functools.partial(DRAWN[self.name], drawn)
        args, kwargs = tree_unflatten(leaves, self.spec)
        results = tree_leaves(function(*args, **kwargs))
        return [*(results[number] for number in self.fresh), *(leaves[number] for number in self.written)]
