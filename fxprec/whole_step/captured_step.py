"""Make one call one training step, on CUDA by one graph for each shape of a batch: ``capture_step``.

No other file captures CUDA graphs of PyTorch.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import operator
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fxprec.capture.untouched import RandomState
from fxprec.errors import CaptureError
from fxprec.scaling.loss_scaler import LossScaler
from fxprec.torch_internals import end_allocation, set_called
from fxprec.whole_step.fixed import Fixed, Rates, ShadowLinks, attributes_of
from fxprec.whole_step.iteration import Batch, Iteration, refuse_open_iteration
from fxprec.whole_step.put_back import Watched, put_back, recorded
from fxprec.whole_step.refusals import (
    buffers_in_place,
    check_types,
    check_values,
    device_of,
    explained,
    refuse_ungraphable,
)

_T = TypeVar("_T")


def recorder_of(device: torch.device) -> CudaRecorder | None:
    """Return the recorder of a device; None where it has no graphs, and steps run as they are."""
    return CudaRecorder(device) if device.type == "cuda" else None


@functools.cache
def _stream(index: int) -> torch.cuda.Stream:
    # One for all captured steps of a device: the backward of a shadow runs on the stream where the shadow was made.
    return torch.cuda.Stream(torch.device("cuda", index))


class CudaRecorder:
    """Recorder of one device's graphs, which share one memory pool: no two may run at the same time.

    Attributes:
        device: where the work runs.
        stream: on which it is captured.
        generators: names of the random number generators that a replay draws from anew.

    Sources: PyTorch, "CUDA semantics", CUDA graphs; NVIDIA, CUDA C++ Programming Guide, 3.2.8.7.
    """

    generators = frozenset({"torch.cuda"})

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self.stream = _stream(index)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs = weakref.WeakSet[torch.cuda.CUDAGraph]()  # that live, and use it

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Queue work on ``stream``, after what was queued before; what comes later waits for it."""
        outside = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(outside)
        try:
            with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
                yield
        finally:
            # Also after an error: the caller's stream must not overtake what was queued.
            outside.wait_stream(self.stream)

    @contextmanager
    def strict(self) -> Iterator[None]:
        """Raise a RuntimeError where something waits for the device."""
        before = torch.cuda.get_sync_debug_mode()
        _debug_syncs("error")
        try:
            yield
        finally:
            _debug_syncs(before)

    def record(self, body: Callable[[], _T]) -> tuple[torch.cuda.CUDAGraph, _T]:
        """Capture what ``body`` launches. Nothing runs on the device."""
        graph, made, failed = torch.cuda.CUDAGraph(), list[_T](), list[BaseException]()
        # A collection in the middle might free what belongs to another stream or graph.
        gc.collect()
        collecting = gc.isenabled()
        gc.disable()
        if not self._graphs:  # torch takes no pool again whose graphs are gone while something of it is still in use
            self._pool = torch.cuda.graph_pool_handle()
        try:
            # Other threads (a data loader's) may go on: only this one is kept from what would break the capture.
            with torch.cuda.graph(graph, pool=self._pool, stream=self.stream, capture_error_mode="thread_local"):
                try:
                    made.append(body())
                except BaseException as error:
                    failed.append(error)
                    raise
        except BaseException as error:
            self._clean_up()
            if failed and error is not failed[0]:  # the end of a capture that failed raises too, and says less
                raise failed[0] from None
            raise
        finally:
            if collecting:
                gc.enable()
        self._graphs.add(graph)
        return graph, made[0]

    def _clean_up(self) -> None:
        """Do what the end of a capture leaves undone when CUDA declares it invalid."""
        with contextlib.suppress(RuntimeError):  # where it did come to it
            end_allocation(self.device.index, self._pool)
        self._pool = torch.cuda.graph_pool_handle()
        # The generator may still think that it is captured, and would refuse every later draw.
        generator = torch.cuda.default_generators[self.device.index]
        try:
            torch.rand((), device=self.device)
        except RuntimeError:  # it takes itself for captured
            generator.graphsafe_set_state(generator.clone_state())


