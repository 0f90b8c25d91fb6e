"""Audit the error of a loss, of outputs or of gradients: a ledger with each op's part in it."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from fxprec.inspection.measured import subject_of
from fxprec.inspection.nodes import op_name, places
from fxprec.inspection.prices import Prices, sized
from fxprec.model.conversion import conversion_of
from fxprec.model.warm_up import kept
from fxprec.numerics.births import Swallow
from fxprec.numerics.ledger import MEASURED, GradientError, Ledger, OpPart, Row, Sample, ordered, with_savings
from fxprec.numerics.problem import Batch, Loss, Problem, gradients_of, not_in_inference_mode, run_backward
from fxprec.numerics.routes import OwnWay, Routes, own_way
from fxprec.numerics.step import compared
from fxprec.passes.graph.annotations import module_path, notes
from fxprec.passes.graph.text import dtype_name
from fxprec.tape.adjoint import ErrorTerm, measured, opened, terms
from fxprec.tape.memory import TensorPlace, difference
from fxprec.tape.operation import OpOrigin
from fxprec.tape.recorder import Decision, OpRecorder, line_of, record
from fxprec.tape.vjp import inner

#: Of the error: what stands in a bend for want of a derivative and is less is not remarked on.
_NOTABLE: Final = 0.01
#: The row of what comes of numbers that Python read of the run.
_PYTHON: Final = "read by Python"
#: Of a batch so many of them are remarked on.
_SHOWN_DECISIONS: Final = 3


class NotFiniteError(ValueError):
    """The error cannot be explained op by op, since it is inf or nan."""


@dataclass
class InputErrors:
    """Errors that rounding an input of one node, for that node alone, would add to the target.

    Attributes:
        dtype: the low one.
        batches: of each (graph, node, position among ``inputs_of``) -> <m, rounded input - input>, m being the part of
            the input's adjoint that comes through that node.
    """

    dtype: torch.dtype
    batches: list[dict[tuple[int, str, int], float]] = field(default_factory=list)

    def noted(self, terms: Iterable[ErrorTerm]) -> Iterator[ErrorTerm]:
        """Yield the terms of one batch, and add up their inputs' parts as they pass by."""
        own: dict[tuple[int, str, int], float] = defaultdict(float)
        self.batches.append(own)
        for term in terms:
            origin = term.operation.origin
            for position, value in term.reads.items():
                own[origin.graph, origin.name, position] += value
            yield term


@not_in_inference_mode
def audit(
    model: nn.Module,
    batches: Iterable[Batch],
    loss: Loss | None = None,
    *,
    gradients: bool = False,
    reference: torch.dtype | None = None,
    method: str = "forward",
    routes: bool = False,
    savings: bool | int = False,
) -> Ledger:
    """Run batches as the model runs them and, op by op beside that, in the reference's dtype; explain the difference.

    Every op gets two columns (``fxprec.tape.adjoint`` has the mathematics): "rounding" is what it lost itself at the
    inputs that it had, "bend" what is not linear in what came in. Of one batch all of them add up to the measured error
    exactly. Over batches a row's share is of the sum of squares, as roundings are as good as independent.

    The reference reads the FP32 weights and the same random numbers. An audit takes one to four times the memory of a
    training step in FP32, and three to six times its time besides the run itself; of tiny models, whose time is that
    of calls, more. The model is left as it was; one that was never called is captured, as by its first call.

    Args:
        model: converted.
        batches: of ``(*inputs, target)``, without a loss ``inputs``; or dicts of named inputs.
        loss: ``loss(output, target)``, a scalar; of a dict ``loss(output, dict)``. None: the output is a scalar or has
            a ``loss``; if neither, the error of the outputs themselves is explained, along its own direction.
        gradients: explain the error of the gradients of all parameters instead, along its own direction: the ops of the
            backward get rows as well. Of outputs that are no loss it is that of the gradients of their sum. They are
            made under ``no_grad`` as well.
        reference: ``torch.float64`` or ``torch.float32``, whose products are then of full precision whatever is set for
            others (TF32). None: float64 on a CPU; elsewhere FP32, as accelerators are slow in float64, or have none.
        method: runs in place of forward: one that ``convert(methods=...)`` was given, ``"vae.decode"``.
        routes: tell as well which decisions (top-k, argmax, sort, comparison) are others than in the reference, and
            which roundings flip each alone: ``ledger.routes``. Where some flip, that takes a forward in the reference's
            dtype for each row.
        savings: measure what an override of a row saves, which ``share`` does not say: one copy of the model after the
            other is converted with the nodes of an override in FP32, and audited on the same batches. True: for the ten
            overrides whose rows have the largest shares together; a number: for so many.

    Raises:
        ConversionError: the model is not converted, or frozen.
        TypeError: arguments of other types.
        ValueError: no batch, a number of overrides below 0, a loss that is no scalar, another reference, no parameter
            that wants a gradient, a method that does not exist or was not converted, or an error that is inf or nan:
            ``fxprec.numerics.locate`` says where that begins.

    Sources: Becker and Rannacher, Acta Numerica 2001 (dual-weighted residuals); the signed form at midpoints is ours.
    """
    problem = Problem.of(model, loss, "audit", method)
    if reference not in (None, torch.float64, torch.float32):
        raise ValueError(f"reference must be torch.float64 or torch.float32, not {reference}")
    if gradients and not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("gradients=True, and no parameter of the model wants a gradient")
    if not isinstance(savings, int):
        raise TypeError(f"savings must be True, False or a number of overrides, not {type(savings).__name__}")
    if savings < 0:
        raise ValueError(f"savings is a number of overrides, not {savings}")
    with torch.set_grad_enabled(gradients or torch.is_grad_enabled()):
        given = problem.batches(batches)
        again = [*given] if savings else []  # savings run the batches once more
        ledger = ledger_of(problem, again or given, gradients, reference, routes=routes)
        if savings:

            def audited(trial: Problem, batch: Batch) -> Ledger:
                return ledger_of(trial, [batch], gradients, reference)

            ledger = with_savings(problem, ledger, again, audited, MEASURED if savings is True else savings)
    return replace(ledger, subject=subject_of(model, "audit"))


