"""What a case is given to make inputs, convert, call, change and look, the same in every variant."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, MutableMapping
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import fxprec
from tests.hostile.models import again
from tests.hostile.portrait import Leaf, portrait

LOW = torch.bfloat16


class Run:
    """What a case is given: it makes inputs, converts, calls and looks, in the way of the present variant."""

    def __init__(self, variant: str) -> None:
        self.variant = variant
        self.ours = variant in ("auto", "dynamo")
        self.seen: dict[str, Leaf] = {}
        self._watched: dict[str, Any] = {}
        self._calls = 0
        self._undo = contextlib.ExitStack()

    # -- making ------------------------------------------------------------------------------------------------------

    def convert(self, model: Any, name: str = "", watch: bool = True, **settings: Any) -> Any:
        """The model in this variant; its state and gradients are looked at in the end."""
        watch = watch and isinstance(model, torch.nn.Module)
        if self.ours:
            model = fxprec.convert(model, dtype=LOW, capture=self.variant, **settings).module
        elif self.variant == "fp64" and isinstance(model, torch.nn.Module):
            model = model.double()
        if watch:
            self.watch(name or f"model{len(self._watched)}", model)
        return model

    def randn(self, *shape: int) -> Tensor:
        return self.wide(torch.randn(*shape))

    def wide(self, value: Any) -> Any:
        """A tensor or module of the user's as the float64 twin needs it."""
        return value.double() if self.variant == "fp64" else value

    def patch(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute (or an item of a dict) until the case is over."""
        patch = pytest.MonkeyPatch()
        self.defer(patch.undo)
        (patch.setitem if isinstance(owner, MutableMapping) else patch.setattr)(owner, name, value)

    def defer(self, function: Callable[[], Any]) -> None:
        self._undo.callback(function)

    # -- calling and looking -----------------------------------------------------------------------------------------

    def __call__(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call the model, or anything that calls it, and look at the result and at the inputs afterwards."""
        output = self.quiet(function, *args, **kwargs)
        inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self.see(f"call{self._calls}", {"in": inputs, "out": output})
        self._calls += 1
        return output

    def quiet(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """As a call, but nothing is looked at: other threads, outputs that are no values."""
        with self.casting():
            return function(*args, **kwargs)

    def casting(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast("cpu", LOW) if self.variant == "autocast" else contextlib.nullcontext()

    def raises(self, kind: type[BaseException], function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
        with pytest.raises(kind) as caught:
            self.quiet(function, *args, **kwargs)
        self.see(f"error{self._calls}", type(caught.value).__name__)

    def backward(self, output: Any, **kwargs: Any) -> None:
        """The gradients of a scalar of all float tensors in an output."""
        floats = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if floats:
            torch.stack([leaf.square().sum() for leaf in floats]).sum().backward(**kwargs)

    def changes(self, model: torch.nn.Module, *changes: Callable[[Any], Any], **settings: Any) -> Any:
        """Convert, call and train on 4 x 8 numbers, and again after each of the changes; gives the model."""
        model, x = self.convert(model, **settings), self.randn(4, 8)
        self.backward(self(model, x))
        for change in changes:
            change(model)
            self.backward(self(model, x))
        return model

    def comes_and_goes(self, model: torch.nn.Module, register: Callable[[Any], Any]) -> None:
        """A hook that comes after the first call and goes again; ``register`` gives its handle."""
        handles: list[Any] = []
        self.changes(model, lambda m: handles.append(register(m)), again, lambda m: handles.pop().remove(), again)

    def see(self, name: str, value: Any) -> None:
        """Compare this value, as it is now, between the variants."""
        while name in self.seen:
            name += "'"
        self.seen.update(portrait(value, name))

    def watch(self, name: str, value: Any) -> None:
        """Compare this object as it is in the end."""
        self._watched[name] = value

    def finish(self) -> None:
        for name, value in self._watched.items():
            self.see(f"state {name}", value)
        numpys = [part.tobytes() if isinstance(part, numpy.ndarray) else part for part in numpy.random.get_state()]
        self.see("random", [hash(random.getstate()), hash(tuple(numpys)), torch.get_rng_state()])
        self.close()

    def close(self) -> None:
        self._undo.close()
