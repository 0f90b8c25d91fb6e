"""What entry points and their dynamic graphs ask of those who own them."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any, Protocol

from torch import nn

from fxprec.model.method_names import MethodName
from fxprec.model.wrappers import Wrappers
from fxprec.programs.packed_weights import PackedWeights
from fxprec.settings import Settings
from fxprec.shadows.store import ShadowStore


class Home(Protocol):
    """A conversion: its settings, what its graphs read low and packed weights from, captures, the net."""

    settings: Settings
    store: ShadowStore
    wrappers: Wrappers
    packed: PackedWeights | None

    def net_context(self) -> contextlib.AbstractContextManager[Any]: ...


class Method(Protocol):
    """An entry point: its home, its name, the module that has it, and the untouched method, unbound."""

    conversion: Home
    name: MethodName
    owner: Callable[[], nn.Module | None]
    signature: functools.cached_property[inspect.Signature]

    @property
    def unbound(self) -> Callable[..., Any]: ...
