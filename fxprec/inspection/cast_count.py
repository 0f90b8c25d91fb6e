"""Count the dtype casts that really run, forward and backward, whoever asked for them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from fxprec.torch_internals import OpMode, aten_foreach_copy_, aten_to_copy, current_autograd_node, view_base

_VIEWS: Final = frozenset({"TBackward0", "TransposeBackward0", "PermuteBackward0", "ViewBackward0", "AliasBackward0"})


@dataclass
class CastCount:
    """Casts from one float dtype to another, executed since ``count_casts`` was entered.

    Attributes:
        weights: of parameters and views of them.
        weight_gradients: of gradients on their way to a parameter, in the backward.
        activations: of anything else, in a forward (recomputed ones too).
        gradients: of other gradients.
        refreshes: multi-tensor copies of weights to their shadows, each one call however many weights; not in
            ``total``.
    """

    weights: int = 0
    weight_gradients: int = 0
    activations: int = 0
    gradients: int = 0
    refreshes: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.weight_gradients + self.activations + self.gradients


@contextlib.contextmanager
def count_casts() -> Iterator[CastCount]:
    """Count within the block: ``with count_casts() as casts: model(x).sum().backward()``, then ``casts.total``.

    Counted is ``aten._to_copy`` between float dtypes; not what a kernel converts inside, and not a ``copy_`` to a
    tensor of another dtype, which is a write. Works for original, autocast and converted models alike.
    """
    mode = _Counting()
    with mode:
        yield mode.count


class _Counting(OpMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = CastCount()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is aten_to_copy:
            source, target = args[0], kwargs.get("dtype")
            if (
                target is not None
                and target != source.dtype
                and target.is_floating_point
                and source.is_floating_point()
            ):
                self._count_cast(source)
        elif func is aten_foreach_copy_:
            self.count.refreshes += any(a.dtype != b.dtype for a, b in zip(args[0], args[1], strict=True))
        return func(*args, **kwargs)

    def _count_cast(self, source: Tensor) -> None:
        node = current_autograd_node()
        # A checkpoint recomputes its forward while a node of the backward runs, but with gradients enabled.
        if node is not None and (node.name().startswith("ToCopyBackward") or not torch.is_grad_enabled()):
            if _leads_to_parameter(node):
                self.count.weight_gradients += 1
            else:
                self.count.gradients += 1
        # Autocast casts a transposed or sliced weight as often as the weight itself.
        elif isinstance(source, nn.Parameter) or isinstance(view_base(source), nn.Parameter):
            self.count.weights += 1
        else:
            self.count.activations += 1


def _leads_to_parameter(node: Any) -> bool:
    """Return whether this backward node gives the gradient of a parameter, or of a view of one."""
    while len(node.next_functions) == 1 and node.next_functions[0][0] is not None:
        node = node.next_functions[0][0]
        if node.name().endswith("AccumulateGrad"):
            return isinstance(node.variable, nn.Parameter)
        if node.name() not in _VIEWS:
            return False
    return False
