"""Dynamic capture: torch.compile's bytecode analysis with our pipeline as its backend, and torch.autocast below as a net.

A forward that symbolic tracing cannot take is captured at its first call. Every graph that dynamo finds is rewritten;
what it leaves to the interpreter (between graph breaks, in a frame that it skips, beyond its recompile limit, under a
user's dispatch mode) runs under ``torch.autocast`` in the same dtype and is recorded. Nothing is silently FP32.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.fx import GraphModule

from fxprec.passes.ir import clean_path

__all__ = ["DynamoCapture", "Recorder", "modes_active"]

#: Patched around each compilation, never around a call (that costs 23 us).
_CONFIG = {
    "recompile_limit": 64,
    "accumulated_recompile_limit": 1024,
    "skip_nnmodule_hook_guards": False,
    "optimize_ddp": False,
    "allow_rnn": True,
}


#: Skipped frames that hold no tensor work: torch's own, and those without tensors.
_HARMLESS = ("skipfiles", "no tensor-related objects", "namedtuple")


class Recorder(Protocol):
    """Where a capture reports to."""

    def rewritten(self, gm: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Rewrite one captured graph; return what runs it with dynamo's arguments."""
        ...

    def in_net(self, where: str, why: str) -> None:
        """Code outside our graphs, and the reason."""
        ...


