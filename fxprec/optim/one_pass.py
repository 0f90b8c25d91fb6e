"""Defines the step that the optimizers share: unscale, check, clip, update and write the shadows in one pass.

    scaler.unscale_      g read and written        8 bytes a parameter
    inf check            with it
    clip_grad_norm_      g read, read and written 12
    AdamW(fused=True)    g p m v read, p m v written 28
    shadows              p read, shadow written    6

become one read of g (for the check, and the norm if there is a ``max_norm``) and the update, whose kernel divides g by
the loss scale and by the clipping factor as it reads it, and writes the shadow beside p.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from itertools import chain
from numbers import Real
from operator import attrgetter
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from fxprec.host_reads import reading_waits
from fxprec.optim.gradient_check import GradientCheck, check
from fxprec.optim.kernel_updates import CompiledUpdates, Plans, check_compiler
from fxprec.optim.parts import Backend, Formula, Kernel, StepInputs, kernel_for, parts_of
from fxprec.optim.rounding import COUNT, SEED, Rounding, is_low
from fxprec.optim.shadow_copies import ShadowCopies, ask_for_low_gradients, checked_low_gradients, end_low_gradients
from fxprec.optim.torch_update import TorchUpdates
from fxprec.scaling.gradients import local, parameters_of, summed
from fxprec.scaling.skips import makes_state

#: Arguments of a whole optimizer, which torch would silently keep in a group.
_OF_ALL_GROUPS = ("max_norm", "state_dtype", "seed", "low_gradients", "compiled", "stochastic_rounding")

_LABELS = {"triton": "Triton", "compiled": "compiled"}
_is_sparse = attrgetter("is_sparse")


class OnePass(Optimizer):
    """Mixin before a torch optimizer, whose constructor, states and groups it keeps.

    ``LossScaler.step`` sets ``grad_scale``, ``found_inf`` and ``gradient_check``; without them a step is a plain one.
    Gradients may be left as they were: scaled, and not clipped.
    """

    #: Read by ``torch.amp.GradScaler``: ``step`` honours ``grad_scale`` and ``found_inf``.
    _step_supports_amp_scaling: ClassVar[bool] = True
    #: Read by the shadow stores: they need no refresh after a step of this one.
    writes_shadows: ClassVar[bool] = True

    _takes_sparse: ClassVar[bool] = False
    #: Names of the states beside "step", as torch has them.
    _state_names: ClassVar[tuple[str, ...]] = ()
    max_norm: float | None = None
    compiled: bool = False
    stochastic_rounding: bool = False
    _seed: int = 0
    #: Dtype of states that are rounded stochastically; None: states have the parameters' dtype.
    _low_states: torch.dtype | None = None
    _low_gradients: str | None = None

    def _become_one_pass(
        self, max_norm: float | None, foreach: bool | None, fused: bool | None, differentiable: bool,
        low_gradients: bool | str, compiled: bool, stochastic_rounding: bool,
    ) -> None:  # fmt: skip
        """Check and store the added arguments, after the torch optimizer's constructor with ``fused=True``."""
        if foreach or fused is False or differentiable:
            name = type(self).__name__
            raise ValueError(
                f"fxprec.optim.{name} has one implementation, in one pass: leave foreach, fused and differentiable "
                f"out, or take torch.optim.{name} for foreach={foreach}, fused={fused}, differentiable={differentiable}"
            )
        if max_norm is not None and not (isinstance(max_norm, Real) and max_norm > 0):
            raise ValueError(f"max_norm must be a number greater than 0, not {max_norm!r}; None: no clipping")
        self.max_norm = None if max_norm is None else float(max_norm)
        if compiled and any(parameter.device.type == "cpu" for parameter in parameters_of(self)):
            check_compiler()
        self.compiled = bool(compiled)
        if stochastic_rounding and not any(map(is_low, parameters_of(self))):
            dtypes = sorted({str(parameter.dtype) for parameter in parameters_of(self)})
            raise ValueError(
                f"stochastic_rounding=True rounds bfloat16 and float16 parameters, and all of these are "
                f"{' or '.join(dtypes)}: convert the model at level O3 before, or leave it out"
            )
        self.stochastic_rounding = bool(stochastic_rounding)
        self._plans = Plans()
        self._backends: dict[Kernel, Backend] = {
            "triton": self._plans, "compiled": CompiledUpdates(), "torch": TorchUpdates(),
        }  # fmt: skip
        self._low_gradients = checked_low_gradients(low_gradients)
        if self._low_gradients:
            self._wishes = [ask_for_low_gradients(parameters_of(self), self._low_gradients)]
        else:  # the newest optimizer of a parameter decides
            end_low_gradients(parameters_of(self))
        self._keep_rounding()

    def implementations(self) -> dict[str, int]:
        """Return how many parameters each kind of kernel updates: ours, a compiled loop, or torch's with the reason."""
        found: Counter[str] = Counter()
        for group in self.param_groups:
            for parameter in group["params"]:
                held = local(parameter)
                gradient = held if parameter.grad is None else local(parameter.grad)
                dtype = self._state_dtype(parameter, group)
                kernel, why = kernel_for(held, gradient, dtype, self.compiled, self.stochastic_rounding)
                found[f"torch ({why})" if kernel == "torch" else f"{_LABELS[kernel]}, one pass"] += 1
        return dict(found)

    def check_gradients(self, scale: Tensor | None) -> GradientCheck:
        """Read every gradient once: flags for inf and nan, and the norm if ``step`` will clip.

        The scaler calls it before ``step``, and passes the result on as ``gradient_check``.

        Args:
            scale: the loss scale of the gradients, 0-dim FP32, or None.
        """
        return check(parameters_of(self), scale, self.max_norm is not None, self._plans)

    def __getstate__(self) -> dict[str, Any]:
        """Return torch's state with the added attributes, which torch's pickles leave out."""
        kept = "max_norm compiled stochastic_rounding _low_gradients _low_states _seed _plans _backends".split()
        return {**super().__getstate__(), **{name: self.__dict__[name] for name in kept if name in self.__dict__}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy or a pickle; from ``load_state_dict`` no low gradients are asked for."""
        super().__setstate__(state)
        if asked := state.get("_low_gradients"):
            self._wishes = [ask_for_low_gradients(parameters_of(self), asked)]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch does, and ask for low gradients of its parameters if the optimizer wants them."""
        if found := [name for name in _OF_ALL_GROUPS if name in param_group]:
            raise ValueError(
                f"{', '.join(found)} in a parameter group: give it to the optimizer, it holds for all groups"
            )
        super().add_param_group(param_group)
        try:
            # No fused kernel takes complex parameters, and a step would fail half-way.
            for parameter in self.param_groups[-1]["params"]:
                if parameter.requires_grad and parameter.is_complex():
                    name = type(self).__name__
                    raise TypeError(
                        f"fxprec.optim.{name} takes real parameters, not one of shape {tuple(parameter.shape)} and "
                        f"{parameter.dtype}: give it to torch.optim.{name}, in an optimizer of its own"
                    )
            if self._low_gradients:
                self._wishes.append(ask_for_low_gradients(self.param_groups[-1]["params"], self._low_gradients))
        # A refused group must not stay half added.
        except BaseException:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters once.

        Args:
            closure: evaluated first, as by torch's optimizers, without a scaler; its result is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scale: Tensor | None = getattr(self, "grad_scale", None)
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        checked: GradientCheck | None = getattr(self, "gradient_check", None)
        # A skipped first step must not create state, so it syncs with the device. (Our scaler has read the flag by
        # then, torch's has not.)
        if found_inf is not None and (not reading_waits(found_inf.device) or makes_state(self)) and found_inf.item():
            return loss
        divisor = scale
        if self.max_norm is not None:
            if checked is None:
                checked = check(parameters_of(self), scale, True, self._plans)
            divisor = checked.divisor(self.max_norm, scale)
        work = [(group, *_with_gradients(group["params"])) for group in self.param_groups]
        if not self._takes_sparse and any(map(_is_sparse, chain.from_iterable(gradients for *_, gradients in work))):
            raise RuntimeError(
                f"fxprec.optim.{type(self).__name__} does not support sparse gradients: take torch.optim.SparseAdam or "
                "fxprec.optim.SGD for these parameters"
            )
        # Shadows count as stale if an update fails, and are finished if none does.
        with ShadowCopies(chain.from_iterable(owners for _, owners, _ in work)) as copies:
            step = StepInputs(divisor, found_inf, copies)
            for group, owners, gradients in work:
                if owners:
                    self._update(group, owners, gradients, step)
        return loss

    def _rounding_of(self, group: dict[str, Any]) -> Rounding | None:
        """Return the rounding of a group's low parameters in this step and count it; None: to nearest."""
        if not self.stochastic_rounding:
            return None
        group[COUNT] += 1
        return Rounding(group[SEED], self._places(), group[COUNT])

    def _places(self) -> dict[int, int]:
        """Return the number of each parameter in the optimizer, by its id."""
        return {id(parameter): i for i, parameter in enumerate(parameters_of(self))}

    def _keep_rounding(self) -> None:
        """Store seed and count of the rounding in the groups; remove them where nothing is rounded.

        Every kind of checkpoint carries groups (``torch.distributed.checkpoint`` drops other keys).
        """
        kept: dict[str, Any] = {SEED: self._seed} if self._low_states or self.stochastic_rounding else {}
        kept |= {COUNT: 0} if self.stochastic_rounding else {}
        self.defaults |= kept  # for groups added later
        for group in self.param_groups:
            for key in (SEED, COUNT):
                if key in kept:
                    group.setdefault(key, kept[key])
                else:
                    group.pop(key, None)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state of this optimizer or of torch's, of any of its implementations and dtypes."""
        super().load_state_dict(dict(state_dict))
        self._keep_rounding()
        for group in self.param_groups:
            group["fused"], group["foreach"] = True, None
            for owner in group["params"]:
                state = self.state.get(owner) or {}
                if "step" in state:
                    # A copy: if the state was not saved in between, both optimizers would count in one tensor.
                    step = torch.zeros_like(state["step"], dtype=torch.float32, device=owner.device)
                    state["step"] = step.copy_(state["step"]).view(())  # old checkpoints have one dimension
                for name in self._state_names:
                    if state.get(name) is not None:
                        # In the parameter's memory order, which the kernels rely on.
                        state[name] = torch.zeros_like(owner, dtype=self._state_dtype(owner, group)).copy_(state[name])

    def _update_by(self, lists: dict[str, list[Tensor]], formula: Formula, step: StepInputs) -> None:
        """Update the parameters of ``lists`` by a formula, each by the backend that serves it."""
        for part in parts_of(lists, self.compiled, self.stochastic_rounding):
            self._backends[part.kernel].update(part, formula, step.on(part.device))

    def _state_dtype(self, owner: Tensor, group: Mapping[str, Any]) -> torch.dtype | None:
        """Return the dtype of a parameter's states beside "step"; None if it has none."""
        raise NotImplementedError

    def _update(self, group: dict[str, Any], owners: list[Tensor], gradients: list[Tensor], step: StepInputs) -> None:
        """Update the parameters of one group that have gradients."""
        raise NotImplementedError


def _with_gradients(parameters: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the parameters with a gradient, and their gradients; partial ones (of DTensors) are summed before."""
    gradients = [parameter.grad for parameter in parameters]
    # The usual case, every gradient there and plain, without a loop in Python.
    if {*map(type, gradients)} == {Tensor}:
        return [*parameters], cast(list[Tensor], gradients)
    for owner, gradient in zip(parameters, gradients, strict=True):
        if type(gradient) is not Tensor and gradient is not None:
            summed(owner, gradient)
    owners = [parameter for parameter in parameters if parameter.grad is not None]
    return owners, [cast(Tensor, owner.grad) for owner in owners]
