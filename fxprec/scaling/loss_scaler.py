"""Loss scaling: torch's ``GradScaler``, call for call, and what it lacks."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from inspect import signature
from typing import Any, cast

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from fxprec.errors import GradientsWarning, LossScaleFloorError, NoGradientsError
from fxprec.scaling import arguments
from fxprec.scaling.device_step import can_skip_on_device, step_on_device
from fxprec.scaling.gradient_checks import GradientChecks
from fxprec.scaling.gradients import parameters_of
from fxprec.scaling.refusals import floor_message, no_gradients
from fxprec.scaling.scale_loss import add_back, scaled_loss
from fxprec.scaling.stages import ASIDE, BY_LOSS, DELAYED, OPEN

__all__ = ["LossScaler"]


class LossScaler(GradientChecks):
    """``torch.amp.GradScaler`` with the same calls, stages and state, and more to see and to set.

    A low-precision loss is cast to FP32 before it is scaled. From ``scale`` to ``update`` nothing waits for the device
    where the optimizer can skip a step by itself (torch's fused ones after their first step, and fxprec's).

    Args:
        device: device type of the losses; None: "cuda" where there is one, else "cpu".
        init_scale: the first scale, or with ``dynamic=False`` the only one.
        growth_factor, backoff_factor, growth_interval: as torch's.
        enabled: False: every call is a no-op, ``step`` is the optimizer's.
        dynamic: grow after ``growth_interval`` good steps and back off after a bad one. False: the scale stays, and a
            step whose gradients hold inf or nan is skipped all the same.
        fp16_gradients: accept float16 gradients, which torch refuses to unscale: their parameters are float16 (O3).
        min_scale, max_scale: bounds of every scale.
        hysteresis: the overflow that backs the scale off, counted since the scale last grew: 1 is torch's behaviour, 2
            tolerates one. The step is skipped either way.
        consecutive_hysteresis: count overflows in a row instead: a good step starts anew.
        num_losses: losses with scales of their own, see ``scale_loss``.
        process_group: ranks that skip together. None: those of the meshes where the optimizer's DTensors live (FSDP2,
            tensor parallelism), else this one alone; DDP needs none. Pipeline stages do; those without a loss need not
            call ``scale``.
        on_floor: "raise" or "warn" when an overflow takes the scale to ``min_scale`` (without one: to 2**-126, the
            smallest normal number), or finds it there; None: go on. On CUDA it is noticed an update or two later.
        recheck: look for inf and nan again in ``step`` after ``unscale_``: the gradients were changed in between.

    Raises:
        LossScaleError: (a ValueError) a number out of range.

    Sources: torch.amp.GradScaler; Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2.
    """

    def scale(self, outputs: Any) -> Any:
        """The loss, or each tensor of a list, tuple, namedtuple or other iterable, times the scale, in FP32 or wider.

        Raises:
            TypeError: anything else.
        """
        if not self._enabled:
            return outputs
        result = self._scaled(0, outputs)
        self._scaled_outside = True
        return result

    def scale_loss(
        self,
        loss: Any,
        optimizers: Optimizer | Iterable[Optimizer],
        loss_id: int = 0,
        *,
        delay_unscale: bool = False,
    ) -> AbstractContextManager[Any]:
        """``with scaler.scale_loss(loss, optimizer) as scaled: scaled.backward()``; unscaled gradients on exit.

        For several losses, each with its own scale (``num_losses``): gradients of earlier losses are put aside on
        entry, and the new ones, once unscaled and checked, are added to them. Then ``step`` and ``update`` as ever.

        Args:
            loss: as for ``scale``.
            optimizers: those whose parameters get gradients of it.
            loss_id: which scale.
            delay_unscale: leave the gradients scaled; another ``scale_loss`` of the same loss will follow before
                ``step`` (accumulation).

        Raises:
            IndexError: no such loss. TypeError: no optimizer. RuntimeError: gradients of another loss, or of ``scale``,
                are there, still scaled; the optimizer has stepped, or is in a block already. What ``unscale_`` refuses
                is raised on exit. After an exception the gradients are those of before.
        """
        if not self._enabled:
            return nullcontext(loss)
        return scaled_loss(self, loss, optimizers, loss_id, delay_unscale)

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the optimizer's gradients by the scale, in place (sparse ones may be replaced), and check them.

        Raises:
            RuntimeError: a second time, or after ``step``; nothing was scaled since the last ``update``; a parameter
                that another optimizer unscaled already; gradients that are sums over two scales.
            ValueError, TypeError: gradients that cannot be unscaled.
        """
        if not self._enabled:
            return
        self._check_scale_growth_tracker("unscale_")
        state = self._state_of(optimizer, "unscale_")
        if state["stage"] is OptState.UNSCALED:
            raise RuntimeError(
                "unscale_() has already been called on this optimizer since the last update(). Call it once a step, "
                "before clipping; scale_loss and clip_grad_norm_ unscale by themselves"
            )
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("unscale_() is being called after step(). Call it between backward() and step()")
        self._require_scaled("unscale_")
        loss_id = state.get(DELAYED, 0)
        scale = cast(Tensor, self._losses[loss_id].scale)
        # As torch: FP32 division can be imprecise for certain compile options.
        inverse = scale.double().reciprocal().float() if scale.device.type != "mps" else scale.reciprocal()
        found = self._unscale_grads_(optimizer, inverse, torch.zeros_like(scale), allow_fp16=False)
        state.pop(DELAYED, None)
        state["stage"] = OptState.UNSCALED
        self._record(state, [loss_id], found)
        add_back(state.pop(ASIDE, []))

    def clip_grad_norm_(self, optimizer: Optimizer, max_norm: float, **kwargs: Any) -> Tensor:
        """``torch.nn.utils.clip_grad_norm_`` on the optimizer's gradients, unscaled first where they are not.

        Args:
            optimizer: whose gradients.
            max_norm: of all of them together.
            **kwargs: ``norm_type``, ``error_if_nonfinite`` and ``foreach``, as torch's.

        Returns:
            The norm before clipping; inf or nan where the step will be skipped.
        """
        if self._enabled and self._state_of(optimizer, "clip_grad_norm_")["stage"] is OptState.READY:
            self.unscale_(optimizer)
        return torch.nn.utils.clip_grad_norm_(parameters_of(optimizer), max_norm, **kwargs)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Unscale where that was not done, then ``optimizer.step(*args, **kwargs)`` unless a gradient is inf or nan.

        A skip leaves parameters, optimizer state, step counts and random state as they were.

        Raises:
            ClosureError: (TypeError and RuntimeError) a closure. NoGradientsError: no parameter has a gradient.
            RuntimeError: as ``unscale_``; or a second step since the last ``update``.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        arguments.refuse_closure(args, kwargs)
        self._check_scale_growth_tracker("step")
        state = self._state_of(optimizer, "step")
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError(
                "step() has already been called since the last update(). Call scaler.update() once at the end of every "
                "iteration"
            )
        self._require_scaled("step")
        if DELAYED in state:
            self.unscale_(optimizer)
        if _wants_scaler(optimizer):
            result = super().step(optimizer, *args, **kwargs)
            if state["found_inf_per_device"]:
                self._skips.note_on_device(optimizer, state["found_inf_per_device"])
            return result
        on_device, unscales = can_skip_on_device(optimizer), False
        if state["stage"] is OptState.UNSCALED:
            if self._recheck:
                self._record(state, state.get(BY_LOSS, [0]), self._check_only(optimizer))
        elif on_device or hasattr(optimizer, "check_gradients"):
            unscales = True
            self._record(state, [0], self._check_for_device(optimizer, state))
        else:
            self.unscale_(optimizer)
        found = state["found_inf_per_device"]
        if not found:
            raise no_gradients(optimizer)
        if not on_device and any(flag.item() for flag in found.values()):
            result = None
            self._skips.note_skip(optimizer, self.parameter_names(optimizer))
        elif on_device or unscales:
            result = step_on_device(optimizer, cast(Tensor, self._scale), state, args, kwargs)
            if on_device:
                self._skips.note_on_device(optimizer, found)
            else:
                self._skips.note_step()
        else:
            result = optimizer.step(*args, **kwargs)
            self._skips.note_step()
        state["stage"] = OptState.STEPPED
        return result

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Move the scales by what was found in this iteration, or set all of them.

        Args:
            new_scale: finite and above 0; a number, or a tensor of one element (which is read: a host sync).

        Raises:
            LossScaleError: another ``new_scale``. LossScaleFloorError: overflows took the scale to its floor; the
                scaler is ready for the next iteration all the same. RuntimeError: a ``scale_loss`` with
                ``delay_unscale`` is open.
        """
        if not self._enabled:
            return
        self._check_scale_growth_tracker("update")
        if any(DELAYED in state or OPEN in state for state in self._per_optimizer_states.values()):
            raise RuntimeError(
                "update() within scale_loss, or gradients of scale_loss(..., delay_unscale=True) are still scaled, and "
                "an update may change the scale: close the accumulation with a scale_loss that unscales"
            )
        if new_scale is not None:
            value = arguments.checked_new_scale(new_scale, self._device)
            arguments.checked_bounds(self._bounds[0], value, self._bounds[1])
            self._before_update()
            for loss in self._losses:
                cast(Tensor, loss.scale).fill_(value)
            self._floor.reset()
        else:
            updated = [*self._found()]
            if not updated:
                raise NoGradientsError(
                    "No inf checks were recorded prior to update: no optimizer was stepped or unscaled through the "
                    "scaler since the last update. Call scaler.step(optimizer) before, or update(new_scale)"
                )
            self._before_update()
            rule = self._rule()
            for loss, found in updated:
                loss.update(found, rule)
            self._floor.note(updated, self._losses, rule)
        self._end_iteration()

    def _end_iteration(self) -> None:
        self._forget_iteration()
        self._skips.begin()
        if self._floor.fallen(self._backoff_factor) and self._on_floor is not None:
            message = floor_message(
                [loss.number() for loss in self._losses], self.skipped_steps, self.overflow_parameters()
            )
            if self._on_floor == "raise":
                raise LossScaleFloorError(message)
            warnings.warn(message, GradientsWarning, stacklevel=3)

    def _before_replay(self, optimizer: Optimizer) -> None:
        """A captured iteration, with ``step`` and ``update``, is about to run."""
        self._known[id(optimizer)] = optimizer
        self._old.before_update(cast(Tensor, self._scale), self._known, {id(optimizer)})

    def _after_replay(self, optimizer: Optimizer, found: Tensor) -> None:
        """It was launched: note what ``step`` and ``update`` would have. ``found``: its flag, 0-dim FP32.

        Raises:
            LossScaleFloorError: as ``update``.
        """
        self._skips.note_on_device(optimizer, {found.device: found})
        self._floor.note([(self._losses[0], found)], self._losses, self._rule())
        self._end_iteration()

    @property
    def step_was_skipped(self) -> bool:
        """Whether a step of the last iteration (or of this one, once it stepped) was skipped. Reads the device."""
        return self._skips.last

    @property
    def skipped_steps(self) -> int:
        """How many optimizer steps were skipped so far; saved with the state. Reads the device."""
        return self._skips.count

    def found_inf(self, loss_id: int = 0) -> bool:
        """Whether the gradients that were checked since the last ``update`` hold inf or nan. Reads the device."""
        wanted = self._losses[loss_id]
        return self._enabled and any(bool(found > 0) for loss, found in self._found() if loss is wanted)

    def overflow_parameters(self) -> list[str]:
        """Names of the parameters whose gradients held inf or nan in the last skipped step. Reads the device.

        The optimizers' parameters from the last to the first, as a backward pass comes to them: an overflow begins at
        the first name, and spreads to the layers before it.

        After a step that was skipped on the device, ask before ``zero_grad``: the gradients themselves are looked at.
        """
        return self._skips.parameters(self.parameter_names)


def _wants_scaler(optimizer: Optimizer) -> bool:
    """The older contract of torch's, where ``step`` takes the scaler itself."""
    return getattr(optimizer, "_step_supports_amp_scaling", False) and _takes_scaler(type(optimizer))


@lru_cache(maxsize=64)
def _takes_scaler(optimizer: type[Optimizer]) -> bool:
    return "grad_scaler" in signature(optimizer.step).parameters
