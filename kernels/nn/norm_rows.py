"""Layer norm and RMS norm of rows that fit in registers, with the residual add and dropout before them: the kernels.

    s = residual + dropout(x)                 rounded to the dtype it is stored in, and used so
    y = (s - mean) * rstd * (weight + offset) + bias             mean = 0 in RMS norm

    n = (s - mean) * rstd      g = dy * (weight + offset)
    dresidual = rstd * (g - mean(g) - n * mean(g * n)) + ds      without mean(g) in RMS norm
    dx = dropout'(dresidual)   dweight = sum over rows of dy * n     dbias = sum over rows of dy

The forward reads a row once and writes it once; so does the backward, whose programs walk over many rows and keep the
sums for dweight and dbias in registers. ``norm_launch`` launches these, ``norm_long_rows`` has the kernels for rows
that are too long.
"""

from __future__ import annotations

from fxprec.kernels.launch.philox import dropout_factor
from fxprec.kernels.launch.triton_support import constexpr, jit, tl


@jit()
def weight_row(weight, column, OFFSET: constexpr, COLUMNS: constexpr):
    """``weight + OFFSET`` at these columns: weight fp32, fp16 or bf16 [COLUMNS], read. Returns fp32 [1, BLOCK]."""
    value = tl.load(weight + column, mask=column < COLUMNS, other=0.0).to(tl.float32)
    if OFFSET != 0:
        value += OFFSET
    return value[None, :]


