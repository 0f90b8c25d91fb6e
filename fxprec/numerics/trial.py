"""The same model under another policy: a copy, to see what a change would give."""

from __future__ import annotations

import copy
from dataclasses import replace

from torch import nn

from fxprec.model.module import attach, conversion_of, take_off
from fxprec.passes.policy.policy import Policy


def under(model: nn.Module, policy: Policy) -> nn.Module:
    """A copy of a converted model, converted by this policy with all other settings as they are."""
    settings = conversion_of(model).settings
    copied = copy.deepcopy(model)
    take_off(copied)
    attach(copied, replace(settings, policy=policy))
    return copied
