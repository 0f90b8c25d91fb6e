"""What is predicted: kernels by hand, regions and optimizers, at the sizes of the models that the benchmarks train."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks.workloads.problems import PROBLEMS, Problem, Setup
from benchmarks.workloads.regions import MODELS, regions
from benchmarks.workloads.training import workloads
from fxprec.kernels.optim import adam, norm, sgd
from fxprec.kernels.optim.tables import MultiTensorPlan

__all__ = ["Case", "Untouched", "cases", "names"]


@dataclass(frozen=True)
class Case:
    """What one pass of one kernel launches.

    Attributes:
        run: launches it.
        bound: bytes that must be moved.
        moved: those that are loaded and stored, where no argument of a kernel says it.
    """

    kernel: str
    shape: str
    direction: str
    run: Callable[[], object]
    bound: int
    moved: tuple[int, int] | None = None


class Untouched(Setup):
    """Whose tensors are memory that nobody has written."""

    def activation(self, *shape: int, wanted: bool = True) -> Tensor:
        return torch.empty(shape, device=self.device, dtype=self.low).requires_grad_(wanted)

    def parameter(self, *shape: int) -> Tensor:
        return torch.empty(shape, device=self.device).requires_grad_()

    def labels(self, count: int, classes: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int64, device=self.device)


def names() -> list[str]:
    """Of what there is to choose from."""
    by_hand = dict.fromkeys(source.name for source in PROBLEMS)
    return [*by_hand, *(f"regions of {model}" for model in MODELS), *(each.name for each in _OPTIMIZERS)]


def cases(setup: Setup, only: str = "") -> Iterator[Case]:
    """Those whose names contain ``only``."""
    for source in PROBLEMS:
        if only in source.name:
            for problem in source.make(setup):
                yield from _passes(problem)
    for model, make in MODELS.items():
        if only in f"regions of {model}":
            for problem in regions(model, make, setup):
                yield from _passes(problem)
    for optimizer in _OPTIMIZERS:
        if only in optimizer.name:
            yield optimizer.case(setup)


def _passes(problem: Problem) -> Iterator[Case]:
    """Forward and backward; those of a problem without bytes, whose time is that of products, are left out."""
    forward, backward = problem.moved
    if forward is None:
        return
    results: list[Any] = []

    def run() -> None:
        results[:] = [problem.ours(*problem.inputs)]

    def differentiate() -> None:
        outputs = results[0] if isinstance(results[0], tuple) else (results[0],)
        outputs = [x for x in outputs if x.requires_grad]
        wanted = [x for x in problem.inputs if x.requires_grad]
        torch.autograd.grad(outputs, wanted, [torch.empty_like(x) for x in outputs], allow_unused=True)

    yield Case(problem.kernel, problem.shape, "forward", run, forward)
    if backward and results:
        yield Case(problem.kernel, problem.shape, "backward", differentiate, backward)
    results.clear()


@dataclass(frozen=True)
class _Optimizer:
    """A step of all parameters of a model, with low gradients and shadows."""

    name: str
    model: str
    kind: str

    def case(self, setup: Setup) -> Case:
        (workload,) = workloads("tiny" if setup.tiny else "gpu", only=(self.model,))
        with torch.device("meta"):
            sizes = [parameter.numel() for parameter in workload.make().parameters()]

        def tensors(dtype: torch.dtype) -> list[Tensor]:
            return [torch.empty(size, dtype=dtype, device=setup.device) for size in sizes]

        def ones() -> list[Tensor]:
            return [torch.zeros((), device=setup.device) for _ in sizes]

        states = [tensors(torch.float32) for _ in range({"adam": 2, "sgd": 1, "norm": 0}[self.kind])]
        parameters, gradients, count = tensors(torch.float32), tensors(setup.low), sum(sizes)
        both, low = 4 * count * (1 + len(states)), setup.low.itemsize * count
        if self.kind == "norm":
            plan = MultiTensorPlan(parameters)
            return Case(
                self.name, f"{count / 1e6:.1f} M", "step", lambda: norm.launch(plan.bind(gradients)), low, (low, 0)
            )
        shadows = tensors(setup.low)
        if self.kind == "adam":
            plan = MultiTensorPlan(parameters, states=states, steps=ones(), shadows=shadows)
            settings = adam.AdamSettings(weight_decay=0.1)

            def run() -> None:
                adam.launch(plan.bind(gradients), settings, lr=1e-3)
        else:
            plan = MultiTensorPlan(parameters, states=states, shadows=shadows)

            def run() -> None:
                sgd.launch(plan.bind(gradients), sgd.SgdSettings(0.9), lr=1e-3)

        moved = both + low
        return Case(self.name, f"{count / 1e6:.1f} M", "step", run, 2 * moved, (moved, moved))


_OPTIMIZERS: Final = (
    *(_Optimizer(f"AdamW of {model}", model, "adam") for model in ("gpt", "llama", "bert", "vit")),
    *(_Optimizer(f"SGD of {model}", model, "sgd") for model in ("resnet50", "unet")),
    _Optimizer("norm of gpt's gradients", "gpt", "norm"),
)
