"""Copy a model under other settings, to see what a change would give."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from torch import nn

from fxprec.model.module import attach, conversion_of, take_off


def converted_anew(model: nn.Module, **changed: Any) -> nn.Module:
    """Return a copy that is as ``fxprec.convert`` makes it: what can be captured without inputs is captured at once.

    Raises:
        FxprecError: as ``fxprec.convert``: an override matches nothing, say.
    """
    copied = under(model, **changed)
    conversion = conversion_of(copied)
    conversion.capture_now(copied)
    conversion.check_policy(copied)
    return copied


def under(model: nn.Module, **changed: Any) -> nn.Module:
    """Return a copy of a converted model, converted with its settings, but for those that are given."""
    settings = conversion_of(model).settings
    copied = copy.deepcopy(model)
    take_off(copied)
    attach(copied, replace(settings, **changed))
    return copied
