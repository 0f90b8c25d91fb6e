"""One shadow and its weight: when there can be one, how it is made, and whether it still says the same.

Made once with its autograd edge, the shadow of a weight is ``weight.to(dtype)``: each weight keeps its own
AccumulateGrad, so that hooks and DDP see nothing new.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch._C import _get_dispatch_mode, _get_tracing_state, _len_torch_dispatch_stack, _TorchDispatchModeKey
from torch._C._functorch import maybe_current_level

from fxprec.errors import FxprecError
from fxprec.low_gradients import cast_with_low_gradient

__all__ = ["Entry", "StaleShadowError", "is_lasting", "is_traced"]

#: The sequence number below that of AccumulateGrad, which is the highest.
_AS_SOON_AS_READY: Final = 2**64 - 2

#: Modes under which a persistent tensor would enter a trace as a constant, or be made fake.
_TRACING_MODES: Final = (
    _TorchDispatchModeKey.FAKE,
    _TorchDispatchModeKey.PROXY,
    _TorchDispatchModeKey.FUNCTIONAL,
)


class StaleShadowError(FxprecError, RuntimeError):
    """A weight was written in a way that nothing shows: a forward under ``no_grad`` would have read the old value."""


@dataclass(slots=True, eq=False)
class Entry:
    """One shadow. ``alias`` shares its storage but not its version counter; the last three: its weight when copied.

    ``stream``: the CUDA stream it was made on, where its edge is walked; None on a CPU.
    """

    key: int
    weight: weakref.ref[Tensor]
    shadow: Tensor
    alias: Tensor
    stream: torch.cuda.Stream | None
    device: torch.device
    requires_grad: bool
    version: int
    pointer: int

    @classmethod
    def of(
        cls, weight: Tensor, dtype: torch.dtype, low_gradient: bool, dies: Callable[[weakref.ref[Tensor]], None]
    ) -> Entry:
        """Make the shadow of a weight; ``dies`` is called when the weight is collected."""
        # Whatever mode is on now, the shadow outlives it: made under inference_mode or no_grad it would have no edge.
        with torch.inference_mode(False), torch.enable_grad():
            shadow = cast_with_low_gradient(weight, dtype) if low_gradient else weight.to(dtype)
        if shadow.grad_fn is not None:
            # Backward runs what was made last first. This edge is older than every forward: the gradients of all
            # weights would come at the very end, too late for DDP to reduce the first while the others are computed.
            edge: Any = shadow.grad_fn
            edge._set_sequence_nr(_AS_SOON_AS_READY)
        return cls(
            id(weight),
            weakref.ref(weight, dies),
            shadow,
            shadow.data,
            torch.cuda.current_stream(weight.device) if weight.is_cuda else None,
            weight.device,
            weight.requires_grad,
            weight._version,
            weight.data_ptr(),
        )

    def check(self, weight: Tensor) -> None:
        """Raises StaleShadowError where the weight shows no change and is another than when it was copied."""
        if weight._version != self.version or weight.data_ptr() != self.pointer:
            return
        dtype = self.alias.dtype
        now = weight.detach().to(dtype)
        if not torch.equal(now.view(torch.int16), self.alias.view(torch.int16)):  # as bits: NaN equals NaN
            raise StaleShadowError(
                f"the {dtype} shadow of a weight of shape {tuple(weight.shape)} on {weight.device} is "
                "stale: the weight was written through .data (or by a kernel that bumps no version) since the "
                "last forward that recorded gradients. Call fxprec.refresh(model) after such a write."
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
    return (
        maybe_current_level() is not None
        or _get_tracing_state() is not None
        or (_len_torch_dispatch_stack() > 0 and any(_get_dispatch_mode(mode) is not None for mode in _TRACING_MODES))
    )
