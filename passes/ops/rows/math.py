"""Rows of the op table: arithmetic, reductions, special functions, decompositions, Fourier transforms. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from fxprec.passes.graph.annotations import Rule
from fxprec.passes.ops.rule import Epilogue, OpRule, facts, rows, table

_WIDEST: Final = "the widest of its float inputs wins, inside the kernel"
_ONE_DTYPE: Final = "the widest of its float inputs wins; the kernel wants them all in it"
_RANGE: Final = "its results leave the range of low precision, or lose their digits there"
_ANGLE: Final = "periodic or singular: a rounded argument gives another value (rotary and position tables)"
_SUM: Final = "a long sum loses small terms"
_PICKS: Final = "picks one of its values: exact in any dtype"
_SIGN: Final = "looks at sign or class of each value: exact in any dtype"
_SPECIAL: Final = "a series or recurrence: FP32 as torch computes it inside, and often no low kernel"
_INTEGERS: Final = "integers and bool only"
#: Parts of guards: what is common to several ops.
_LOG: Final = "  # an eps under the logarithm; of a softmax F.log_softmax, of a sigmoid F.logsigmoid"
_INSIDE: Final = "x.float().clamp(-1 + 1e-6, 1 - 1e-6)"
_ENDS: Final = "  # an eps away from -1 and 1, where its slope has no end"

MATH_ROWS: Final[Mapping[str, OpRule]] = table(
    # of two tensors
    rows(Rule.PROMOTE, _WIDEST, "add sub rsub maximum minimum fmax fmin clamp clamp_min clamp_max remainder "
         "floor_divide fmod where", native_promotion=True),
    rows(Rule.PROMOTE, _WIDEST, "mul addcmul", native_promotion=True, squares="factors"),
    rows(Rule.PROMOTE, _WIDEST, "div addcdiv atan2 hypot copysign", result="float", native_promotion=True),
    rows(Rule.PROMOTE, _WIDEST, "outer kron diff block_diag", result="tensors", native_promotion=True),
    rows(Rule.PROMOTE, _ONE_DTYPE, "cartesian_prod", view=True),
    # the kernel is a product with 2 ** other, computed in other's dtype
    rows(Rule.PROMOTE, _ONE_DTYPE, "ldexp", result="float"),
    rows(Rule.PROMOTE, _WIDEST, "cat stack hstack vstack dstack column_stack", result="tensors",
         native_promotion=True),
    rows(Rule.PROMOTE, _WIDEST, "eq ne lt le gt ge", result="bool", native_promotion=True),
    rows(Rule.PROMOTE, _WIDEST, "logical_and logical_or logical_xor", result="bool", native_promotion=True),
    rows(Rule.PROMOTE, _ONE_DTYPE, "lerp cross heaviside", result="tensors"),
    rows(Rule.PROMOTE, _ONE_DTYPE, "dot vdot", result="tensors", squares="factors"),
    rows(Rule.PROMOTE, _ONE_DTYPE, "inner", result="tensors", squares="vectors"),
    rows(Rule.PROMOTE, _ONE_DTYPE, "tensordot", result="tensors", squares="dimensions"),
    rows(Rule.PROMOTE, _ONE_DTYPE, "isclose", result="bool"),
    rows(Rule.PROMOTE, _ONE_DTYPE, "allclose", result="none"),
    rows(Rule.PROMOTE, _WIDEST, "equal", result="none", native_promotion=True),
    rows(Rule.FULL, "x.__rtruediv__ is a reciprocal times a number: FP32 as under autocast", "rdiv", result="float"),
    rows(Rule.KEEP, "the next number depends on the dtype itself", "nextafter"),
    rows(Rule.KEEP, "computes in float64", "float_power", result="float64"),
    facts("add sub mul div clamp", rank="kept"),
    facts("add sub rsub", numbers="added"),
    facts("mul div", numbers="factors"),
    facts("clamp clamp_min clamp_max where maximum minimum eq ne lt le gt ge", numbers="compared"),
    facts("div", singular=1, special="div"),
    facts("where", special="where"),
    facts("cat stack hstack vstack dstack column_stack", rank="some"),
    facts("cat stack hstack vstack dstack column_stack where", exact=True),
    facts("eq ne lt le gt ge where mul maximum minimum", boolean=True),
    facts("div rdiv", float_number=True),
    facts("rdiv", autocast=Rule.FULL),
    facts("div", guard="x / y.clamp(min=1e-3)  # an eps in the divisor; of a divisor with both signs "
          "y.masked_fill(y == 0, 1e-3)"),
    facts("rdiv", guard="1 / x.clamp(min=1e-3)  # an eps in the divisor; of a divisor with both signs "
          "x.masked_fill(x == 0, 1e-3)"),
    facts("remainder", guard="x % y.masked_fill(y == 0, 1)  # the rest by 0 is no number"),
    facts("fmod", guard="torch.fmod(x, y.masked_fill(y == 0, 1))  # the rest by 0 is no number"),
    facts("floor_divide", guard="x // y.masked_fill(y == 0, 1)  # a quotient by 0"),
    facts("hypot", guard="(x.square() + y.square() + 1e-6).sqrt()  # an eps inside the root, of endless slope at 0"),
    facts("mul", guard="torch.zeros_like(x).masked_fill(x != 0, -torch.inf)  # a mask by masked_fill, not by a product "
          "with inf: 0 * inf is no number"),
    facts("add", guard="x.clamp(-1e30, 1e30) + y.clamp(-1e30, 1e30)  # inf - inf is no number"),
    facts("sub", guard="x.clamp(-1e30, 1e30) - y.clamp(-1e30, 1e30)  # inf - inf is no number"),
    facts("add", epilogue=Epilogue("add", binary=True)),
    facts("add sub mul div clamp maximum minimum cat", any_format=True),
    # of one
    rows(Rule.FOLLOW, "exact, or one rounding", "neg nan_to_num", result="first"),
    rows(Rule.FOLLOW, "gives its input back", "positive", result="first", view=True, same=True,
         itself=True),
    rows(Rule.FOLLOW, "exact, or one rounding", "abs", result="real"),
    rows(Rule.FOLLOW, "one rounding", "sqrt deg2rad rad2deg", result="float"),
    rows(Rule.FOLLOW, "one rounding", "square", result="first", squares="always"),
    rows(Rule.FOLLOW, "bounded slope: follows its input without widening", "erf erfc", result="float"),
    rows(Rule.FOLLOW, _SIGN, "sign sgn floor ceil trunc frac", result="first"),
    rows(Rule.FULL, "rounding to decimals multiplies first, and has no float16 kernel on CPU", "round", result="first"),
    rows(Rule.FOLLOW, _SIGN, "signbit isnan isinf isfinite isposinf isneginf isreal logical_not", result="bool"),
    rows(Rule.FOLLOW, _SIGN, "frexp", result=("first", "int32")),
    rows(Rule.FULL, _RANGE, "exp exp2 expm1 log log2 log10 log1p logit reciprocal rsqrt", result="float"),
    rows(Rule.FULL, _RANGE, "cosh sinh erfinv", result="float"),
    rows(Rule.FULL, _RANGE, "pow", squares="power"),
    rows(Rule.FULL, _ANGLE, "sin cos tan asin acos atan asinh acosh atanh sinc", result="float"),
    facts("sin cos tan sinc", periodic=True),
    facts("neg abs exp log sqrt rsqrt", rank="kept"),
    facts("neg abs", exact=True),
    facts("sqrt rsqrt log log2 log10 reciprocal pow", singular=0),
    facts("exp exp2 expm1", exponential=True),
    facts("exp exp2 expm1 sqrt rsqrt reciprocal tan", overwritable=True),
    facts("sqrt", guard="x.clamp(min=1e-6).sqrt()  # an eps inside the root: its slope has no end at 0"),
    facts("rsqrt", guard="x.clamp(min=1e-6).rsqrt()  # an eps inside the root"),
    facts("reciprocal", guard="x.clamp(min=1e-3).reciprocal()  # an eps in the divisor; of a divisor with both signs "
          "x.masked_fill(x == 0, 1e-3)"),
    *(facts(op, guard=f"x.clamp(min=1e-6).{op}(){_LOG}") for op in ("log", "log2", "log10")),
    facts("log1p", guard="x.float().clamp(min=-1 + 1e-6).log1p()  # an eps away from the pole at -1"),
    facts("logit", guard="x.float().logit(eps=1e-6)  # an eps away from the poles at 0 and 1"),
    facts("pow", guard="x.clamp(min=1e-3).pow(y)  # an eps under the power: below 0, and for its slope at 0, there is "
          "no number"),
    facts("exp", guard="x.clamp(max=10).exp()  # or with the largest value subtracted before; a softmax by hand is "
          "x.softmax(-1)"),
    facts("exp2", guard="x.clamp(max=15).exp2()  # or with the largest value subtracted before"),
    facts("expm1", guard="x.clamp(max=10).expm1()  # the exponent is clamped"),
    *(facts(op, guard=f"x.clamp(-10, 10).{op}()  # the exponent is clamped") for op in ("sinh", "cosh")),
    *(facts(op, guard=f"{_INSIDE}.{op}(){_ENDS}") for op in ("acos", "asin", "atanh", "erfinv")),
    facts("acosh", guard="x.float().clamp(min=1 + 1e-6).acosh()  # an eps away from 1, where its slope has no end"),
    facts("isnan positive", boolean=True),
    facts("sqrt exp log", float_number=True),
    facts("acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow", autocast=Rule.FULL),
    # reductions
    rows(Rule.FULL, _SUM, "sum", result="accumulate", dtype_keyword=True),
    rows(Rule.FULL, _SUM, "mean", result="first", dtype_keyword=True, mixed=frozenset({"cpu", "cuda"})),
    rows(Rule.FULL, _SUM, "prod cumsum cumprod nansum sum_to_size trace", result="accumulate"),
    rows(Rule.FULL, _SUM, "nanmean logcumsumexp cumulative_trapezoid trapezoid", result="float"),
    rows(Rule.FULL, "sums squares", "var_mean std_mean", result=("real", "first")),
    rows(Rule.FULL, "sums squares", "var std linalg_vector_norm frobenius_norm native_norm norm_except_dim",
         result="real"),
    rows(Rule.FULL, "sums squares", "norm linalg_norm linalg_matrix_norm nuclear_norm", result="real",
         low_kernel=False),
    rows(Rule.FULL, "rescales by norms: sums squares", "renorm", result="first"),
    rows(Rule.FULL, "sums products of differences", "cov corrcoef", result="float"),
    rows(Rule.FULL, "interpolates between values; the kernel takes FP32 or float64 only", "quantile nanquantile",
           result="first", low_kernel=False),
    rows(Rule.FULL, "a quotient of small differences", "gradient", result="float*"),
    rows(Rule.FULL, _SUM, "segment_reduce", result="first"),
    rows(Rule.FOLLOW, _PICKS, "amax amin max min median nanmedian msort", result="first"),
    rows(Rule.FOLLOW, _PICKS, "aminmax", result=("first", "first")),
    rows(Rule.FOLLOW, _PICKS, "mode kthvalue sort topk cummax cummin", result=("first", "int64")),
    rows(Rule.FOLLOW, _PICKS, "argmax argmin argsort count_nonzero nonzero argwhere nonzero_static", result="int64"),
    rows(Rule.FOLLOW, _PICKS, "all any is_all_true is_any_true", result="bool"),
    facts("sum mean prod max min amax amin norm std var", rank="reduced"),
    facts("sum mean amax amin", any_format=True),
    facts("sum mean nansum nanmean prod cumsum cumprod var std norm linalg_norm linalg_vector_norm", contains_sum=True),
    facts("sum mean nansum nanmean prod cumsum cumprod trace", reduces=True),
    facts("cumsum", counts=True),
    facts("std_mean", guard="torch.std_mean(x, -1, keepdim=True, correction=0)  # of one value torch's std is 0 / 0"),
    facts("var_mean", guard="torch.var_mean(x, -1, keepdim=True, correction=0)  # of one value torch's var is 0 / 0"),
    facts("std", guard="x.std(-1, keepdim=True, correction=0)  # of one value torch's std is 0 / 0"),
    facts("var", guard="x.var(-1, keepdim=True, correction=0)  # of one value torch's var is 0 / 0"),
    facts("mean", guard="x.sum() / max(x.numel(), 1)  # the mean of no value is 0 / 0"),
    facts("nanmean", guard="x.nansum() / (~x.isnan()).sum().clamp(min=1)  # the mean of no value is 0 / 0"),
    facts("norm linalg_norm linalg_vector_norm frobenius_norm", guard="(x.square().sum(-1, keepdim=True) + 1e-6).sqrt()"
          "  # an eps inside the root: its slope has no end at 0"),
    facts("max min median nanmedian", special="extreme"),
    # of rounded values several are the largest, among which the gradient is shared
    facts("amax amin", exact=True, backward_sums=frozenset({"cpu", "cuda"})),
    facts("nonzero", special="nonzero"),
    facts("argmax argmin", gradient=False),
    facts("norm frobenius_norm nuclear_norm linalg_norm linalg_vector_norm linalg_matrix_norm renorm prod cumprod "
          "cumsum sum", autocast=Rule.FULL),
    # counting
    rows(Rule.KEEP, "compares values: rounding would merge them", "unique unique_consecutive unique_dim bucketize "
         "searchsorted hash_tensor", result="unknown"),
    rows(Rule.KEEP, "compares values: rounding would merge them", "isin", result="bool"),
    rows(Rule.KEEP, "counts into bins: rounding moves values between them", "histc", result="first"),
    rows(Rule.KEEP, "counts into bins: rounding moves values between them", "histogram", result=("first", "first")),
    rows(Rule.KEEP, "counts into bins: rounding moves values between them", "histogramdd bincount", result="unknown"),
    facts("unique unique_consecutive", special="unique"),
    facts("bucketize searchsorted", special="buckets"),
    # of integers
    rows(Rule.KEEP, _INTEGERS, "bitwise_and bitwise_or bitwise_xor bitwise_not bitwise_left_shift bitwise_right_shift"),
    rows(Rule.KEEP, _INTEGERS, "gcd lcm"),
    rows(Rule.KEEP, _INTEGERS, "not_ truth contains is is_not", result="none"),
    # special functions
    rows(Rule.FULL, _SPECIAL, "digamma lgamma polygamma mvlgamma igamma igammac i0 i0e", result="float"),
    rows(Rule.FULL, _SPECIAL, "zeta i1 i1e airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1 modified_bessel_i0 "
         "modified_bessel_i1 modified_bessel_k0 modified_bessel_k1 scaled_modified_bessel_k0 "
         "scaled_modified_bessel_k1 spherical_bessel_j0 chebyshev_polynomial_t chebyshev_polynomial_u "
         "chebyshev_polynomial_v chebyshev_polynomial_w shifted_chebyshev_polynomial_t shifted_chebyshev_polynomial_u "
         "shifted_chebyshev_polynomial_v shifted_chebyshev_polynomial_w hermite_polynomial_h hermite_polynomial_he "
         "laguerre_polynomial_l legendre_polynomial_p", result="float", low_kernel=False),
    rows(Rule.FULL, _RANGE, "entr ndtr xlogy xlog1py logaddexp logaddexp2", result="float"),
    rows(Rule.FULL, _RANGE, "erfcx log_ndtr ndtri", result="float", low_kernel=False),
    *(facts(op, guard=f"x.clamp(min=1e-3).{op}()  # an eps away from the pole at 0") for op in ("lgamma", "digamma")),
    facts("xlogy", guard="torch.xlogy(x, y.clamp(min=1e-6))  # an eps under the logarithm"),
    facts("erf erfc ndtr atan expm1", saturates=True),
    facts("log1p logit asin acos acosh atanh erfinv ndtri entr tan lgamma digamma mvlgamma sqrt rsqrt log log2 log10 "
          "reciprocal pow float_power", poles=(0, "input", "self")),
    facts("polygamma", poles=(0, 1, "input", "self")),
    # rdiv is x.__rtruediv__(y), y / x, or truediv(2, x): the divisor stands first or second
    facts("xlogy xlog1py div remainder fmod floor_divide", poles=(1, "other")), facts("rdiv", poles=(0, 1)),
    facts("addcdiv", poles=(2, "tensor2")), facts("atan2 hypot", poles=(0, 1, "input", "self", "other")),
)  # fmt: skip


_SOLVER: Final = "a solver or decomposition: no low kernel, and errors grow with the condition number"
_FFT: Final = "Fourier transforms have no bfloat16 kernel and complex results"
#: Part of a guard: numbers on the diagonal that make values differ.
_APART: Final = "x + torch.arange(1, x.shape[-1] + 1, dtype=x.dtype).mul(1e-3).diag()"
_COMPLEX: Final = "complex numbers are never touched"

LINALG_ROWS: Final[Mapping[str, OpRule]] = table(
    # solvers
    rows(Rule.KEEP, _SOLVER, "linalg_cholesky cholesky cholesky_inverse cholesky_solve linalg_det logdet inverse "
         "linalg_pinv linalg_solve linalg_solve_triangular linalg_ldl_solve linalg_lu_solve lu_solve linalg_tensorinv "
         "linalg_tensorsolve linalg_householder_product ormqr matrix_exp matrix_power", result="first"),
    rows(Rule.KEEP, _SOLVER, "linalg_svdvals linalg_eigvalsh linalg_cond", result="real"),
    rows(Rule.KEEP, _SOLVER, "linalg_eigvals", result="complex"),
    rows(Rule.KEEP, _SOLVER, "linalg_matrix_rank", result="int64"),
    rows(Rule.KEEP, _SOLVER, "linalg_cholesky_ex linalg_inv_ex linalg_solve_ex linalg_ldl_factor linalg_lu_factor",
           result=("first", "int32")),
    rows(Rule.KEEP, _SOLVER, "linalg_lu_factor_ex linalg_ldl_factor_ex lu_with_info",
           result=("first", "int32", "int32")),
    rows(Rule.KEEP, _SOLVER, "linalg_qr qr geqrf triangular_solve linalg_polar", result=("first", "first")),
    rows(Rule.FULL, "a decomposition without a low kernel, which torch.autocast runs in float32", "linalg_matrix_sqrth",
         result="first"),
    rows(Rule.KEEP, _SOLVER, "linalg_eigh", result=("real", "first")),
    rows(Rule.KEEP, _SOLVER, "linalg_eig", result=("complex", "complex")),
    rows(Rule.KEEP, _SOLVER, "linalg_svd svd svd_lowrank pca_lowrank", result=("first", "real", "first")),
    rows(Rule.KEEP, _SOLVER, "slogdet", result=("first", "real")),
    rows(Rule.KEEP, _SOLVER, "lu_unpack linalg_lu", result=("first", "first", "first")),
    rows(Rule.KEEP, _SOLVER, "linalg_lstsq", result=("first", "real", "int64", "real")),
    rows(Rule.KEEP, _SOLVER, "lu lobpcg", result="unknown"),
    facts("linalg_eigh", guard=f"torch.linalg.eigh({_APART})  # equal eigenvalues have no gradient"),
    facts("linalg_svd svd", guard=f"torch.linalg.svd({_APART})  # equal singular values have no gradient"),
    # Fourier transforms
    rows(Rule.KEEP, _FFT, "fft_fft fft_ifft fft_fft2 fft_ifft2 fft_fftn fft_ifftn fft_rfft fft_rfft2 fft_rfftn "
         "fft_ihfft fft_ihfft2 fft_ihfftn", result="complex"),
    rows(Rule.KEEP, _FFT, "fft_irfft fft_irfft2 fft_irfftn fft_hfft fft_hfft2 fft_hfftn", result="float_real"),
    rows(Rule.KEEP, _FFT, "stft istft", result="unknown"),
    rows(Rule.KEEP, "frequency tables", "fft_fftfreq fft_rfftfreq", result="default"),
    rows(Rule.FOLLOW, "rolls values: exact in any dtype", "fft_fftshift fft_ifftshift", result="first"),
    # complex numbers
    rows(Rule.KEEP, _COMPLEX, "complex polar", result="complex"),
    rows(Rule.KEEP, _COMPLEX, "view_as_complex", result="complex", view=True),
    rows(Rule.KEEP, _COMPLEX, "view_as_real real imag", result="real", view=True),
    rows(Rule.KEEP, _COMPLEX, "angle", result="float_real"),
    rows(Rule.KEEP, _COMPLEX, "conj neg_view conj_physical", result="first", view=True),
)  # fmt: skip
