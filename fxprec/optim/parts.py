"""Splits the tensors of a parameter group into parts of one device and dtypes, each for the backend that updates it.

An optimizer gives a ``Formula``, what each kernel has to be told. A backend (``torch_update``, and ``Plans`` and
``CompiledUpdates`` of ``kernel_updates``) lays out tensors, counts steps and writes shadows, for any formula.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from fxprec.kernels.launch.operands import FLOATS, is_dense_tensor
from fxprec.kernels.launch.triton_support import HAS_TRITON, can_launch
from fxprec.kernels.optim.tables import Gradients
from fxprec.kernels.torch_internals import FakeTensor, is_traceable_wrapper_subclass
from fxprec.optim.rounding import Rounding, is_low
from fxprec.optim.shadow_copies import ShadowCopies
from fxprec.scaling.gradients import local

Kernel = Literal["triton", "compiled", "torch"]


_PLAIN = {Tensor, torch.nn.Parameter}
_dtype = operator.attrgetter("dtype")
_place = operator.attrgetter("device", "dtype")


@dataclass(frozen=True, slots=True)
class UpdatePart:
    """Part of a parameter group that one kernel updates: lists of local tensors in one order.

    Attributes:
        lists: "params", "grads", and the states by their names.
        owners: the parameters themselves (DTensors where they are).
        kernel: that updates it: our Triton kernels, a compiled loop, or torch's fused kernels.
    """

    lists: dict[str, list[Tensor]]
    owners: list[Tensor]
    kernel: Kernel

    @property
    def states(self) -> dict[str, list[Tensor]]:
        """States by their names, without the step counts."""
        return {name: tensors for name, tensors in self.lists.items() if name not in ("params", "grads", "step")}

    @property
    def device(self) -> torch.device:
        """Device of all tensors but, maybe, the step counts."""
        return self.lists["params"][0].device

    @property
    def key(self) -> tuple[torch.device, torch.dtype, torch.dtype]:
        """Device and dtypes of parameters and gradients, by which launches are cached."""
        return self.device, self.lists["params"][0].dtype, self.lists["grads"][0].dtype


class StepInputs(NamedTuple):
    """Inputs of one optimizer step that all of its updates share.

    Attributes:
        divisor: gradients are divided by it; 0-dim FP32, or None.
        found_inf: if above 0 nothing is updated; 0-dim FP32, or None.
        copies: the shadows to write.
    """

    divisor: Tensor | None
    found_inf: Tensor | None
    copies: ShadowCopies

    def on(self, device: torch.device) -> StepInputs:
        """Return these inputs with their tensors on a device.

        The copies do not block, except to the CPU, which would read them too early.
        """
        # A copy to the CPU must have ended before a kernel reads it; a device's stream keeps the order by itself.
        waits = device.type == "cpu"
        there = [None if each is None else each.to(device, non_blocking=not waits) for each in self[:2]]
        return self._replace(divisor=there[0], found_inf=there[1])


@dataclass(frozen=True)
class Formula:
    """Update formula of one parameter group in one step: its kernels, and for the compiled loop flags and numbers.

    Kernels of torch and Triton take ``lr``, ``grad_scale`` and ``found_inf`` by name.

    Attributes:
        group: hyper-parameters.
        of_parameters: rounding of low parameters; None: to nearest.
        of_states: rounding of states in a lower dtype.
        first: the states hold no value yet (SGD's momentum).
        kind: name of the formula.
        low_in_fp32: torch's kernel on CPUs loses low parameters' updates, which are computed in FP32 then.
    """

    group: Mapping[str, Any]
    of_parameters: Rounding | None
    of_states: Rounding | None = None
    first: bool = False
    kind: ClassVar[Literal["adam", "sgd"]]
    low_in_fp32: ClassVar[bool] = False

    def by_torch(self, lists: Mapping[str, list[Any]], **inputs: Any) -> None:
        """Update ``lists`` in place by torch's fused kernel."""
        raise NotImplementedError

    def by_triton(self, gradients: Gradients, **inputs: Any) -> None:
        """Update the tensors of a plan, bound to its gradients, by our Triton kernel."""
        raise NotImplementedError

    @property
    def flags(self) -> Mapping[str, bool]:
        """Macros of ``kernels/cpu/update.cpp`` that name this kind of update; those left out are 0."""
        raise NotImplementedError

    def scalars(self, scale: float, count: float) -> Tensor:
        """Return the numbers that the compiled loop reads; ``count``: steps of the parameter, this one included."""
        raise NotImplementedError


class Backend(Protocol):
    """Protocol of what updates parameters: torch's kernels, compiled loops on CPUs, our Triton kernels."""

    def update(self, part: UpdatePart, formula: Formula, step: StepInputs) -> None:
        """Update a part in place; ``step``: its inputs, on the part's device."""


def kernel_for(
    param: Tensor, gradient: Tensor, state: torch.dtype | None, compiled: bool, stochastic: bool
) -> tuple[Kernel, str]:
    """Return the kernel that updates a local parameter; where it is torch's also why, else "".

    Args:
        state: dtype of its states, or None.
        compiled: compiled loops are asked for.
        stochastic: low parameters are rounded stochastically.
    """
    reason = why_not(param, gradient, state, stochastic)
    if reason is None:
        return "triton", ""
    if compiled and param.device.type == "cpu":
        reason = why_no_loop(param, gradient)
        if reason is None:
            return "compiled", ""
    return "torch", reason


def why_not(param: Tensor, gradient: Tensor, state: torch.dtype | None = None, stochastic: bool = False) -> str | None:
    """Return why torch's kernels update a parameter, or None: ours do. ``stochastic``: low ones are rounded so."""
    if not can_launch(param.device):
        return f"on {param.device.type}" if HAS_TRITON else "Triton is not installed"
    if param.dtype not in FLOATS or gradient.dtype not in FLOATS:
        return f"{param.dtype} with a gradient of {gradient.dtype}"
    if stochastic and is_low(param):
        return "parameters are rounded stochastically"
    if state is torch.float16:
        return "state in torch.float16"
    if gradient.layout is not torch.strided:
        return "sparse gradient"
    return None if is_dense_tensor(param) else "not dense in memory"


def why_no_loop(param: Tensor, gradient: Tensor) -> str | None:
    """Return why no compiled loop can update a local parameter with this gradient, or None."""
    if param.device.type != "cpu":
        return f"on {param.device.type}"
    if param.dtype is not torch.float32 or gradient.dtype not in FLOATS:
        return f"{param.dtype} with a gradient of {gradient.dtype}"
    if gradient.layout is not torch.strided:
        return "sparse gradient"
    if isinstance(param, FakeTensor) or is_traceable_wrapper_subclass(param):
        return f"a {type(param).__name__}, which has no memory of its own"
    return None if is_dense_tensor(param) else "not dense in memory"


def scalar(value: Any) -> Any:
    """Return the number of a hyper-parameter that may be a tensor of one element."""
    return value.item() if isinstance(value, Tensor) else value


def parts_of(lists: dict[str, list[Tensor]], compiled: bool = False, stochastic: bool = False) -> Iterator[UpdatePart]:
    """Split ``lists``, which hold "params" and "grads", by device, dtypes and kernel.

    Args:
        lists: in one order.
        compiled: compiled loops are asked for.
        stochastic: low parameters are to be rounded stochastically.
    """
    # DTensors are updated through their local tensors, which the kernels can address.
    owners = lists["params"]
    plain = _PLAIN.issuperset(map(type, owners))  # then gradients and states are plain, too; others are DTensors
    held = lists if plain else {name: [*map(local, tensors)] for name, tensors in lists.items()}
    split = _split(held, compiled and not torch.compiler.is_compiling(), stochastic)
    for (*_, kernel), chosen in split.items():
        whole = len(split) == 1
        # One part holds the lists themselves: copies of hundreds of entries take time at every step.
        part = held if whole else {name: [tensors[i] for i in chosen] for name, tensors in held.items()}
        part_owners = owners if whole else [owners[i] for i in chosen]
        yield UpdatePart(part, part_owners, kernel)


def _split(
    lists: dict[str, list[Tensor]], compiled: bool, stochastic: bool
) -> Mapping[tuple[torch.device, torch.dtype, torch.dtype | None, Kernel], Sequence[int]]:
    """Group positions by (device, parameters' dtype, gradients' dtype for our kernels, kernel)."""
    params, grads = lists["params"], lists["grads"]
    places = [*map(_place, params)]
    # Few devices and dtypes, hundreds of tensors: what depends on the former alone is asked once.
    distinct = {*places}
    served = any(can_launch(device) for device, _ in distinct)
    if not served and not compiled and len(distinct) == 1:  # the usual case on a CPU, without a check of each tensor
        return {(*places[0], None, "torch"): range(len(params))}
    # All states of a parameter but its step have one dtype: one of them tells it.
    states = next((tensors for name, tensors in lists.items() if name not in ("params", "grads", "step")), None)
    state_dtypes = [None] * len(params) if states is None else [*map(_dtype, states)]
    # Gradients' dtypes matter to our kernels, which are compiled for one; torch's get gradients that were cast.
    split: dict[tuple[torch.device, torch.dtype, torch.dtype | None, Kernel], list[int]] = {}
    for i, (device, dtype) in enumerate(places):
        kernel, _ = kernel_for(params[i], grads[i], state_dtypes[i], compiled, stochastic)
        split.setdefault((device, dtype, grads[i].dtype if kernel == "triton" else None, kernel), []).append(i)
    return split
