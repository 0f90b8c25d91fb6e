"""The graphs that dynamo captures of one model, and torch.autocast below as a net.

A forward that symbolic tracing cannot take is captured at its first call. Every graph that dynamo finds is rewritten;
what it leaves to the interpreter runs under ``torch.autocast`` in the same dtype and is recorded. Capturing under
autocast also makes dynamo bake ``finfo(x.dtype)`` and ``dtype=x.dtype`` as the low dtype where it is one. Nothing is
silently FP32.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.fx import GraphModule, _symbolic_trace

from fxprec import dynamo
from fxprec.dynamo_fsdp import frames_of_shards
from fxprec.dynamo_graph import own_graph
from fxprec.errors import CaptureError
from fxprec.locks import CAPTURING

if TYPE_CHECKING:
    from fxprec.conversion import Conversion

__all__ = ["DynamicGraphs"]


class DynamicGraphs:
    """Dynamic capture for one conversion."""

    def __init__(self, conversion: Conversion) -> None:
        self._conversion = conversion
        self._capture: dynamo.DynamoCapture | None = None
        self._under_net = True
        self._lock = threading.Lock()

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the graphs for this call, capturing them if need be.

        Raises:
            CaptureError: the first call captured nothing at all.
        """
        conversion = self._conversion
        why = dynamo.why_not_now()
        if why is not None:
            return conversion.run_in_net(module, args, kwargs, why)
        if self._capture is None:
            with self._lock:
                self._capture = self._capture or dynamo.DynamoCapture(conversion.unbound_forward(), self)
        capture = self._capture
        try:
            with contextlib.ExitStack() as stack:
                if self._under_net:
                    stack.enter_context(conversion.net_context())
                if conversion.weights.come_and_go:
                    stack.enter_context(frames_of_shards(module))
                output = capture.call(module, *args, **kwargs)
        except RuntimeError as error:
            output = self._after(error, module, args, kwargs)
        if not conversion.graphs and not conversion.settled and not capture.exhausted:
            raise CaptureError(
                f"no graph of {conversion.name} was captured (is TORCHDYNAMO_DISABLE set, or dynamo disabled for its "
                f"forward?): {conversion.net or 'dynamo gave no reason'}. Nothing would have been rewritten; "
                f"torch.autocast({conversion.settings.device!r}) serves such a model"
            )
        return conversion.restored(output, args, kwargs) if conversion.net else output

    def rewritten(self, gm: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """dynamo's backend: rewrite one graph, and run it on dynamo's arguments with shadows in the weights' places."""
        conversion = self._conversion
        gm, arguments = own_graph(gm, inputs, conversion.tensor_names())
        program = conversion.rewrite(gm)
        conversion.captures += 1
        low = _picker([arguments.weights[name] for name in program.low])
        rest = _picker([*(arguments.weights[name] for name in program.plain), *arguments.inputs])
        # Nothing of the model: dynamo keeps what it runs with the user's code, which outlives it.
        weights, function, device = weakref.ref(conversion.weights), program.function, conversion.settings.device

        def run(*arguments: Any) -> Any:
            shadows = weights().read(low(arguments))  # type: ignore[union-attr]
            enabled = torch.is_autocast_enabled(device)
            torch.set_autocast_enabled(device, False)
            try:
                return function(*shadows, *rest(arguments))
            finally:
                torch.set_autocast_enabled(device, enabled)

        return run

    def in_net(self, where: str, why: str) -> None:
        self._conversion.in_net(where, why)

    def _after(self, error: RuntimeError, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What to do about an error of a call: perhaps it was none of the model's own."""
        conversion = self._conversion
        ours = dynamo.backend_error(error)
        if ours is not None:
            raise ours
        if dynamo.met_a_trace(error):  # of another thread; it comes before anything has run
            with CAPTURING:
                if not _symbolic_trace._is_fx_tracing_flag:  # else it is a trace of this thread's own
                    return self.run(module, args, kwargs)
        tracing = dynamo.failed_while_tracing(error)
        if conversion.graphs and not tracing:
            raise error
        if self._under_net:
            with contextlib.suppress(Exception):
                return self._without_net(module, args, kwargs)
        if not tracing:
            raise error
        # Nothing has run yet: the model's own error, or what only dynamo could not run.
        return conversion.run_in_net(module, args, kwargs, f"dynamo: {str(error).splitlines()[0]}")

    def _without_net(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What eager autocast itself cannot run (mixed dtypes in scatter_add) is captured whole, with autocast off."""
        conversion = self._conversion
        capture = dynamo.DynamoCapture(conversion.unbound_forward(), self, fullgraph=True)
        graphs, programs, captures = [*conversion.graphs], [*conversion.programs], conversion.captures
        try:
            output = capture.call(module, *args, **kwargs)
        except BaseException:
            conversion.graphs[:], conversion.programs[:], conversion.captures = graphs, programs, captures
            raise
        self._capture, self._under_net = capture, False
        conversion.net.clear()
        return output


def _picker(positions: Sequence[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """``itemgetter``, but for none or one position a tuple too."""
    if len(positions) > 1:
        return itemgetter(*positions)
    return lambda arguments: tuple([arguments[position] for position in positions])
