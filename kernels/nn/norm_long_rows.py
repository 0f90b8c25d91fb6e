"""Layer norm and RMS norm of rows too long for registers: the kernels of ``norm_rows`` in two passes over a row.

The forward takes the statistics while it writes s (mean and squares lane by lane after Welford, "Note on a method for
calculating corrected sums of squares and products", Technometrics 1962), then reads s again and writes y; without a
residual it reads x twice. The backward reads dy and s twice. The second read of a row finds most of it in a cache.
Column sums, which no longer fit beside a row, are a kernel of their own: dy and s are read once more.
"""

from __future__ import annotations

from fxprec.kernels.launch.philox import dropout_factor
from fxprec.kernels.launch.triton_support import constexpr, jit, tl
from fxprec.kernels.nn.norm_rows import weight_row


@jit(do_not_specialize=["rows"])
def long_forward_kernel(
    x, residual, weight, bias, seed, y, s, statistics, rows, x_stride, residual_stride, eps, scale,
    COLUMNS: constexpr, CENTER: constexpr, OFFSET: constexpr, THRESHOLD: constexpr, BLOCK: constexpr,
):  # fmt: skip
    """One row, BLOCK columns at a time. Grid: rows. Arguments as ``forward_kernel``; s, written, is read again."""
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    lanes = tl.arange(0, BLOCK)
    key = tl.load(seed) if THRESHOLD > 0 else 0
    center = tl.zeros((1, BLOCK), tl.float32)
    squares = tl.zeros((1, BLOCK), tl.float32)
    for start in range(0, COLUMNS, BLOCK):
        column = start + lanes
        inside = (column < COLUMNS)[None, :]
        place = row[:, None] * x_stride + column[None, :]
        value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        if THRESHOLD > 0:
            value *= dropout_factor(key, row, COLUMNS, start, scale, THRESHOLD, BLOCK)
        if residual is not None:
            place = row[:, None] * residual_stride + column[None, :]
            value += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
            rounded = value.to(s.dtype.element_ty)
            tl.store(s + (row[:, None] * COLUMNS + column[None, :]), rounded, mask=inside)
            value = rounded.to(tl.float32)
        if CENTER:
            distance = value - center
            # Of the first ones 1 is the share to the bit, which ``/`` need not give: an approximation.
            share = tl.div_rn(1.0, tl.full((), start // BLOCK + 1, tl.float32))
            center = tl.where(inside, center + distance * share, center)
            squares = tl.where(inside, squares + distance * (value - center), squares)
        else:
            squares += value * value
    middle = tl.zeros((1,), tl.float32)
    if CENTER:
        count = (tl.maximum(COLUMNS - lanes + (BLOCK - 1), 0) // BLOCK).to(tl.float32)[None, :]
        middle = tl.div_rn(tl.sum(center * count, 1), COLUMNS * 1.0)
        middle += tl.div_rn(tl.sum((center - middle[:, None]) * count, 1), COLUMNS * 1.0)  # what rounding took
        tl.store(statistics + row, middle)
        statistics += rows
        distance = tl.where(count > 0, center - middle[:, None], 0.0)
        squares += distance * distance * count
    inverse = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(tl.sum(squares, 1), COLUMNS * 1.0) + eps))
    tl.store(statistics + row, inverse)
    tl.debug_barrier()  # s was written by other threads of this program
    for start in range(0, COLUMNS, BLOCK):
        column = start + lanes
        inside = (column < COLUMNS)[None, :]
        if residual is not None:
            value = tl.load(s + (row[:, None] * COLUMNS + column[None, :]), mask=inside, other=0.0).to(tl.float32)
        else:
            place = row[:, None] * x_stride + column[None, :]
            value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        if CENTER:
            value -= middle[:, None]
        value *= inverse[:, None]
        if weight is not None:
            value *= weight_row(weight, column, OFFSET, COLUMNS)
        if bias is not None:
            value += weight_row(bias, column, 0, COLUMNS)
        tl.store(y + (row[:, None] * COLUMNS + column[None, :]), value.to(y.dtype.element_ty), mask=inside)


@jit(do_not_specialize=["rows"])
def long_backward_kernel(
    dy, ds, s, weight, statistics, seed, dresidual, dx, rows, dy_stride, ds_stride, s_stride, scale,
    COLUMNS: constexpr, CENTER: constexpr, OFFSET: constexpr, THRESHOLD: constexpr, BLOCK: constexpr,
):  # fmt: skip
    """One row, BLOCK columns at a time. Grid: rows. Arguments as ``backward_kernel``; dy and s are read twice."""
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    lanes = tl.arange(0, BLOCK)
    key = tl.load(seed) if THRESHOLD > 0 else 0
    center = tl.zeros((1, 1), tl.float32)
    inverse, slope, level = center, center, center
    if dy is not None:
        if CENTER:
            center = tl.load(statistics + row)[:, None]
            statistics += rows
        inverse = tl.load(statistics + row)[:, None]
        along = tl.zeros((1, BLOCK), tl.float32)
        total = tl.zeros((1, BLOCK), tl.float32)
        for start in range(0, COLUMNS, BLOCK):
            column = start + lanes
            inside = (column < COLUMNS)[None, :]
            place = row[:, None] * s_stride + column[None, :]
            value = tl.load(s + place, mask=inside, other=0.0).to(tl.float32)
            place = row[:, None] * dy_stride + column[None, :]
            gradient = tl.load(dy + place, mask=inside, other=0.0).to(tl.float32)
            if weight is not None:
                gradient *= weight_row(weight, column, OFFSET, COLUMNS)
            if CENTER:
                total += gradient
                value = tl.where(inside, value - center, 0.0)
            along += gradient * (value * inverse)
        slope = tl.div_rn(tl.sum(along, 1), COLUMNS * 1.0)[:, None]
        level = tl.div_rn(tl.sum(total, 1), COLUMNS * 1.0)[:, None]
    for start in range(0, COLUMNS, BLOCK):
        column = start + lanes
        inside = (column < COLUMNS)[None, :]
        if dy is not None:
            place = row[:, None] * s_stride + column[None, :]
            value = tl.load(s + place, mask=inside, other=0.0).to(tl.float32)
            place = row[:, None] * dy_stride + column[None, :]
            gradient = tl.load(dy + place, mask=inside, other=0.0).to(tl.float32)
            if weight is not None:
                gradient *= weight_row(weight, column, OFFSET, COLUMNS)
            if CENTER:
                value -= center
            gradient = (gradient - level - value * inverse * slope) * inverse
        else:
            gradient = tl.zeros((1, BLOCK), tl.float32)
        if ds is not None:
            place = row[:, None] * ds_stride + column[None, :]
            gradient += tl.load(ds + place, mask=inside, other=0.0).to(tl.float32)
        place = row[:, None] * COLUMNS + column[None, :]
        if dresidual is not None:
            tl.store(dresidual + place, gradient.to(dresidual.dtype.element_ty), mask=inside)
        if dx is not None:
            if THRESHOLD > 0:
                gradient *= dropout_factor(key, row, COLUMNS, start, scale, THRESHOLD, BLOCK)
            tl.store(dx + place, gradient.to(dx.dtype.element_ty), mask=inside)


@jit(do_not_specialize=["rows"])
def columns_kernel(
    dy, s, statistics, dweights, dbiases, rows, columns, dy_stride, s_stride,
    CENTER: constexpr, ROWS: constexpr, BLOCK: constexpr,
):  # fmt: skip
    """Column sums of every P-th tile of ROWS rows. Grid: (cdiv(columns, BLOCK), P). Arguments as ``backward_kernel``.

    s and statistics are read for dweights alone.
    """
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    part = tl.program_id(1)
    rstd = statistics + rows if CENTER else statistics
    weight_sum = tl.zeros((ROWS, BLOCK), tl.float32)
    bias_sum = tl.zeros((ROWS, BLOCK), tl.float32)
    for tile in range(part, tl.cdiv(rows, ROWS), tl.num_programs(1)):
        row = tile * ROWS + tl.arange(0, ROWS)
        there = row < rows
        inside = there[:, None] & (column < columns)[None, :]
        row = row.to(tl.int64)
        place = row[:, None] * dy_stride + column[None, :]
        gradient = tl.load(dy + place, mask=inside, other=0.0).to(tl.float32)
        bias_sum += gradient
        if dweights is not None:
            place = row[:, None] * s_stride + column[None, :]
            value = tl.load(s + place, mask=inside, other=0.0).to(tl.float32)
            if CENTER:
                value -= tl.load(statistics + row, mask=there, other=0.0)[:, None]
            weight_sum += gradient * (value * tl.load(rstd + row, mask=there, other=0.0)[:, None])
    place = part.to(tl.int64) * columns + column
    if dweights is not None:
        tl.store(dweights + place, tl.sum(weight_sum, 0), mask=column < columns)
    if dbiases is not None:
        tl.store(dbiases + place, tl.sum(bias_sum, 0), mask=column < columns)
