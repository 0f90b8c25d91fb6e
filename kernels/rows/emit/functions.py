"""FP32 functions that Triton's language lacks outside of libdevice, which its interpreter does not have."""

from __future__ import annotations

from fxprec.kernels.launch.triton_support import jit, tl


@jit()
def exp(x):
    """fp32 -> fp32, within 3 ulp; ``tl.exp``, 2 to the rounded product with log2(e), is off by up to 64."""
    product = x * 1.44269502
    rest = tl.fma(x, 1.44269502, -product) + x * 1.925963e-8  # what its rounding lost, and what log2(e) has beyond FP32
    power = tl.exp2(product)
    return tl.where(tl.abs(product) < 126.0, power + power * (rest * 0.6931472), power)


@jit()
def tanh(x):
    """fp32 -> fp32. Near 0 the series, since 1 - 2 / (exp(2x) + 1) loses the digits of a small result."""
    far = 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)
    square = x * x
    near = x * (1.0 + square * (-0.33333334 + square * (0.13333334 + square * (-0.053968254 + square * 0.021869488))))
    return tl.where(tl.abs(x) < 0.25, near, far)


@jit()
def expm1(x):
    """fp32 -> fp32: Kahan's form, exact near 0 where exp(x) - 1 is not."""
    u = exp(x)
    shifted = u - 1.0
    exact = tl.where(shifted == 0.0, 1.0, shifted)
    logarithm = tl.log(tl.where(u == 1.0, 2.0, u))
    small = exact * (x / logarithm)
    return tl.where(u == 1.0, x, tl.where(tl.abs(x) < 1.0, small, shifted))


@jit()
def log1p(x):
    """fp32 -> fp32: Kahan's form, exact near 0 where log(1 + x) is not."""
    u = 1.0 + x
    change = u - 1.0
    corrected = tl.log(u) * (x / tl.where(change == 0.0, 1.0, change))
    return tl.where(u == 1.0, x, tl.where(u == float("inf"), u, corrected))


@jit()
def maximum(a, b):
    """The larger one; NaN where one of them is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@jit()
def minimum(a, b):
    """The smaller one; NaN where one of them is."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@jit()
def row_max(x):
    """fp32 [R, C] -> [R, 1]: the largest of each row; NaN where one of them is."""
    return tl.reduce(x, 1, maximum, keep_dims=True)


@jit()
def row_min(x):
    """fp32 [R, C] -> [R, 1]: the smallest of each row; NaN where one of them is."""
    return tl.reduce(x, 1, minimum, keep_dims=True)


@jit()
def sign(x):
    """fp32 -> fp32: -1, 0 or 1; of NaN 0, as torch has it."""
    return tl.where(x > 0.0, 1.0, tl.where(x < 0.0, -1.0, 0.0))


@jit()
def trunc(x):
    """fp32 -> fp32, towards zero."""
    return tl.where(x < 0.0, tl.ceil(x), tl.floor(x))
