"""One canonical name for every spelling of an op.

``torch.add``, ``Tensor.add``, ``x + y``, ``x += y``, ``operator.iadd``, ``aten.add_.Tensor`` and ``x.__radd__(y)`` are
all ``Op("add", in_place)``. Names have no trailing underscore, no ``special_`` prefix, and follow the function
namespaces: ``linalg_norm``, ``fft_rfft``. Ops of other libraries keep their namespace: ``torchvision::nms``.

``inplace=True`` and ``out=`` are for ``canonicalize`` to resolve.
"""

from __future__ import annotations

import builtins
import functools
import operator
from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.fx import Node

from fxprec.passes.casts import CASTS
from fxprec.passes.ir import Op

__all__ = ["ALIASES", "canonical_name", "canonical_op", "cast_target", "dtype_argument"]

#: Spelling (no trailing underscore) -> canonical name, where they differ.
ALIASES: Final = MappingProxyType(
    {
        # torch's own synonyms
        "absolute": "abs",
        "arccos": "acos",
        "arccosh": "acosh",
        "arcsin": "asin",
        "arcsinh": "asinh",
        "arctan": "atan",
        "arctan2": "atan2",
        "arctanh": "atanh",
        "clip": "clamp",
        "concat": "cat",
        "concatenate": "cat",
        "divide": "div",
        "true_divide": "div",
        "dsmm": "mm",
        "spmm": "mm",
        "hsmm": "hspmm",
        "saddmm": "sspaddmm",
        "ger": "outer",
        "greater": "gt",
        "greater_equal": "ge",
        "less": "lt",
        "less_equal": "le",
        "not_equal": "ne",
        "multiply": "mul",
        "negative": "neg",
        "subtract": "sub",
        "fix": "trunc",
        "moveaxis": "movedim",
        "swapaxes": "transpose",
        "swapdims": "transpose",
        "row_stack": "vstack",
        "trapz": "trapezoid",
        "orgqr": "linalg_householder_product",
        "det": "linalg_det",
        "linalg_matmul": "matmul",
        "linalg_matrix_exp": "matrix_exp",
        "linalg_cross": "cross",
        "linalg_diagonal": "diagonal",
        "linalg_matrix_power": "matrix_power",
        "linalg_inv": "inverse",
        "pinverse": "linalg_pinv",
        "linalg_slogdet": "slogdet",
        "linalg_vander": "vander",
        "chain_matmul": "linalg_multi_dot",
        # torch.special
        "expit": "sigmoid",
        "psi": "digamma",
        "gammaln": "lgamma",
        "gammainc": "igamma",
        "gammaincc": "igammac",
        "multigammaln": "mvlgamma",
        # torch.nn.functional and the kernels below it
        "upsample": "interpolate",
        "upsample_nearest": "upsample_nearest2d",
        "upsample_bilinear": "upsample_bilinear2d",
        "grid_sampler": "grid_sample",
        "cudnn_grid_sampler": "grid_sample",
        "cudnn_affine_grid_generator": "affine_grid",
        "grid_sampler_2d": "grid_sample",
        "grid_sampler_3d": "grid_sample",
        "affine_grid_generator": "affine_grid",
        "col2im": "fold",
        "log_sigmoid": "logsigmoid",
        "log_sigmoid_forward": "logsigmoid",
        "cross_entropy_loss": "cross_entropy",
        "nll_loss_nd": "nll_loss",
        "nll_loss2d": "nll_loss",
        "nll_loss_forward": "nll_loss",
        "nll_loss2d_forward": "nll_loss",
        "multilabel_margin_loss_forward": "multilabel_margin_loss",
        "rrelu_with_noise": "rrelu",
        "constant_pad_nd": "pad",
        "pad_circular": "pad",
        "pad_enum": "pad",
        "reflection_pad1d": "pad",
        "reflection_pad2d": "pad",
        "reflection_pad3d": "pad",
        "replication_pad1d": "pad",
        "replication_pad2d": "pad",
        "replication_pad3d": "pad",
        "native_channel_shuffle": "channel_shuffle",
        "native_dropout": "dropout",
        "embedding_bag_forward_only": "embedding_bag",
        "native_layer_norm": "layer_norm",
        "fused_rms_norm": "rms_norm",
        "native_group_norm": "group_norm",
        "native_batch_norm": "batch_norm",
        "native_batch_norm_legit": "batch_norm",
        "native_batch_norm_legit_functional": "batch_norm",
        "native_batch_norm_legit_no_training": "batch_norm",
        "batch_norm_with_update": "batch_norm",
        "batch_norm_with_update_functional": "batch_norm",
        "batch_norm_no_update": "batch_norm",
        "cudnn_batch_norm": "batch_norm",
        "miopen_batch_norm": "batch_norm",
        "mkldnn_convolution": "convolution",
        "cudnn_convolution": "convolution",
        "cudnn_convolution_transpose": "convolution",
        "cudnn_convolution_relu": "convolution",
        "cudnn_convolution_add_relu": "convolution",
        "miopen_convolution": "convolution",
        "miopen_convolution_transpose": "convolution",
        "miopen_convolution_relu": "convolution",
        "miopen_convolution_add_relu": "convolution",
        "miopen_depthwise_convolution": "convolution",
        "slow_conv3d": "convolution",
        "slow_conv_dilated2d": "convolution",
        "slow_conv_dilated3d": "convolution",
        "slow_conv_transpose2d": "convolution",
        "slow_conv_transpose3d": "convolution",
        "conv_depthwise2d": "convolution",
        "conv_depthwise3d": "convolution",
        "thnn_conv2d": "convolution",
        "mkldnn_linear": "linear",
        "mkldnn_rnn_layer": "lstm",
        "mkldnn_max_pool2d": "max_pool2d",
        "mkldnn_max_pool3d": "max_pool3d",
        "mkldnn_adaptive_avg_pool2d": "adaptive_avg_pool2d",
        "scaled_dot_product_flash_attention": "scaled_dot_product_attention",
        "scaled_dot_product_flash_attention_for_cpu": "scaled_dot_product_attention",
        "scaled_dot_product_efficient_attention": "scaled_dot_product_attention",
        "scaled_dot_product_cudnn_attention": "scaled_dot_product_attention",
        "scaled_dot_product_attention_math": "scaled_dot_product_attention",
        "scaled_dot_product_fused_attention_overrideable": "scaled_dot_product_attention",
        "thnn_fused_lstm_cell": "lstm_cell",
        "thnn_fused_gru_cell": "gru_cell",
        # private twins (a leading underscore is dropped first) and copies of views
        "unsafe_view": "view",
        "reshape_alias": "reshape",
        "reshape_copy": "reshape",
        "unsafe_chunk": "chunk",
        "unsafe_split": "split",
        "unsafe_split_with_sizes": "split_with_sizes",
        "unsafe_index": "index",
        "unsafe_index_put": "index_put",
        "unsafe_masked_index": "index",
        "index_put_impl": "index_put",
        "fused_dropout": "dropout",
        "safe_softmax": "softmax",
        "local_scalar_dense": "item",
        "lazy_clone": "clone",
        # casts: the target dtype is found by cast_target
        **dict.fromkeys(("float", "half", "bfloat16", "double", "cfloat", "cdouble", "chalf"), "to"),
        **dict.fromkeys(("int", "long", "short", "char", "byte", "bool"), "to"),
        **dict.fromkeys(("type", "type_as", "to_copy", "convert_element_type"), "to"),
        **dict.fromkeys(("cpu", "cuda", "xpu", "ipu", "mtia"), "to"),
        # shorthand attributes that are also methods or aten ops
        "sym_size": "size",
        "sym_numel": "numel",
        "sym_stride": "stride",
        "sym_storage_offset": "storage_offset",
        "nelement": "numel",
        "ndimension": "dim",
        # dunders and operators whose name is not the op's
        "truediv": "div",
        "rtruediv": "rdiv",
        "floordiv": "floor_divide",
        "rfloordiv": "floor_divide",
        "mod": "remainder",
        "rmod": "remainder",
        "radd": "add",
        "rmul": "mul",
        "rmatmul": "matmul",
        "rpow": "pow",
        "and": "bitwise_and",
        "or": "bitwise_or",
        "ror": "bitwise_or",
        "xor": "bitwise_xor",
        "rxor": "bitwise_xor",
        "invert": "bitwise_not",
        "inv": "bitwise_not",
        "lshift": "bitwise_left_shift",
        "rlshift": "bitwise_left_shift",
        "rshift": "bitwise_right_shift",
        "rrshift": "bitwise_right_shift",
        "pos": "positive",
        "not": "not_",
    }
)

