"""What ``benchmarks.ledger`` asks about: models with the data and the loss that an error of theirs is measured by.

Three kinds: the workloads of the other benchmarks, at a CPU's size and tiny; real architectures from their own packages
(``workloads.zoo``); and two tiny ones that are written here, a loop over time steps and a net that routes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from benchmarks.workloads.training import NAMES, Workload, workloads
from benchmarks.workloads.zoo import ZOO, Case
from fxprec.numerics.problem import Batch

__all__ = ["ADDED_UP", "SMALL", "Loop", "Routed", "Subject", "small", "to_add_up", "unserved"]

_CPU: Final = torch.device("cpu")
#: Before the names of models of the zoo.
_ZOO: Final = "zoo-"


class Loop(nn.Module):
    """An Elman network, a step of Python's at a time: (N, time, width) -> (N, classes) logits.

    Source: Elman, "Finding Structure in Time", Cognitive Science 1990.
    """

    def __init__(self, width: int = 16, hidden: int = 24, classes: int = 10) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.zeros(hidden))
        self.reads = nn.Linear(width, hidden)
        self.keeps = nn.Linear(hidden, hidden)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.start
        for step in self.reads(x).unbind(1):
            hidden = torch.tanh(step + self.keeps(hidden))
        return self.head(hidden)


class Routed(nn.Module):
    """Each row goes to the expert that a router likes best, or through a maximum: (N, width) -> (N, classes) logits.

    Source: Fedus et al., "Switch Transformers", JMLR 2022.
    """

    def __init__(self, width: int = 16, experts: int = 4, classes: int = 10) -> None:
        super().__init__()
        self.first = nn.Linear(width, 2 * width)
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.first(x).chunk(2, -1)
        h = torch.maximum(left, right)
        gates = self.router(h).softmax(-1)
        chosen = gates.argmax(-1, keepdim=True)
        answers = torch.stack([F.gelu(expert(h)) for expert in self.experts], 1)
        answer = answers.gather(1, chosen.unsqueeze(-1).expand(-1, -1, h.shape[-1])).squeeze(1)
        return self.head(self.norm(h + answer * gates.gather(1, chosen)))


@dataclass(frozen=True)
class Subject:
    """A model, data and a loss.

    Attributes:
        name: of the model; ``size``: "cpu", "tiny" or "zoo".
        make: the FP32 model, from torch's generator.
        batch: a seed -> one batch, as ``fxprec.numerics`` takes it.
        loss: (output, target) -> scalar; of a batch of named inputs the target is the batch.
    """

    name: str
    size: str
    make: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    loss: Callable[[Any, Any], Tensor]

    @classmethod
    def of_workload(cls, workload: Workload) -> Subject:
        """That of a training benchmark."""
        return cls(
            workload.name, workload.size, workload.make, lambda seed: workload.batches(1, _CPU, seed)[0], workload.loss
        )

    @classmethod
    def of_zoo(cls, name: str, case: Case) -> Subject:
        """That of an architecture from its own package."""

        def batch(seed: int) -> Batch:
            torch.manual_seed(seed)
            return case.inputs()

        return cls(_ZOO + name, "zoo", case.build, batch, lambda output, _: case.loss(output))

    @property
    def cheap(self) -> bool:
        """Whether float16, which a CPU multiplies hundreds of times slower than bfloat16, is bearable."""
        return self.size != "cpu"

    def seeded(self) -> nn.Module:
        """The FP32 model, in training, the same each time."""
        torch.manual_seed(0)
        return self.make().train()

    def value(self, model: nn.Module, batch: Batch) -> Tensor:
        """The loss."""
        if isinstance(batch, Mapping):
            return self.loss(model(**batch), batch)
        *inputs, target = batch
        return self.loss(model(*inputs), target)

    def sample(self, seed: int) -> tuple[Tensor, ...]:
        """A batch of one sample."""
        batch = self.batch(seed)
        if isinstance(batch, Mapping):
            raise TypeError(f"{self.name} has named inputs, of which no sample can be told from another")
        return tuple(part[:1] for part in batch)


def _tiny(
    name: str, shape: str, make: Callable[[], nn.Module], inputs: Callable[[Generator], Tensor], classes: int = 10
) -> Workload:
    def batch(generator: Generator) -> tuple[Tensor, ...]:
        x = inputs(generator)
        return x, torch.randint(classes, x.shape[:1], generator=generator)

    return Workload(name, "tiny", shape, make, batch, F.cross_entropy)


_OWN: Final = (
    _tiny("loop", "6 steps, d 24", Loop, lambda generator: torch.randn(8, 6, 16, generator=generator)),
    _tiny("routed", "4 experts, d 16", Routed, lambda generator: torch.randn(8, 16, generator=generator)),
)
#: Names of the tiny ones, whose samples can be told apart.
SMALL: Final = ("mlp", "gpt", "resnet50", "vit", "loop", "routed", "cnn", "unet", "llama", "bert")
#: Names of those that must add up.
ADDED_UP: Final = (*NAMES, *(each.name for each in _OWN), *(_ZOO + name for name in ZOO))


def small(name: str) -> Subject:
    """A tiny one by its name."""
    [found] = [each for each in (*workloads("tiny"), *_OWN) if each.name == name]
    return Subject.of_workload(found)


def to_add_up(name: str, sizes: tuple[str, ...] = ("cpu", "tiny")) -> list[Subject]:
    """A model of ``ADDED_UP`` at the sizes that there are of it."""
    if name.startswith(_ZOO):
        return [Subject.of_zoo(name.removeprefix(_ZOO), ZOO[name.removeprefix(_ZOO)])]
    known = [*_OWN, *(each for size in sizes if size in ("cpu", "tiny") for each in workloads(size))]
    return [Subject.of_workload(each) for each in known if each.name == name]


def unserved(name: str) -> str:
    """Why a model cannot be made here; "" where it can."""
    missing = [package for package in ("transformers", "diffusers") if find_spec(package) is None]
    if not name.startswith(_ZOO) or not missing:
        return ""
    return f"{', '.join(missing)} not installed: pip install 'fxprec[zoo]' brings what the zoo is made of"
