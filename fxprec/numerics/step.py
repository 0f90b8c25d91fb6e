"""Run a training step op by op, again and again, and find its first value that is not finite, or became 0.

Each storage with such a value has a birth (``numerics.births``). An op that reads one hands its birth on to what it
writes. So a result tells where its own fault began, and masks of -inf, of which nothing bad came, are nobody's fault.

An op that makes finite values of them has swallowed them, which no result shows. ::

    scores = x @ x.T                    # inf in float16, 7.8e5 in float64: the birth
    x / (scores.diagonal() + 1).sqrt()  # 0, and its gradients are 0: the division swallows it

Then the step runs once more beside a reference: every op runs in its dtype on its own values. An inf is a fault where
that has a number, unless a mask means it. An op that makes inf of finite values, which a wider dtype does not, is known
without that.
"""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from fxprec.inspection.nodes import NamedNode
from fxprec.model.conversion import conversion_of, original
from fxprec.model.warm_up import kept
from fxprec.numerics.births import (
    Birth,
    Masks,
    OpCall,
    Source,
    Swallow,
    dense,
    first_of,
    is_fault,
    is_finite,
    is_float,
    share_of,
)
from fxprec.tape.attribution import Attribution, observe, written_by
from fxprec.tape.operation import OpOrigin
from fxprec.tape.recorder import Decision, OpRecorder
from fxprec.torch_internals import storage_key, tree_flatten, tree_leaves

R = TypeVar("R")
#: Of a value: what the run has instead is another one, and not the same with its roundings.
_OTHER: Final = 0.1


_ELSEWHERE: Final = Source("input", "a tensor from elsewhere")
#: Ops that choose among elements: what a model leaves out by one of them does not count.
_SELECTS: Final = frozenset({
    "aten::where", "aten::masked_fill", "aten::masked_fill_", "aten::masked_select", "aten::index", "aten::index_put_",
    "aten::index_select", "aten::gather",
})  # fmt: skip
B = TypeVar("B", bound=Attribution)


