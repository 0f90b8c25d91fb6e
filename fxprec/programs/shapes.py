"""Fake tensors on the nodes of a statically traced graph: its shapes guide costs, nothing is baked."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fxprec.kernels.launch.operands import LOW_DTYPES
from fxprec.kernels.torch_internals import disable_current_modes
from fxprec.passes.graph.annotations import SPARSE, notes
from fxprec.passes.torch_internals import FakeTensorMode, unlogged


def propagate_shapes(gm: GraphModule, tensors: Sequence[Tensor]) -> bool:
    """Set ``meta["val"]`` on every node and ``meta["dtype"]`` on the placeholders. No real tensor is read or written.

    Low tensors count as FP32 on the way, since casts that reconcile them with the weights are not in yet. Where an op
    fails on the fake tensors, the nodes are left without shapes: the call itself will say what is wrong.

    Returns:
        whether shapes are known now.
    """
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    alike: dict[object, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        # Of an alias: the mode, which the values keep, refers weakly to what it saw, and ``torch.utils.swap_tensors``
        # refuses a tensor that somebody refers to so.
        with disable_current_modes():
            alias = tensor.detach()
        return _widened(mode.from_tensor(alias).requires_grad_(tensor.requires_grad))

    class Shapes(FakeTensorProp):
        def fetch_attr(self, target: str) -> object:
            value = super().fetch_attr(target)
            if not isinstance(value, Tensor):
                return value
            if type(value) is not nn.Parameter or value.layout is not torch.strided:
                return fake(value)
            # The layers of a model are many of a kind, and nothing here tells two such parameters apart.
            kind = (value.shape, value.stride(), value.dtype, value.device, value.requires_grad)
            if kind not in alike:
                alike[kind] = fake(value)
            return alike[kind]

    for node, tensor in zip(gm.graph.find_nodes(op="placeholder"), tensors, strict=True):
        notes(node).dtype = tensor.dtype
        if tensor.layout in SPARSE:
            notes(node).sparse = True
    try:
        with unlogged(), torch.no_grad(), torch.random.fork_rng(devices=[]):
            Shapes(gm, mode).propagate(*[_widened(tensor.detach()) for tensor in tensors])
    except Exception:
        for node in gm.graph.nodes:
            node.meta.pop("val", None)
        return False
    return True


def state_dtypes(gm: GraphModule) -> None:
    """Give ``meta["val"]`` the dtypes of the rewritten graph, for who prints it: it was captured in the original's."""
    for node in gm.graph.nodes:
        precision, value = notes(node).precision, node.meta.get("val")
        if precision.output is None or not isinstance(value, Tensor):
            continue
        if value.dtype in (torch.float32, *LOW_DTYPES) and value.dtype != precision.output:
            with getattr(value, "fake_mode", contextlib.nullcontext()), torch.no_grad():
                node.meta["val"] = value.to(precision.output)


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in LOW_DTYPES else tensor