_CORE: Final[Any] = torch._C  # what is built in C++ has no stubs

#: Functions that several names reach with different meanings, or whose own name says nothing.
_EXPLICIT: Final[tuple[tuple[Any, str], ...]] = (
    (F.fold, "fold"),
    (F.unfold, "im2col"),
    (builtins.getattr, "getattr"),
    (operator.index, "item"),
    (torch.adaptive_max_pool1d, "adaptive_max_pool1d_with_indices"),
    (_CORE._nn.adaptive_max_pool2d, "adaptive_max_pool2d_with_indices"),
    (_CORE._nn.adaptive_max_pool3d, "adaptive_max_pool3d_with_indices"),
    (_CORE._nn.fractional_max_pool2d, "fractional_max_pool2d_with_indices"),
    (_CORE._nn.fractional_max_pool3d, "fractional_max_pool3d_with_indices"),
    (getattr(_CORE._autograd, "_get_data_attr", None), "detach"),  # dynamo's x.data
)

#: Operators that write their first argument: operator.iadd and x.__iadd__.
_AUGMENTED: Final = frozenset(
    {"iadd", "isub", "imul", "itruediv", "idiv", "ifloordiv", "imod", "ipow", "imatmul", "iand", "ior", "ixor",
     "ilshift", "irshift"}
)  # fmt: skip

