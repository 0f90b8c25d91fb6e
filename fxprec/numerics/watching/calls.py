"""Keep what it takes to run the watched calls of a step, and their backward, once more; and run a bad step again.

Arguments are kept as they are, not copied: what writes to one of them shows in its version counter. Of buffers those
that a call may write are copied. The backward begins at the outputs with the gradients that came to them, so that
nothing need be known of the loss. Of a captured step there are no calls: it runs again without its graph.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from fxprec.capture.pytrees import leaves_of
from fxprec.capture.untouched import RandomState
from fxprec.host_reads import OnHost
from fxprec.model.conversion import Conversion
from fxprec.model.method import MethodName
from fxprec.model.warm_up import kept
from fxprec.numerics.births import Source, is_finite
from fxprec.numerics.locate import Trip, fault_of
from fxprec.numerics.problem import gradients_of
from fxprec.numerics.step import Results, TrainingStep
from fxprec.numerics.watching.verdicts import Numbers
from fxprec.passes.graph.annotations import notes, weight_path
from fxprec.passes.graph.subgraphs import every_graph
from fxprec.torch_internals import foreach_copy_, sequence_number, tree_flatten, tree_unflatten


class SeenCall:
    """Watched call of the model.

    Args:
        number: how many there were before.

    Attributes:
        largest: output -> its largest element, on its device; of those that a gradient came to.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.largest: dict[int, Tensor] = {}
        self._handles: list[RemovableHandle] = []

    def look(self, output: Any, came: Callable[[Self], object]) -> None:
        """Look at the outputs; ``came`` is told when the backward comes to one of them."""
        for number, leaf in enumerate(floats(output)):
            # float8 has no reduction on most devices, and a sparse output no dense largest element.
            if leaf.grad_fn is not None and leaf.numel() and leaf.layout is torch.strided and leaf.itemsize > 1:
                with torch.no_grad():
                    largest = (torch.view_as_real(leaf) if leaf.is_complex() else leaf).amax()
                note = functools.partial(self._note, number, largest, came)
                # A hook of the output hears of its gradient wherever the loss is computed.
                self._handles.append(leaf.register_hook(note))

    def _note(self, number: int, largest: Tensor, came: Callable[[Self], object], gradient: Tensor) -> None:
        self.largest[number] = largest
        self._keep(number, gradient)
        came(self)

    def _keep(self, number: int, gradient: Tensor) -> None:
        """Keep a gradient that has come to an output."""

    def let_go(self) -> None:
        """Remove the hooks from the outputs."""
        for handle in self._handles:
            handle.remove()


def floats(output: Any) -> Sequence[Tensor]:
    """Return the tensors of an output that a gradient may come to."""
    leaves = (leaf for leaf in leaves_of(output) if isinstance(leaf, Tensor))
    return [leaf for leaf in leaves if leaf.is_floating_point() or leaf.is_complex()]


