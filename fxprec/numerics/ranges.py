"""Count how large all values and gradients of training steps are, which tells the dtype and the loss scale that fit.

Values are counted by the node, weight or op that they belong to: of nodes, of their backward, and of what runs between
the graphs.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fxprec.errors import FxprecError, few
from fxprec.inspection.measured import subject_of
from fxprec.inspection.nodes import NamedNode, op_name, short_paths
from fxprec.model.conversion import conversion_of
from fxprec.numerics.problem import Batch, Loss, Problem, not_in_inference_mode, scale_of, under
from fxprec.numerics.range_table import (
    Magnitudes,
    Range,
    Ranges,
    Tally,
    advise,
    all_finite,
    as_floats,
    can_count,
    flushed_of,
    percent,
    power,
    tightest_first,
)
from fxprec.numerics.step import observed
from fxprec.passes.graph.annotations import module_path, notes
from fxprec.passes.graph.text import dtype_name
from fxprec.scaling.gradients import local_values
from fxprec.scaling.loss_scaler import LossScaler
from fxprec.tape.attribution import Attribution, written_by
from fxprec.tape.operation import OpOrigin
from fxprec.tape.recorder import line_of
from fxprec.torch_internals import aten_foreach_copy_, aten_to_copy, current_autograd_node, storage_key, tree_leaves


@not_in_inference_mode
def ranges(
    model: nn.Module,
    batches: Iterable[Batch],
    loss: Loss | None = None,
    scaler: LossScaler | None = None,
    *,
    every: int = 1,
) -> Ranges:
    """Run training steps and count how large all values and gradients are: by node, dtype and exponent.

    Forward, loss and backward run op by op as they do in training; the optimizer does not, and the model is left as it
    was. Counts stay on the device until the end. Of fused regions the nodes are counted, which here run one by one:
    what a kernel keeps in registers may be wider there.

    Zeros are counted as they are: which of them are none in FP32 one run cannot know. So a float16 model is run a
    second time, as a copy in bfloat16, whose exponents are FP32's: that gives ``Range.flushed`` and the advice. Of a
    bfloat16 model the run itself says what float16 would flush (``Range.flushed_in``).

    Where the loss or the gradients of a batch are not finite, no scale follows, and ``Ranges.why_no_scale`` names the
    batches. The largest safe loss scale of these batches, ready for ``fxprec.LossScaler(init_scale=ranges.scale)``,
    leaves the largest gradient two bits. float16 is advised where nothing in the forward comes within a bit of its
    largest number, and at that scale at most a hundredth of the gradients becomes 0; a weight's gradient that is lost
    by half, or a value, is one reason more for bfloat16.

    Args:
        model: converted.
        batches: of ``(*inputs, target)``, without a loss ``inputs``; or dicts of named inputs.
        loss: ``loss(output, target)``, a scalar; as ``fxprec.numerics.audit`` takes it. Of outputs that are no loss the
            gradients are those of their sum.
        scaler: the loss is scaled by its scale, which stays. None: it is not scaled.
        every: look at every n-th batch, beginning with the first. The others are not run at all.

    Raises:
        ConversionError: the model is not converted, or frozen.
        TypeError: arguments of other types.
        ValueError: no batch, a loss that is no scalar, ``every`` below 1.
    """
    problem = Problem.of(model, loss, "ranges")
    scale = scale_of(scaler)
    if not isinstance(every, int) or isinstance(every, bool):
        raise TypeError(f"every must be a whole number, not {type(every).__name__}: 10 looks at every tenth batch")
    if every < 1:
        raise ValueError(f"every must be at least 1, not {every}: 10 looks at every tenth batch")
    low = conversion_of(model).settings.dtype
    own, wide, remarks = Counting(model), Counting(model), []
    # What became 0 in float16 shows only beside a run with more exponents.
    in_bfloat16, why_none = _in_bfloat16(problem) if low is torch.float16 else (None, "")
    number, own_faults, wide_faults = 0, _Faults(every), _Faults(every)
    first: Batch | None = None
    for number, batch in enumerate(itertools.islice(problem.batches(batches), 0, None, every), 1):
        first = batch if number == 1 else first
        own.merge(_counted(problem, batch, scale, own_faults))
        if in_bfloat16 is not None:
            try:
                wide.merge(_counted(in_bfloat16, batch, scale, wide_faults))
            except (FxprecError, RuntimeError) as error:
                in_bfloat16, why_none = None, _first_line(error)
    rows = _rows(own)
    seen, seen_in, faults = rows, low, own_faults
    if in_bfloat16 is not None:
        seen, seen_in, faults = _rows(wide), torch.bfloat16, wide_faults
        rows, seen = _with_wide(rows, seen), _named_as(rows, _low_in_float16(seen, rows))
    elif why_none:
        remarks.append(f"what float16 flushed is not known: the model does not run in bfloat16 ({why_none})")
    if own.skipped:
        remarks.append(f"not counted, for their layout or dtype: results of {', '.join(sorted(own.skipped))}")
    advice = advise(seen, seen_in, scale, faults.told())
    # bfloat16 lowers more than float16 would: what float16 keeps in FP32 must not speak against it.
    if low is torch.bfloat16 and advice.dtype is torch.bfloat16 and first is not None:
        try:
            narrow = Counting(model)
            narrow.merge(_counted(Problem(under(model, dtype=torch.float16), loss), first, scale, _Faults(every)))
            advice = advise(_low_in_float16(seen, _rows(narrow)), seen_in, scale, faults.told())
        except (FxprecError, RuntimeError, ValueError) as error:
            why = _first_line(error)
            remarks.append(f"judged as if float16 kept nothing more in FP32, as the model does not run in it ({why})")
    unscaled = low is torch.float16 and (scaler is None or not scaler.is_enabled())
    warnings = _warnings(seen, seen_in, advice.scale) if unscaled else ()
    return Ranges(
        rows=tightest_first(rows),
        batches=number,
        ran_in=low,
        ran_at=scale,
        **advice._asdict(),
        warnings=warnings,
        remarks=tuple(remarks),
        subject=subject_of(model, "ranges"),
    )


def _in_bfloat16(problem: Problem) -> tuple[Problem | None, str]:
    """Return the same model with FP32's exponents, or why there is none."""
    try:
        return Problem(under(problem.model, dtype=torch.bfloat16), problem.loss), ""
    except (FxprecError, ValueError) as error:
        return None, _first_line(error)


