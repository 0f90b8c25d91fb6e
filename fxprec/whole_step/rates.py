"""Keep learning rates in device memory, so that schedulers work: a graph holds a Python number as it was captured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Rates:
    """Learning rates of one optimizer, one 0-dim tensor for each group whose ``lr`` is a number.

    ``param_groups`` keep their numbers, for schedulers and state dicts. An ``lr`` that is a tensor on the device is
    left to the graph, which reads it there: schedulers write into it.

    Args:
        optimizer: fxprec's take FP64, so that a captured step has the bits of an eager one. Torch's fused kernels on
            CUDA read FP32.
        device: where the graph runs.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self._optimizer = optimizer
        # A rate rounded to FP32 would give other bits than the Python number of an eager step.
        ours = getattr(optimizer, "writes_shadows", False)
        dtype = torch.float64 if ours or device.type == "cpu" else torch.float32
        self._device = device
        groups = optimizer.param_groups
        self._sent = [None if self._on_device(g["lr"]) else float(g["lr"]) for g in groups]
        self._tensors = [None if n is None else torch.full((), n, dtype=dtype, device=device) for n in self._sent]
        self._read = [g["lr"] if n is None else None for g, n in zip(groups, self._sent, strict=True)]

    @contextmanager
    def in_groups(self) -> Iterator[None]:
        """Put the tensors in the places of the numbers while the context lasts."""
        groups = self._optimizer.param_groups
        numbers = [group["lr"] for group in groups]
        try:
            for group, tensor in zip(groups, self._tensors, strict=True):
                group["lr"] = group["lr"] if tensor is None else tensor
            yield
        finally:
            for group, number in zip(groups, numbers, strict=True):
                group["lr"] = number

    @contextmanager
    def capturable(self) -> Iterator[None]:
        """Set ``capturable``, for which torch's Adam asks while a graph is captured; its fused kernel is so anyway."""
        groups = [group for group in self._optimizer.param_groups if "capturable" in group]
        before = [group["capturable"] for group in groups]
        try:
            for group in groups:
                group["capturable"] = True
            yield
        finally:
            for group, value in zip(groups, before, strict=True):
                group["capturable"] = value

    def send(self) -> None:
        """Bring the numbers of the groups to the device, those that changed."""
        for place, (group, tensor) in enumerate(zip(self._optimizer.param_groups, self._tensors, strict=True)):
            if tensor is not None and (now := float(group["lr"])) != self._sent[place]:
                tensor.fill_(now)
                self._sent[place] = now

    def changed(self) -> str | None:
        """Return what makes the graph read another tensor than that of a group; None where nothing does."""
        for place, (group, known) in enumerate(zip(self._optimizer.param_groups, self._read, strict=True)):
            lr: Any = group["lr"]
            if (lr is not known) if known is not None else self._on_device(lr):
                return f"param_groups[{place}]['lr'] is another tensor"
        return None

    def _on_device(self, lr: Any) -> bool:
        return isinstance(lr, Tensor) and (lr.device.type != "cpu" or self._device.type == "cpu")
