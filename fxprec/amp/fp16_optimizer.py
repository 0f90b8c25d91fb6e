"""Defines an optimizer for a model that is already half: FP32 master weights, and a loss scale.

::

    optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), dynamic_loss_scale=True)
    optimizer.zero_grad()
    optimizer.backward(loss)                 # for loss.backward()
    optimizer.step()                         # masters are updated, then copied to the model's parameters

Why it exists: a model whose FP32 values are still there is better served by ``amp.initialize`` or ``fxprec.convert``,
which keep them. This one takes low parameters as they are and makes masters of them.

An overflow makes the next ``step`` do nothing, and lowers the scale there: all backward passes of one iteration are
scaled alike, however often the masters' gradients are updated in between. The scales are plain numbers, static or
dynamic. (Models with FP32 parameters do not need these: ``fxprec.LossScaler``.)

Sources: Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2; the defaults are those of NVIDIA apex.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from fxprec.errors import LossScaleFloorError
from fxprec.kernels.launch.operands import LOW_DTYPES
from fxprec.scaling.gradients import local_values, parameters_of
from fxprec.scaling.scale import SMALLEST_SCALE, checked_count, checked_scale
from fxprec.torch_internals import foreach_copy_

#: What a dynamic scale starts with here, unless ``dynamic_loss_args`` says otherwise.
_DYNAMIC: dict[str, Any] = {
    "init_scale": 2.0**16, "scale_window": 2000, "min_loss_scale": None, "max_loss_scale": 2.0**24,
}  # fmt: skip


class StaticLossScaler:
    """Static loss scale; steps are never skipped. ``scale`` is finite and greater than 0, else ValueError."""

    dynamic = False

    def __init__(self, scale: float = 1.0) -> None:
        self.cur_scale = checked_scale("scale", scale)

    @property
    def loss_scale(self) -> float:
        return self.cur_scale

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Return whether a gradient holds inf or nan; a static scale does not look."""
        return False

    def update_scale(self, overflow: bool) -> None:
        """Count one iteration."""

    def scale_gradient(self, module: Any, grad_in: Iterable[Tensor], grad_out: Any) -> tuple[Tensor, ...]:
        """Return a module's input gradients times the scale, for a backward hook."""
        return tuple(self.loss_scale * gradient for gradient in grad_in)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Run the backward of the loss, in FP32, times the scale."""
        (loss.float() * self.loss_scale).backward(retain_graph=retain_graph)

    def state_dict(self) -> dict[str, float | int]:
        """Return plain numbers."""
        return {"loss_scale": self.cur_scale}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that ``checked`` let through."""
        self.cur_scale = float(state["loss_scale"])

    def checked(self, state: Any) -> Mapping[str, Any]:
        """Return a saved state of this kind of scale, checked.

        Raises:
            RuntimeError: keys are missing. ValueError: numbers out of range.
        """
        wanted = self.state_dict().keys()
        if not isinstance(state, Mapping) or not wanted <= state.keys():
            raise RuntimeError(f"the state of a {type(self).__name__} holds {sorted(wanted)}, not {state!r}")
        checked_scale("loss_scale", state["loss_scale"])
        checked_count("unskipped", state.get("unskipped", 0))
        return state