def _first_line(error: Exception) -> str:
    return short_paths((str(error).splitlines() or [type(error).__name__])[0])


class _Faults:
    """Batches, of every n-th, whose loss or gradients were not finite. Flags stay on the device until ``told``."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._sound: dict[str, list[Tensor]] = {"the loss was": [], "gradients were": []}

    def note(self, values: Sequence[Tensor], gradients: Iterable[Tensor]) -> None:
        """Note one batch. Outputs that are no loss may be infinite."""
        # Flags are kept on the device: a wait for each batch would slow the run.
        loss = values if len(values) == 1 and values[0].numel() == 1 else ()
        for flags, tensors in zip(self._sound.values(), (loss, map(local_values, gradients)), strict=True):
            sound = [tensor.isfinite().all() for tensor in tensors]
            flags.append(torch.stack(sound).all() if sound else torch.tensor(True))

    def told(self) -> str:
        """Write which batches were not finite, in words; "" where all were."""
        for what, flags in self._sound.items():
            bad = [str(number * self._every) for number, flag in enumerate(flags) if not flag]
            if bad:
                return f"{what} not finite in batch {few(bad)}"
        return ""


def _counted(problem: Problem, batch: Batch, scale: float, faults: _Faults) -> Counting:
    """Run one training step and return what it counted."""
    run = functools.partial(problem.step, batch, scale)
    counting, (values, gradients) = observed(problem.model, run, lambda _: Counting(problem.model))
    for name, gradient in gradients.items():
        counting.gradient(name, gradient)
    if gradients and len(values) == 1 and values[0].numel() == 1:
        counting.count(OpOrigin("outside", "scaled loss", backward=True), values[0] * scale)
    faults.note(values, gradients.values())
    return counting


def _rows(counting: Counting) -> list[Range]:
    found = Tally.read([*counting.tallies.values()])
    return [_row(origin, dtype, values) for (origin, dtype), values in zip(counting.tallies, found, strict=True)]


def _row(origin: OpOrigin, dtype: torch.dtype, values: Magnitudes) -> Range:
    node = origin.node
    module, op, region = "", origin.name, ""
    if origin.kind == "weight":
        module, op = origin.name.rpartition(".")[0], "gradient" if origin.backward else "shadow"
    elif node is not None:
        module, op, region = module_path(node), op_name(node), notes(node).region
    phase: Literal["forward", "backward"] = "backward" if origin.backward else "forward"
    where = origin.name, origin.kind, origin.graph
    return Range(*where, phase, module, op, dtype_name(dtype), line_of(origin), region, values)


def _with_wide(rows: list[Range], seen: list[Range]) -> list[Range]:
    """Return rows with the values of the same place in bfloat16, where one place alone has the name."""
    # Two places of one name could be paired wrongly, and a wrong "flushed" is worse than none.
    places = Counter(map(_place, seen))
    known = {_place(row): row.values for row in seen}
    times = Counter(map(_place, rows))
    return [replace(row, wide=known[at]) if places[at := _place(row)] == times[at] == 1 else row for row in rows]


def _low_in_float16(seen: list[Range], narrow: list[Range]) -> list[Range]:
    """Return the rows of a run in bfloat16 but for those that are FP32 in float16, whatever their range is.

    Under one policy more is FP32 there: squares, and products with numbers that float16 cannot hold.

    Args:
        seen: of a run in bfloat16.
        narrow: of a run in float16.
    """
    low = {_place(row) for row in narrow}
    known = {_place(row)[:-1] for row in narrow}

    def stays_low(row: Range) -> bool:
        return row.dtype != "bfloat16" or _place(row) in low or (row.op != "cast" and _place(row)[:-1] not in known)

    return [row for row in seen if stays_low(row)]


def _named_as(rows: list[Range], seen: list[Range]) -> list[Range]:
    """Return rows of a model's copy under the model's own names; other casts are named after what they cast."""
    # Reasons must name nodes that the user finds in the model, not in our copy of it.
    names = {_place(row): row.node for row in rows}
    copies = ((row, row.node.removesuffix("_bf16") if row.op == "cast" else row.node) for row in seen)
    return [replace(row, node=names.get(_place(row), name)) for row, name in copies]


def _place(row: Range) -> tuple[str, ...]:
    """Return a name of a place that is the same in both dtypes: casts are named for theirs."""
    dtype = row.dtype.replace("bfloat16", "low").replace("float16", "low")
    name = row.node.replace("_bf16", "_low").replace("_f16", "_low") if row.op == "cast" else row.node
    return name, row.kind, row.phase, row.module, row.op, dtype


def _warnings(rows: list[Range], low: torch.dtype, scale: float | None) -> tuple[str, ...]:
    backward = [row for row in rows if row.phase == "backward" and row.dtype == dtype_name(low)]
    share = flushed_of(backward, torch.float16, 1.0)
    if not share:
        return ()
    cure = (
        f"scaler = fxprec.LossScaler(init_scale={power(scale)})" if scale is not None else "a loss scaler, or bfloat16"
    )
    flushed = f"{percent(share)} of the gradients are flushed to 0"
    return (f"float16 trains unscaled (no scaler was given, or it is disabled): {flushed}; {cure}",)


@dataclass(slots=True)
class _RunningNode:
    """State of a node while it runs.

    Attributes:
        made: storages that its ops made or wrote to.
        inputs: of each tensor that came in, whether it is finite.
        infinite: one of the numbers in its arguments is not.
    """

    made: set[int] = field(default_factory=set)
    inputs: list[Tensor] = field(default_factory=list)
    infinite: bool = False

    @property
    def sound(self) -> Tensor | None:
        """Flag on the device, true if all that came in is finite; None with an inf among arguments, or no input."""
        if self.infinite or not self.inputs:
            return None
        # Flags of several devices meet on an accelerator: moving them to the CPU would wait for it.
        device = next((each.device for each in self.inputs if each.device.type != "cpu"), self.inputs[0].device)
        return torch.stack([each.to(device) for each in self.inputs]).all()


class Counting(Attribution):
    """Dispatch mode that counts magnitudes of values, by the op or weight they belong to and by dtype.

    A node's value is counted as the node gives it. A view of what is there already has none of its own, nor has memory
    that was made and not written. In the backward, and outside of the graphs, every op's result is counted.

    Args:
        model: the one that runs, whose weights get names.

    Attributes:
        tallies: of weights, forward: their low copies; backward: their gradients.
        skipped: names of ops with results that cannot be counted: sparse ones, packed ones.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._paths = {storage_key(parameter): path for path, parameter in model.named_parameters()}
        self.tallies: dict[tuple[OpOrigin, torch.dtype], Tally] = {}
        self.skipped: set[str] = set()
        self._running: list[_RunningNode] = []
        self._own = False
        self._weights: set[str] = set()

    def merge(self, other: Counting) -> None:
        """Add what another one counted."""
        for key, tally in other.tallies.items():
            if key in self.tallies:
                self.tallies[key].merge(tally)
            else:
                self.tallies[key] = tally
        self.skipped |= other.skipped

    def count(self, origin: OpOrigin, values: Tensor, sound: Tensor | None = None) -> None:
        """Count values that belong to somebody; ``sound``: as of ``Tally.add``."""
        values = as_floats(values.detach())
        if values.numel() == 0:
            return
        # Counting runs ops itself: they are not counted.
        self._own = True
        try:
            with torch.no_grad():
                key = origin, values.dtype
                if key not in self.tallies:
                    self.tallies[key] = Tally(values.dtype, values.device)
                self.tallies[key].add(values, sound)
        finally:
            self._own = False

    def gradient(self, path: str, gradient: Tensor) -> None:
        """Count what a parameter's gradient is when the backward is done; of a distributed one what this rank holds."""
        gradient = local_values(gradient)
        if can_count(gradient):
            self.count(OpOrigin("weight", path, backward=True), gradient)
        else:
            self.skipped.add(f"the gradient of {path}")

    def begin(self, shadows: Mapping[str, Tensor]) -> None:
        """Count the low copies of weights, each once."""
        for path, shadow in shadows.items():
            self._weight(path, shadow)

    def look(self, node: NamedNode, run: Callable[[], Any]) -> Any:
        """Run a node and count what it gives, except where a checkpoint computes it a second time."""
        self._running.append(_RunningNode())
        try:
            result = super().look(node, run)
        finally:
            own = self._running.pop()
        # With gradients on within a backward, a checkpoint recomputes its forward: those values were counted already.
        inside = current_autograd_node()
        if inside is not None and torch.is_grad_enabled():
            return result
        origin = OpOrigin("node", node.name, node.graph, backward=inside is not None, node=node.node)
        made = [each for each in tree_leaves(result) if can_count(each) and storage_key(each) in own.made]
        sound = own.sound if made else None
        for each in made:
            self.count(origin, each, sound)
        return result

    def _weight(self, path: str, low: Tensor) -> None:
        if path not in self._weights and can_count(low):
            self._weights.add(path)
            self.count(OpOrigin("weight", path), low)

    def op(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], origin: OpOrigin) -> Any:
        """Run an op, and count or note what it makes."""
        if self._own or function is aten_foreach_copy_:  # shadows that are written again: ``begin`` counts those read
            return function(*args, **kwargs)
        # What comes into a node tells an overflow that began here from one that was passed on.
        leaves = tree_leaves((args, kwargs))
        written = written_by(function, args, kwargs)
        before = {storage_key(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.layout is torch.strided}
        node = self._running[-1] if self._running else _RunningNode()
        node.infinite |= any(isinstance(leaf, float) and math.isinf(leaf) for leaf in leaves)
        node.inputs += [
            all_finite(leaf)
            for leaf in leaves
            if can_count(leaf) and leaf.numel() and storage_key(leaf) not in node.made
        ]
        output = function(*args, **kwargs)
        results = [each for each in tree_leaves(output) if isinstance(each, Tensor)]
        if any(each.is_floating_point() and not can_count(each) for each in results):
            self.skipped.add(function.name())
        # Views share their input's storage: their values were counted when they were made. In memory that an op only
        # allocates nobody's values stand yet.
        own = () if "empty" in function.name() else results
        fresh = [each for each in own if can_count(each) and storage_key(each) not in before]
        made = [*fresh, *(leaf for leaf in leaves if can_count(leaf) and id(leaf) in written)]
        # Within a node only its result counts, as users see it; the node's own ``look`` counts it.
        if self._running:
            node.made |= {storage_key(each) for each in made}
            return output
        path = self._paths.get(storage_key(args[0])) if function is aten_to_copy and not origin.backward else None
        for each in made:
            if path is not None:
                self._weight(path, each)
            else:
                self.count(origin, each, node.sound)
        return output
