"""Makes PyTorch's ``DistributedDataParallel`` from apex's arguments. What each of them becomes:

    message_size                bucket_cap_mb: that many elements a bucket
    delay_allreduce             one bucket, and parameters without gradients are allowed
    retain_allreduce_buffers    gradient_as_bucket_view
    allreduce_always_fp32       a communication hook: low gradients travel as FP32
    gradient_average,
    gradient_predivide_factor   a communication hook
    the others                  refused: PyTorch's engine has no such thing

As in apex, parameters start as those of rank 0, and buffers (the statistics of batch norms) stay each rank's own. Wrap
after ``amp.initialize``.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import parallel

__all__ = ["DistributedDataParallel", "convert_syncbn_model"]

#: Argument -> what to do instead, for those that mean nothing to PyTorch's engine.
_REFUSED = {
    "shared_param": "shared parameters work as they are; to communicate at the end only, use delay_allreduce=True",
    "allreduce_trigger_params": "buckets go by size here: use message_size",
    "num_allreduce_streams": "the process group has its own stream: leave it out",
    "allreduce_communicators": "the process group has its own stream: pass process_group=",
    "gradient_average_split_factor": "it is called gradient_predivide_factor",
    "prof": "torch.profiler records the reducer as it is",
}


class DistributedDataParallel(parallel.DistributedDataParallel):
    """``torch.nn.parallel.DistributedDataParallel`` with apex's arguments.

    Args:
        module: the model, converted already where it is to be.
        message_size: elements a communication bucket (of FP32 parameters 4 bytes each).
        delay_allreduce: communicate once, when all gradients are there; parameters may stay without.
        retain_allreduce_buffers: gradients are views of the communication buffers.
        allreduce_always_fp32: float16 and bfloat16 gradients are summed in FP32.
        gradient_average: divide the sums by the number of ranks.
        gradient_predivide_factor: divide by it before the sum, and by ranks / factor after: less overflow in float16.
            With ``gradient_average=False`` only the first division happens.
        process_group: keyword only; None: all ranks.
        shared_param, allreduce_trigger_params, num_allreduce_streams, allreduce_communicators,
        gradient_average_split_factor, prof: refused, unless they have their defaults.

    Raises:
        ValueError: a refused argument, by name and with what to do; a size or factor that is not above 0.
    """

    def __init__(
        self,
        module: nn.Module,
        message_size: int = 10_000_000,
        delay_allreduce: bool = False,
        shared_param: Any = None,
        allreduce_trigger_params: Iterable[Tensor] | None = None,
        retain_allreduce_buffers: bool = False,
        allreduce_always_fp32: bool = False,
        num_allreduce_streams: int = 1,
        allreduce_communicators: Any = None,
        gradient_average: bool = True,
        gradient_predivide_factor: float = 1.0,
        gradient_average_split_factor: float | None = None,
        prof: bool = False,
        *,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        # Refused only where they were set: scripts pass the defaults along.
        given = {
            "shared_param": shared_param is not None,
            "allreduce_trigger_params": allreduce_trigger_params is not None,
            "num_allreduce_streams": num_allreduce_streams != 1,
            "allreduce_communicators": allreduce_communicators is not None,
            "gradient_average_split_factor": gradient_average_split_factor is not None,
            "prof": prof,
        }
        for name, refused in given.items():
            if refused:
                raise ValueError(f"DistributedDataParallel: {name} means nothing to PyTorch's engine: {_REFUSED[name]}")
        for name, value in (("message_size", message_size), ("gradient_predivide_factor", gradient_predivide_factor)):
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"DistributedDataParallel: {name} must be finite and greater than 0, not {value!r}")
        # apex counts elements and PyTorch bytes: of the widest gradients that there are.
        widths = [parameter.element_size() for parameter in module.parameters() if parameter.requires_grad]
        total = sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
        size = total + 1 if delay_allreduce else message_size * max(widths, default=4)
        with warnings.catch_warnings():
            # What replaces broadcast_buffers sends the buffers of rank 0 around at the start, which apex does not.
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            super().__init__(
                module,
                broadcast_buffers=False,
                process_group=process_group,
                bucket_cap_mb=size / 2**20,  # type: ignore[arg-type]  # a fraction of a megabyte is fine
                find_unused_parameters=delay_allreduce,
                gradient_as_bucket_view=retain_allreduce_buffers,
            )
        # PyTorch's own all-reduce averages in the gradients' dtype: anything else is a hook in its place.
        if allreduce_always_fp32 or not gradient_average or gradient_predivide_factor != 1.0:
            ranks = dist.get_world_size(self.process_group)
            after = gradient_predivide_factor / ranks if gradient_average else 1.0
            reduce = partial(_all_reduce, self.process_group)
            self.register_comm_hook(None, _hook(reduce, 1.0 / gradient_predivide_factor, after, allreduce_always_fp32))

    def enable_allreduce(self) -> None:
        """Communicate in backward again."""
        self.require_backward_grad_sync = True

    def disable_allreduce(self) -> None:
        """Keep gradients on their rank, until ``enable_allreduce``."""
        self.require_backward_grad_sync = False


def convert_syncbn_model(
    module: nn.Module, process_group: dist.ProcessGroup | None = None, channel_last: bool = False
) -> nn.Module:
    """Replace batch norms by ``torch.nn.SyncBatchNorm``, before ``amp.initialize``, as apex has it.

    Args:
        module: the model; one that is a batch norm itself is not changed.
        process_group: whose ranks share statistics; None: all.
        channel_last: refused if True.

    Returns:
        the module, or what stands in its place.

    Raises:
        ValueError: ``channel_last``.
    """
    if channel_last:
        raise ValueError(
            "convert_syncbn_model: channel_last=True means inputs of shape (N, ..., C), which torch.nn.SyncBatchNorm "
            "does not take: use (N, C, ...) tensors in torch.channels_last memory format"
        )
    return nn.SyncBatchNorm.convert_sync_batchnorm(module, process_group)


def _hook(
    reduce: Callable[[Tensor], torch.futures.Future[Any]], before: float, after: float, in_fp32: bool
) -> Callable[..., Any]:
    """Make a communication hook: times ``before``, summed over the ranks, times ``after``."""

    def hook(_state, bucket):  # not annotated: torch compares annotations with objects, and these would be text
        buffer: Tensor = bucket.buffer()
        # The reducer takes the result from the bucket's own memory, or as a tensor of its dtype.
        sent = buffer.float() if in_fp32 else buffer
        if before != 1.0:
            sent.mul_(before)

        def finish(future: torch.futures.Future[Any]) -> Tensor:
            summed = future.value()[0]
            if after != 1.0:
                summed.mul_(after)
            return summed if summed.dtype == buffer.dtype else buffer.copy_(summed)

        return reduce(sent).then(finish)

    return hook


def _all_reduce(group: dist.ProcessGroup | None, tensor: Tensor) -> torch.futures.Future[Any]:
    work = dist.all_reduce(tensor, group=group, async_op=True)
    assert work is not None  # async
    return work.get_future()
