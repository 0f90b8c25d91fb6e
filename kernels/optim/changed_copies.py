"""Copies changed weights to low precision without a host sync to learn whether any changed.

Two launches, whatever the number of weights::

    look    compare sampled elements of each weight with the noted ones, note them, set a flag if any differs
    copy    copy every weight, if the flag is set; else each program ends after reading it

One flag stands for all weights: a write that misses the samples of one (rows of an embedding that got no gradient)
comes with writes to others.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Final

import torch
from torch import Tensor

from fxprec.kernels.launch.triton_support import constexpr, jit, on_device, tl, triton_dtype
from fxprec.kernels.optim.tables import (
    PARAM,
    SHADOW,
    MultiTensorPlan,
    chunk_place,
    count_step,
    elements_at,
    int64_table,
    sent_to,
)

_LOOK_BLOCK: Final = 256
_COPY_BLOCK: Final = 1024


@jit(do_not_specialize=["count"])
def look_kernel(addresses, places, values, changed, count, NOTE_ONLY: constexpr, BLOCK: constexpr):
    """Compare elements with the noted ones, and note them. Grid: a program for BLOCK of ``count`` elements.

    addresses: int64 [count], of 4 bytes each, read. places: int32 [count], distinct, into values. values: int32, read
    and written there. changed: int32 [1], becomes 1 if any differs; NOTE_ONLY: stays.
    """
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = element < count
    address = tl.load(addresses + element, mask=inside, other=0)
    now = tl.load(address.to(tl.pointer_type(tl.int32)), mask=inside, other=0)
    place = values + tl.load(places + element, mask=inside, other=0)
    # Samples are noted without a comparison where the copies were just made.
    if not NOTE_ONLY:
        noted = tl.load(place, mask=inside, other=0)
        if tl.max((inside & (now != noted)).to(tl.int32)) != 0:
            tl.store(changed, 1)
    tl.store(place, now, mask=inside)


@jit()
def copy_kernel(
    chunks, entries, arrivals, changed, COPY_DTYPE: constexpr, ALIGNED: constexpr, CHUNK: constexpr, BLOCK: constexpr
):
    """Copy one chunk, if ``changed`` is set. Grid: a program for each of C chunks of T tensors.

    chunks: int32 [C, 2]; entries: int64 [T, 9]: ``tables``. At their addresses: parameter fp32, read; shadow
    COPY_DTYPE, written, rounded to nearest. changed: int32 [1], 0 again once all have come. arrivals: int32 [1], zero
    before and after. ALIGNED: every address divides by 16.
    """
    if tl.load(changed) == 0:
        return
    _, entry, start, length = chunk_place(chunks, entries, CHUNK)
    weight = elements_at(tl.load(entry + PARAM), start, tl.float32, ALIGNED)
    copy = elements_at(tl.load(entry + SHADOW), start, COPY_DTYPE, ALIGNED)
    for first in range(0, length, BLOCK):
        element = first + tl.arange(0, BLOCK)
        value = tl.load(weight + element, mask=element < length, other=0.0)
        tl.store(copy + element, value.to(COPY_DTYPE), mask=element < length)
    # The last program to finish clears the flag, when all have read it.
    count_step(arrivals, tl.num_programs(0), changed, 0)


class ChangedCopies:
    """Low-precision copies of some weights, with the tables by which two launches update them.

    Args:
        weights: float32, dense, on one device; their memory is kept.
        copies: float16 or bfloat16, in the weights' order of memory.
        addresses: of the sampled elements of each weight.
        rows: of each weight in the noted values.

    Raises:
        ValueError, TypeError: as ``MultiTensorPlan``. RuntimeError: a CUDA graph is being captured.
    """

    def __init__(
        self,
        weights: Sequence[Tensor],
        copies: Sequence[Tensor],
        addresses: Sequence[Sequence[int]],
        rows: Sequence[int],
    ) -> None:
        self._plan = MultiTensorPlan(weights, shadows=copies)
        # The plan's tables serve without gradients, too.
        bound = self._plan.bind([None] * len(weights))
        self._tables, self._aligned = bound.tables, bound.aligned
        device, width = self._plan.device, len(addresses[0])
        # The noted values of a weight are one row, wherever the weight stands among these.
        places = [row * width + column for row in rows for column in range(width)]
        self._addresses = sent_to(int64_table([*chain.from_iterable(addresses)]), device)
        self._places = sent_to(int64_table(places).int(), device)
        self._changed, self._arrivals = torch.zeros(2, 1, dtype=torch.int32, device=device)

    def note(self, values: Tensor) -> None:
        """Write the current sampled elements to ``values``: int32, a row of them for each weight, flat."""
        self._look(values, note_only=True)

    def launch(self, values: Tensor) -> None:
        """Copy all weights if a sampled element differs from ``values``, which is updated."""
        self._look(values, note_only=False)
        tables = self._tables
        with on_device(self._plan.device):
            copy_kernel[(len(tables.chunks),)](
                tables.chunks, tables.entries, self._arrivals, self._changed,
                COPY_DTYPE=triton_dtype(self._plan.shadow_dtype), ALIGNED=self._aligned, CHUNK=self._plan.chunk,
                BLOCK=_COPY_BLOCK,
            )  # fmt: skip

    def _look(self, values: Tensor, *, note_only: bool) -> None:
        count = len(self._addresses)
        with on_device(self._plan.device):
            look_kernel[(-(-count // _LOOK_BLOCK),)](
                self._addresses, self._places, values, self._changed, count, NOTE_ONLY=note_only, BLOCK=_LOOK_BLOCK
            )
