"""Which methods ``convert(methods=...)`` names: checked before anything changes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn
from torch.fx import GraphModule
from torch.jit import ScriptModule

from fxprec.errors import ConversionError, did_you_mean


@dataclass(frozen=True, slots=True)
class MethodName:
    """A method: the path of its module in the model ("" for the model itself), and its name there."""

    path: str
    name: str

    def __str__(self) -> str:
        return f"{self.path}.{self.name}" if self.path else self.name

    @classmethod
    def parse(cls, text: str) -> MethodName:
        """The inverse of ``str``."""
        path, _, name = text.rpartition(".")
        return cls(path, name)


def named_methods(model: nn.Module, methods: Sequence[str]) -> tuple[str, ...]:
    """The methods that a user named, each in one spelling: ``"vae.decode"``; a module stands for its forward.

    Raises:
        TypeError: not a sequence of strings.
        ValueError: a name that the model does not have (with the nearest ones), no method of an object, one of
            nn.Module's own, ``forward`` itself, or one name twice.
        ConversionError: in a module whose class cannot be swapped.
    """
    if isinstance(methods, str) or not all(isinstance(name, str) for name in methods):
        raise TypeError(f"methods={methods!r}: give a tuple of names, such as methods=('encode', 'vae.decode')")
    if not methods:
        return ()
    paths = {id(module): path for path, module in model.named_modules()}
    found: dict[str, str] = {}
    for text in methods:
        name = str(_resolved(model, text, paths))
        if name in found:
            both = f"{found[name]!r} and {text!r} are the same method" if found[name] != text else f"{text!r} twice"
            raise ValueError(f"methods={tuple(methods)!r}: {both}, {name}: name it once")
        found[name] = text
    return tuple(found)


def _resolved(model: nn.Module, text: str, paths: dict[int, str]) -> MethodName:
    owner, left = model, text.split(".")
    while left and isinstance(child := getattr(owner, left[0], None), nn.Module):
        if id(child) not in paths:
            raise ValueError(f"methods: {text!r}: {left[0]!r} is a module, but no submodule of {type(model).__name__}")
        owner, left = child, left[1:]
    path = paths[id(owner)]
    if len(left) > 1:
        known = [name for name, _ in owner.named_children()]
        raise ValueError(
            f"methods: {text!r}: {_called(model, path)} has no submodule {left[0]!r}{did_you_mean(left[0], known)}"
        )
    name = left[0] if left else "forward"
    if not path and name == "forward":
        raise ValueError(f"methods: {text!r}: forward itself is always converted; leave it out")
    _check(model, owner, path, name, text)
    return MethodName(path, name)


def _check(model: nn.Module, owner: nn.Module, path: str, name: str, text: str) -> None:
    where = f"methods: {text!r}: {_called(model, path)}"
    found = inspect.getattr_static(owner, name, None)
    if name != "forward" and hasattr(nn.Module, name):
        raise ValueError(f"{where}: {name} is a method of every nn.Module: give one of the model's own")
    if found is None:
        known = [*_own_methods(owner), *(child for child, _ in owner.named_children())]
        raise ValueError(f"{where} has no method {name!r}{did_you_mean(name, known)}")
    for kind, words in ((staticmethod, "a static method"), (classmethod, "a class method"), (property, "a property")):
        if isinstance(found, kind):
            raise ValueError(
                f"{where}.{name} is {words}, which does not run on the module: "
                "name the method that calls it, or make it a method"
            )
    if not callable(found) or isinstance(found, type):
        raise ValueError(f"{where}.{name} is no method but an object ({type(found).__name__})")
    for kind, why in ((GraphModule, "a GraphModule, whose class fx writes to"), (ScriptModule, "a TorchScript module")):
        if path and isinstance(owner, kind):
            raise ConversionError(f"{where} is {why}: name a method of the model that calls it")


def _own_methods(owner: nn.Module) -> Iterator[str]:
    """Names of what the user's classes define, and could be named."""
    for cls in type(owner).__mro__:
        if not cls.__module__.startswith("torch."):
            yield from (name for name, value in vars(cls).items() if inspect.isfunction(value) and name[:2] != "__")


def _called(model: nn.Module, path: str) -> str:
    return f"{type(model).__name__}.{path}" if path else type(model).__name__
