"""Rows of the op table: matrix decompositions, Fourier transforms and complex numbers. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from fxprec.passes.graph.annotations import Rule
from fxprec.passes.ops.rule import OpRule, facts, rows, table

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
