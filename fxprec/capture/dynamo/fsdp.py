"""Modules of ``torch.nn`` that FSDP shards by themselves: dynamo would leave them to the interpreter.

A call of a sharded module is a graph break, for its hooks, and what comes next is the frame of its ``forward``. Of a
class of the user's dynamo captures it; frames of torch's own code (``nn.Sequential``, ``nn.Linear``) it skips unless it
is within a graph already. So such a module's forward gets a frame around it, for the time of the call.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from torch import nn

from fxprec.torch_internals import skipped_by_dynamo, wrap_inline


@contextlib.contextmanager
def frames_of_shards(module: nn.Module) -> Iterator[None]:
    """Within the block dynamo captures the sharded modules of torch's in ``module``. Only where FSDP is in use."""
    fsdp = sys.modules["torch.distributed.fsdp"]  # imported by whoever sharded something
    shards = [part for part in module.modules() if part is not module and isinstance(part, fsdp.FSDPModule)]
    framed = [part for part in shards if "forward" not in part.__dict__ and skipped_by_dynamo(part.forward)]
    for part in framed:
        part.__dict__["forward"] = wrap_inline(part.forward)
    try:
        yield
    finally:
        for part in framed:
            part.__dict__.pop("forward", None)
