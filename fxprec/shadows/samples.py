"""Compares sampled elements of each weight with those at the last copy, to see writes that no version counter shows.

``Tensor._version`` counts what torch's ops write through the tensor itself. Collectives, ``weight.data``, a flat buffer
that weights are views of, NumPy, DLPack and storages write past it. A write to all of a weight changes the few elements
that are compared here, so it is seen however it was made; one that leaves them as they were is not. Scaling a pruned
weight changes no zeros: where nearly all samples on a CPU are zeros, other elements are sampled instead.

On a CPU all weights are compared by one gather of their elements and one ``torch.equal``. On CUDA the host would have
to wait for the answer; there two kernels compare and copy (``DeviceLook``), without a sync.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from itertools import chain
from typing import Final

import torch
from torch import Tensor

from fxprec.kernels.cpu.words import SAMPLES, WORD, nonzero_addresses, places_of, sampled_addresses, words
from fxprec.kernels.launch.observers import unwatched
from fxprec.kernels.launch.operands import is_dense_tensor
from fxprec.kernels.torch_internals import dispatch_modes
from fxprec.shadows.entry import Entry

_FIRST_ROWS: Final = 64
#: A weight with at most so many samples other than zero gets new ones.
_FEW: Final = SAMPLES // 4


def samples_of(weight: Tensor) -> tuple[int, ...]:
    """Return the addresses of a weight's samples; () if they cannot be compared without a sync."""
    if weight.is_cuda:
        from fxprec.kernels.launch.triton_support import can_launch  # which loads Triton

        able = can_launch(weight.device) and is_dense_tensor(weight)
    else:
        able = weight.device.type == "cpu" and weight.data_ptr() % WORD == 0
    return tuple(sampled_addresses(weight)) if able else ()


class Samples:
    """Sampled elements of a store's weights on one device, noted as a row of int32 (their bits) for each weight.

    Attributes:
        values: all rows, flat; replaced by a larger tensor when rows run out.
        chosen: a count, raised whenever a weight gets other samples: a look that saw another one reads the addresses
            again.
    """

    def __init__(self, device: torch.device) -> None:
        self.chosen = 0
        self.values = self._zeros(_FIRST_ROWS, device)
        self._next = 0
        self._free: list[int] = []

    def take_row(self) -> int:
        """Reserve a row for a weight and return its number."""
        if self._free:
            return self._free.pop()
        row, self._next = self._next, self._next + 1
        # Doubled, so that the rows of n weights are copied O(n) times in all.
        if self._next * SAMPLES > self.values.numel():
            more = self._zeros(2 * self._next, self.values.device)
            more[: self.values.numel()].copy_(self.values)
            self.values = more
        return row

    def give_back(self, row: int) -> None:
        """Release a row for another weight."""
        self._free.append(row)

    @staticmethod
    def _zeros(rows: int, device: torch.device) -> Tensor:
        # Rows made under inference_mode are written in training, too.
        with torch.inference_mode(False):
            return torch.zeros(rows * SAMPLES, dtype=torch.int32, device=device)


class HostLook:
    """Comparison of weights in the memory of this process with their noted samples.

    It keeps their memory alive, so that an equal address means the same memory.
    """

    def __init__(self, samples: Samples, pairs: Sequence[tuple[Tensor, Entry]]) -> None:
        self._samples = samples
        self._storages = [weight.untyped_storage() for weight, _ in pairs]
        self._entries = [entry for _, entry in pairs]
        self._chosen = -1
        # Number of zeros among all samples at the last search for others.
        self._zeros = 0
        # Consecutive rows, as of weights made together, are one view: no gather, no scatter.
        rows = [entry.row for _, entry in pairs]
        self._rows = rows
        self._successive = rows == [*range(rows[0], rows[0] + len(rows))]
        # The values that ``_noted`` is a view of, and ``_numbers`` are positions in.
        self._noted_from: Tensor | None = None
        self._noted = self._numbers = torch.empty(0)

    def same(self) -> bool:
        """Return whether no weight differs from its row."""
        # Modes should see the model's ops only.
        with unwatched() if dispatch_modes() else nullcontext():
            return torch.equal(*self._now_and_noted())

    def note(self) -> None:
        """Write the current samples of each weight to its row."""
        with unwatched() if dispatch_modes() else nullcontext():
            now, noted = self._now_and_noted()
            # As floats, so that -0.0 counts as zero: a pruning mask makes it of a negative number.
            samples = now.view(torch.float32)
            zeros = len(samples) - int(samples.count_nonzero())
            # Fewer zeros in all than nearly all of one weight's samples: no weight has so many. As many as at the last
            # search: another would find the same.
            if zeros >= SAMPLES - _FEW and zeros != self._zeros:
                self._zeros = zeros
                few = samples.view(-1, SAMPLES).count_nonzero(1) <= _FEW
                if few.any() and self._choose(few.nonzero().view(-1).tolist()):
                    now, noted = self._now_and_noted()
            if self._successive:
                noted.copy_(now)
            else:
                self._samples.values.index_copy_(0, self._numbers, now)

    def _now_and_noted(self) -> tuple[Tensor, Tensor]:
        """Return the sampled elements as they are now, and as they were noted: a view if the rows are consecutive."""
        # ``_chosen`` and ``_noted_from``, which are compared without a lock, are set after what they stand for: another
        # thread must not find them new and the rest old.
        if self._chosen != (chosen := self._samples.chosen):
            self._places = places_of(chain.from_iterable(entry.samples for entry in self._entries))
            self._chosen = chosen
        values = self._samples.values
        if self._noted_from is not values:
            if self._successive:
                self._noted = values[self._rows[0] * SAMPLES : (self._rows[-1] + 1) * SAMPLES]
            else:
                rows = torch.tensor(self._rows, device="cpu").unsqueeze(1) * SAMPLES
                self._numbers = (rows + torch.arange(SAMPLES, device="cpu")).view(-1)
            self._noted_from = values
        noted = self._noted if self._successive else values.index_select(0, self._numbers)
        return words(self._places), noted

    def _choose(self, numbers: Iterable[int]) -> bool:
        """Sample nonzero elements of these weights from now on; return whether any samples changed."""
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


class DeviceLook:
    """Comparison of dense weights on a CUDA device, which copies them to their shadows if one changed."""

    def __init__(self, samples: Samples, pairs: Sequence[tuple[Tensor, Entry]]) -> None:
        from fxprec.kernels.optim.changed_copies import ChangedCopies  # which loads Triton

        self._samples = samples
        self._copies = ChangedCopies(
            [weight.detach() for weight, _ in pairs],
            [entry.alias for _, entry in pairs],
            [entry.samples for _, entry in pairs],
            [entry.row for _, entry in pairs],
        )

    def same(self) -> bool:
        """Launch the comparison and the copies, which precede the next kernel of the stream; return True."""
        self._copies.launch(self._samples.values)
        return True

    def note(self) -> None:
        """Write the current samples of each weight to its row."""
        self._copies.note(self._samples.values)


#: Comparison of some weights on one device with their noted samples.
Look = HostLook | DeviceLook


def look_at(samples: Samples, pairs: Sequence[tuple[Tensor, Entry]]) -> Look:
    """Return the comparison of weights that all have rows in ``samples``."""
    return (DeviceLook if samples.values.is_cuda else HostLook)(samples, pairs)


def note(looks: Iterable[Look]) -> None:
    """Write the current samples of all weights of these looks to their rows."""
    for look in looks:
        look.note()


def same(looks: Iterable[Look]) -> bool:
    """Return whether no weight of these differs from its row. A list, since each look on a device launches copies."""
    return all([look.same() for look in looks])
