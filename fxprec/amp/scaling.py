"""Scale losses: ``scale_loss`` scales, runs the backward, unscales and checks, and makes optimizers skip a step."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from types import MethodType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from fxprec.amp._amp_state import AmpLossScaler, Properties, checked_entry, master_params, maybe_print, state

#: Where an optimizer keeps its ``Stash``; its presence tells that it went through ``initialize``.
STASH = "_amp_stash"


@dataclass(slots=True, weakref_slot=True)
class Stash:
    """Notes of amp on an optimizer. Scripts read apex's own: there all parameters are FP32 ones without masters.

    Attributes:
        owner: gives the optimizer.
        skip: the loss whose overflow makes the next step be skipped, and its scaler.
        delayed: the loss whose gradients are there, still scaled.
        open: the loss whose ``scale_loss`` block is open.
        lazy_init_called: nothing is initialized later here; scripts set it before they load a checkpoint.
    """

    owner: weakref.ref[Optimizer]
    skip: tuple[int, AmpLossScaler] | None = None
    delayed: int | None = None
    open: int | None = None
    lazy_init_called: bool = True

    @property
    def params_have_scaled_gradients(self) -> bool:
        return self.delayed is not None

    @property
    def all_fp16_params(self) -> list[Tensor]:
        return []

    all_fp32_from_fp16_params = all_fp16_params

    @property
    def all_fp32_from_fp32_params(self) -> list[Tensor]:
        optimizer = self.owner()
        return [] if optimizer is None else [*master_params(optimizer)]


@contextlib.contextmanager
def scale_loss(
    loss: Tensor,
    optimizers: Optimizer | Iterable[Optimizer],
    loss_id: int = 0,
    model: nn.Module | None = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[Any]:
    """Scale a loss: ``with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()``.

    Yields the loss in FP32 times its scale. On exit gradients are unscaled and added to those of before. If a dynamic
    scale found inf or nan in them, the scale is halved and the next step of every optimizer given here is skipped.

    Args:
        loss: the loss, of any shape.
        optimizers: all that own parameters which this backward gives gradients to.
        loss_id: which of the ``num_losses`` scales.
        model: not used.
        delay_unscale: leave the gradients scaled; another ``scale_loss`` of this loss will unscale them.
        delay_overflow_check: unscale, but leave the check, and the scale, to the next ``scale_loss`` of this loss.

    Raises:
        RuntimeError: before ``initialize``; an optimizer that did not go through it; gradients of another loss are
            still scaled. IndexError: no such loss. LossScaleFloorError: (a RuntimeError) no scale is small enough.
    """
    if not state.properties("amp.scale_loss").enabled:
        yield loss
        return
    # Checked before anything is scaled, the optimizers first: their errors name what was forgotten.
    owners = [optimizers] if isinstance(optimizers, Optimizer) else [*optimizers]
    stashes = [_stash(owner, loss_id) for owner in owners]
    losses = len(state.loss_scalers)
    if not 0 <= loss_id < losses:
        raise IndexError(
            f"loss_id={loss_id}: amp.initialize was called with num_losses={losses}, so it must be between 0 and "
            f"{losses - 1}"
        )
    scaler = state.loss_scalers[loss_id]
    # Without scaling there is nothing to unscale or check: gradients are not even read.
    if not scaler.dynamic and scaler.loss_scale() == 1.0:
        yield loss.float()
        return
    with scaler.scaler.scale_loss(loss, owners, delay_unscale=delay_unscale) as scaled:
        # Noted for ``step``: gradients are scaled until the block is left.
        for stash in stashes:
            stash.open = loss_id
        try:
            yield scaled
        finally:
            for stash in stashes:
                stash.open = None
    for stash in stashes:
        stash.delayed = loss_id if delay_unscale else None
    # Without a check the scale stays, and the next block of this loss looks at all of it.
    if delay_unscale or delay_overflow_check:
        return
    # Noted before the scale moves, which may raise: a step after that must not use these gradients. The first loss
    # that overflowed is the one that the message names.
    if scaler.found_inf():
        for stash in stashes:
            stash.skip = stash.skip or (loss_id, scaler)
    scaler.update()


def guard_step(optimizer: Optimizer, properties: Properties) -> None:
    """Make ``optimizer.step`` skip once after an overflow, for as long as the optimizer lives.

    A bound method with the marks of the one it wraps, so that lr schedulers, made before or after, know it.
    """
    inner = optimizer.step

    @functools.wraps(getattr(inner, "__func__", inner))
    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        stash: Stash = getattr(self, STASH)
        closure = kwargs.get("closure", args[0] if args else None)
        # A closure runs its own backward, within the step: no skip could be decided before it.
        if closure is not None and (properties.master_weights or properties.dynamic):
            raise RuntimeError(
                "Currently, Amp does not support closure use with optimizers: its overflow could not be skipped. Run "
                "the closure first, then optimizer.step(); or loss_scale=1.0 at O0, O1 or O3"
            )
        if stash.open is not None:
            raise RuntimeError(
                f"{type(self).__name__}.step within amp.scale_loss: the gradients of loss {stash.open} are still "
                "scaled. Step after the block"
            )
        if stash.delayed is not None and any(p.grad is not None for p in master_params(self)):
            raise RuntimeError(
                f"{type(self).__name__}.step: the gradients of loss {stash.delayed} are still scaled "
                "(delay_unscale=True): the last scale_loss before a step must unscale them"
            )
        if stash.skip is None:
            return inner(*args, **kwargs)
        loss_id, scaler = stash.skip
        stash.skip = None
        self._opt_called = True  # type: ignore[attr-defined]  # or a scheduler warns of the order of the steps
        maybe_print(
            f"Gradient overflow.  Skipping step, loss scaler {loss_id} reducing loss scale to {scaler.loss_scale()}"
        )
        return None

    # Weakly: an optimizer that held itself would live until the garbage collector comes.
    setattr(optimizer, STASH, Stash(weakref.ref(optimizer)))
    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
    for name in ("_amp_lazy_init", "_lazy_init_maybe_master_weights"):
        # Scripts call these before they load an optimizer's checkpoint; apex makes its masters there.
        setattr(optimizer, name, lambda: None)


def state_dict(destination: MutableMapping[str, Any] | None = None) -> MutableMapping[str, Any]:
    """Return ``loss_scaler0``, ``loss_scaler1``, …: each loss's ``loss_scale`` and ``unskipped``.

    It is empty if amp is disabled.

    Args:
        destination: a dict to write to, and to return; None: a new one.

    Raises:
        RuntimeError: before ``initialize``.
    """
    target: MutableMapping[str, Any] = OrderedDict() if destination is None else destination
    if state.properties("amp.state_dict").enabled:
        for i, scaler in enumerate(state.loss_scalers):
            target[f"loss_scaler{i}"] = {"loss_scale": scaler.loss_scale(), "unskipped": scaler._unskipped}
    return target


def load_state_dict(state_dict: Mapping[str, Any]) -> None:
    """Load what ``state_dict`` gave, here or in apex. Nothing changes if it is refused.

    A file with another number of losses loads as far as it goes, and says so.

    Raises:
        RuntimeError: before ``initialize``; unexpected or missing keys. ValueError: numbers out of range.
    """
    if not state.properties("amp.load_state_dict").enabled:
        return
    entries: dict[int, tuple[float, int]] = {}
    unexpected: list[str] = []
    for key, entry in state_dict.items():
        number = str(key).removeprefix("loss_scaler")
        # All entries are checked before the first is loaded.
        if str(key).startswith("loss_scaler") and number.isdecimal():
            entries[int(number)] = checked_entry(key, entry)
        else:
            unexpected.append(f'"{key}"')
    if unexpected:
        raise RuntimeError(
            f"Error(s) in loading state_dict. Unexpected key(s) in state_dict: {', '.join(unexpected)}. amp.state_dict "
            'has only "loss_scaler0", "loss_scaler1", ...'
        )
    # A script may have more losses than before: apex warns here, and goes on.
    count = len(state.loss_scalers)
    if len(entries) != count:
        print(f"Warning: state_dict contains {len(entries)} entries, while {count} loss_scalers are used")
    for number, entry in sorted(entries.items()):
        if number < count:
            state.loss_scalers[number].load(*entry)
        else:
            print(f"Skipping loss_scaler[{number}], since num_losses was set to {count}")


def _stash(optimizer: Any, loss_id: int) -> Stash:
    """Return amp's notes on an optimizer given to ``scale_loss``, if its gradients can take this loss's."""
    stash = getattr(optimizer, STASH, None)
    if not isinstance(stash, Stash):
        raise RuntimeError(
            f"amp.scale_loss: this {type(optimizer).__name__} did not go through amp.initialize: pass what "
            "model, optimizer = amp.initialize(model, optimizer) returned"
        )
    if stash.delayed not in (None, loss_id):
        raise RuntimeError(
            f"amp.scale_loss: gradients of loss {stash.delayed} are there, still scaled (delay_unscale=True): unscale "
            f"them before the backward of loss {loss_id}, or they cannot be told apart"
        )
    return stash
