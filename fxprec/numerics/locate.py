"""Locate the first value of a training step that is not finite, or became 0, and tell of it in sentences."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from fxprec.capture.pytrees import leaves_of
from fxprec.inspection.nodes import op_name
from fxprec.inspection.text import as_json
from fxprec.numerics.births import Birth, Source, Swallow, dense, is_finite
from fxprec.numerics.cures import Cure, Search, code_cure, in_bfloat16, policy_cure, smaller_scale
from fxprec.numerics.problem import Batch, Loss, Problem, not_in_inference_mode, scale_of
from fxprec.numerics.step import Births, Results, Run, TrainingStep
from fxprec.passes.graph.annotations import module_path
from fxprec.passes.graph.text import dtype_name
from fxprec.scaling.loss_scaler import LossScaler
from fxprec.tape.recorder import Decision, line_of

#: Numbers that Python read, of which so many are printed.
_SHOWN: Final = 3
Phase = Literal["forward", "backward", "input", "weight", "buffer", "loss", "optimizer"]


@dataclass(frozen=True, slots=True)
class Finding:
    """First value of a run that is not as it should be. ``print(finding)`` tells it in sentences.

    Attributes:
        phase: "forward" or "backward"; "input", "weight" or "buffer" where it came in with one; "loss" where it came in
            with the gradients that a loss outside of the model gave; "optimizer" where an optimizer's step wrote it, of
            finite weights and gradients (both ``watch``).
        kind: "overflow": a wider dtype has a finite value. "invalid": that has none either (0/0, inf - inf, the log of
            a negative number). "underflow": it is 0 and should not be. "scale too large": an overflow of gradients that
            a smaller loss scale does not have. "came in": no op of the run made it.
        node: of the graph; outside of the graphs the op; path of the weight or buffer, ``inputs[0]``.
        module: path of the module that computes it.
        op: canonical op of the node; class of the optimizer.
        dtype: of the value, "float16".
        source: ``model.py:12``.
        magnitude: of the largest value in a wider dtype that is not one in this; nan where there is none.
        limit: the largest value of the dtype; of an underflow its smallest.
        share: of the elements of the value, those that are so.
        index: of the first of them in the value: mostly it begins with the sample's number in the batch.
        example: the op on the first of them: ``div(0, 0) = nan``.
        reached: what it spoiled: "loss", "outputs", or "the gradient of" a parameter; "" where it reached nothing.
        swallowed: name of the node, or op, that read inf or nan and gave finite values, which are wrong; "" where none
            did.
        decisions: numbers that Python read between graphs, and that a reference has otherwise: FP32 may go another way.
        fails_in_fp32: the same run of the original model in FP32 is not finite either.
        scale: the loss scale of the run; 1.0 without a scaler.
        cure: what to change, as code that can be pasted where there is such; a change of the conversion was tried.
        instead: other cures, each by itself: a clamp to float16's range where that keeps the step finite.
        remarks: what else is known.
        masked: the op is a softmax, or attention, and a mask hides a whole row: -inf, all of it.
        step: number of the step whose optimizer wrote it (``watch``).
    """

    phase: Phase
    kind: Literal["overflow", "invalid", "underflow", "scale too large", "came in"]
    node: str
    module: str
    op: str
    dtype: str
    source: str
    magnitude: float
    limit: float
    share: float
    example: str
    reached: str
    fails_in_fp32: bool
    scale: float
    cure: str
    remarks: tuple[str, ...] = ()
    index: tuple[int, ...] = ()
    masked: bool = False
    step: int | None = None
    swallowed: str = ""
    decisions: tuple[Decision, ...] = ()
    instead: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return it for JSON: a magnitude that is not known, or not finite, is None."""
        return as_json(self)

    def __str__(self) -> str:
        lines = [self.headline]
        place = f"at [{', '.join(map(str, self.index))}]" if self.index else ""
        if self.example or place:
            lines.append(f"  {self.example or 'first'}{' ' if place else ''}{place}")
        lines += [f"  {remark}" for remark in (*self.remarks, *self.decisions[:_SHOWN])]
        if self.fails_in_fp32:
            lines.append("  the original model in FP32 fails here as well: no precision cures that")
        return "\n".join([*lines, f"  cure: {self.cure}", *(f"  or: {each}" for each in self.instead)])

    @property
    def headline(self) -> str:
        """Finding in one line."""
        where = self.node + (f" of module {self.module}" if self.module else "")
        where += f" ({self.source})" if self.source else ""
        computes = f"{self.op} in {self.dtype}" if self.op else self.dtype
        if self.kind == "came in":
            got = f"{self.reached} got them" if self.reached else "neither loss nor gradients show it"
            return f"{where} has values that are not finite ({_percent(self.share)} of them); {got}"
        if self.phase == "optimizer":
            did = "overflows" if self.kind == "overflow" else "gives what is no number"
            return (
                f"optimizer: {self.op} in step {self.step} {did} in {_percent(self.share)} of {where}, of finite "
                f"weights and gradients; {self.reached + ' got it' if self.reached else 'nothing has read it yet'}"
            )
        end = f"; {self.swallowed} made it finite again" if self.swallowed else f"; {self.reached} got it"
        if self.masked:
            return f"{self.phase}: {where}, {computes}, gives nan for rows that are masked as a whole{end}"
        if self.kind == "invalid":
            return f"{self.phase}: {where}, {computes}, gives what is no number, of finite values{end}"
        if self.kind == "underflow":
            return (
                f"{self.phase}: {where}, {computes}, gives 0 for {_percent(self.share)} of its values, the largest "
                f"{self.magnitude:.3g}; the smallest number is {self.limit:.3g}{end}"
            )
        # An op may overflow inside, and its result be in range: then no magnitude says so.
        beyond = "within the op" if self.magnitude <= self.limit else _against(self.magnitude, self.limit)
        scale = f" at a loss scale of {self.scale:g}" if self.kind == "scale too large" else ""
        return f"{self.phase}: {where}, {computes}, overflows{scale}: {beyond}{end}"


