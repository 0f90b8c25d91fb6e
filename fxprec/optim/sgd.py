"""Defines the optimizer SGD in one pass over gradients, parameters, momentum and shadows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from torch.optim.sgd import sgd

from fxprec.kernels.optim import sgd as multi_tensor_sgd
from fxprec.kernels.optim.sgd import SgdSettings
from fxprec.kernels.optim.tables import Gradients
from fxprec.optim.one_pass import OnePass
from fxprec.optim.parts import Formula, StepInputs, scalar
from fxprec.optim.rounding import checked_seed, is_low
from fxprec.torch_internals import fused_sgd_


class SgdFormula(Formula):
    """Formula of SGD. ``first``: the momentum buffers have no value yet."""

    kind = "sgd"
    low_in_fp32 = True

    def by_torch(self, lists: Mapping[str, list[Any]], **inputs: Any) -> None:
        settings = {name: self.group[name] for name in ("momentum", "dampening", "nesterov", "maximize")}
        settings |= {"weight_decay": scalar(self.group["weight_decay"]), "is_first_step": self.first}
        fused_sgd_(lists["params"], lists["grads"], lists.get("momentum_buffer", []), **settings, **inputs)

    def by_triton(self, gradients: Gradients, **inputs: Any) -> None:
        names = ("momentum", "dampening", "nesterov", "weight_decay", "maximize")
        settings = SgdSettings(**{name: scalar(self.group[name]) for name in names})
        multi_tensor_sgd.launch(gradients, settings, first=self.first, **inputs)

    @property
    def flags(self) -> Mapping[str, bool]:
        names = {"L2": "weight_decay", "MOMENTUM": "momentum", "NESTEROV": "nesterov"}
        return {flag: bool(scalar(self.group[name])) for flag, name in names.items()}

    def scalars(self, scale: float, count: float) -> Tensor:
        group = self.group
        # The first step's buffer is the gradient itself, without dampening.
        share = 1.0 if self.first else 1 - group["dampening"]
        numbers = scale, group["weight_decay"], group["momentum"], share, group["lr"]
        return torch.tensor([*map(float, numbers)], dtype=torch.float32, device="cpu")


class SGD(OnePass, torch.optim.SGD):
    """SGD with the hyper-parameters, groups, state names and checkpoints of ``torch.optim.SGD``, and less traffic.

    A step reads the gradients once to check them, and updates in one pass; see ``docs/training.md``.

    Args:
        params, lr, momentum, dampening, weight_decay, nesterov, maximize: as torch's.
        foreach, fused, differentiable: None or what torch's fused implementation takes; others are refused.
        max_norm, low_gradients, compiled, stochastic_rounding: as for ``fxprec.optim.Adam``.
        seed: of the stochastic rounding; None: drawn from torch's generator.

    Sparse gradients are taken, as by torch's, by its implementation for one tensor.

    Raises:
        ValueError: a hyper-parameter out of range, ``foreach=True``, ``fused=False``, ``stochastic_rounding`` where no
            parameter is low. RuntimeError: in ``step``, sparse gradients of parameters that are rounded so.

    Source: torch.optim.SGD.
    """

    _takes_sparse = True
    _state_names = ("momentum_buffer",)

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | Tensor = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        max_norm: float | None = None,
        low_gradients: bool | str = False,
        compiled: bool = False,
        stochastic_rounding: bool = False,
        seed: int | None = None,
    ) -> None:
        self._seed = checked_seed(seed, stochastic_rounding, "low parameters: give stochastic_rounding=True")
        torch.optim.SGD.__init__(
            self, params, lr, momentum, dampening, weight_decay, nesterov, maximize=maximize, fused=True
        )
        self._become_one_pass(max_norm, foreach, fused, differentiable, low_gradients, compiled, stochastic_rounding)

    def _state_dtype(self, owner: Tensor, group: Mapping[str, Any]) -> torch.dtype | None:
        return owner.dtype if group["momentum"] else None

    def _update(self, group: dict[str, Any], owners: list[Tensor], gradients: list[Tensor], step: StepInputs) -> None:
        pairs = [*zip(owners, gradients, strict=True)]
        sparse = [(owner, gradient) for owner, gradient in pairs if gradient.is_sparse]
        if self.stochastic_rounding and any(is_low(owner) for owner, _ in sparse):
            raise RuntimeError(
                "stochastic_rounding=True does not round updates by sparse gradients: give these parameters to an "
                "optimizer of their own, or make the embedding with sparse=False"
            )
        # One count of the rounding for the whole step, however many launches it takes.
        formula = SgdFormula(group, self._rounding_of(group))
        if sparse:
            self._update_sparse(group, sparse, step)
            pairs = [(owner, gradient) for owner, gradient in pairs if not gradient.is_sparse]
        # First steps go apart: their buffers hold no value, which one flag of a launch tells for all its tensors.
        momentum = bool(group["momentum"])
        fresh: list[tuple[Tensor, Tensor]] = []
        begun: list[tuple[Tensor, Tensor]] = []
        buffers: list[Tensor] = []
        for pair in pairs:
            buffer = self.state[pair[0]].get("momentum_buffer") if momentum else None
            if buffer is not None:
                buffers.append(buffer)
            (fresh if momentum and buffer is None else begun).append(pair)
        # Zeros are never read in a first step; they give the buffers their memory order.
        if fresh:
            made = [torch.zeros_like(owner, memory_format=torch.preserve_format) for owner, _ in fresh]
            for (owner, _), buffer in zip(fresh, made, strict=True):
                self.state[owner]["momentum_buffer"] = buffer
            self._update_by(_lists(fresh, made), replace(formula, first=True), step)
        if begun:
            self._update_by(_lists(begun, buffers), formula, step)

    def _update_sparse(self, group: dict[str, Any], pairs: list[tuple[Tensor, Tensor]], step: StepInputs) -> None:
        # torch's implementation for single tensors knows no flag.
        if step.found_inf is not None and step.found_inf.item():
            return
        # It sets the buffers of a first step in the list, from where they go back into the state.
        owners = [owner for owner, _ in pairs]
        buffers = [self.state[owner].get("momentum_buffer") for owner in owners]
        grads = [gradient if step.divisor is None else gradient / step.divisor for _, gradient in pairs]
        names = ("weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize")
        sgd(owners, grads, buffers, True, foreach=False, fused=False, **{name: group[name] for name in names})
        for owner, buffer in zip(owners, buffers, strict=True):
            if group["momentum"]:
                self.state[owner]["momentum_buffer"] = buffer


def _lists(pairs: list[tuple[Tensor, Tensor]], buffers: list[Tensor]) -> dict[str, list[Tensor]]:
    lists = {"params": [owner for owner, _ in pairs], "grads": [gradient for _, gradient in pairs]}
    return {**lists, "momentum_buffer": buffers} if buffers else lists
