"""Write docs/precision.md from the op table: ``python docs/generate.py`` (``--check`` only compares)."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from fxprec.passes.graph.annotations import Rule
from fxprec.passes.ops.table import OP_TABLE, OpRule

PAGE: Final = Path(__file__).with_name("precision.md")

_HEAD: Final = """\
# Which ops and layers stay in FP32, and why

Generated from the op table by `python docs/generate.py`; do not edit.

This is what level O1 does by default. *Low* is float16 or bfloat16, as chosen at `convert`. An op has one name here
for all its spellings: `linear` is `nn.Linear`, `F.linear`, and `aten.linear`; `add` is `x + y`, `x += y`, `torch.add`
and `Tensor.add_`. The rules agree with the lists of `torch.autocast` on CUDA wherever those say something; where they
are silent, the reason below is ours. A policy can change any of it: `Policy.preset("O1").override(ops={"sum": "low"})`.

Where an op stands matters, too. Positions and timesteps (what is made of integers and constants alone) stay FP32 until
a periodic function or a weight takes them. A sigmoid, softmax or tanh stays FP32 on its way to a logarithm, a division
or the like, in which a rounded 1 would be infinite, and where the model returns it. A product that sums over one value
only promotes as `mul` does. The report says so of every op.

An op that is not listed (one of your own, say) is kept: every float argument arrives in the dtype it would have had
without fxprec. int, bool, complex and float64 tensors are never touched.

| rule | what it means | ops |
|---|---|---|
"""

_MEANING: Final = {
    Rule.FULL: "computes in FP32",
    Rule.LOW: "computes in the low dtype",
    Rule.FOLLOW: "computes in the dtype of its input",
    Rule.PROMOTE: "computes in the widest dtype among its inputs",
    Rule.KEEP: "gets its inputs in their original dtype",
}

_TITLE: Final = {
    Rule.FULL: "Stay in FP32",
    Rule.LOW: "Lowered",
    Rule.FOLLOW: "Follow their input",
    Rule.PROMOTE: "Take the widest of their inputs",
    Rule.KEEP: "Kept as they were",
}

#: Which calls are squares, by ``OpRule.squares``.
_SQUARES: Final = {
    "always": "",
    "factors": " of a value with itself",
    "vectors": " of a vector with itself",
    "dimensions": " of a value with itself over all its dimensions",
    "subscripts": " of a value with itself by the same subscripts",
}

_OWN: Final = {name.replace("_", ""): name for name in OP_TABLE}

#: Class of torch.nn -> canonical names of the ops that its forward runs, the ones that decide first: the op of its own
#: name, or others.
MODULE_OPS: Final[dict[str, tuple[str, ...]]] = {
    layer: (_OWN[layer.lower()],)
    for layer in (
        "AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d AdaptiveMaxPool1d AdaptiveMaxPool2d AdaptiveMaxPool3d "
        "AlphaDropout AvgPool1d AvgPool2d AvgPool3d Bilinear CELU CTCLoss ChannelShuffle Conv1d Conv2d Conv3d "
        "ConvTranspose1d ConvTranspose2d ConvTranspose3d CosineEmbeddingLoss CosineSimilarity Dropout Dropout1d "
        "Dropout2d Dropout3d ELU Embedding EmbeddingBag FeatureAlphaDropout Flatten Fold FractionalMaxPool2d "
        "FractionalMaxPool3d GELU GLU GRU GRUCell GaussianNLLLoss GroupNorm Hardshrink Hardsigmoid Hardswish Hardtanh "
        "HingeEmbeddingLoss HuberLoss L1Loss LPPool1d LPPool2d LPPool3d LSTM LSTMCell LayerNorm LeakyReLU Linear "
        "LocalResponseNorm LogSigmoid LogSoftmax MSELoss MarginRankingLoss MaxPool1d MaxPool2d MaxPool3d MaxUnpool1d "
        "MaxUnpool2d MaxUnpool3d Mish MultiLabelMarginLoss MultiLabelSoftMarginLoss MultiMarginLoss NLLLoss PReLU "
        "PairwiseDistance PixelShuffle PixelUnshuffle PoissonNLLLoss RMSNorm RReLU ReLU SELU SiLU Sigmoid SmoothL1Loss "
        "SoftMarginLoss Softmax Softmin Softplus Softshrink Softsign Tanh Tanhshrink Threshold TripletMarginLoss "
        "TripletMarginWithDistanceLoss Unflatten"
    ).split()
} | {
    layer: tuple(ops.split())
    for ops, layers in {
        "linear log_softmax index_select gather mean": "AdaptiveLogSoftmaxWithLoss",
        "binary_cross_entropy": "BCELoss",
        "binary_cross_entropy_with_logits": "BCEWithLogitsLoss",
        "batch_norm": "BatchNorm1d BatchNorm2d BatchNorm3d LazyBatchNorm1d LazyBatchNorm2d LazyBatchNorm3d "
        "SyncBatchNorm",
        "pad": "CircularPad1d CircularPad2d CircularPad3d ConstantPad1d ConstantPad2d ConstantPad3d ReflectionPad1d "
        "ReflectionPad2d ReflectionPad3d ReplicationPad1d ReplicationPad2d ReplicationPad3d ZeroPad1d ZeroPad2d "
        "ZeroPad3d",
        "cross_entropy": "CrossEntropyLoss",
        "instance_norm": "InstanceNorm1d InstanceNorm2d InstanceNorm3d LazyInstanceNorm1d LazyInstanceNorm2d "
        "LazyInstanceNorm3d",
        "kl_div": "KLDivLoss",
        "conv1d": "LazyConv1d",
        "conv2d": "LazyConv2d",
        "conv3d": "LazyConv3d",
        "conv_transpose1d": "LazyConvTranspose1d",
        "conv_transpose2d": "LazyConvTranspose2d",
        "conv_transpose3d": "LazyConvTranspose3d",
        "linear": "LazyLinear",
        "linear cross_entropy linear_cross_entropy": "LinearCrossEntropyLoss",
        "multi_head_attention_forward": "MultiheadAttention",
        "nll_loss": "NLLLoss2d",
        "rnn_tanh rnn_relu": "RNN",
        "rnn_tanh_cell rnn_relu_cell": "RNNCell",
        "hardtanh": "ReLU6",
        "softmax": "Softmax2d",
        "multi_head_attention_forward linear layer_norm dropout add relu": "TransformerDecoderLayer "
        "TransformerEncoderLayer",
        "im2col": "Unfold",
        "interpolate_nearest interpolate": "Upsample",
        "interpolate": "UpsamplingBilinear2d",
        "interpolate_nearest": "UpsamplingNearest2d",
    }.items()
    for layer in layers.split()
}

_HOLDS: Final = "holds other modules, tensors or settings; runs no op of its own"
_BASE: Final = "a base class without a forward"

MODULE_EXCEPTIONS: Final[dict[str, str]] = {
    **dict.fromkeys(("Buffer", "Parameter", "UninitializedBuffer", "UninitializedParameter"), _HOLDS),
    **dict.fromkeys(("ModuleDict", "ModuleList", "ParameterDict", "ParameterList", "Sequential"), _HOLDS),
    **dict.fromkeys(("Transformer", "TransformerEncoder", "TransformerDecoder"), _HOLDS),
    "LinearCrossEntropyOptions": _HOLDS,
    **dict.fromkeys(("Module", "Container", "RNNBase", "RNNCellBase"), _BASE),
    "Identity": "gives its input back",
    "DataParallel": "a wrapper that replicates at each call: convert first, then use DistributedDataParallel",
    "CrossMapLRN2d": "a Python autograd function: kept in its original dtype",
}


def page() -> str:
    """The whole text of docs/precision.md."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    counts = {rule: sum(row.rule is rule for row in OP_TABLE.values()) for rule in _MEANING}
    yield _HEAD + "\n".join(f"| {rule.upper()} | {_MEANING[rule]} | {counts[rule]} |" for rule in _MEANING)
    for rule in (Rule.FULL, Rule.LOW):
        yield from _section(rule)
    yield from _layers()
    for rule in (Rule.FOLLOW, Rule.PROMOTE, Rule.KEEP):
        yield from _section(rule)


