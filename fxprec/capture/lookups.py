"""What a module has under the name of a parameter, buffer or child: that, unless the instance or its class hides it.

``nn.Module.__getattr__`` finds these only where Python finds no attribute of the name. So ``vars(m)["weight"] = w`` and
``type(m).weight = w`` change what ``m.weight`` is, and no parameter.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from torch import nn

#: The dicts that nn.Module keeps its parts in.
PARTS: Final = ("_modules", "_parameters", "_buffers")

_Hidden = tuple[set[str], Any, bool]


class Lookups:
    """Guard of names that hide parameters, buffers or children of some modules.

    As long as instances and classes have as many attributes as they had, nothing else is asked.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = [module for module in modules if any(_parts(module))]
        bases = dict.fromkeys(base for cls in {*map(type, self._modules)} for base in cls.__mro__[:-1])
        self._namespaces = [*map(vars, self._modules), *map(vars, bases)]
        self._sizes = [*map(len, self._namespaces)]
        self._hidden = [*map(_hidden, self._modules)]

    def holds(self) -> bool:
        sizes = [*map(len, self._namespaces)]
        if sizes != self._sizes:
            if [*map(_hidden, self._modules)] != self._hidden:
                return False
            self._sizes = sizes
        return True

    def change(self) -> str:
        """Return what was hidden, or came to light."""
        for module, then in zip(self._modules, self._hidden, strict=True):
            now = _hidden(module)
            if names := now[0] ^ then[0]:
                return f"another {min(names)} stands before a parameter, buffer or child of a {type(module).__name__}"
            if now != then:
                return f"a {type(module).__name__} looks its attributes up in another way"
        return "an attribute was set"


def _parts(module: nn.Module) -> list[dict[str, Any]]:
    """TorchScript's modules keep theirs elsewhere."""
    return [part for part in map(vars(module).get, PARTS) if isinstance(part, dict)]


def _hidden(module: nn.Module) -> _Hidden:
    """Hidden names, and what else its class looks names up by; while a model is traced, nn.Module's own is another."""
    attributes, cls = vars(module), type(module)
    names = {name for part in _parts(module) for name in part}
    found = names.intersection(attributes).union(*[names.intersection(vars(base)) for base in cls.__mro__])
    return found, cls.__getattr__, cls.__getattribute__ is nn.Module.__getattribute__