class DynamicLossScaler(StaticLossScaler):
    """Loss scale that falls after an overflow and rises after ``scale_window`` good iterations in a row.

    Args:
        init_scale: the first scale.
        scale_factor: what it is divided or multiplied by; above 1.
        scale_window: good iterations before it rises.
        min_loss_scale, max_loss_scale: its bounds; None: none.
    """

    dynamic = True

    def __init__(
        self,
        init_scale: float = 2.0**32,
        scale_factor: float = 2.0,
        scale_window: int = 1000,
        min_loss_scale: float | None = 1.0,
        max_loss_scale: float | None = None,
    ) -> None:
        super().__init__(checked_scale("init_scale", init_scale))
        if checked_scale("scale_factor", scale_factor) <= 1:
            raise ValueError(f"scale_factor must be greater than 1, not {scale_factor!r}")
        self.scale_factor, self.scale_window = float(scale_factor), checked_count("scale_window", scale_window, 1)
        self.min_loss_scale = checked_scale("min_loss_scale", min_loss_scale) if min_loss_scale else SMALLEST_SCALE
        self.max_loss_scale = math.inf if max_loss_scale is None else checked_scale("max_loss_scale", max_loss_scale)
        # apex begins within the bounds, too.
        self.cur_scale = max(self.min_loss_scale, min(self.cur_scale, self.max_loss_scale))
        self.unskipped = 0

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Return whether a gradient holds inf or nan. Reads the device once."""
        gradients = [local_values(p.grad) for p in params if p.grad is not None]
        if not gradients:
            return False
        first = gradients[0].device
        # One flag a gradient is brought together, so that the host waits once.
        return not bool(torch.stack([torch.isfinite(g).all().to(first) for g in gradients]).all())

    def update_scale(self, overflow: bool) -> None:
        """Move the scale by whether this iteration overflowed.

        Raises:
            LossScaleFloorError: there is no ``min_loss_scale``, and no smaller scale could be taken out again.
        """
        # A smaller one has no reciprocal in FP32, so its gradients could not be unscaled.
        if overflow and self.cur_scale <= SMALLEST_SCALE:
            raise LossScaleFloorError(
                f"the loss scale fell to {self.cur_scale:g}: gradients hold inf or nan at every scale, so it is the "
                "model that makes them. Look at the loss and the inputs of the last step, and at the learning rate"
            )
        if overflow:
            self.cur_scale, self.unskipped = max(self.min_loss_scale, self.cur_scale / self.scale_factor), 0
            return
        self.unskipped += 1
        if self.unskipped == self.scale_window:
            self.cur_scale, self.unskipped = min(self.max_loss_scale, self.cur_scale * self.scale_factor), 0

    def state_dict(self) -> dict[str, float | int]:
        return {"loss_scale": self.cur_scale, "unskipped": self.unskipped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.unskipped = int(state["unskipped"])


def _of_wrapped(name: str, doc: str) -> Any:
    """Return a property that is one of the wrapped optimizer's."""
    return property(
        lambda self: getattr(self.optimizer, name), lambda self, value: setattr(self.optimizer, name, value), doc=doc
    )


