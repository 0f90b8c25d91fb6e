"""Hooks that were there when dynamo captured: its graphs hold them, and are cut where one looks at values.

dynamo itself guards the hooks of each module, but not those of all modules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from fxprec.capture.symbolic.guards import HOOKS
from fxprec.torch_internals import global_hooks


class HooksSeen:
    """The hooks that captures of one method met."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, Any], Mapping[Any, Any]] | None = None

    def note(self, owner: nn.Module) -> None:
        """A method of ``owner`` was captured: what hooks there are now. Its own run around its graphs."""
        submodules = (module for module in owner.modules() if module is not owner)
        dicts = (vars(module)[name] for module in submodules for name in HOOKS)
        self._seen = (self._seen or {}) | dict(_each((*dicts, *global_hooks.values())))

    @property
    def gone(self) -> bool:
        """Flag: one of the hooks was removed."""
        return bool(self._seen) and not all(key in hooks for (_, key), hooks in self._seen.items())

    @property
    def late(self) -> str | None:
        """Reason why its graphs must not run now: they lack a hook of all modules."""
        if self._seen is None or not any(global_hooks.values()):
            return None
        new = any(place not in self._seen for place, _ in _each(global_hooks.values()))
        return "hooks for all modules were registered after its capture" if new else None


def _each(dicts: Any) -> Iterator[tuple[tuple[int, Any], Mapping[Any, Any]]]:
    """Each hook by its place, and the dict that has it."""
    return (((id(hooks), key), hooks) for hooks in dicts for key in [*hooks])
