"""Shapes for a statically traced graph: fake tensors walked through it. They guide costs; nothing is baked."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx import GraphModule

__all__ = ["propagate_shapes"]


def propagate_shapes(gm: GraphModule, tensors: Sequence[Tensor]) -> None:
    """Set ``meta["val"]`` on every node and ``meta["dtype"]`` on the placeholders. No real tensor is read or written.

    Raises:
        RuntimeError: the graph does not take tensors of these shapes (torch's own error).
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    for node, tensor in zip(gm.graph.find_nodes(op="placeholder"), tensors, strict=True):
        node.meta["dtype"] = tensor.dtype
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        FakeTensorProp(gm, mode).propagate(*[tensor.detach() for tensor in tensors])
