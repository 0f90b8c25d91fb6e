"""What graphs read in the place of the weights that they lower: shadows, or a cast at each forward under FSDP.

FSDP's full weight exists from its block's pre-forward to its post-forward hook, at an address that the allocator may
give again. A shadow kept until the next forward would hold the whole model on every rank, and its autograd edge would
miss the block's reduction of gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fxprec.shadows import ShadowStore
from fxprec.torch_internals import sharded_modules


class Weights:
    """The low weights of one converted model. Knows nothing of the model: dynamo keeps the graphs that read them.

    Attributes:
        store: the shadows.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.store = ShadowStore(dtype)
        self._dtype = dtype
        self.come_and_go = False
        self._sharded: tuple[int, ...] = ()  # the living FSDP modules when it was last asked

    def begin(self, module: torch.nn.Module) -> None:
        """Note the start of a forward of ``module``, the whole model."""
        came_and_went, sharded = self.come_and_go, sharded_modules()
        if (ids := tuple(map(id, sharded))) != self._sharded:
            self._sharded, self.come_and_go = ids, _manages_part_of(module, sharded)
        if self.come_and_go and not came_and_went:
            self.store.clear()  # made before the model was sharded: they would keep the whole weights alive
        self.store.begin(module)

    def read(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """The low copies of ``weights``, in order."""
        if self.come_and_go:
            return [weight.to(self._dtype) for weight in weights]
        return self.store.read(weights)


def _manages_part_of(module: torch.nn.Module, sharded: list[torch.nn.Module]) -> bool:
    """Whether one of them is in the module, or around it: FSDP manages the weights of submodules too."""
    ours = {*map(id, module.modules())}
    return any(id(part) in ours for each in sharded for part in each.modules())
