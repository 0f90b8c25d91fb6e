"""Attention on a CPU by matrix products, some heads at a time, with its softmax in FP32.

torch's fused kernel for CPUs multiplies in its backward at a quarter of the rate of a plain product. Here both ways are
products of blocks that stay in the cache::

    S = scale * q k^T + mask                  FP32: of a rounded S or dP errors are 4 to 14 times torch's kernel's
    P = softmax(S)                            FP32, then rounded
    out = P v                                 low, FP32 sums
    dP = dout v^T                             FP32
    dS = P * (dP - rowsum(P * dP))            FP32, then rounded
    dq = scale * dS k,  dk = scale * dS^T q,  dv = P^T dout

Under a causal mask rows come in up to four blocks, each with the keys that it sees, so that most of what is masked is
not computed. The backward reads the P of the forward, whose memory grows with T * S: up to a limit (``keeps_little``),
beyond which torch's kernel serves. Made again in the backward, P costs what the products gain.

With dropout nothing is gained: the draws take most of the time, and torch computes the rest in FP32.

Source: Dao et al., "FlashAttention", NeurIPS 2022 (the derivatives); PyTorch, ``scaled_dot_product_attention`` (the
semantics).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fxprec.kernels.cpu.processor import bfloat16_units
from fxprec.kernels.launch.kernel_op import KernelOp, eager_gradients
from fxprec.kernels.launch.observers import COMPILER, DUAL, SCRIPT, TRANSFORM, watcher
from fxprec.kernels.torch_internals import attention_choice, softmax_backward

#: Bytes of the FP32 scores that are made at once: with what is made of them they stay in a cache of some megabytes.
_AT_ONCE: Final = 1 << 22
#: P may take so many times the memory of query, key, value and output, which are kept for the backward in any case.
_KEPT: Final = 2
#: What torch chooses where it has no fused kernel.
_BY_OPS: Final = 0


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
    """How a call is cut up.

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
        """For query [N, H, T, E] and key [N, G, S, E]."""
        return cls._of(*query.shape[:3], *key.shape[1:3], causal, _AT_ONCE, _ROWS)

    @classmethod
    @functools.lru_cache(maxsize=64)  # layers are alike, and each call asks three times
    def _of(
        cls, batch: int, heads: int, rows: int, groups: int, keys: int, causal: bool, at_once: int, least: int
    ) -> _Plan:
        group, count = heads // groups, max(1, min(_BLOCKS, rows // least)) if causal else 1
        edges = [rows * number // count for number in range(count + 1)]
        blocks = tuple(_Block(slice(first, end), min(end, keys) if causal else keys) for first, end in pairwise(edges))
        areas = [group * (block.rows.stop - block.rows.start) * block.keys for block in blocks]
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
        """Of [N, H, T, S] what the block of each chunk, in order, has of it."""
        for chunk in self.chunks:
            for block in self.blocks:
                yield p[chunk.batch, chunk.query_heads, block.rows, : block.keys]

    def queries(self, x: Tensor, chunk: _Chunk, dtype: torch.dtype) -> Tensor:
        """A chunk of [N, H, T, width], as [heads of the chunk, group, T, width], one after the other in memory."""
        part = _one_after_the_other(x[chunk.batch, chunk.query_heads], dtype)
        return part.view(-1, self.group, *part.shape[2:])


def _keys(x: Tensor, chunk: _Chunk, dtype: torch.dtype) -> Tensor:
    """A chunk of [N, G, S, width], as [heads of the chunk, S, width], one after the other in memory."""
    part = _one_after_the_other(x[chunk.batch, chunk.heads], dtype)
    return part.view(-1, *part.shape[2:])


def _one_after_the_other(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype, memory_format=torch.contiguous_format).contiguous()  # ``to`` itself copies other dtypes alone


def _rows(queries: Tensor, block: _Block) -> Tensor:
    """A block of [heads, group, T, width], as [heads, group * rows, width]."""
    return queries[:, :, block.rows].flatten(1, 2)


class _Softmax:
    """The probabilities of one block after another, or what follows of them, in memory that is used again."""

    def __init__(self, plan: _Plan, mask: Tensor | None, causal: bool, scale: float, wide: torch.dtype) -> None:
        self._mask, self._causal, self._scale, self._wide = mask, causal, scale, wide
        self._memory = torch.empty(2, max(plan.sizes), dtype=wide)
        self._zero = torch.zeros((), dtype=wide)

    def product(self, left: Tensor, right: Tensor) -> Tensor:
        """``scale * left right^T``, both wide: [heads, rows, columns]."""
        out = self._take(0, (len(left), left.shape[1], right.shape[1]))
        return torch.baddbmm(self._zero, left, right.transpose(1, 2), beta=0, alpha=self._scale, out=out)

    def probabilities(self, query: Tensor, keys: Tensor, chunk: _Chunk, block: _Block) -> Tensor:
        """P of the rows of a query and the keys that they see, both wide."""
        scores = self.product(query, keys)
        rows = block.rows.stop - block.rows.start
        if self._causal:
            first = block.rows.start
            above = torch.full((rows, block.keys - first), -math.inf, dtype=self._wide).triu_(1)
            scores.view(-1, rows, block.keys)[:, :, first:] += above
        if self._mask is not None:
            part = self._mask[chunk.batch, chunk.query_heads, block.rows, : block.keys]
            scores.view(part.shape).add_(part)
        return torch.softmax(scores, -1, out=self._take(1, scores.shape))

    def derivative(self, gradients: Tensor, probabilities: Tensor) -> Tensor:
        """dS of the low P and of dP, which is overwritten; low."""
        wide = self._take(1, probabilities.shape).copy_(probabilities)
        return softmax_backward(gradients, wide, -1, self._wide, grad_input=gradients).to(probabilities.dtype)

    def _take(self, which: int, shape: tuple[int, ...]) -> Tensor:
        return self._memory[which, : math.prod(shape)].view(shape)


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    kept: bool,
) -> tuple[Tensor, Tensor]:
    """Returns the output, and P of all blocks, one after the other, if it is kept."""
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