class Births(Attribution):
    """Dispatch mode that follows values that are not finite back to the op that made them, by storage.

    Args:
        sources: what is there before the run.
        weights: path in the model -> weight.
        flushed: follow what became 0 as well; each op runs in float64, too.

    Attributes:
        swallowed: births that an op made finite values of, in the order of running.
        reads_numbers: Python read a number of a tensor (``item()``, ``bool()``).
    """

    def __init__(
        self, sources: Iterable[tuple[Tensor, Source]], weights: Mapping[str, Tensor], flushed: bool = False
    ) -> None:
        super().__init__()
        self._sources = {storage_key(tensor): source for tensor, source in sources if is_float(tensor)}
        self._weights = weights
        self._births: dict[int, Birth] = {}
        self._blank: set[int] = set()  # storages of new memory: what stands there is nobody's value
        self._flushed: dict[int, Birth] | None = {} if flushed else None
        self._count = 0
        self.swallowed: list[Swallow] = []
        self._clamped: set[int] = set()  # ids of births that the model clamps to the range of the dtype
        self.reads_numbers = False

    @property
    def first_swallowed(self) -> Swallow | None:
        """Swallowed value with the earliest birth; None where nothing was swallowed."""
        return min(self.swallowed, key=lambda each: each.birth.number, default=None)

    def birth(self, tensor: Tensor) -> Birth | None:
        """Return the birth of what is not finite in a tensor; None where all is finite or meant to be inf."""
        if not is_float(tensor) or is_finite(tensor):
            return None
        found = self._birth_in(tensor)
        return None if found.kind == "meant" and not bool(tensor.isnan().any()) else found

    def flush(self, tensor: Tensor) -> Birth | None:
        """Return where values of a tensor became 0; None where they did not, or nobody followed them."""
        return (self._flushed or {}).get(storage_key(tensor))

    def begin(self, shadows: Mapping[str, Tensor]) -> None:
        """Register low copies of weights as sources, wherever they were made."""
        for path, shadow in shadows.items():
            key = storage_key(shadow)
            self._sources[key] = Source("weight", path, self._weights[path].detach())
            # A shadow may be refreshed in the same storage: what was known of its old values does not hold.
            self._births.pop(key, None)

    def look(self, node: NamedNode, run: Any) -> Any:
        """Run a node, and register constants of the graph as sources."""
        result = super().look(node, run)
        if node.node.op == "get_attr" and is_float(result):
            self._sources.setdefault(storage_key(result), Source("buffer", str(node.node.target)))
        return result

    def op(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], origin: OpOrigin) -> Any:
        """Run an op, and hand births on from what it read to what it wrote."""
        leaves, spec = tree_flatten((args, kwargs))
        written = written_by(function, args, kwargs)
        # Inputs that the op overwrites are copied: what it read is looked at after it ran.
        given = [leaf.clone() if id(leaf) in written and is_float(leaf) else leaf for leaf in leaves]
        before = {storage_key(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.layout is torch.strided}
        inherited = self._inherited(leaves, written, given)
        output = self.run(function, args, kwargs, origin)
        self._count += 1
        self.reads_numbers |= isinstance(output, bool | int | float)
        results = [
            *(result for result in tree_leaves(output) if is_float(result)),
            *(leaf for leaf in leaves if is_float(leaf) and id(leaf) in written),
        ]
        call = OpCall(function, leaves, given, spec, origin, self._count, written, output)
        # A view of an input is no new value. An in-place write is one, in an old storage.
        made = [result for result in results if storage_key(result) not in before or id(result) in written]
        self.wrote(call, made)
        for result in made:
            key = storage_key(result)
            if key not in before:
                (self._blank.add if "empty" in call.name else self._blank.discard)(key)
            if key in self._blank and key not in before:
                self._births.pop(key, None)
            elif not is_finite(result):
                self._births[key] = self.birth_of(call, result, inherited)
            # A finite write to a part of a storage says nothing of the rest; only a write to all of it clears the
            # birth.
            elif key not in before or result.numel() * result.element_size() == result.untyped_storage().nbytes():
                self._births.pop(key, None)
        if inherited and call.ends(inherited, made, results):
            self._swallow(call, inherited, made)
        if self._flushed is not None:
            self._follow_zeros(call, made, self._flushed)
        return output

    def run(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], origin: OpOrigin) -> Any:
        """Run an op; subclasses run it in more than one dtype."""
        return function(*args, **kwargs)

    def wrote(self, call: OpCall, made: Sequence[Tensor]) -> None:
        """Look at what an op wrote before it is judged; for subclasses."""

    def counts(self, birth: Birth) -> bool:
        """Tell whether a birth may be a fault where an op swallowed what came of it."""
        return birth.kind in ("overflow", "invalid") and not birth.masked

    def differs(self, made: Sequence[Tensor]) -> bool:
        """Tell whether an op that chooses among elements may have chosen others than it should."""
        return True

    def example(self, call: OpCall, read: Sequence[Tensor], made: Sequence[Tensor]) -> str:
        """Show what an op made of what it ``read`` that is not finite; "" where there is nothing to compare with."""
        return ""

    def _swallow(self, call: OpCall, inherited: Sequence[tuple[Tensor, Birth]], made: Sequence[Tensor]) -> None:
        """Note the first birth among those that the op made finite values of."""
        if "_like" in call.name or "::new_" in call.name:  # which read a shape alone
            return
        read = [birth for value, birth in inherited if not call.overwrites(value)]
        births = [birth for birth in read if self.counts(birth)]
        # A clamp to the dtype's range is the model's own cure for an overflow, and so is its derivative's mask.
        if "clamp" in call.name and any(map(_saturates, made)):  # to the range of the dtype: that is meant
            self._clamped.update(map(id, births))
        if "clamp" in call.name or call.origin.backward:
            births = [birth for birth in births if id(birth) not in self._clamped]
        # Of ops that choose among elements, only an overflow may have misled them: a nan may stand where nobody chose.
        if call.name in _SELECTS:
            births = [birth for birth in births if birth.kind == "overflow"] if self.differs(made) else []
        if births:
            first = min(births, key=lambda birth: birth.number)
            values = [value for value, _ in inherited]
            name = call.origin.name if call.origin.node is not None else call.name.partition("::")[2]
            self.swallowed.append(Swallow(first, call.origin, name, self.example(call, values, made)))

    def _inherited(self, leaves: Sequence[Any], written: set[int], given: Sequence[Any]) -> list[tuple[Tensor, Birth]]:
        """Return the inputs that are not finite with their births; uninitialized memory apart, which nobody reads."""
        found = []
        for leaf, value in zip(leaves, given, strict=True):
            key = storage_key(leaf) if is_float(leaf) else 0
            blank = key in self._blank and key not in self._births
            if key and not blank and not is_finite(value):
                found.append((value, self._birth_in(leaf)))
        return found

    def _birth_in(self, tensor: Tensor) -> Birth:
        key = storage_key(tensor)
        if key not in self._births:
            self._births[key] = self.came_in(tensor, self._sources.get(key, _ELSEWHERE))
        return self._births[key]

    def came_in(self, tensor: Tensor, source: Source) -> Birth:
        """Return the birth of a value that no op made; for a low copy of a finite weight, the overflow of its cast."""
        bad = ~tensor.isfinite()
        origin = OpOrigin("weight" if source.phase == "weight" else "outside", source.name)
        birth = Birth(
            self._count, origin, "", "came in", tensor.dtype, math.nan, "", share_of(bad), source, index=first_of(bad)
        )
        master = source.master
        if master is not None and master.dtype is not tensor.dtype and is_finite(master):
            return replace(birth, kind="overflow", op="aten::_to_copy", magnitude=float(master.detach().abs().max()))
        return birth

    def birth_of(self, call: OpCall, result: Tensor, inherited: Sequence[tuple[Tensor, Birth]]) -> Birth:
        """Return the birth of what is not finite in a result: an inherited one where an input explains it."""
        with_nan = [birth for value, birth in inherited if bool(value.isnan().any())]
        births = with_nan or [birth for _, birth in inherited]
        makes_nan = bool(result.isnan().any())
        # These give nan for a row of -inf, and for no other row that has neither nan nor inf.
        normalizes = "softmax" in call.name or "attention" in call.name or "cross_entropy" in call.name
        # A softmax by hand subtracts the largest value of a row, which is -inf where the mask hides all of it.
        normalizes |= call.name == "aten::sub" and any(birth.kind == "meant" for birth in births)
        as_mask = all(birth.kind in ("came in", "meant") and _is_mask(value) for value, birth in inherited)
        if makes_nan and normalizes and as_mask:
            birth = call.birth(result, self._flushed)
            return replace(birth, masked=birth.kind == "invalid" and bool(inherited or call.reads_a_mask))
        # An inherited fault outranks the op that runs: it only passes on what came in. The earliest one began it.
        faults = [birth for birth in births if birth.kind != "meant"]
        if faults:
            return min(faults, key=lambda birth: birth.number)
        # inf may come of a mask's inf; nan does not: then the op itself is at fault.
        if births and not makes_nan:
            return births[0]
        if not births and call.names_infinity and not makes_nan:
            return replace(call.birth(result, None), kind="meant")
        return call.birth(result, self._flushed)

    def _follow_zeros(self, call: OpCall, made: Sequence[Tensor], flushed: dict[int, Birth]) -> None:
        # A zero is inherited where an input's values were lost; it is the op's own where float64 has another value.
        known = [flushed[key] for key in call.storages if key in flushed]
        for result in made:
            key = storage_key(result)
            own = call.flush(result)
            if own is None and known and bool((result == 0).any()):
                own = min(known, key=lambda birth: birth.number)
            if own is not None:
                flushed[key] = own
            elif key not in call.storages:
                flushed.pop(key, None)