#: Dunders whose bare name is a torch function of another meaning.
_DUNDERS: Final = MappingProxyType(
    dict.fromkeys(
        ("__bool__", "__nonzero__", "__int__", "__long__", "__index__", "__float__", "__complex__"),
        "item",
    )
    | {"__rand__": "bitwise_and"}
)

#: Methods and aten ops that cast to one fixed dtype.
_FIXED_CASTS: Final = MappingProxyType(
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

_OWN_NAMESPACES: Final = frozenset({"aten", "prims", "prim"})


def canonical_name(target: Any, node_op: str = "call_function") -> Op | None:
    """Canonical op of a ``call_function`` or ``call_method`` target; None for a callable that is nobody's op."""
    if node_op == "call_method":
        return _method_op(target)
    if node_op != "call_function":
        return None
    if isinstance(target, OpOverload | OpOverloadPacket):
        return _library_op(target)
    if isinstance(target, HigherOrderOperator):
        return Op(f"higher_order::{target.name()}")
    try:
        return _functions().get(target)
    except TypeError:  # an unhashable callable is nobody's op
        return None


def cast_target(node: Node) -> torch.dtype | None:
    """The dtype that a node named "to" casts to; None where it only moves, or where the call does not say."""
    if node.op == "call_method":
        fixed = _FIXED_CASTS.get(str(node.target))
    elif isinstance(node.target, OpOverload | OpOverloadPacket):
        fixed = None
    else:
        fixed = _FIXED_CASTS.get(getattr(node.target, "__name__", ""))
    if fixed is not None:
        return fixed
    return dtype_argument(node)


def dtype_argument(node: Node) -> torch.dtype | None:
    """The dtype among a call's arguments (``softmax(x, 0, dtype=torch.float32)``): its result has it, come what may."""
    for argument in (*node.args, *node.kwargs.values()):
        dtype = _as_dtype(argument)
        if dtype is not None:
            return dtype
    return None


def canonical_op(node: Node) -> Op | None:
    """``canonical_name`` of a call, told apart by its arguments where one callee does several things."""
    op = canonical_name(node.target, node.op)
    if op is None:
        return None
    if op.name == "interpolate":
        mode = node.args[3] if len(node.args) > 3 else node.kwargs.get("mode", "nearest")
        return Op(_INTERPOLATION.get(str(mode), op.name))
    if op.name == "div" and node.target is operator.truediv and not isinstance(node.args[0], Node):
        return Op("rdiv")
    return op


_INTERPOLATION: Final = MappingProxyType(
    {"nearest": "interpolate_nearest", "nearest-exact": "interpolate_nearest", "area": "interpolate_area"}
)


def _as_dtype(argument: object) -> torch.dtype | None:
    """``torch.half``, or what ``Tensor.type`` takes besides: ``"torch.HalfTensor"``, ``torch.HalfTensor``."""
    if isinstance(argument, torch.dtype):
        return argument
    if isinstance(argument, str) and argument.endswith("Tensor"):
        return _LEGACY_TYPES.get(argument.rpartition(".")[2])
    if isinstance(argument, type(torch.FloatTensor)):
        return getattr(argument, "dtype", None)
    return None


_LEGACY_TYPES: Final = MappingProxyType(
    {
        "FloatTensor": torch.float32,
        "HalfTensor": torch.float16,
        "BFloat16Tensor": torch.bfloat16,
        "DoubleTensor": torch.float64,
        "IntTensor": torch.int32,
        "LongTensor": torch.int64,
        "ShortTensor": torch.int16,
        "CharTensor": torch.int8,
        "ByteTensor": torch.uint8,
        "BoolTensor": torch.bool,
    }
)


@functools.cache
def _method_op(name: str) -> Op:
    if name in _DUNDERS:
        return Op(_DUNDERS[name])
    if name.startswith("__") and name.endswith("__"):
        bare = name[2:-2]
        if bare in _AUGMENTED:
            return Op(_alias(bare[1:]), in_place=True)
        return Op(_alias(bare), in_place=bare == "setitem")
    return _spelled(name)


def _spelled(name: str) -> Op:
    """A function's or method's name as it is written: a trailing underscore means in place."""
    in_place = name.endswith("_") and not name.endswith("__")
    return Op(_alias(name.removesuffix("_") if in_place else name), in_place)


def _alias(name: str) -> str:
    """Prefixes off, copies of views to their view, then the table of synonyms."""
    name = name.removeprefix("special_")
    name = name.lstrip("_")
    if name.endswith("_copy") and name not in ("index_copy", "to_copy", "narrow_copy"):
        name = name.removesuffix("_copy")
    return ALIASES.get(name, name)


@functools.cache
def _library_op(target: OpOverload | OpOverloadPacket) -> Op:
    qualified = target.name() if isinstance(target, OpOverload) else target._qualified_op_name
    namespace, _, name = qualified.partition("::")
    name = name.partition(".")[0]
    if namespace in _OWN_NAMESPACES:
        return _method_op(name) if name.startswith("__") else _spelled(name)
    in_place = name.endswith("_") and not name.endswith("__")
    return Op(f"{namespace}::{name.removesuffix('_') if in_place else name}", in_place)


@functools.cache
def _functions() -> dict[Any, Op]:
    """Every Python function and builtin of torch that is an op, by identity. Built at first use."""
    found: dict[Any, Op] = {}
    for function, op in (*_explicit(), *_operators(), *_namespaces()):
        found.setdefault(function, op)
    return found


def _explicit() -> Iterator[tuple[Callable[..., Any], Op]]:
    for function, name in _EXPLICIT:
        if function is not None:
            yield function, Op(name)
    for function in CASTS:
        yield function, Op("to")


def _operators() -> Iterator[tuple[Callable[..., Any], Op]]:
    for name in dir(operator):
        function = getattr(operator, name)
        if not callable(function) or isinstance(function, type):
            continue
        bare = name.strip("_")
        if bare in ("concat", "iconcat"):  # + of lists, never torch.concat
            yield function, Op("sequence_concat", in_place=bare == "iconcat")
        elif bare in _AUGMENTED:
            yield function, Op(_alias(bare[1:]), in_place=True)
        else:
            yield function, Op(_alias(bare), in_place=bare in ("setitem", "delitem"))


def _namespaces() -> Iterator[tuple[Callable[..., Any], Op]]:
    """Flat namespaces first: where a function is in several, torch.nn.functional's name for it wins."""
    for prefix, home in (
        ("", F),
        ("", _CORE._nn),
        ("linalg_", torch.linalg),
        ("fft_", torch.fft),
        ("", torch.special),
        ("", torch),
        ("", _CORE._VariableFunctions),
        ("", torch.Tensor),
    ):
        for name in dir(home):
            function = getattr(home, name, None)
            if not callable(function) or isinstance(function, type) or name in _NO_OPS:
                continue
            bare = name.removeprefix(prefix)
            if home is torch.Tensor or name.startswith("__"):
                yield function, _method_op(name)
            else:
                yield function, _spelled(prefix + bare)


#: Callables in those namespaces that only make other callables or are Python machinery.
_NO_OPS: Final = frozenset(
    {"boolean_dispatch", "handle_torch_function", "has_torch_function", "has_torch_function_unary", "Callable",
     "has_torch_function_variadic", "assert_int_or_pair", "compile", "classproperty", "__init__", "__new__",
     "__class__"}
)  # fmt: skip