class FP16_Optimizer:
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
        dynamic = {**_DYNAMIC, **(dynamic_loss_args or {})}
        self.loss_scaler = DynamicLossScaler(**dynamic) if dynamic_loss_scale else StaticLossScaler(static_loss_scale)
        self.optimizer = init_optimizer
        groups = with_masters(init_optimizer)
        self.fp16_groups = [group.low for group in groups]
        self.fp32_from_fp16_groups = [group.masters for group in groups]
        self.fp32_from_fp32_groups = [group.fp32 for group in groups]
        # Flat lists: one copy of all masters a step, whatever the groups.
        self._pairs = [pair for group in groups for pair in zip(group.low, group.masters, strict=True)]
        self._fp32 = [parameter for group in groups for parameter in group.fp32]
        self._aside: list[tuple[Tensor, Tensor]] = []
        self._scaled = False
        self.overflow = False
        # A dtype that was not meant (a model that stayed FP32) shows here.
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
        # FP32 first, then unscaled: in float16 an unscaled gradient would vanish.
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
        # apex's answer: the norm of such gradients says nothing, and the step will be skipped.
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
        # Detached, so that what a script keeps of them keeps no graph.
        groups = self.optimizer.param_groups
        return [[None if p.grad is None else p.grad.detach() for p in group["params"]] for group in groups]

    def _say(self, message: str) -> None:
        if self.verbose:
            print(message)

    def __getstate__(self) -> NoReturn:
        raise RuntimeError("FP16_Optimizer should be serialized using state_dict().")

    def __setstate__(self, state: Any) -> NoReturn:
        raise RuntimeError("FP16_Optimizer should be deserialized using load_state_dict().")

    def state_dict(self) -> dict[str, Any]:
        """Return the loss scale, the wrapped optimizer's state, and ``fp32_from_fp16``, the masters by group."""
        return {
            "loss_scaler": self.loss_scaler.state_dict(),
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "overflow": self.overflow,
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_from_fp16": [[master.detach() for master in group] for group in self.fp32_from_fp16_groups],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` gave; the model's parameters become the masters', rounded. Resumes bit for bit.

        Raises:
            RuntimeError: keys, groups or shapes that do not fit, or a static scale for a dynamic one. ValueError:
                numbers out of range, or what the wrapped optimizer refuses. Nothing is changed then.
        """
        missing = [key for key in self.state_dict() if key not in state_dict]
        if missing:
            raise RuntimeError(f"the state of FP16_Optimizer lacks {missing}; it has {sorted(map(str, state_dict))}")
        if bool(state_dict["dynamic_loss_scale"]) != self.dynamic_loss_scale:
            raise RuntimeError(
                f"the state has dynamic_loss_scale={state_dict['dynamic_loss_scale']}, this FP16_Optimizer "
                f"{self.dynamic_loss_scale}: make it with the same"
            )
        # All that may refuse comes first, so that a refusal changes nothing.
        scale = self.loss_scaler.checked(state_dict["loss_scaler"])
        masters = saved_masters(state_dict["fp32_from_fp16"], self.fp32_from_fp16_groups)
        self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])  # checks before it changes anything
        self.loss_scaler.load_state_dict(scale)
        self.overflow = bool(state_dict["overflow"])
        with torch.no_grad():
            for (_, master), saved in zip(self._pairs, masters, strict=True):
                master.copy_(saved)
        copy_masters(self._pairs)

    @property
    def loss_scale(self) -> float:
        """Present loss scale; it may be set."""
        return self.loss_scaler.loss_scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self.loss_scaler.cur_scale = StaticLossScaler(value).cur_scale

    # Scripts read and set these two of apex's as if this were the optimizer that it wraps.
    state = _of_wrapped("state", "State of the wrapped optimizer.")
    param_groups = _of_wrapped("param_groups", "Its groups, with masters in place of low parameters.")


class MasterGroup(NamedTuple):
    """Masters of one param group: its trainable low parameters, their FP32 masters, and those that were FP32."""

    low: list[Tensor]
    masters: list[Tensor]
    fp32: list[Tensor]


def with_masters(optimizer: Optimizer) -> list[MasterGroup]:
    """Put FP32 masters in the places of the optimizer's low parameters; state that it has follows them.

    Raises:
        TypeError: a trainable parameter is neither low nor FP32; nothing was changed.
    """
    groups: list[MasterGroup] = []
    for number, group in enumerate(optimizer.param_groups):
        found = MasterGroup([], [], [])
        for position, parameter in enumerate(group["params"]):
            # A frozen parameter is never updated: it needs no master.
            if not parameter.requires_grad:
                continue
            if parameter.dtype in LOW_DTYPES:
                found.low.append(parameter)
                found.masters.append(parameter.detach().clone().float().requires_grad_())
            elif parameter.dtype is torch.float32:
                found.fp32.append(parameter)
            else:
                raise TypeError(
                    f"FP16_Optimizer: parameters must be float16, bfloat16 or float32; "
                    f"param_groups[{number}]['params'][{position}] is {parameter.dtype}"
                )
        groups.append(found)
    # Only now, when all parameters are known to fit, anything is changed.
    for group, found in zip(optimizer.param_groups, groups, strict=True):
        masters = {id(low): master for low, master in zip(found.low, found.masters, strict=True)}
        for low in found.low:
            # State is keyed by the parameter: the master takes it over.
            if low in optimizer.state:
                optimizer.state[masters[id(low)]] = optimizer.state.pop(low)
        group["params"][:] = [masters.get(id(p), p) for p in group["params"]]  # in place: LBFGS keeps this very list
    if optimizer.state:
        optimizer.load_state_dict(optimizer.state_dict())  # casts per-parameter state to FP32
    return groups


def copy_masters(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Write each master into its low parameter, rounded, all by one multi-tensor copy a device."""
    low, masters = [low for low, _ in pairs], [master for _, master in pairs]
    if low:
        with torch.no_grad():
            foreach_copy_(low, masters)


def saved_masters(saved: Any, groups: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return the masters of a saved state, one after the other.

    Raises:
        RuntimeError: they do not fit to ``groups``.
    """
    # Masters have no names in the file: groups and shapes tell whether it is the same model.
    theirs = [[tuple(master.shape) for master in group] for group in saved]
    ours = [[tuple(master.shape) for master in group] for group in groups]
    if theirs != ours:
        raise RuntimeError(
            f"the saved masters have the shapes {theirs}, this FP16_Optimizer has {ours}: make model and optimizer as "
            "they were when the state was saved"
        )
    return [master for group in saved for master in group]
