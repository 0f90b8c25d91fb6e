"""What graphs read in the place of the weights that they lower: shadows, or a cast at each forward under FSDP.

FSDP's full weight exists from its block's pre-forward to its post-forward hook, at an address that the allocator may
give again. A shadow kept until the next forward would hold the whole model on every rank, and its autograd edge would
miss the block's reduction of gradients.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from fxprec.shadows import ShadowStore

__all__ = ["Weights"]


class Weights:
    """The low weights of one converted model. Knows nothing of the model: dynamo keeps the graphs that read them.

    Attributes:
        store: the shadows.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.store = ShadowStore(dtype)
        self._dtype = dtype
        self.come_and_go = False

    def begin(self) -> None:
        """Note the start of a forward of the whole model."""
        came_and_went, self.come_and_go = self.come_and_go, _fsdp_is_on()
        if self.come_and_go and not came_and_went:
            self.store.clear()  # made before the model was sharded: they would keep the whole weights alive
        self.store.begin()

    def read(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """The low copies of ``weights``, in order."""
        if self.come_and_go:
            return [weight.to(self._dtype) for weight in weights]
        return self.store.read(weights)


def _fsdp_is_on() -> bool:
    """Whether ``fully_shard`` was applied to any living module: it manages the weights of submodules inside, too."""
    composable = sys.modules.get("torch.distributed._composable_state")
    if composable is None or not composable._module_state_mapping:
        return False
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(isinstance(module, fsdp.FSDPModule) for module in composable._module_state_mapping)