class KeptCall(SeenCall):
    """Watched call with what a replay needs, from before it runs.

    Args:
        number: how many there were before.
        method: that was called.
        args, kwargs: with which.
        buffers: path -> buffer, of those that the call may write.
        only_torch: all random numbers come from torch.

    Attributes:
        gradients: output -> the gradients that came; of outputs that others are computed of, those and what came
            through the others, until ``keep_what_came_from_outside``.
    """

    def __init__(
        self, number: int, method: MethodName, args: tuple[Any, ...], kwargs: dict[str, Any],
        buffers: dict[str, Tensor], only_torch: bool,
    ) -> None:  # fmt: skip
        super().__init__(number)
        self.method = method
        # Tensors without their history, and whether each of them wants a gradient.
        parts, self._spec = tree_flatten((args, kwargs))
        self._parts = [part.detach() if isinstance(part, Tensor) else part for part in parts]
        self._wanted = [isinstance(part, Tensor) and part.requires_grad for part in parts]
        leaves = ((name, leaf) for name, value in (*enumerate(args), *kwargs.items()) for leaf in leaves_of(value))
        self._inputs = [(f"inputs[{name!r}]", leaf.detach()) for name, leaf in leaves if isinstance(leaf, Tensor)]
        self._versions = [_version(tensor) for _, tensor in self._inputs]
        # Dropout has to draw in the replay what it drew in the call.
        self._random = RandomState(only_torch)
        self.buffers = buffers
        self._values = [torch.empty_like(buffer) for buffer in buffers.values()]
        if buffers:
            with torch.no_grad():
                foreach_copy_(self._values, [buffer.detach() for buffer in buffers.values()])
        self.gradients: dict[int, list[Tensor]] = {}
        self._from_outside = False

    def _keep(self, number: int, gradient: Tensor) -> None:
        self.gradients.setdefault(number, []).append(gradient.detach())

    @property
    def had_bad_outputs(self) -> bool:
        """Flag of outputs that were nan or inf."""
        return not all(float(largest) < torch.inf for largest in self.largest.values())

    def changed(self) -> str | None:
        """Return the first argument that was written to since; None where all are as they were."""
        pairs = zip(self._inputs, self._versions, strict=True)
        return next((name for (name, tensor), version in pairs if _version(tensor) != version), None)

    def keep_what_came_from_outside(self, model: nn.Module) -> None:
        """Take from the gradients what came through other outputs, as a backward in a replay makes that anew.

        That is what the call's graph makes of the gradients of those outputs: it runs again, as far as that. Where it
        is not finite nobody knows what came from outside, and nothing is kept. Idempotent.
        """
        if self._from_outside or len(self.gradients) < 2:
            return
        with kept(model), torch.enable_grad():
            outputs = self.outputs(model)
            # A node was made after those that it reads; of one node outputs do not read each other.
            order = sorted(self.gradients, key=lambda number: -_sequence(outputs[number]))
            totals = {number: _sum(self.gradients[number]) for number in order}
            for position, number in enumerate(order[:-1], 1):
                rest, output = order[position:], outputs[number]
                given = totals[number].to(output.dtype)
                read = [outputs[other] for other in rest]
                # The graph of the call itself says how much of a later output's gradient came through it.
                found = torch.autograd.grad(output, read, given, retain_graph=True, allow_unused=True)
                for other, inner in zip(rest, found, strict=True):
                    if inner is not None:
                        totals[other] = torch.where(inner.isfinite(), totals[other] - inner, 0.0)
        self.gradients = {number: [totals[number]] for number in self.gradients}
        self._from_outside = True

    def outputs(self, model: nn.Module) -> Sequence[Tensor]:
        """Run the call again on a model, or on a copy, and return the outputs that a gradient may come to.

        Its buffers, and random numbers, are those of before the call.
        """
        self._random.restore()
        buffers = dict(model.named_buffers(remove_duplicate=False))
        with torch.no_grad():
            for path, value in zip(self.buffers, self._values, strict=True):
                buffers[path].copy_(value)
        pairs = zip(self._parts, self._wanted, strict=True)
        parts = [part.detach().requires_grad_() if wants else part for part, wants in pairs]
        args, kwargs = tree_unflatten(parts, self._spec)
        return floats(getattr(model.get_submodule(self.method.path), self.method.name)(*args, **kwargs))

    def mend_buffers(self) -> list[str]:
        """Give buffers that became inf or nan in the call their values of before; return their paths."""
        mended = []
        with torch.no_grad():
            for (path, buffer), value in zip(self.buffers.items(), self._values, strict=True):
                if buffer.is_floating_point() and bool(value.isfinite().all()) and not bool(buffer.isfinite().all()):
                    buffer.copy_(value)
                    mended.append(path)
        return mended

    def brought(self) -> Iterator[tuple[Tensor, Source]]:
        """Yield what came in: arguments, and the gradients of outputs."""
        yield from ((tensor, Source("input", name)) for name, tensor in self._inputs)
        for number, gradients in self.gradients.items():
            for gradient in gradients:
                yield gradient, Source("loss", f"the gradient of outputs[{number}]")