def empty_like(x: Tensor) -> Tensor:
    """For [N, H, T, E], in memory [N, T, H, E], as torch's kernel gives it."""
    batch, heads, rows, width = x.shape
    return x.new_empty(batch, rows, heads, width).transpose(1, 2)


def _put(out: Tensor, part: Tensor, chunk: _Chunk, block: _Block) -> None:
    place = out[chunk.batch, chunk.query_heads, block.rows]
    place.copy_(part.view(place.shape))


def _fake(query: Tensor, key: Tensor, value: Tensor, mask: Any, causal: bool, scale: Any, kept: bool) -> Any:
    return empty_like(query), query.new_empty(sum(_Plan.of(query, key, causal).sizes) if kept else 0)


def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    probabilities: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value."""
    wide, plan = torch.promote_types(query.dtype, torch.float32), _Plan.of(query, key, causal)
    gradients = _backward_fake(grad, query, key, value)
    pieces, blocks = probabilities.split(plan.sizes), len(plan.blocks)
    softmax = _Softmax(plan, mask, causal, scale, wide)
    for number, chunk in enumerate(plan.chunks):
        rows, above = plan.queries(query, chunk, query.dtype), plan.queries(grad, chunk, query.dtype)
        wide_above = above.to(wide)
        keys, values = _keys(key, chunk, query.dtype), _keys(value, chunk, wide)
        new = torch.empty_like if plan.blocks[-1].keys == key.shape[2] else torch.zeros_like
        totals = new(keys), new(values, dtype=query.dtype)
        # The last block first, which sees the most keys: the others are added to what it gives.
        for block, piece in reversed([*zip(plan.blocks, pieces[number * blocks :], strict=False)]):
            added = int(block is not plan.blocks[-1])
            seen = block.keys
            p = piece.view(len(keys), -1, seen)
            of_scores = softmax.derivative(softmax.product(_rows(wide_above, block), values[:, :seen]), p)
            _put(gradients[0], torch.bmm(of_scores, keys[:, :seen]), chunk, block)
            totals[0][:, :seen].baddbmm_(of_scores.transpose(1, 2), _rows(rows, block), beta=added)
            totals[1][:, :seen].baddbmm_(p.transpose(1, 2), _rows(above, block), beta=added)
        for gradient, total in zip(gradients[1:], totals, strict=True):
            place = gradient[chunk.batch, chunk.heads]
            place.copy_(total.view(place.shape))
    return gradients


def _backward_fake(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return empty_like(query), empty_like(key), empty_like(value)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, causal, scale, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.settings = causal, scale
    ctx.save_for_backward(*tensors, output[1])


def _gradients(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    rest = (None,) * 4
    if grad is None:
        return None, None, None, *rest
    *tensors, probabilities = ctx.saved_tensors
    if torch.is_grad_enabled():
        return *eager_gradients(reference, (*tensors, *ctx.settings), (grad,)), None
    return *_backward_op(grad, *tensors, probabilities, *ctx.settings), *rest


def scores(query: Tensor, key: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    """Of each row over each key, [N, H, T, S], in plain torch and in the dtype of its arguments."""
    found = query @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).transpose(-1, -2) * scale
    if causal:
        found = found + torch.full(found.shape[-2:], -math.inf, dtype=found.dtype).triu(1)
    return found if mask is None else found + mask


def reference(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    """The same in plain torch, which autograd differentiates any number of times: all wide, the result low."""
    wide = torch.promote_types(query.dtype, torch.float32)
    p = torch.softmax(scores(query.to(wide), key.to(wide), mask, causal, scale), -1)
    return (p @ value.to(wide).repeat_interleave(query.shape[1] // key.shape[1], 1)).to(query.dtype)


def plain_gradients(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, p: Tensor, scale: float, sums: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Those of query, key and value, of P as [N, H, T, S]: in plain torch, which can be differentiated in all of these.

    ``sums``: rowsum(P * dP), [N, H, T, 1], where it is known.
    """
    group = query.shape[1] // key.shape[1]
    keys, values = (x.repeat_interleave(group, 1) for x in (key, value))
    of_p = grad @ values.transpose(-1, -2)
    of_scores = scale * p * (of_p - ((p * of_p).sum(-1, keepdim=True) if sums is None else sums))
    of_keys, of_values = of_scores.transpose(-1, -2) @ query, p.transpose(-1, -2) @ grad
    of_keys, of_values = (x.unflatten(1, (-1, group)).sum(2) for x in (of_keys, of_values))
    return of_scores @ keys, of_keys, of_values