def _section(rule: Rule) -> Iterator[str]:
    yield f"\n## {_TITLE[rule]} ({rule.upper()})\n"
    yield "| ops | why |"
    yield "|---|---|"
    groups: dict[str, list[str]] = {}
    for name, row in OP_TABLE.items():
        if row.rule is rule:
            groups.setdefault(row.why + _notes(row), []).append(name)
    for why, names in groups.items():
        yield f"| {_code(names)} | {why} |"


def _notes(row: OpRule) -> str:
    notes = []
    if row.mixed:
        where = " and ".join({"cpu": "CPU", "cuda": "CUDA"}[device] for device in sorted(row.mixed))
        notes.append(f"on {where} its kernel reads and writes low and computes in FP32 inside")
    if row.dtype_keyword:
        notes.append("reads low and accumulates in FP32 by `dtype=`")
    if row.squares is not None and row.rule is not Rule.FULL:
        notes.append(f"in float16 FULL{_SQUARES[row.squares]}: squares leave its range from 256 on")
    if row.autocast not in (None, row.rule):
        notes.append(f'{row.autocast.upper()} with `placement="autocast"`')
    return "".join(f". {note[0].upper()}{note[1:]}" for note in notes)


def _layers() -> Iterator[str]:
    yield "\n## Layers of torch.nn\n"
    yield "A layer is what its ops are.\n"
    yield "| layer | its ops | rule |"
    yield "|---|---|---|"
    groups: dict[tuple[str, ...], list[str]] = {}
    for layer, ops in sorted(MODULE_OPS.items()):
        groups.setdefault(ops, []).append(layer)
    for ops, layers in sorted(groups.items(), key=lambda group: (list(_MEANING).index(_rules(group[0])[0]), group[1])):
        yield f"| {_code(layers)} | {_code(ops)} | {', '.join(rule.upper() for rule in _rules(ops))} |"
    yield "\nThe others run no op of their own:\n"
    yield "| layer | |"
    yield "|---|---|"
    reasons: dict[str, list[str]] = {}
    for layer, reason in MODULE_EXCEPTIONS.items():
        reasons.setdefault(reason, []).append(layer)
    for reason, layers in reasons.items():
        yield f"| {_code(layers)} | {reason} |"


def _rules(ops: Iterable[str]) -> list[Rule]:
    return list(dict.fromkeys(OP_TABLE[op].rule for op in ops))


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def main(arguments: list[str]) -> int:
    """Write the page, or with ``--check`` tell whether it is up to date."""
    text = page()
    if "--check" not in arguments:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    if PAGE.read_text(encoding="utf-8") == text:
        return 0
    print(f"{PAGE} is out of date: run python docs/generate.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
