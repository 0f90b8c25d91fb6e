"""The rewritten graphs of a converted model, as users see them."""

from __future__ import annotations

from torch import nn
from torch.fx import GraphModule

from fxprec.errors import NotCapturedError
from fxprec.model.captured import Captured, form_of
from fxprec.model.conversion import Conversion, conversion_of, is_converted
from fxprec.passes.graph.annotations import notes
from fxprec.programs.graph_modules import made_presentable


def graph_module(module: nn.Module, method: str = "forward") -> GraphModule:
    """Return the rewritten graph as a GraphModule that reads the module's own parameters, and casts explicitly.

    It is that of the modes (train, eval) which the module and those in it are in now, of several the one captured last.
    It is called as the method is, and gives what the method gives, in its containers; what the method writes to Python
    objects it does not write. Arguments that are built into it (numbers, flags, which keys a dict has; with dynamo
    dtypes and sizes too) are checked: a call with others raises ``OtherCallError``.

    Args:
        module: a converted module.
        method: which one's graph, as named in ``convert(methods=...)``.

    Raises:
        NotCapturedError: nothing was captured yet for these modes (a forward that needs dynamo, without such a call).
        SeveralGraphsError: the method was captured in pieces: ``graphs`` gives them.
        ValueError: that method was not converted.
    """
    conversion = conversion_of(module)
    return _presented(conversion, module, conversion.active(module, method))


def graphs(module: nn.Module) -> tuple[GraphModule, ...]:
    """Return all rewritten graphs so far.

    A method has one for each set of flags (train and eval), argument pattern, and piece between breaks.

    Args:
        module: a converted model.

    Raises:
        NotCapturedError: it waits for its first call.
        ConversionError: it is not converted.
    """
    conversion = conversion_of(module)
    found = conversion.all_graphs(module)
    return tuple(_presented(conversion, module, captured) for captured in found)


def _presented(conversion: Conversion, module: nn.Module, captured: Captured) -> GraphModule:
    return made_presentable(captured.gm, module, conversion.restores, form_of(captured, conversion.entries()))


def rewritten_graphs(model: nn.Module) -> tuple[GraphModule, ...]:
    """Return the graphs of a converted module, or a rewritten GraphModule itself.

    Raises:
        NotCapturedError: the module waits for its first call.
        ConversionError: it is neither.
    """
    if isinstance(model, GraphModule) and not is_converted(model) and _is_rewritten(model):
        return (model,)
    return graphs(model)


def known_graphs(model: nn.Module) -> tuple[GraphModule, ...]:
    """Return the graphs as ``rewritten_graphs`` does; none for a model that ran outside of any.

    Raises:
        NotCapturedError, ConversionError: likewise.
    """
    try:
        return rewritten_graphs(model)
    except NotCapturedError:
        if not is_converted(model) or not conversion_of(model).ran_in_net:
            raise
        return ()


def captured_of(model: nn.Module) -> dict[GraphModule, Captured]:
    """Return graph -> what is known of its capture, for those of a converted module."""
    return {each.gm: each for each in conversion_of(model).captured} if is_converted(model) else {}


def _is_rewritten(gm: GraphModule) -> bool:
    """Return whether the passes went over this graph."""
    return any(notes(node).state("precision") for node in gm.graph.nodes)
