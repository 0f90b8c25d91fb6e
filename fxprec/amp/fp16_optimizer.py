"""An optimizer for a model that is already half: FP32 master weights, and a loss scale.

::

    optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), dynamic_loss_scale=True)
    optimizer.zero_grad()
    optimizer.backward(loss)                 # for loss.backward()
    optimizer.step()                         # masters are updated, then copied to the model's parameters

Why it exists: a model whose FP32 values are still there is better served by ``amp.initialize`` or ``fxprec.convert``,
which keep them. This one takes low parameters as they are and makes masters of them.

An overflow makes the next ``step`` do nothing, and lowers the scale there: all backward passes of one iteration are
scaled alike, however often the masters' gradients are updated in between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fxprec.amp.fp16_scaler import DynamicLossScaler, LossScaler
from fxprec.amp.fp16_state import FP16State
from fxprec.amp.masters import copy_masters, with_masters
from fxprec.errors import LossScaleFloorError
from fxprec.scaling.gradients import parameters_of

#: What a dynamic scale starts with here, unless ``dynamic_loss_args`` says otherwise.
_DYNAMIC: dict[str, Any] = {
    "init_scale": 2.0**16,
    "scale_window": 2000,
    "min_loss_scale": None,
    "max_loss_scale": 2.0**24,
}


class FP16_Optimizer(FP16State):
    """Wrapper of a PyTorch optimizer of float16 or bfloat16 (and perhaps some FP32) parameters.

    Args:
        init_optimizer: the optimizer; from now on it updates FP32 masters. Use only the wrapper.
        static_loss_scale: the loss scale; steps are never skipped.
        dynamic_loss_scale: a scale that starts at 2**16, halves after an overflow and doubles after 2000 good steps.
        dynamic_loss_args: ``init_scale``, ``scale_factor``, ``scale_window``, ``min_loss_scale``, ``max_loss_scale``.
        verbose: print what it takes over, and skipped steps.

    Attributes:
        optimizer: the wrapped one, for lr schedulers.
        overflow: whether the gradients of this iteration hold inf or nan (dynamic scale only).
        fp16_groups, fp32_from_fp16_groups, fp32_from_fp32_groups: of each param group the low parameters, their
            masters, and the parameters that were FP32.

    Raises:
        TypeError: a parameter of another dtype, or no optimizer. ValueError: a scale out of range. The optimizer is as
            before.
    """

    def __init__(
        self,
        init_optimizer: Optimizer,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Mapping[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        if not isinstance(init_optimizer, Optimizer):
            raise TypeError(f"FP16_Optimizer wraps a torch.optim.Optimizer, not {type(init_optimizer).__name__}")
        self.verbose = verbose
        self.dynamic_loss_scale = dynamic_loss_scale
        self.loss_scaler = (
            DynamicLossScaler(**{**_DYNAMIC, **(dynamic_loss_args or {})})
            if dynamic_loss_scale
            else LossScaler(static_loss_scale)
        )
        self.optimizer = init_optimizer
        groups = with_masters(init_optimizer)
        self.fp16_groups = [group.low for group in groups]
        self.fp32_from_fp16_groups = [group.masters for group in groups]
        self.fp32_from_fp32_groups = [group.fp32 for group in groups]
        self._pairs = [pair for group in groups for pair in zip(group.low, group.masters, strict=True)]
        self._fp32 = [parameter for group in groups for parameter in group.fp32]
        self._aside: list[tuple[Tensor, Tensor]] = []
        self._scaled = False
        self.overflow = False
        for i, group in enumerate(groups):
            self._say(
                f"FP16_Optimizer: param group {i} has {len(group.low)} low parameters, which get FP32 masters, and "
                f"{len(group.fp32)} FP32 ones"
            )

    def zero_grad(self, set_grads_to_None: bool = False) -> None:
        """Zero the gradients of masters and model, or set them to None."""
        for parameter in (*chain.from_iterable(self.fp16_groups), *parameters_of(self.optimizer)):
            if set_grads_to_None:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.detach_()
                parameter.grad.zero_()
        self._aside, self._scaled, self.overflow = [], False, False

    def backward(self, loss: Tensor, update_master_grads: bool = True, retain_graph: bool = False) -> None:
        """Run the backward of the loss, in FP32, times the scale; in place of ``loss.backward()``.

        Args:
            loss: of any float dtype.
            update_master_grads: False: leave ``update_master_grads()`` to you, after the last of several losses.
            retain_graph: as ``Tensor.backward``.
        """
        if not self._scaled:  # FP32 parameters hold unscaled gradients: nothing scaled may be added to these
            self._aside = [(p, p.grad) for p in self._fp32 if p.grad is not None]
            for parameter, _ in self._aside:
                parameter.grad = None
            self._scaled = True
        self.loss_scaler.backward(loss, retain_graph)
        if update_master_grads:
            self.update_master_grads()

    def update_master_grads(self) -> None:
        """Copy the model's gradients to the masters in FP32, unscaled, and look for inf and nan (dynamic scale)."""
        inverse = 1.0 / self.loss_scaler.loss_scale
        with torch.no_grad():
            for parameter, master in self._pairs:
                master.grad = None if parameter.grad is None else parameter.grad.float() * inverse
            # FP32 parameters are their own masters: their gradients are unscaled in place, apart from those of before.
            if self._scaled:
                for parameter in self._fp32:
                    if parameter.grad is not None:
                        parameter.grad *= inverse
            for parameter, gradient in self._aside:
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        self._aside, self._scaled = [], False
        self.overflow = self.loss_scaler.has_overflow(parameters_of(self.optimizer))

    def clip_master_grads(self, max_norm: float, norm_type: float = 2) -> Tensor | int:
        """Clip the masters' gradients, as ``torch.nn.utils.clip_grad_norm_``; return their norm, or -1 on overflow."""
        if self.overflow:
            return -1
        return torch.nn.utils.clip_grad_norm_(parameters_of(self.optimizer), max_norm, norm_type)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the masters, and the model's parameters from them; nothing after an overflow, but a lower scale.

        Args:
            closure: zeroes the gradients, runs forward and ``optimizer.backward(loss)``, and returns the loss. While
                it overflows, the scale is lowered and it runs again.

        Raises:
            RuntimeError: ``backward(update_master_grads=False)`` without ``update_master_grads()``.
            LossScaleFloorError: (a RuntimeError) no scale is small enough.
        """
        if closure is not None:
            result = self._step_with_closure(closure)
        else:
            if self._scaled:
                raise RuntimeError(
                    "FP16_Optimizer.step: the gradients of backward(loss, update_master_grads=False) are still scaled: "
                    "call update_master_grads() before step()"
                )
            self.loss_scaler.update_scale(self.overflow)
            if self.overflow:
                self._say(f"Gradient overflow.  Skipping step, reducing loss scale to {self.loss_scale}")
                return None
            result = self.optimizer.step()
        copy_masters(self._pairs)
        return result

    def _step_with_closure(self, closure: Callable[[], Any]) -> Any:
        # LBFGS calls its closure several times a step, and moves the masters in between.
        first = True

        def wrapped() -> Any:
            nonlocal first
            if not first:  # the optimizer moved the masters since
                copy_masters(self._pairs)
            first = False
            while True:
                loss, tried = closure(), self.loss_scale
                self.loss_scaler.update_scale(self.overflow)
                if not self.overflow:
                    return loss
                # A static scale, or one at its floor, would repeat the same overflow for ever.
                if self.loss_scale == tried:
                    raise LossScaleFloorError(
                        f"the closure's gradients hold inf or nan at the smallest loss scale, {tried:g}: it is the "
                        "model that makes them. Look at the loss and at the inputs of this step"
                    )
                self._say(f"OVERFLOW within closure! Skipping step, reducing loss scale to {self.loss_scale}")

        return self.optimizer.step(wrapped)

    def inspect_master_grad_data(self) -> list[list[Tensor | None]] | None:
        """Return the masters' gradients, a list a param group; None, with a warning printed, after an overflow."""
        if self.overflow:
            print(
                "Warning:  calling FP16_Optimizer.inspect_master_grad_data while in an overflow state.  Gradients are "
                "currently invalid (inf, nan, or stale).  Returning None."
            )
            return None
        groups = self.optimizer.param_groups
        return [[None if p.grad is None else p.grad.detach() for p in group["params"]] for group in groups]

    def _say(self, message: str) -> None:
        if self.verbose:
            print(message)
