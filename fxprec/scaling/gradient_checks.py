"""How a scaler takes a scale in and out of gradients: checked, agreed upon by the ranks, and recorded by loss."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from fxprec.scaling.agreement import agree, group_of
from fxprec.scaling.cuda_graphs import capturing
from fxprec.scaling.gradients import grouped, parameter_names, parameters_of, refuse_dtypes
from fxprec.scaling.loss_scale import LossScale
from fxprec.scaling.old_scale import holds_any
from fxprec.scaling.outputs import scaled
from fxprec.scaling.refusals import claim, refuse_shared
from fxprec.scaling.resume import resume
from fxprec.scaling.scaler_state import ScalerState
from fxprec.scaling.stages import BY_LOSS, CHECK, DELAYED, OPEN
from fxprec.torch_internals import amp_unscale_

__all__ = ["GradientChecks"]


class GradientChecks(ScalerState):
    """What the calls of ``fxprec.LossScaler`` are made of."""

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
            amp_unscale_(tensors, found[device], inverses[device])
        claim(optimizer, self._claimed)
        self._agree(optimizer, found)
        return found

    def _check_for_device(self, optimizer: Any, state: dict[str, Any]) -> dict[Any, Tensor]:
        """Look for inf in gradients that the optimizer will unscale itself."""
        check = getattr(optimizer, "check_gradients", None)
        if check is None:
            return self._check_only(optimizer)
        self._refuse_spoiled(optimizer, self._claimed)
        claim(optimizer, self._claimed)
        state[CHECK] = check(self._scale)
        found = state[CHECK].found_inf
        self._agree(optimizer, found)
        return found

    def _check_only(self, optimizer: Optimizer) -> dict[torch.device, Tensor]:
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
        by_loss = state.setdefault(BY_LOSS, {})
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
            by_loss = state.get(BY_LOSS) or {0: [*state["found_inf_per_device"].values()]}
            for loss_id, found in by_loss.items():
                flags.setdefault(loss_id, []).extend(found)
        for loss_id, found in flags.items():
            scale = self._losses[loss_id].scale
            if scale is not None and found:
                here = [flag.view(()).to(scale.device, non_blocking=True) for flag in found]
                yield self._losses[loss_id], here[0] if len(here) == 1 else torch.stack(here).amax()

    def _found_by(self, optimizer: Optimizer) -> Tensor:
        """One flag of what was found in the gradients of this optimizer since the last update; 0-dim FP32."""
        flags = [flag.view(()) for flag in self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()]
        here = cast(Tensor, self._scale).device
        return flags[0] if len(flags) == 1 else torch.stack([flag.to(here, non_blocking=True) for flag in flags]).amax()

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
