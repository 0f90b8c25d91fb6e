"""A few numbers of a device, on their way to the host: nobody waits for them who does not want to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fxprec.scaling.cuda_graphs import reading_waits


@dataclass(frozen=True, slots=True)
class OnHost:
    """A tensor on the host, whose values are there once ``done`` says so.

    Attributes:
        values: there.
        done: whether they have come.
        wait: until they have.
    """

    values: Tensor
    done: Callable[[], bool]
    wait: Callable[[], object]

    @classmethod
    def of(cls, values: Tensor) -> OnHost:
        """Copy a tensor, on CUDA to pinned memory, in the order of its stream."""
        if not reading_waits(values.device):
            return cls(values, lambda: True, lambda: None)
        host = torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(values.device))
        return cls(host, event.query, event.synchronize)