class DynamoCapture:
    """One function under dynamo with a code object, and so a cache and a recompile limit, of its own.

    Args:
        function: the original forward, unbound: called as ``function(module, *args, **kwargs)``.
        recorder: receives the graphs and what runs outside them.
        fullgraph: refuse graph breaks.
    """

    def __init__(self, function: Callable[..., Any], recorder: Recorder, *, fullgraph: bool = False) -> None:
        import torch._dynamo

        self._own = own_code(function)
        self._recorder = recorder
        context = torch._dynamo.optimize(self._backend, nopython=fullgraph)
        context.callback = _Compiling(context.callback, recorder)  # type: ignore[attr-defined]
        self.call = context(self._own)

    def _backend(self, gm: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        reason = getattr(gm, "compile_subgraph_reason", None)
        if reason is not None and reason.graph_break:
            where = reason.user_stack[-1] if reason.user_stack else None
            self._recorder.in_net(
                f"{where.filename}:{where.lineno} in {where.name}" if where else "?",
                "graph break: " + str(reason.reason).strip().split("\n")[0],
            )
        return self._recorder.rewritten(own_graph(gm), inputs)


class _Compiling:
    """dynamo's compile callback, with our configuration around it, and an ear for frames that it skips."""

    def __init__(self, inner: Any, recorder: Recorder) -> None:
        self._inner = inner
        self._recorder = recorder
        self._torchdynamo_orig_backend = inner  # dynamo's cache compares backends through this name
        self._patched = torch._dynamo.config.patch(  # type: ignore[attr-defined]
            {key: value for key, value in _CONFIG.items() if hasattr(torch._dynamo.config, key)}
        )

    def __call__(self, frame: Any, *args: Any, **kwargs: Any) -> Any:
        with self._patched:
            result = self._inner(frame, *args, **kwargs)
        skipped = getattr(result, "skip_reason", None)
        code = frame.f_code
        if skipped and not any(harmless in skipped for harmless in _HARMLESS) and "<" not in code.co_filename:
            self._recorder.in_net(f"{code.co_filename}:{code.co_firstlineno} in {code.co_name}", skipped)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def own_code(function: Callable[..., Any]) -> types.FunctionType:
    """A twin of ``function`` with a code object of its own: dynamo counts recompilations per code object."""
    if not isinstance(function, types.FunctionType):

        def call(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        function = call
    twin = types.FunctionType(
        function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin


def own_graph(gm: GraphModule) -> GraphModule:
    """A copy to rewrite: dynamo still reads the placeholders of the graph that it handed over."""
    graph = torch.fx.Graph()
    values: dict[torch.fx.Node, torch.fx.Node] = {}
    graph.graph_copy(gm.graph, values)
    output = gm.graph.output_node()
    graph.output(torch.fx.node.map_arg(output.args[0], lambda node: values[node]))
    return GraphModule(gm, graph)


def failed_while_tracing(error: Exception) -> bool:
    """Whether an op failed on dynamo's fake tensors (nothing has run yet) rather than in a graph or in the net."""
    return isinstance(error, torch._dynamo.exc.TorchDynamoException)  # type: ignore[attr-defined]


def modes_active() -> str | None:
    """Why dynamo must not be entered now: it would skip the frame, for good. None where it may be."""
    if torch._C._len_torch_dispatch_stack() > 0:
        from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

        for mode in _get_current_dispatch_mode_stack():
            if not getattr(type(mode), "ignore_compile_internals", lambda: False)():
                return f"under the dispatch mode {type(mode).__name__}, in which dynamo runs no compiled code"
    if torch._C._functorch.maybe_current_level() is not None:
        return "under a torch.func transform"
    return None


def name_weights(
    gm: GraphModule, inputs: list[Any], names: dict[int, tuple[str, str]]
) -> tuple[dict[str, int], list[int]]:
    """Turn the placeholders that dynamo made for parameters and buffers back into get_attr nodes of their names.

    Args:
        gm: dynamo's graph; its weights are placeholders.
        inputs: example inputs, one a placeholder.
        names: id of a tensor -> (dotted name, "parameter" or "buffer").

    Returns:
        dotted name -> position among dynamo's arguments, and the positions of the true inputs, which stay placeholders.
    """
    weights: dict[str, int] = {}
    rest: list[int] = []
    prefix = ""
    for position, (node, value) in enumerate(zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True)):
        known = names.get(id(value)) if isinstance(value, Tensor) else None
        if isinstance(value, Tensor):
            node.meta["dtype"] = value.dtype
        if known is None:
            rest.append(position)
            continue
        name, kind = known
        prefix = prefix or _frame_prefix(node, name)
        with gm.graph.inserting_before(node):
            weight = gm.graph.create_node("get_attr", name, name="p_" + name.replace(".", "_"))
        weight.meta = {**node.meta, "kind": kind, "ndim": value.dim()}
        attach(gm, name, value)
        node.replace_all_uses_with(weight)
        gm.graph.erase_node(node)
        weights[name] = position
    gm.meta["prefix"] = prefix
    return weights, rest


def _frame_prefix(node: Any, name: str) -> str:
    """Where the module of an inner frame sits in the model, told from one of its weights' two names."""
    source = getattr(getattr(node.meta.get("grapharg"), "source", None), "name", None)
    text = source() if callable(source) else source
    if not isinstance(text, str):
        return ""
    local = clean_path(text.replace("._parameters['", "._modules['").replace("._buffers['", "._modules['"))
    return name.removesuffix(local).strip(".") if local and name.endswith(local) else ""


def attach(root: torch.nn.Module, name: str, value: Tensor) -> None:
    """Make ``root.a.b.weight`` be ``value`` itself, with bare modules on the way."""
    *path, leaf = name.split(".")
    for part in path:
        if part not in root._modules:
            root._modules[part] = torch.nn.Module()
        root = root._modules[part]  # type: ignore[assignment]
    kind = root._parameters if isinstance(value, torch.nn.Parameter) else root._buffers
    kind[leaf] = value  # type: ignore[assignment]


def relocate(gm: GraphModule) -> None:
    """Name modules from the model's root in every node's stack, and take shapes over as ``meta["val"]``."""
    prefix = gm.meta.get("prefix", "")
    for node in gm.graph.nodes:
        if "example_value" in node.meta:
            node.meta["val"] = node.meta["example_value"]
        stack = node.meta.get("nn_module_stack")
        if stack:
            paths = [(".".join(filter(None, (prefix, clean_path(str(path))))), kind) for path, kind in stack.values()]
            node.meta["nn_module_stack"] = {path: (path, kind) for path, kind in paths}
