"""Shapes for a statically traced graph: fake tensors walked through it. They guide costs; nothing is baked."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx import GraphModule

__all__ = ["propagate_shapes"]

_LOW = (torch.float16, torch.bfloat16)


def propagate_shapes(gm: GraphModule, tensors: Sequence[Tensor]) -> bool:
    """Set ``meta["val"]`` on every node and ``meta["dtype"]`` on the placeholders. No real tensor is read or written.

    Low tensors count as FP32 on the way, since casts that reconcile them with the weights are not in yet. Where an op
    fails on the fake tensors, the nodes are left without shapes: the call itself will say what is wrong.

    Returns:
        whether shapes are known now.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    mode = FakeTensorMode(allow_non_fake_inputs=True)

    class Shapes(FakeTensorProp):
        def fetch_attr(self, target: str) -> object:
            value = super().fetch_attr(target)
            return _widened(mode.from_tensor(value)) if isinstance(value, Tensor) else value

    for node, tensor in zip(gm.graph.find_nodes(op="placeholder"), tensors, strict=True):
        node.meta["dtype"] = tensor.dtype
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            Shapes(gm, mode).propagate(*[_widened(tensor.detach()) for tensor in tensors])
    except Exception:
        for node in gm.graph.nodes:
            node.meta.pop("val", None)
        return False
    return True


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in _LOW else tensor
