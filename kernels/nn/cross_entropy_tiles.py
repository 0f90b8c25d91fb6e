"""Processes a tile of logits in cross-entropy's kernel: adds it to the sums of its rows, or writes its gradient."""

from __future__ import annotations

from fxprec.kernels.launch.triton_support import constexpr, jit, tl


@jit()
def row_middle(row, columns, VECTOR: constexpr):
    """Return the part of a row made of whole 16-byte runs: its pointer, first column and number of columns (int32).

    row: pointer to the row's first column, at any address. VECTOR: elements in 16 bytes.
    """
    # A row may be shorter than its way to the first aligned element.
    before = tl.minimum((16 - row.to(tl.int64) % 16) % 16 // (16 // VECTOR), columns).to(tl.int32)
    return tl.multiple_of(row + before, 16), before, (columns - before) // VECTOR * VECTOR


@jit()
def edge_places(before, width, columns, VECTOR: constexpr):
    """Return the other columns, fewer than VECTOR at either end: int32 numbers and their mask, [1, 2 * VECTOR]."""
    edge = tl.arange(0, 2 * VECTOR)[None, :]
    places = tl.where(edge < VECTOR, edge, before + width + edge - VECTOR)
    return places, tl.where(edge < VECTOR, edge < before, places < columns)


@jit()
def spread_tile(targets, weight, columns, inside, keep, spread, SOFT: constexpr, SMOOTHED: constexpr):
    """Return the target's weight of each class in a tile without the one-hot part: fp32 [R, B], or [1, 1] if all equal.

    targets: pointers [R, 1] to rows of probabilities (fp32, fp16, bf16), read where SOFT. weight: fp32, fp16, bf16
    [C] or None. columns: int32 [1, B], the tile's. inside: int1 [R, B]. keep, spread: fp32 scalars.
    """
    given = tl.zeros((1, 1), tl.float32)
    if SOFT:
        given = tl.load(targets + columns, mask=inside, other=0.0).to(tl.float32)
    if SMOOTHED:
        given = given * keep + spread
    if weight is not None:
        if SOFT or SMOOTHED:
            given = given * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    return given


@jit()
def sum_tile(
    x, columns, inside, targets, weight, keep, spread, origin,
    largest, total, linear, mass, lanes, linear_lanes, mass_lanes,
    SOFT: constexpr, SMOOTHED: constexpr, LANES: constexpr,
):  # fmt: skip
    """Add a tile to its rows' sums; return the tensors of the second line of arguments, updated.

    x: fp32 [R, B], -inf outside. columns, inside, targets, weight, keep, spread: ``spread_tile``'s.
    origin: fp32 [R], what x counts from in the linear sum: any number near x keeps it exact.
    largest, total, linear, mass: fp32 [R], the largest x, and the sums of exp(x - largest), of given * (x - origin) and
    of given (left alone where that is spread everywhere). With LANES the tile goes to lanes, linear_lanes and
    mass_lanes, fp32 [R, B], which are parts of the sums.
    """
    higher = tl.maximum(largest, tl.max(x, 1))
    shift = tl.where(higher == float("-inf"), 0.0, higher)  # -inf - -inf is NaN
    # Sums so far were relative to the old largest value.
    shrink = tl.exp(largest - shift)
    terms = tl.exp(x - shift[:, None])
    total = total * shrink
    if LANES:
        lanes = lanes * shrink[:, None] + terms
    else:
        total += tl.sum(terms, 1)
    if SOFT or SMOOTHED:
        given = tl.where(inside, spread_tile(targets, weight, columns, inside, keep, spread, SOFT, SMOOTHED), 0.0)
        products = given * tl.where(inside, x - origin[:, None], 0.0)
        if LANES:
            linear_lanes += products
        else:
            linear += tl.sum(products, 1)
        if SOFT or weight is not None:
            if LANES:
                mass_lanes += given
            else:
                mass += tl.sum(given, 1)
    return higher, total, linear, mass, lanes, linear_lanes, mass_lanes


@jit()
def write_tile(
    x, columns, inside, targets, weight, keep, spread, output, target_output,
    live, label, hit, largest, log_sum, slope, factor, SOFT: constexpr, SMOOTHED: constexpr,
):  # fmt: skip
    """Write the gradient of a tile: factor * (slope * exp(x - lse) - a), zero in rows that are not live.

    x: fp32 [R, B]. columns, targets, weight, keep, spread: ``spread_tile``'s. inside: int1 [R, B], where to write.
    output: pointers [R, B]. target_output: pointers [R, B] for factor * keep * weight * (lse - x), the gradient of
    probabilities; or None. live: int1, label: int64, the others fp32, [R].
    """
    # Two subtractions: largest + log_sum would round away digits far from zero.
    place = (x - largest[:, None]) - log_sum[:, None]
    value = slope[:, None] * tl.exp(place)
    if SOFT or SMOOTHED:
        value -= spread_tile(targets, weight, columns, inside & live[:, None], keep, spread, SOFT, SMOOTHED)
    if not SOFT:
        value -= tl.where(columns == label[:, None], hit[:, None], 0.0)
    value = tl.where(live[:, None], value * factor[:, None], 0.0)
    tl.store(output, value.to(output.dtype.element_ty), mask=inside)
    if target_output is not None:
        value = -keep * factor[:, None] * place
        if weight is not None:
            value *= tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(target_output, value.to(target_output.dtype.element_ty), mask=inside)
