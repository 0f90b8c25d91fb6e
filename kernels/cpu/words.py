"""Reads 4-byte words of this process's memory at a list of addresses by one gather.

To read a few elements of each of hundreds of tensors, one op a tensor takes 100 times as long as the reads. Here all of
memory is one int32 tensor, which owns none of it, and the elements of all tensors are one ``index_select``.

The caller must keep the memory at the addresses alive (a reference to each storage does).
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Iterable, Sequence
from typing import Final

import torch
from torch import Tensor

#: Bytes of a word.
WORD: Final = 4
#: First address of the tensor of all memory: nothing lies below, and torch takes address 0 for an empty tensor.
_BEGIN: Final = 64
#: Positions in a tensor at which two neighbours are sampled: its ends, which a running write reaches first and last,
#: and two that no regular structure (blocks, rows of padding) has in common.
_PAIRS: Final = (0.0, 0.382, 0.724, 1.0)
#: Samples of each tensor.
SAMPLES: Final = 2 * len(_PAIRS)
#: Length and number of the windows that are searched for elements that are not zero.
_NEAR: Final = 1024
_WINDOWS: Final = 4
#: Beyond the last address of any process: x86 and ARM use at most 52 bits.
_END: Final = 1 << 56


def places_of(addresses: Iterable[int]) -> Tensor:
    """Return the indices, int64 [n], by which ``words`` reads these addresses, rounded down to multiples of four."""
    return torch.tensor([(address - _BEGIN) // WORD for address in addresses], dtype=torch.int64, device="cpu")


def words(places: Tensor) -> Tensor:
    """Return the current words at these indices: int32 [n], on the CPU."""
    return _memory().index_select(0, places)


def sampled_addresses(tensor: Tensor) -> list[int]:
    """Return the addresses of SAMPLES elements that lie spread over a strided tensor, on any device.

    A write to all of the tensor changes some of them. Of a smaller tensor elements are repeated; an empty one has none.
    """
    start = tensor.data_ptr()
    return [start + offset for offset in _sampled_offsets(tensor.shape, tensor.stride(), tensor.element_size())]


def nonzero_addresses(tensor: Tensor) -> list[int]:
    """Return the addresses of SAMPLES elements that are not zero, for a tensor that mostly is; none if all are zero.

    A write that scales a pruned tensor changes no other element. A few windows are searched, and the whole tensor only
    if these hold nothing but zeros.
    """
    flat = tensor.detach().flatten()
    step = max(flat.numel() - _NEAR, 0) // (_WINDOWS - 1)
    windows = flat.as_strided((_WINDOWS, _NEAR), (step, 1)).nonzero() if step else flat.new_empty(0, 2)
    numbers = (windows @ windows.new_tensor((step, 1)) if len(windows) else flat.nonzero().view(-1)).tolist()
    if not numbers:
        return []
    chosen = [numbers[(len(numbers) - 1) * sample // (SAMPLES - 1)] for sample in range(SAMPLES)]
    start, shape, strides = tensor.data_ptr(), tensor.shape, tensor.stride()
    return [start + _offset(number, shape, strides) * tensor.element_size() for number in chosen]


@functools.lru_cache(maxsize=1024)
def _sampled_offsets(shape: Sequence[int], strides: Sequence[int], size: int) -> tuple[int, ...]:
    """Return how many bytes the samples of such a tensor, of elements of this size, lie behind its first element."""
    last = math.prod(shape) - 1
    if last < 0:
        return ()
    numbers = [min(int(share * last) + next_one, last) for share in _PAIRS for next_one in (0, 1)]
    return tuple([_offset(number, shape, strides) * size for number in numbers])


def _offset(number: int, shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return how many elements lie before that one in memory, where ``number`` counts in the order of indices."""
    offset = 0
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        number, index = divmod(number, size)
        offset += index * stride
    return offset


class SampledWords:
    """Samples of some CPU tensors, taken at construction; holds the tensors' memory.

    Attributes:
        noted: the sampled words, int32.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._storages = [tensor.untyped_storage() for tensor in tensors]
        self._places = places_of(address for tensor in tensors for address in sampled_addresses(tensor))
        self.noted = words(self._places)

    def same(self) -> bool:
        """Return whether the samples are unchanged."""
        return torch.equal(words(self._places), self.noted)


@functools.cache
def _memory() -> Tensor:
    """Return all memory of the process as int32, for good: it is neither read nor held before a gather asks."""
    with torch.inference_mode(False):
        every = (ctypes.c_int32 * ((_END - _BEGIN) // WORD)).from_address(_BEGIN)
        return torch.frombuffer(every, dtype=torch.int32)
