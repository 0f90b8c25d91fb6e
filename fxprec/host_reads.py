"""Reads of device memory by the host: when they wait or are forbidden, and how to get numbers without waiting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


def capturing(device: torch.device) -> bool:
    """Return whether kernels on this device are being captured for a CUDA graph: then nothing can be read from it."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def reading_waits(device: torch.device) -> bool:
    """Return whether reading from the device stops the host until all that was queued is done."""
    return device.type == "cuda"


@dataclass(frozen=True, slots=True)
class OnHost:
    """Copy of a few numbers on the host, which arrives later; nobody waits for it who does not want to.

    Attributes:
        values: the tensor on the host; valid once ``done`` returns True.
        done: returns whether the values have arrived.
        wait: blocks until they have.
    """

    values: Tensor
    done: Callable[[], bool]
    wait: Callable[[], object]

    @classmethod
    def of(cls, values: Tensor) -> OnHost:
        """Copy a tensor, on CUDA to pinned memory, in the order of its stream."""
        if not reading_waits(values.device):
            return cls(values, lambda: True, lambda: None)
        # To pinned memory: else the copy would wait for the device.
        host = torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(values.device))
        return cls(host, event.query, event.synchronize)
