"""Attention on a CPU by matrix products, some heads at a time, with its softmax in FP32.

torch's fused kernel for CPUs multiplies in its backward at a quarter of the rate of a plain product. Here products are
of blocks that stay in the cache::

    S = scale * q k^T + mask                  FP32: of a rounded S or dP errors are 4 to 14 times torch's kernel's
    P = softmax(S)                            FP32, then rounded
    out = P v                                 low, FP32 sums
    dP = dout v^T                             FP32
    dS = P * (dP - rowsum(P * dP))            FP32, then rounded
    dq = scale * dS k,  dk = scale * dS^T q,  dv = P^T dout

Under a causal mask rows come in up to four blocks, each with the keys that it sees, so that most of what is masked is
not computed. A backward gets P in one of two ways:

    attention_by_products    the forward keeps it, low: its memory grows with T * S
    recomputed_attention     the forward is torch's kernel: P is made again. Not as exp(S - norms), of which rows do not
                             add up to 1 where scores are large: dS of such a row is wrong by as much times dP

Which takes less time is the processor's: on a Xeon with AMX torch's forward gains more than a second S costs. Both are
for rows of some hundreds of keys (``is_short``): of more torch's kernel is the faster one.

With dropout nothing is gained: the draws take most of the time, and torch computes the rest in FP32.

Source: Dao et al., "FlashAttention", NeurIPS 2022 (the derivatives).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fxprec.kernels.cpu.attention import (
    additive,
    elements_side_by_side,
    empty_like,
    gradients_like,
    op_of,
    reference,
    scale_of,
    wants_gradients,
)
from fxprec.kernels.cpu.processor import bfloat16_units
from fxprec.kernels.launch.kernel_op import KernelOp
from fxprec.kernels.torch_internals import softmax_backward

#: Bytes of the FP32 scores that are made at once: with what is made of them they stay in a cache of some megabytes.
_AT_ONCE: Final = 1 << 22
#: P may take so many times the memory of query, key, value and output, which are kept for the backward in any case.
_KEPT: Final = 2

#: Rows of a causal block, at least, and blocks, at most: thinner products take longer than what they leave out. On a
#: Xeon with AMX blocks of 128 rows took 0.8 to 0.93 of the time that those of 64 took.
_ROWS: Final = 128 if bfloat16_units() == "amx" else 64
_BLOCKS: Final = 4


class _Chunk(NamedTuple):
    """Batch elements, heads of key and value, and the heads of the query that read these."""

    batch: slice
    heads: slice
    query_heads: slice


class _Block(NamedTuple):
    """Rows of the query, and how many keys they see."""

    rows: slice
    keys: int


@dataclass(frozen=True, slots=True)
class _Plan:
    """Plan of a call: how it is cut up.

    Attributes:
        group: heads of the query for each head of key and value.
        sizes: for each block of each chunk, in order, the elements of its scores.
    """

    group: int
    chunks: tuple[_Chunk, ...]
    blocks: tuple[_Block, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, query: Tensor, key: Tensor, causal: bool) -> _Plan:
        """Cut up a call with query [N, H, T, E] and key [N, G, S, E]."""
        return cls._of(*query.shape[:3], *key.shape[1:3], causal, _AT_ONCE, _ROWS)

    @classmethod
    @functools.lru_cache(maxsize=64)  # layers are alike, and each call asks three times
    def _of(
        cls, batch: int, heads: int, rows: int, groups: int, keys: int, causal: bool, at_once: int, least: int
    ) -> _Plan:
        # Under a causal mask the first rows see few keys: rows are cut into blocks, each with the keys that it sees.
        group, count = heads // groups, max(1, min(_BLOCKS, rows // least)) if causal else 1
        edges = [rows * number // count for number in range(count + 1)]
        blocks = tuple(_Block(slice(first, end), min(end, keys) if causal else keys) for first, end in pairwise(edges))
        areas = [group * (block.rows.stop - block.rows.start) * block.keys for block in blocks]
        # As many heads at a time as have their FP32 scores in a cache together: all of some batch elements, or of one
        # element a number that divides them, so that all chunks are alike.
        fit = max(1, at_once // (4 * max(areas)))
        heads_each = next(size for size in range(min(groups, fit), 0, -1) if groups % size == 0)
        batch_each = max(1, min(batch, fit // groups))
        chunks = tuple(
            _Chunk(
                slice(b, min(b + batch_each, batch)),
                slice(g, g + heads_each),
                slice(g * group, (g + heads_each) * group),
            )
            for b in range(0, batch, batch_each)
            for g in range(0, groups, heads_each)
        )
        sizes = tuple((c.batch.stop - c.batch.start) * heads_each * area for c in chunks for area in areas)
        return cls(group, chunks, blocks, sizes)

    def pieces(self, p: Tensor) -> Iterator[Tensor]:
        """Yield, of [N, H, T, S], what the block of each chunk has, in order."""
        for chunk in self.chunks:
            for block in self.blocks:
                yield p[chunk.batch, chunk.query_heads, block.rows, : block.keys]

    def queries(self, x: Tensor, chunk: _Chunk, dtype: torch.dtype) -> Tensor:
        """Return a chunk of [N, H, T, width] as [heads of the chunk, group, T, width], dense in memory."""
        part = _one_after_the_other(x[chunk.batch, chunk.query_heads], dtype)
        return part.view(-1, self.group, *part.shape[2:])


def _keys(x: Tensor, chunk: _Chunk, dtype: torch.dtype) -> Tensor:
    """Return a chunk of [N, G, S, width], as [heads of the chunk, S, width], dense in memory."""
    part = _one_after_the_other(x[chunk.batch, chunk.heads], dtype)
    return part.view(-1, *part.shape[2:])


def _one_after_the_other(x: Tensor, dtype: torch.dtype) -> Tensor:
    # ``to`` alone would return x as it lies where it has that dtype.
    return x.to(dtype, memory_format=torch.contiguous_format).contiguous()


def _rows(queries: Tensor, block: _Block) -> Tensor:
    """Return a block of [heads, group, T, width], as [heads, group * rows, width]."""
    return queries[:, :, block.rows].flatten(1, 2)


class _Softmax:
    """Scores, probabilities and what follows of them, one block after another, in memory that is used again."""

    def __init__(self, plan: _Plan, mask: Tensor | None, causal: bool, scale: float, wide: torch.dtype) -> None:
        self._mask, self._causal, self._scale, self._wide = mask, causal, scale, wide
        self._memory = torch.empty(2, max(plan.sizes), dtype=wide)
        self._zero = torch.zeros((), dtype=wide)

    def product(self, left: Tensor, right: Tensor) -> Tensor:
        """Return ``scale * left right^T`` of wide tensors: [heads, rows, columns]."""
        out = self._take(0, (len(left), left.shape[1], right.shape[1]))
        return torch.baddbmm(self._zero, left, right.transpose(1, 2), beta=0, alpha=self._scale, out=out)

    def probabilities(self, query: Tensor, keys: Tensor, chunk: _Chunk, block: _Block) -> Tensor:
        """Return P of the rows of a query and the keys that they see, both wide."""
        scores = self.product(query, keys)
        rows = block.rows.stop - block.rows.start
        # Keys before the block's first row are seen by all of its rows: only the triangle behind them is masked.
        if self._causal:
            first = block.rows.start
            above = torch.full((rows, block.keys - first), -math.inf, dtype=self._wide).triu_(1)
            scores.view(-1, rows, block.keys)[:, :, first:] += above
        if self._mask is not None:
            part = self._mask[chunk.batch, chunk.query_heads, block.rows, : block.keys]
            scores.view(part.shape).add_(part)
        return torch.softmax(scores, -1, out=self._take(1, scores.shape))

    def widened(self, probabilities: Tensor) -> Tensor:
        """Return low P, widened."""
        return self._take(1, probabilities.shape).copy_(probabilities)

    def derivative(self, gradients: Tensor, probabilities: Tensor) -> Tensor:
        """Return dS of dP, which is overwritten, and P, both wide."""
        return softmax_backward(gradients, probabilities, -1, self._wide, grad_input=gradients)

    def _take(self, which: int, shape: tuple[int, ...]) -> Tensor:
        return self._memory[which, : math.prod(shape)].view(shape)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float, kept: bool
) -> tuple[Tensor, Tensor]:
    """Return the output, and P of all blocks, one after the other, if it is kept."""
    wide, plan = torch.promote_types(query.dtype, torch.float32), _Plan.of(query, key, causal)
    out, probabilities = empty_like(query), query.new_empty(sum(plan.sizes) if kept else 0)
    pieces = iter(probabilities.split(plan.sizes)) if kept else None
    softmax = _Softmax(plan, mask, causal, scale, wide)
    for chunk in plan.chunks:
        rows = plan.queries(query, chunk, wide)
        keys, values = _keys(key, chunk, wide), _keys(value, chunk, query.dtype)
        for block in plan.blocks:
            p = softmax.probabilities(_rows(rows, block), keys[:, : block.keys], chunk, block)
            low = p.to(query.dtype) if pieces is None else next(pieces).view(p.shape).copy_(p)
            _put(out, torch.bmm(low, values[:, : block.keys]), chunk, block)
    return out, probabilities


def _put(out: Tensor, part: Tensor, chunk: _Chunk, block: _Block) -> None:
    place = out[chunk.batch, chunk.query_heads, block.rows]
    place.copy_(part.view(place.shape))


def _fake(query: Tensor, key: Tensor, value: Tensor, mask: Any, causal: bool, scale: Any, kept: bool) -> Any:
    return empty_like(query), query.new_empty(sum(_Plan.of(query, key, causal).sizes) if kept else 0)


def _backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, probabilities: Tensor | None,
    causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of query, key and value, from P as the forward kept it, or computed once more for None."""
    wide, plan = torch.promote_types(query.dtype, torch.float32), _Plan.of(query, key, causal)
    softmax, gradients = _Softmax(plan, mask, causal, scale, wide), gradients_like(grad, query, key, value)
    kept = None if probabilities is None else iter(probabilities.split(plan.sizes))
    for chunk in plan.chunks:
        part = _Backward(plan, chunk, grad, query, key, value, softmax)
        pieces = [None if kept is None else next(kept).view(len(part.keys), -1, block.keys) for block in plan.blocks]
        rows, keys = (part.rows.to(wide), part.keys.to(wide)) if kept is None else (part.rows, part.keys)
        for block, low in reversed([*zip(plan.blocks, pieces, strict=True)]):
            if low is None:
                p = softmax.probabilities(_rows(rows, block), keys[:, : block.keys], chunk, block)
                low = p.to(query.dtype)
            else:
                p = softmax.widened(low)
            part.add(block, low, p, gradients[0])
        part.put(gradients[1:])
    return gradients


