"""The layers of torch.nn, by the ops that they run; and the callables of torch that are no ops at all. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

#: Class of torch.nn -> canonical names of the ops that its forward runs, the ones that decide first.
MODULE_OPS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "AdaptiveAvgPool1d": ("adaptive_avg_pool1d",),
        "AdaptiveAvgPool2d": ("adaptive_avg_pool2d",),
        "AdaptiveAvgPool3d": ("adaptive_avg_pool3d",),
        "AdaptiveLogSoftmaxWithLoss": ("linear", "log_softmax", "index_select", "gather", "mean"),
        "AdaptiveMaxPool1d": ("adaptive_max_pool1d",),
        "AdaptiveMaxPool2d": ("adaptive_max_pool2d",),
        "AdaptiveMaxPool3d": ("adaptive_max_pool3d",),
        "AlphaDropout": ("alpha_dropout",),
        "AvgPool1d": ("avg_pool1d",),
        "AvgPool2d": ("avg_pool2d",),
        "AvgPool3d": ("avg_pool3d",),
        "BCELoss": ("binary_cross_entropy",),
        "BCEWithLogitsLoss": ("binary_cross_entropy_with_logits",),
        **dict.fromkeys(("BatchNorm1d", "BatchNorm2d", "BatchNorm3d"), ("batch_norm",)),
        "Bilinear": ("bilinear",),
        "CELU": ("celu",),
        "CTCLoss": ("ctc_loss",),
        "ChannelShuffle": ("channel_shuffle",),
        **dict.fromkeys(("CircularPad1d", "CircularPad2d", "CircularPad3d"), ("pad",)),
        **dict.fromkeys(("ConstantPad1d", "ConstantPad2d", "ConstantPad3d"), ("pad",)),
        "Conv1d": ("conv1d",),
        "Conv2d": ("conv2d",),
        "Conv3d": ("conv3d",),
        "ConvTranspose1d": ("conv_transpose1d",),
        "ConvTranspose2d": ("conv_transpose2d",),
        "ConvTranspose3d": ("conv_transpose3d",),
        "CosineEmbeddingLoss": ("cosine_embedding_loss",),
        "CosineSimilarity": ("cosine_similarity",),
        "CrossEntropyLoss": ("cross_entropy",),
        "Dropout": ("dropout",),
        "Dropout1d": ("dropout1d",),
        "Dropout2d": ("dropout2d",),
        "Dropout3d": ("dropout3d",),
        "ELU": ("elu",),
        "Embedding": ("embedding",),
        "EmbeddingBag": ("embedding_bag",),
        "FeatureAlphaDropout": ("feature_alpha_dropout",),
        "Flatten": ("flatten",),
        "Fold": ("fold",),
        "FractionalMaxPool2d": ("fractional_max_pool2d",),
        "FractionalMaxPool3d": ("fractional_max_pool3d",),
        "GELU": ("gelu",),
        "GLU": ("glu",),
        "GRU": ("gru",),
        "GRUCell": ("gru_cell",),
        "GaussianNLLLoss": ("gaussian_nll_loss",),
        "GroupNorm": ("group_norm",),
        "Hardshrink": ("hardshrink",),
        "Hardsigmoid": ("hardsigmoid",),
        "Hardswish": ("hardswish",),
        "Hardtanh": ("hardtanh",),
        "HingeEmbeddingLoss": ("hinge_embedding_loss",),
        "HuberLoss": ("huber_loss",),
        **dict.fromkeys(("InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d"), ("instance_norm",)),
        "KLDivLoss": ("kl_div",),
        "L1Loss": ("l1_loss",),
        "LPPool1d": ("lp_pool1d",),
        "LPPool2d": ("lp_pool2d",),
        "LPPool3d": ("lp_pool3d",),
        "LSTM": ("lstm",),
        "LSTMCell": ("lstm_cell",),
        "LayerNorm": ("layer_norm",),
        **dict.fromkeys(("LazyBatchNorm1d", "LazyBatchNorm2d", "LazyBatchNorm3d"), ("batch_norm",)),
        "LazyConv1d": ("conv1d",),
        "LazyConv2d": ("conv2d",),
        "LazyConv3d": ("conv3d",),
        "LazyConvTranspose1d": ("conv_transpose1d",),
        "LazyConvTranspose2d": ("conv_transpose2d",),
        "LazyConvTranspose3d": ("conv_transpose3d",),
        **dict.fromkeys(("LazyInstanceNorm1d", "LazyInstanceNorm2d", "LazyInstanceNorm3d"), ("instance_norm",)),
        "LazyLinear": ("linear",),
        "LeakyReLU": ("leaky_relu",),
        "Linear": ("linear",),
        "LinearCrossEntropyLoss": ("linear", "cross_entropy", "linear_cross_entropy"),
        "LocalResponseNorm": ("local_response_norm",),
        "LogSigmoid": ("logsigmoid",),
        "LogSoftmax": ("log_softmax",),
        "MSELoss": ("mse_loss",),
        "MarginRankingLoss": ("margin_ranking_loss",),
        "MaxPool1d": ("max_pool1d",),
        "MaxPool2d": ("max_pool2d",),
        "MaxPool3d": ("max_pool3d",),
        "MaxUnpool1d": ("max_unpool1d",),
        "MaxUnpool2d": ("max_unpool2d",),
        "MaxUnpool3d": ("max_unpool3d",),
        "Mish": ("mish",),
        "MultiLabelMarginLoss": ("multilabel_margin_loss",),
        "MultiLabelSoftMarginLoss": ("multilabel_soft_margin_loss",),
        "MultiMarginLoss": ("multi_margin_loss",),
        "MultiheadAttention": ("multi_head_attention_forward",),
        "NLLLoss": ("nll_loss",),
        "NLLLoss2d": ("nll_loss",),
        "PReLU": ("prelu",),
        "PairwiseDistance": ("pairwise_distance",),
        "PixelShuffle": ("pixel_shuffle",),
        "PixelUnshuffle": ("pixel_unshuffle",),
        "PoissonNLLLoss": ("poisson_nll_loss",),
        "RMSNorm": ("rms_norm",),
        "RNN": ("rnn_tanh", "rnn_relu"),
        "RNNCell": ("rnn_tanh_cell", "rnn_relu_cell"),
        "RReLU": ("rrelu",),
        "ReLU": ("relu",),
        "ReLU6": ("hardtanh",),
        **dict.fromkeys(("ReflectionPad1d", "ReflectionPad2d", "ReflectionPad3d"), ("pad",)),
        **dict.fromkeys(("ReplicationPad1d", "ReplicationPad2d", "ReplicationPad3d"), ("pad",)),
        "SELU": ("selu",),
        "SiLU": ("silu",),
        "Sigmoid": ("sigmoid",),
        "SmoothL1Loss": ("smooth_l1_loss",),
        "SoftMarginLoss": ("soft_margin_loss",),
        "Softmax": ("softmax",),
        "Softmax2d": ("softmax",),
        "Softmin": ("softmin",),
        "Softplus": ("softplus",),
        "Softshrink": ("softshrink",),
        "Softsign": ("softsign",),
        "SyncBatchNorm": ("batch_norm",),
        "Tanh": ("tanh",),
        "Tanhshrink": ("tanhshrink",),
        "Threshold": ("threshold",),
        "TransformerDecoderLayer": ("multi_head_attention_forward", "linear", "layer_norm", "dropout", "add", "relu"),
        "TransformerEncoderLayer": ("multi_head_attention_forward", "linear", "layer_norm", "dropout", "add", "relu"),
        "TripletMarginLoss": ("triplet_margin_loss",),
        "TripletMarginWithDistanceLoss": ("triplet_margin_with_distance_loss",),
        "Unflatten": ("unflatten",),
        "Unfold": ("im2col",),
        "Upsample": ("interpolate_nearest", "interpolate"),
        "UpsamplingBilinear2d": ("interpolate",),
        "UpsamplingNearest2d": ("interpolate_nearest",),
        **dict.fromkeys(("ZeroPad1d", "ZeroPad2d", "ZeroPad3d"), ("pad",)),
    }
)

_HOLDS: Final = "holds other modules, tensors or settings; runs no op of its own"
_BASE: Final = "a base class without a forward"

MODULE_EXCEPTIONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        **dict.fromkeys(("Buffer", "Parameter", "UninitializedBuffer", "UninitializedParameter"), _HOLDS),
        **dict.fromkeys(("ModuleDict", "ModuleList", "ParameterDict", "ParameterList", "Sequential"), _HOLDS),
        **dict.fromkeys(("Transformer", "TransformerEncoder", "TransformerDecoder"), _HOLDS),
        "LinearCrossEntropyOptions": _HOLDS,
        **dict.fromkeys(("Module", "Container", "RNNBase", "RNNCellBase"), _BASE),
        "Identity": "gives its input back",
        "DataParallel": "a wrapper that replicates at each call: convert first, then use DistributedDataParallel",
        "CrossMapLRN2d": "a Python autograd function: kept in its original dtype",
    }
)

_TORCH_FUNCTION: Final = "Python machinery of overriding, no op"
_AUTOGRAD: Final = "autograd bookkeeping: changes no value"
_STORAGE: Final = "memory, devices and interchange with other libraries: no value is computed"
_PYTHON: Final = "Python's object protocol"
_FUNCTIONAL: Final = "makes or runs Python callables"
_REMOVED: Final = "removed from torch: raises when called"


def _because(reason: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), reason)


#: Spelled name -> why no row of the op table is about it.
DECIDED_EXCEPTIONS: Final[Mapping[str, str]] = MappingProxyType(
    _because(_TORCH_FUNCTION, "has_torch_function has_torch_function_unary has_torch_function_variadic "
             "handle_torch_function __torch_function__ __torch_dispatch__ boolean_dispatch assert_int_or_pair Optional "
             "Callable")
    | _because(_AUTOGRAD, "backward register_hook register_post_accumulate_grad_hook reinforce retain_grad")
    | _because(_STORAGE, "__array__ __array_wrap__ __dlpack__ __dlpack_device__ record_stream module_load")
    | _because(_PYTHON, "__class__ __deepcopy__ __delattr__ __dir__ __format__ __getattribute__ __getstate__ __hash__ "
               "__init__ __init_subclass__ __iter__ __new__ __reduce__ __reduce_ex__ __repr__ __reversed__ __setattr__ "
               "__setstate__ __sizeof__ __str__ __subclasshook__ __call__")
    | _because(_FUNCTIONAL, "call attrgetter itemgetter methodcaller")
    | _because(_REMOVED, "eig lstsq solve symeig")
)  # fmt: skip
