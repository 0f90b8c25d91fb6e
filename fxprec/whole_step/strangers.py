"""Refuse parameters that a backward reaches and nobody named: a graph cannot follow where their gradients pile up."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from fxprec.errors import CaptureError
from fxprec.scaling.gradients import leaves_below


def refuse_strangers(loss: Tensor, known: Iterable[Tensor]) -> None:
    """Check that the backward of a loss reaches no other parameters than those known.

    A gradient that stays from step to step is added to in place: a graph would go on to write where it was when the
    step was captured, also after a ``zero_grad`` gave that memory to somebody else.

    Raises:
        CaptureError: it reaches a parameter, or a tensor with a gradient, that is not ``known``.
    """
    # By identity: tensors compare by element.
    ours = {*map(id, known)}
    for leaf in leaves_below(loss):
        if id(leaf) not in ours and (isinstance(leaf, nn.Parameter) or leaf.grad is not None):
            raise CaptureError(
                f"the backward reaches a parameter of shape {tuple(leaf.shape)} and {leaf.dtype} that belongs neither "
                "to the model nor to loss_fn nor to the optimizer (a discriminator, a frozen network within a "
                "function?): requires_grad_(False) if it is not to be trained, else give loss_fn as a module that "
                "holds it"
            )
