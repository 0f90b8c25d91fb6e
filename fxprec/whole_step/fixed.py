"""Keep a captured graph and the state around it in step: learning rates, shadows, and what the graph takes as given.

A graph holds addresses and numbers as they were. It has no eyes for a parameter that was replaced, a hook that was
added, or a weight decay that was set: after such a change another graph is captured (``Fixed``). Learning rates lie in
device memory, so that schedulers work (``Rates``).

A replay runs no Python, so no shadow store learns of the step (``ShadowLinks``). Two cases::

    fxprec.optim     the graph reads the shadows as they are, and writes them with the weights
    any other        the graph begins by copying all weights to their shadows; after it they are stale
"""

from __future__ import annotations

import operator
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fxprec.scaling.gradients import parameters_of
from fxprec.shadows import ShadowStore, stores
from fxprec.torch_internals import backward_hooks_of, late_hooks_of, step_hooks
from fxprec.whole_step.iteration import Iteration, scale_tensors

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
        self._device = self._parameters[0].device.type
        self._conversions = [*iteration.conversions]
        self._given = self._given_now()
        buffers = [b for root in iteration.roots() for b in root.buffers()]
        tensors = [v for v in _state_of(self._optimizer) if isinstance(v, Tensor)]
        self._tensors = [*self._parameters, *buffers, *tensors, *scale_tensors(self._scaler)]
        self._addresses = [*map(Tensor.data_ptr, self._tensors)]
        self._numbers = self._numbers_now()
        # Tables of multi-tensor launches, which the optimizer may replace; graphs of the model, which it may drop.
        plans = getattr(self._optimizer, "_plans", None)
        self._kept = held, None if plans is None else plans.kept(), [[*each.captured] for each in self._conversions]

    def changed(self) -> str | None:
        """Return what is no longer so, in a few words; None where the graph can be replayed."""
        # Cheap checks of many objects come first, identities in C loops: this runs before every replay.
        if not self._attributes.same():
            return "an attribute, a parameter, a submodule or a hook of the model"
        for what, now in self._given_now().items():
            if not _identical(now, self._given[what]):
                return what
        if [*map(Tensor.data_ptr, self._tensors)] != self._addresses:
            return "the memory of a parameter, a buffer or a state"
        numbers = self._numbers_now()
        if numbers != self._numbers:
            places = [place for place, now in numbers.items() if now != self._numbers.get(place)]
            return ", ".join(places) or "the number of parameter groups"
        return self._rates.changed() or (None if self._shadows.same() else "the low copies of the weights")

    def _given_now(self) -> dict[str, list[Any]]:
        """Return what is compared by identity, in words -> the objects."""
        optimizer, parameters = self._optimizer, self._parameters
        # Hooks run once, at capture: one that is added later would never be called.
        hooks = (*map(backward_hooks_of, parameters), *map(late_hooks_of, parameters), *step_hooks(optimizer))
        return {
            "the parameters of the optimizer": [*parameters_of(optimizer)],
            "requires_grad of a parameter": [*map(_wants_gradient, parameters)],
            "a hook of a parameter or of the optimizer": [*chain.from_iterable(map(dict.values, filter(None, hooks)))],
            "the optimizer's state (was a checkpoint loaded?)": _state_of(optimizer),
            "the tensors of the scaler": scale_tensors(self._scaler),
        }

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
        scaler = self._scaler
        moves = scaler.get_growth_factor, scaler.get_backoff_factor, scaler.get_growth_interval
        numbers["growth or backoff of the scaler"] = [float(get()) for get in moves] if scaler.is_enabled() else None
        # What surrounds the call is baked into the kernels of the capture.
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


def _state_of(optimizer: Optimizer) -> list[Any]:
    """Return the optimizer's state, by identity. (Numbers in it are those of no optimizer that a graph can hold.)"""
    return [*chain.from_iterable(map(dict.values, optimizer.state.values()))]


def _comparable(value: Any) -> Any:
    # Comparing a tensor's values would wait for the device: another tensor is a change, whatever it holds.
    if isinstance(value, tuple | list):
        return tuple(map(_comparable, value))
    return id(value) if isinstance(value, Tensor) else value


