"""The answer to one read of shadows, kept, and the signs by which it still holds.

Between two reads of the same weights mostly nothing happens, or an optimizer steps on all of them. Both are told by a
few C loops over flat lists; whatever else happened is for the store, which looks at one weight after the other.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from fxprec.shadows.entry import Entry
from fxprec.shadows.samples import Look, same
from fxprec.torch_internals import foreach_copy_

_version = operator.attrgetter("_version")
_requires_grad = operator.attrgetter("requires_grad")
_shape = operator.attrgetter("shape")
_variable = operator.attrgetter("variable")
_pointer = Tensor.data_ptr


@dataclass(frozen=True, slots=True)
class Plan:
    """Shadows of a list of weights, and what the weights were like when they were copied.

    Attributes:
        shadows, aliases: of each weight; an alias shares the storage of the shadow but not its version counter.
        distinct: how many different weights.
        device: of all of them; None where there are several.
        edges: of the shadows of weights that are differentiated.
        looks: at sampled elements of the weights, which change where no version does.
    """

    shadows: list[Tensor]
    aliases: list[Tensor]
    distinct: int
    device: torch.device | None
    versions: list[int]
    pointers: list[int]
    shapes: list[torch.Size]
    requires_grad: list[bool]
    edges: list[Any]
    looks: Sequence[Look] = ()

    @classmethod
    def of(cls, weights: Sequence[Tensor], entries: Sequence[Entry], looks: Sequence[Look] = ()) -> Plan:
        devices = {weight.device for weight in weights}
        return cls(
            [entry.shadow for entry in entries],
            [entry.alias for entry in entries],
            len({*map(id, weights)}),
            devices.pop() if len(devices) == 1 else None,
            [entry.version for entry in entries],
            [*map(_pointer, weights)],
            [*map(_shape, weights)],
            [*map(_requires_grad, weights)],
            [entry.edge for entry in entries if entry.edge is not None],
            looks,
        )

    def holds(self, weights: Sequence[Tensor]) -> bool:
        """Whether no weight shows a change. Addresses come first: samples are read at them."""
        return (
            [*map(_version, weights)] == self.versions
            and [*map(_pointer, weights)] == self.pointers
            and same(self.looks)
        )

    def fits(self, weights: Sequence[Tensor]) -> bool:
        """Whether the shadows still fit the weights, whatever their values are."""
        return (
            [*map(_pointer, weights)] == self.pointers
            and [*map(_shape, weights)] == self.shapes
            and [*map(_requires_grad, weights)] == self.requires_grad
            and all(map(operator.is_, map(_variable, self.edges), compress(weights, self.requires_grad)))
        )

    def changed(self, weights: Sequence[Tensor]) -> bool | None:
        """Whether the versions say that all weights changed, or none; None: some of them."""
        same = [*map(operator.eq, map(_version, weights), self.versions)]
        return None if any(same) and not all(same) else not any(same)

    def note_versions(self, weights: Sequence[Tensor]) -> list[int]:
        """Their changes are known from now on."""
        self.versions[:] = map(_version, weights)
        return self.versions

    def copy(self, weights: Sequence[Tensor], *, changed: bool) -> None:
        """Copy all weights to their shadows, under ``no_grad``: where they changed, so that autograd sees it."""
        targets: Any = self.shadows if changed else self.aliases
        foreach_copy_(targets, [*weights])
