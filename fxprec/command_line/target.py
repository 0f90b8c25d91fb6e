"""Load the model of a command: ``package.module:factory`` or ``file.py:factory``, and what the factory gives."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import itertools
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from fxprec.errors import did_you_mean
from fxprec.inspection.nodes import short_paths
from fxprec.numerics.problem import Batch, Loss


class TargetError(ValueError):
    """The target names no model."""


@dataclass(frozen=True, slots=True)
class Target:
    """Model, converted or not; batches to run it on, as ``fxprec.numerics`` takes them; the loss of its outputs."""

    model: nn.Module
    batches: tuple[Batch, ...] = ()
    loss: Loss | None = None


def load(name: str, most: int) -> Target:
    """Import the factory, call it without arguments, and take what it gives.

    Args:
        name: ``package.module:factory`` or ``file.py:factory``. The factory gives ``model``, ``(model, batches)`` or
            ``(model, batches, loss)``; it may be a class of modules, or a module itself.
        most: batches that are taken.

    Raises:
        TargetError: there is no such module, file or factory; it fails; it gives something else.
    """
    where, colon, factory = name.rpartition(":")
    if not colon or not where or not factory:
        raise TargetError(f"{name!r} is no target: write package.module:factory or file.py:factory")
    module = _imported(where)
    value: Any = module
    for part in factory.split("."):
        if not hasattr(value, part):
            raise TargetError(f"{where} has no {factory!r}{did_you_mean(factory, vars(module))}")
        value = getattr(value, part)
    if not isinstance(value, nn.Module):
        if not callable(value):
            raise TargetError(f"{name} is a {type(value).__name__}: a factory is a function that gives the model")
        # A factory that wants arguments would fail in words that say nothing of a factory.
        if wanted := _wanted(value):
            raise TargetError(f"{name} wants {', '.join(wanted)}: a factory is called without arguments")
        value = told(f"{name} failed", value)
    return _given(name, value, most)


def _wanted(factory: Callable[..., Any]) -> list[str]:
    """Return the arguments that a function cannot be called without."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except ValueError:  # written in C
        return []
    # ``*args`` and ``**kwargs`` may stay empty.
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [each.name for each in parameters if each.default is each.empty and each.kind not in optional]


def _imported(where: str) -> ModuleType:
    if not where.endswith(".py"):
        try:
            found = importlib.util.find_spec(where)
        except ModuleNotFoundError:  # of a package above it
            found = None
        if found is None:
            raise TargetError(f"no module {where!r}: packages are looked for below the working directory")
        return told(f"importing {where} failed", importlib.import_module, where)
    path = Path(where).resolve()
    if not path.is_file():
        raise TargetError(f"no file {where}")
    # A file need be in no package: it runs as python would run it.
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses and pickles look there
    sys.path.insert(0, str(path.parent))  # as where python runs the file
    told(f"importing {where} failed", spec.loader.exec_module, module)
    return module


def told(what: str, function: Any, *arguments: Any) -> Any:
    """Call the user's code, and raise its error as one of the target, with the line where it happened.

    Raises:
        TargetError: it failed.
    """
    try:
        return function(*arguments)
    except Exception as error:
        # The last frame is the line that failed; all before it is ours, or torch's.
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = short_paths(f"{frame.filename}:{frame.lineno}")
        raise TargetError(f"{what}: {type(error).__name__}: {error} (at {place})") from error


def _given(name: str, given: Any, most: int) -> Target:
    # A tuple of other lengths is a model's mistake, and is named below as what it is.
    parts = given if isinstance(given, tuple) and 1 <= len(given) <= 3 else (given,)
    model, batches, loss = [*parts, *((), None)[len(parts) - 1 :]]
    if not isinstance(model, nn.Module):
        raise TargetError(
            f"{name} gives a {type(given).__name__}: it must give model, (model, batches) or (model, batches, loss)"
        )
    if not isinstance(batches, Iterable):
        raise TargetError(f"{name} gives a {type(batches).__name__} as batches: a list or a loader of them is wanted")
    taken = told(f"the batches of {name} failed", lambda: tuple(itertools.islice(batches, most)))
    return Target(model, taken, loss)
