"""Follow values that are not finite through a run, back to the op where the first of them came to be.

Each storage with such a value has a birth: the op that made it of finite values, or what brought it along. An op that
reads one hands its birth on to what it writes. So a result tells where its own fault began, and masks of -inf, of which
nothing bad came, are nobody's fault. An op that makes finite values of them (``x / inf``) has swallowed them: that is
noted, and ``numerics.swallowed`` tells whether it is a fault.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeVar

import torch
from torch import Tensor, nn

from fxprec.numerics.kept import kept
from fxprec.tape.attribution import Attribution, NodeOf, observe, written_by
from fxprec.tape.exact_ops import draws
from fxprec.tape.memory import Memory, TensorPlace
from fxprec.tape.operation import Operation, OpOrigin
from fxprec.torch_internals import storage_key, tree_flatten, tree_leaves, tree_unflatten

R = TypeVar("R")
B = TypeVar("B", bound="Births")
Kind = Literal["overflow", "invalid", "underflow", "came in", "meant"]


@dataclass(frozen=True, slots=True)
class Source:
    """Origin of a value that was there before the run: an input, a weight, a constant.

    Attributes:
        phase: "input", "weight" or "buffer"; "loss": the gradients that the backward began with.
        name: ``inputs[0]``, or a path in the model.
        master: of a low copy of a weight, the weight.
    """

    phase: Literal["input", "weight", "buffer", "loss"]
    name: str
    master: Tensor | None = None


_ELSEWHERE: Final = Source("input", "a tensor from elsewhere")
#: Ops that choose among elements: what a model leaves out by one of them does not count.
_SELECTS: Final = frozenset({
    "aten::where", "aten::masked_fill", "aten::masked_fill_", "aten::masked_select", "aten::index", "aten::index_put_",
    "aten::index_select", "aten::gather",
})  # fmt: skip
#: Ops that do not read what stood where they write.
_OVERWRITES: Final = frozenset({"aten::copy_", "aten::fill_", "aten::zero_"})


@dataclass(frozen=True, slots=True)
class Swallow:
    """An op that read inf or nan and gave finite values.

    Attributes:
        birth: of what it read.
        origin: whom the op belongs to.
        name: of its node; outside of the graphs its own, ``div``.
        example: what it gave beside what the reference gives; "" where nobody compared.
    """

    birth: Birth
    origin: OpOrigin
    name: str
    example: str = ""


@dataclass(frozen=True, slots=True)
class Birth:
    """Place where a value came to be that is not finite, or was flushed to 0.

    Attributes:
        number: how many ops ran before it.
        origin: whom the op belongs to.
        op: ``aten::div``; "" where it came in.
        kind: "overflow": in a wider dtype the op gives a finite value. "invalid": nor does that. "underflow": it gives
            0 where a wider dtype gives something. "came in": no op made it. "meant": a constant inf, as for a mask.
        dtype: of the value.
        magnitude: of the largest value in a wider dtype that is not one in the dtype.
        example: the op on the numbers of the first bad element: ``div(0, 0) = nan``.
        source: what brought it, where it came in.
        share: of the elements, those that are so.
        flushed: where an input lost its values to 0 before.
        index: of the first of those elements.
        masked: it is a row that a mask hides as a whole: -inf, all of it, before a softmax.
        remarks: what else is known, in sentences.
    """

    number: int
    origin: OpOrigin
    op: str
    kind: Kind
    dtype: torch.dtype
    magnitude: float
    example: str
    share: float
    source: Source | None = None
    flushed: Birth | None = None
    index: tuple[int, ...] = ()
    masked: bool = False
    remarks: tuple[str, ...] = ()


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
        self._sources = {storage_key(tensor): source for tensor, source in sources if _is_float(tensor)}
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
        if not _is_float(tensor) or _is_finite(tensor):
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

    def look(self, node: NodeOf, run: Any) -> Any:
        """Run a node, and register constants of the graph as sources."""
        result = super().look(node, run)
        if node.node.op == "get_attr" and _is_float(result):
            self._sources.setdefault(storage_key(result), Source("buffer", str(node.node.target)))
        return result

    def op(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], origin: OpOrigin) -> Any:
        """Run an op, and hand births on from what it read to what it wrote."""
        leaves, spec = tree_flatten((args, kwargs))
        written = written_by(function, args, kwargs)
        # Inputs that the op overwrites are copied: what it read is looked at after it ran.
        given = [leaf.clone() if id(leaf) in written and _is_float(leaf) else leaf for leaf in leaves]
        before = {storage_key(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.layout is torch.strided}
        inherited = self._inherited(leaves, written, given)
        output = self.run(function, args, kwargs, origin)
        self._count += 1
        self.reads_numbers |= isinstance(output, bool | int | float)
        results = [
            *(result for result in tree_leaves(output) if _is_float(result)),
            *(leaf for leaf in leaves if _is_float(leaf) and id(leaf) in written),
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
            elif not _is_finite(result):
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
            key = storage_key(leaf) if _is_float(leaf) else 0
            blank = key in self._blank and key not in self._births
            if key and not blank and not _is_finite(value):
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
            self._count, origin, "", "came in", tensor.dtype, math.nan, "", _share(bad), source, index=first_of(bad)
        )
        master = source.master
        if master is not None and master.dtype is not tensor.dtype and _is_finite(master):
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


class OpCall:
    """Call of one op, with its arguments as they were before it.

    Args:
        leaves: of its arguments. given: the same, with copies of what it wrote to, as it was.
        written: ids of the leaves that it wrote to.
    """

    def __init__(
        self, function: Any, leaves: Sequence[Any], given: Sequence[Any], spec: Any, origin: OpOrigin, number: int,
        written: set[int], output: Any,
    ) -> None:  # fmt: skip
        self.function, self.given, self.spec, self.origin, self.number = function, given, spec, origin, number
        self.name: str = function.name().partition(".")[0]
        self.names_infinity = any(isinstance(leaf, float) and math.isinf(leaf) for leaf in leaves)
        self.reads_a_mask = any(isinstance(leaf, Tensor) and leaf.dtype is torch.bool for leaf in leaves)
        self.storages = {storage_key(leaf) for leaf in leaves if _is_float(leaf)}
        self._results = [result for result in tree_leaves(output) if isinstance(result, Tensor)]
        self._written = tuple(number for number, leaf in enumerate(leaves) if id(leaf) in written)
        self.leaves = leaves
        self._found: list[Any] | None = None

    def ends(
        self, inherited: Sequence[tuple[Tensor, Birth]], made: Sequence[Tensor], results: Sequence[Tensor]
    ) -> bool:
        """Tell whether something finite came of what is not: all of it, the indices of it, or some elements.

        Args:
            inherited: what it read that is not finite.
            made: of its float ``results`` those that are no views.
        """
        if not made and results:
            return False
        if any(not _is_float(result) for result in self._results) or all(map(_is_finite, results)):
            return True
        elements = [(value, result) for value, _ in inherited for result in made if value.shape == result.shape]
        if torch.Tag.pointwise not in self.function.tags:
            return False
        return any(bool((~value.isfinite() & result.isfinite()).any()) for value, result in elements)

    def overwrites(self, value: Tensor) -> bool:
        """Tell whether one of ``given`` stood where the op wrote without reading it."""
        written = (self.given[number] for number in self._written)
        unread = self.name in _OVERWRITES or self.function.name().endswith("out")
        return unread and any(value is each for each in written)

    def birth(self, result: Tensor, flushed: Mapping[int, Birth] | None, bad: Tensor | None = None) -> Birth:
        """Return the birth of what is not finite in the result; ``bad``: of these elements alone."""
        bad = ~result.isfinite() if bad is None else bad
        # Finite in float64 means that range is all that lacks; not even finite there means that the op has no such
        # value.
        wide = self.wide(result)
        grows = self.name.startswith(("aten::exp", "aten::sinh", "aten::cosh"))  # beyond float64, and has no pole
        beyond = None if wide is None else bad & (wide.isfinite() | (wide.isinf() & grows))
        overflows = wide is not None and beyond is not None and bool(beyond.any())
        magnitude = float(wide[beyond].abs().max()) if overflows else math.nan  # type: ignore[index]
        zeros = [] if overflows else [flushed[key] for key in self.storages if flushed and key in flushed]
        return Birth(
            self.number, self.origin, self.name, "overflow" if overflows else "invalid", result.dtype, magnitude,
            self._example(result, bad), _share(bad), None, zeros[0] if zeros else None, first_of(bad),
        )  # fmt: skip

    def flush(self, result: Tensor) -> Birth | None:
        """Return where the op itself gives 0 for a value that is none in float64; None where it does not."""
        wide = self.wide(result)
        if wide is None:
            return None
        lost = (result == 0) & (wide != 0) & wide.isfinite()
        if not bool(lost.any()):
            return None
        magnitude = float(wide[lost].abs().max())
        return Birth(
            self.number, self.origin, self.name, "underflow", result.dtype, magnitude, self._example(result, lost),
            _share(lost), index=first_of(lost),
        )  # fmt: skip

    def wide(self, result: Tensor) -> Tensor | None:
        """Return the result in float64, of the same inputs; None where it cannot be computed."""
        if self._found is None:
            self._found = self._run()
        for own, wide in zip([*self._results, *(self.leaves[n] for n in self._written)], self._found, strict=False):
            if own is result and isinstance(wide, Tensor) and wide.shape == result.shape:
                return wide
        return None

    def _run(self) -> list[Any]:
        # Another draw of random numbers would not be comparable.
        if draws(self.function, *tree_unflatten([*self.given], self.spec)):
            return []
        memory = Memory(torch.float64)
        places = tuple(memory.place(leaf) if _is_plain(leaf) else leaf for leaf in self.given)
        if any(isinstance(leaf, Tensor) for leaf in places):
            return []
        outputs = tuple(memory.place(result) for result in self._results if _is_plain(result))
        fresh = tuple(range(len(self._results)))
        operation = Operation(self.function, places, self.spec, fresh, self._written, outputs, (), self.origin)

        def read(place: TensorPlace, written: bool) -> Tensor:
            value = memory.low(place)
            return value.to(memory.exact(place).dtype, copy=True) if place.is_float else value.clone()

        try:
            with torch.no_grad():
                return operation.run(read, torch.float64, operation.drawn(memory.low))
        except Exception:  # no kernel for float64: nobody can say
            return []

    def _example(self, result: Tensor, bad: Tensor) -> str:
        """Show an elementwise op on the numbers of its first bad element: ``div(0, 0) = nan``; "" for other ops."""
        if torch.Tag.pointwise not in self.function.tags:
            return ""
        index = first_of(bad)
        shown = []
        for leaf in self.given:
            if isinstance(leaf, Tensor):
                try:
                    shown.append(f"{leaf.expand(result.shape)[index].item():.4g}")
                except RuntimeError:  # no elementwise op
                    return ""
            elif isinstance(leaf, bool) or not isinstance(leaf, int | float):
                continue
            else:
                shown.append(f"{leaf:.4g}")
        return f"{self.name.partition('::')[2].rstrip('_')}({', '.join(shown)}) = {result[index].item():.4g}"


def observed(model: nn.Module, run: Callable[[], R], make: Callable[[dict[str, nn.Parameter]], B]) -> tuple[B, R]:
    """Run something on a converted model and follow its values, again until it captures no graph."""
    while True:
        births = make(dict(model.named_parameters(remove_duplicate=False)))
        with kept(model):
            result = observe(model, births, run, opened=True)
            if result is not None:
                return births, result[0]


def _is_plain(value: object) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided


def _is_float(value: object) -> bool:
    return (
        isinstance(value, Tensor)
        and (value.is_floating_point() or value.is_complex())
        and value.layout is torch.strided
        and value.numel() > 0
        and value.device.type != "meta"
    )


def _saturates(clamped: Tensor) -> bool:
    """Return whether the largest values that a clamp left are as large as float16's largest number."""
    limit = torch.finfo(torch.float16).max
    return _is_finite(clamped) and clamped.numel() > 0 and float(clamped.abs().max()) >= limit


def _is_finite(tensor: Tensor) -> bool:
    return bool(tensor.isfinite().all())


def _is_mask(tensor: Tensor) -> bool:
    """Return whether all that is not finite in a tensor is -inf."""
    return not bool((tensor.isnan() | (tensor == torch.inf)).any())


def first_of(bad: Tensor) -> tuple[int, ...]:
    """Return the index of the first element that is set; () where none is."""
    places = bad.nonzero()
    return tuple(int(each) for each in places[0]) if len(places) else ()


def _share(bad: Tensor) -> float:
    return int(bad.sum()) / bad.numel()
