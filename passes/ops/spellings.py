"""Spellings of ops that differ from their canonical names by more than an underscore; attributes of tensors and fields
of named results, which ``getattr`` reads off a value. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import torch

#: Methods and aten ops that cast to one fixed dtype.
FIXED_CASTS: Final = MappingProxyType(
    {
        "float": torch.float32,
        "half": torch.float16,
        "bfloat16": torch.bfloat16,
        "double": torch.float64,
        "cfloat": torch.complex64,
        "cdouble": torch.complex128,
        "chalf": torch.complex32,
        "int": torch.int32,
        "long": torch.int64,
        "short": torch.int16,
        "char": torch.int8,
        "byte": torch.uint8,
        "bool": torch.bool,
    }
)

#: Canonical name -> its other spellings (no trailing underscore).
_SPELLINGS: Final = {
    # torch's own synonyms
    "abs": "absolute",
    "acos": "arccos",
    "acosh": "arccosh",
    "asin": "arcsin",
    "asinh": "arcsinh",
    "atan": "arctan",
    "atan2": "arctan2",
    "atanh": "arctanh",
    "clamp": "clip",
    "cat": "concat concatenate",
    "div": "divide true_divide truediv",
    "mm": "dsmm spmm",
    "hspmm": "hsmm",
    "sspaddmm": "saddmm",
    "outer": "ger",
    "gt": "greater",
    "ge": "greater_equal",
    "lt": "less",
    "le": "less_equal",
    "ne": "not_equal",
    "mul": "multiply rmul",
    "neg": "negative",
    "sub": "subtract",
    "trunc": "fix",
    "movedim": "moveaxis",
    "transpose": "swapaxes swapdims",
    "vstack": "row_stack",
    "trapezoid": "trapz",
    "linalg_householder_product": "orgqr",
    "linalg_det": "det",
    "matmul": "linalg_matmul rmatmul",
    "matrix_exp": "linalg_matrix_exp",
    "cross": "linalg_cross",
    "diagonal": "linalg_diagonal",
    "matrix_power": "linalg_matrix_power",
    "inverse": "linalg_inv",
    "linalg_pinv": "pinverse",
    "slogdet": "linalg_slogdet",
    "vander": "linalg_vander",
    "linalg_multi_dot": "chain_matmul",
    # torch.special
    "sigmoid": "expit",
    "digamma": "psi",
    "lgamma": "gammaln",
    "igamma": "gammainc",
    "igammac": "gammaincc",
    "mvlgamma": "multigammaln",
    # torch.nn.functional and the kernels below it
    "interpolate": "upsample",
    "upsample_nearest2d": "upsample_nearest",
    "upsample_bilinear2d": "upsample_bilinear",
    "grid_sample": "grid_sampler cudnn_grid_sampler grid_sampler_2d grid_sampler_3d",
    "affine_grid": "cudnn_affine_grid_generator affine_grid_generator",
    "fold": "col2im",
    "logsigmoid": "log_sigmoid log_sigmoid_forward",
    "cross_entropy": "cross_entropy_loss",
    "nll_loss": "nll_loss_nd nll_loss2d nll_loss_forward nll_loss2d_forward",
    "multilabel_margin_loss": "multilabel_margin_loss_forward",
    "rrelu": "rrelu_with_noise",
    "pad": "constant_pad_nd pad_circular pad_enum reflection_pad1d reflection_pad2d reflection_pad3d "
    "replication_pad1d replication_pad2d replication_pad3d",
    "channel_shuffle": "native_channel_shuffle",
    "dropout": "native_dropout fused_dropout",
    "embedding_bag": "embedding_bag_forward_only",
    "layer_norm": "native_layer_norm",
    "rms_norm": "fused_rms_norm",
    "group_norm": "native_group_norm",
    "batch_norm": "native_batch_norm native_batch_norm_legit native_batch_norm_legit_functional "
    "native_batch_norm_legit_no_training batch_norm_with_update batch_norm_with_update_functional "
    "batch_norm_no_update cudnn_batch_norm miopen_batch_norm",
    "convolution": "mkldnn_convolution cudnn_convolution cudnn_convolution_transpose cudnn_convolution_relu "
    "cudnn_convolution_add_relu miopen_convolution miopen_convolution_transpose miopen_convolution_relu "
    "miopen_convolution_add_relu miopen_depthwise_convolution slow_conv3d slow_conv_dilated2d slow_conv_dilated3d "
    "slow_conv_transpose2d slow_conv_transpose3d conv_depthwise2d conv_depthwise3d thnn_conv2d",
    "linear": "mkldnn_linear",
    "lstm": "mkldnn_rnn_layer",
    "max_pool2d": "mkldnn_max_pool2d",
    "max_pool3d": "mkldnn_max_pool3d",
    "adaptive_avg_pool2d": "mkldnn_adaptive_avg_pool2d",
    "scaled_dot_product_attention": "scaled_dot_product_flash_attention scaled_dot_product_flash_attention_for_cpu "
    "scaled_dot_product_efficient_attention scaled_dot_product_cudnn_attention scaled_dot_product_attention_math "
    "scaled_dot_product_fused_attention_overrideable",
    # private twins (a leading underscore is dropped first) and copies of views
    "view": "unsafe_view view_element_type",
    "reshape": "reshape_alias reshape_copy",
    "chunk": "unsafe_chunk",
    "split": "unsafe_split",
    "split_with_sizes": "unsafe_split_with_sizes",
    "index": "unsafe_index unsafe_masked_index",
    "index_put": "unsafe_index_put index_put_impl",
    "softmax": "safe_softmax",
    "item": "local_scalar_dense",
    "clone": "lazy_clone",
    # other names of sizes and the like
    "size": "sym_size",
    "numel": "sym_numel nelement",
    "stride": "sym_stride",
    "storage_offset": "sym_storage_offset",
    "dim": "ndimension",
    # dunders and operators whose name is not the op's
    "rdiv": "rtruediv",
    "floor_divide": "floordiv rfloordiv",
    "remainder": "mod rmod",
    "add": "radd",
    "pow": "rpow",
    "bitwise_and": "and",
    "bitwise_or": "or ror",
    "bitwise_xor": "xor rxor",
    "bitwise_not": "invert inv",
    "bitwise_left_shift": "lshift rlshift",
    "bitwise_right_shift": "rshift rrshift",
    "positive": "pos",
    "not_": "not",
    # the target dtype is found by cast_target
    "to": f"{' '.join(FIXED_CASTS)} type type_as to_copy convert_element_type cpu cuda xpu ipu mtia",
}

#: Spelling -> canonical name, where they differ.
ALIASES: Final[Mapping[str, str]] = MappingProxyType(
    {spelling: name for name, spellings in _SPELLINGS.items() for spelling in spellings.split()}
)

#: Results of torch.return_types by name -> position: no name stands at two positions.
RESULT_FIELDS: Final[Mapping[str, int]] = MappingProxyType(
    {"values": 0, "indices": 1, "min": 0, "max": 1, "sign": 0, "logabsdet": 1, "mantissa": 0, "exponent": 1,
     "Q": 0, "R": 1, "U": 0, "S": 1, "V": 2, "Vh": 2, "P": 0, "L": 1, "eigenvalues": 0, "eigenvectors": 1,
     "solution": 0, "residuals": 1, "rank": 2, "singular_values": 3, "hist": 0, "bin_edges": 1, "result": 0,
     "info": 1, "LU": 0, "pivots": 1, "output": 0, "counts": 2}
)  # fmt: skip

#: Attributes of a tensor that are views of it.
VIEW_ATTRIBUTES: Final = frozenset({"T", "H", "mT", "mH", "data"})
#: All that are tensors of its dtype.
TENSOR_ATTRIBUTES: Final = VIEW_ATTRIBUTES | {"grad"}
#: Those that are no tensors.
NO_TENSOR_ATTRIBUTES: Final = frozenset(
    {"shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "is_cuda", "is_cpu", "is_sparse",
     "is_quantized", "is_meta", "is_nested", "itemsize", "nbytes", "names", "grad_fn", "_version", "is_mps", "is_xpu"}
)  # fmt: skip
