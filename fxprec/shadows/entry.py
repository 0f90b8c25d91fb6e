"""One shadow and its weight: when there can be one, how it is made, and whether it still says the same.

Made once with its autograd edge, the shadow of a weight is ``weight.to(dtype)``: each weight keeps its own
AccumulateGrad, so that hooks and DDP see nothing new.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from fxprec.errors import StaleShadowError
from fxprec.kernels.launch.observers import SCRIPT, TRACING, TRANSFORM, watcher
from fxprec.shadows.low_gradients import Wish, cast_with_low_gradient
from fxprec.torch_internals import run_before

#: The sequence number below that of AccumulateGrad, which is the highest.
_AS_SOON_AS_READY: Final = 2**64 - 2

#: So many stale weights a message names.
_NAMED: Final = 8


@dataclass(slots=True, eq=False)
class Entry:
    """One shadow. ``alias`` shares its storage but not its version counter.

    ``plain`` shares both, and leads to no AccumulateGrad: an optimizer keeps what it writes longer than the shadow
    lives, and an AccumulateGrad that lives on runs on the stream where it was made, which no graph captures.

    No weak reference to a parameter: ``torch.utils.swap_tensors`` refuses tensors that have one.

    Attributes:
        weight: gives the weight; None: it is gone.
        edge: where the shadow's gradient goes, the weight's AccumulateGrad; None: the weight is frozen.
        wish: for a low gradient.
        unseen: whether it may be written to in a way that nothing here shows: by another process, or where its elements
            cannot be compared without waiting for the device.
        stream: the CUDA stream that it was made on, where its edge is walked; None on a CPU.
        version: the weight's version counter when it was last copied.
        pointer: the address of the weight's memory then.
        samples: addresses of the elements that stand for it (``samples``); (): none can be compared.
        row: where what they were then is noted; -1: nowhere.
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
        """Make the shadow of a weight, with a low gradient where there is a wish.

        ``dies`` is called when a weight that is no parameter is collected.
        """
        # Whatever mode is on now, the shadow outlives it: made under inference_mode or no_grad it would have no edge.
        with torch.inference_mode(False), torch.enable_grad():
            shadow = weight.to(dtype) if wish is None else cast_with_low_gradient(weight, dtype)
        if shadow.grad_fn is not None:
            # Backward runs what was made last first. This edge is older than every forward: the gradients of all
            # weights would come at the very end, too late for DDP to reduce the first while the others are computed.
            run_before(shadow.grad_fn, _AS_SOON_AS_READY)
        edge = _accumulates(shadow)
        return cls(
            id(weight),
            _reference(weight, edge, dies),
            shadow,
            shadow.data,
            shadow.detach(),
            edge,
            wish,
            # Of CUDA tensors torch says that they are shared whatever they are.
            not samples or (not weight.is_cuda and weight.is_shared()),
            torch.cuda.current_stream(weight.device) if weight.is_cuda else None,
            weight.device,
            weight.requires_grad,
            weight._version,
            weight.data_ptr(),
            samples,
        )

    def fits(self, weight: Tensor) -> bool:
        """Whether the weight lies where it lay, and is differentiated as it was."""
        return weight.data_ptr() == self.pointer and weight.requires_grad is self.requires_grad

    def is_stale(self, weight: Tensor) -> bool:
        """Whether the weight shows no change and is another than when it was copied."""
        if weight._version != self.version or weight.data_ptr() != self.pointer:
            return False
        now = weight.detach().to(self.alias.dtype)
        return not torch.equal(now.view(torch.int16), self.alias.view(torch.int16))  # as bits: NaN equals NaN


def _reference(weight: Tensor, edge: Any, dies: Callable[[weakref.ref[Tensor]], None]) -> Callable[[], Tensor | None]:
    """What gives the weight: its edge, which keeps it alive anyway; of frozen parameters a strong reference."""
    if edge is not None:
        return functools.partial(getattr, edge, "variable")
    if isinstance(weight, torch.nn.Parameter):
        return lambda: weight
    return weakref.ref(weight, dies)


def _accumulates(shadow: Tensor) -> Any:
    """The AccumulateGrad below the shadow's cast; None where nothing is differentiated."""
    below = () if shadow.grad_fn is None else shadow.grad_fn.next_functions
    return next((node for node, _ in below if node is not None), None)


def stale(weights: Sequence[Tensor], low: torch.dtype, model: torch.nn.Module | None) -> StaleShadowError:
    """The error for these weights; ``model``: where their names come from."""
    names = {} if model is None else {id(weight): name for name, weight in model.named_parameters()}
    which = [f"{names.get(id(w), 'a weight')} of shape {tuple(w.shape)} on {w.device}" for w in weights[:_NAMED]]
    more = f" and {len(weights) - _NAMED} more" if len(weights) > _NAMED else ""
    return StaleShadowError(
        f"the {low} shadows of these weights are stale: {', '.join(which)}{more}. They were written in "
        "a way that nothing shows: to a part of them only, past their version counters (through .data, NumPy, a "
        "collective, a view of a buffer that they lie in). Call fxprec.refresh(model) after such a write"
    )


def is_lasting(weight: Tensor) -> bool:
    """Whether a weight can have a persistent shadow. An address of 0: meta, empty, or freed by a sharding wrapper."""
    return (
        type(weight) in (torch.nn.Parameter, Tensor)
        and weight.dtype is torch.float32
        and weight.is_leaf
        and weight.layout is torch.strided
        and not weight.is_inference()
        and weight.data_ptr() != 0
    )


def is_traced() -> bool:
    """Whether a functorch transform or a tracer is running: what is made or read now must not outlive it."""
    return watcher(TRANSFORM, SCRIPT, TRACING) is not None
