"""Defines the optimizers Adam and AdamW in one pass over gradients, parameters, moments and shadows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from fxprec.kernels.optim import adam as multi_tensor_adam
from fxprec.kernels.optim.adam import AdamSettings
from fxprec.kernels.optim.tables import Gradients
from fxprec.optim.one_pass import OnePass
from fxprec.optim.parts import Formula, StepInputs, scalar
from fxprec.optim.rounding import SEED, Rounding, checked_seed
from fxprec.torch_internals import fused_adam_, fused_adamw_


class AdamFormula(Formula):
    """Formula of Adam and AdamW."""

    kind = "adam"

    def by_torch(self, lists: Mapping[str, list[Any]], **inputs: Any) -> None:
        moments = lists["exp_avg"], lists["exp_avg_sq"], lists.get("max_exp_avg_sq", [])
        beta1, beta2 = map(scalar, self.group["betas"])
        settings = {name: self.group[name] for name in ("amsgrad", "weight_decay", "eps", "maximize")}
        update = fused_adamw_ if self.group["decoupled_weight_decay"] else fused_adam_
        update(lists["params"], lists["grads"], *moments, lists["step"], beta1=beta1, beta2=beta2, **settings, **inputs)

    def by_triton(self, gradients: Gradients, **inputs: Any) -> None:
        beta1, beta2 = map(scalar, self.group["betas"])
        settings = AdamSettings(
            betas=(beta1, beta2),
            decoupled=self.group["decoupled_weight_decay"],
            rounding_seed=None if self.of_states is None else self.of_states.seed,
            **{name: self.group[name] for name in ("eps", "weight_decay", "amsgrad", "maximize")},
        )
        multi_tensor_adam.launch(gradients, settings, **inputs)

    @property
    def flags(self) -> Mapping[str, bool]:
        # Without decay the loop's other form multiplies parameters by 1, which changes nothing.
        l2 = bool(scalar(self.group["weight_decay"])) and not self.group["decoupled_weight_decay"]
        return {"ADAM": True, "L2": l2, "AMSGRAD": self.group["amsgrad"]}

    def scalars(self, scale: float, count: float) -> Tensor:
        group = self.group
        lr, decay, (beta1, beta2) = float(group["lr"]), float(group["weight_decay"]), map(scalar, group["betas"])
        # In the order of the source's struct; corrections of the moments are computed here, in double precision.
        left = 1 - lr * decay if group["decoupled_weight_decay"] else decay
        corrections = 1 / math.sqrt(1 - beta2**count), group["eps"], lr / (1 - beta1**count)
        numbers = [scale, left, 1 - beta1, beta2, 1 - beta2, *corrections]
        return torch.tensor(numbers, dtype=torch.float32, device="cpu")


class Adam(OnePass, torch.optim.Adam):
    """Adam with the hyper-parameters, groups, state names and checkpoints of ``torch.optim.Adam``, and less traffic.

    A step reads the gradients once to check them, and updates in one pass; see ``docs/training.md``.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, maximize, capturable, decoupled_weight_decay: as torch's.
        foreach, fused, differentiable: None or what torch's fused implementation takes; others are refused.
        max_norm: clip the global norm of all gradients, after unscaling, to this; in the same pass.
        state_dtype: ``torch.bfloat16`` keeps the moments in bfloat16, rounded stochastically: 4 bytes a parameter less
            to hold, 8 less to move. None: the parameters' dtype.
        seed: of the rounding; None: drawn from torch's generator. Saved with the state. Ranks that hold the same
            parameters (DDP) want the same one.
        low_gradients: let gradients of lowered weights stay in the low dtype: no cast, half the bytes. Only this
            optimizer can read them. Not under DDP, nor with ``fxprec.accumulate`` unless "accumulate" is given.
        compiled: on CPUs update FP32 parameters by one loop in C++, which is compiled when a step first needs it, in
            a third of a second; wants Linux and a C++ compiler. No other device is concerned.
        stochastic_rounding: round bfloat16 and float16 parameters (level O3) stochastically, and their states of that
            dtype: an update below half a unit in the last place counts on average, where rounding to nearest drops it.
            Torch's kernels update these parameters then, in FP32 temporaries, whatever the device and ``compiled``.

    Arithmetic: without ``max_norm`` in FP32 what ``torch.optim.Adam(fused=True)`` computes, on a CPU bit for bit;
    ``compiled`` differs in the last places.

    Raises:
        ValueError: a hyper-parameter out of range, ``foreach=True``, ``fused=False``, ``compiled`` with a
            ``state_dtype``, ``stochastic_rounding`` where no parameter is low. RuntimeError: low gradients and a torch
            without ``Tensor.grad_dtype``; ``compiled``, and no compiler.

    Sources: torch.optim.Adam; Kingma and Ba, "Adam", ICLR 2015; stochastic rounding: Gupta et al., "Deep Learning with
    Limited Numerical Precision", ICML 2015.
    """

    _state_names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        max_norm: float | None = None,
        state_dtype: torch.dtype | None = None,
        seed: int | None = None,
        low_gradients: bool | str = False,
        compiled: bool = False,
        stochastic_rounding: bool = False,
    ) -> None:
        wanted = state_dtype is not None or stochastic_rounding
        # What is refused is refused before torch's constructor makes groups.
        self._seed = checked_seed(seed, wanted, "state_dtype=torch.bfloat16 or stochastic_rounding=True: give one")
        if state_dtype not in (None, torch.bfloat16):
            raise ValueError(f"state_dtype must be torch.bfloat16, not {state_dtype!r}")
        self._low_states = state_dtype
        if compiled and state_dtype is not None:
            raise ValueError("compiled=True has no loop for a state_dtype: leave one of them out")
        # By name: next in line after AdamW is torch.optim.AdamW, whose constructor takes no decoupled_weight_decay.
        torch.optim.Adam.__init__(
            self, params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, capturable=capturable, fused=True,
            decoupled_weight_decay=decoupled_weight_decay,
        )  # fmt: skip
        self._become_one_pass(max_norm, foreach, fused, differentiable, low_gradients, compiled, stochastic_rounding)

    def _update(self, group: dict[str, Any], owners: list[Tensor], gradients: list[Tensor], step: StepInputs) -> None:
        # max_exp_avg_sq, the last of the names, is there with amsgrad alone.
        names = self._state_names[: 3 if group["amsgrad"] else 2]
        # States begin with the first update of a parameter, as torch's do: a skipped step makes none.
        states = [self.state[owner] for owner in owners]
        for owner, state in zip(owners, states, strict=True):
            if not state:
                # On the parameter's device: the kernel counts steps itself, so that a skipped one needs no sync.
                state["step"] = torch.zeros((), dtype=torch.float32, device=owner.device)
                like = {"dtype": self._state_dtype(owner, group), "memory_format": torch.preserve_format}
                state |= {name: torch.zeros_like(owner, **like) for name in names}
        lists = {name: [state[name] for state in states] for name in ("step", *names)}
        # A loaded checkpoint brings its own seed, and groups may have been added.
        of_states = None if self._low_states is None else Rounding(group[SEED], self._places())
        formula = AdamFormula(group, self._rounding_of(group), of_states)
        self._update_by({**lists, "params": owners, "grads": gradients}, formula, step)

    def _state_dtype(self, owner: Tensor, group: Mapping[str, Any]) -> torch.dtype:
        return self._low_states or owner.dtype


class AdamW(Adam, torch.optim.AdamW):
    """AdamW of torch in one pass; see ``fxprec.optim.Adam`` for the arguments that it adds.

    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", ICLR 2019.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        max_norm: float | None = None,
        state_dtype: torch.dtype | None = None,
        seed: int | None = None,
        low_gradients: bool | str = False,
        compiled: bool = False,
        stochastic_rounding: bool = False,
    ) -> None:
        Adam.__init__(
            self, params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, foreach=foreach,
            capturable=capturable, differentiable=differentiable, fused=fused, decoupled_weight_decay=True,
            max_norm=max_norm, state_dtype=state_dtype, seed=seed, low_gradients=low_gradients, compiled=compiled,
            stochastic_rounding=stochastic_rounding,
        )  # fmt: skip
