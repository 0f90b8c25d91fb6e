"""Look at the outputs of a watched call as a backward comes to them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from fxprec.capture.pytrees import leaves_of


class SeenCall:
    """Watched call of the model.

    Args:
        number: how many there were before.

    Attributes:
        largest: output -> its largest element, on its device; of those that a gradient came to.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.largest: dict[int, Tensor] = {}
        self._handles: list[RemovableHandle] = []

    def look(self, output: Any, came: Callable[[Self], object]) -> None:
        """Look at the outputs; ``came`` is told when the backward comes to one of them."""
        for number, leaf in enumerate(floats(output)):
            # float8 has no reduction on most devices, and a sparse output no dense largest element.
            if leaf.grad_fn is not None and leaf.numel() and leaf.layout is torch.strided and leaf.itemsize > 1:
                with torch.no_grad():
                    largest = (torch.view_as_real(leaf) if leaf.is_complex() else leaf).amax()
                note = functools.partial(self._note, number, largest, came)
                self._handles.append(leaf.register_hook(note))

    def _note(self, number: int, largest: Tensor, came: Callable[[Self], object], gradient: Tensor) -> None:
        self.largest[number] = largest
        self._keep(number, gradient)
        came(self)

    def _keep(self, number: int, gradient: Tensor) -> None:
        """Keep a gradient that has come to an output."""

    def let_go(self) -> None:
        """Remove the hooks from the outputs."""
        for handle in self._handles:
            handle.remove()


def floats(output: Any) -> Sequence[Tensor]:
    """Return the tensors of an output that a gradient may come to."""
    leaves = (leaf for leaf in leaves_of(output) if isinstance(leaf, Tensor))
    return [leaf for leaf in leaves if leaf.is_floating_point() or leaf.is_complex()]
