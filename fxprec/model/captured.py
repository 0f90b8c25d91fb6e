"""A captured graph, rewritten: what a capture gives, and a conversion keeps."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from torch import nn
from torch.fx import GraphModule

from fxprec.capture.call_key import Constants
from fxprec.capture.symbolic.guards import Guards
from fxprec.passes.graph.annotations import notes, weight_path
from fxprec.programs.dynamo_programs import Calls, modes_of
from fxprec.programs.program import Program


@dataclass(frozen=True, slots=True, eq=False)
class Captured:
    """Rewritten graph of a method, or of a piece of it between two graph breaks.

    Attributes:
        method: its name, as ``MethodName`` writes it.
        entry: number of the entry point that it serves: that of the class, or of a function set on the instance.
        gm: the graph that users see.
        program: what runs for it.
        training: the mode that the method's module was in.
        gradients: whether grad mode was on: else a call that records gradients of returned values needs another graph.
        guards: what static capture read; None for a graph of dynamo, which guards by itself.
        key: of a static graph: the arguments that are tensors, and the constants that the others are.
        calls: of a graph of dynamo: what is known of the calls that ran it.
    """

    method: str
    entry: int
    gm: GraphModule
    program: Program
    training: bool
    gradients: bool
    guards: Guards | None = None
    key: tuple[tuple[str, ...], Constants] | None = None
    calls: Calls | None = None

    def fits(self, owner: nn.Module) -> bool:
        """Return whether a call of the method's module, in the modes that it and its parts are in, may run it."""
        if self.calls is not None:
            return modes_of(owner) in self.calls.modes
        return self.guards is None or self.guards.hold()

    def reads_dtypes_of(self, model: nn.Module, frozen: Container[str]) -> bool:
        """Return whether weights have the dtypes that the graph was captured with, but for those that became low."""
        tensors = dict(model.named_parameters(remove_duplicate=False))
        for node in self.gm.graph.find_nodes(op="get_attr"):
            path = weight_path(node)
            known = path in tensors and path not in frozen and notes(node).kind == "parameter"
            if known and node.meta.get("dtype", tensors[path].dtype) != tensors[path].dtype:
                return False
        return True
