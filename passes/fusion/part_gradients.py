"""On a GPU what cuts a tensor into parts becomes a call whose backward writes one gradient, where the parts belong.

Before::

    %qkv: bfloat16 = permute(%view, 2, 0, 3, 1, 4)
    %unbind: bfloat16 = unbind(%qkv, 0)
    %q: bfloat16 = getitem(%unbind, 0)

After::

    %qkv: bfloat16 = permute(%view, 2, 0, 3, 1, 4)
    %unbind: bfloat16 = parts(%qkv, "unbind", 0)           # the same views
    %q: bfloat16 = getitem(%unbind, 0)

Why, and what it does: ``fxprec.kernels.nn.parts``. What is small at run time, or watched by a compiler or a mode, is
cut by torch's own op.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from torch import Tensor
from torch.fx import Graph, Proxy

from fxprec.kernels.launch.observers import ANY_MODE, COMPILER, DUAL, SCRIPT, TRANSFORM, watcher
from fxprec.passes.graph.annotations import notes
from fxprec.passes.graph.leaves import leaf

#: How each op cuts.
_CUTS: Final[dict[str, Callable[..., Any]]] = {"unbind": Tensor.unbind, "chunk": Tensor.chunk, "split": Tensor.split}
#: Arguments, as torch's function has them and as the method does.
_KEYWORDS: Final = {"split_size_or_sections": "split_size"}
#: Elements from which on a gradient's bytes take longer than the calls that move them.
_WORTH: Final = 1 << 20


def parts(x: Any, cut: str, *args: Any, **kwargs: Any) -> Any:
    """``x.unbind(...)``, ``x.chunk(...)`` or ``x.split(...)``, with gradients that are put together in x's layout."""
    if isinstance(x, Proxy):
        return leaf(parts, x, cut, *args, **kwargs)
    if (
        x.is_cuda
        and x.numel() >= _WORTH
        and type(x) is Tensor
        and watcher(COMPILER, SCRIPT, TRANSFORM, DUAL, ANY_MODE) is None
    ):
        from fxprec.kernels.nn.parts import parts as kernel

        return kernel(x, lambda y: _CUTS[cut](y, *args, **kwargs))
    return _CUTS[cut](x, *args, **kwargs)


def gather_gradients(graph: Graph) -> bool:
    """Replace what cuts. Returns whether anything does."""
    changed = False
    for node in [*graph.nodes]:
        op = notes(node).op
        if op is None or op.name not in _CUTS or not node.args:
            continue
        if getattr(node.target, "__name__", node.target) != op.name:  # unsafe_chunk, whose parts may be written
            continue
        x, *rest = node.args
        kwargs = {_KEYWORDS.get(name, name): value for name, value in node.kwargs.items()}
        node.op, node.target, node.args, node.kwargs = "call_function", parts, (x, op.name, *rest), kwargs
        notes(node).fused = "one gradient of its parts"
        changed = True
    return changed
