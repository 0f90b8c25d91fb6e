"""What a cast and FP32 cost where the cut counts bytes (``lower="always"``); ``OpCosts`` says it in seconds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from torch.fx import Node

from fxprec.passes.graph.annotations import notes

_CAST_BYTES: Final = 6  # read four and write two, or the reverse
_CAST_CALL: Final = 16384  # bytes that move in the time one more call takes: of equal bytes, fewer casts are cheaper
_FP32_TRAFFIC: Final = 1 / 64  # of a cast's bytes: it breaks ties
_FUSED_TRAFFIC: Final = 2 / 3  # where kernels cast for nothing, what FP32 costs is the bytes it is wider: two each way


class ByteCosts:
    """Bytes that move.

    Args:
        values: what may be cast; where sizes are unknown, a value counts as the average of those.
        absorbs: see ``Variables``.
    """

    def __init__(self, values: Iterable[Node], absorbs: bool) -> None:
        known = [count for node in values if (count := elements(node)) is not None]
        self._typical = sum(known) / len(known) if known else 1.0
        self._traffic = _FUSED_TRAFFIC if absorbs else _FP32_TRAFFIC

    def cast(self, node: Node) -> float:
        """Return the cost of casting the node's value to the other dtype."""
        moved = self._moved(node)
        return _CAST_CALL + moved if moved else 0.0

    def traffic(self, node: Node) -> float:
        """Return how much more it costs when the node, no LOW op, writes FP32 in the place of the low dtype."""
        return self._moved(node) * self._traffic

    def _moved(self, node: Node) -> float:
        """Parameters move nothing: their shadow is there already."""
        if node.op == "get_attr" and notes(node).kind == "parameter":
            return 0.0
        count = elements(node)
        return _CAST_BYTES * (self._typical if count is None else count)


def elements(node: Node) -> int | None:
    """Elements of a node's value, of all its parts where it is a tuple; None where nobody knows."""
    count = notes(node).numel
    if isinstance(count, tuple):
        return sum(each for each in count if isinstance(each, int))
    return count if isinstance(count, int) else None
