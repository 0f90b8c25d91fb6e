"""Find who made a weight inf or nan while a model is watched, an optimizer's step or other code, and what cures it.

Steps are judged by their outputs and gradients, as to read all weights takes longer. So a weight that is not finite
shows in the step that reads it, and it was the last finite step's optimizer that wrote it: unless version counters tell
of another write between the steps. (Of writes through ``.data`` they do not.) The state that the optimizer divided by
tells the cure.
"""

from __future__ import annotations

import math
import operator
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from fxprec.errors import few
from fxprec.numerics.births import dense, first_of, is_finite
from fxprec.numerics.locate import Finding
from fxprec.passes.graph.text import dtype_name
from fxprec.scaling.gradients import parameters_of

_CURE: Final = "load a checkpoint from before; "
_version: Final = operator.attrgetter("_version")

#: State of which optimizers divide by the root, or by itself, and add ``eps``.
_DIVISORS: Final = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "exp_inf")
#: torch's own.
_EPS: Final = 1e-8


class WeightWrites:
    """Writes to the weights of a model, which are read once when this is made.

    Args:
        model: its parameters may be shared.
        first: number of the step that comes next.
    """

    def __init__(self, model: nn.Module, first: int) -> None:
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        self._first = first
        self._bad_before = {parameter for parameter in self._parameters.values() if _is_bad(parameter)}
        self._all = [*self._parameters.values()]
        self._versions = [*map(_version, self._all)]
        self._others: dict[Tensor, int] = {}
        self._ran: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()

    def before(self, step: int) -> None:
        """Note before a step's optimizers write: what was written since the last step, other code wrote."""
        now = [*map(_version, self._all)]
        if now != self._versions:
            # A version that moved between two steps is a write of other code: a reset, a copy, an average.
            written = zip(self._all, now, self._versions, strict=True)
            self._others |= {parameter: step for parameter, version, known in written if version != known}
            self._versions = now

    def after(self) -> None:
        """Note that an optimizer has written, or was kept from it; or that all has the values of before again."""
        self._versions = [*map(_version, self._all)]

    def ran(self, optimizers: Iterable[weakref.ref[Optimizer]], step: int) -> None:
        """Note optimizers that have stepped in a step that was finite."""
        for each in optimizers:
            if (optimizer := each()) is not None:
                self._ran[optimizer] = step

    def explained(self, name: str, reached: str) -> Finding | str:
        """Return the finding about a bad weight, if an optimizer wrote it; else what cures it.

        Args:
            name: its path.
            reached: what it spoiled.
        """
        parameter = self._parameters[name]
        if parameter in self._bad_before:
            return f"{_CURE}it was so when watch began"
        # Of several optimizers that hold the weight, the one that stepped last has written it last.
        own = [each for each in self._ran if any(parameter is own for own in parameters_of(each))]
        optimizer = max(own, key=self._ran.__getitem__, default=None)
        step = -1 if optimizer is None else self._ran[optimizer]
        other = self._others.get(parameter)
        if optimizer is None or (other is not None and other >= step):
            when = "through .data, which nothing shows" if other is None else f"before the optimizer's step {other}"
            return f"{_CURE}other code than an optimizer wrote it, {when}"
        remarks = []
        if step > self._first or other is not None:
            remarks.append(f"if no call of step {step} read it, this was earlier: watch began with step {self._first}")
        if more := [other for other, each in self.newly_bad() if each is not parameter]:
            remarks.append(f"not finite now are {few(more)} as well")
        return fault_of_optimizer(name, parameter, optimizer, step, reached, tuple(remarks))

    def newly_bad(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters that became inf or nan since this began, with their names."""
        for name, parameter in self._parameters.items():
            if parameter not in self._bad_before and _is_bad(parameter):
                yield name, parameter


def _is_bad(parameter: Tensor) -> bool:
    return not (is_lazy(parameter) or is_finite(parameter.detach()))


def fault_of_optimizer(
    name: str, parameter: Tensor, optimizer: Optimizer, step: int, reached: str, remarks: tuple[str, ...]
) -> Finding:
    """Return a finding about a weight that an optimizer's step made inf or nan.

    Args:
        name: path of the parameter, which is not finite and was.
        optimizer: that wrote it.
        step: in which.
        reached: what the parameter spoiled; "": nothing yet.
        remarks: of the finding.
    """
    bad = ~dense(parameter.detach()).isfinite()
    index = first_of(bad)
    state = _state(optimizer, parameter, index)
    overflows = bool(parameter.detach()[index].isinf()) or not all(map(math.isfinite, state.values()))
    group = next(each for each in optimizer.param_groups if any(own is parameter for own in each["params"]))
    return Finding(
        phase="optimizer",
        kind="overflow" if overflows else "invalid",
        node=name,
        module=name.rpartition(".")[0],
        op=type(optimizer).__name__,
        dtype=dtype_name(parameter.dtype),
        source="",
        magnitude=math.nan,
        limit=torch.finfo(parameter.dtype).max,
        share=float(bad.sum()) / bad.numel(),
        example=", ".join(f"{key} = {value:.4g}" for key, value in state.items()),
        reached=reached,
        fails_in_fp32=False,
        scale=1.0,
        cure=_cure_of(group, state, parameter.dtype, type(optimizer).__name__, step),
        remarks=remarks,
        index=index,
        step=step,
    )


def _state(optimizer: Optimizer, parameter: Tensor, index: tuple[int, ...]) -> dict[str, float]:
    """Return what the optimizer keeps of the element."""
    state = optimizer.state.get(parameter, {})
    return {
        key: float(abs(value[index]) if value.is_complex() else value[index])
        for key, value in state.items()
        if isinstance(value, Tensor) and value.shape == parameter.shape
    }


def _cure_of(group: Mapping[str, Any], state: Mapping[str, float], dtype: torch.dtype, name: str, step: int) -> str:
    back = f"load weights and optimizer of before step {step}"
    eps = group.get("eps")
    divisor = next((key for key in _DIVISORS if state.get(key) == 0), None)
    if divisor is not None and isinstance(eps, int | float) and not torch.tensor(float(eps), dtype=dtype):
        # An eps below the smallest normal number would be flushed to 0 on some devices.
        enough = max(_EPS, torch.finfo(dtype).smallest_normal)
        zero = f"eps={eps:g}" + (f" is 0 in {dtype_name(dtype)}" if eps else "")
        return f"{name}(..., eps={enough:.2g}): where {divisor} is 0 it divides by 0, as {zero}; {back}"
    spoiled = [key for key, value in state.items() if not math.isfinite(value)]
    clips = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) before the step"
    if spoiled:
        return f"{clips}, as {' and '.join(spoiled)} overflowed; {back}"
    return f"a smaller lr, which is {float(group.get('lr', math.nan)):g}, or {clips}; {back}"