def _against(value: float, limit: float) -> str:
    """Return a value beside the limit that it is beyond, with as many digits as tell them apart."""
    digits = next((each for each in range(3, 17) if f"{value:.{each}g}" != f"{limit:.{each}g}"), 17)
    return f"{value:.{digits}g} against {limit:.{digits}g}"


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.01 or share == 0 else f"{share:.1g}"


@dataclass(frozen=True, slots=True)
class Trip:
    """Step of which an output or a gradient was not finite. ``print(trip)`` tells it in sentences.

    Attributes:
        step: its number: that of the steps before it that were watched.
        call: the model's call that it began in, of the calls that gradients came from (micro-batches), counted from 0;
            None: it is not known.
        calls: how many there were.
        rank: of this process among those that train together; None: there are no others.
        finding: where it began; None: see ``why``.
        why: why there is no finding.
        skipped: an optimizer would have taken the gradients, and did not.
        remarks: what else is known.
    """

    step: int
    call: int | None
    calls: int
    rank: int | None
    finding: Finding | None
    why: str = ""
    skipped: bool = False
    remarks: tuple[str, ...] = ()

    def __str__(self) -> str:
        # Only what tells calls or ranks apart is worth words.
        where = f"step {self.step}"
        if self.call is not None and self.calls > 1:
            where += f", call {self.call} of {self.calls}"
        if self.rank is not None:
            where += f", rank {self.rank}"
        skipped = ", and was skipped" if self.skipped else ""
        what = self.why if self.finding is None else str(self.finding)
        return "\n".join([f"{where} was not finite{skipped}: {what}", *(f"  {each}" for each in self.remarks)])


#: A parameter's gradient is lost where this share of its elements is 0, of those that are none in FP32.
_LOST: Final = 0.5


