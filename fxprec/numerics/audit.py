"""The error ledger: which op costs how much of the error of a loss, of outputs, or of gradients."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from fxprec.inspection.nodes import op_name, places, short_paths, source_line
from fxprec.inspection.subject import subject_of
from fxprec.model.module import conversion_of
from fxprec.numerics.alternatives import Alternatives, sized
from fxprec.numerics.kept import kept
from fxprec.numerics.ledger import GradientError, Ledger, Part, Row, Sample, ordered
from fxprec.numerics.problem import Batch, Loss, Problem, not_in_inference_mode
from fxprec.numerics.savings import MEASURED, with_savings
from fxprec.passes.graph.annotations import module_path, notes
from fxprec.passes.graph.text import dtype_name
from fxprec.tape.adjoint import Term, measured, terms
from fxprec.tape.memory import Place
from fxprec.tape.opened import opened
from fxprec.tape.origin import Origin
from fxprec.tape.recorder import Recorder, record

#: Of the error: what stands in a bend for want of a derivative and is less is not remarked on.
_NOTABLE: Final = 0.01


class NotFiniteError(ValueError):
    """An error that cannot be explained op by op: inf or nan."""


@dataclass
class Reads:
    """What each input of a node would add to the error, were it rounded for that node alone.

    Attributes:
        dtype: the low one.
        batches: of each (graph, node, position among ``inputs_of``) -> <m, rounded input - input>, m being the part of
            the input's adjoint that comes through that node.
    """

    dtype: torch.dtype
    batches: list[dict[tuple[int, str, int], float]] = field(default_factory=list)

    def noted(self, terms: Iterable[Term]) -> Iterator[Term]:
        """The terms of one batch, noted as they pass by."""
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
        savings: measure what an override of a row saves, which ``share`` does not say: one copy of the model after the
            other is converted with the nodes of an override in FP32, and audited on the same batches. True: for the ten
            overrides whose rows have the largest shares together; a number: for so many.

    Raises:
        ConversionError: the model is not converted, or frozen.
        TypeError: arguments of other types.
        ValueError: no batch, a number of overrides below 0, a loss that is no scalar, another reference, no parameter
            that wants a gradient, or an error that is inf or nan: ``fxprec.numerics.locate`` says where that begins.

    Sources: Becker and Rannacher, Acta Numerica 2001 (dual-weighted residuals); the signed form at midpoints is ours.
    """
    problem = Problem.of(model, loss, "audit")
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
        if savings:
            given = [*given]
        ledger = ledger_of(problem, given, gradients, reference)
        if savings and isinstance(given, list):
            most = MEASURED if savings is True else savings
            audited = lambda problem, batch: ledger_of(problem, [batch], gradients, reference)  # noqa: E731
            ledger = with_savings(problem, ledger, given, audited, most)
    return replace(ledger, subject=subject_of(model, "audit"))


def ledger_of(
    problem: Problem,
    batches: Iterable[Batch],
    gradients: bool = False,
    reference: torch.dtype | None = None,
    opened: bool = False,
    reads: Reads | None = None,
    signs: bool = False,
) -> Ledger:
    """As ``audit``, of batches that were checked.

    Args:
        opened: fused regions run op by op, with a row an op.
        reads: is filled, which takes an inner product more for each input of an op.
        signs: of outputs that are no loss, explain <u, error> with random signs u. The mean square of that is the mean
            square of the error's length, and so it is of each part of it (Hutchinson, 1990); along the error itself all
            parts would point one way, and their squares would not add up.
    """
    conversion = conversion_of(problem.model)
    settings = conversion.settings
    if reference is None:
        reference = torch.float64 if settings.device == "cpu" else torch.float32
    wants = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in problem.model.parameters())
    books = _Books(Alternatives(settings, wants))
    for batch in batches:
        done = False
        while not done:
            with kept(problem.model):
                done = _audit_batch(problem, batch, gradients, reference, books, opened, reads, signs)
    graphs = [captured.gm for captured in conversion.captured]
    return books.ledger("gradients" if gradients else books.target, graphs)