@dataclass(frozen=True, slots=True)
class KeptStep(TrainingStep):
    """Kept call as a training step, with its backward. ``made_at``: the loss scale that its gradients have.

    Gradients that came of outputs which were not finite say nothing of a run where these are: that has those of a mean.
    """

    call: KeptCall
    made_at: float

    def run(self) -> Results:
        call = self.call
        with torch.enable_grad():
            outputs = call.outputs(self.model)
            values = [outputs[number] for number in call.gradients]
            torch.autograd.backward(values, [*map(self._gradient, call.gradients.values(), values)])
        return Results("outputs", [value.detach() for value in values], gradients_of(self.model))

    def brought(self) -> Iterator[tuple[Tensor, Source]]:
        return self.call.brought()

    def _gradient(self, gradients: list[Tensor], output: Tensor) -> Tensor:
        total = _sum(gradients)
        # A loss of bad outputs has bad gradients: for a run in which they are finite, a mean's stand in.
        if self.call.had_bad_outputs and not is_finite(total):
            total = torch.full_like(total, self.made_at / total.numel())
        if self.scale != self.made_at:
            total = total * (self.scale / self.made_at)
        return total.to(output.dtype)


def _sum(gradients: list[Tensor]) -> Tensor:
    return gradients[0] if len(gradients) == 1 else torch.stack(gradients).sum(0)


def _sequence(output: Tensor) -> int:
    return -1 if output.grad_fn is None else sequence_number(output.grad_fn)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


@dataclass(slots=True)
class WatchedStep:
    """Step of a training loop, with the calls that its gradients came from.

    Attributes:
        number: how many there were before.
        calls: of the model, those that its gradients came from.
        skipped: it is, if it is not finite: an optimizer has asked.
        tripped: it was told of.
        optimizers: those that have stepped in it.
        again: of a captured step, which has no calls: runs it without its graph, at a loss scale, and calls come.
        recorded: how many a graph has.
        unseen: why there are no calls.
    """

    number: int
    calls: list[KeptCall]
    skipped: bool = False
    tripped: bool = False
    optimizers: list[weakref.ref[Optimizer]] = field(default_factory=list)
    again: Callable[[float], None] | None = None
    recorded: int = 0
    unseen: str = "its gradients are not of calls that were seen (made before, or by torch.autograd.grad?)"

    @property
    def count(self) -> int:
        """Number of calls."""
        return len(self.calls) or self.recorded


def is_finite_unscaled(model: nn.Module, step: WatchedStep, scale: float) -> bool:
    """Return whether the same step is finite without the loss scale that its gradients have."""
    steps = [KeptStep(model, 1.0, call, scale) for call in step.calls]
    try:
        for call in step.calls:
            call.keep_what_came_from_outside(model)
        return bool(steps) and all(each.as_it_is().is_finite for each in steps)
    except Exception:  # of the user's code, which is not to end a training
        return False


def outputs_alone(model: nn.Module, flagged: Sequence[KeptCall]) -> bool:
    """Return whether these calls have infinite outputs again when replayed, and no gradient is touched by that."""
    if not all(is_finite(each) for call in flagged for gradients in call.gradients.values() for each in gradients):
        return False
    try:
        for call in flagged:
            call.keep_what_came_from_outside(model)
        # Infinite again, and no gradient is: the output means it (a mask that is returned).
        runs = [KeptStep(model, 1.0, call, 1.0).as_it_is() for call in flagged]
    except Exception:  # as above
        return False
    return all(not run.is_finite and all(map(is_finite, run.gradients.values())) for run in runs)