def _debug_syncs(mode: int | str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode(mode)


_training = operator.attrgetter("training")

_log = logging.getLogger("fxprec")

#: Eager steps before a capture, as PyTorch advises: kernels are compiled and libraries choose algorithms in them.
_WARM_UP: Final = 3
#: Captures one after the other, each for a change and of use for one step only, before that is an error.
_IN_VAIN: Final = 3


@dataclass(slots=True, eq=False)
class _Graph:
    """Captured graph of a step. ``report``: loss and perhaps the scaler's flag, in FP32, written by each replay."""

    recording: torch.cuda.CUDAGraph
    batch: Batch
    report: Tensor
    fixed: Fixed
    rates: Rates
    shadows: ShadowLinks
    watched: Watched
    replays: int = 0
    in_vain: int = 0


class CapturedStep:
    """Training step as a call; see ``capture_step``. Not for several threads or streams at once."""

    def __init__(self, iteration: Iteration, example: Batch, max_graphs: int) -> None:
        self._iteration, self._most = iteration, max_graphs
        self._recorder = recorder_of(device_of(iteration))
        self._graphs: dict[Hashable, _Graph] = {}
        self._modules = _modules_of(iteration)
        if self._recorder is not None:
            self._graph_of(example, self._recorder)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Take one step on a batch, given as ``example_batch`` was. Nothing waits for the device.

        Returns:
            The loss, 0-dim FP32, detached, of memory of its own. Gradients are None afterwards.

        Raises:
            TypeError, ValueError: a batch that is none, or that ``accumulate`` does not divide.
            RuntimeError: within an iteration of the scaler. LossScaleFloorError: as ``LossScaler.update``.
            CaptureError: a batch of another shape, or after a change, whose step cannot be captured.
        """
        batch = Batch.of(args, kwargs, self._iteration.parts)
        refuse_open_iteration(self._iteration.scaler)
        if self._recorder is None:
            return self._iteration.run(batch)[0]
        # Watchers read what came of older steps first: a replay overwrites what those would run again on.
        for watcher in self._iteration.watchers():
            watcher.begin()
        graph = self._graph_of(batch, self._recorder)
        graph.batch.fill(batch)
        graph.rates.send()
        return self._replayed(graph)

    @property
    def graphs(self) -> tuple[str, ...]:
        """Shapes and dtypes of the batch of each captured graph. Empty on a CPU, where steps run eagerly."""
        return tuple(graph.batch.described() for graph in self._graphs.values())

    def __repr__(self) -> str:
        where = "no graph: the device has none" if self._recorder is None else f"graphs: {'; '.join(self.graphs)}"
        return f"CapturedStep({type(self._iteration.model).__name__}, {where})"

    def __reduce__(self) -> Any:
        raise TypeError("a captured step cannot be copied or pickled: capture_step(...) the copy")

    def _replayed(self, graph: _Graph) -> Tensor:
        optimizer, scaler = self._iteration.optimizer, self._iteration.scaler
        self._iteration.drop_gradients()
        graph.shadows.before()
        # Only our scaler has Python state that a replay moves; torch's has all of it in tensors of the graph.
        ours = scaler if isinstance(scaler, LossScaler) and scaler.is_enabled() else None
        if ours is not None:
            ours._before_replay(optimizer)
        kept = graph.watched.kept(graph.batch)
        graph.recording.replay()
        graph.replays += 1
        # What Python would have done in an eager step.
        graph.shadows.after()
        set_called(optimizer, True)  # of which torch's lr schedulers make sure
        # The next replay overwrites the report, while the caller may still hold the loss.
        report = graph.report.clone()
        graph.watched.replayed(kept)
        if ours is not None:
            ours._after_replay(optimizer, report[1])
        return report[0]

    def _graph_of(self, batch: Batch, recorder: CudaRecorder) -> _Graph:
        """Return the graph that serves a batch as things are now, captured if need be."""
        key = batch.key(), *map(_training, self._modules)
        graph, in_vain = self._graphs.get(key), 0
        if graph is not None:
            change = graph.fixed.changed()
            if change is None:
                return graph
            in_vain = graph.in_vain + 1 if graph.replays < 2 else 0
            # A value that changes at every step would capture for ever, each capture as slow as many steps.
            if in_vain >= _IN_VAIN:
                raise CaptureError(
                    f"{change}: it changed before each of the last {in_vain + 1} steps, and each time the step had to "
                    "be captured again. Only learning rates may change from step to step (OneCycleLR: "
                    "cycle_momentum=False); else use the usual loop"
                )
            _log.info("capture_step: captured again, since this changed: %s", change)
            del self._graphs[key], graph  # its memory goes to the new one
        elif len(self._graphs) >= self._most:
            raise CaptureError(
                f"a batch of {batch.described()}, and there are {len(self._graphs)} graphs already, for "
                f"{'; '.join(self.graphs)}: pad batches to a few shapes, or capture_step(..., max_graphs=...)"
            )
        try:
            graph = self._captured(batch, recorder)
        except BaseException:
            self._graphs.clear()  # a capture that fails may take the generator's state from those that were there
            raise
        # A forward may have replaced submodules (a conversion was refused, say): graphs of the old ones are of no use.
        if (modules := _modules_of(self._iteration)) != self._modules:
            self._graphs.clear()
            self._modules = modules
            key = batch.key(), *map(_training, modules)
        graph.in_vain = in_vain
        self._graphs[key] = graph
        return graph

    def _captured(self, batch: Batch, recorder: CudaRecorder) -> _Graph:
        iteration = self._iteration
        iteration.look()
        # Asked at each capture, not only at the first: hooks and optimizer options may have changed.
        refuse_ungraphable(iteration)
        rates = Rates(iteration.optimizer, recorder.device)
        static = batch.static(recorder.device)
        with recorder.aside(), put_back(iteration, recorder.device):
            for store in iteration.stores():
                if not store.made_on(recorder.stream):
                    store.clear()  # their edges would be walked on the stream where they were made
                store.mark_stale()  # what another optimizer wrote is to be copied too
            with rates.in_groups():
                self._warm_up(static, recorder)
                random = RandomState()
                with explained("the step"), rates.capturable(), buffers_in_place(iteration):
                    recording, (report, seen) = recorder.record(lambda: _reported(iteration, static))
            # Draws of Python or NumPy are fixed in a graph: every replay would repeat them.
            moved = random.restore(expected=recorder.generators)
            if moved is not None:
                raise CaptureError(
                    f"the step draws random numbers from {moved} on the host: a graph would repeat them for ever. Draw "
                    f"them with torch on '{recorder.device}', or before the step and pass them in with the batch"
                )
            held = attributes_of(iteration.roots())  # also what a forward caches, which goes when all is put back
        shadows = ShadowLinks(iteration)
        # Taken when all is put back: the graph must find the state as the first step will.
        fixed, watched = Fixed(iteration, rates, shadows, held), Watched(iteration, seen)
        return _Graph(recording, static, report, fixed, rates, shadows, watched)

    def _warm_up(self, batch: Batch, recorder: CudaRecorder) -> None:
        for number in range(_WARM_UP - 1):
            with recorded(self._iteration):
                self._iteration.run(batch, zeroed=number == 0)
        # The last warm-up step is strict: what waits for the device is named with its line, before the capture fails on
        # it.
        with explained("the step"), recorder.strict():
            _reported(self._iteration, batch)


def _modules_of(iteration: Iteration) -> list[nn.Module]:
    return [module for root in iteration.roots() for module in root.modules()]


def _reported(iteration: Iteration, batch: Batch) -> tuple[Tensor, list[object]]:
    with recorded(iteration) as seen:
        loss, found = iteration.run(batch)
    return torch.stack([loss] if found is None else [loss, found]), seen


def capture_step(
    model: nn.Module,
    loss_fn: Callable[..., Any] | None,
    optimizer: Optimizer,
    scaler: torch.amp.GradScaler | None,
    example_batch: Sequence[Any] | Mapping[str, Any],
    accumulate: int = 1,
    *,
    max_norm: float | None = None,
    max_graphs: int = 16,
) -> CapturedStep:
    """Capture a whole training step as one call: ``loss = step(x, y)``.

    Forward, loss, backward, unscale, clip, update, shadow write and scale update. On CUDA they are one CUDA graph for
    each shape of a batch, replayed without Python; elsewhere the same calls, one after the other. It changes no value:
    the first call is the first step. State dicts of model, optimizer, scaler and schedulers are those of the usual
    loop, before and after.

    Args:
        model: in training mode, converted or not, on one device.
        loss_fn: the loss is ``loss_fn(model(*batch[:-1]), batch[-1])``; of a batch of keywords
            ``loss_fn(model(**batch))``. None: the model returns it. A function or a module. Its Python code, that of
            the model and of hooks runs while the step is captured, not with every step: what one step leaves for the
            next (a hidden state, a running mean) has to be a buffer, written in place.
        optimizer: on CUDA one of fxprec.optim, a fused Adam, AdamW or SGD of torch's, or one with ``capturable=True``
            (without a loss scaler). ``lr`` may change from step to step, as schedulers do; another change captures
            again.
        scaler: that of ``convert``, a LossScaler or GradScaler; None: no scaling. A step that overflows is skipped on
            the device.
        example_batch: a tuple of positional or a dict of keyword arguments of the calls: its shapes and dtypes, and
            numbers that are good for a step. What is no tensor is a constant.
        accumulate: cut each batch along dimension 0 into that many micro-batches; their losses are averaged, and
            weights and shadows stay as they are in between.
        max_norm: clip the global norm of the gradients to this, as ``clip_grad_norm_`` does. An optimizer of
            fxprec.optim does it by its own ``max_norm``, with less traffic.
        max_graphs: captures of other shapes, modes (train, eval) and constants; they share their memory.

    Raises:
        TypeError, ValueError: arguments that are none, or contradict each other.
        CaptureError: several processes or devices; an optimizer or a line of code that a graph cannot hold. Nothing
            was changed then, and the usual loop works.

    Sources: PyTorch, "CUDA semantics", CUDA graphs; torch.cuda.make_graphed_callables.
    """
    scaler = LossScaler(enabled=False) if scaler is None else scaler
    iteration = Iteration(model, loss_fn, optimizer, scaler, accumulate, max_norm)
    check_types(iteration)
    iteration.look()
    check_values(iteration)
    if isinstance(example_batch, Mapping):
        args, kwargs = (), example_batch
    elif isinstance(example_batch, tuple | list):
        args, kwargs = tuple(example_batch), {}
    else:
        raise TypeError(
            f"example_batch must be a tuple of positional or a dict of keyword arguments, not "
            f"{type(example_batch).__name__}: write (x, y)"
        )
    if isinstance(max_graphs, bool) or not isinstance(max_graphs, int) or max_graphs < 1:
        raise ValueError(f"max_graphs must be a whole number of at least 1, not {max_graphs!r}")
    batch = Batch.of(args, kwargs, accumulate)
    refuse_open_iteration(scaler)
    return CapturedStep(iteration, batch, max_graphs)
