"""direct: what was decided is found by how tensors lie, and by nothing less."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from fxprec.kernels.launch import direct as direct_file
from fxprec.kernels.launch.direct import direct

X = torch.arange(12.0).view(3, 4)
OTHERS = {
    "shape": X[:2],
    "strides": X.T.contiguous().T,
    "dtype": X.bfloat16(),
    "device": X.to("meta"),
}


class Kernel:
    """Counts who ran; a run knows for which tensors it was made, and refuses others."""

    def __init__(self, serves: bool = True) -> None:
        self.whole_calls: list[int] = []
        self.runs: list[int] = []
        self.serves = serves
        self.call = direct("doubled", self.whole, self.prepare)

    def whole(self, x: Tensor, y: Tensor) -> Tensor:
        self.whole_calls.append(len(self.runs))
        return x + y

    def prepare(self, x: Tensor, y: Tensor) -> Any:
        like = [(each.shape, each.stride(), each.dtype, each.device) for each in (x, y)]

        def run(*given: Tensor) -> Tensor:
            assert [(each.shape, each.stride(), each.dtype, each.device) for each in given] == like
            self.runs.append(given[0].shape[0])
            return given[0] + given[1]

        return run if self.serves else None


def test_the_first_call_runs_the_whole_and_those_like_it_what_was_made_of_it() -> None:
    kernel = Kernel()
    for _ in range(3):
        assert torch.equal(kernel.call(X, X), X + X)
    assert (len(kernel.whole_calls), kernel.runs) == (1, [3, 3])
    assert kernel.call.__name__ == "doubled"


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_tensors_that_lie_in_another_way_have_a_run_of_their_own(other: Tensor, place: int) -> None:
    kernel = Kernel()
    one = (X, X) if other.device.type == "cpu" and other.shape == X.shape else (other, other)
    given = [*one]
    given[place] = other
    for _ in range(2):
        kernel.call(X, X), kernel.call(*given), kernel.call(X, X), kernel.call(*given)
    assert len(kernel.whole_calls) == 2 and len(kernel.runs) == 6


def test_what_nothing_shorter_serves_runs_whole() -> None:
    kernel = Kernel(serves=False)
    for _ in range(3):
        assert torch.equal(kernel.call(X, X), X + X)
    assert len(kernel.whole_calls) == 3


def test_the_latest_ways_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_file, "_MOST", 2)
    kernel, rows = Kernel(), [torch.zeros(n, 2) for n in range(1, 4)]
    for x in rows:
        kernel.call(x, x)
    kernel.call(rows[1], rows[1]), kernel.call(rows[2], rows[2])
    assert len(kernel.whole_calls) == 3 and kernel.runs == [2, 3]
    kernel.call(rows[0], rows[0])
    assert len(kernel.whole_calls) == 4


def test_threads_with_other_shapes_each_get_their_run() -> None:
    kernel, failed = Kernel(), []

    def work(rows: int) -> None:
        x = torch.full((rows, 2), float(rows))
        for _ in range(3000):
            try:
                assert kernel.call(x, x).shape == (rows, 2)
            except AssertionError as error:
                failed.append(error)

    threads = [threading.Thread(target=work, args=(rows,)) for rows in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_grad_mode_wanted_gradients_and_negated_memory_are_other_ways() -> None:
    kernel = Kernel()
    wanted, negated = X.clone().requires_grad_(), torch._neg_view(-X)
    for given in (X, wanted, negated):
        for _ in range(2):
            kernel.call(given, X)
            with torch.no_grad():
                kernel.call(given, X)
    assert len(kernel.whole_calls) == 6 and len(kernel.runs) == 6


def test_who_asks_is_told_when_tensors_lie_otherwise() -> None:
    told: list[int] = []
    call = direct("f", lambda x: x, lambda x: lambda x: x, lambda x: told.append(x.shape[0]))
    for rows in (1, 1, 2, 2, 2, 1, 1, 2):
        call(torch.zeros(rows))
    assert told == [1, 2, 1, 2]
