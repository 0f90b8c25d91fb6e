"""Makes the shadow of a weight, and checks that it still belongs to the weight.

A shadow is ``weight.to(dtype)``, made once with its autograd edge: each weight keeps its own AccumulateGrad, so that
hooks and DDP work as ever.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from fxprec.errors import StaleShadowError, few
from fxprec.kernels.launch.observers import SCRIPT, TRACING, TRANSFORM, watcher
from fxprec.shadows.low_gradients import Wish, cast_with_low_gradient
from fxprec.torch_internals import run_before

#: Sequence number of the shadow's edge: of the nodes that are ready, autograd runs the one with the highest first.
#: AccumulateGrad has the highest of all, and this is the next.
_AS_SOON_AS_READY: Final = 2**64 - 2

#: Most stale weights that a message names.
_NAMED: Final = 8


@dataclass(slots=True, eq=False)
class Entry:
    """Shadow of one weight, with the weight's state at the last copy.

    Attributes:
        key: id of the weight.
        weight: returns the weight, or None once it is gone. Not a weak reference to a parameter:
            ``torch.utils.swap_tensors`` refuses tensors that have one.
        shadow: the low copy, with its autograd edge.
        alias: the shadow's storage with a version counter of its own.
        plain: the shadow's storage and version counter without the edge, for optimizers, which may hold it longer than
            the shadow lives. With the edge they would keep an old AccumulateGrad alive, which runs on the stream that
            it was made on: a CUDA graph captured on another stream would lack it.
        edge: the weight's AccumulateGrad, to which the shadow's gradient goes; None: the weight is frozen.
        wish: mark of an optimizer for a low gradient, or None.
        unseen: the weight may be written unnoticed: by another process, or because its elements cannot be compared
            without a device sync.
        stream: CUDA stream that the shadow was made on, on which its edge runs; None on a CPU.
        version: the weight's version counter at the last copy.
        pointer: the address of the weight's memory at the last copy.
        samples: addresses of the weight's sampled elements (``samples``); (): none can be compared.
        row: row of the noted samples; -1: there is none.
    """

    key: int
    weight: Callable[[], Tensor | None]
    shadow: Tensor
    alias: Tensor
    plain: Tensor
    edge: Any
    wish: Wish | None
    unseen: bool
    stream: torch.cuda.Stream | None
    device: torch.device
    requires_grad: bool
    version: int
    pointer: int
    samples: tuple[int, ...] = ()
    row: int = -1

    @classmethod
    def of(
        cls,
        weight: Tensor,
        dtype: torch.dtype,
        wish: Wish | None,
        dies: Callable[[weakref.ref[Tensor]], None],
        samples: tuple[int, ...] = (),
    ) -> Entry:
        """Make the shadow of a weight, with a low gradient if there is a wish.

        ``dies`` is called when a weight that is no parameter is collected.
        """
        # The shadow outlives the current mode: made under inference_mode or no_grad it would have no edge for good.
        with torch.inference_mode(False), torch.enable_grad():
            shadow = weight.to(dtype) if wish is None else cast_with_low_gradient(weight, dtype)
        if shadow.grad_fn is not None:
            # Backward runs the newest nodes first. This edge is older than every forward: the gradients of all weights
            # would come at the very end, too late for DDP to reduce the first while the others are computed.
            run_before(shadow.grad_fn, _AS_SOON_AS_READY)
        # The weight's AccumulateGrad, which lies below the cast; a frozen weight has none.
        below = () if shadow.grad_fn is None else shadow.grad_fn.next_functions
        edge = next((node for node, _ in below if node is not None), None)
        return cls(
            id(weight),
            _reference(weight, edge, dies),
            shadow,
            shadow.data,
            shadow.detach(),
            edge,
            wish,
            # torch reports every CUDA tensor as shared.
            not samples or (not weight.is_cuda and weight.is_shared()),
            torch.cuda.current_stream(weight.device) if weight.is_cuda else None,
            weight.device,
            weight.requires_grad,
            weight._version,
            weight.data_ptr(),
            samples,
        )

    def fits(self, weight: Tensor) -> bool:
        """Return whether the weight's address and ``requires_grad`` are unchanged."""
        return weight.data_ptr() == self.pointer and weight.requires_grad is self.requires_grad

    def is_stale(self, weight: Tensor) -> bool:
        """Return whether the weight differs from its shadow although its version and address are unchanged."""
        if weight._version != self.version or weight.data_ptr() != self.pointer:
            return False
        now = weight.detach().to(self.alias.dtype)
        return not torch.equal(now.view(torch.int16), self.alias.view(torch.int16))  # as bits: NaN equals NaN


def _reference(weight: Tensor, edge: Any, dies: Callable[[weakref.ref[Tensor]], None]) -> Callable[[], Tensor | None]:
    """Return a function that returns the weight: by its edge, which keeps it alive anyway, or by a reference.

    The reference is strong for frozen parameters, and weak for other frozen tensors.
    """
    if edge is not None:
        return functools.partial(getattr, edge, "variable")
    if isinstance(weight, torch.nn.Parameter):
        return lambda: weight
    return weakref.ref(weight, dies)


def stale_error(weights: Sequence[Tensor], low: torch.dtype, model: torch.nn.Module | None) -> StaleShadowError:
    """Return the error for these weights; ``model`` gives their names."""
    names = {} if model is None else {id(weight): name for name, weight in model.named_parameters()}
    which = [f"{names.get(id(w), 'a weight')} of shape {tuple(w.shape)} on {w.device}" for w in weights]
    return StaleShadowError(
        f"the {low} shadows of these weights are stale: {few(which, _NAMED)}. They were written in "
        "a way that nothing shows: to a part of them only, past their version counters (through .data, NumPy, a "
        "collective, a view of a buffer that they lie in). Call fxprec.refresh(model) after such a write"
    )


def is_lasting(weight: Tensor) -> bool:
    """Return whether a weight can have a persistent shadow: a plain FP32 leaf with memory.

    An address of 0 means meta, empty, or freed by a sharding wrapper.
    """
    return (
        type(weight) in (torch.nn.Parameter, Tensor)
        and weight.dtype is torch.float32
        and weight.is_leaf
        and weight.layout is torch.strided
        and not weight.is_inference()
        and weight.data_ptr() != 0
    )


def is_traced() -> bool:
    """Return whether a functorch transform or a tracer runs: tensors made or read under it must not outlive it."""
    return watcher(TRANSFORM, SCRIPT, TRACING) is not None
