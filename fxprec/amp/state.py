"""What apex's interface keeps between calls, since ``state_dict()`` and ``scale_loss`` take no object that could.

All of it is in ``state``, and nowhere else. It is what ``apex.amp._amp_state`` is, as far as scripts read that one.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from fxprec.amp.properties import Properties

if TYPE_CHECKING:
    from fxprec.amp.loss_scale import AmpLossScaler

__all__ = ["AmpState", "Kind", "Registration", "say", "state"]

#: What a decorated or registered function computes in: the low dtype, FP32, or the widest of its arguments.
Kind = Literal["half", "float", "promote"]


@dataclass(frozen=True)
class Registration:
    """One ``register_*`` call; ``op``: the canonical name, for what becomes an override."""

    module: Any
    name: str
    kind: Kind
    op: str | None = None


class AmpState:
    """The state of ``fxprec.amp`` in this process.

    Attributes:
        opt_properties: those of the last ``initialize``; None before the first.
        loss_scalers: one a loss; the last ``initialize`` made them.
        verbosity: 0: nothing is printed.
        models: every model that went through ``initialize``.
        device: device type of the last models.
        low: what decorated functions lower to; None: they do nothing.
        disabled: how many ``disable_casts`` blocks are open.
        registered: the functions named by ``register_*``, in order.
    """

    def __init__(self) -> None:
        self.opt_properties: Properties | None = None
        self.loss_scalers: list[AmpLossScaler] = []
        self.verbosity = 1
        self.models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.device = "cpu"
        self.low: torch.dtype | None = None
        self.disabled = 0
        self.registered: list[Registration] = []

    def properties(self, call: str) -> Properties:
        """Those of the last ``initialize``.

        Raises:
            RuntimeError: there was none.
        """
        if self.opt_properties is None:
            raise RuntimeError(
                f"{call} was called, but amp has not been initialized: model, optimizer = amp.initialize(model, "
                "optimizer, opt_level=...) must come first"
            )
        return self.opt_properties


state = AmpState()


def say(message: Any, rank0: bool = False) -> None:
    """Print, unless ``verbosity`` is 0; with ``rank0`` on the first rank only."""
    if state.verbosity <= 0:
        return
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not rank0 or not distributed or torch.distributed.get_rank() == 0:
        print(message)