@not_in_inference_mode
def locate(
    model: nn.Module,
    batch: Batch,
    loss: Loss | None = None,
    scaler: LossScaler | None = None,
    *,
    method: str = "forward",
) -> Finding | None:
    """Run a training step op by op and find where the first value came to be that is not finite, or became 0.

    Forward, loss and backward run as they do in training, and every op's result is looked at. From a loss, an output or
    a gradient that is not finite the way leads back to the op that made it of finite values: masks of -inf on that way
    are no fault. An inf that an op makes finite again (``x / inf``) is found as well, where a run of the same ops in
    float64 (FP32 on accelerators) has finite values; what the model itself makes as large, as a mask, is no fault.
    Where all is finite, gradients are compared with those of the original model in FP32, and lost ones
    are followed back to the op that gave 0. Fused regions run op by op. The model is left as it was.

    Args:
        model: converted.
        batch: ``(*inputs, target)``, without a loss ``inputs``; or a dict of named inputs.
        loss: ``loss(output, target)``, a scalar; as ``fxprec.numerics.audit`` takes it.
        scaler: the loss is scaled by its scale, which stays. None: it is not scaled.
        method: runs in place of forward: one that ``convert(methods=...)`` was given, ``"vae.decode"``.

    Returns:
        What was found; None where every value that counts is finite and no gradient is lost.

    Raises:
        ConversionError: the model is not converted, or frozen.
        TypeError: arguments of other types.
        ValueError: a batch without a target, a loss that is no scalar; a method that does not exist, or that was not
            converted.
    """
    problem = Problem.of(model, loss, "locate", method)
    scale = scale_of(scaler)
    [batch] = problem.batches([batch])
    step = _BatchStep(model, scale, problem, batch)
    found = step.watched(flushed=False)
    finding = fault_of(step, found) if found.fault is not None else _bad_weight(step) or _lost_gradient(step, found)
    if finding is None or not found.births.reads_numbers:
        return finding
    return replace(finding, decisions=step.decisions())


def fault_of(step: TrainingStep, found: Run) -> Finding | None:
    """Return the finding about the fault of a watched run; None where the run found none."""
    if found.fault is None:
        return None
    birth, reached = found.fault
    # FP32 tells faults of the precision from those of the model: only the former a policy can cure.
    wide = step.in_fp32()
    if birth.kind == "invalid" and wide is not None and wide.is_finite:  # FP32 is not handed what became 0 before
        found = step.watched(flushed=True)
        birth, reached = found.fault or (birth, reached)
    fails = wide is not None and not wide.is_finite and found.swallowed is None
    return _finding(step, birth, reached, fails, found.swallowed)


@dataclass(frozen=True, slots=True)
class _BatchStep(TrainingStep):
    """Training step on a batch: forward, loss and backward."""

    problem: Problem
    batch: Batch

    def run(self) -> Results:
        # The step may be that of a copy of the problem's model.
        values, gradients = replace(self.problem, model=self.model).step(self.batch, self.scale)
        what = "outputs" if self.problem.loss is None and (len(values) > 1 or values[0].numel() > 1) else "loss"
        return Results(what, values, gradients)

    def brought(self) -> Iterator[tuple[Tensor, Source]]:
        parts = self.batch.items() if isinstance(self.batch, Mapping) else enumerate(self.batch)
        for name, part in parts:
            for leaf in leaves_of(part):
                if isinstance(leaf, Tensor):
                    yield leaf.detach(), Source("input", f"batch[{name!r}]")


def _bad_weight(step: TrainingStep) -> Finding | None:
    """Return a finding about a parameter that is not finite, although nothing of that reached the loss."""
    for name, parameter in step.model.named_parameters():
        if not is_finite(parameter.detach()):
            birth = Births((), {}).came_in(dense(parameter.detach()), Source("weight", name))
            return _finding(step, birth, "", fails_in_fp32=False)
    return None


def _lost_gradient(step: TrainingStep, found: Run) -> Finding | None:
    """Return a finding about the op that made most of a parameter's gradient 0, where FP32 has one."""
    wide = step.in_fp32()
    if wide is None or not wide.is_finite:
        return None

    def lost(name: str) -> float:
        exact, own = wide.gradients.get(name), found.gradients[name]
        if exact is None or exact.layout is not torch.strided or own.layout is not torch.strided:
            return 0.0
        # Elements that are 0 in FP32 as well (ReLUs, unused rows of a table) are not lost.
        some = exact != 0
        return float(((own == 0) & some).sum() / some.sum()) if bool(some.any()) else 0.0

    # One parameter with a lost gradient is enough to look for the op; none is the usual case, and costs nothing.
    names = [name for name in found.gradients if lost(name) > _LOST]
    if not names:
        return None
    # Zeros are followed in float64 beside every op, which is slow: only once a lost gradient is known.
    again = step.watched(flushed=True)
    flushed = ((again.births.flush(again.gradients[name]), name) for name in names)
    births = [(birth, f"the gradient of {name}") for birth, name in flushed if birth is not None]
    if not births:
        return None
    birth, reached = min(births, key=lambda each: each[0].number)
    return _finding(step, birth, reached, fails_in_fp32=False)


