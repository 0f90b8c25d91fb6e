"""Run a model as the reference alone runs it, where Python reads its numbers.

::

    if h.sum() > 7:        # between two graphs: 7.06 in bfloat16, 7.05 in float64
        h = h * 2          # the ops of the run, which a reference beside it repeats

A reference that runs beside the model op by op takes the run's way through Python, and the numbers that Python read.
Where it would have read others, the model runs once more with those: what that gives is the true reference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from fxprec.inspection.nodes import short_paths, source_line
from fxprec.numerics.problem import kept
from fxprec.tape.operation import Operation, OpOrigin
from fxprec.tape.recorder import OpRecorder, record

#: Runs that capture graphs of the other way, before that is given up.
_MOST_CAPTURES: Final = 8


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
        return short_paths(origin.source) if origin.node is None else source_line(origin.node)


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
