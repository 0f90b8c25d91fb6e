"""Defines FP32 functions that Triton's language has only in libdevice, which its interpreter lacks."""

from __future__ import annotations

from fxprec.kernels.launch.triton_support import jit, tl


@jit()
def exp(x):
    """Return exp(x), fp32 -> fp32, within 3 ulp: ``tl.exp`` rounds x * log2(e) before exp2 and is off by up to 64."""
    product = x * 1.44269502
    # The rounding error of the product, and x times the digits of log2(e) beyond FP32.
    rest = tl.fma(x, 1.44269502, -product) + x * 1.925963e-8
    power = tl.exp2(product)
    # Near the ends of FP32's range the correction is inf - inf, or lost among subnormals: there exp2 serves alone.
    return tl.where(tl.abs(product) < 126.0, power + power * (rest * 0.6931472), power)


@jit()
def tanh(x):
    """Return tanh(x), fp32 -> fp32; near 0 by its series, where 1 - 2 / (exp(2x) + 1) loses digits."""
    far = 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)
    square = x * x
    near = x * (1.0 + square * (-0.33333334 + square * (0.13333334 + square * (-0.053968254 + square * 0.021869488))))
    return tl.where(tl.abs(x) < 0.25, near, far)


@jit()
def expm1(x):
    """Return exp(x) - 1, fp32 -> fp32, in Kahan's form, which is exact near 0."""
    u = exp(x)
    shifted = u - 1.0
    # Kahan: the errors of u - 1 and of log(u) cancel. Where u is 1 the quotient would be 0 / 0, and x is the result.
    change = tl.where(shifted == 0.0, 1.0, shifted)
    logarithm = tl.log(tl.where(u == 1.0, 2.0, u))
    small = change * (x / logarithm)
    return tl.where(u == 1.0, x, tl.where(tl.abs(x) < 1.0, small, shifted))


@jit()
def log1p(x):
    """Return log(1 + x), fp32 -> fp32, in Kahan's form, which is exact near 0."""
    u = 1.0 + x
    change = u - 1.0
    corrected = tl.log(u) * (x / tl.where(change == 0.0, 1.0, change))
    return tl.where(u == 1.0, x, tl.where(u == float("inf"), u, corrected))


@jit()
def maximum(a, b):
    """Return the larger of a and b; NaN if one of them is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@jit()
def minimum(a, b):
    """Return the smaller of a and b; NaN if one of them is."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@jit()
def row_max(x):
    """Return the largest element of each row, fp32 [R, C] -> [R, 1]; NaN if one of them is."""
    return tl.reduce(x, 1, maximum, keep_dims=True)


@jit()
def row_min(x):
    """Return the smallest element of each row, fp32 [R, C] -> [R, 1]; NaN if one of them is."""
    return tl.reduce(x, 1, minimum, keep_dims=True)


@jit()
def sign(x):
    """Return the sign of x, fp32 -> fp32: -1, 0 or 1; 0 for NaN, as torch does."""
    return tl.where(x > 0.0, 1.0, tl.where(x < 0.0, -1.0, 0.0))


@jit()
def trunc(x):
    """Round x towards zero, fp32 -> fp32."""
    return tl.where(x < 0.0, tl.ceil(x), tl.floor(x))
