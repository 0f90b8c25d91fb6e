"""Which steps were skipped, and where the overflow was: kept on the device, read when somebody asks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from fxprec.scaling.gradients import local, parameters_of

__all__ = ["Skips"]


class Skips:
    """The skipped steps of one scaler; ``count`` is where it starts from."""

    def __init__(self, count: int = 0) -> None:
        self._known = count
        self._on_device: dict[torch.device, Tensor] = {}
        self._last: list[bool | Tensor] = []
        self._open = False
        self._overflow: list[str] | tuple[list[str], Tensor] = []
        self._unread: list[tuple[weakref.ref[Optimizer], Tensor]] = []

    def __reduce__(self) -> tuple[type[Skips], tuple[int]]:
        return Skips, (self.count,)

    @property
    def last(self) -> bool:
        """Whether a step of the newest iteration that stepped was skipped."""
        return any(bool(flag) for flag in self._last)

    @property
    def count(self) -> int:
        return self._known + sum(int(count.item()) for count in self._on_device.values())

    def begin(self) -> None:
        """The next step is one of a new iteration."""
        self._open = False

    def note_step(self, optimizer: Optimizer) -> None:
        """A step that the host knows to have run."""
        self._append(False)

    def note_skip(self, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        """A step that the host knows to have been skipped: remember where, before the gradients go."""
        self._append(True)
        self._known += 1
        self._unread.clear()
        held = [(names[id(p)], _finite(p.grad)) for p in parameters_of(optimizer) if p.grad is not None]
        device = held[0][1].device
        flags = torch.stack([finite.to(device, non_blocking=True) for _, finite in held])
        self._overflow = [name for name, _ in held], ~flags

    def note_on_device(self, optimizer: Optimizer, found: Mapping[torch.device, Tensor]) -> None:
        """A step that only the device knows about. ``found``: its flags."""
        device, flag = next(iter(found.items()))
        if len(found) > 1:
            flag = torch.stack([f.to(device, non_blocking=True) for f in found.values()]).amax()
        skipped = (flag > 0).view(())
        self._append(skipped)
        if device not in self._on_device:
            self._on_device[device] = torch.zeros((), dtype=torch.int64, device=device)
        self._on_device[device] += skipped
        self._unread.append((weakref.ref(optimizer), skipped))

    def parameters(self, names_of: Callable[[Optimizer], Mapping[int, str]]) -> list[str]:
        """Names of the parameters of the last overflow."""
        for reference, skipped in self._unread:
            optimizer = reference()
            if optimizer is not None and bool(skipped):
                names = names_of(optimizer)
                held = [(names[id(p)], p.grad) for p in parameters_of(optimizer) if p.grad is not None]
                self._overflow = [name for name, gradient in held if not _finite(gradient)]
        self._unread.clear()
        if isinstance(self._overflow, tuple):
            self._overflow = [name for name, bad in zip(*self._overflow, strict=True) if bad]
        return [*self._overflow]

    def _append(self, flag: bool | Tensor) -> None:
        if not self._open:
            self._open = True
            self._last.clear()
            self._unread.clear()
        self._last.append(flag)


def _finite(gradient: Tensor) -> Tensor:
    """Whether all of it is; a 0-dim tensor on its device."""
    held = local(gradient)
    held = held.coalesce().values() if held.layout is torch.sparse_coo else held
    return torch.isfinite(held).all()