def in_blocks(p: Tensor, key: Tensor, causal: bool) -> Tensor:
    """P as [N, H, T, S] in the form that the forward keeps: of all blocks, one after the other."""
    return torch.cat([piece.flatten() for piece in _Plan.of(p, key, causal).pieces(p)])


def out_of_blocks(kept: Tensor, query: Tensor, key: Tensor, causal: bool) -> Tensor:
    """The reverse."""
    plan, p = _Plan.of(query, key, causal), kept.new_zeros(*query.shape[:3], key.shape[2])
    for place, piece in zip(plan.pieces(p), kept.split(plan.sizes), strict=True):
        place.copy_(piece.view(place.shape))
    return p


_backward_op = KernelOp("attention_backward", _backward, _backward_fake)
_op = KernelOp("attention", _forward, _fake, backward=_gradients, setup_context=_setup_context)


def serves(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, grouped: bool) -> bool:
    """Whether these products do what ``scaled_dot_product_attention`` does of such arguments, in its place.

    Not where torch has no fused kernel, but computes in FP32. Not where somebody looks into the ops: vmap and forward
    mode have no rule for ours, a tracer would unroll them. Not where a row attends to nothing and has no softmax:
    torch's kernel knows what it wants there.
    """
    if (
        query.device.type != "cpu"
        or query.dtype is not torch.bfloat16
        or not query.dtype is key.dtype is value.dtype
        or query.dim() != 4
        or watcher(COMPILER, SCRIPT, TRANSFORM, DUAL) is not None
        or 0 in (query.numel(), key.numel(), value.numel())
        or key.dim() != 4
        or (key.shape[1] != query.shape[1] and not (grouped and query.shape[1] % key.shape[1] == 0))
    ):
        return False
    try:
        if attention_choice(query, key, value, mask, 0.0, causal, enable_gqa=grouped) == _BY_OPS:
            return False
    except RuntimeError:  # torch refuses the arguments, and is to say so
        return False
    if mask is None:
        return True
    return not causal and bool((mask if mask.dtype is torch.bool else mask > -math.inf).any(-1).all())


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """``torch.nn.functional.scaled_dot_product_attention`` of what ``serves`` says yes to.

    Args:
        query: [N, H, T, E], bfloat16.
        key, value: [N, G, S, E]: each head serves H / G heads of the query.
        mask: as torch's ``attn_mask``: bool, or floats that are added; broadcast to [N, H, T, S].
        causal: row t sees the keys up to t.
        scale: of the scores; None: 1 / sqrt(E).

    Returns:
        [N, H, T, E], bfloat16, in memory [N, T, H, E].
    """
    scale = 1.0 / math.sqrt(query.shape[3]) if scale is None else float(scale)
    kept = wants_gradients(query, key, value)
    return _op(query, key, value, additive(mask, query, key), causal, scale, kept)[0]


def keeps_little(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> bool:
    """Whether the P that is kept, if a backward may follow, takes no more memory than it may."""
    if not wants_gradients(query, key, value):
        return True
    beside = 2 * query.numel() + key.numel() + value.numel()
    return sum(_Plan.of(query, key, causal).sizes) <= _KEPT * beside


def additive(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """What a mask adds to scores, wide, as [N, H, T, S]; of a broadcast dimension but the last nothing is copied."""
    if mask is None:
        return None
    if mask.dtype is torch.bool:
        mask = torch.zeros(mask.shape).masked_fill_(~mask, -math.inf)
    mask = mask.to(torch.promote_types(query.dtype, torch.float32))
    mask = mask.expand(*mask.shape[:-1], key.shape[2]).contiguous()
    return mask.expand(*query.shape[:3], key.shape[2])


def wants_gradients(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether a backward may follow."""
    return torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
