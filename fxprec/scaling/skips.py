"""Which steps were skipped, and where the overflow was: kept on the device, read when somebody asks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from fxprec.scaling.gradients import local_values, parameters_of

#: That many flags of one device are kept before they are added up there: a kernel in so many steps.
_FLAGS = 256


class Skips:
    """The skipped steps of one scaler.

    Args:
        count: overflows before.
        without_gradients: steps before that were passed over, since their optimizers had no gradients.
    """

    def __init__(self, count: int = 0, without_gradients: int = 0) -> None:
        self._known = count
        self.without_gradients = without_gradients
        self._passed_over = False  # a step of the newest iteration
        self._flags: dict[torch.device, list[Tensor]] = {}
        self._last: list[bool | Tensor] = []
        self._open = False
        #: Of the last iteration that is known to have skipped: names, and which of them overflowed.
        self._overflow: list[tuple[list[str], Tensor]] = []
        #: The skips there had been when it was noted.
        self._noted_at = count
        #: The newest iteration's steps that only the device knows about.
        self._unread: list[tuple[weakref.ref[Optimizer], Tensor]] = []

    @property
    def last(self) -> bool:
        """Return whether a step of the newest iteration that stepped was skipped."""
        return self._passed_over or any(bool(flag) for flag in self._last)

    @property
    def count(self) -> int:
        """Return how many steps were skipped for an overflow. Reads the device."""
        return self._known + sum(int(torch.stack(flags).sum().item()) for flags in self._flags.values())

    def begin(self) -> None:
        """The next step is one of a new iteration."""
        self._open = False

    def note_step(self) -> None:
        """A step that the host knows to have run."""
        self._append(False)

    def note_without_gradients(self) -> None:
        """A step that was passed over: where the last overflow was is remembered."""
        self._append(False)
        self._passed_over = True
        self.without_gradients += 1

    def note_skip(self, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        """A step that the host knows to have been skipped: remember where, before the gradients go."""
        first = not any(flag is True for flag in self._last) or not self._open
        self._append(True)
        self._known += 1
        if first:
            self._overflow.clear()
        self._note_overflow(optimizer, names)

    def note_on_device(self, optimizer: Optimizer, found: Mapping[torch.device, Tensor]) -> None:
        """A step that only the device knows about. ``found``: its flags, each 0 or 1."""
        device, flag = next(iter(found.items()))
        if len(found) > 1:
            flag = torch.stack([f.view(()).to(device, non_blocking=True) for f in found.values()]).amax()
        self._append(flag)
        self._unread.append((weakref.ref(optimizer), flag))
        flags = self._flags.setdefault(device, [])
        flags.append(flag.view(()))
        if len(flags) == _FLAGS:
            flags[:] = [torch.stack(flags).sum(dtype=torch.float32)]

    def parameters(self, names_of: Callable[[Optimizer], Mapping[int, str]]) -> list[str]:
        """Names of the parameters of the last overflow; none if it was skipped on the device and nobody asked then.

        Backwards, as the gradients came: an overflow spreads from the layer where it began to those before it.
        """
        if self._unread:
            skipped = [reference() for reference, flag in self._unread if bool(flag)]
            self._unread.clear()
            if skipped and not any(flag is True for flag in self._last):
                self._overflow.clear()
            for optimizer in skipped:
                if optimizer is not None:
                    self._note_overflow(optimizer, names_of(optimizer))
        if self._noted_at != self.count:
            return []
        overflow = [pair for names, bad in self._overflow for pair in zip(names, bad.tolist(), strict=True)]
        return [name for name, bad in reversed(overflow) if bad]

    def _note_overflow(self, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        held = [(names[id(p)], local_values(p.grad)) for p in parameters_of(optimizer) if p.grad is not None]
        if held:  # not so on a rank that skips because others do
            device = held[0][1].device
            flags = torch.stack([torch.isfinite(g).all().to(device, non_blocking=True) for _, g in held])
            self._overflow.append(([name for name, _ in held], ~flags))
        self._noted_at = self.count

    def _append(self, flag: bool | Tensor) -> None:
        if not self._open:
            self._open = True
            self._passed_over = False
            self._last.clear()
            self._unread.clear()
        self._last.append(flag)