class Compared(Births):
    """Births beside a reference, which tells the faults among those that were swallowed.

    Args:
        model: converted.
        reference: the dtype of the reference.
        sources, weights, flushed: as of ``Births``.
    """

    def __init__(
        self, model: nn.Module, reference: torch.dtype, sources: Iterable[tuple[Tensor, Source]],
        weights: Mapping[str, Tensor], flushed: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(sources, weights, flushed)
        self.recorder = OpRecorder(reference, model)
        self._masks = Masks(self._is_constant)
        self._faults: dict[int, Birth] = {}  # by identity
        self._before: dict[int, Tensor] = {}  # id of a tensor that the op writes to -> the reference's values before

    def begin(self, shadows: Mapping[str, Tensor]) -> None:
        super().begin(shadows)
        self.recorder.begin(shadows)

    def run(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], origin: OpOrigin) -> Any:
        """Run an op, and run it in the reference."""
        written = written_by(function, args, kwargs)
        self._before = {
            id(leaf): self.exact(leaf).clone()
            for leaf in tree_leaves((args, kwargs))
            if id(leaf) in written and leaf.layout is torch.strided
        }
        return self.recorder.op(function, args, kwargs, origin)

    def wrote(self, call: OpCall, made: Sequence[Tensor]) -> None:
        for result in made:
            self._masks.note(call, result, self.exact(result), self._read)

    def birth_of(self, call: OpCall, result: Tensor, inherited: Sequence[tuple[Tensor, Birth]]) -> Birth:
        """Return the birth of what is not finite in a result; a fault goes before what the reference has as well."""
        faults = [birth for _, birth in inherited if self.counts(birth)]
        if faults:
            return min(faults, key=lambda birth: birth.number)
        own = is_fault(result, self.exact(result), self._masks.of(result))
        # In float64 on the run's own inputs: that separates this op's fault from what came in.
        wide = call.wide(result)
        # With infinities among its inputs, an op is at fault only where it has a value in float64 that they do not
        # explain.
        if inherited:
            own = own & wide.isfinite() if wide is not None else torch.zeros_like(own)
        if not bool(own.any()):
            return super().birth_of(call, result, inherited)
        return self._noted(call.birth(result, self._flushed, own))

    def came_in(self, tensor: Tensor, source: Source) -> Birth:
        birth = super().came_in(tensor, source)
        return self._noted(birth) if birth.kind == "overflow" else birth

    def counts(self, birth: Birth) -> bool:
        """Tell whether the reference has finite values there."""
        return id(birth) in self._faults

    def differs(self, made: Sequence[Tensor]) -> bool:
        """Tell whether the reference has other elements there, by more than any rounding."""
        pairs = [(result.to(exact.dtype), exact) for result in made for exact in (self.exact(result),)]
        return any(bool(((low - exact).abs() > _OTHER * exact.abs()).any()) for low, exact in pairs)

    def example(self, call: OpCall, read: Sequence[Tensor], made: Sequence[Tensor]) -> str:
        """Show the element furthest off of those that inf or nan came into: ``0 where the reference has 0.0031``."""
        for result in made:
            exact = self.exact(result)
            error = (result.to(exact.dtype) - exact).abs().nan_to_num(0.0)
            for value in read if torch.Tag.pointwise in call.function.tags else ():
                with contextlib.suppress(RuntimeError):  # of another shape
                    error = error * ~value.isfinite().expand(error.shape)
            if bool(error.any()):
                index = first_of(error == error.max())
                own, other = (f"{each[index].item():.4g}" for each in (result, exact))
                return f"{own} where the reference has {other}" if own != other else ""
        return ""

    def _is_constant(self, tensor: Tensor) -> bool:
        source = self._sources.get(storage_key(tensor))
        return source is None or source.phase == "buffer"

    def exact(self, tensor: Tensor) -> Tensor:
        """Return the values that the reference has for a tensor of the run."""
        return self.recorder.memory.exact(self.recorder.memory.place(tensor))

    def _read(self, tensor: Tensor) -> Tensor:
        before = self._before.get(id(tensor))
        return self.exact(tensor) if before is None else before

    def _noted(self, birth: Birth) -> Birth:
        self._faults[id(birth)] = birth
        return birth