def trip_of(
    model: nn.Module, step: WatchedStep, flagged: Sequence[KeptCall], scale: float, rank: int | None, elsewhere: str
) -> Trip:
    """Run the calls of a step again, one by one, until one shows where it began; ``flagged`` ones first.

    Buffers that became inf or nan get their values of before the step.

    Args:
        model: converted; its parameters as they were in the step.
        step: that was not finite.
        flagged: calls whose outputs were not.
        scale: the loss scale of its gradients.
        rank: of this process.
        elsewhere: ranks that it may have begun on, in words; "" where there are none, or they will tell.
    """
    # Calls with bad outputs are likely to be the cause, and a replay takes as long as a step.
    suspects = [*flagged, *(call for call in step.calls if call not in flagged)]
    changed = next((name for call in suspects if (name := call.changed()) is not None), None)
    finding, began, why = None, None, ""
    # What fails without a loss scale is no question of the scale.
    for call, at in itertools.product(suspects, dict.fromkeys((1.0, scale))):
        kept = KeptStep(model, at, call, scale)
        try:
            call.keep_what_came_from_outside(model)
            finding = fault_of(kept, kept.watched(flushed=False))
        except Exception as error:
            why = f"the replay failed: {error}"
        if finding is not None:
            began, why = step.calls.index(call), ""
            break
    written = f"{changed} was written to since" if changed else ""
    if not suspects:
        why = step.unseen
    elif finding is None and not why:
        changes = "does something in it change from run to run?"
        if elsewhere:
            changes = f"it began on {elsewhere}, or something in it changes from run to run"
        why = f"run again, it is finite; {written or changes}"
    remarks = [f"{written}: the replay ran on other values"] if changed and finding else []
    if suspects and (mended := step.calls[0].mend_buffers()):
        remarks.append(f"buffers have their values of before the step again: {', '.join(mended)}")
    return Trip(step.number, began, step.count, rank, finding, why, step.skipped, tuple(remarks))


class StepReport(NamedTuple):
    """Numbers of one step, before its optimizer took it, on their way to the host."""

    step: WatchedStep
    on_device: Numbers
    found: OnHost

    def numbers(self) -> Numbers:
        """Return the numbers on the host."""
        return replace(self.on_device, values=self.found.values)


@dataclass(slots=True, eq=False)
class Recording:
    """Step that a graph was captured of.

    Attributes:
        calls: of the model, those that a gradient came to; while it runs.
        count: how many there were.
        seen: written by each replay; None: no optimizer of the model stepped.
        tables: of launches, which the graph reads.
    """

    calls: list[SeenCall] = field(default_factory=list)
    count: int = 0
    seen: Numbers | None = None
    tables: object = None

    def came(self, call: SeenCall) -> None:
        """Note a call that a backward has come to."""
        if call not in self.calls:
            self.calls.append(call)
            self.count += 1


class WrittenBuffers:
    """Buffers that calls of one model may write: all of them, until its graphs say which."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._state: tuple[int, int, bool] | None = None
        self._found: dict[str, tuple[Mapping[str, Tensor | None], str]] | None = None

    def now(self, conversion: Conversion) -> dict[str, Tensor]:
        """Return path -> buffer, before a call."""
        state = conversion.captures, len(conversion.net), self._model.training
        if state != self._state:  # a graph that is not there yet may be captured
            self._state, self._found = state, None
            return dict(self._model.named_buffers())
        if self._found is None:
            # Copies of all buffers before each call would take long: graphs know which they write.
            paths = None if conversion.net else _written(conversion)
            chosen = [path for path, _ in self._model.named_buffers() if paths is None or path in paths]
            split = ((path, path.rpartition(".")) for path in chosen)
            self._found = {path: (self._model.get_submodule(of)._buffers, name) for path, (of, _, name) in split}
        return {path: buffer for path, (held, name) in self._found.items() if (buffer := held[name]) is not None}


def _written(conversion: Conversion) -> set[str]:
    graphs = (graph for captured in conversion.captured for graph in every_graph(captured.gm))
    nodes = (node for graph in graphs for node in graph.graph.find_nodes(op="get_attr"))
    return {weight_path(node) for node in nodes if notes(node).kind == "buffer" and notes(node).written}
