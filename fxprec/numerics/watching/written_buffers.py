"""Which buffers a call of a model may write: of these a replay needs copies."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from fxprec.model.conversion import Conversion
from fxprec.passes.graph.annotations import notes, weight_path
from fxprec.passes.graph.subgraphs import every_graph


class WrittenBuffers:
    """Of one model. All of them, until its graphs say which; what ran outside of graphs may write any."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._state: tuple[int, int, bool] | None = None
        self._found: dict[str, tuple[Mapping[str, Tensor | None], str]] | None = None

    def now(self, conversion: Conversion) -> dict[str, Tensor]:
        """Path -> buffer, before a call."""
        state = conversion.captures, len(conversion.net), self._model.training
        if state != self._state:  # a graph that is not there yet may be captured
            self._state, self._found = state, None
            return dict(self._model.named_buffers())
        if self._found is None:
            self._found = self._places(None if conversion.net else _written(conversion))
        return {path: buffer for path, (held, name) in self._found.items() if (buffer := held[name]) is not None}

    def _places(self, paths: set[str] | None) -> dict[str, tuple[Mapping[str, Tensor | None], str]]:
        """Where these buffers are held, or all."""
        chosen = [path for path, _ in self._model.named_buffers() if paths is None or path in paths]
        split = ((path, path.rpartition(".")) for path in chosen)
        return {path: (self._model.get_submodule(module)._buffers, name) for path, (module, _, name) in split}


def _written(conversion: Conversion) -> set[str]:
    graphs = (graph for captured in conversion.captured for graph in every_graph(captured.gm))
    nodes = (node for graph in graphs for node in graph.graph.find_nodes(op="get_attr"))
    return {weight_path(node) for node in nodes if notes(node).kind == "buffer" and notes(node).written}
