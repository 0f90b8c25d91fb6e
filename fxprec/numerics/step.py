"""A training step that can be run again, op by op: forward, loss and backward, and its first fault."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fxprec.model.module import original
from fxprec.numerics.births import Birth, Births, Source, Swallow, observed
from fxprec.numerics.kept import kept
from fxprec.numerics.swallowed import compared
from fxprec.tape.recorder import Decision


class Results(NamedTuple):
    """Results of a step.

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
    """Step that ran, with its first fault.

    Attributes:
        fault: the birth of the first value that is not finite and counts, and what it reached.
        gradients: path -> gradient of the parameter.
        births: what watched.
        is_finite: neither loss, outputs nor gradients have other values.
        swallowed: what made finite values of the fault; None: nothing did, and it reached what it is said to reach.
    """

    fault: tuple[Birth, str] | None
    gradients: Mapping[str, Tensor]
    births: Births | None
    is_finite: bool
    swallowed: Swallow | None = None

    @property
    def is_scaled_too_far(self) -> bool:
        """Flag of gradients that are not finite, or were not on the way."""
        return self.fault is not None and (self.swallowed is None or self.fault[0].origin.backward)


@dataclass(frozen=True, slots=True)
class TrainingStep(ABC):
    """Training step of a converted model, at a loss scale. Whatever runs, the model is left as it was."""

    model: nn.Module
    scale: float

    @abstractmethod
    def at(self, scale: float) -> TrainingStep:
        """Return the step at another loss scale."""

    @abstractmethod
    def on(self, model: nn.Module) -> TrainingStep:
        """Return the step of a copy of the model."""

    @abstractmethod
    def run(self) -> Results:
        """Run it; the parameters have no gradients before."""

    @abstractmethod
    def brought(self) -> Iterator[tuple[Tensor, Source]]:
        """Yield tensors that are there before the step, beside weights and buffers."""

    def watched(self, flushed: bool, watching: Callable[..., Births] = Births) -> Run:
        """Run the step op by op and return its first fault.

        With ``flushed``, values that became 0 are followed as well; ``watching`` makes the mode that follows them.

        Where an op swallowed inf or nan before anything else was at fault, the step runs once more beside a reference,
        which tells whether that is one: but for a watch that changes values, beside which there is no reference.
        """
        births, results = observed(self.model, self.run, lambda weights: watching(self._sources(), weights, flushed))
        found = _judged(births, results)
        # A mode that changes values has no reference to compare with.
        if watching is not Births or _first(births, found) is None:
            return found
        beside, results = compared(self.model, self.run, self._sources, flushed)
        first = _first(beside, found)
        if first is None:
            return found
        remarks = beside.remarks(results.what, results.values[0] if results.what == "loss" else None)
        if found.fault is not None:
            later, reached = found.fault
            remarks += (f"later {later.origin.name} is not finite, and {reached} got that",)
        return replace(found, fault=(replace(first.birth, remarks=remarks), ""), swallowed=first)

    def decisions(self) -> tuple[Decision, ...]:
        """Return numbers that Python reads, and that a reference beside the run has otherwise."""
        return tuple(compared(self.model, self.run, self._sources)[0].recorder.decisions)

    def as_it_is(self) -> Run:
        """Run the step as the model runs it, without looking at its ops."""
        with kept(self.model):
            results = self.run()
        return Run(None, results.gradients, None, results.is_finite)

    def in_fp32(self) -> Run | None:
        """Run the original model's step, unscaled; None where it does not run without being converted."""
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


def _first(births: Births, found: Run) -> Swallow | None:
    """Return the first swallowed fault, if none that reached something was before it."""
    first = births.first_swallowed
    late = first is not None and found.fault is not None and found.fault[0].number <= first.birth.number
    return None if late else first


def _judged(births: Births, results: Results) -> Run:
    faults = [(birth, results.what) for birth in map(births.birth, results.values) if birth is not None]
    # A loss that is not finite explains its gradients: only a finite one leaves them to ask.
    if not faults:
        found = ((births.birth(dense(gradient)), name) for name, gradient in results.gradients.items())
        faults = [(birth, f"the gradient of {name}") for birth, name in found if birth is not None]
    first = min(faults, key=lambda fault: fault[0].number) if faults else None
    return Run(first, results.gradients, births, first is None)


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Return path -> gradient, of the parameters that have one."""
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def dense(tensor: Tensor) -> Tensor:
    """Return the values of a tensor that may be sparse."""
    return tensor if tensor.layout is torch.strided else tensor.coalesce().values()


def is_finite(tensor: Tensor) -> bool:
    """Return whether all values are finite, also of a sparse tensor."""
    return bool(dense(tensor).isfinite().all())
