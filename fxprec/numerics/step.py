"""A training step that can be run again, op by op, and its first fault: forward, loss and backward."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fxprec.model.module import original
from fxprec.numerics.births import Birth, Births, Source
from fxprec.numerics.kept import kept
from fxprec.tape.attribution import observe


class Results(NamedTuple):
    """What a step gave.

    Attributes:
        what: the values are called: "loss" or "outputs".
        values: those that the backward began at.
        gradients: path -> gradient of the parameter.
    """

    what: str
    values: list[Tensor]
    gradients: dict[str, Tensor]

    @property
    def is_finite(self) -> bool:
        return all(map(is_finite, (*self.values, *self.gradients.values())))


@dataclass(frozen=True, slots=True)
class Run:
    """A step that ran.

    Attributes:
        fault: the birth of the first value that is not finite and counts, and what it reached.
        gradients: path -> gradient of the parameter.
        births: what watched.
        is_finite: neither loss, outputs nor gradients have other values.
    """

    fault: tuple[Birth, str] | None
    gradients: Mapping[str, Tensor]
    births: Births | None
    is_finite: bool


@dataclass(frozen=True, slots=True)
class Step(ABC):
    """A step of a converted model, at a loss scale. Whatever runs, the model is left as it was."""

    model: nn.Module
    scale: float

    @abstractmethod
    def at(self, scale: float) -> Step:
        """The same at another loss scale."""

    @abstractmethod
    def on(self, model: nn.Module) -> Step:
        """The same of a copy of the model."""

    @abstractmethod
    def run(self) -> Results:
        """Run it; the parameters have no gradients before."""

    @abstractmethod
    def brought(self) -> Iterator[tuple[Tensor, Source]]:
        """What is there before, beside weights and buffers."""

    def watched(self, flushed: bool, watching: Callable[..., Births] = Births) -> Run:
        """As the model runs it, op by op; ``flushed``: what became 0 is followed as well; ``watching``: by whom."""
        while True:
            weights = dict(self.model.named_parameters(remove_duplicate=False))
            births = watching(self._sources(), weights, flushed)
            with kept(self.model):
                observed = observe(self.model, births, self.run, opened=True)
                if observed is not None:
                    return _judged(births, *observed)

    def as_it_is(self) -> Run:
        """As the model runs it, with nobody looking at its ops."""
        with kept(self.model):
            results = self.run()
        return Run(None, results.gradients, None, results.is_finite)

    def in_fp32(self) -> Run | None:
        """As the original model runs it, unscaled; None: it does not run without being converted."""
        with original(self.model):
            try:
                return self.at(1.0).as_it_is()
            except RuntimeError:  # dtypes that it mixes
                return None

    def _sources(self) -> Iterator[tuple[Tensor, Source]]:
        for path, parameter in self.model.named_parameters(remove_duplicate=False):
            yield parameter.detach(), Source("weight", path)
        for path, buffer in self.model.named_buffers(remove_duplicate=False):
            yield buffer, Source("buffer", path)
        yield from self.brought()


def _judged(births: Births, results: Results) -> Run:
    faults = [(birth, results.what) for birth in map(births.birth, results.values) if birth is not None]
    if not faults:
        found = ((births.birth(dense(gradient)), name) for name, gradient in results.gradients.items())
        faults = [(birth, f"the gradient of {name}") for birth, name in found if birth is not None]
    first = min(faults, key=lambda fault: fault[0].number) if faults else None
    return Run(first, results.gradients, births, first is None)


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Path -> gradient, of the parameters that have one."""
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def dense(tensor: Tensor) -> Tensor:
    """The values of a tensor that may be sparse."""
    return tensor if tensor.layout is torch.strided else tensor.coalesce().values()


def is_finite(tensor: Tensor) -> bool:
    """Whether all of it is; it may be sparse."""
    return bool(dense(tensor).isfinite().all())
