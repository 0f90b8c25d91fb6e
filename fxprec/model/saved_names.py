"""Where the classes and functions stand now that files saved by version 0.1 name.

A pickle names what it needs by module and name. The modules of 0.1 that are named there, and are gone, are found as
modules that hold these names and nothing else; nothing but a file that was saved then asks for them.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

#: A module of 0.1, and in which module its names stand now.
_MOVED: Final = {
    "fxprec.graph_calls": "fxprec.programs.graph_calls",
    "fxprec.kernels.kernel_op": "fxprec.kernels.launch.kernel_op",
    "fxprec.kernels.rows.region": "fxprec.kernels.rows.run.region",
    "fxprec.loss_scaler": "fxprec.scaling.loss_scaler",
    "fxprec.module": "fxprec.model.module",
    "fxprec.passes.casts": "fxprec.passes.graph.casts",
    "fxprec.passes.device_costs": "fxprec.passes.costs.device_costs",
    "fxprec.passes.fusion.rotary": "fxprec.passes.canonical.rotary",
    "fxprec.passes.exact_graph": "fxprec.passes.graph.exact_graph",
    "fxprec.passes.ir": "fxprec.passes.graph.annotations",
    "fxprec.passes.policy_terms": "fxprec.passes.policy.terms",
    "fxprec.passes.saved_graph": "fxprec.passes.graph.saved_graph",
    "fxprec.program": "fxprec.programs.program",
    "fxprec.reminders": "fxprec.capture.reminder",
}


class SavedNames:
    """Finds the modules of ``_MOVED``, where nothing else does (an importer of ``sys.meta_path``)."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        """The module of that name, if 0.1 had one that is gone."""
        return ModuleSpec(name, self) if name in _MOVED else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        """A plain one."""

    def exec_module(self, module: ModuleType) -> None:
        """Its names are looked up when they are asked for."""

        def __getattr__(name: str) -> Any:
            home = importlib.import_module(_MOVED[module.__name__])
            if name in vars(home):
                return vars(home)[name]
            raise AttributeError(f"module {module.__name__!r} of fxprec 0.1 has no {name!r} in this version")

        vars(module)["__getattr__"] = __getattr__


def find_saved_names() -> None:
    """From now on the names of 0.1 are found. Once is enough."""
    if not any(isinstance(finder, SavedNames) for finder in sys.meta_path):
        sys.meta_path.append(SavedNames())  # type: ignore[arg-type]
