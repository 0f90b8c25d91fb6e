"""Leaves the user's model, random number generators and example inputs as a capture found them.

Tracing runs the user's forward once, with proxies for tensors. What it writes (a step counter, a cached mask, a list
of statistics, which would hold proxies) must not stay; and a graph that leaves the write out would be wrong: so what
containers, modules and namespaces of classes held is put back, and what had moved is told. A forward that runs on
example inputs, and writes to them or pops from them, gets copies.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fxprec.capture.facts import PARTS
from fxprec.capture.guard_values import CONTAINERS, PLAIN, contents, is_container, is_plain

#: What people call a container; or tells that from what it holds now and what it held.
_Label = str | Callable[[Any, Any], str]


class Contents:
    """Shallow copies of containers; of what is in them, too, once it is added."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Any, Any, _Label]] = {}

    def add(self, container: Any, label: _Label = "") -> None:
        """Note what a list, dict, set or deque holds now, or a class; ``label`` names it, or what became of it."""
        if id(container) in self._kept or isinstance(container, tuple | frozenset):
            return
        if isinstance(container, type):
            self._kept[id(container)] = container, dict(vars(container)), label or container.__qualname__
        else:
            self._kept[id(container)] = container, container.copy(), label or f"a {type(container).__name__}"

    def add_nested(self, container: Any, label: _Label) -> None:
        """Do as ``add``, with every container in it."""
        if id(container) in self._kept:
            return
        self.add(container, label)
        for element in contents(container):
            if type(element) not in PLAIN and is_container(element):
                self.add_nested(element, label)

    def restore(self) -> str | None:
        """Undo what was written; the name of the first thing written, or None."""
        written: str | None = None
        # In the order in which they were added.
        for container, saved, label in self._kept.values():
            of_class = isinstance(container, type)
            now = dict(vars(container)) if of_class else container
            if not unchanged(now, saved):
                written = written or (label if isinstance(label, str) else label(now, saved))
                (_refill_class if of_class else refill)(container, saved)
        return written


def unchanged(now: Any, saved: Any) -> bool:
    """Return whether a container holds the very same things in the same order."""
    if len(now) != len(saved):
        return False
    if not saved:
        return True
    if isinstance(now, set):
        return now == saved
    if isinstance(now, dict | Mapping):
        return all(map(is_, now, saved)) and all(map(is_, now.values(), saved.values()))
    return all(map(is_, now, saved))


def refill(container: Any, saved: Any) -> None:
    """Make a container hold what it held."""
    container.clear()
    if isinstance(container, dict | set):
        container.update(saved)
    else:
        container.extend(saved)


def _refill_class(cls: type, saved: Mapping[str, Any]) -> None:
    for name in {**vars(cls)}:
        if name not in saved:
            delattr(cls, name)
    for name, value in saved.items():
        if name not in vars(cls) or vars(cls)[name] is not value:
            setattr(cls, name, value)


class ModelState(Contents):
    """A shallow copy of every module's attributes, and of the containers in them, however deep."""

    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        self._named = [*root.named_modules()]
        #: Most are for hooks, a dozen a module: nothing to copy, and nothing to say before somebody writes to one.
        self._empty: list[Any] = []
        # First what modules hold themselves, so that a replaced container is put back before its contents.
        for path, module in self._named:
            self.add(module.__dict__, partial(_different, path))
        for path, module in self._named:
            for name, value in module.__dict__.items():
                # Two kinds of attributes are nearly all, and looked at no further: plain values, and empty dicts.
                if type(value) in PLAIN:
                    continue
                if type(value) in CONTAINERS and not value:
                    self._empty.append(value)
                elif is_container(value) and not is_plain(value):
                    self.add_nested(value, partial(_contents_of, path, name))

    def restore(self) -> str | None:
        written = super().restore()
        for container in filter(None, self._empty):
            where = (
                (path, name)
                for path, module in self._named
                for name, value in module.__dict__.items()
                if value is container
            )
            written = written or _contents_of(*next(where), container, {})
            container.clear()
        return written


