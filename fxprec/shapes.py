"""Shapes for a statically traced graph: fake tensors walked through it. They guide costs; nothing is baked."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx import GraphModule

__all__ = ["propagate_shapes"]

log = logging.getLogger(__name__)


def propagate_shapes(gm: GraphModule, tensors: Sequence[Tensor]) -> None:
    """Set ``meta["dtype"]`` on the placeholders, and ``meta["val"]`` on every node up to the first one without a shape.

    No real tensor is read or written. Where a shape depends on values, or an op knows no fake tensors, the rest of the
    graph goes without: a call must not fail on what only guides costs.
    """
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    for node, tensor in zip(gm.graph.find_nodes(op="placeholder"), tensors, strict=True):
        node.meta["dtype"] = tensor.dtype
    if any(isinstance(tensor, FakeTensor) for tensor in tensors):
        return
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            FakeTensorProp(gm, mode).propagate(*[tensor.detach() for tensor in tensors])
        except Exception as error:
            log.debug("no shapes: %s", error)