def compared(
    model: nn.Module, run: Callable[[], R], sources: Callable[[], Iterable[tuple[Tensor, Source]]] = tuple,
    flushed: bool = False,
) -> tuple[Compared, R]:  # fmt: skip
    """Run a converted model beside a reference: float64 on a CPU, elsewhere FP32, as ``audit`` has it."""
    reference = torch.float64 if conversion_of(model).settings.device == "cpu" else torch.float32
    return observed(model, run, lambda weights: Compared(model, reference, sources(), weights, flushed))


def observed(model: nn.Module, run: Callable[[], R], make: Callable[[dict[str, nn.Parameter]], B]) -> tuple[B, R]:
    """Run something on a converted model under an attribution, again until it captures no graph.

    Args:
        model: converted; it is left as it was.
        run: calls it.
        make: path in the model -> weight -> an attribution, of which a run that captured graphs leaves nothing.
    """
    while True:
        watcher = make(dict(model.named_parameters(remove_duplicate=False)))
        with kept(model):
            result = observe(model, watcher, run, opened=True)
            if result is not None:
                return watcher, result[0]


def _saturates(clamped: Tensor) -> bool:
    """Return whether the largest values that a clamp left are as large as float16's largest number."""
    return is_finite(clamped) and clamped.numel() > 0 and float(clamped.abs().max()) >= torch.finfo(torch.float16).max


def _is_mask(tensor: Tensor) -> bool:
    """Return whether all that is not finite in a tensor is -inf."""
    return not bool((tensor.isnan() | (tensor == torch.inf)).any())


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
    """Step that ran op by op, with its first fault.

    Attributes:
        fault: the birth of the first value that is not finite and counts, and what it reached.
        gradients: path -> gradient of the parameter.
        births: what watched.
        swallowed: what made finite values of the fault; None: nothing did, and it reached what it is said to reach.
    """

    fault: tuple[Birth, str] | None
    gradients: Mapping[str, Tensor]
    births: Births
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

    def at(self, scale: float) -> TrainingStep:
        """Return the step at another loss scale."""
        return replace(self, scale=scale)

    def on(self, model: nn.Module) -> TrainingStep:
        """Return the step of a copy of the model."""
        return replace(self, model=model)

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
        remarks: tuple[str, ...] = ()
        if results.what == "loss":
            loss, exact = results.values[0], beside.exact(results.values[0])
            remarks = (f"the loss is {float(loss):.6g}, and {float(exact):.6g} in the reference",)
        if found.fault is not None:
            later, reached = found.fault
            remarks += (f"later {later.origin.name} is not finite, and {reached} got that",)
        return replace(found, fault=(replace(first.birth, remarks=remarks), ""), swallowed=first)

    def decisions(self) -> tuple[Decision, ...]:
        """Return numbers that Python reads, and that a reference beside the run has otherwise."""
        return tuple(compared(self.model, self.run, self._sources)[0].recorder.decisions)

    def as_it_is(self) -> Results:
        """Run the step as the model runs it, without looking at its ops."""
        with kept(self.model):
            return self.run()

    def in_fp32(self) -> Results | None:
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
    return Run(first, results.gradients, births)
