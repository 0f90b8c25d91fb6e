"""Ranks agree on what overflowed: one MAX all-reduce of one number, over every rank that holds a part of the model.

With DDP nothing is needed: its all-reduce of gradients carries an inf to every rank. Sharded gradients (FSDP2, tensor
parallelism) differ by rank, and so do pipeline stages.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from fxprec.scaling.gradients import dtensor_type, parameters_of
from fxprec.torch_internals import root_mesh


def group_of(optimizer: Optimizer, asked: Any) -> Any:
    """The process group that has to agree on this optimizer's gradients; None: this rank alone.

    That is the group asked for, else the ranks of every mesh that a DTensor parameter lives on. It depends on
    parameters, not on gradients: a rank without gradients has to join.

    Raises:
        RuntimeError: the meshes are parts of something that is neither one mesh of one dimension nor all ranks.
    """
    return group_of_parameters(parameters_of(optimizer)) if asked is None else asked


def group_of_parameters(parameters: Iterable[Tensor]) -> Any:
    """The ranks of every mesh that one of them lives on; None: there is no DTensor among them."""
    dtensor = dtensor_type()
    if dtensor is None:
        return None
    meshes: set[Any] = {p.device_mesh for p in parameters if isinstance(p, dtensor)}  # type: ignore[attr-defined]
    if not meshes:
        return None
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
    """The sum of a 0-dim tensor over the ranks of ``group``."""
    packed = number.reshape(1)
    if dist.get_backend(group) == "nccl" and packed.device.type == "cpu":
        packed = packed.to("cuda")
    dist.all_reduce(packed, group=group)
    return packed.view(()).to(number.device)


def agree(found: dict[torch.device, Tensor], device: torch.device, group: Any) -> None:
    """Make every flag 1 where any rank of ``group`` has one above 0. A rank without flags gets one on ``device``."""
    if not found:
        found[device] = torch.zeros((), device=device)
    flags = [*found.values()]
    packed = flags[0].view(1) if len(flags) == 1 else torch.stack([f.to(flags[0].device) for f in flags]).amax(0, True)
    if dist.get_backend(group) == "nccl" and packed.device.type == "cpu":
        packed = packed.to("cuda")
    dist.all_reduce(packed, dist.ReduceOp.MAX, group=group)
    for flag in flags:
        flag.copy_(packed.view(()))
