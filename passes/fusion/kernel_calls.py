"""Ops for which there is a hand-written kernel become calls of it, with what follows them in the same kernel.

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

All are calls of ``fxprec.kernels``, which decide at run time whether a kernel serves, and run torch's ops otherwise.
Batch norms and poolings are torch's on a GPU, too, where they are small: a step of many small ones waits for its host.
Without regions (on a CPU) only a loss whose logits were cast becomes a call: of many logits it makes no FP32 copies.
With compiled loops losses and max poolings do, each from a size on.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node, Proxy

from fxprec.kernels.launch.observers import COMPILER, DUAL, SCRIPT, TRANSFORM, watcher
from fxprec.kernels.launch.operands import LOW_DTYPES, suits_loops
from fxprec.passes.context import Context, PassResult, bodies_first
from fxprec.passes.fusion.worth import FEWEST, is_large
from fxprec.passes.graph.annotations import CASTABLE, Precision, notes
from fxprec.passes.graph.casts import cast
from fxprec.passes.graph.grad_mode import returned_with_gradient
from fxprec.passes.graph.retrace import is_served, leaf
from fxprec.passes.ops.aliases import alias_roots, written_roots

#: (logits, classes next to each other) on a CPU: from here on the passes over memory weigh more than the calls. Of
#: fewer, or of the pixels of an image, torch's loss is faster.
_SLICES: Final = (1 << 20, 512)
_LOOP: Final = (1 << 18, 128)
_LOOP_OF_LOSS: Final = f"cross_entropy by a compiled loop from {_LOOP[0]:,} logits on"
#: Elements, with channels last, from which a loop's fewer bytes weigh more than its call.
_LOOP_OF_POOL: Final = 1 << 17
_POOLED: Final = f"max_pool2d by a compiled loop from {_LOOP_OF_POOL:,} elements on, channels last"
_FROM: Final = f", on a GPU from {FEWEST:,} elements on"


def batch_norm(
    x: Any, running_mean: Any, running_var: Any, weight: Any = None, bias: Any = None, training: bool = False,
    momentum: float = 0.1, eps: float = 1e-5, residual: Any = None, relu: bool = False,
) -> Any:  # fmt: skip
    """``relu?(F.batch_norm(...) [+ residual])``: one kernel after the statistics, where it serves and gains."""
    options = {"training": training, "momentum": momentum, "eps": eps, "residual": residual, "relu": relu}
    if isinstance(x, Proxy):
        return leaf(batch_norm, x, running_mean, running_var, weight, bias, **options)
    fits = residual is None or (residual.shape == x.shape and residual.dtype in CASTABLE)
    joined = relu or residual is not None  # alone, torch's kernels of planes are as good
    served = fits and isinstance(momentum, int | float) and _is_taken(x)
    if served and is_large(x) and (joined or _is_channels_last(x)):
        from fxprec.kernels.nn.batch_norm import batch_norm as kernel  # which loads Triton

        return kernel(x, running_mean, running_var, weight, bias, **options)
    y = F.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)
    y = y if residual is None else y + residual
    return F.relu(y) if relu else y


def group_norm(
    x: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, silu: bool = False
) -> Any:  # fmt: skip
    """``F.group_norm``, or ``F.silu`` of it, in FP32, of low x and rounded once to its dtype."""
    if isinstance(x, Proxy):
        return leaf(group_norm, x, num_groups, weight, bias, eps, silu)
    if _is_taken(x):
        from fxprec.kernels.nn.group_norm import group_norm as kernel  # which loads Triton

        return kernel(x, num_groups, weight, bias, eps, silu=silu)
    y = F.group_norm(x.float(), num_groups, weight, bias, eps)
    return (F.silu(y) if silu else y).to(x.dtype)


def max_pool2d(input: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, compiled: bool = False) -> Any:
    """``F.max_pool2d``: the kernel's of large images, channels last; ``compiled``: on a CPU as a C++ loop."""
    if isinstance(input, Proxy):
        return leaf(max_pool2d, input, kernel_size, stride, padding, compiled)
    compiled = compiled and _is_wide(input)
    if (compiled or (_is_taken(input) and is_large(input))) and _is_channels_last(input):
        from fxprec.kernels.nn.max_pool import max_pool2d as kernel  # which loads Triton
        from fxprec.kernels.nn.max_pool import why_not

        sizes = kernel_size, kernel_size if stride is None or stride == [] else stride, padding
        window = [(each[0], each[-1]) for each in map(_numbers, sizes) if len(each) in (1, 2)]
        if len(window) == len(sizes) and not why_not(input, *window):
            return kernel(input, *window, compiled=compiled)
    return F.max_pool2d(input, kernel_size, stride, padding)


def _numbers(size: Any) -> tuple[int, ...]:
    """Return a size of two dimensions as a pair: torch takes one number for both."""
    return tuple(size) if isinstance(size, tuple | list) else (size,)


