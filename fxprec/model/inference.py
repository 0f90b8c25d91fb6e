"""Shadows under the user's hand: refresh, accumulate, and freeze for deployment."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import TypeVar

import torch
from torch import nn

from fxprec.errors import ConversionError, GradientsWarning, ServiceWarning
from fxprec.model.conversion import conversion_of
from fxprec.model.graphs import graphs
from fxprec.passes.graph.annotations import graph_notes
from fxprec.shadows import stores
from fxprec.shadows.low_gradients import widened

_Model = TypeVar("_Model", bound=nn.Module)


def refresh(model: nn.Module) -> None:
    """Copy every weight of ``model`` to its shadow now: after a write to a part of it that torch does not count.

    Call it after such a write (``param.data[3] = 0``, a WGAN's ``p.data.clamp_()`` that changes few elements)

    - before a forward under ``no_grad``;
    - before any forward, if an optimizer of ``fxprec.optim`` made the last step: it wrote the shadows itself.

    After a step of any other optimizer training forwards refresh by themselves, and a write to all of a weight is seen
    anyway.
    """
    conversion = conversion_of(model)
    conversion.store.refresh()
    if conversion.packed is not None:
        conversion.packed.clear()


@contextlib.contextmanager
def accumulate(model: nn.Module) -> Iterator[None]:
    """Accumulate gradients: the weights stay as they are in the block, so only its first forward refreshes shadows.

    ::

        with fxprec.accumulate(model):
            for x, y in micro_batches:
                scaler.scale(loss(model(x), y) / len(micro_batches)).backward()
        scaler.step(optimizer)

    Gradients that an optimizer keeps low (``low_gradients=True``) become FP32 for good, with a warning: sums over
    micro-batches lose too much. ``low_gradients="accumulate"`` keeps them.
    """
    store = conversion_of(model).store
    # Low gradients were asked for a step on one batch; sums over several lose too much.
    if changed := widened(model.parameters()):
        for each in stores():  # another model may share weights
            each.forget(changed)
        warnings.warn(
            f"fxprec.accumulate: the gradients of {len(changed)} parameters are FP32 from now on, since low-precision "
            "sums over micro-batches lose too much. low_gradients='accumulate' keeps them low; leave low_gradients out "
            "to have FP32 ones without this warning",
            category=GradientsWarning,
            stacklevel=3,
        )
    with store.accumulating():
        yield


def freeze(model: _Model, pack: bool = True) -> _Model:
    """Drop the FP32 masters of the lowered weights, for deployment: half the memory. Returns the model, in eval mode.

    A weight that every graph reads in the low dtype becomes low itself; one that some graph reads in FP32 stays. All
    gradients are dropped. Training forwards and ``load_state_dict`` afterwards raise ConversionError; there is no way
    back but the checkpoint.

    On a CPU for whose bfloat16 oneDNN has kernels, low linears, and convolutions low or FP32, then run on copies
    of the weights that are packed at the first call, in the layout of these kernels, with what follows them in the same
    kernel: an activation, behind a convolution also its batch norm (folded into the weight, from the FP32 one where
    that is still there) and a sum. What is joined is rounded once less: results differ in the last bits, and are no
    less exact. A copied or loaded model has no FP32 weights any more: it folds norms into the low ones, and differs
    from this one in the last bits. ``report`` says what is packed.

    The parameters stay as they are: what is saved, copied or moved holds plain weights only. A weight that changes is
    packed again; after a write through ``.data``, which torch does not record, call ``refresh``. Where an input wants a
    gradient, and under ``torch.func``, ``torch.jit.trace``, compilers and dispatch modes, plain weights serve.

    Args:
        model: a converted module.
        pack: False: no packed copies. They take as much memory as the low weights: with them a model holds what its
            FP32 weights did. (A convolution has one copy for each size of its input, up to four; from the second size
            on it keeps a plain one, too.)

    Raises:
        NotCapturedError: nothing captured yet: which weights are lowered is known from the graphs.
        ConversionError: frozen already, or not converted.
    """
    conversion = conversion_of(model)
    conversion.refuse_if_frozen("freeze")
    if conversion.bypassed:
        raise ConversionError("freeze within fxprec.original(model): leave that block first")
    if any(graph_notes(graph).counts_backward for graph in graphs(model)):
        warnings.warn(
            'fxprec.freeze: lower="pays" counted the backward pass of a training step when it chose what to lower. For '
            "a model that only serves, convert within torch.inference_mode(): then forwards alone are counted",
            category=ServiceWarning,
            stacklevel=2,
        )
    model.eval()
    packed = conversion.new_packed() if pack else None
    if packed is not None:
        # Norms are folded into FP32 weights while these are there.
        conversion.capture_present(model)
        for captured in conversion.captured:
            packed.take(captured.program, captured.gm)
    names = conversion.captured.lowered_weights(model)
    # Packed copies that fold a norm want the FP32 weights, which go now.
    with torch.no_grad(), contextlib.nullcontext() if packed is None else packed.folded_before(model):
        for name in names:
            path, _, leaf = name.rpartition(".")
            parameter = model.get_submodule(path)._parameters[leaf]
            assert parameter is not None
            parameter.requires_grad_(False)
            parameter.data = parameter.data.to(conversion.settings.dtype)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        # As large as the weights, and of no use any more.
        parameter.grad = None
    conversion.store.clear()
    conversion.frozen, conversion.packed, conversion.lowered = frozenset(names), packed, True
    return model
