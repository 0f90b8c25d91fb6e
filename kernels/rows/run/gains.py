"""Where compiled loops pay on a CPU, against torch's kernels one after the other.

A loop reads and writes memory once, where torch does for each kernel of each op, and it is one call from Python; but an
autograd function of Python around it costs as much as two of torch's. Microseconds of forward and backward, one core of
a Zen 5, bfloat16, op by op : as a loop:

============================  ==========  ==========
region                        16 x 64     1024 x 512
============================  ==========  ==========
rms_norm                      68 : 39     1590 : 247
normalize                     39 : 30     952 : 259
gelu, by tanh                 16 : 28     1353 : 536
mish                          20 : 31     3427 : 1446
(x + y) * y                   29 : 34     422 : 198
add, layer_norm               35 : 49     614 : 413
silu * y                      28 : 34     647 : 467
gelu * y                      45 : 35     599 : 785
============================  ==========  ==========

The exact gelu is oneDNN's kernel, which beats a loop with libm's erf.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from types import MappingProxyType
from typing import Final

from torch import Tensor
from torch.fx import GraphModule, Node

from fxprec.kernels.rows.program.region_node import op_name
from fxprec.kernels.rows.program.terms import Declined

#: Ops that torch computes on a CPU by as many kernels; all others by one.
_KERNELS: Final = MappingProxyType({"rms_norm": 5, "normalize": 4})
#: Ops of which that one takes as long as several (gelu by tanh: of the exact one see ``is_faster_by_torch``).
_SLOW: Final = frozenset({"gelu", "mish"})
#: What torch only gives back, or copies.
_NONE: Final = frozenset({"clone", "contiguous", "dropout"})
#: Beyond so many kernels a loop gains at every size.
_FEW: Final = 2
#: Elements from which on it does with that few.
_MANY: Final = 1 << 15


def is_faster_by_torch(node: Node) -> bool:
    """Whether torch has a kernel for this row operation that a loop does not reach: the exact gelu."""
    name = op_name(node)
    approximate = node.args[1] if len(node.args) > 1 else node.kwargs.get("approximate", "none")
    return name == "erf" or (name == "gelu" and approximate == "none")


def gains_alone(node: Node) -> bool:
    """Whether a loop gains where it holds nothing but this node."""
    return kernels_of([node]) > 1 or op_name(node) in _SLOW


def kernels_of(nodes: Iterable[Node]) -> int:
    """How many kernels torch runs for the forward of these nodes."""
    names = [op_name(node) for node in nodes if node.op not in ("placeholder", "output")]
    return sum(_KERNELS.get(name, 1) for name in names if name not in _NONE)


def check_gain(gm: GraphModule, inputs: Sequence[Tensor], recording: bool) -> None:
    """Raise ``Declined`` where a region of this graph takes less time op by op, for these inputs.

    Args:
        recording: whether a backward may follow.
    """
    elements = max(prod(x.shape) for x in inputs)
    trained = recording and any(x.requires_grad for x in inputs)
    if trained and elements < _MANY and (kernels := kernels_of(gm.graph.nodes)) <= _FEW:
        raise Declined(f"op by op takes less time than a loop: torch's kernels are {kernels}, elements {elements:,}")