def _backward_again(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return _backward(grad, query, key, value, mask, None, causal, scale)


class _Backward:
    """Backward of one chunk, whose blocks come from the last on: it sees the most keys; the others are added to it."""

    def __init__(
        self, plan: _Plan, chunk: _Chunk, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, softmax: _Softmax
    ) -> None:
        low, self._wide = query.dtype, torch.promote_types(query.dtype, torch.float32)
        self._chunk, self._last, self._softmax = chunk, plan.blocks[-1], softmax
        self.rows, self.keys = plan.queries(query, chunk, low), _keys(key, chunk, low)
        self._above, self._values = plan.queries(grad, chunk, low), _keys(value, chunk, self._wide)
        self._wide_above = self._above.to(self._wide)
        # The last block comes first and sees all keys, unless there are more keys than rows: those get no gradient.
        new = torch.empty_like if self._last.keys == key.shape[2] else torch.zeros_like
        self._sums = new(self.keys), new(self._values, dtype=low)

    def add(self, block: _Block, low: Tensor, wide: Tensor, of_query: Tensor) -> None:
        """Add a block with its P, low and wide; the gradient of its rows is put into that of the query."""
        seen, added = block.keys, int(block is not self._last)
        of_probabilities = self._softmax.product(_rows(self._wide_above, block), self._values[:, :seen])
        of_scores = self._softmax.derivative(of_probabilities, wide).to(low.dtype)
        _put(of_query, torch.bmm(of_scores, self.keys[:, :seen]), self._chunk, block)
        self._sums[0][:, :seen].baddbmm_(of_scores.transpose(1, 2), _rows(self.rows, block), beta=added)
        self._sums[1][:, :seen].baddbmm_(low.transpose(1, 2), _rows(self._above, block), beta=added)

    def put(self, gradients: tuple[Tensor, ...]) -> None:
        """Write the sums into the gradients of key and value."""
        for gradient, total in zip(gradients, self._sums, strict=True):
            place = gradient[self._chunk.batch, self._chunk.heads]
            place.copy_(total.view(place.shape))


def _gradients(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor, ...]:
    causal, scale, _ = ctx.settings
    return _backward_op(grad, *ctx.saved_tensors, causal, scale)


def _forward_of_torch(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> Tensor:
    # Where elements of a row lie apart torch takes plain ops.
    query, key, value = map(elements_side_by_side, (query, key, value))
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, mask, 0.0, causal, scale=scale, enable_gqa=grouped)


_backward_op = KernelOp("attention_backward", _backward, gradients_like)
_op = KernelOp("attention", _forward, _fake, backward=_gradients, reference=reference)
_recomputed_op = op_of("recomputed_attention", _forward_of_torch, _backward_again)


def attention_by_products(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, causal: bool = False,
    scale: float | None = None,
) -> Tensor:  # fmt: skip
    """Return ``torch.nn.functional.scaled_dot_product_attention`` of what ``attention.serves`` says yes to.

    Args:
        query: [N, H, T, E], bfloat16.
        key, value: [N, G, S, E]: each head serves H / G heads of the query.
        mask: as torch's ``attn_mask``: bool, or floats that are added; broadcast to [N, H, T, S].
        causal: row t sees the keys up to t.
        scale: of the scores; None: 1 / sqrt(E).

    Returns:
        [N, H, T, E], bfloat16, in memory [N, T, H, E].
    """
    kept = wants_gradients(query, key, value)
    return _op(query, key, value, additive(mask, query, key), causal, scale_of(query, scale), kept)[0]


def recomputed_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, causal: bool = False,
    scale: float | None = None,
) -> Tensor:  # fmt: skip
    """Return the same: torch's kernel forward, products backward, for which P is made again."""
    return _recomputed_op(query, key, value, additive(mask, query, key), causal, scale_of(query, scale))


