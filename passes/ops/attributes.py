"""Attributes of tensors, and fields of named results: what ``getattr`` reads off a value. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

#: Results of torch.return_types by name -> position.
RESULT_FIELDS: Final[Mapping[str, int]] = MappingProxyType(
    {"values": 0, "indices": 1, "min": 0, "max": 1, "sign": 0, "logabsdet": 1, "mantissa": 0, "exponent": 1,
     "Q": 0, "R": 1, "U": 0, "S": 1, "V": 2, "Vh": 2, "P": 0, "L": 1, "eigenvalues": 0, "eigenvectors": 1,
     "solution": 0, "residuals": 1, "rank": 2, "singular_values": 3, "hist": 0, "bin_edges": 1, "result": 0,
     "info": 1, "LU": 0, "pivots": 1, "output": 0, "counts": 2}
)  # fmt: skip

#: Attributes of tensors that are tensors of the same dtype, those that share its memory first.
VIEW_ATTRIBUTES: Final = frozenset({"T", "H", "mT", "mH", "data"})
TENSOR_ATTRIBUTES: Final = VIEW_ATTRIBUTES | {"grad"}
#: Those that are no tensors.
NO_TENSOR_ATTRIBUTES: Final = frozenset(
    {"shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "is_cuda", "is_cpu", "is_sparse",
     "is_quantized", "is_meta", "is_nested", "itemsize", "nbytes", "names", "grad_fn", "_version", "is_mps", "is_xpu"}
)  # fmt: skip
