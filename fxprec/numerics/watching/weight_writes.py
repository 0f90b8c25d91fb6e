"""Find who made a weight inf or nan while a model is watched: an optimizer's step, or other code.

Steps are judged by their outputs and gradients, as to read all weights takes longer. So a weight that is not finite
shows in the step that reads it, and it was the last finite step's optimizer that wrote it: unless version counters tell
of another write between the steps. (Of writes through ``.data`` they do not.)
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterable, Iterator
from typing import Final

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from fxprec.numerics.births import is_finite
from fxprec.numerics.finding import Finding
from fxprec.numerics.watching.optimizer_fault import fault_of_optimizer
from fxprec.scaling.gradients import few, parameters_of

_CURE: Final = "load a checkpoint from before; "
_version: Final = operator.attrgetter("_version")


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
        if more := [other for other, each in self._newly_bad() if each is not parameter]:
            remarks.append(f"not finite now are {few(more)} as well")
        return fault_of_optimizer(name, parameter, optimizer, step, reached, tuple(remarks))

    def bad_at_the_end(self) -> str | None:
        """Return the first parameter that became inf or nan since this began."""
        return next((name for name, _ in self._newly_bad()), None)

    def _newly_bad(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._parameters.items():
            if parameter not in self._bad_before and _is_bad(parameter):
                yield name, parameter


def _is_bad(parameter: Tensor) -> bool:
    return not (is_lazy(parameter) or is_finite(parameter.detach()))