def ledger_of(
    problem: Problem, batches: Iterable[Batch], gradients: bool = False, reference: torch.dtype | None = None,
    opened: bool = False, reads: InputErrors | None = None, signs: bool = False, routes: bool = False,
) -> Ledger:  # fmt: skip
    """Audit batches that were checked, as ``audit`` does.

    Args:
        opened: fused regions run op by op, with a row an op.
        reads: is filled, which takes an inner product more for each input of an op.
        signs: of outputs that are no loss, explain <u, error> with random signs u. The mean square of that is the mean
            square of the error's length, and so it is of each part of it (Hutchinson, 1990); along the error itself all
            parts would point one way, and their squares would not add up.
        routes: as of ``audit``.
    """
    conversion = conversion_of(problem.model)
    settings = conversion.settings
    if reference is None:
        reference = torch.float64 if settings.device == "cpu" else torch.float32
    wants = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in problem.model.parameters())
    builder = _LedgerBuilder(problem.model, Prices(settings, wants), gradients, reads, signs)
    for batch in batches:
        run = functools.partial(_run, problem, batch, gradients)
        own: OwnWay | None = None
        done = asked = False
        # A run that captured graphs is no record: it is repeated. One in which Python read numbers may go another way
        # in the reference: that way is run first, then the run is recorded again.
        while not done:
            with kept(problem.model):
                recorded = record(problem.model, run, reference, opened, None if reads is None else reads.dtype)
                if recorded is None:  # it captured graphs
                    continue
                done = asked or not recorded[0].decisions
                if done:
                    builder.add_run(*recorded, own)
            if not done:
                own, asked = own_way(problem.model, run, reference), True
            del recorded
        if routes:
            builder.routes.add(problem.model, functools.partial(problem.run, batch), reference)
        # Where the run overflowed, another run tells which op made that finite again: its bend has the damage.
        if builder.overflown:
            builder.note_swallowed(compared(problem.model, run)[0].first_swallowed)
    graphs = [captured.gm for captured in conversion.captured]
    return builder.ledger("gradients" if gradients else builder.target, graphs)


def _run(problem: Problem, batch: Batch, gradients: bool) -> Tensor | list[Tensor]:
    """Run a batch, and its backward where gradients are asked about."""
    value = problem.run(batch)
    if gradients and not run_backward(value):
        raise ValueError("gradients=True, and what the model gives depends on no parameter that wants a gradient")
    return value


