"""Keeps what apex's interface needs between calls, since ``state_dict()`` and ``scale_loss`` take no object for it.

All of it is in ``state``, and nowhere else. Scripts know it as apex's: ``from apex.amp._amp_state import _amp_state``.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fxprec.amp.properties import Properties
from fxprec.scaling.gradients import parameters_of

if TYPE_CHECKING:
    from fxprec.amp.loss_scale import AmpLossScaler

#: What a decorated or registered function computes in: the low dtype, FP32, or the widest of its arguments.
Kind = Literal["half", "float", "promote"]


@dataclass(frozen=True)
class Registration:
    """Call of a ``register_*`` function; ``op``: the canonical name, for what becomes an override."""

    module: Any
    name: str
    kind: Kind
    op: str | None = None


@dataclass(frozen=True)
class Handle:
    """Handle as apex's ``_amp_state.handle``, as far as there is something to handle: torch is not patched."""

    _owner: AmpState

    def is_active(self) -> bool:
        """Return whether decorated and registered functions cast now."""
        return self._owner.low is not None and not self._owner.disabled

    # apex keeps casts of weights from one forward to the next, and scripts ask for that.
    @property
    def has_cache(self) -> bool:
        return False

    def _clear_cache(self) -> None:
        """Do nothing: no cast outlives a forward but the shadows of weights, which are kept up to date."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"fxprec.amp's handle has no {name!r}: the API before amp.initialize is not there. amp.scale_loss and "
            "amp.disable_casts take its place"
        )


@dataclass(eq=False)
class AmpState:
    """State of ``fxprec.amp`` in this process.

    What scripts set or read of apex's is here too. Anything else cannot be set, for nothing would come of it.

    Attributes:
        opt_properties: those of the last ``initialize``; None before the first.
        loss_scalers: one a loss; the last ``initialize`` made them.
        verbosity: 0: nothing is printed.
        allow_incoming_model_not_fp32: set by scripts: ``initialize`` takes models with low parameters.
        min_loss_scale, max_loss_scale: what the last ``initialize`` was told.
        models: every model that went through ``initialize``.
        device: device type of the last models.
        low: what decorated functions lower to; None: they do nothing.
        disabled: how many ``disable_casts`` blocks are open.
        registered: the functions named by ``register_*``, in order.
    """

    opt_properties: Properties | None = None
    loss_scalers: list[AmpLossScaler] = field(default_factory=list)
    verbosity: int = 1
    allow_incoming_model_not_fp32: bool = False
    min_loss_scale: float | None = None
    max_loss_scale: float | None = None
    models: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)
    device: str = "cpu"
    low: torch.dtype | None = None
    disabled: int = 0
    registered: list[Registration] = field(default_factory=list)

    def __setattr__(self, name: str, value: Any) -> None:
        # A misspelt or unknown option that did nothing would go unnoticed.
        if name not in self.__dataclass_fields__:
            raise AttributeError(
                f"fxprec.amp._amp_state has no {name!r}, so setting it would do nothing. There are "
                f"{', '.join(self.__dataclass_fields__)}; what else there is to set is an argument of amp.initialize"
            )
        object.__setattr__(self, name, value)

    @property
    def handle(self) -> Handle:
        """Handle for scripts that ask for apex's."""
        return Handle(self)

    def properties(self, call: str) -> Properties:
        """Return the properties of the last ``initialize``.

        Raises:
            RuntimeError: there was none.
        """
        if self.opt_properties is None:
            raise RuntimeError(
                f"{call} was called, but amp has not been initialized: model, optimizer = amp.initialize(model, "
                "optimizer, opt_level=...) must come first"
            )
        return self.opt_properties


#: The state of this process, by our name and by apex's.
state = _amp_state = AmpState()


def maybe_print(message: Any, rank0: bool = False) -> None:
    """Print, unless ``verbosity`` is 0; with ``rank0`` on the first rank only."""
    if state.verbosity <= 0:
        return
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not rank0 or not distributed or torch.distributed.get_rank() == 0:
        print(message)


def master_params(optimizer: Optimizer) -> Iterator[Tensor]:
    """Return the parameters that the optimizer updates, the model's own FP32 masters. To clip, for instance."""
    return parameters_of(optimizer)