@jit(do_not_specialize=["rows"])
def forward_kernel(
    x, residual, weight, bias, seed, y, s, statistics, rows, x_stride, residual_stride, eps, scale,
    COLUMNS: constexpr, CENTER: constexpr, OFFSET: constexpr, THRESHOLD: constexpr, ROWS: constexpr, BLOCK: constexpr,
):  # fmt: skip
    """ROWS rows. Grid: cdiv(rows, ROWS).

    x: fp32, fp16 or bf16 [rows, COLUMNS], rows x_stride apart, read once. residual: likewise, or None.
    weight, bias: fp32, fp16 or bf16 [COLUMNS] or None, read. seed: int64 [1], read where THRESHOLD > 0.
    y: fp32, fp16 or bf16 [rows, COLUMNS], written. s: likewise, written where there is a residual, else None.
    statistics: fp32 [2, rows] with CENTER (layer norm), mean and rstd; else [1, rows], rstd alone. Written.
    All arithmetic and sums in fp32; eps and scale (of dropout) are fp32 scalars.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    there = row < rows
    inside = there[:, None] & (column < COLUMNS)[None, :]
    row = row.to(tl.int64)
    value = tl.load(x + (row[:, None] * x_stride + column[None, :]), mask=inside, other=0.0).to(tl.float32)
    if THRESHOLD > 0:
        value *= dropout_factor(tl.load(seed), row, COLUMNS, 0, scale, THRESHOLD, BLOCK)
    if residual is not None:
        place = row[:, None] * residual_stride + column[None, :]
        value += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(s.dtype.element_ty)
        tl.store(s + (row[:, None] * COLUMNS + column[None, :]), rounded, mask=inside)
        value = rounded.to(tl.float32)
    if CENTER:
        center = tl.div_rn(tl.sum(value, 1), COLUMNS * 1.0)
        tl.store(statistics + row, center, mask=there)
        statistics += rows
        value = tl.where(inside, value - center[:, None], 0.0)
    inverse = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(tl.sum(value * value, 1), COLUMNS * 1.0) + eps))
    tl.store(statistics + row, inverse, mask=there)
    value *= inverse[:, None]
    if weight is not None:
        value *= weight_row(weight, column, OFFSET, COLUMNS)
    if bias is not None:
        value += weight_row(bias, column, 0, COLUMNS)
    tl.store(y + (row[:, None] * COLUMNS + column[None, :]), value.to(y.dtype.element_ty), mask=inside)


@jit(do_not_specialize=["rows"])
def backward_kernel(
    dy, ds, s, weight, statistics, seed, dresidual, dx, dweights, dbiases, rows, dy_stride, ds_stride, s_stride, scale,
    COLUMNS: constexpr, CENTER: constexpr, OFFSET: constexpr, THRESHOLD: constexpr,
    ROWS: constexpr, BLOCK: constexpr, STAGES: constexpr,
):  # fmt: skip
    """Every P-th tile of ROWS rows. Grid: P programs.

    dy, ds: fp32, fp16 or bf16 [rows, COLUMNS], rows dy_stride, ds_stride apart, read once, or None (not both).
    s: fp32, fp16 or bf16 [rows, COLUMNS], rows s_stride apart, what was normalised, read once.
    weight: fp32, fp16 or bf16 [COLUMNS] or None, read. statistics: the forward's, read.
    seed: int64 [1], read where THRESHOLD > 0.
    dresidual: fp32, fp16 or bf16 [rows, COLUMNS] or None, written, the gradient of s.
    dx: likewise, the same behind dropout and in a dtype of its own.
    dweights, dbiases: fp32 [P, COLUMNS] or None, written: sums over this program's rows, row by row, in fp32.
    """
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    rstd = statistics + rows if CENTER else statistics
    key = tl.load(seed) if THRESHOLD > 0 else 0
    factor = weight_row(weight, column, OFFSET, COLUMNS) if weight is not None else 1.0
    weight_sum = tl.zeros((ROWS, BLOCK), tl.float32)
    bias_sum = tl.zeros((ROWS, BLOCK), tl.float32)
    for tile in tl.range(program, tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS)
        there = row < rows
        inside = there[:, None] & (column < COLUMNS)[None, :]
        row = row.to(tl.int64)
        if dy is not None:
            place = row[:, None] * s_stride + column[None, :]
            value = tl.load(s + place, mask=inside, other=0.0).to(tl.float32)
            place = row[:, None] * dy_stride + column[None, :]
            gradient = tl.load(dy + place, mask=inside, other=0.0).to(tl.float32)
            inverse = tl.load(rstd + row, mask=there, other=0.0)[:, None]
            if CENTER:
                value = tl.where(inside, value - tl.load(statistics + row, mask=there, other=0.0)[:, None], 0.0)
            value *= inverse
            if dweights is not None:
                weight_sum += gradient * value
            if dbiases is not None:
                bias_sum += gradient
            gradient *= factor
            along = tl.div_rn(tl.sum(gradient * value, 1), COLUMNS * 1.0)[:, None]
            if CENTER:
                gradient -= tl.div_rn(tl.sum(gradient, 1), COLUMNS * 1.0)[:, None]
            gradient = (gradient - value * along) * inverse
        else:
            gradient = tl.zeros((ROWS, BLOCK), tl.float32)
        if ds is not None:
            place = row[:, None] * ds_stride + column[None, :]
            gradient += tl.load(ds + place, mask=inside, other=0.0).to(tl.float32)
        place = row[:, None] * COLUMNS + column[None, :]
        if dresidual is not None:
            tl.store(dresidual + place, gradient.to(dresidual.dtype.element_ty), mask=inside)
        if dx is not None:
            if THRESHOLD > 0:
                gradient *= dropout_factor(key, row, COLUMNS, 0, scale, THRESHOLD, BLOCK)
            tl.store(dx + place, gradient.to(dx.dtype.element_ty), mask=inside)
    place = program.to(tl.int64) * COLUMNS + column
    if dweights is not None:
        tl.store(dweights + place, tl.sum(weight_sum, 0), mask=column < COLUMNS)
    if dbiases is not None:
        tl.store(dbiases + place, tl.sum(bias_sum, 0), mask=column < COLUMNS)


@jit(do_not_specialize=["count"])
def finish_kernel(parts, first, second, count, columns, ROWS: constexpr, BLOCK: constexpr):
    """Add up the parts of one or two column sums. Grid: (cdiv(columns, BLOCK), 1 or 2).

    parts: fp32 [1 or 2, count, columns], read once, added in fp32, row by row, then by a tree.
    first, second: fp32, fp16 or bf16 [columns], written; second may be None.
    """
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    which = tl.program_id(1)
    inside = column < columns
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, count, ROWS):
        row = start + tl.arange(0, ROWS)
        place = (which * count + row).to(tl.int64)[:, None] * columns + column[None, :]
        total += tl.load(parts + place, mask=(row < count)[:, None] & inside[None, :], other=0.0)
    result = tl.sum(total, 0)
    if which == 0:
        tl.store(first + column, result.to(first.dtype.element_ty), mask=inside)
    elif second is not None:
        tl.store(second + column, result.to(second.dtype.element_ty), mask=inside)
