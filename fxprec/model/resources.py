"""What all graphs of one converted model share."""

from __future__ import annotations

import contextlib
from typing import Any

from fxprec.model.net import Net
from fxprec.model.wrappers import Wrappers
from fxprec.programs.packed_weights import PackedWeights
from fxprec.settings import Settings
from fxprec.shadows import ShadowStore


class Resources:
    """What the graphs of one converted model are made by, and run on.

    Attributes:
        settings: of the conversion.
        store: the low copies of its weights.
        wrappers: the functions that stand in the places of its methods.
        packed: the packed copies of the weights of a frozen model; None: it runs on plain ones.
    """

    def __init__(self, settings: Settings, packs: bool) -> None:
        self.settings = settings
        self.store = ShadowStore(settings.dtype)
        self.wrappers = Wrappers()
        self.packed = self.new_packed() if packs else None

    def new_packed(self) -> PackedWeights | None:
        """Return a store of packed weights, where what runs the graphs is not inductor, which has its own."""
        if self.settings.executor != "eager":
            return None
        return PackedWeights(self.settings.context(gradients=False), self.store)

    def net_context(self) -> contextlib.AbstractContextManager[Any]:
        """Return torch.autocast in the low dtype, for what runs outside of the graphs; at O0 a context of nothing."""
        if self.settings.policy.level == "O0":
            return contextlib.nullcontext()
        return Net(self.settings.device, self.settings.dtype)
