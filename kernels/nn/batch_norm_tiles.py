"""Cuts a tensor [N, C, *] into the tiles of batch norm's kernels, for channels_last and for contiguous memory.

A tile is BLOCK_ROWS x BLOCK_COLUMNS elements, columns adjacent in memory::

    memory          a row                  a column    pitch of rows   a program's channels
    channels_last   a position of N and *  a channel   C               BLOCK_COLUMNS of them
    contiguous      a sample of N          one of *    C * S           one

where S is the number of positions of ``*``. A program takes all its channels' elements in a range of rows (and, where
memory is contiguous, of columns); results for each channel go to partials of which there are few, so that the next
kernel can add them up itself. [N, C] is channels_last. Ranges depend on shape and device only: so do the results' bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from typing import Final

import torch
from torch import Tensor

from fxprec.kernels.launch.triton_support import constant, constexpr, jit, multiprocessors, tl

WARPS: Final = 16
#: Options of every launch over tiles.
OPTIONS: Final = {"num_warps": WARPS, "enable_fp_fusion": False}
#: Tiles on their way while one is computed: no multiprocessor hides the way to memory behind 16 warps otherwise.
STAGES: Final = constant(3)
#: Bytes of a tile, of the operand whose elements are largest; times operands and stages it must fit shared memory
#: (99 KiB on the smallest). The backward has more operands and keeps more of each in registers.
FORWARD_BYTES: Final = 16384
BACKWARD_BYTES: Final = 8192
# Columns of a tile of contiguous memory, where there are rows to go with them.
_WIDEST: Final = 1024
_MOST_PARTS: Final = 256
#: Divisor of a pitch, and of an address in bytes, for which Triton reads several elements in one access.
_VECTOR: Final = 16
#: Elements of a tile whose accesses read at most ``_FEW`` elements each.
_ALONE: Final = 4096
_FEW: Final = 4
#: Programs for each multiprocessor, which holds both at once if a thread has at most 64 registers.
_RESIDENT: Final = 2


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles of one tensor and the programs that take them; ``grid`` is (blocks of channels, parts)."""

    rows: int
    columns: int
    channels: int
    pitch: int
    rows_each: int  # of a part, a multiple of the block
    columns_each: int
    planar: bool  # contiguous [N, C, *]
    block_rows: int
    block_columns: int
    vector: int  # divides the columns, where Triton, which checks 16 alone, would not know; else 1
    grid: tuple[int, int]

    @property
    def parts(self) -> int:
        """Programs that share a block of channels, each with a partial result."""
        return self.grid[1]

    @property
    def values(self) -> int:
        """Number of elements of a channel."""
        return self.rows * self.columns if self.planar else self.rows

    @property
    def numbers(self) -> tuple[int, ...]:
        """Integer arguments of every kernel."""
        return self.rows, self.columns, self.channels, self.pitch, self.rows_each, self.columns_each

    @property
    def constants(self) -> tuple[bool | int, ...]:
        """Constants of every kernel: PLANAR, VECTOR, BLOCK_ROWS and BLOCK_COLUMNS."""
        return self.planar, self.vector, self.block_rows, self.block_columns


def cut_arguments(x: Tensor, size: int, *others: Tensor | None) -> tuple[tuple[int, ...], bool, int, int]:
    """Return the arguments of ``cut`` for a tensor from ``dense`` with at least one element.

    Args:
        size: bytes of a tile, of x or of one of ``others`` with larger elements.
    """
    width = x.itemsize
    for other in others:
        if other is not None:
            width = max(width, other.itemsize)
    return x.shape, x.is_contiguous(), _programs(x.device), size // width


