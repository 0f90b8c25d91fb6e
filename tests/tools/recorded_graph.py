"""A CUDA graph without CUDA: the operators that a function dispatches on a CPU, to be run again on the same tensors.

What it shares with the real one: a replay runs no Python of the function, so numbers, decisions and addresses are those
of the recording; what waits for the device raises; random numbers are drawn anew. After the recording every tensor that
it made holds NaN until the first replay, as nothing has run on a device by then.

What it cannot show: streams, memory pools, copies between host and device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["RecordedGraphs"]

#: Operators that give the host a number, or a tensor whose shape depends on values.
_HOST_READS = ("_local_scalar_dense", "equal", "is_nonzero", "masked_select", "nonzero", "_unique2", "unique_dim")

#: Where the sources ask whether a read waits, and whether a graph is being captured.
_ASKED = {
    "fxprec.optim.one_pass.reading_waits": "aside",
    "fxprec.optim.gradient_check.reading_waits": "aside",
    "fxprec.numerics.watching.verdicts.reading_waits": "aside",
    "fxprec.scaling.loss_scaler.capturing": "record",
    "fxprec.scaling.scale.capturing": "record",
    "fxprec.scaling.unscale.capturing": "record",
}


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class _NoHostReads(TorchDispatchMode):
    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.removeprefix("aten::") in _HOST_READS:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)


@dataclass
class _Call:
    func: Any
    args: Any
    kwargs: Any
    made: list[tuple[int, Tensor]]  # place among the results, and the tensor, where it has memory of its own


class _Recorder(_NoHostReads):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map(lambda x: x, (args, kwargs))  # lists of tensors may change later
        given = {_storage(x) for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        results = func(*args, **kwargs)
        made = [(i, x) for i, x in enumerate(pytree.tree_leaves(results)) if isinstance(x, Tensor)]
        self.calls.append(_Call(func, args, kwargs, [(i, x) for i, x in made if _storage(x) not in given]))
        return results


class _Recording:
    def __init__(self, calls: list[_Call]) -> None:
        self._calls = calls
        with torch.no_grad():
            for call in calls:
                for _, tensor in call.made:
                    if tensor.is_floating_point():
                        tensor.fill_(math.nan)

        given = [x for call in calls for x in pytree.tree_leaves((call.args, call.kwargs)) if isinstance(x, Tensor)]
        self._seen = [*{id(tensor): tensor for tensor in given}.values()]

    def replay(self) -> None:
        versions = [tensor._version for tensor in self._seen]
        with torch.no_grad():
            for call in self._calls:
                results = pytree.tree_leaves(call.func(*call.args, **call.kwargs))
                for place, tensor in call.made:
                    tensor.copy_(results[place])
        # A kernel bumps no version: whoever has to know of a replay has to be told.
        torch._C._autograd._unsafe_set_version_counter(tuple(self._seen), tuple(versions))


class RecordedGraphs:
    """Stands for ``fxprec.whole_step.captured_step.CudaRecorder``; ``recordings``: how many it made."""

    device, stream, generators = torch.device("cpu"), None, frozenset({"torch"})

    def __init__(self) -> None:
        self.recordings = 0

    @contextmanager
    def aside(self) -> Iterator[None]:
        with _asked("aside"):
            yield

    @contextmanager
    def strict(self) -> Iterator[None]:
        with _NoHostReads():
            yield

    def record(self, body: Callable[[], Any]) -> tuple[_Recording, Any]:
        recorder = _Recorder()
        with recorder, _asked("record"), _torchs_check_of_optimizers():
            made = body()
        self.recordings += 1
        return _Recording(recorder.calls), made


@contextmanager
def _asked(when: str) -> Iterator[None]:
    with ExitStack() as stack:
        for name, place in _ASKED.items():
            if place == when:
                stack.enter_context(mock.patch(name, lambda device: True))
        yield


def _torchs_check_of_optimizers() -> Any:
    """Torch's Adam refuses to be captured without ``capturable=True``; the name of the check depends on the version."""
    names = ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check")
    name = next(name for name in names if hasattr(torch.optim.Optimizer, name))

    def check(optimizer: torch.optim.Optimizer) -> None:
        if not all(group["capturable"] for group in optimizer.param_groups):
            raise RuntimeError("Attempting CUDA graph capture of step() but param_groups' capturable is False.")

    return mock.patch.object(torch.optim.Optimizer, name, check)