def _finding(
    step: TrainingStep, birth: Birth, reached: str, fails_in_fp32: bool, swallowed: Swallow | None = None
) -> Finding:
    origin, source = birth.origin, birth.source
    node = origin.node
    module, op = ("", "") if node is None else (module_path(node), op_name(node))
    info = torch.finfo(birth.dtype)
    remarks = [*birth.remarks]
    if swallowed is not None and swallowed.example:
        line = line_of(swallowed.origin)
        remarks.insert(0, f"{swallowed.name}{f' ({line})' if line else ''} gives {swallowed.example}")
    if birth.flushed is not None:
        earlier = birth.flushed
        remarks.append(
            f"{earlier.origin.name} gave 0 before, for values up to {earlier.magnitude:.3g}: {earlier.example}"
        )
    phase: Any = "backward" if origin.backward else "forward" if source is None else source.phase
    # An overflow of gradients that a smaller scale cures is no fault of the op.
    smaller = smaller_scale(step, birth)
    kind: Any = "overflow" if birth.kind == "meant" else birth.kind
    kind = kind if smaller is None else "scale too large"
    cure = _cure(step, birth, kind, smaller, fails_in_fp32)
    return Finding(
        phase=phase,
        kind=kind,
        node=origin.name,
        module=module
        or (origin.name.rpartition(".")[0] if source is not None and phase not in ("input", "loss") else ""),
        op="shadow" if origin.kind == "weight" and birth.op else op or birth.op.partition("::")[2],
        dtype=dtype_name(birth.dtype),
        source=line_of(origin),
        magnitude=birth.magnitude,
        limit=info.smallest_normal * info.eps if kind == "underflow" else info.max,
        share=birth.share,
        example=birth.example,
        reached=reached,
        fails_in_fp32=fails_in_fp32,
        scale=step.scale,
        cure=cure.text,
        instead=cure.instead,
        remarks=tuple(remarks),
        index=birth.index,
        masked=birth.masked,
        swallowed="" if swallowed is None else swallowed.name,
    )


def _cure(step: TrainingStep, birth: Birth, kind: str, smaller: float | None, fails_in_fp32: bool) -> Cure:
    origin = birth.origin
    if kind == "came in":
        assert birth.source is not None
        return Cure(
            {
                "input": "leave such samples out, or mend what makes them: torch.nan_to_num, or a check in the data "
                "loader",
                "weight": "load a checkpoint from before; fxprec.numerics.watch finds the step that wrote it",
                "buffer": "reset the buffer, or load a checkpoint from before",
                "loss": "the outputs are finite, and what is computed of them is not: "
                "fxprec.numerics.locate(model, (*inputs, target), loss) looks into the loss",
            }[birth.source.phase]
        )
    if smaller is not None:
        return Cure(
            f"scaler.update(new_scale={smaller:g}), or fxprec.LossScaler(init_scale={smaller:g}) from the start"
        )
    if birth.masked:
        return Cure(
            "leave a key of each row unmasked, or a large negative number such as -1e4 in the mask in place of -inf"
        )
    if kind == "underflow" and origin.backward:
        # A loss scale lifts the largest value that was lost 8 bits above the smallest number.
        info = torch.finfo(birth.dtype)
        wanted = 2**8 * info.smallest_normal * info.eps / birth.magnitude
        scale = step.scale * 2.0 ** max(1, math.ceil(math.log2(wanted)))
        if not step.at(scale).as_it_is().is_finite:
            return Cure(in_bfloat16(step))
        return Cure(
            f"a loss scale: scaler = fxprec.LossScaler(init_scale={scale:g}), and "
            "scaler.scale(loss).backward(); or dtype=torch.bfloat16, whose range is that of FP32"
        )
    return policy_cure(step, birth, fails_in_fp32) or Cure(code_cure(step, birth))


def keep_finite(model: nn.Module, loss: Loss | None, batches: Iterable[Batch]) -> list[str]:
    """Return nodes to keep in FP32 for steps on these batches to be finite; none where they are, or nothing helps."""
    found: dict[str, None] = {}
    for batch in batches:
        # Unscaled: tune compares losses, and a loss scale has another cure.
        step = _BatchStep(model, 1.0, Problem(model, loss), batch)
        fault = step.watched(flushed=False).fault
        tried = None if fault is None else Search(step).nodes(fault[0])
        found |= dict.fromkeys(name for _, name in (tried.chosen or {})) if tried is not None else {}
    return [*found]