@lru_cache(maxsize=1024)
def cut(shape: tuple[int, ...], contiguous: bool, programs: int, tile: int) -> Tiles:
    """Cut a shape into tiles for at most ``programs`` programs, or one for each channel (block) if that is more.

    Args:
        contiguous: else channels_last; for a tensor that is both the format with the longer rows is taken.
        tile: elements, a power of two.
    """
    samples, channels = shape[:2]
    positions = 1
    for size in shape[2:]:
        positions *= size
    planar = contiguous and positions > 1
    vector = gcd(positions if planar else channels, _VECTOR)
    # Each access has an address of its own, which takes registers.
    if vector <= _FEW:
        tile = min(tile, _ALONE)
    # One channel is one row of memory, whatever the samples.
    if planar and channels == 1 and samples * positions < 2**31:
        samples, positions = 1, samples * positions
    if planar:
        rows, columns, pitch = samples, positions, channels * positions
        block_rows = min(_power_of_two(rows), max(tile // _power_of_two(columns), tile // _WIDEST))
        block_columns = min(_power_of_two(columns), tile // block_rows)
        blocks = channels
    else:
        rows, columns, pitch = samples * positions, channels, channels
        width = _power_of_two(columns)
        # Narrow where channels are few, or there would be too many parts of them: 32 bytes are what memory moves.
        block_columns = width if width <= 16 else min(64, width // 2)
        block_rows = tile // block_columns
        blocks = _blocks(columns, block_columns)
    # Few parts, since the next kernel adds them up alone.
    wanted = min(max(programs // blocks, 1), _MOST_PARTS)
    row_blocks = _blocks(rows, block_rows)
    column_blocks = _blocks(columns, block_columns) if planar else 1
    row_parts = min(wanted, row_blocks)
    rows_each = _blocks(row_blocks, row_parts) * block_rows
    columns_each = _blocks(column_blocks, min(wanted // row_parts, column_blocks)) * block_columns
    parts = _blocks(rows, rows_each) * (_blocks(columns, columns_each) if planar else 1)
    return Tiles(
        rows, columns, channels, pitch, rows_each, columns_each, planar, block_rows, block_columns,
        1 if vector == _VECTOR else vector, (blocks, parts),
    )  # fmt: skip


def dense(x: Tensor) -> Tensor:
    """Return x [N, C, *] itself if it is contiguous or channels_last (of any rank), otherwise a copy that is."""
    if x.is_contiguous() or (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)):
        return x
    if x.dim() != 4 and x.movedim(1, -1).is_contiguous():
        return x
    return x.movedim(1, -1).contiguous().movedim(-1, 1) if x.stride(1) == 1 else x.contiguous()


def aligned(x: Tensor) -> Tensor:
    """Return x, from ``dense``, or a copy of it, at an address that allows reading several elements at once.

    Other tiles would do too, and spill less; but then an address would decide how a sum is rounded.
    """
    return x.clone() if x.data_ptr() % _VECTOR else x


def like(tensor: Tensor, x: Tensor) -> Tensor:
    """Return a tensor of x's shape with x's strides, ``aligned``: itself or a copy. x: from ``dense``."""
    if tensor.stride() == x.stride():
        return aligned(tensor)
    return torch.empty_like(x, dtype=tensor.dtype).copy_(tensor)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _blocks(size: int, block: int) -> int:
    return -(-size // block)


def _programs(device: torch.device) -> int:
    # In the interpreter there are enough to have parts.
    return _RESIDENT * multiprocessors(device) if device.type == "cuda" else 8


@jit()
def divided(number, VECTOR: constexpr):
    """Return the same number, an int scalar that VECTOR divides, in a form that shows the compiler its divisor."""
    if VECTOR > 1:
        number = number // VECTOR * VECTOR
    return number


@jit()
def program_place(columns, rows_each, columns_each, PLANAR: constexpr, BLOCK_COLUMNS: constexpr):
    """Return a program's first row and column, its first row's offset, and its channels, [1] or [BLOCK_COLUMNS].

    columns, rows_each, columns_each: int scalars, see ``Tiles``. Grid: (blocks of channels, parts). Rows and offsets
    are int64; columns are int32 where that holds them.
    """
    block = tl.program_id(0)
    part = tl.program_id(1)
    if PLANAR:
        column_parts = tl.cdiv(columns, columns_each)
        first_row = (part // column_parts).to(tl.int64) * rows_each
        first_column = part % column_parts * columns_each
        base = block.to(tl.int64) * columns
        channel = block + tl.arange(0, 1)
    else:
        first_row = part.to(tl.int64) * rows_each
        first_column = block * BLOCK_COLUMNS
        base = block.to(tl.int64) * 0
        channel = first_column + tl.arange(0, BLOCK_COLUMNS)
    return first_row, first_column, base, channel


@jit()
def over_tile(values, PLANAR: constexpr):
    """Sum each channel's values in a tile. values: fp32 [rows, columns]. Returns fp32 [1] or [columns]."""
    total = tl.sum(values, axis=0)
    if PLANAR:
        total = tl.sum(total, axis=0, keep_dims=True)
    return total


@jit()
def channel_mean(counts, means, safe, PLANAR: constexpr):
    """Return the mean of means. counts, means: fp32 [rows, columns]; safe: fp32 [channels], counts' sums, at least 1.

    In two steps, so that deviations keep their digits beside a far greater mean.
    """
    mean = over_tile(counts * means, PLANAR) / safe
    return mean + over_tile(counts * (means - mean[None, :]), PLANAR) / safe


@jit()
def channel_values(pointer, channel, channels, OTHERWISE: constexpr):
    """Load one value a channel as fp32; OTHERWISE without a tensor. pointer: fp32, fp16 or bf16 [C], or None."""
    if pointer is None:
        values = tl.full(channel.shape, OTHERWISE, tl.float32)
    else:
        values = tl.load(pointer + channel, mask=channel < channels, other=0.0).to(tl.float32)
    return values


@jit()
def channel_terms(mean, spread, weight, bias, channel, channels, eps, TRAINING: constexpr):
    """Return mean, rstd, scale = rstd * weight and shift = bias: fp32 [channels of the program].

    mean: [C]. spread: [C], rstd with TRAINING, otherwise the variance. weight, bias: [C] or None. In fp32, fp16, bf16.
    """
    center = channel_values(mean, channel, channels, 0.0)
    rstd = channel_values(spread, channel, channels, 0.0)
    if not TRAINING:
        rstd = tl.div_rn(1.0, tl.sqrt_rn(rstd + eps))
    scale = rstd * channel_values(weight, channel, channels, 1.0)
    shift = channel_values(bias, channel, channels, 0.0)
    return center, rstd, scale, shift


@jit()
def normalized(x, center, scale, shift):
    """Return ``(x - mean) * scale + shift`` of a tile, fp32 [rows, columns]; an FMA, for equal bits in the backward."""
    return tl.fma(x - center[None, :], scale[None, :], shift[None, :])
