"""Check before a replay what a captured graph takes as given: after a change another graph is captured.

A graph holds addresses and numbers as they were. It has no eyes for a parameter that was replaced, a hook that was
added, or a weight decay that was set.
"""

from __future__ import annotations

import operator
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable
from itertools import chain
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fxprec.torch_internals import backward_hooks_of, late_hooks_of, step_hooks
from fxprec.whole_step.iteration import Iteration
from fxprec.whole_step.rates import Rates
from fxprec.whole_step.scales import scale_rule, scale_tensors
from fxprec.whole_step.shadow_links import ShadowLinks

_DICTS: Final = (dict, OrderedDict, defaultdict)
_SEQUENCES: Final = (list, set, deque)
_wants_gradient = operator.attrgetter("requires_grad")


class Fixed:
    """State that a captured graph takes as given. Keeps alive every tensor that the graph reads by its address.

    Args:
        iteration, rates, shadows: what was captured.
        held: more to keep alive.
    """

    def __init__(self, iteration: Iteration, rates: Rates, shadows: ShadowLinks, held: object) -> None:
        self._optimizer, self._scaler = iteration.optimizer, iteration.scaler
        self._rates, self._shadows = rates, shadows
        self._attributes = _Attributes(iteration.roots())
        self._parameters = [*iteration.parameters]
        self._requires_grad = [*map(_wants_gradient, self._parameters)]
        self._device = self._parameters[0].device.type
        self._hooks = self._hooks_now()
        self._conversions = [*iteration.conversions]
        buffers = [b for root in iteration.roots() for b in root.buffers()]
        self._state = _state_of(self._optimizer)
        self._scales = scale_tensors(self._scaler)
        tensors = [v for v in self._state if isinstance(v, Tensor)]
        self._tensors = [*self._parameters, *buffers, *tensors, *self._scales]
        self._addresses = [*map(Tensor.data_ptr, self._tensors)]
        self._owned = _owned_by(self._optimizer)
        self._numbers = self._numbers_now()
        # Tables of multi-tensor launches, which the optimizer may replace; graphs of the model, which it may drop.
        plans = getattr(self._optimizer, "_plans", None)
        graphs = [each.captured.copy() for each in self._conversions]
        self._kept = held, None if plans is None else plans.kept(), graphs

    def changed(self) -> str | None:
        """Return what is no longer so, in a few words; None where the graph can be replayed."""
        optimizer = self._optimizer
        # Cheap checks of many objects come first, identities in C loops: this runs before every replay.
        if not self._attributes.same():
            return "an attribute, a parameter, a submodule or a hook of the model"
        if not _identical(_owned_by(optimizer), self._owned):
            return "the parameters of the optimizer"
        if [*map(_wants_gradient, self._parameters)] != self._requires_grad:
            return "requires_grad of a parameter"
        if not _identical(self._hooks_now(), self._hooks):
            return "a hook of a parameter or of the optimizer"
        if not _identical(_state_of(optimizer), self._state):
            return "the optimizer's state (was a checkpoint loaded?)"
        if not _identical(scale_tensors(self._scaler), self._scales):
            return "the tensors of the scaler"
        if [*map(Tensor.data_ptr, self._tensors)] != self._addresses:
            return "the memory of a parameter, a buffer or a state"
        numbers = self._numbers_now()
        if numbers != self._numbers:
            places = [place for place, now in numbers.items() if now != self._numbers.get(place)]
            return ", ".join(places) or "the number of parameter groups"
        return self._rates.changed() or (None if self._shadows.same() else "the low copies of the weights")

    def _hooks_now(self) -> list[Any]:
        """Return the hooks of the parameters' gradients, and of the optimizer's step."""
        found = (
            *map(backward_hooks_of, self._parameters),
            *map(late_hooks_of, self._parameters),
            *step_hooks(self._optimizer),
        )
        return [*chain.from_iterable(map(dict.values, filter(None, found)))]

    def _numbers_now(self) -> dict[str, Any]:
        """Return place -> value of hyper-parameters but ``lr``, how the scale moves, and the context of the call."""
        optimizer = self._optimizer
        numbers: dict[str, Any] = {
            f"param_groups[{place}]['{name}']": _comparable(group[name])
            for place, group in enumerate(optimizer.param_groups)
            for name in optimizer.defaults
            if name != "lr" and name in group
        }
        numbers["max_norm of the optimizer"] = getattr(optimizer, "max_norm", None)
        numbers["growth or backoff of the scaler"] = scale_rule(self._scaler)
        autocast = torch.is_autocast_enabled(self._device)
        numbers["torch.autocast around the step"] = autocast and torch.get_autocast_dtype(self._device)
        # A graph holds a watcher's reductions, or none: entering or leaving watch needs another graph.
        watchers = (each.watcher for each in self._conversions)
        numbers["fxprec.numerics.watch around the step"] = [each and each.fixed() for each in watchers]
        numbers["fxprec.original around the step"] = [each.bypassed > 0 for each in self._conversions]
        return numbers


class _Attributes:
    """Attributes of every module, and of the lists, dicts and sets among them: by identity, in C loops."""

    def __init__(self, roots: Iterable[nn.Module]) -> None:
        attributes = [module.__dict__ for root in roots for module in root.modules()]
        held = [value for each in attributes for value in each.values()]
        dicts = [value for value in held if type(value) in _DICTS]
        sequences = [value for value in held if type(value) in _SEQUENCES]
        self._dicts = [*attributes, *filter(None, dicts)]
        self._sequences = [*filter(None, sequences)]
        # An empty container has no elements to compare: that it is still empty is checked by itself.
        self._empty = [value for value in (*dicts, *sequences) if not value]
        self._values = self.now()

    def same(self) -> bool:
        return not any(self._empty) and _identical(self.now(), self._values)

    def now(self) -> list[Any]:
        return [*chain.from_iterable(map(dict.values, self._dicts)), *chain.from_iterable(self._sequences)]


def _identical(now: list[Any], before: list[Any]) -> bool:
    return len(now) == len(before) and all(map(operator.is_, now, before))


def attributes_of(roots: Iterable[nn.Module]) -> list[Any]:
    """Return what the modules hold now, one list deep."""
    return _Attributes(roots).now()


def _owned_by(optimizer: Optimizer) -> list[Tensor]:
    return [*chain.from_iterable([group["params"] for group in optimizer.param_groups])]


def _state_of(optimizer: Optimizer) -> list[Any]:
    """Return the optimizer's state, by identity. (Numbers in it are those of no optimizer that a graph can hold.)"""
    return [*chain.from_iterable(map(dict.values, optimizer.state.values()))]


def _comparable(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return tuple(map(_comparable, value))
    return id(value) if isinstance(value, Tensor) else value
