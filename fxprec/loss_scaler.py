"""Loss scaling: torch's ``GradScaler``, call for call, and what it lacks."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from inspect import signature
from typing import Any, cast

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from fxprec.errors import LossScaleFloorError, NoGradientsError
from fxprec.scaling import arguments
from fxprec.scaling.agreement import agree, group_of
from fxprec.scaling.cuda_graphs import capturing
from fxprec.scaling.device_step import can_skip_on_device, step_on_device
from fxprec.scaling.gradients import grouped, parameter_names, parameters_of, refuse_dtypes
from fxprec.scaling.loss_scale import LossScale
from fxprec.scaling.old_scale import holds_any
from fxprec.scaling.outputs import scaled
from fxprec.scaling.refusals import claim, floor_message, no_gradients, refuse_shared
from fxprec.scaling.resume import resume
from fxprec.scaling.scale_loss import ASIDE, DELAYED, OPEN, add_back, scaled_loss
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
            raise RuntimeError("step() has already been called since the last update().")
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
                self._record(state, state.get("found_inf_by_loss", [0]), self._check_again(optimizer))
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
        self._forget_iteration()
        self._skips.begin()
        if self._floor.fallen(self._backoff_factor) and self._on_floor is not None:
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
        wanted = self._losses[loss_id]
        return self._enabled and any(bool(found > 0) for loss, found in self._found() if loss is wanted)

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
            state = self._state_of(optimizer, "scale_loss")
            if state["stage"] is OptState.STEPPED:
                raise RuntimeError(
                    f"{type(optimizer).__name__} has stepped: scaler.update() before the next scale_loss"
                )
            if state.get(DELAYED, loss_id) != loss_id:
                raise RuntimeError(
                    f"gradients of loss {state[DELAYED]} are there, still scaled (delay_unscale=True): unscale them "
                    f"before the backward of loss {loss_id}, or they cannot be told apart"
                )
            if self._scaled_outside and DELAYED not in state and state["stage"] is OptState.READY:
                # Reads from the device, where scale and scale_loss are used in one iteration only.
                if any(p.grad is not None and holds_any(p.grad) for p in parameters_of(optimizer)):
                    raise RuntimeError(
                        f"{type(optimizer).__name__} has gradients, and scale() was called since the last update: they "
                        "may still be scaled. scaler.unscale_ the optimizer before scale_loss, or use scale_loss for "
                        "all its losses; or zero_grad() it"
                    )
        return self._scaled(loss_id, loss)

    def _scaled(self, loss_id: int, outputs: Any) -> Any:
        def times_scale(tensor: Tensor) -> Tensor:
            if self._scale is None:
                self._lazy_init_scale_growth_tracker(tensor.device)
            scale = cast(Tensor, self._losses[loss_id].scale)
            if capturing(tensor.device):
                self._captured = True  # replays will scale, and run backward, unseen
            result = tensor * scale.to(tensor.device, non_blocking=True)
            self._old.watch(result, scale)
            return result

        self._claimed.clear()
        result = scaled(outputs, times_scale)
        self._scaled_since_update = True
        return result

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        self._refuse_spoiled(optimizer, self._claimed)
        gradients = grouped(optimizer, allow_fp16 or self._fp16_gradients, self.parameter_names)
        inverses: dict[torch.device, Tensor] = {}
        found: dict[torch.device, Tensor] = {}
        for (device, _), tensors in gradients.items():
            if device not in found:
                inverses[device] = inv_scale.to(device, non_blocking=True)
                found[device] = found_inf.to(device, non_blocking=True, copy=True)
            _unscale(tensors, found[device], inverses[device])
        claim(optimizer, self._claimed)
        self._agree(optimizer, found)
        return found

    def _check_for_device(self, optimizer: Any, state: dict[str, Any]) -> dict[Any, Tensor]:
        """Look for inf in gradients that the optimizer will unscale itself."""
        check = getattr(optimizer, "check_gradients", None)
        if check is None:
            scale = cast(Tensor, self._scale)
            return self._unscale_grads_(optimizer, torch.ones_like(scale), torch.zeros_like(scale), allow_fp16=True)
        self._refuse_spoiled(optimizer, self._claimed)
        claim(optimizer, self._claimed)
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

    def _state_of(self, optimizer: Optimizer, call: str | None = None) -> dict[str, Any]:
        """The iteration's state of an optimizer; with ``call``: a RuntimeError within its ``scale_loss``."""
        self._known[id(optimizer)] = optimizer
        if self._blocks and id(optimizer) not in self._per_optimizer_states:
            state = self._per_optimizer_states[id(optimizer)]
            resume(optimizer, self._blocks, cast(Tensor, self._scale).device, state)
        state = self._per_optimizer_states[id(optimizer)]
        if call is not None and OPEN in state:
            raise RuntimeError(f"{call} within a scale_loss of the same {type(optimizer).__name__}: leave its block")
        return state

    def _record(self, state: dict[str, Any], losses: Iterable[int], found: dict[torch.device, Tensor]) -> None:
        """Add flags to those of the optimizer, which decide on its step, and to those of the losses."""
        by_loss = state.setdefault("found_inf_by_loss", {})
        for loss_id in [*losses]:
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

    def _before_update(self) -> None:
        used = {id_ for id_, state in self._per_optimizer_states.items() if state["stage"] is not OptState.READY}
        self._old.before_update(cast(Tensor, self._scale), self._known, used)

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Tensor, Tensor]:
        if self._scale is None and self._process_group is not None:
            # A pipeline stage without a loss: its gradients come from other ranks, scaled.
            self._lazy_init_scale_growth_tracker(torch.device(self._device))
        return super()._check_scale_growth_tracker(funcname)

    def _require_scaled(self, call: str) -> None:
        if not (self._scaled_since_update or self._captured) and self._process_group is None:
            raise RuntimeError(
                f"{call}() would divide gradients by a scale of {self.get_scale():g}, but nothing was scaled since the "
                "last update(): call scaler.scale(loss).backward(), or optimizer.step() for gradients without a scale"
            )

    def _refuse(self, optimizer: Optimizer, claimed: dict[int, weakref.ref[Optimizer]]) -> None:
        """All that ``unscale_`` would refuse of the gradients. ``claimed``: parameters of the optimizers before."""
        self._refuse_spoiled(optimizer, claimed)
        refuse_dtypes(optimizer, self._fp16_gradients, self.parameter_names)

    def _refuse_spoiled(self, optimizer: Optimizer, claimed: dict[int, weakref.ref[Optimizer]]) -> None:
        refuse_shared(optimizer, claimed, self.parameter_names)
        self._old.refuse_mixed(optimizer, self.parameter_names)


def _wants_scaler(optimizer: Optimizer) -> bool:
    """The older contract of torch's, where ``step`` takes the scaler itself."""
    return getattr(optimizer, "_step_supports_amp_scaling", False) and _takes_scaler(type(optimizer))


@lru_cache(maxsize=64)
def _takes_scaler(optimizer: type[Optimizer]) -> bool:
    return "grad_scaler" in signature(optimizer.step).parameters
