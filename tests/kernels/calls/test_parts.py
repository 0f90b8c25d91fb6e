"""What cuts a tensor into parts or joins some, on a pretended GPU: which are called, and what they run as."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fxprec.kernels.calls import parts as calls_of_parts
from fxprec.kernels.nn import parts as kernels

X = torch.randn(4, 6, 8)
CUTS: dict[str, Any] = {
    "unbind": lambda x: x.unbind(0)[1],
    "torch.unbind": lambda x: torch.unbind(x, dim=1)[2],
    "of a permutation": lambda x: x.permute(1, 0, 2).unbind()[1],
    "chunk": lambda x: x.chunk(2, dim=-1)[1],
    "torch.chunk": lambda x: torch.chunk(x, chunks=2, dim=1)[0],
    "split": lambda x: x.split(4, dim=2)[0],
    "sizes": lambda x: x.split(split_size=[2, 4], dim=1)[1],
    "torch.split": lambda x: torch.split(x, split_size_or_sections=(2, 6), dim=-1)[1],
}


def rewritten(tools: Any, function: Any, **options: Any) -> Any:
    options = {"device": "cuda"} | options
    return tools.rewritten(tools.traced(function, X), tools.context(**options), until="move_wide")


def calls(gm: Any) -> int:
    return len(gm.graph.find_nodes(op="call_function", target=calls_of_parts.parts))


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_each_spelling_is_called(tools: Any, cut: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gm = rewritten(tools, lambda x: cut(x * 2) + 1)
    assert calls(gm) == 1
    taken = on_a_gpu(monkeypatch)
    x = X.clone().requires_grad_()
    found, right = gm(x), cut(x * 2) + 1
    assert torch.equal(found, right) and len(taken) == 1
    assert torch.equal(*(torch.autograd.grad(y.square().sum(), x)[0] for y in (found, right)))


@pytest.mark.parametrize("options", [{"device": "cpu"}, {"native_mixed": False}])
def test_elsewhere_none_is(tools: Any, options: dict[str, Any]) -> None:
    assert not calls(rewritten(tools, lambda x: x.chunk(2)[0], **options))


def test_parts_that_may_be_written_stay(tools: Any) -> None:
    gm = rewritten(tools, lambda x: torch.unsafe_chunk(x * 2, 2)[0].add_(1))
    assert not calls(gm)
    gm(X.clone().requires_grad_())


JOINS: dict[str, Any] = {
    "cat": lambda x, y: torch.cat((x, y), -1),
    "keywords": lambda x, y: torch.cat(tensors=[x, y], dim=2),
    "concat": lambda x, y: torch.concat((x, y), axis=2),
    "rows": lambda x, y: torch.cat((x, y)),  # torch's, at run time
}


@pytest.mark.parametrize("name", JOINS)
def test_each_spelling_joins(tools: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gm = rewritten(tools, lambda x: JOINS[name](x * 2, x) + 1)
    assert len(gm.graph.find_nodes(op="call_function", target=calls_of_parts.joined)) == 1
    on_a_gpu(monkeypatch)
    taken: list[Any] = []
    join = kernels.join
    monkeypatch.setattr(kernels, "join", lambda *args: taken.append(args) or join(*args))
    x = X.clone().requires_grad_()
    found, right = gm(x), JOINS[name](x * 2, x) + 1
    assert torch.equal(found, right) and len(taken) == (name != "rows")
    assert torch.equal(*(torch.autograd.grad(y.square().sum(), x)[0] for y in (found, right)))


def test_one_tensor_and_small_ones_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_gpu(monkeypatch)
    monkeypatch.setattr(kernels, "join", lambda *args: pytest.fail("called"))
    assert torch.equal(calls_of_parts.joined((X,), -1), X)
    assert calls_of_parts.joined((X[:1], X[:1]), -1).shape == (1, 6, 16)
    with Seen():
        calls_of_parts.joined((X, X), -1)


def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Where calls of the kernel are told, and small tensors are worth it."""
    taken: list[Tensor] = []
    kernel = kernels.parts
    monkeypatch.setattr(kernels, "parts", lambda x, take: taken.append(x) or kernel(x, take))
    monkeypatch.setattr(calls_of_parts, "FEWEST", X.numel())
    monkeypatch.setattr(Tensor, "is_cuda", True)
    return taken


class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_what_is_small_or_watched_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = on_a_gpu(monkeypatch)
    calls_of_parts.parts(X, "chunk", 2)
    assert len(taken) == 1
    calls_of_parts.parts(X[1:], "chunk", 2)
    with Seen():
        calls_of_parts.parts(X, "chunk", 2)
    torch.func.vmap(lambda x: calls_of_parts.parts(x, "unbind")[0])(X.expand(4, 4, 6, 8))
    assert len(taken) == 1