def _audit_batch(
    problem: Problem,
    batch: Batch,
    gradients: bool,
    reference: torch.dtype,
    books: _Books,
    opened: bool,
    reads: Reads | None,
    signs: bool,
) -> bool:
    """False: the batch is to be run once more, since its run captured graphs."""
    model = problem.model

    def run() -> Tensor | list[Tensor]:
        value = problem.run(batch)
        if gradients:
            total = value if isinstance(value, Tensor) else sum((each.sum() for each in value), torch.zeros(()))
            if not total.requires_grad:
                raise ValueError(
                    "gradients=True, and what the model gives depends on no parameter that wants a gradient"
                )
            total.sum().backward()
        return value

    recorded = record(model, run, reference, opened, None if reads is None else reads.dtype)
    if recorded is None:
        return False
    recorder, value = recorded
    memory = recorder.memory
    low = exact = None
    values = [memory.place(each.detach()) for each in (value if isinstance(value, list) else [value])]
    if isinstance(value, Tensor):
        low, exact = float(memory.low(values[0])), float(memory.exact(values[0]))
        targets = [(values[0], torch.ones_like(memory.exact(values[0])))]
    else:
        books.target = "outputs"
        targets = _along_signs(recorder, values, books.count) if signs else _along_error(recorder, values)
    if gradients:
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        places = [memory.place(gradient.detach()) for gradient in found.values()]
        books.note_gradients([*found], recorder, places)
        targets = _along_error(recorder, places)
    error = measured(recorder, targets)
    if not math.isfinite(error):
        raise NotFiniteError(
            f"the error is {error}: a value is inf or nan, in the run or in the reference. "
            "fxprec.numerics.locate(model, batch, loss) says where that begins"
        )
    del value
    passing = terms(recorder, targets)
    books.add(recorder, passing if reads is None else reads.noted(passing), low, exact, error)
    return True


def _along_error(recorder: Recorder, places: list[Place]) -> list[tuple[Place, Tensor]]:
    """Weights for the values' errors: their direction, in which the error is its length."""
    memory = recorder.memory
    errors = [memory.low(place).to(memory.reference) - memory.exact(place) for place in places]
    length = math.sqrt(sum(float(error.square().sum()) for error in errors))
    return [(place, error / length if length else error) for place, error in zip(places, errors, strict=True)]


def _along_signs(recorder: Recorder, places: list[Place], seed: int) -> list[tuple[Place, Tensor]]:
    """Weights for the values' errors: 1 and -1, drawn from a seed, in which no global random number has a part."""
    dtype, generator = recorder.memory.reference, torch.Generator().manual_seed(seed)
    drawn = [
        torch.randint(2, place.size, generator=generator).to(recorder.memory.low(place).device) for place in places
    ]
    return [(place, (2 * each - 1).to(dtype)) for place, each in zip(places, drawn, strict=True)]


@dataclass
class _Entry:
    """What is known of one row, summed over batches."""

    origin: Origin
    rounding: float = 0.0
    bend: float = 0.0
    squares: float = 0.0
    lost: float = 0.0
    size: float = 0.0
    parts: dict[str, list[float]] = field(default_factory=dict)


