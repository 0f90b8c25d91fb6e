"""One op of a run: its arguments and what it wrote, as places in memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from fxprec.passes.torch_internals import schema_of
from fxprec.tape.exact_ops import DRAWN, EXACT, draws
from fxprec.tape.memory import TensorPlace
from fxprec.tape.origin import OpOrigin
from fxprec.torch_internals import aten_to_copy, decomposition_of, tree_leaves, tree_unflatten

_COPIES: Final = (aten_to_copy, torch.ops.aten.clone.default)
#: Given a place, and whether the op writes there: the tensor to call the op with.
Read = Callable[[TensorPlace, bool], Tensor]


def _is_place(leaf: object) -> bool:
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
        return next(name for name, value in given if place in tree_leaves(value, is_leaf=_is_place))

    @property
    def draws(self) -> bool:
        """Flag of ops whose results are random numbers, which the reference takes from the run."""
        return draws(self.function, *tree_unflatten(list(self.leaves), self.spec))

    @property
    def keeps_values(self) -> bool:
        """Flag of casts and clones of the first argument: the reference has the same values there."""
        place = self.leaves[0] if self.fresh == (0,) and self.function in _COPIES else None
        made = self.outputs[0].dtype
        floats = isinstance(place, TensorPlace) and place.dtype.is_floating_point and made.is_floating_point
        complexes = isinstance(place, TensorPlace) and place.dtype.is_complex and made.is_complex
        return floats or complexes

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
            dtypes = [leaf.dtype if isinstance(leaf, TensorPlace) else None for leaf in self.leaves]
            leaves = [x if dtype is None else x.to(dtype) for x, dtype in zip(leaves, dtypes, strict=True)]
        else:
            leaves = [
                reference if isinstance(leaf, torch.dtype) and leaf.is_floating_point else leaf for leaf in leaves
            ]
            function = EXACT.get(self.name, function)
            if decomposed:
                function = decomposition_of(function) or function
            if drawn:
                function = functools.partial(DRAWN[self.name], drawn)
        args, kwargs = tree_unflatten(leaves, self.spec)
        results = tree_leaves(function(*args, **kwargs))
        return [*(results[number] for number in self.fresh), *(leaves[number] for number in self.written)]