def cross_entropy(
    input: Any, target: Any, weight: Any = None, ignore_index: int = -100, reduction: str = "mean",
    label_smoothing: float = 0.0, compiled: bool = False,
) -> Any:  # fmt: skip
    """``F.cross_entropy``, in FP32 of FP32, float16 or bfloat16 logits, which need no cast before; float64 stays.

    ``compiled``: on a CPU of many logits as a C++ loop.
    """
    options = {"ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing}
    if isinstance(input, Proxy):
        return leaf(cross_entropy, input, target, weight, **options, compiled=compiled)
    wide = target.dtype is torch.float64 or (weight is not None and weight.dtype is torch.float64)
    labels = weight is None and not target.is_floating_point()
    compiled = compiled and labels and _is_long(input, *_LOOP) and suits_loops(input)
    sliced = labels and label_smoothing == 0 and input.dtype in LOW_DTYPES and _is_long(input, *_SLICES)  # else slower
    served = compiled or sliced or is_served(input)
    if served and not wide and (weight is None or not weight.requires_grad):
        from fxprec.kernels.nn.cross_entropy import cross_entropy as kernel  # which loads Triton

        return kernel(input, target, weight, **options, compiled=compiled)
    return F.cross_entropy(input.float() if input.dtype in LOW_DTYPES else input, target, weight, **options)


def _is_taken(x: Any) -> bool:
    """Return whether a kernel takes it: not under a transform or a compiler, since our ops have no rule for vmap."""
    return watcher(COMPILER, SCRIPT, TRANSFORM, DUAL) is None and is_served(x)


def _is_channels_last(x: Any) -> bool:
    return x.dim() == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)


def _is_wide(x: Any) -> bool:
    """Return whether a loop serves a max pooling on a CPU; not under a transform or compiler, as in ``_is_long``."""
    return watcher(COMPILER, SCRIPT, TRANSFORM, DUAL) is None and x.numel() >= _LOOP_OF_POOL and suits_loops(x)


def _is_long(logits: Any, many: int, classes: int) -> bool:
    """Return whether logits on a CPU are many, in long rows, so that torch's loss is not the fastest.

    Not where somebody looks into the ops: vmap and forward mode have no rule for our own, a tracer would unroll them.
    """
    return (
        watcher(COMPILER, SCRIPT, TRANSFORM, DUAL) is None
        and logits.device.type == "cpu"
        and logits.dtype in CASTABLE
        and logits.numel() >= many
        and logits.dim() <= 2
        and logits.shape[-1] >= classes
    )


@bodies_first
def call_kernels(gm: GraphModule, context: Context) -> PassResult:
    """Replace batch norms (with a residual sum and relu), group norms (with silu), cross entropies, max poolings.

    What runs goes by what fused regions run as: Triton's kernels; C++ loops; and where there are no regions torch's
    ops, where only losses gain, of logits that were cast. A call reads what is returned with a gradient as it is
    returned, never what that was cast from.
    """
    by = context.regions or ("aten" if context.native_mixed else "")
    if not by or (context.regions == "aten"):
        return PassResult(gm, False)
    graph, returned = gm.graph, returned_with_gradient(gm.graph, context.gradients)
    changed, declined = False, list[str]()
    kernels = _BY[by]
    calls = [(node, op) for node in graph.nodes if (op := notes(node).op).name in kernels]
    roots = alias_roots(graph) if calls else {}
    written = written_roots(graph, roots) if calls else set()
    for node, op in calls:
        if op.in_place or roots[node] in written:
            continue
        arguments = _arguments(node)
        wide = source = (arguments or {}).get("input")
        if _is_inserted_cast(wide) and wide not in returned:
            source = wide.args[0]  # type: ignore[union-attr]
        elif by == "aten":
            continue
        if arguments is None:
            declined.append(f"{node.name}: {op.name} with arguments that the kernel does not have")
        elif any(roots.get(each) in written for each in _read(arguments)):
            declined.append(f"{node.name}: {op.name} of what the graph writes to in place")
        else:
            changed |= kernels[op.name](node, arguments, source, lambda each: roots.get(each) not in written)
    return PassResult(gm, changed, tuple(declined))


def _read(arguments: dict[str, Any]) -> list[Node]:
    """Return what an op reads, and what a cast of it read: the call may stand later than both."""
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


#: Whose signature a call has.
_FORMS: Final[dict[Any, Callable[..., Any]]] = {
    F.batch_norm: F.batch_norm,
    F.cross_entropy: F.cross_entropy,
    F.group_norm: F.group_norm,
    F.max_pool2d: F.max_pool2d_with_indices,
    torch.max_pool2d: F.max_pool2d_with_indices,
}


def _batch_norm(node: Node, arguments: dict[str, Any], source: Any, steady: Callable[[Node], bool]) -> bool:
    """Call the batch norm with the sum and the relu behind it, where there are any."""
    output = notes(node).precision.output
    end, residual, relu = node, None, False
    user = _only_user(end, "add")
    if user is not None and not user.kwargs and len(user.args) == 2 and notes(user).precision.output is output:
        other = user.args[1] if user.args[0] is end else user.args[0]
        after = _only_user(user, "relu")
        if isinstance(other, Node) and other is not end and after is not None and steady(other):
            end, residual = user, other
    user = _only_user(end, "relu")
    if user is not None:
        end, relu = user, True
    keywords = {"residual": residual, "relu": relu}
    _call(batch_norm, node, end, {("x" if k == "input" else k): v for k, v in arguments.items()} | keywords)
    with_what = (", add and relu" if residual is not None else " and relu") if relu else ""
    notes(end).fused = f"the kernel of batch_norm{with_what}{_FROM}"
    return True


