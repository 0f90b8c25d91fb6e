"""Run the graphs of a converted model node by node, where its calls run them: an observer knows which node computes.

::

    with node_by_node(model, look):        # look(node, run) -> run()
        model(x)                           # the same kernels on the same values, one node after another
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.node import map_arg

from fxprec.kernels.rows.run.region import FusedRegion
from fxprec.model.module import conversion_of
from fxprec.passes.graph.retrace import plain
from fxprec.programs.program import Program, without_autocast


class NodeOf(NamedTuple):
    """Node of a model's graphs.

    Attributes:
        graph: the position of its graph among ``fxprec.graphs(model)``.
        name: "body.relu" in the body of a higher-order op.
        node: of the program that runs; its annotations are those of the graph that users see.
        inputs: the values of its ``inputs_of``.
    """

    graph: int
    name: str
    node: Node
    inputs: tuple[Any, ...] = ()


#: Runs a node by calling the function, and gives what that gives.
Look = Callable[[NodeOf, Callable[[], Any]], Any]
#: Told before a program runs: path in the model -> shadow, of its low weights.
Begin = Callable[[dict[str, Tensor]], None]


def inputs_of(node: Node) -> list[Node]:
    """Return the nodes among a call's arguments in their order, each as often as it is there.

    No pass changes it, but for casts that it puts in between: so a position means the same in every form of a graph.
    """
    found: list[Node] = []
    map_arg((node.args, node.kwargs), found.append)
    return found


@contextlib.contextmanager
def node_by_node(model: nn.Module, look: Look, begin: Begin, opened: bool = False) -> Iterator[None]:
    """Run a converted model's graphs node by node in the block: in calls of this thread, if captured before.

    Compiled graphs (``executor="inductor"``) run op by op as well. ``opened``: fused regions, too, whose kernels then
    do not run: their nodes have the names that they would have without fusion.
    """
    conversion = conversion_of(model)
    programs = [captured.program for captured in conversion.captured]
    kept = [program.function for program in programs]
    for graph, program in enumerate(programs):
        run = without_autocast(_in_steps(program, graph, look, begin, opened), conversion.settings.device)
        object.__setattr__(program, "function", _in_this_thread(run, program.function))
    try:
        yield
    finally:
        for program, function in zip(programs, kept, strict=True):
            object.__setattr__(program, "function", function)


def _in_steps(program: Program, graph: int, look: Look, begin: Begin, opened: bool) -> Callable[..., Any]:
    interpreter = NodeByNode(program.gm, look, graph, opened=opened)

    def run(*args: Any) -> Any:
        begin(dict(zip(program.low, args, strict=False)))
        return interpreter.run(*args)

    return run


def _in_this_thread(run: Callable[..., Any], otherwise: Callable[..., Any]) -> Callable[..., Any]:
    own = threading.get_ident()
    return lambda *args: (run if threading.get_ident() == own else otherwise)(*args)


class NodeByNode(Interpreter):
    """Interpreter of a graph, and of the bodies of higher-order ops in it whose calls are plain."""

    def __init__(self, gm: GraphModule, look: Look, graph: int = 0, prefix: str = "", opened: bool = False) -> None:
        super().__init__(gm, garbage_collect_values=True)
        self.extra_traceback = False
        self._look, self._graph, self._prefix, self._opened = look, graph, prefix, opened

    def run_node(self, n: Node) -> Any:
        if n.op == "output":
            return super().run_node(n)
        run = super().run_node
        inputs = tuple(self.env[each] for each in inputs_of(n))
        return self._look(NodeOf(self._graph, self._prefix + n.name, n, inputs), lambda: run(n))

    def output(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return plain(super().output(target, args, kwargs))  # a loss may write to a dict that the model gives

    def get_attr(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        value = super().get_attr(target, args, kwargs)
        return self._body(target, value) if isinstance(value, GraphModule) else value

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        region = self.fetch_attr(target)
        if not (self._opened and isinstance(region, FusedRegion)):
            return super().call_module(target, args, kwargs)
        gm = region.graph_module
        reads = len(gm.graph.find_nodes(op="placeholder"))  # a last argument is seeds, for the kernel
        results = NodeByNode(gm, self._look, self._graph, self._prefix).run(*args[:reads])
        return results[0] if region.single else results

    def _body(self, name: str, body: GraphModule) -> GraphModule:
        """Return a graph of one call, which runs the body node by node, however a higher-order op runs it."""
        graph = Graph()
        inputs = [graph.placeholder(str(node.target)) for node in body.graph.find_nodes(op="placeholder")]
        graph.output(graph.call_module("body", tuple(inputs)))
        gm = GraphModule(
            {"body": _Runs(NodeByNode(body, self._look, self._graph, f"{self._prefix}{name}.", self._opened))}, graph
        )
        gm.meta = body.meta
        return gm


class _Runs(nn.Module):
    def __init__(self, interpreter: Interpreter) -> None:
        super().__init__()
        self._interpreter = interpreter

    def forward(self, *args: Any) -> Any:
        return self._interpreter.run(*args)
