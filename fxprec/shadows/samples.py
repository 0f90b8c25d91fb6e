"""Some elements of each weight as they were at the last copy: what shows a write that no version counter counts.

``Tensor._version`` counts what torch's ops write through the tensor itself. Collectives, ``weight.data``, a flat buffer
that weights are views of, NumPy, DLPack and storages write past it. A write to all of a weight changes the few elements
that are compared here, so it is seen whatever road it came; one that leaves them as they were is not. To scale a pruned
weight changes no zeros: where nearly all that is noted on a CPU are zeros, others are looked for, and noted.

On a CPU all weights are compared by one gather of their elements and one ``torch.equal``. On CUDA the host would have
to wait for the answer; there two kernels compare and copy (``device_look``), and nobody waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Final, Protocol

import torch
from torch import Tensor

from fxprec.kernels.cpu.words import SAMPLES, WORD, nonzero_addresses, places_of, sampled_addresses, words
from fxprec.kernels.launch.observers import ANY_MODE, unwatched, watcher
from fxprec.shadows.entry import Entry

_FIRST_ROWS: Final = 64
#: With no more samples of a weight that are not zero, others are chosen.
_FEW: Final = SAMPLES // 4


def samples_of(weight: Tensor) -> tuple[int, ...]:
    """Return the addresses of the elements that stand for a weight; () where none can be compared without waiting."""
    if weight.is_cuda:
        from fxprec.shadows.device_look import can_look_at  # which loads Triton

        able = can_look_at(weight)
    else:
        able = weight.device.type == "cpu" and weight.data_ptr() % WORD == 0
    return tuple(sampled_addresses(weight)) if able else ()


class Samples:
    """The sampled elements of a store's weights on one device, a row of int32 (their bits) each.

    Attributes:
        values: of all rows, flat; another tensor once there are more rows.
        chosen: how often other elements of weights were chosen, so that every look finds out.
    """

    def __init__(self, device: torch.device) -> None:
        self.chosen = 0
        self.values = self._zeros(_FIRST_ROWS, device)
        self._next = 0
        self._free: list[int] = []

    def take_row(self) -> int:
        """Return a row that no other weight has."""
        if self._free:
            return self._free.pop()
        row, self._next = self._next, self._next + 1
        if self._next * SAMPLES > self.values.numel():
            more = self._zeros(2 * self._next, self.values.device)
            more[: self.values.numel()].copy_(self.values)
            self.values = more
        return row

    def give_back(self, row: int) -> None:
        """Let another weight have the row."""
        self._free.append(row)

    @staticmethod
    def _zeros(rows: int, device: torch.device) -> Tensor:
        with torch.inference_mode(False):  # rows that are made in an inference are written in a training
            return torch.zeros(rows * SAMPLES, dtype=torch.int32, device=device)


class Look(Protocol):
    """A comparison of some weights on one device with what was noted of them.

    It keeps their memory alive, so that an address that it knows is theirs for as long as it compares equal.
    """

    def same(self) -> bool:
        """Return whether no weight differs from its row. On CUDA True: those that differ are copied on the device."""
        ...

    def note(self) -> None:
        """Write to each row what its weight is now."""
        ...


def look_at(samples: Samples, pairs: Sequence[tuple[Tensor, Entry]]) -> Look:
    """Return the comparison of weights that all have rows in ``samples``."""
    if samples.values.is_cuda:
        from fxprec.shadows.device_look import DeviceLook

        return DeviceLook(samples, pairs)
    return HostLook(samples, pairs)


class HostLook:
    """A ``Look`` at weights in this process's memory."""

    def __init__(self, samples: Samples, pairs: Sequence[tuple[Tensor, Entry]]) -> None:
        self._samples = samples
        self._storages = [weight.untyped_storage() for weight, _ in pairs]
        self._entries = [entry for _, entry in pairs]
        self._chosen = -1
        self._zeros = 0  # among all samples, when others were chosen
        rows = [entry.row for _, entry in pairs]
        self._rows = rows
        self._successive = rows == [*range(rows[0], rows[0] + len(rows))]
        self._of: Tensor | None = None  # the values that ``_noted`` is of
        self._noted = self._numbers = torch.empty(0)

    def same(self) -> bool:
        if watcher(ANY_MODE) is not None:  # which is to see the ops of the model
            with unwatched():
                return self._same()
        return self._same()

    def _same(self) -> bool:
        return torch.equal(self._now(), self._read())

    def _now(self) -> Tensor:
        if self._chosen != self._samples.chosen:
            self._chosen = self._samples.chosen
            self._places = places_of(chain.from_iterable(entry.samples for entry in self._entries))
        return words(self._places)

    def note(self) -> None:
        if watcher(ANY_MODE) is not None:
            with unwatched():
                self._note()
        else:
            self._note()

    def _note(self) -> None:
        now = self._now()
        samples = now.view(torch.float32)  # -0.0 is zero, too: a mask makes it of what is negative
        zeros = len(samples) - int(samples.count_nonzero())
        if zeros >= SAMPLES - _FEW and zeros != self._zeros:  # or there is no such weight, or it has only zeros
            self._zeros = zeros
            few = samples.view(-1, SAMPLES).count_nonzero(1) <= _FEW
            if few.any() and self._choose(few.nonzero().view(-1).tolist()):
                now = self._now()
        noted = self._read()
        if self._successive:
            noted.copy_(now)
        else:
            self._samples.values.index_copy_(0, self._numbers, now)

    def _choose(self, numbers: Iterable[int]) -> bool:
        """Have elements that are not zero stand for these weights from now on; return whether others do."""
        found = False
        for entry in map(self._entries.__getitem__, numbers):
            weight = entry.weight()
            if weight is None or weight.data_ptr() != entry.pointer:
                continue
            chosen = tuple(nonzero_addresses(weight))
            if chosen and chosen != entry.samples:
                entry.samples, found = chosen, True
        self._samples.chosen += found
        return found

    def _read(self) -> Tensor:
        """Return what was noted; where rows are successive, a view of it."""
        values = self._samples.values
        if self._of is not values:
            self._of = values
            if self._successive:
                self._noted = values[self._rows[0] * SAMPLES : (self._rows[-1] + 1) * SAMPLES]
            else:
                rows = torch.tensor(self._rows, device="cpu").unsqueeze(1) * SAMPLES
                self._numbers = (rows + torch.arange(SAMPLES, device="cpu")).view(-1)
        return self._noted if self._successive else values.index_select(0, self._numbers)


def note(looks: Iterable[Look]) -> None:
    """Write to each row of these what its weight is now."""
    for look in looks:
        look.note()


def same(looks: Iterable[Look]) -> bool:
    """Return whether no weight of these differs from its row."""
    return all([look.same() for look in looks])
