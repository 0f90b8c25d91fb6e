"""Which buffers a call of a model may write: of these a replay needs copies."""

from __future__ import annotations

from torch import Tensor, nn

from fxprec.model.conversion import Conversion
from fxprec.passes.canonicalize import every_graph
from fxprec.passes.graph.annotations import notes, weight_path


class WrittenBuffers:
    """Of one model. All of them, until its graphs say which; what ran outside of graphs may write any."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._seen: tuple[int, int, bool] | None = None
        self._found: dict[str, Tensor] = {}

    def now(self, conversion: Conversion) -> dict[str, Tensor]:
        """Path -> buffer, before a call."""
        state = conversion.captures, len(conversion.net), self._model.training
        everything = dict(self._model.named_buffers())
        if not everything:
            return {}
        if state != self._seen:  # a graph that is not there yet may be captured
            self._seen = state
            return everything
        if conversion.net:
            return everything
        names = self._names(conversion)
        return {path: buffer for path, buffer in everything.items() if path in names}

    def _names(self, conversion: Conversion) -> set[str]:
        graphs = (graph for captured in conversion.captured for graph in every_graph(captured.gm))
        nodes = (node for graph in graphs for node in graph.graph.find_nodes(op="get_attr"))
        return {weight_path(node) for node in nodes if notes(node).kind == "buffer" and notes(node).written}