def is_short(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> bool:
    """Return whether P, if a backward may follow, takes no more memory than it may.

    Where it would, torch's kernel is as fast as products: of 2 x 12 heads of 512 rows, 64 wide, under a causal mask, it
    takes 1.09 times the time of ``recomputed_attention``, and of 8 heads of 1024 rows 0.77 times (two cores of a Xeon
    with AMX, ``python -m benchmarks attention``).
    """
    if not wants_gradients(query, key, value):
        return True
    beside = 2 * query.numel() + key.numel() + value.numel()
    return sum(_Plan.of(query, key, causal).sizes) <= _KEPT * beside


def in_blocks(p: Tensor, key: Tensor, causal: bool) -> Tensor:
    """Return P, [N, H, T, S], in the form that the forward keeps: of all blocks, one after the other."""
    return torch.cat([piece.flatten() for piece in _Plan.of(p, key, causal).pieces(p)])


def out_of_blocks(kept: Tensor, query: Tensor, key: Tensor, causal: bool) -> Tensor:
    """Return P as [N, H, T, S], of the form that ``in_blocks`` gives."""
    plan, p = _Plan.of(query, key, causal), kept.new_zeros(*query.shape[:3], key.shape[2])
    for place, piece in zip(plan.pieces(p), kept.split(plan.sizes), strict=True):
        place.copy_(piece.view(place.shape))
    return p