class _Apart:
    """Values of a run beside those of the reference's own way, which may differ from those computed beside the run.

    Args:
        recorder: of the run.
        places: of the values.
        own: what the reference gives for them by its own numbers; empty: the same as beside the run.
        more: what it gives besides, and the run does not: gradients of parameters that the run did not reach.
    """

    def __init__(
        self, recorder: OpRecorder, places: Sequence[TensorPlace], own: Sequence[Tensor], more: Sequence[Tensor] = ()
    ) -> None:
        self._memory, self.places, self._own = recorder.memory, places, own
        self._more = sum(float(each.square().sum()) for each in more)

    def exact(self, number: int) -> Tensor:
        """Return the reference's value."""
        return self._own[number] if self._own else self._memory.exact(self.places[number])

    def errors(self) -> list[Tensor]:
        """Return the run's values less the reference's."""
        if not self._own:
            return [self._memory.error(place) for place in self.places]
        lows = [self._memory.low(place) for place in self.places]
        return [difference(low.to(own.dtype), own) for low, own in zip(lows, self._own, strict=True)]

    def along_error(self) -> list[tuple[TensorPlace, Tensor]]:
        """Return weights for the values' errors along their own direction, in which the error is its length."""
        # Its own direction makes the length linear in the error: rows can add up to it.
        errors = self.errors()
        length = self._length(errors)
        return [(place, error / length if length else error) for place, error in zip(self.places, errors, strict=True)]

    def part_in(self, targets: Sequence[tuple[TensorPlace, Tensor]]) -> float:
        """Return the part of a target's error that comes of numbers that Python read; 0 where both read the same."""
        if not self._own:
            return 0.0
        pairs = zip(targets, self._own, strict=True)
        found = sum(inner(weight, difference(self._memory.exact(place), own)) for (place, weight), own in pairs)
        return found + (self._more / self._length(self.errors()) if self._more else 0.0)

    def _length(self, errors: Sequence[Tensor]) -> float:
        return math.sqrt(sum(float(error.square().sum()) for error in errors) + self._more)


def _check_finite(recorder: OpRecorder, places: Iterable[TensorPlace]) -> None:
    """Check that values may be compared; the same inf in both may stand, as in a mask.

    Raises:
        NotFiniteError: there is another inf, or a nan.
    """
    for place in places:
        low, exact = recorder.memory.low(place), recorder.memory.exact(place)
        error = (low.to(exact.dtype) - exact)[low != exact].abs().sum()
        if not bool(error.isfinite()):
            raise NotFiniteError(
                f"the error is {float(error)}: a value is inf or nan, in the run or in the reference. "
                "fxprec.numerics.locate(model, batch, loss) says where that begins"
            )


def _along_signs(recorder: OpRecorder, places: list[TensorPlace], seed: int) -> list[tuple[TensorPlace, Tensor]]:
    """Return random signs as weights for the values' errors, drawn from a seed, not the global generator."""
    dtype, generator = recorder.memory.reference, torch.Generator().manual_seed(seed)
    # Drawn on the CPU: devices draw other numbers for one seed, and an audit would differ from device to device.
    drawn = [torch.randint(2, p.size, generator=generator).to(recorder.memory.low(p).device) for p in places]
    return [(place, (2 * each - 1).to(dtype)) for place, each in zip(places, drawn, strict=True)]


@dataclass
class _Entry:
    """Sums of one row over batches."""

    origin: OpOrigin
    rounding: float = 0.0
    bend: float = 0.0
    squares: float = 0.0
    lost: float = 0.0
    size: float = 0.0
    parts: dict[str, list[float]] = field(default_factory=dict)


