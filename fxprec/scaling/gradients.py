"""The gradients of one optimizer: names, this rank's part, grouping for the fused unscale, ranks that agree on them.

Refused before anything changes: gradients that no scale can be taken out of. Sparse ones are coalesced first, since
adding up duplicate indices may overflow; of a DTensor the local shard is taken, of a partial one the sum.

Sharded gradients (FSDP2, tensor parallelism) differ by rank, and so do pipeline stages: there one MAX all-reduce of one
number tells every rank that holds a part of the model what overflowed. With DDP nothing is needed: its all-reduce of
gradients carries an inf to every rank.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from fxprec.errors import few
from fxprec.torch_internals import late_hooks_of, root_mesh, sparse_values

#: (device, dtype) -> dense tensors that can be unscaled in place.
Grouped = dict[tuple[torch.device, torch.dtype], list[Tensor]]
#: An optimizer -> id of each of its parameters -> its name.
NamesOf = Callable[[Optimizer], dict[int, str]]

#: Dtypes that a scaled gradient may have, whatever the settings.
_SCALED = {torch.float32, torch.float64, torch.bfloat16}


def parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield every parameter of every group."""
    for group in optimizer.param_groups:
        yield from group["params"]


@contextmanager
def late_hooks_aside(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Keep hooks from hearing, in the block, of gradients that are accumulated: such hooks step optimizers."""
    with ExitStack() as undo:
        for parameter in parameters:
            if held := late_hooks_of(parameter):
                undo.callback(held.update, {**held})
                held.clear()
        yield


def grouped(optimizer: Optimizer, allow_fp16: bool, names_of: NamesOf) -> Grouped:
    """Return the gradients to unscale. May replace ``.grad`` of sparse and of partial ones.

    Raises:
        ValueError: float16 gradients, unless they are allowed. TypeError: complex or float8 ones. Both name the
            parameters.
    """
    # Plain dense gradients, the usual case, are grouped at once; the others may need work, even a collective.
    groups: Grouped = {}
    special: list[Tensor] = []
    for parameter in parameters_of(optimizer):
        gradient = parameter.grad
        if gradient is not None and (type(gradient) is not Tensor or gradient.layout is not torch.strided):
            special.append(parameter)
        elif gradient is not None:
            groups.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    # Asked by the few dtypes that there are; which parameter is at fault is looked up for the message only.
    dtypes = {dtype for _, dtype in groups} | {parameter.grad.dtype for parameter in special}  # type: ignore[union-attr]
    if not dtypes <= (_SCALED | {torch.float16} if allow_fp16 else _SCALED):
        refuse_dtypes(optimizer, allow_fp16, names_of)
    with torch.no_grad():
        for parameter in special:
            gradient = _dense(parameter, cast(Tensor, parameter.grad))
            groups.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    return groups


def refuse_dtypes(optimizer: Optimizer, allow_fp16: bool, names_of: NamesOf) -> None:
    """Raise as ``grouped`` does, if it would."""
    odd = [(p, p.grad.dtype) for p in parameters_of(optimizer) if p.grad is not None and p.grad.dtype not in _SCALED]
    if not odd:
        return
    # Complex and float8 gradients can never be unscaled; float16 ones are refused as torch does, unless allowed.
    names = names_of(optimizer)
    half = [names[id(p)] for p, dtype in odd if dtype is torch.float16]
    strange = [f"{names[id(p)]} ({dtype})" for p, dtype in odd if dtype is not torch.float16]
    if strange:
        raise TypeError(
            f"gradients that cannot be unscaled and checked for inf: {few(strange)}. Keep such parameters in another "
            "optimizer, which steps without the scaler"
        )
    if half and not allow_fp16:
        cure = (
            "leave unscale_ and clip_grad_norm_ out: with low_gradients the optimizer unscales them in its step, and "
            "clips them by its own max_norm"
            if any(p.dtype is torch.float32 for p, _ in odd)
            else "keep the parameters in float32 as master weights, as fxprec.convert does at O0 to O2, or wrap the "
            "optimizer in fxprec.amp.FP16_Optimizer. LossScaler(fp16_gradients=True) accepts them"
        )
        raise ValueError(
            f"Attempting to unscale FP16 gradients. They belong to {few(half)}. Unscaled, most of them would vanish: "
            f"{cure}"
        )


def local(tensor: Tensor) -> Tensor:
    """Return the tensor, or the part of a DTensor that this rank holds, without a copy."""
    dtensor = dtensor_type()
    if dtensor is None or not isinstance(tensor, dtensor):
        return tensor
    held: Any = cast(Any, tensor).to_local()
    return held.wait() if hasattr(held, "wait") else held


def local_values(gradient: Tensor) -> Tensor:
    """Return what this rank holds of a gradient; of a sparse one the values, those of one index added up."""
    held = local(gradient)
    return stored_values(held.coalesce() if held.layout is torch.sparse_coo else held)


def stored_values(gradient: Tensor) -> Tensor:
    """Return the stored numbers of a gradient that are on this rank; of a sparse one as they are."""
    held = local(gradient)
    if held.layout is torch.sparse_coo:
        return sparse_values(held)
    return held if held.layout is torch.strided else held.values()


def summed(parameter: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient; a partial DTensor, whose true value is the sum over ranks, is placed as its parameter is.

    ``parameter.grad`` is replaced then. A collective: every rank of the mesh has to come here.
    """
    dtensor = dtensor_type()
    if dtensor is None or not isinstance(gradient, dtensor):
        return gradient
    sharded: Any = gradient
    if any(placement.is_partial() for placement in sharded.placements):
        parameter.grad = sharded = sharded.redistribute(placements=cast(Any, parameter).placements)
    return sharded


def dtensor_type() -> Any:
    """Return DTensor, where anything imported it: the import costs a third of a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return None if module is None else module.DTensor


def group_of_parameters(parameters: Iterable[Tensor]) -> Any:
    """Return the process group of every mesh that a DTensor among them lives on; None: there is no DTensor.

    It depends on parameters, not on gradients: a rank without gradients has to join.

    Raises:
        RuntimeError: the meshes are parts of something that is neither one mesh of one dimension nor all ranks.
    """
    dtensor = dtensor_type()
    if dtensor is None:
        return None
    meshes: set[Any] = {p.device_mesh for p in parameters if isinstance(p, dtensor)}  # type: ignore[attr-defined]
    if not meshes:
        return None
    # Parts of one mesh (a dimension of it) belong to a root, whose ranks hold all of the model.
    roots = {root_mesh(mesh) for mesh in meshes}
    if len(set().union(*(root.mesh.flatten().tolist() for root in roots))) == dist.get_world_size():
        return dist.group.WORLD
    if len(roots) == 1 and (root := next(iter(roots))).ndim == 1:
        return root.get_group()
    raise RuntimeError(
        "the parameters of one optimizer live on meshes that cover neither one dimension nor all ranks: say which "
        "ranks have to agree on an overflow, LossScaler(process_group=torch.distributed.new_group(ranks))"
    )


def sum_over(number: Tensor, group: Any) -> Tensor:
    """Return the sum of a 0-dim tensor over the ranks of ``group``."""
    return _reduced(number.reshape(1), dist.ReduceOp.SUM, group).to(number.device)


def agree(found: dict[torch.device, Tensor], device: torch.device, group: Any) -> None:
    """Make every flag 1 where any rank of ``group`` has one above 0. A rank without flags gets one on ``device``."""
    if not found:
        found[device] = torch.zeros((), device=device)
    # Flags of all devices in one number, so that there is one all-reduce however many there are.
    flags = [*found.values()]
    packed = flags[0].view(1) if len(flags) == 1 else torch.stack([f.to(flags[0].device) for f in flags]).amax(0, True)
    highest = _reduced(packed, dist.ReduceOp.MAX, group)
    for flag in flags:
        flag.copy_(highest)


def _reduced(packed: Tensor, op: Any, group: Any) -> Tensor:
    if dist.get_backend(group) == "nccl" and packed.device.type == "cpu":
        packed = packed.to("cuda")  # NCCL reduces nothing on the host
    dist.all_reduce(packed, op, group=group)
    return packed.view(())


def leaves_below(outputs: Tensor) -> Iterator[Tensor]:
    """Yield the leaves that a backward of ``outputs`` would add gradients to."""
    # A stack, not recursion: graphs are as deep as models.
    nodes: list[Any] = [outputs.grad_fn]
    seen: set[Any] = {None}
    while nodes:
        node = nodes.pop()
        if node not in seen:
            seen.add(node)
            if isinstance(leaf := getattr(node, "variable", None), Tensor):
                yield leaf
            nodes.extend(following for following, _ in node.next_functions)


class ParameterNames:
    """Names of an optimizer's parameters by their ids: of named groups, else of ``model``, else by place."""

    def __init__(self) -> None:
        self.model: weakref.ref[nn.Module] | None = None

    @property
    def known_model(self) -> nn.Module | None:
        """The converted model, while it lives."""
        return None if self.model is None else self.model()

    def __call__(self, optimizer: Optimizer) -> dict[int, str]:
        model = self.known_model
        known = {} if model is None else {id(p): name for name, p in model.named_parameters()}
        # Names that the user gave to the optimizer come first.
        names: dict[int, str] = {}
        for i, group in enumerate(optimizer.param_groups):
            given = group.get("param_names")
            for j, parameter in enumerate(group["params"]):
                place = f"param_groups[{i}]['params'][{j}] of shape {tuple(parameter.shape)}"
                names[id(parameter)] = given[j] if given is not None else known.get(id(parameter), place)
        return names


def _dense(parameter: Tensor, gradient: Tensor) -> Tensor:
    """Return the part of a gradient that can be unscaled in place."""
    if gradient.layout is torch.sparse_coo:
        # Unscaled first, duplicates of an index could overflow when they are added up.
        if not gradient.is_coalesced():
            parameter.grad = gradient = gradient.coalesce()
    return stored_values(summed(parameter, gradient))
