"""What others do with a graph module: each way takes it and its inputs, and gives something to call in its place."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.fx.passes.shape_prop import ShapeProp
from torch.fx.passes.split_module import split_module

__all__ = ["EXACT", "RUNNERS", "VALUES", "extracted"]


class PathTracer(fx.Tracer):
    """As that of torchvision's feature extractors: module calls are leaves or looked into, every node has a path."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = ""
        self.paths: dict[fx.Node, str] = {}

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        before, self.inside = self.inside, self.path_of_module(m)
        try:
            if self.is_leaf_module(m, self.inside):
                return self.create_proxy("call_module", self.inside, args, kwargs)
            return forward(*args, **kwargs)
        finally:
            self.inside = before

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *more: Any, **options: Any) -> fx.Proxy:
        proxy = super().create_proxy(kind, target, args, kwargs, *more, **options)
        self.paths[proxy.node] = f"{self.inside}.{proxy.node}".lstrip(".")
        return proxy


def extracted(gm: nn.Module, *wanted: str) -> fx.GraphModule:
    """The graph pruned to the nodes of these names, or to what it gives."""
    tracer = PathTracer()
    graph = tracer.trace(gm)
    result = fx.GraphModule(tracer.root, graph, "Extractor")
    if wanted:
        found = {path: node for node, path in tracer.paths.items()}
        result.graph.output_node().args = ({path: found[path] for path in wanted},)
    result.graph.eliminate_dead_code()
    result.recompile()
    return result


class Around(nn.Module):
    """A model of two inputs at the most, with the graph module deep inside."""

    def __init__(self, gm: nn.Module) -> None:
        super().__init__()
        self.deep = nn.ModuleDict({"inner": gm})
        self.train(gm.training)

    def forward(self, x, y=None):  # type: ignore[no-untyped-def]
        return self.deep["inner"](x) if y is None else self.deep["inner"](x, y)


def around(gm: nn.Module, *inputs: Any) -> Any:
    concrete = {} if len(inputs) > 1 else {"y": None}
    graph = fx.Tracer().trace(model := Around(gm), concrete)
    traced = fx.GraphModule(model, graph)
    return traced if len(inputs) > 1 else lambda *args: traced(*args, None)


def pickled(gm: Any) -> Any:
    return pickle.loads(pickle.dumps(gm))


def split(gm: fx.GraphModule) -> fx.GraphModule:
    calls = [node for node in gm.graph.nodes if node.op.startswith("call")]
    parts = {node: int(number >= len(calls) // 2) for number, node in enumerate(calls)}
    return split_module(gm, gm, lambda node: parts.get(node, 0))  # type: ignore[arg-type]


def with_shapes(gm: fx.GraphModule, *inputs: Any) -> fx.GraphModule:
    state = {name: value.clone() for name, value in gm.state_dict().items()}
    ShapeProp(gm).propagate(*inputs)
    gm.load_state_dict(state)
    return gm


#: Values, gradients and what is written to buffers: to the last bit.
EXACT: dict[str, Callable[..., Any]] = {
    "deepcopy": lambda gm, *_: copy.deepcopy(gm),
    "copy": lambda gm, *_: copy.copy(gm),
    "symbolic_trace": lambda gm, *_: fx.symbolic_trace(gm),
    "deepcopy of a trace": lambda gm, *_: copy.deepcopy(fx.symbolic_trace(gm)),
    "feature extractor": lambda gm, *_: extracted(gm),
    "traced in a model": around,
    "Transformer": lambda gm, *_: fx.Transformer(gm).transform(),
    "Interpreter": lambda gm, *_: lambda *args: fx.Interpreter(gm).run(*args),
    "split_module": lambda gm, *_: split(gm),
    "shape_prop": with_shapes,
}  # fmt: skip

#: The same of those that run it in ways of their own.
RUNNERS: dict[str, Callable[..., Any]] = {
    "torch.compile": lambda gm, *_: torch.compile(gm, backend="aot_eager"),
    "torch.export": lambda gm, *inputs: torch.export.export(gm, inputs).module(),
}

#: Values alone: torch.jit has derivatives of its own.
VALUES: dict[str, Callable[..., Any]] = {
    "jit.trace": lambda gm, *inputs: torch.jit.trace(gm, inputs, check_trace=False),
}
