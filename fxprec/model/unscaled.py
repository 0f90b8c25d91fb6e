"""float16 gradients of a loss that nobody scaled: the scaler that ``convert`` handed back was dropped.

Found at the first step of an optimizer on such a model, and said once: below 3e-8 a float16 gradient becomes 0.
A scale that the user multiplies by hand cannot be seen; ``scaler=False`` says that there is one, or that there is none.
"""

from __future__ import annotations

import functools
import gc
import warnings
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from fxprec.errors import GradientsWarning
from fxprec.host_reads import capturing
from fxprec.model.conversion import STATE, Conversion
from fxprec.scaling.gradients import local, parameters_of
from fxprec.torch_internals import has_scaled

if TYPE_CHECKING:
    from fxprec.scaling.loss_scaler import LossScaler


def scales(scaler: LossScaler) -> bool:
    """Return whether this scaler changes gradients: not if it is disabled, or fixed at 1."""
    is_static = scaler.get_growth_factor() == scaler.get_backoff_factor() == 1.0
    return scaler.is_enabled() and not (is_static and scaler.get_scale() == 1.0)


def expect_scaling(conversion: Conversion) -> None:
    """Warn at the first step on gradients of this float16 model, unless a loss was scaled by then."""
    _expecting()[conversion] = weakref.WeakSet()


def handed_back(scaler: LossScaler) -> None:
    """Note the scaler that ``convert`` gave its caller: these are asked first, and mostly one of them scales."""
    _handed_back().add(scaler)


@functools.cache
def _handed_back() -> weakref.WeakSet[LossScaler]:
    return weakref.WeakSet()


#: Conversions on whose gradients no optimizer stepped yet, and the optimizers that have none of their parameters.
_Expecting = weakref.WeakKeyDictionary[Conversion, weakref.WeakSet[Optimizer]]


@functools.cache
def _expecting() -> _Expecting:
    """Return the conversions that wait for their first step; on the first call register one hook for all of them.

    The hook stays: torch's loop over hooks breaks where one goes meanwhile.
    """
    expecting: _Expecting = weakref.WeakKeyDictionary()

    def stepped(optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        if len(expecting) and not torch.compiler.is_compiling():
            for conversion, strangers in list(expecting.items()):
                if optimizer not in strangers:
                    _look(conversion, optimizer, expecting)

    register_optimizer_step_post_hook(stepped)
    return expecting


def _look(conversion: Conversion, optimizer: Optimizer, expecting: _Expecting) -> None:
    module = conversion.module()
    if module is None or module.__dict__.get(STATE) is not conversion:  # it was reverted
        del expecting[conversion]
        return
    # An optimizer without parameters of this model need not be looked at again.
    ours = {*map(id, module.parameters())}
    known = [p for p in parameters_of(optimizer) if id(p) in ours]
    if not known:
        expecting[conversion].add(optimizer)
    stepped = [p for p in known if p.grad is not None]
    if not stepped or capturing(stepped[0].device):
        return
    del expecting[conversion]
    # First the scalers that are known: to look at all objects takes a tenth of a second.
    if any(map(has_scaled, _handed_back())) or any(map(has_scaled, _living_scalers())):
        return
    low = conversion.settings.dtype
    marks = conversion.store.marks_of(stepped)
    lowered = [p for p, mark in zip(stepped, marks, strict=True) if mark is not None or p.dtype is low]
    warnings.warn(
        f"{type(optimizer).__name__} steps on float16 gradients of {conversion.name} whose loss no loss scaler has "
        f"scaled: {_share_of_zeros(lowered or stepped):.1%} of the gradients of its lowered weights are exactly 0 "
        "(below 3e-8 they become so). Use the scaler that convert returned: scaler.scale(loss).backward(); "
        "scaler.step(optimizer); scaler.update() (with fxprec.amp: amp.scale_loss). If the loss is scaled by other "
        "means, or is not to be scaled, say convert(model, scaler=False); bfloat16 needs no scaling",
        category=GradientsWarning,
        stacklevel=4,  # the call of optimizer.step
    )


def _living_scalers() -> list[GradScaler]:
    """Find every enabled scaler of this process, ours and torch's, whoever made it: torch keeps no list of them.

    It looks at all objects, which takes a tenth of a second and more.
    """
    found: list[Any] = [each for each in gc.get_objects() if issubclass(type(each), GradScaler)]
    return [scaler for scaler in found if scaler.is_enabled()]


def _share_of_zeros(weights: list[Tensor]) -> float:
    gradients = [local(weight.grad) for weight in weights if weight.grad is not None]
    dense = [gradient for gradient in gradients if gradient.layout is torch.strided]
    nonzero = sum(int(torch.count_nonzero(gradient)) for gradient in dense)
    return 1 - nonzero / max(sum(gradient.numel() for gradient in dense), 1)
