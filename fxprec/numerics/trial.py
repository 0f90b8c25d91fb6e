"""The same model under other settings: a copy, to see what a change would give."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import nn

from fxprec.model.module import attach, conversion_of, take_off
from fxprec.passes.policy.policy import Policy


def under(model: nn.Module, policy: Policy | None = None, dtype: torch.dtype | None = None) -> nn.Module:
    """A copy of a converted model, converted by this policy and to this dtype, with all other settings as they are."""
    own = conversion_of(model).settings
    settings = replace(own, policy=policy or own.policy, dtype=dtype or own.dtype)
    copied = copy.deepcopy(model)
    take_off(copied)
    attach(copied, settings)
    return copied
