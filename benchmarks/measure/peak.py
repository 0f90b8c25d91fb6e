"""How much memory one training step takes at most, and how much of that is gradients: exact on a CPU and on CUDA.

::

    with watched(step.model) as marks:
        segments = meter(device).measure(step, marks)
    peak_of(segments)

A step is cut into segments: to where the backward begins, from one parameter's gradient to the next, to the backward's
end, to the step's. Of each segment the most bytes that were allocated at one time are known, and those at its end. On
CUDA the caching allocator counts both. A CPU's allocator counts nothing; but torch.profiler notes each of its
allocations and frees, those of C++ autograd too, and their running sum is what is live. Neither sees what libraries
allocate without torch's allocator, nor a CPU kernel's buffers on its stack.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol, cast
from unittest import mock

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

__all__ = ["Marks", "Meter", "Peak", "Segment", "meter", "peak_of", "watched"]

Phase = Literal["forward", "backward", "update"]
_MARK: Final = "fxprec mark: "


@dataclass(frozen=True)
class Segment:
    """Part of a step; bytes are counted from what was allocated before the step.

    Attributes:
        end: what ends it: "backward" where that begins, "gradient" where one is there, "update" where the backward has
            ended, "end".
        gradient: bytes of the gradient that ends it, otherwise 0.
        peak: the most that was live in it.
        live: what was live at its end.
    """

    end: str
    gradient: int
    peak: int
    live: int


@dataclass(frozen=True)
class Peak:
    """Bytes of a step beyond those before it.

    Attributes:
        bytes: live at most at one time.
        phase: when that was. A step that is one CUDA graph has no phases: "forward".
        gradients: how much of it was gradients of parameters.
        kept: live where the backward begins: what the forward keeps for it.
    """

    bytes: int
    phase: Phase
    gradients: int
    kept: int


def peak_of(segments: Iterable[Segment]) -> Peak:
    """The peak of a step, from its segments in order."""
    phase: Phase = "forward"
    most, gradients, kept = Peak(0, "forward", 0, 0), 0, 0
    for segment in segments:
        if segment.peak > most.bytes:
            most = Peak(segment.peak, phase, gradients, 0)
        gradients += segment.gradient
        if segment.end == "backward":
            phase, kept = "backward", segment.live
        elif segment.end == "update":
            phase = "update"
    return Peak(most.bytes, most.phase, most.gradients, kept)


@dataclass
class Marks:
    """Where a step's segments end: calls ``at(end, gradient)``, which a meter sets while it measures."""

    at: Callable[[str, int], None] = field(default=lambda end, gradient: None)


@contextlib.contextmanager
def watched(model: nn.Module) -> Iterator[Marks]:
    """Marks at every ``backward()`` and at every parameter's gradient, as long as this lasts."""
    marks = Marks()
    torch_backward = Tensor.backward

    def backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        marks.at("backward", 0)
        torch_backward(loss, *args, **kwargs)
        marks.at("update", 0)

    def accumulated(parameter: Tensor) -> None:
        gradient = parameter.grad
        marks.at("gradient", 0 if gradient is None else gradient.untyped_storage().nbytes())

    hooks = [p.register_post_accumulate_grad_hook(accumulated) for p in model.parameters() if p.requires_grad]
    try:
        with mock.patch.object(Tensor, "backward", backward):
            yield marks
    finally:
        for hook in hooks:
            hook.remove()


class Meter(Protocol):
    """Either of the two below."""

    def measure(self, step: Callable[[], object], marks: Marks) -> list[Segment]:
        """Run a step that is warm, and whose gradients of the step before are freed."""
        ...


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Garbage of others is gone, and none is collected meanwhile: its bytes would count as freed by the step."""
    gc.collect()
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class HostMeter:
    """By the allocations and frees that torch.profiler notes, each on its own."""

    def measure(self, step: Callable[[], object], marks: Marks) -> list[Segment]:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch 2.13's prints two lines at every start

        def at(end: str, gradient: int) -> None:
            with record_function(f"{_MARK}{end} {gradient}"):
                pass

        with _no_collection(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            marks.at = at
            try:
                step()
            finally:
                marks.at = Marks().at
            at("end", 0)
        results = cast(Any, profiler.profiler).kineto_results.events()
        return _folded(sorted(results, key=lambda event: event.start_ns()))


def _folded(events: Iterable[Any]) -> list[Segment]:
    """Events in the order of their time: memory ("[memory]", signed bytes) and marks."""
    segments, live, peak = [], 0, 0
    for event in events:
        name = event.name()
        if name == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
        elif found := re.fullmatch(rf"{_MARK}(\w+) (\d+)", name):
            segments.append(Segment(found[1], int(found[2]), peak, live))
            peak = live
    return segments


class DeviceMeter:
    """By CUDA's caching allocator; it counts as the host queues, so nothing has to wait."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def measure(self, step: Callable[[], object], marks: Marks) -> list[Segment]:
        gc.collect()
        segments: list[Segment] = []
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)

        def at(end: str, gradient: int) -> None:
            peak = torch.cuda.max_memory_allocated(self._device) - before
            segments.append(Segment(end, gradient, peak, torch.cuda.memory_allocated(self._device) - before))
            torch.cuda.reset_peak_memory_stats(self._device)

        marks.at = at
        try:
            step()
        finally:
            marks.at = Marks().at
        at("end", 0)
        return segments


def meter(device: torch.device) -> Meter:
    """That of a device."""
    return DeviceMeter(device) if device.type == "cuda" else HostMeter()


def graph_pools(device: torch.device) -> int:
    """Bytes that CUDA graphs keep for themselves, live or not: an allocator's statistics leave free ones out."""
    if device.type != "cuda":
        return 0
    found = 0
    for segment in torch.cuda.memory_snapshot():
        if tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0):
            found += segment["total_size"] - segment["allocated_size"]
    return found
