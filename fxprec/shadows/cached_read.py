"""Caches the result of one read of shadows, with the facts by which it is checked.

Between two reads of the same weights mostly nothing happens, or an optimizer steps on all of them. A few C loops over
flat lists recognize both cases; for any other the store goes through the weights one by one.
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
class CachedRead:
    """Shadows of a list of weights, and the weights' metadata when they were copied.

    Attributes:
        shadows, aliases: of each weight; an alias shares the storage of the shadow but not its version counter.
        distinct: number of different weights.
        device: of all of them; None if there are several.
        edges: AccumulateGrad nodes of the weights that require gradients.
        looks: comparisons of sampled elements, which show writes past the version counters.
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
    def of(cls, weights: Sequence[Tensor], entries: Sequence[Entry], looks: Sequence[Look] = ()) -> CachedRead:
        """Return the cached read of weights whose shadows are up to date."""
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
        """Return whether no weight shows a change. Addresses are compared first: samples are read at them."""
        return (
            [*map(_version, weights)] == self.versions
            and [*map(_pointer, weights)] == self.pointers
            and same(self.looks)
        )

    def fits(self, weights: Sequence[Tensor]) -> bool:
        """Return whether the shadows still belong to the weights' memory, shapes and autograd nodes."""
        return (
            [*map(_pointer, weights)] == self.pointers
            and [*map(_shape, weights)] == self.shapes
            and [*map(_requires_grad, weights)] == self.requires_grad
            # swap_tensors exchanges what is inside two tensors: the edge then leads to the other one.
            and all(map(operator.is_, map(_variable, self.edges), compress(weights, self.requires_grad)))
        )

    def changed(self, weights: Sequence[Tensor]) -> bool | None:
        """Return whether all versions changed (True) or none (False); None if only some did."""
        # Lists compared by C loops: a call of Python for each weight would take longer than its copy.
        same = [*map(operator.eq, map(_version, weights), self.versions)]
        return None if any(same) and not all(same) else not any(same)

    def note_versions(self, weights: Sequence[Tensor]) -> list[int]:
        """Take the weights' current versions as those of the shadows; return them."""
        self.versions[:] = map(_version, weights)
        return self.versions

    def copy(self, weights: Sequence[Tensor], *, changed: bool) -> None:
        """Copy all weights to their shadows, under ``no_grad``.

        ``changed``: on the shadows themselves, whose version counters then report it to autograd; else on the aliases.
        """
        targets: Any = self.shadows if changed else self.aliases
        foreach_copy_(targets, [*weights])
