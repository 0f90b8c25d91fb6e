"""Find roundings that flipped a route: a top-k, an argmax or a comparison that decided otherwise than the reference.

No row of an audit says so, as the bend of a route that flipped has all of it. Here the forward runs again in the
reference's dtype for each place that rounds, with that rounding alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from fxprec.inspection.nodes import short_paths, source_line
from fxprec.numerics.problem import kept
from fxprec.passes.graph.annotations import module_path
from fxprec.tape.attribution import observe
from fxprec.tape.operation import OpOrigin
from fxprec.tape.replay import ForwardRecorder, Replay, ReplayStep

#: Causes of a flip that are printed.
_SHOWN: Final = 3


@dataclass(frozen=True, slots=True)
class Cause:
    """Rounding that alone flips elements of a decision.

    Attributes:
        node, kind, graph: as of a row of the ledger: its row has the same.
        flipped: how many elements.
    """

    node: str
    kind: Literal["node", "weight", "outside"]
    graph: int
    flipped: int


@dataclass(frozen=True, slots=True)
class Route:
    """Op that decided otherwise than the reference: it read floats, and gave indices or a mask.

    Attributes:
        node: name of the node; of the op outside of the graphs.
        graph, module, source: as of a row of the ledger.
        op: of torch: ``aten::topk``.
        flipped: how many elements are others than in the reference, of all batches.
        count: how many there are.
        causes: roundings that flip some of them alone, most first. Flips that an earlier one made are counted likewise.
        by_none: elements that no rounding flips alone: several together do. Of each it must be known.
    """

    node: str
    graph: int
    module: str
    source: str
    op: str
    flipped: int
    count: int
    causes: tuple[Cause, ...]
    by_none: int

    def to_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        where = self.node + (f" ({self.source})" if self.source else "")
        alone = [f"{cause.node} {cause.flipped}" for cause in self.causes[:_SHOWN]]
        alone += [f"{len(self.causes) - _SHOWN} more"] if len(self.causes) > _SHOWN else []
        causes = "; ".join([f"alone flip: {', '.join(alone)}"] * bool(alone) + [f"by none alone {self.by_none}"])
        return f"{where} decides {self.flipped} of {self.count} elements otherwise than the reference; {causes}"


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
        source=short_paths(origin.source) if node is None else source_line(node),
        op=op,
        flipped=flips.flipped,
        count=flips.count,
        causes=tuple(Cause(each.name, each.kind, each.graph, count) for each, count in causes if count),
        by_none=flips.by_none,
    )