class _LedgerBuilder:
    """Ledger in the making: rows that grow while batches come in; ``reads`` and ``signs`` as of ``ledger_of``."""

    def __init__(self, model: nn.Module, prices: Prices, gradients: bool, reads: InputErrors | None, signs: bool):
        self._model, self._prices, self._gradients, self._reads, self._signs = model, prices, gradients, reads, signs
        self.target: Literal["loss", "outputs"] = "loss"
        self._entries: dict[OpOrigin, _Entry] = {}
        self._samples: list[Sample] = []
        self._errors: dict[str, list[float]] = {}
        self._remarks: dict[str, None] = {}
        self._swallowed: dict[str, None] = {}
        self._decisions: list[Decision] = []
        self.routes = Routes()
        self._lacking: dict[str, list[float]] = {}
        self._sizes: dict[tuple[int, str], Any] = {}
        self.overflown = False  # in the latest batch the run has inf or nan where the reference has none

    def add_run(self, recorder: OpRecorder, value: Tensor | list[Tensor], own: OwnWay | None) -> None:
        """Add the error of a recorded run; ``own`` has the reference's own results, if they are others."""
        # Places, not tensors, are kept: the walk backwards lets memory go, op by op.
        memory = recorder.memory
        places = [memory.place(each.detach()) for each in (value if isinstance(value, list) else [value])]
        alike = own is not None and [tuple(each.shape) for each in own.values] == [place.size for place in places]
        fitting = own if alike else None
        if own is not None and fitting is None:
            self.remark(f"not comparable with the reference, which gives other shapes: {recorder.decisions[0]}")
        apart = _Apart(recorder, places, () if fitting is None else fitting.values)
        low = exact = None
        if isinstance(value, Tensor):
            low, exact = float(memory.low(places[0])), float(apart.exact(0))
            targets = [(places[0], torch.ones_like(memory.exact(places[0])))]
        else:
            self.target = "outputs"
            targets = _along_signs(recorder, places, len(self._samples)) if self._signs else apart.along_error()
        # Parameters that the reference's own way reaches and the run does not count in full: their gradient in the run
        # is 0.
        if self._gradients:
            found = gradients_of(self._model)
            places = [memory.place(gradient.detach()) for gradient in found.values()]
            more = {} if fitting is None else dict(fitting.gradients)
            paired = [more.pop(name, torch.zeros_like(memory.exact(p))) for name, p in zip(found, places, strict=True)]
            apart = _Apart(recorder, places, () if fitting is None else paired, [*more.values()])
            self._note_gradients([*found], apart)
            targets = apart.along_error()
        _check_finite(recorder, places)
        by_python = apart.part_in(targets)
        error = measured(recorder, targets) + by_python
        self._note_decisions(recorder, own, by_python)
        del value
        passing = terms(recorder, targets)
        if self._reads is not None:
            passing = self._reads.noted(passing)
        self._add(recorder, passing, Sample(low, exact, error, by_python))

    def _add(self, recorder: OpRecorder, terms: Iterable[ErrorTerm], sample: Sample) -> None:
        """Add one batch; the sample explains the part of the error that comes of numbers that Python read."""
        self._sizes |= recorder.sizes
        self.overflown = bool(recorder.overflown)
        explained = sample.explained
        own: dict[OpOrigin, float] = {}
        for term in terms:
            operation = term.operation
            entry = self._entries.setdefault(operation.origin, _Entry(operation.origin))
            entry.rounding += term.rounding
            entry.bend += term.bend
            entry.lost += term.lost
            entry.size += term.size
            # A fused region is one operation of the run: ``opened`` splits its rounding among the ops within, which are
            # told apart by name.
            parts = opened(term, recorder.memory) or {operation.name: term.rounding}
            for name, rounding in parts.items():
                entry.parts.setdefault(name, [0.0, 0.0])[0] += rounding
            entry.parts[next(reversed(parts))][1] += term.bend
            own[operation.origin] = own.get(operation.origin, 0.0) + term.rounding
            explained += term.rounding + term.bend
            for argument, part in term.lacking.items():
                self._lacking.setdefault(f"{operation.name} has no derivative in {argument}", []).append(abs(part))
            if operation.why_inexact:
                self._remarks[f"the reference runs {operation.why_inexact}: in the dtypes of the run"] = None
        # Roundings of different batches are as good as independent: their squares add up, they do not.
        for origin, rounding in own.items():
            self._entries[origin].squares += rounding**2
        for name in sorted(recorder.skipped):
            self._remarks[f"{name} works on sparse tensors, or resizes memory: what it gives is taken for exact"] = None
        for name in sorted(recorder.outgrown):
            self._remarks[f"{name} would give another shape in the reference: it takes the run's"] = None
        self._samples.append(replace(sample, explained=explained))

    def note_swallowed(self, found: Swallow | None) -> None:
        """Remark on an overflow that is no mask and that an op made finite again; None: there is none."""
        if found is not None:
            self._swallowed[found.birth.origin.name] = None
            gives = "overflows" if found.birth.kind == "overflow" else "gives what is no number"
            self.remark(
                f"{found.birth.origin.name} {gives}, and {found.name} makes that finite again: what comes of it is the "
                f"bend of {found.name}; fxprec.numerics.locate tells more"
            )

    def _note_gradients(self, names: Sequence[str], apart: _Apart) -> None:
        """Add the error of each parameter's gradient."""
        for number, (name, error) in enumerate(zip(names, apart.errors(), strict=True)):
            # Squares add up over batches; the root is taken at the end.
            sums = self._errors.setdefault(name, [0.0, 0.0])
            sums[0] += float(error.square().sum())
            sums[1] += float(apart.exact(number).square().sum())

    def remark(self, text: str) -> None:
        """Add a remark, once however often it comes."""
        self._remarks[text] = None

    def _note_decisions(self, recorder: OpRecorder, own: OwnWay | None, by_python: float) -> None:
        """Remark on what Python read otherwise than the reference would have, where anything comes of that."""
        if not recorder.decisions:
            return
        # A number that was read and changed nothing is no remark.
        way = None if own is None else own.parts_at(recorder)
        if own is not None and way is None and by_python == 0:
            return  # a loss that is printed, say
        self._decisions += recorder.decisions
        for decision in recorder.decisions[:_SHOWN_DECISIONS]:
            self.remark(str(decision))
        if own is None:
            self.remark(
                "the reference took the numbers that Python read from the run: its own way captures anew each time"
            )
            return
        if way is not None:
            self.remark(f"the reference goes another way than the run from {way} on")
        lines = ", ".join(dict.fromkeys(decision.source for decision in recorder.decisions))
        origin = OpOrigin("outside", _PYTHON, source=lines)
        self._entries.setdefault(origin, _Entry(origin)).bend += by_python

    def ledger(self, target: Literal["loss", "outputs", "gradients"], graphs: Sequence[GraphModule]) -> Ledger:
        """Return the ledger; ``graphs``: those that users see, whose alternatives are priced."""
        total = sum(entry.squares for entry in self._entries.values())
        nodes = {(number, place.name): place.node for number, gm in enumerate(graphs) for place in places(number, gm)}
        with sized(nodes, self._sizes):
            rows = [_row(entry, total, self._prices, nodes) for entry in self._entries.values()]
        samples = tuple(self._samples)
        # A missing derivative is worth a remark only where errors of some size meet it.
        least = _NOTABLE * sum(abs(sample.measured) for sample in samples)
        lacking = (
            f"{what}: errors that came in there are its bend, {sum(parts) / len(samples):.1e} a batch"
            for what, parts in self._lacking.items()
            if sum(parts) > least
        )
        parameters = {
            name: GradientError(*(math.sqrt(total / len(samples)) for total in sums))
            for name, sums in self._errors.items()
        }
        remarks = (*self._remarks, *lacking, *self.routes.remarks)
        return Ledger(
            target, ordered(rows, len(samples)), samples, parameters, remarks, tuple(self._swallowed),
            tuple(self._decisions), self.routes.found(),
        )  # fmt: skip


def _row(entry: _Entry, total: float, prices: Prices, nodes: Mapping[tuple[int, str], Node]) -> Row:
    origin, node = entry.origin, entry.origin.node
    why = "outside of the graphs: in the loss, or under torch.autocast"
    module, op, compute, source = "", origin.name, "", line_of(origin)
    if origin.name == _PYTHON:
        source = origin.source
        why = "the run's numbers, and the way that Python took by them, where the reference has its own"
    if origin.kind == "weight":
        module, op, why = origin.name.rpartition(".")[0], "shadow", "the low copy of a weight"
    elif node is not None:
        precision = notes(node).precision
        module, op, why = module_path(node), op_name(node), precision.why
        compute = dtype_name(precision.compute) if precision.compute is not None else ""
    parts = [OpPart(name, *sums) for name, sums in entry.parts.items()]
    place = nodes.get((origin.graph, origin.name), node)
    return Row(
        origin.name, origin.kind, origin.graph, origin.backward, module, op, compute, source, why, entry.rounding,
        entry.bend, entry.squares, entry.lost, entry.size, entry.squares / total if total else 0.0,
        tuple(parts) if len(parts) > 1 else (),
        None if place is None or origin.kind != "node" else prices.other(place),
    )  # fmt: skip
