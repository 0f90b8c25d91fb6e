"""Loss scaling: torch's ``GradScaler``, call for call, and what it lacks."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from inspect import signature
from typing import Any, cast

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from fxprec.errors import LossScaleFloorError, NoGradientsError
from fxprec.scaling import arguments
from fxprec.scaling.agreement import agree, group_of
from fxprec.scaling.device_step import can_skip_on_device, step_on_device
from fxprec.scaling.gradients import grouped, parameter_names, parameters_of
from fxprec.scaling.loss_scale import LossScale
from fxprec.scaling.old_scale import OldGradients
from fxprec.scaling.outputs import scaled
from fxprec.scaling.refusals import floor_message, no_gradients, refuse_shared
from fxprec.scaling.scale_loss import DELAYED, add_back, scaled_loss
from fxprec.scaling.scaler_state import ScalerState

__all__ = ["LossScaler"]

_unscale = torch._amp_foreach_non_finite_check_and_unscale_  # pyright: ignore[reportPrivateImportUsage]


class LossScaler(ScalerState):
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
            tensor parallelism), else this one alone; DDP needs none. Pipeline stages do.
        on_floor: "raise" or "warn" when an overflow finds the scale at ``min_scale`` (without one: at the smallest
            scale with a finite reciprocal); None: go on. On CUDA it is noticed an update or two later.
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
        return self._scaled(0, outputs) if self._enabled else outputs

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
            IndexError: no such loss. RuntimeError: gradients of another loss are there, still scaled; or the optimizer
                has stepped. After an exception in the block the gradients are those of before.
        """
        if not self._enabled:
            return nullcontext(loss)
        return scaled_loss(self, loss, optimizers, loss_id, delay_unscale)

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the optimizer's gradients by the scale, in place (sparse ones may be replaced), and check them.

        Raises:
            RuntimeError: a second time, or after ``step``; nothing was scaled since the last ``update``; a parameter
                that another optimizer owns too; gradients that are sums over two scales.
            ValueError, TypeError: gradients that cannot be unscaled.
        """
        if not self._enabled:
            return
        self._check_scale_growth_tracker("unscale_")
        state = self._state_of(optimizer)
        if state["stage"] is OptState.UNSCALED:
            raise RuntimeError("unscale_() has already been called on this optimizer since the last update().")
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("unscale_() is being called after step().")
        self._require_scaled("unscale_")
        loss_id = state.get(DELAYED, 0)
        scale = cast(Tensor, self._losses[loss_id].scale)
        # As torch: FP32 division can be imprecise for certain compile options.
        inverse = scale.double().reciprocal().float() if scale.device.type != "mps" else scale.reciprocal()
        found = self._unscale_grads_(optimizer, inverse, torch.zeros_like(scale), allow_fp16=False)
        state.pop(DELAYED, None)
        state["stage"] = OptState.UNSCALED
        self._record(state, loss_id, found)
        add_back(state)

    def clip_grad_norm_(self, optimizer: Optimizer, max_norm: float, **kwargs: Any) -> Tensor:
        """``torch.nn.utils.clip_grad_norm_`` on the optimizer's gradients, unscaled first where they are not.

        Args:
            optimizer: whose gradients.
            max_norm: of all of them together.
            **kwargs: ``norm_type``, ``error_if_nonfinite`` and ``foreach``, as torch's.

        Returns:
            The norm before clipping; inf or nan where the step will be skipped.
        """
        if self._enabled and self._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY:
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
        state = self._state_of(optimizer)
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        self._require_scaled("step")
        if _wants_scaler(type(optimizer)):
            return super().step(optimizer, *args, **kwargs)
        on_device, unscales = can_skip_on_device(optimizer), False
        if state["stage"] is OptState.UNSCALED:
            if self._recheck:
                self._record(state, 0, self._check_again(optimizer))
        elif (on_device or hasattr(optimizer, "check_gradients")) and DELAYED not in state:
            unscales = True
            self._record(state, 0, self._check_for_device(optimizer, state))
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
            self._skips.note_on_device(optimizer, found)
        else:
            result = optimizer.step(*args, **kwargs)
            self._skips.note_step(optimizer)
        state["stage"] = OptState.STEPPED
        return result

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Move the scales by what was found in this iteration, or set all of them.

        Args:
            new_scale: finite and above 0; a number, or a tensor of one element (which is read: a host sync).

        Raises:
            LossScaleError: another ``new_scale``. LossScaleFloorError: an overflow at the floor; the scaler is ready
                for the next iteration all the same. RuntimeError: a ``scale_loss`` with ``delay_unscale`` is open.
        """
        if not self._enabled:
            return
        self._check_scale_growth_tracker("update")
        if any(DELAYED in state for state in self._per_optimizer_states.values()):
            raise RuntimeError(
                "gradients of scale_loss(..., delay_unscale=True) are still scaled, and an update may change the "
                "scale: close the accumulation with a scale_loss that unscales"
            )
        updated: list[tuple[LossScale, Tensor]] = []
        if new_scale is not None:
            value = arguments.checked_new_scale(new_scale, self._device)
            arguments.checked_bounds(self._bounds[0], value, self._bounds[1])
            self._keep_old(changed=True)
            for loss in self._losses:
                cast(Tensor, loss.scale).fill_(value)
        else:
            updated = [*self._found()]
            if not updated:
                raise NoGradientsError(
                    "No inf checks were recorded prior to update: no optimizer was stepped or unscaled through the "
                    "scaler since the last update. Call scaler.step(optimizer) before, or update(new_scale)"
                )
            self._keep_old(changed=False)
            for loss, found in updated:
                loss.update(found, self._rule())
        self._forget_iteration()
        self._skips.begin()
        if self._on_floor is not None and self._floor.fallen(updated):
            message = floor_message(self)
            if self._on_floor == "raise":
                raise LossScaleFloorError(message)
            warnings.warn(message, stacklevel=2)

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
        return any(bool(found > 0) for loss, found in self._found() if loss is self._losses[loss_id])

    def overflow_parameters(self) -> list[str]:
        """Names of the parameters whose gradients held inf or nan in the last skipped step. Reads the device.

        After a step that was skipped on the device, ask before ``zero_grad``: the gradients themselves are looked at.
        """
        return self._skips.parameters(self.parameter_names)

    def parameter_names(self, optimizer: Optimizer) -> dict[int, str]:
        """id -> name, as messages have them: of named groups, of the converted model, else place and shape."""
        model = None if self._model is None else self._model()
        known = {} if model is None else {id(p): name for name, p in model.named_parameters()}
        return parameter_names(optimizer, lambda parameter: known.get(id(parameter)))

    def name_parameters(self, model: torch.nn.Module) -> None:
        """Take names from this model (held weakly); ``convert`` does."""
        self._model = weakref.ref(model)

    def _scaled_for(self, loss_id: int, loss: Any, optimizers: list[Optimizer]) -> Any:
        """The scaled loss of a ``scale_loss``, after its checks."""
        if not 0 <= loss_id < len(self._losses):
            raise IndexError(
                f"loss_id={loss_id}: this scaler has {len(self._losses)} losses; LossScaler(num_losses=...) makes more"
            )
        for optimizer in optimizers:
            state = self._per_optimizer_states[id(optimizer)]
            if state["stage"] is OptState.STEPPED:
                raise RuntimeError(
                    f"{type(optimizer).__name__} has stepped: scaler.update() before the next scale_loss"
                )
            if state.get(DELAYED, loss_id) != loss_id:
                raise RuntimeError(
                    f"gradients of loss {state[DELAYED]} are there, still scaled (delay_unscale=True): unscale them "
                    f"before the backward of loss {loss_id}, or they cannot be told apart"
                )
        return self._scaled(loss_id, loss)

    def _scaled(self, loss_id: int, outputs: Any) -> Any:
        def scale_on(device: torch.device) -> Tensor:
            if self._scale is None:
                self._lazy_init_scale_growth_tracker(device)
            return cast(Tensor, self._losses[loss_id].scale).to(device, non_blocking=True)

        result = scaled(outputs, scale_on)
        self._scaled_since_update = True
        if self._old is not None and self._scale is not None and isinstance(result, Tensor):
            self._old.watch(result, self._scale)
        return result

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        self._refuse_spoiled(optimizer)
        gradients = grouped(optimizer, allow_fp16 or self._fp16_gradients, self.parameter_names)
        inverses: dict[torch.device, Tensor] = {}
        found: dict[torch.device, Tensor] = {}
        for (device, _), tensors in gradients.items():
            if device not in found:
                inverses[device] = inv_scale.to(device, non_blocking=True)
                found[device] = found_inf.to(device, non_blocking=True, copy=True)
            _unscale(tensors, found[device], inverses[device])
        self._agree(optimizer, found)
        return found

    def _check_for_device(self, optimizer: Any, state: dict[str, Any]) -> dict[Any, Tensor]:
        """Look for inf in gradients that the optimizer will unscale itself."""
        check = getattr(optimizer, "check_gradients", None)
        if check is None:
            return self._check_inf_per_device(optimizer)
        self._refuse_spoiled(optimizer)
        state["check"] = check(self._scale)
        found = state["check"].found_inf
        self._agree(optimizer, found)
        return found

    def _check_again(self, optimizer: Optimizer) -> dict[torch.device, Tensor]:
        scale = cast(Tensor, self._scale)
        return self._unscale_grads_(optimizer, torch.ones_like(scale), torch.zeros_like(scale), allow_fp16=True)

    def _agree(self, optimizer: Optimizer, found: dict[torch.device, Tensor]) -> None:
        group = group_of(optimizer, self._process_group)
        if group is not None:
            agree(found, cast(Tensor, self._scale).device, group)

    def _state_of(self, optimizer: Optimizer) -> dict[str, Any]:
        self._known.add(optimizer)
        return self._per_optimizer_states[id(optimizer)]

    def _record(self, state: dict[str, Any], loss_id: int, found: dict[torch.device, Tensor]) -> None:
        """Add flags to those of the optimizer, which decide on its step, and to those of the loss."""
        by_loss = state.setdefault("found_inf_by_loss", {})
        by_loss.setdefault(loss_id, []).extend(found.values())
        flags = state["found_inf_per_device"]
        state["found_inf_per_device"] = {
            device: torch.maximum(flags[device], flag) if device in flags else flag for device, flag in found.items()
        } | {device: flag for device, flag in flags.items() if device not in found}

    def _found(self) -> Iterable[tuple[LossScale, Tensor]]:
        """Each loss that was checked since the last update, with one flag on the device of its scale."""
        flags: dict[int, list[Tensor]] = {}
        for state in self._per_optimizer_states.values():
            by_loss = state.get("found_inf_by_loss") or {0: [*state["found_inf_per_device"].values()]}
            for loss_id, found in by_loss.items():
                flags.setdefault(loss_id, []).extend(found)
        for loss_id, found in flags.items():
            scale = self._losses[loss_id].scale
            if scale is not None and found:
                here = [flag.view(()).to(scale.device, non_blocking=True) for flag in found]
                yield self._losses[loss_id], here[0] if len(here) == 1 else torch.stack(here).amax()

    def _keep_old(self, changed: bool) -> None:
        """Note gradients that this update leaves behind, scaled: an optimizer that accumulates while another steps."""
        used = {id_ for id_, state in self._per_optimizer_states.items() if state["stage"] is not OptState.READY}
        left = [o for o in [*self._known] if id(o) not in used and any(p.grad is not None for p in parameters_of(o))]
        unknown = changed and self._scaled_since_update and not used and not self._known
        self._old = None
        if left or unknown:
            self._old = OldGradients(cast(Tensor, self._scale).clone(), None if unknown else left)

    def _require_scaled(self, call: str) -> None:
        if not self._scaled_since_update:
            raise RuntimeError(
                f"{call}() would divide gradients by a scale of {self.get_scale():g}, but nothing was scaled since the "
                "last update(): call scaler.scale(loss).backward(), or optimizer.step() for gradients without a scale"
            )

    def _refuse_spoiled(self, optimizer: Optimizer) -> None:
        refuse_shared(optimizer, self._claimed, self.parameter_names)
        if self._old is not None:
            self._old.refuse_mixed(optimizer, self.parameter_names)


@cache
def _wants_scaler(optimizer: type[Optimizer]) -> bool:
    """The older contract of torch's, where ``step`` takes the scaler itself."""
    return (
        getattr(optimizer, "_step_supports_amp_scaling", False)
        and "grad_scaler" in signature(optimizer.step).parameters
    )
