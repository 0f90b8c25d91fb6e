"""Rows of the op table: what neural networks are made of. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from fxprec.passes.graph.annotations import Rule
from fxprec.passes.ops.rule import Epilogue, OpRule, Writes, facts, rows, table

_INPUT: Final = (0, "input")
#: Running statistics, in torch.nn.functional's order of arguments and in aten's. In each two of these are weight and
#: bias, which count as written, too, without need.
_STATISTICS: Final = (1, 2, 3, 4, "running_mean", "running_var")
#: Of a recurrent cell: what its products read.
_CELL: Final = (0, "input", 2, 3, 4, 5, "w_ih", "w_hh", "b_ih", "b_hh")
_TENSOR_CORES: Final = "matrix units multiply low inputs and accumulate in FP32"
_CONVOLUTION: Final = "a convolution is a matrix product: low inputs, FP32 accumulation"
_RECURRENT: Final = "matrix products dominate; the fused kernels accumulate in FP32"
_GATED: Final = (
    "low products around a state that its gates keep: the state, and so the results, are FP32, or it would drift"
)
_ATTENTION: Final = "matrix products around a softmax that the kernel computes in FP32"
_NORM: Final = "the variance sums squares: FP32 inside, running statistics and affine parameters stay FP32"
_SOFTMAX: Final = "exponentials and their sum overflow or vanish in low precision"
_LOSS: Final = "a loss sums many small terms and starts the backward pass"
_SMOOTH: Final = "bounded slope: follows its input without widening"
_PICKS: Final = "picks or copies values: exact in any dtype"
_DIFFERENCE: Final = "a difference of close values, squared and summed"
_AVERAGE: Final = "a short average that the kernel accumulates in FP32"
#: Part of guards.
_COUNTED: Final = "(y != -100).sum().clamp(min=1)  # the mean over targets that are all ignored is 0 / 0"

NN_ROWS: Final[Mapping[str, OpRule]] = table(
    # products
    rows(Rule.LOW, _TENSOR_CORES, "linear mm bmm addmm addbmm baddbmm addmm_activation grouped_mm", result="tensors"),
    rows(Rule.LOW, _TENSOR_CORES, "matmul linalg_multi_dot", result="tensors", squares="vectors"),
    rows(Rule.LOW, _TENSOR_CORES, "einsum", result="tensors", squares="subscripts"),
    rows(Rule.PROMOTE, "an einsum that sums nothing: the widest of its float inputs wins, inside the kernel",
         "einsum_product", result="tensors", native_promotion=True, squares="subscripts", form_of="einsum"),
    rows(Rule.FULL, "an einsum over indices of one operand: a long sum loses small terms", "einsum_sum",
         result="accumulate", contains_sum=True, autocast=Rule.FULL, form_of="einsum"),
    rows(Rule.FOLLOW, "an einsum that only permutes, or takes a diagonal: the same values in another shape",
         "einsum_view", result="first", view=True, form_of="einsum"),
    rows(Rule.LOW, _TENSOR_CORES, "linalg_vecdot", result="tensors", squares="factors"),
    rows(Rule.PROMOTE, "uses each element of the matrix once: casting it costs more than it saves (power iterations)",
         "mv addmv addr", result="tensors", autocast=Rule.LOW),
    rows(Rule.LOW, _CONVOLUTION, "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution "
         "conv_tbc", result="tensors"),
    rows(Rule.LOW, _RECURRENT, "lstm", result=("tensors",) * 3),
    rows(Rule.LOW, _RECURRENT, "rnn_tanh rnn_relu", result=("tensors",) * 2),
    rows(Rule.LOW, _RECURRENT, "rnn_tanh_cell rnn_relu_cell", result="tensors"),
    rows(Rule.LOW, _RECURRENT, "cudnn_rnn miopen_rnn thnn_fused_gru_cell thnn_fused_lstm_cell", result="unknown"),
    # 1 is the state, and stays FP32. Of a packed sequence it is the sizes of the batch: then the state, 2, is rounded
    # once, as it is given.
    rows(Rule.LOW, _GATED, "gru", ports=(0, "input", 2, 3, "params"), result=("tensors",) * 2),
    rows(Rule.LOW, _GATED, "gru_cell", ports=_CELL, result="tensors"),
    rows(Rule.LOW, _GATED, "lstm_cell", ports=_CELL, result=("tensors",) * 2),
    facts("gru gru_cell lstm_cell", wide=True, wide_state=True, saturates=True),
    rows(Rule.LOW, _ATTENTION, "scaled_dot_product_attention transformer_encoder_layer_fwd", result="tensors"),
    rows(Rule.LOW, _ATTENTION, "multi_head_attention_forward native_multi_head_attention", result=("tensors",) * 2),
    rows(Rule.LOW, "a select and a product: low as under autocast, its one weight is lowered with it", "prelu",
         result="tensors", cost="pointwise"),
    facts("linear mm bmm addmm addbmm baddbmm matmul linalg_multi_dot einsum mv addmv", layout="mixed"),
    facts("linear matmul mm bmm", cost="product"),
    facts("addmm addbmm baddbmm addmv addr", overwritable=True),
    facts("addmm addbmm baddbmm addmm_activation einsum", cost="product", factors=(1, 2)),
    facts("linear matmul mm bmm addmm baddbmm addmm_activation linalg_vecdot", depth="last"),
    facts("einsum_sum", reduces=True),
    facts("einsum", depth="subscripts"), facts("linalg_multi_dot", depth="chain"),
    facts("conv1d conv2d conv3d convolution", cost="convolution"),
    facts("conv_transpose1d conv_transpose2d conv_transpose3d", cost="transposed convolution"),
    facts("conv2d conv3d conv_transpose2d conv_transpose3d", any_format=True),
    facts("linear addmm", bias=0), facts("conv1d conv_transpose1d", bias=1), facts("conv2d conv_transpose2d", bias=2),
    facts("conv3d conv_transpose3d", bias=3),
    facts("scaled_dot_product_attention", cost="attention", masks=(3, "attn_mask")),
    facts("multi_head_attention_forward", masks=(14, 16, "key_padding_mask", "attn_mask")),
    facts("scaled_dot_product_attention transformer_encoder_layer_fwd multi_head_attention_forward "
          "native_multi_head_attention", random=True),  # dropout
    # norms
    rows(Rule.FULL, _NORM, "layer_norm group_norm", ports=_INPUT, result="first", mixed=frozenset({"cpu"})),
    rows(Rule.FULL, _NORM, "instance_norm", ports=_INPUT, result="first", mixed=frozenset({"cpu"}),
         writes=Writes(_STATISTICS, (5, "use_input_stats", True))),
    rows(Rule.FULL, _NORM, "batch_norm", ports=_INPUT, result="first", mixed=frozenset({"cpu", "cuda"}),
         writes=Writes(_STATISTICS, (5, "training", False))),
    # not mixed: a weight of another dtype makes rms_norm warn and fall back to separate kernels
    rows(Rule.FULL, _NORM, "rms_norm", ports=_INPUT, result="first"),
    rows(Rule.FULL, "sums squares over channels; its pooling has no low kernel on CPU", "local_response_norm",
           result="float"),
    rows(Rule.FULL, "divides by a norm: sums squares", "normalize weight_norm weight_norm_interface", result="first"),
    facts("linear mm bmm conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution "
          "scaled_dot_product_attention layer_norm group_norm instance_norm batch_norm rms_norm", rank="some"),
    facts("batch_norm instance_norm", fp32_ports=True),
    facts("batch_norm group_norm", any_format=True),
    facts("layer_norm group_norm batch_norm", special="native_norm"),
    facts("layer_norm rms_norm group_norm local_response_norm normalize weight_norm", autocast=Rule.FULL),
    *(facts(op, guard=f"F.{op}(x, x.shape[-1:], eps=1e-5)  # an eps above 0") for op in ("layer_norm", "rms_norm")),
    facts("group_norm", guard="F.group_norm(x, 1, eps=1e-5)  # an eps above 0"),
    facts("instance_norm", guard="F.instance_norm(x, eps=1e-5)  # an eps above 0"),
    facts("normalize", guard="F.normalize(x, dim=-1, eps=1e-3)  # an eps above 0"),
    # softmax and its kin
    rows(Rule.FULL, _SOFTMAX, "softmax softmin log_softmax gumbel_softmax", result="first"),
    rows(Rule.FULL, _SOFTMAX, "logsumexp", result="float"),
    rows(Rule.FULL, "the logarithm of a small probability", "logsigmoid", result="first"),
    rows(Rule.FULL, "log(1 + exp(x)) overflows in low precision", "softplus", result="first"),
    facts("gumbel_softmax", random=True),
    facts("logsumexp", contains_sum=True),
    facts("softplus softmax softmin log_softmax gumbel_softmax logsumexp", autocast=Rule.FULL),
    facts("softmax", guard="x.clamp(-1e4, 1e4).softmax(-1)  # inf - inf is no number"),
    facts("softmin", guard="F.softmin(x.clamp(-1e4, 1e4), -1)  # inf - inf is no number"),
    facts("log_softmax", guard="x.clamp(-1e4, 1e4).log_softmax(-1)  # inf - inf is no number"),
    facts("logsumexp", guard="x.clamp(min=-1e4).logsumexp(-1)  # a row of -inf alone has no gradient"),
    # losses
    # not native_promotion: before torch 2.13 only mse_loss's forward promotes; huber_loss's backward wants one dtype
    rows(Rule.FULL, _LOSS, "cross_entropy nll_loss gaussian_nll_loss kl_div mse_loss huber_loss cosine_embedding_loss "
         "hinge_embedding_loss margin_ranking_loss soft_margin_loss multilabel_soft_margin_loss "
         "binary_cross_entropy_with_logits"),
    rows(Rule.FULL, _LOSS, "ctc_loss multi_margin_loss multilabel_margin_loss", low_kernel=False),
    rows(Rule.FULL, _LOSS, "poisson_nll_loss", result="float"),
    rows(Rule.FULL, _LOSS, "smooth_l1_loss", native_promotion=True),
    rows(Rule.FULL, _LOSS, "l1_loss", result="float_real", native_promotion=True),
    rows(Rule.FULL, _LOSS, "triplet_margin_loss triplet_margin_with_distance_loss", result="float_real"),
    rows(Rule.FULL, "logarithms of probabilities near 0 and 1: torch.autocast refuses it, here it runs in FP32",
           "binary_cross_entropy"),
    rows(Rule.FOLLOW, "runs as a product and a loss (LOW, FULL); with `options=` its kernel takes the hidden states as "
           "they arrive, as under autocast", "linear_cross_entropy", ports=_INPUT, result="first"),
    rows(Rule.LOW, "a product, low as under autocast; its kernel sums the loss and the weight's gradient in FP32",
           "fxprec::linear_cross_entropy", ports=(0, "hidden"), result="unknown", wide=True),
    facts("cross_entropy nll_loss kl_div l1_loss mse_loss smooth_l1_loss huber_loss poisson_nll_loss "
          "gaussian_nll_loss cosine_embedding_loss hinge_embedding_loss margin_ranking_loss soft_margin_loss "
          "multi_margin_loss multilabel_margin_loss triplet_margin_loss triplet_margin_with_distance_loss "
          "binary_cross_entropy binary_cross_entropy_with_logits", autocast=Rule.FULL),
    facts("cross_entropy", guard=f'F.cross_entropy(x, y, reduction="sum") / {_COUNTED}'),
    facts("nll_loss", guard=f'F.nll_loss(x, y, reduction="sum") / {_COUNTED}'),
    facts("poisson_nll_loss", guard="F.poisson_nll_loss(x.clamp(max=10), y)  # it takes exp of its input"),
    facts("binary_cross_entropy", guard="F.binary_cross_entropy_with_logits(x, y)  # of what the sigmoid reads"),
    facts("binary_cross_entropy poisson_nll_loss", poles=(0, "input")),
    facts("gaussian_nll_loss", poles=(2, "var")),
    # activations
    rows(Rule.FOLLOW, _SMOOTH, "relu relu6 leaky_relu elu celu selu gelu silu mish glu hardtanh hardsigmoid hardswish "
         "hardshrink softshrink threshold", result="first"),
    rows(Rule.FOLLOW, _SMOOTH, "tanh sigmoid softsign tanhshrink", result="float"),
    rows(Rule.FULL, "no float16 kernel on CPU", "rrelu", result="first"),
    rows(Rule.FOLLOW, "zeroes and scales: nothing is accumulated",
           "dropout dropout1d dropout2d dropout3d alpha_dropout feature_dropout feature_alpha_dropout", result="first",
         view=True, random=True, numbers="aside"),
    facts("relu dropout dropout1d dropout2d dropout3d alpha_dropout feature_dropout", exact=True),
    facts("dropout alpha_dropout", itself=True),
    facts("tanh sigmoid relu6 hardtanh hardsigmoid softsign tanhshrink elu celu selu softmax softmin gumbel_softmax",
          saturates=True),
    facts("relu relu6 silu mish hardswish hardsigmoid selu", inplace=1),
    facts("leaky_relu elu celu", inplace=2),
    facts("threshold hardtanh dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout", inplace=3),
    facts("rrelu", inplace=4, random=True),
    facts("threshold hardtanh", numbers="compared"),
    facts("relu sigmoid tanh", overwritable=True),
    *(facts(op, epilogue=Epilogue(op)) for op in ("relu", "tanh", "sigmoid", "hardswish", "hardsigmoid")),
    facts("gelu", epilogue=Epilogue("gelu", algorithm=(1, "approximate", "none"))),
    facts("silu", epilogue=Epilogue("swish")),
    facts("leaky_relu", epilogue=Epilogue("leaky_relu", ((1, "negative_slope", 0.01),))),
    facts("hardtanh", epilogue=Epilogue("hardtanh", ((1, "min_val", -1.0), (2, "max_val", 1.0)))),
    facts("relu6", epilogue=Epilogue("hardtanh", numbers=(0.0, 6.0))),
    facts("relu relu6 leaky_relu elu celu selu gelu silu mish tanh sigmoid softsign tanhshrink hardtanh hardsigmoid "
          "hardswish hardshrink softshrink threshold dropout dropout1d dropout2d dropout3d", any_format=True),
    # pooling
    rows(Rule.FOLLOW, _PICKS, "max_pool1d max_pool2d max_pool3d adaptive_max_pool1d adaptive_max_pool2d "
         "adaptive_max_pool3d fractional_max_pool2d fractional_max_pool3d", result="first"),
    rows(Rule.FOLLOW, _PICKS, "max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices "
         "adaptive_max_pool1d_with_indices adaptive_max_pool2d_with_indices adaptive_max_pool3d_with_indices "
         "fractional_max_pool2d_with_indices fractional_max_pool3d_with_indices", result=("first", "int64")),
    rows(Rule.FOLLOW, _PICKS, "max_unpool1d max_unpool2d max_unpool3d", ports=_INPUT, result="first"),
    rows(Rule.FOLLOW, _AVERAGE, "avg_pool1d avg_pool2d adaptive_avg_pool1d adaptive_avg_pool2d", result="first"),
    rows(Rule.FULL, "no low kernel on CPU", "avg_pool3d", result="first", low_kernel=False),
    rows(Rule.FULL, "its low kernel on a CPU adds a window up in low, which stalls", "adaptive_avg_pool3d",
         result="first", low_kernel=False),
    rows(Rule.FULL, "raises to a power and sums", "lp_pool1d lp_pool2d lp_pool3d", result="first",
         autocast=Rule.FULL),
    facts("max_pool1d max_pool2d max_pool3d", special="pool", return_indices=6, exact=True),
    facts("adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d", special="pool", return_indices=2, exact=True),
    facts("fractional_max_pool2d fractional_max_pool3d", special="pool", return_indices=4),
    facts("fractional_max_pool2d fractional_max_pool3d fractional_max_pool2d_with_indices "
          "fractional_max_pool3d_with_indices", random=True),
    facts("max_pool2d max_pool3d adaptive_max_pool2d adaptive_max_pool3d avg_pool2d avg_pool3d adaptive_avg_pool2d "
          "adaptive_avg_pool3d", any_format=True),
    # resampling
    rows(Rule.FULL, "weights of neighbours are fractions: FP32 as under autocast",
         "interpolate upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d", result="first"),
    rows(Rule.FULL, "weights of neighbours are fractions: FP32 as under autocast",
         "upsample_bilinear2d_aa upsample_bicubic2d_aa upsample_lanczos2d_aa", result="first", low_kernel=False),
    rows(Rule.FOLLOW, "copies values: exact in any dtype (autocast widens it for nothing)",
           "interpolate_nearest upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_nearest_exact1d "
           "upsample_nearest_exact2d upsample_nearest_exact3d", result="first", autocast=Rule.FULL),
    rows(Rule.FULL, "of volumes it is an adaptive_avg_pool3d", "interpolate_area", result="first", low_kernel=False),
    rows(Rule.FULL, "coordinates: a low grid is off by whole pixels, and no kernel takes a low image with an FP32 one",
         "grid_sample grid_sampler_2d_cpu_fallback", result="first", low_kernel=False, autocast=Rule.PROMOTE),
    rows(Rule.FULL, "coordinates: a low grid is off by whole pixels", "affine_grid", result="first"),
    rows(Rule.FOLLOW, _PICKS, "pixel_shuffle pixel_unshuffle channel_shuffle im2col pad", result="first"),
    rows(Rule.FOLLOW, "adds the few values of overlapping blocks", "fold", result="first"),
    facts("interpolate_nearest upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_nearest_exact1d "
          "upsample_nearest_exact2d upsample_nearest_exact3d pixel_shuffle pixel_unshuffle channel_shuffle im2col pad",
          exact=True),
    facts("interpolate_nearest interpolate_area", numbers="aside"),
    facts("grid_sample pad im2col", backward_sums=frozenset({"cpu"})), facts("pad", pads=True),
    facts("max_pool1d max_pool2d max_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d",
          backward_sums=frozenset({"cpu", "cuda"})),  # of rounded values others are the largest, too
    facts("interpolate upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d "
          "upsample_bilinear2d_aa upsample_bicubic2d_aa", autocast=Rule.FULL),
    facts("interpolate upsample_bilinear2d interpolate_nearest upsample_nearest2d upsample_nearest3d pad",
          any_format=True),
    # rotary embedding
    rows(Rule.FOLLOW, "turns pairs by FP32 angles inside its kernel: follows its input", "rope", ports=(0, "x"),
         result="first"),
    # lookups
    rows(Rule.FOLLOW, "a lookup: takes its weight's dtype", "embedding",
         writes=Writes((1, "weight"), (3, "max_norm", False))),
    rows(Rule.PROMOTE, "its kernel wants weight and per-sample weights in one dtype", "embedding_bag",
         writes=Writes((1, "weight"), (4, "max_norm", False))),
    facts("embedding embedding_bag", rank="some", backward_sums=frozenset({"cpu"}), lookup=True,
          places=(0, 2, "input", "offsets")),
    rows(Rule.KEEP, "rescales the weight itself", "embedding_renorm", result="first"),
    rows(Rule.KEEP, "integers", "one_hot", result="int64"),
    rows(Rule.PROMOTE, "its kernel wants one dtype: the widest wins, as under autocast", "bilinear"),
    # distances
    rows(Rule.FULL, _DIFFERENCE, "pairwise_distance dist", result="float_real"),
    rows(Rule.FULL, _DIFFERENCE, "cdist pdist", result="float_real", low_kernel=False),
    rows(Rule.FULL, "sums squares and divides by norms", "cosine_similarity", result="float"),
    facts("cosine_similarity dist pdist cdist pairwise_distance", autocast=Rule.FULL),
    facts("cosine_similarity", guard="F.cosine_similarity(x, y, dim=-1, eps=1e-6)  # an eps above 0"),
    # quantized formats
    rows(Rule.KEEP, "simulates a quantized format in the original dtype",
           "fake_quantize_per_tensor_affine fake_quantize_per_channel_affine fused_moving_avg_obs_fake_quant",
           result="first"),
    rows(Rule.KEEP, "scales and bits of a quantized format",
         "scaled_mm scaled_grouped_mm quantize_per_tensor quantize_per_channel quantize_per_tensor_dynamic dequantize "
         "int_repr q_scale q_zero_point q_per_channel_scales q_per_channel_zero_points q_per_channel_axis",
         result="unknown"),
)  # fmt: skip
