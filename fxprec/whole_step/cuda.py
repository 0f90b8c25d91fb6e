"""Capture CUDA graphs of PyTorch; no other file does."""

from __future__ import annotations

import contextlib
import functools
import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from fxprec.torch_internals import end_allocation

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
