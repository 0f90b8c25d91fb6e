"""Whether FSDP is at work: the storage of its weights comes and goes, so nothing may be kept beside it.

A full weight exists from its block's pre-forward to its post-forward hook, at an address that the allocator may give
again. A shadow kept until the next forward would hold the whole model on every rank, and its autograd edge would miss
the block's reduction of gradients.
"""

from __future__ import annotations

import sys

__all__ = ["fsdp_is_on"]


def fsdp_is_on() -> bool:
    """Whether ``fully_shard`` was applied to any living module: it manages the weights of submodules inside, too."""
    composable = sys.modules.get("torch.distributed._composable_state")
    if composable is None or not composable._module_state_mapping:
        return False
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(isinstance(module, fsdp.FSDPModule) for module in composable._module_state_mapping)