def _group_norm(node: Node, arguments: dict[str, Any], source: Any, steady: Callable[[Node], bool]) -> bool:
    """Call the group norm between two casts, with SiLU before the second: elsewhere its result is wanted in FP32.

    ``source``: what its input casts, or that input itself.
    """
    wide, silu = arguments["input"], _only_user(node, "silu")
    if source is wide:
        return False
    end = node if silu is None else silu
    low = notes(source).precision.output
    casts = [*end.users]
    if low not in LOW_DTYPES or not casts or not all(_is_inserted_cast(each) and each.args[1] is low for each in casts):
        return False
    decided = notes(node).precision
    options = {name: each for name, each in arguments.items() if name != "input"}
    _call(group_norm, node, end, {"x": source, **options, "silu": silu is not None})
    why = f"{decided.why}; its kernel reads and writes {low} and computes in FP32"
    notes(end).precision = Precision.arriving(torch.float32, low, decided.rule, why)
    notes(end).fused = "the kernel of group_norm" + (" and silu" if silu is not None else "")
    for each in casts:
        each.replace_all_uses_with(end)
        end.graph.erase_node(each)
    if not wide.users:
        end.graph.erase_node(wide)
    return True


def _cross_entropy(
    node: Node, arguments: dict[str, Any], source: Any, steady: Callable[[Node], bool], compiled: bool = False
) -> bool:
    """Call the loss of the logits themselves, or of the ``source`` that they cast."""
    logits = arguments["input"]
    if not isinstance(logits, Node) or notes(node).precision.output not in (None, torch.float32):
        return False  # float64 probabilities, or a policy's own dtype: the kernel's loss is FP32
    own = {"compiled": True} if compiled else {}
    _call(cross_entropy, node, node, arguments | {"input": source} | own)
    if source is not logits:
        reads, decided = notes(source).precision.output, notes(node).precision
        why = f"{decided.why}; its kernel reads {reads} and computes in FP32"
        notes(node).precision = Precision.arriving(torch.float32, torch.float32, decided.rule, why)
        if not logits.users:
            node.graph.erase_node(logits)
    notes(node).fused = _LOOP_OF_LOSS if compiled else "the kernel of cross_entropy"
    return True


def _max_pool2d(
    node: Node, arguments: dict[str, Any], source: Any, steady: Callable[[Node], bool], compiled: bool = False
) -> bool:
    """Call the pooling where its windows lie within the image and have no dilation: others are torch's."""
    dilation, ceil, indices = (arguments.pop(name, None) for name in ("dilation", "ceil_mode", "return_indices"))
    if ceil or indices or dilation not in (None, 1, (1, 1), [1, 1]):
        return False
    window = _numbers(arguments["kernel_size"])
    if all(isinstance(each, int) for each in window):
        from fxprec.kernels.nn.max_pool import LARGEST  # which loads Triton

        if window[0] * window[-1] > LARGEST:
            return False
    _call(max_pool2d, node, node, arguments | ({"compiled": True} if compiled else {}))
    notes(node).fused = _POOLED if compiled else f"the kernel of max_pool2d{_FROM}"
    return True


def _is_inserted_cast(node: Any) -> bool:
    return isinstance(node, Node) and node.target is cast and notes(node).inserted


def _call(function: Callable[..., Any], first: Node, last: Node, arguments: dict[str, Any]) -> None:
    """Make ``last`` the call, in the place of everything from ``first`` on."""
    chain = [last]
    while chain[-1] is not first:
        chain.append(next(s for s in chain[-1].all_input_nodes if s is first or first in s.all_input_nodes))
    last.op, last.target, last.args = "call_function", function, (arguments.pop(next(iter(arguments))),)
    last.kwargs = arguments
    if last is not first:
        precision = notes(first).precision
        notes(last).op = notes(first).op
        why = f"{precision.why}; with what follows in one kernel"
        notes(last).precision = Precision.arriving(precision.compute, precision.output, precision.rule, why)
        for node in chain[1:]:
            last.graph.erase_node(node)


def _only_user(node: Node, name: str) -> Node | None:
    if len(node.users) != 1:
        return None
    (user,) = node.users
    op = notes(user).op
    return user if op.name == name and not op.in_place else None


#: What runs -> op -> how a call of it is made.
_BY: Final[dict[str, dict[str, Callable[..., bool]]]] = {
    "triton": {
        "batch_norm": _batch_norm,
        "cross_entropy": _cross_entropy,
        "group_norm": _group_norm,
        "max_pool2d": _max_pool2d,
    },
    "loops": {
        "cross_entropy": partial(_cross_entropy, compiled=True),
        "max_pool2d": partial(_max_pool2d, compiled=True),
    },
    "aten": {"cross_entropy": _cross_entropy},
}