class Rates:
    """Learning rates of one optimizer, one 0-dim tensor for each group whose ``lr`` is a number.

    ``param_groups`` keep their numbers, for schedulers and state dicts. An ``lr`` that is a tensor on the device is
    left to the graph, which reads it there: schedulers write into it.

    Args:
        optimizer: fxprec's take FP64, so that a captured step has the bits of an eager one. Torch's fused kernels on
            CUDA read FP32.
        device: where the graph runs.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self._optimizer = optimizer
        # A rate rounded to FP32 would give other bits than the Python number of an eager step.
        ours = getattr(optimizer, "writes_shadows", False)
        dtype = torch.float64 if ours or device.type == "cpu" else torch.float32
        self._device = device
        groups = optimizer.param_groups
        self._sent = [None if self._on_device(g["lr"]) else float(g["lr"]) for g in groups]
        self._tensors = [None if n is None else torch.full((), n, dtype=dtype, device=device) for n in self._sent]
        self._read = [g["lr"] if n is None else None for g, n in zip(groups, self._sent, strict=True)]

    def in_groups(self) -> AbstractContextManager[None]:
        """Put the tensors in the places of the numbers while the context lasts."""
        groups = self._optimizer.param_groups
        rates = [each["lr"] if tensor is None else tensor for each, tensor in zip(groups, self._tensors, strict=True)]
        return _options(groups, "lr", rates)

    def capturable(self) -> AbstractContextManager[None]:
        """Set ``capturable``, for which torch's Adam asks while a graph is captured; its fused kernel is so anyway."""
        groups = [group for group in self._optimizer.param_groups if "capturable" in group]
        return _options(groups, "capturable", [True] * len(groups))

    def send(self) -> None:
        """Bring the numbers of the groups to the device, those that changed."""
        for place, (group, tensor) in enumerate(zip(self._optimizer.param_groups, self._tensors, strict=True)):
            if tensor is not None and (now := float(group["lr"])) != self._sent[place]:
                tensor.fill_(now)
                self._sent[place] = now

    def changed(self) -> str | None:
        """Return what makes the graph read another tensor than that of a group; None where nothing does."""
        for place, (group, known) in enumerate(zip(self._optimizer.param_groups, self._read, strict=True)):
            lr: Any = group["lr"]
            if (lr is not known) if known is not None else self._on_device(lr):
                return f"param_groups[{place}]['lr'] is another tensor"
        return None

    def _on_device(self, lr: Any) -> bool:
        return isinstance(lr, Tensor) and (lr.device.type != "cpu" or self._device.type == "cpu")


@contextmanager
def _options(groups: list[dict[str, Any]], name: str, values: list[Any]) -> Iterator[None]:
    """Set an option of parameter groups to these values while the context lasts."""
    with ExitStack() as undo:
        for group, value in zip(groups, values, strict=True):
            undo.callback(group.__setitem__, name, group[name])
            group[name] = value
        yield


@dataclass(frozen=True, slots=True)
class _Link:
    """Shadows of one store that the graph reads or writes. ``read``: it does read them."""

    store: ShadowStore
    weights: list[Tensor]
    shadows: list[Tensor]
    marks: list[object]
    read: bool


class ShadowLinks:
    """Shadows that a step concerns: those its forward reads, and all those of weights that it changes."""

    def __init__(self, iteration: Iteration) -> None:
        self._optimizer: Optimizer = iteration.optimizer
        self._writes = bool(getattr(self._optimizer, "writes_shadows", False))
        # Other converted models may share a weight (a frozen teacher, an average): their shadows go stale as well.
        own = {id(store) for store in iteration.stores()}
        parameters = iteration.parameters
        self._links: list[_Link] = []
        # All stores of the process, not only this model's: another conversion may have low copies of the same weights.
        for store in stores():
            pairs = [(p, shadow) for p in parameters if (shadow := store.shadow_of(p)) is not None]
            if pairs:
                weights, shadows = map(list, zip(*pairs, strict=True))
                self._links.append(_Link(store, weights, shadows, store.marks_of(weights), id(store) in own))
        self._known = {id(link.store) for link in self._links}

    def same(self) -> bool:
        """Return whether the shadows are still those that the graph reads and writes."""
        return all(all(map(operator.is_, link.store.marks_of(link.weights), link.marks)) for link in self._links)

    def before(self) -> None:
        """Copy changed weights to their shadows before a replay, where the graph itself does not."""
        if self._writes:
            with torch.no_grad():
                for link in self._links:
                    if link.read:
                        link.store.read(link.weights)

    def after(self) -> None:
        """Mark shadows after a replay: a forward must not read old ones, nor a pending backward new ones."""
        for store in stores():
            # These shadows hold the weights of before the step: the next forward outside refreshes them.
            if not self._writes or id(store) not in self._known:
                store.note_stepping(parameters_of(self._optimizer))
        if self._writes:
            # A backward that is pending would else read shadows that the replay has overwritten, and not notice.
            for link in self._links:
                torch.autograd.graph.increment_version(link.shadows)