class _Books:
    """The rows while batches come in."""

    def __init__(self, alternatives: Alternatives) -> None:
        self._alternatives = alternatives
        self.target: Literal["loss", "outputs"] = "loss"
        self._entries: dict[Origin, _Entry] = {}
        self._samples: list[Sample] = []
        self._errors: dict[str, list[float]] = {}
        self._remarks: dict[str, None] = {}
        self._lacking: dict[str, list[float]] = {}
        self._sizes: dict[tuple[int, str], Any] = {}

    @property
    def count(self) -> int:
        """Of the batches that were added."""
        return len(self._samples)

    def add(
        self, recorder: Recorder, terms: Iterable[Term], low: float | None, exact: float | None, error: float
    ) -> None:
        """One batch."""
        self._sizes |= recorder.sizes
        own: dict[Origin, float] = {}
        explained = 0.0
        for term in terms:
            operation = term.operation
            entry = self._entries.setdefault(operation.origin, _Entry(operation.origin))
            entry.rounding += term.rounding
            entry.bend += term.bend
            entry.lost += term.lost
            entry.size += term.size
            parts = opened(term, recorder.memory) or {operation.name: term.rounding}
            for name, rounding in parts.items():
                entry.parts.setdefault(name, [0.0, 0.0])[0] += rounding
            entry.parts[next(reversed(parts))][1] += term.bend
            own[operation.origin] = own.get(operation.origin, 0.0) + term.rounding
            explained += term.rounding + term.bend
            for argument, part in term.lacking.items():
                lacking = self._lacking.setdefault(f"{operation.name} has no derivative in {argument}", [])
                lacking.append(abs(part))
            if operation.why_inexact:
                self._remarks[f"the reference runs {operation.why_inexact}: in the dtypes of the run"] = None
        for origin, rounding in own.items():
            self._entries[origin].squares += rounding**2
        for name in sorted(recorder.skipped):
            self._remarks[f"{name} works on sparse tensors, or resizes memory: what it gives is taken for exact"] = None
        for name in sorted(recorder.outgrown):
            self._remarks[f"{name} would give another shape in the reference: it takes the run's"] = None
        self._samples.append(Sample(low, exact, error, explained))

    def note_gradients(self, names: list[str], recorder: Recorder, places: list[Place]) -> None:
        """The error of each parameter's gradient."""
        memory = recorder.memory
        for name, place in zip(names, places, strict=True):
            exact = memory.exact(place)
            error = float((memory.low(place).to(memory.reference) - exact).square().sum())
            sums = self._errors.setdefault(name, [0.0, 0.0])
            sums[0] += error
            sums[1] += float(exact.square().sum())

    def ledger(self, target: Literal["loss", "outputs", "gradients"], graphs: Sequence[GraphModule]) -> Ledger:
        """All of it; ``graphs``: those that users see, of which another rule would make others."""
        total = sum(entry.squares for entry in self._entries.values())
        nodes = {(number, place.name): place.node for number, gm in enumerate(graphs) for place in places(number, gm)}
        with sized(nodes, self._sizes):
            rows = [_row(entry, total, self._alternatives, nodes) for entry in self._entries.values()]
        samples = tuple(self._samples)
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
        return Ledger(target, ordered(rows, len(samples)), samples, parameters, (*self._remarks, *lacking))


def _row(entry: _Entry, total: float, alternatives: Alternatives, nodes: Mapping[tuple[int, str], Node]) -> Row:
    origin, node = entry.origin, entry.origin.node
    module, op, compute, why = "", origin.name, "", "outside of the graphs: in the loss, or under torch.autocast"
    source = short_paths(origin.source)
    if origin.kind == "weight":
        module, op, why = origin.name.rpartition(".")[0], "shadow", "the low copy of a weight"
    elif node is not None:
        precision = notes(node).precision
        module, op, why, source = module_path(node), op_name(node), precision.why, source_line(node)
        compute = dtype_name(precision.compute) if precision.compute is not None else ""
    parts = [Part(name, *sums) for name, sums in entry.parts.items()]
    place = nodes.get((origin.graph, origin.name), node)
    return Row(
        origin.name, origin.kind, origin.graph, origin.backward, module, op, compute, source, why, entry.rounding,
        entry.bend, entry.squares, entry.lost, entry.size, entry.squares / total if total else 0.0,
        tuple(parts) if len(parts) > 1 else (),
        None if place is None or origin.kind != "node" else alternatives.of(place),
    )  # fmt: skip
