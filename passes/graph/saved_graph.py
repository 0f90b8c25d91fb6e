"""A graph in a form that pickles: each node with what it calls by name, and its annotations."""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate
from torch.package.importer import sys_importer

from fxprec.passes.graph.annotations import Precision
from fxprec.passes.graph.new_node import new_node
from fxprec.passes.torch_internals import HigherOrderOperator, OpOverload, OpOverloadPacket, codegen_of


@dataclass(frozen=True, slots=True)
class _Node:
    """Which of the graph's nodes."""

    number: int


@dataclass(frozen=True, slots=True)
class _TorchOp:
    """An operator by its path below ``torch.ops``. ``module``: where torch defines one of higher order."""

    path: str
    module: str = ""

    @classmethod
    def of(cls, op: Any) -> _TorchOp:
        higher = isinstance(op, HigherOrderOperator)
        named = cls(f"higher_order.{op.name()}", type(op).__module__) if higher else cls(str(op))
        if named.op() is not op:
            raise pickle.PicklingError(f"the graph calls {op}, which is not what torch.ops.{named.path} is")
        return named

    def op(self) -> Any:
        if self.module:
            importlib.import_module(self.module)  # where it is registered
        try:
            return attrgetter(self.path)(torch.ops)
        except AttributeError:
            raise pickle.UnpicklingError(
                f"the graph calls torch.ops.{self.path}, which is not registered in this process: "
                "import what registers it first"
            ) from None


@dataclass(frozen=True, slots=True)
class _Functional:
    """A function of ``torch.nn.functional`` that torch made within another and gave a name, such as ``max_pool2d``."""

    name: str


class _SavedNode(NamedTuple):
    op: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    name: str
    type: Any
    meta: dict[str, Any]


@dataclass(frozen=True, slots=True)
class SavedGraph:
    """The nodes of a graph. ``codegen``: what writes its source, where that is not torch.fx's own."""

    nodes: tuple[_SavedNode, ...]
    codegen: Any

    @classmethod
    def of(cls, graph: Graph) -> SavedGraph:
        """Write down a graph."""
        numbers = {node: number for number, node in enumerate(graph.nodes)}

        def saved(value: Any) -> Any:
            if isinstance(value, OpOverload | OpOverloadPacket | HigherOrderOperator):
                return _TorchOp.of(value)
            if "<locals>" in getattr(value, "__qualname__", ""):
                named = (name for name, function in vars(F).items() if function is value)
                return next(map(_Functional, named), value)
            return _Node(numbers[value]) if isinstance(value, Node) else value

        nodes = []
        for n in graph.nodes:
            args, kwargs = map_aggregate(n.args, saved), map_aggregate(n.kwargs, saved)
            nodes.append(_SavedNode(n.op, saved(n.target), args, kwargs, n.name, n.type, _annotations(n)))
        return cls(tuple(nodes), codegen_of(graph))

    def graph(self) -> Graph:
        """The graph again."""
        graph = Graph()
        made: list[Node] = []

        def restored(value: Any) -> Any:
            if isinstance(value, _Node):
                return made[value.number]
            if isinstance(value, _Functional):
                return getattr(F, value.name)
            return value.op() if isinstance(value, _TorchOp) else value

        for saved in self.nodes:
            args, kwargs = map_aggregate(saved.args, restored), map_aggregate(saved.kwargs, restored)
            node = new_node(graph, saved.op, restored(saved.target), args, kwargs, saved.name, saved.type)
            node.meta.update(saved.meta)
            made.append(node)
        if self.codegen is not None:
            graph.set_codegen(self.codegen)
        return graph


def import_lines(names: Mapping[str, Any]) -> str:
    """Imports of the globals that a graph's source reads, but for those of torch and of Python."""
    lines = []
    for name, value in names.items():
        if getattr(value, "__module__", "torch").partition(".")[0] not in ("torch", "builtins"):
            module, qualified = sys_importer.get_name(value)
            lines.append(f"from {module} import {qualified} as {name}\n")
    return "".join(lines)


def _annotations(node: Node) -> dict[str, Any]:
    """What is plain of ``node.meta``, no fake tensors; of modules the class by name, as in exported programs."""
    kept = {key: value for key, value in node.meta.items() if _is_plain(value)}
    stack = node.meta.get("nn_module_stack")
    if stack:
        kept["nn_module_stack"] = {
            key: (path, kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}")
            for key, (path, kind) in stack.items()
        }
    return kept


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | torch.dtype | Precision)
