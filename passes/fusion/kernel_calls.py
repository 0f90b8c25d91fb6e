"""Replaces ops for which there is a kernel of ours by calls of it, with what follows them in the same kernel.

Before::

    %bn: bfloat16 = batch_norm(%conv, %mean, %var, %weight, %bias, training=True)
    %add: bfloat16 = add(%bn, %x)
    %relu: bfloat16 = relu(%add)
    %wide: float32 = cast(%conv_1, torch.float32)
    %group_norm: float32 = group_norm(%wide, 32, %weight, %bias)
    %silu: float32 = silu(%group_norm)
    %low: bfloat16 = cast(%silu, torch.bfloat16)
    %logits: float32 = cast(%linear, torch.float32)
    %loss: float32 = cross_entropy(%logits, %target)
    %pool: bfloat16 = max_pool2d(%relu, 2)

After::

    %relu: bfloat16 = batch_norm(%conv, %mean, %var, %weight, %bias, training=True, residual=%x, relu=True)
    %low: bfloat16 = group_norm(%conv_1, 32, %weight, %bias, silu=True)
    %loss: float32 = cross_entropy(%linear, %target)       # reads low logits, computes in FP32
    %pool: bfloat16 = max_pool2d(%relu, 2)                 # of channels_last; saves a byte a result

On a CPU, before and after::

    %attended: bfloat16 = scaled_dot_product_attention(%q, %k, %v, is_causal=True)
    %conv2d: bfloat16 = conv2d(%x, %w, %b, (1, 1), (3, 3), (1, 1), 40)
    %layer_norm: bfloat16 = layer_norm(%linear, (64,), %w, %b, 1e-05)

    %attended: bfloat16 = cpu_attention(%q, %k, %v, is_causal=True, way="products", from_flop=(19000000, 1100000))
    %conv2d: bfloat16 = depthwise_conv2d(%x, %w, %b, (1, 1), (3, 3), (1, 1), 40)
    %layer_norm: bfloat16 = layer_norm(%linear, (64,), %w, %b, 1e-05)      # that of fxprec.kernels.calls

All are calls of ``fxprec.kernels.calls``, which decide at run time whether a kernel serves, and run torch's ops
otherwise. Which of the norms, losses and poolings are called goes by what fused regions run as: all where they are
Triton's kernels; losses and max poolings where they are C++ loops; where there are no regions only a loss whose logits
were cast, since of many logits it makes no FP32 copies; and none where regions run as torch's ops.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

from fxprec.kernels.calls.attention import FromFlop, cpu_attention
from fxprec.kernels.calls.batch_norm import batch_norm
from fxprec.kernels.calls.cross_entropy import FEWEST_FOR_LOOP as FEWEST_LOGITS
from fxprec.kernels.calls.cross_entropy import cross_entropy
from fxprec.kernels.calls.depthwise_conv2d import depthwise_conv2d, has_no_kernel, pair
from fxprec.kernels.calls.group_norm import group_norm
from fxprec.kernels.calls.layer_norm import layer_norm
from fxprec.kernels.calls.max_pool2d import FEWEST_FOR_LOOP as FEWEST_POOLED
from fxprec.kernels.calls.max_pool2d import max_pool2d, numbers
from fxprec.kernels.calls.sizes import FEWEST
from fxprec.kernels.launch.operands import LOW_DTYPES
from fxprec.passes.context import Context, PassResult, bodies_first
from fxprec.passes.costs.device_costs import AttentionWay
from fxprec.passes.graph.annotations import Precision, argument, notes
from fxprec.passes.graph.casts import CASTS, cast
from fxprec.passes.graph.patterns import MATCH, Pattern, WholeGraph, rewrite_matches


@bodies_first
def call_kernels(gm: GraphModule, context: Context) -> PassResult:
    """Replace what a kernel of ours serves on this device, in the way that fused regions run."""
    kernels = context.regions or ("none" if context.native_mixed else "")
    patterns = [*_WHERE_REGIONS_ARE.get(kernels, ())]
    if context.device == "cpu":
        patterns += _ON_A_CPU
    return rewrite_matches(gm, context, patterns)


# -- ops that a kernel joins with what follows them -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Call:
    """A call to make in the place of some nodes.

    Attributes:
        function: of ``kernels.calls``.
        last: the last of the nodes, which becomes the call.
        arguments: by name, the input first.
        skipped_cast: the op's input, where that is a cast of ours that the call reads past: it goes if it has no other
            reader. None: the call reads the op's own input.
        low: whether the call puts out the dtype that it reads, so that the casts behind it go.
        fused: for the report: which kernel it is, and what it holds.
    """

    function: Callable[..., Any]
    last: Node
    arguments: Mapping[str, Any]
    fused: str
    skipped_cast: Node | None = None
    low: bool = False


def _joined(
    match: Callable[[Node, dict[str, Any], Node, WholeGraph], _Call | None], casts_only: bool = False
) -> Callable[[Node, WholeGraph], _Call | str | None]:
    """Make the check of an op: the tests that all share, then ``match(node, arguments, source, around)``.

    Args:
        match: ``source`` is the input before our cast, or the input itself.
        casts_only: only an op whose input is a cast of ours is a match.
    """

    def check(node: Node, around: WholeGraph) -> _Call | str | None:
        if notes(node).op.in_place or around.is_written(node):
            return None
        arguments = _arguments(node)
        given = source = (arguments or {}).get("input")
        if _is_inserted_cast(given) and given not in around.returned:
            source = given.args[0]  # type: ignore[union-attr]
        elif casts_only:
            return None
        if arguments is None:
            return f"{notes(node).op.name} with arguments that the kernel does not have"
        # The call stands where the last of its nodes did: nobody may write to what it reads in between.
        if any(map(around.is_written, _read(arguments))):
            return f"{notes(node).op.name} of what the graph writes to in place"
        return match(node, arguments, source, around)  # type: ignore[arg-type]

    return check


def _read(arguments: dict[str, Any]) -> list[Node]:
    """Return what an op reads, and what a cast of it read."""
    own = [each for name in ("input", "weight", "bias") if isinstance(each := arguments.get(name), Node)]
    return own + [source for each in own if _is_inserted_cast(each) for source in each.all_input_nodes]


def _arguments(node: Node) -> dict[str, Any] | None:
    """Name -> argument of the functional forms, without those that have no meaning; None of any other form."""
    form = _FORMS.get(node.target)
    if form is None:
        return None
    try:
        found = dict(inspect.signature(form).bind(*node.args, **node.kwargs).arguments)
    except TypeError:
        return None
    unusual = any(found.pop(name, None) is not None for name in ("size_average", "reduce"))
    return None if unusual else found


#: Function -> the one whose signature its calls have.
_FORMS: Final[dict[Any, Callable[..., Any]]] = {
    F.batch_norm: F.batch_norm,
    F.cross_entropy: F.cross_entropy,
    F.group_norm: F.group_norm,
    F.max_pool2d: F.max_pool2d_with_indices,
    torch.max_pool2d: F.max_pool2d_with_indices,
}


def _batch_norm(node: Node, arguments: dict[str, Any], source: Node, around: WholeGraph) -> _Call:
    """Match a batch norm with the sum and the relu behind it, where there are any."""
    output = notes(node).precision.output
    last, residual, relu = node, None, False
    user = _only_user(last, "add")
    if user is not None and not user.kwargs and len(user.args) == 2 and notes(user).precision.output is output:
        other = user.args[1] if user.args[0] is last else user.args[0]
        after = _only_user(user, "relu")
        if isinstance(other, Node) and other is not last and after is not None and not around.is_written(other):
            last, residual = user, other
    user = _only_user(last, "relu")
    if user is not None:
        last, relu = user, True
    own = {"x": arguments.pop("input"), **arguments, "residual": residual, "relu": relu}
    with_what = (", add and relu" if residual is not None else " and relu") if relu else ""
    return _Call(batch_norm, last, own, f"the kernel of batch_norm{with_what}{_ON_A_GPU}")


def _group_norm(node: Node, arguments: dict[str, Any], source: Node, around: WholeGraph) -> _Call | None:
    """Match a group norm between casts, with SiLU before the second; elsewhere its result is wanted in FP32."""
    given, silu = arguments.pop("input"), _only_user(node, "silu")
    last, low = silu or node, notes(source).precision.output
    if source is given or low not in LOW_DTYPES or not last.users:
        return None
    if not all(_is_inserted_cast(each) and each.args[1] is low for each in last.users):
        return None
    own = {"x": source, **arguments, "silu": silu is not None}
    fused = "the kernel of group_norm" + (" and silu" if silu is not None else "")
    return _Call(group_norm, last, own, fused, skipped_cast=given, low=True)


def _cross_entropy(node: Node, arguments: dict[str, Any], source: Node, around: WholeGraph) -> _Call | None:
    """Match a loss of the logits themselves, or of what they are a cast of.

    Not of float64 probabilities, or with a policy's own dtype: the kernel's loss is FP32.
    """
    logits = arguments["input"]
    if not isinstance(logits, Node) or notes(node).precision.output not in (None, torch.float32):
        return None
    own = arguments | {"input": source}
    skipped_cast = None if source is logits else logits
    if around.context.regions == "loops":
        why = f"cross_entropy by a compiled loop from {FEWEST_LOGITS[0]:,} logits on"
        return _Call(cross_entropy, node, own | {"compiled": True}, why, skipped_cast)
    return _Call(cross_entropy, node, own, "the kernel of cross_entropy", skipped_cast)


def _max_pool2d(node: Node, arguments: dict[str, Any], source: Node, around: WholeGraph) -> _Call | None:
    """Match a pooling of adjacent pixels that gives values alone, by windows that the kernel has a byte for."""
    dilation, ceil, indices = (arguments.pop(name, None) for name in ("dilation", "ceil_mode", "return_indices"))
    if ceil or indices or dilation not in (None, 1, (1, 1), [1, 1]):
        return None
    window = numbers(arguments["kernel_size"])
    if all(isinstance(each, int) for each in window):
        from fxprec.kernels.nn.max_pool import LARGEST  # which loads Triton

        if window[0] * window[-1] > LARGEST:
            return None
    if around.context.regions == "loops":
        why = f"max_pool2d by a compiled loop from {FEWEST_POOLED:,} elements on, channels last"
        return _Call(max_pool2d, node, arguments | {"compiled": True}, why)
    return _Call(max_pool2d, node, arguments, f"the kernel of max_pool2d{_ON_A_GPU}")


_ON_A_GPU: Final = f", on a GPU from {FEWEST:,} elements on"


def _make(first: Node, call: _Call) -> None:
    """Make the last node of a match the call, in the place of everything from the first on."""
    last, ((_, source), *rest) = call.last, call.arguments.items()
    # From the last node back to the first. A match has at most three (norm, add, relu), so that each node between reads
    # the first.
    chain = [last]
    while chain[-1] is not first:
        chain.append(next(s for s in chain[-1].all_input_nodes if s is first or first in s.all_input_nodes))
    decided, op = notes(first).precision, notes(first).op
    last.op, last.target, last.args, last.kwargs = "call_function", call.function, (source,), dict(rest)
    compute, output, why = decided.compute, decided.output, decided.why
    if last is not first:
        why = f"{why}; with what follows in one kernel"
        for node in chain[1:]:
            last.graph.erase_node(node)
    if call.skipped_cast is not None:
        reads = notes(source).precision.output
        compute = torch.float32
        if call.low:
            output, why = reads, f"{decided.why}; its kernel reads and writes {reads} and computes in FP32"
            # All its readers are casts of its FP32 result to low, which it gives by itself now.
            for each in [*last.users]:
                each.replace_all_uses_with(last)
                last.graph.erase_node(each)
        else:
            output, why = torch.float32, f"{decided.why}; its kernel reads {reads} and computes in FP32"
        if not call.skipped_cast.users:
            last.graph.erase_node(call.skipped_cast)
    # Where only the function changed, what ``decide`` wrote of the op holds still.
    if last is not first or call.skipped_cast is not None:
        notes(last).op = op
        notes(last).precision = Precision.arriving(compute, output, decided.rule, why)
    notes(last).fused = call.fused


def _is_inserted_cast(node: Any) -> bool:
    return isinstance(node, Node) and node.target is cast and notes(node).inserted


def _only_user(node: Node, name: str) -> Node | None:
    """Return the only reader of a value, if it is this op, out of place."""
    if len(node.users) != 1:
        return None
    (user,) = node.users
    op = notes(user).op
    return user if op.name == name and not op.in_place else None


_LOSS: Final = Pattern(("cross_entropy",), _joined(_cross_entropy), _make)
_POOL: Final = Pattern(("max_pool2d",), _joined(_max_pool2d), _make)
#: What fused regions run as -> what becomes a call; "none": there are no regions, and native mixed kernels serve.
_WHERE_REGIONS_ARE: Final[Mapping[str, tuple[Pattern, ...]]] = {
    "triton": (
        Pattern(("batch_norm",), _joined(_batch_norm), _make),
        Pattern(("group_norm",), _joined(_group_norm), _make),
        _LOSS,
        _POOL,
    ),
    "loops": (_LOSS, _POOL),
    "none": (Pattern(("cross_entropy",), _joined(_cross_entropy, casts_only=True), _make),),
}


# -- ops that are another kernel's on a CPU, one by one ---------------------------------------------------------------


def _layer_norm(node: Node, around: WholeGraph) -> object | None:
    """Match a low layer norm with a weight or a bias, in a graph that is differentiated."""
    has_parameters = argument(node, 2, "weight") is not None or argument(node, 3, "bias") is not None
    low = node.target is F.layer_norm and notes(node).precision.output is torch.bfloat16
    return MATCH if low and has_parameters and around.records else None


def _call_layer_norm(node: Node, _: object) -> None:
    node.target = layer_norm
    _say(node, "of more than 64 rows its backward adds up the gradients of weight and bias in FP32")


def _depthwise(node: Node, around: WholeGraph) -> object | None:
    """Match a convolution in bfloat16 that may gain, by the weight's sizes if they are known."""
    context, low = around.context, notes(node).precision.compute
    if not context.native_mixed or node.op != "call_function" or not low is context.low is torch.bfloat16:
        return None
    given = [argument(node, 3 + i, name, default) for i, (name, default) in enumerate(_OF_A_CONVOLUTION.items())]
    if not all(map(_are_numbers, given)) or given[-1] == 1:
        return None
    sizes, (stride, _, dilation, _) = weight_sizes(node), given
    return MATCH if sizes is None or has_no_kernel(sizes, pair(stride), pair(dilation)) else None


