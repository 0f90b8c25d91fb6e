"""Keys that the scaler adds to torch's state of an optimizer within an iteration (stage, found_inf_per_device)."""

from __future__ import annotations

from typing import Final

#: Unscaled gradients of earlier losses, put aside until those of a ``scale_loss`` are unscaled.
ASIDE: Final = "aside"
#: The loss whose gradients a ``scale_loss`` left scaled.
DELAYED: Final = "delayed"
#: A ``scale_loss`` block is open. / One was closed.
OPEN: Final = "open"
BLOCKS: Final = "blocks"
#: loss -> flags of its gradients.
BY_LOSS: Final = "found_inf_by_loss"
#: What an optimizer's own ``check_gradients`` found.
CHECK: Final = "check"