def _contents_of(path: str, name: str, now: Any, saved: Any) -> str:
    return _different(path, now, saved) if name in PARTS else f"the contents of {_joined(path, name)}"


def _different(path: str, now: dict[str, Any], saved: dict[str, Any]) -> str:
    """Return the first attribute, or part, that is another."""
    names = (name for name in {**saved, **now} if name not in now or name not in saved or now[name] is not saved[name])
    return _joined(path, next(names))


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


class RandomState:
    """The global random number generators: torch's (every initialized CUDA device too), Python's, numpy's if imported.

    One that has moved tells that the forward drew numbers while it was traced, which would be constants in the graph.
    (A traced dropout is recorded, and does not run.) Nothing waits for a device.

    Args:
        only_torch: torch's alone, whose state is read a hundred times as fast as Python's and NumPy's.
    """

    def __init__(self, only_torch: bool = False) -> None:
        generators: list[tuple[str, Callable[[], Any], Callable[[Any], Any]]] = [
            ("torch", torch.get_rng_state, torch.set_rng_state)
        ]
        if torch.cuda.is_initialized():
            generators.append(("torch.cuda", torch.cuda.get_rng_state_all, torch.cuda.set_rng_state_all))
        if not only_torch:
            generators.append(("random", random.getstate, random.setstate))
            if (numpy := sys.modules.get("numpy")) is not None:
                generators.append(("numpy.random", numpy.random.get_state, numpy.random.set_state))
        self._states = [(name, get(), get, put) for name, get, put in generators]

    def restore(self, expected: Container[str] = ()) -> str | None:
        """Put the generators back; the name of the first one that had moved and is not ``expected`` to, or None."""
        moved: list[str] = []
        for name, state, get, put in self._states:
            if not _equal(get(), state):
                put(state)
                moved.append(name)
        return next((name for name in moved if name not in expected), None)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    # Python's generator has a tuple of 625 integers.
    if isinstance(a, tuple | list):
        return len(a) == len(b) and (a == b if {*map(type, a)} == {int} else all(map(_equal, a, b)))
    return a.tobytes() == b.tobytes() if hasattr(a, "tobytes") else a == b


def copied_inputs(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return copies that a capture cannot tell from the inputs, by sizes, strides, and which of them share memory.

    What belongs to the model stays itself, and so does an argument that cannot be copied (a lock, a generator).
    """
    # What is in the memo deepcopy takes for copied: these stand for themselves.
    parts = (*model.modules(), *model.parameters(), *model.buffers())
    memo: dict[int, Any] = {id(part): part for part in parts}

    def copied(value: Any) -> Any:
        try:
            with _Copying():
                return copy.deepcopy(value, memo)
        except Exception:
            return value

    return tuple(map(copied, args)), {name: copied(value) for name, value in kwargs.items()}


class _Copying(TorchFunctionMode):
    """Mode in which tensors with a history are copied, which torch refuses; a copy has a history of its own."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (_copied if func is Tensor.__deepcopy__ else func)(*args, **(kwargs or {}))


def _copied(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    detached = tensor.detach()
    result = copy.deepcopy(detached, memo) if _has_memory_of_its_own(tensor) else detached.clone()
    if tensor.requires_grad:
        result.requires_grad_()
        # A clone is no leaf either: the forward may write to it in place, as to no leaf that requires a gradient.
        if not tensor.is_leaf:
            with torch.enable_grad():
                result = result.clone()
    # Such as the sizes that torch._dynamo.mark_dynamic named.
    vars(result).update(vars(tensor))
    return result


def _has_memory_of_its_own(tensor: Tensor) -> bool:
    """Return whether a copy of a tensor's storage copies it alone: a batch may be a view of a whole data set."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_quantized:
        return False
    return tensor.untyped_storage().nbytes() <= 2 * tensor.numel() * tensor.element_size()