def _call_depthwise(node: Node, _: object) -> None:
    node.target = depthwise_conv2d
    _say(node, "where it is depthwise, with filters above 3 x 3 or steps, its backward runs in FP32")


_OF_A_CONVOLUTION: Final = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}


def _are_numbers(size: object) -> bool:
    """Return whether a size is neither a word, such as "same", nor computed."""
    values = size if isinstance(size, tuple | list) else (size,)
    return 0 < len(values) <= 2 and all(isinstance(each, int) for each in values)


def weight_sizes(node: Node) -> tuple[int, ...] | None:
    """Return the sizes of the weight of a linear or convolution, below its cast; None where nobody knows."""
    weight = argument(node, 1, "weight")
    if isinstance(weight, Node) and weight.target in CASTS:
        weight = weight.args[0]
    return notes(weight).sizes if isinstance(weight, Node) else None


def _attention(node: Node, around: WholeGraph) -> tuple[AttentionWay, FromFlop] | None:
    """Match low attention, where another way than torch's kernel is faster from some size on.

    The numbers are where the curves of the device's costs cross.
    """
    context = around.context
    torchs = node.op == "call_function" and node.target is F.scaled_dot_product_attention
    if context.attention is None or not torchs or notes(node).precision.compute is not context.low:
        return None
    way, *limits = context.attention
    alone, trained = (None if each == inf else round(each) for each in limits)
    # A forward alone under a mask: torch's takes less time than a loop with the mask that it adds, at every size.
    masked = argument(node, 3, "attn_mask") is not None
    return way, (None if masked and way == "compiled" else alone, trained)


def _call_attention(node: Node, found: tuple[AttentionWay, FromFlop]) -> None:
    way, (alone, trained) = found
    node.target = cpu_attention
    node.kwargs = {**node.kwargs, "way": way, "from_flop": (alone, trained)}
    _say(node, f"{_WAYS[way]} from {_flop(trained)} on, without a backward from {_flop(alone)}")
    notes(node).fused = f"attention by {_WAYS[way]}"


_WAYS: Final[dict[AttentionWay, str]] = {
    "products": "plain products",
    "recomputed": "torch's forward and a backward of plain products",
    "compiled": "a compiled loop",
}


def _flop(limit: int | None) -> str:
    return "no size" if limit is None else f"{limit / 1e6:.3g} MFLOP"


def _say(node: Node, why: str) -> None:
    """Add a reason to those of a node's precision."""
    decided = notes(node).precision
    notes(node).precision = decided._replace(why=f"{decided.why}; {why}")


_ON_A_CPU: Final = (
    Pattern(("scaled_dot_product_attention",), _attention, _call_attention),
    Pattern(("conv2d",), _depthwise, _call_depthwise),
    Pattern(("layer_norm",), _layer_norm, _call_layer_norm),
)
