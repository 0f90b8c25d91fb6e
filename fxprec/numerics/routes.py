"""Tell where a run went another way than the reference: by a number that Python read, or a decision that flipped.

::

    if h.sum() > 7:        # between two graphs: 7.06 in bfloat16, 7.05 in float64
        h = h * 2          # the ops of the run, which a reference beside it repeats

A reference that runs beside the model op by op takes the run's way through Python, and the numbers that Python read.
Where it would have read others, the model runs once more with those: what that gives is the true reference
(``own_way``).

Of a top-k, an argmax or a comparison that decided otherwise no row of an audit says why, as the bend of a route that
flipped has all of it. For that the forward runs again in the reference's dtype for each place that rounds, with that
rounding alone (``Routes``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor, nn

from fxprec.model.warm_up import kept
from fxprec.numerics.ledger import Cause, Route
from fxprec.passes.graph.annotations import module_path
from fxprec.tape.attribution import observe
from fxprec.tape.operation import Operation, OpOrigin
from fxprec.tape.recorder import OpRecorder, line_of, record
from fxprec.tape.replay import ForwardRecorder, Replay, ReplayStep

#: Runs that capture graphs of the other way, before that is given up.
_MOST_CAPTURES: Final = 8


@dataclass(slots=True)
class _Flips:
    """Flips of one decision, summed over batches."""

    flipped: int = 0
    count: int = 0
    by_none: int = 0
    causes: dict[OpOrigin, int] = field(default_factory=dict)


class Routes:
    """Decisions of a model that flip, while batches come in.

    Attributes:
        remarks: what is not looked into.
    """

    def __init__(self) -> None:
        self.remarks: dict[str, None] = {}
        self._found: dict[tuple[OpOrigin, str], _Flips] = defaultdict(_Flips)

    def add(self, model: nn.Module, run: Callable[[], object], reference: torch.dtype) -> None:
        """Run a batch, and where decisions flip once more for each place that rounds before the last of them."""
        done = False
        while not done:
            steps = ForwardRecorder(reference, model)
            with kept(model):
                done = observe(model, steps, run) is not None
                if done:
                    self._add(steps.steps, Replay(steps))

    def found(self) -> tuple[Route, ...]:
        """Return the decisions that flipped, in the order of running."""
        return tuple(_route(*key, flips) for key, flips in self._found.items() if flips.flipped)

    def _add(self, steps: Sequence[ReplayStep], replay: Replay) -> None:
        low = {(number, output): each for number, step in enumerate(steps) for output, each in step.decided.items()}
        exact, stopped = replay.decided((), max((number for number, _ in low), default=-1))
        flipped = {key: low[key] != each for key, each in exact.items() if each.shape == low[key].shape}
        # Roundings behind the last flip cannot have caused one.
        last = max((number for (number, _), each in flipped.items() if bool(each.any())), default=-1)
        rounding = dict.fromkeys(step.operation.origin for step in steps[: last + 1] if step.rounds)
        alone: dict[OpOrigin, Mapping[tuple[int, int], Tensor]] = {}
        if stopped is not None:
            self.remarks[f"routes behind {stopped.name} are not known: shapes are others there"] = None
        ended: list[str] = []
        for origin in rounding:
            alone[origin], end = replay.decided((origin,), last)
            ended += [] if end is None else [origin.name]
        if ended:
            self.remarks[f"not known what the roundings of {', '.join(ended)} flip: in shapes of the run alone"] = None
        for key, each in flipped.items():
            operation = steps[key[0]].operation
            known = self._found[operation.origin, operation.name]
            known.count += each.numel()
            known.flipped += int(each.sum())
            # An element is left where no rounding alone gives the run's decision.
            left = each.clone()
            for origin, decided in alone.items() if bool(each.any()) else ():
                is_known = key in decided and decided[key].shape == each.shape
                same = each & (decided[key] == low[key]) if is_known else torch.zeros_like(each)
                left &= ~same if is_known else same
                known.causes[origin] = known.causes.get(origin, 0) + int(same.sum())
            known.by_none += int(left.sum())


def _route(origin: OpOrigin, op: str, flips: _Flips) -> Route:
    node = origin.node
    causes = sorted(flips.causes.items(), key=lambda cause: -cause[1])
    return Route(
        node=origin.name,
        graph=origin.graph,
        module="" if node is None else module_path(node),
        source=line_of(origin),
        op=op,
        flipped=flips.flipped,
        count=flips.count,
        causes=tuple(Cause(each.name, each.kind, each.graph, count) for each, count in causes if count),
        by_none=flips.by_none,
    )


@dataclass(frozen=True, slots=True)
class OwnWay:
    """Results of the reference by the numbers that it reads itself.

    Attributes:
        values: the loss, or else the outputs.
        gradients: path -> gradient of the parameter.
        ops: those that ran, by place and name.
    """

    values: tuple[Tensor, ...]
    gradients: dict[str, Tensor]
    ops: tuple[tuple[OpOrigin, str], ...]

    def parts_at(self, recorder: OpRecorder) -> str | None:
        """Return the line of the run's first op that the reference does not run; None where both run the same."""
        own = ops_of(recorder.operations)
        if own == self.ops:
            return None
        pairs = zip(own, self.ops, strict=False)
        origin = next((mine for (mine, a), (other, b) in pairs if (mine, a) != (other, b)), None)
        # One is the beginning of the other: the first op that only the longer one has.
        if origin is None:
            longer = max(own, self.ops, key=len)
            origin = longer[min(len(own), len(self.ops))][0]
        return line_of(origin)


def ops_of(operations: Sequence[Operation]) -> tuple[tuple[OpOrigin, str], ...]:
    """Return the ops of a run, by place and name."""
    return tuple((operation.origin, operation.name) for operation in operations)


def own_way(model: nn.Module, run: Callable[[], Tensor | list[Tensor]], reference: torch.dtype) -> OwnWay | None:
    """Run a converted model by the reference's own numbers; the model is left as it was.

    Args:
        model: converted.
        run: calls it, and gives the loss or outputs; gradients are those that parameters have then.
        reference: the dtype of the reference.

    Returns:
        None where each run captured another graph.
    """
    for _ in range(_MOST_CAPTURES):
        with kept(model):
            recorded = record(model, run, reference, decides=True)
            if recorded is None:
                continue
            recorder, value = recorded
            exact = {name: _exact(recorder, p.grad) for name, p in model.named_parameters() if p.grad is not None}
            values = value if isinstance(value, list) else [value]
            return OwnWay(tuple(_exact(recorder, each) for each in values), exact, ops_of(recorder.operations))
    return None


def _exact(recorder: OpRecorder, tensor: Tensor) -> Tensor:
    return recorder.memory.exact(recorder.memory.place(tensor.detach())).clone()
