"""CUDA graphs: what is captured runs again later, without Python."""

from __future__ import annotations

import torch


def capturing(device: torch.device) -> bool:
    """Return whether kernels on this device are being captured: then nothing can be read from it."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def reading_waits(device: torch.device) -> bool:
    """Return whether reading from the device stops the host until all that was queued is done."""
    return device.type == "cuda"
