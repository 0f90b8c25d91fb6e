"""Keep of a watched call of a model what it takes to run it, and its backward, once more.

Arguments are kept as they are, not copied: what writes to one of them shows in its version counter. The backward begins
at the outputs with the gradients that came to them, so that nothing need be known of the loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fxprec.capture.pytrees import leaves_of
from fxprec.capture.untouched import RandomState
from fxprec.model.method_names import MethodName
from fxprec.numerics.births import Source, is_finite
from fxprec.numerics.problem import gradients_of, kept
from fxprec.numerics.step import Results, TrainingStep
from fxprec.numerics.watching.seen_call import SeenCall, floats
from fxprec.torch_internals import foreach_copy_, sequence_number, tree_flatten, tree_unflatten


@dataclass(frozen=True, slots=True)
class _Argument:
    """Argument of a call, in parts; tensors without their history. ``wanted``: which of them want a gradient."""

    name: str
    parts: list[Any]
    spec: Any
    wanted: list[bool]

    @classmethod
    def of(cls, name: str, value: Any) -> _Argument:
        parts, spec = tree_flatten(value)
        wanted = [isinstance(part, Tensor) and part.requires_grad for part in parts]
        return cls(name, [part.detach() if isinstance(part, Tensor) else part for part in parts], spec, wanted)

    def value(self) -> Any:
        """Return the argument as it was given."""
        parts = [
            part.detach().requires_grad_() if wants else part
            for part, wants in zip(self.parts, self.wanted, strict=True)
        ]
        return tree_unflatten(parts, self.spec)

    def tensors(self) -> Iterator[Tensor]:
        return (leaf for leaf in leaves_of(self.parts) if isinstance(leaf, Tensor))


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
        self,
        number: int,
        method: MethodName,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        buffers: dict[str, Tensor],
        only_torch: bool,
    ) -> None:
        super().__init__(number)
        self.method = method
        self._args = [_Argument.of(f"inputs[{position}]", value) for position, value in enumerate(args)]
        self._kwargs = {name: _Argument.of(f"inputs[{name!r}]", value) for name, value in kwargs.items()}
        self._versions = [(each.name, t, _version(t)) for each in self._arguments() for t in each.tensors()]
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
        return next((name for name, tensor, version in self._versions if _version(tensor) != version), None)

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
                found = torch.autograd.grad(output, read, given, retain_graph=True, allow_unused=True)
                for other, inner in zip(rest, found, strict=True):
                    if inner is not None:
                        totals[other] = torch.where(inner.isfinite(), totals[other] - inner, 0.0)
        self.gradients = {number: [totals[number]] for number in self.gradients}
        self._from_outside = True

    def outputs(self, model: nn.Module) -> Sequence[Tensor]:
        """Run the call again on a model, or on a copy, and return the outputs that a gradient may come to."""
        self.prepare(model)
        args, kwargs = self.arguments()
        return floats(getattr(model.get_submodule(self.method.path), self.method.name)(*args, **kwargs))

    def prepare(self, model: nn.Module) -> None:
        """Set buffers of the model, or of a copy, and random numbers as they were before the call."""
        self._random.restore()
        buffers = dict(model.named_buffers(remove_duplicate=False))
        with torch.no_grad():
            for path, value in zip(self.buffers, self._values, strict=True):
                buffers[path].copy_(value)

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments as they were given."""
        return tuple(each.value() for each in self._args), {name: each.value() for name, each in self._kwargs.items()}

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
        for argument in self._arguments():
            for tensor in argument.tensors():
                yield tensor, Source("input", argument.name)
        for number, gradients in self.gradients.items():
            for gradient in gradients:
                yield gradient, Source("loss", f"the gradient of outputs[{number}]")

    def _arguments(self) -> list[_Argument]:
        return [*self._args, *self._kwargs.values()]


@dataclass(frozen=True, slots=True)
class KeptStep(TrainingStep):
    """Kept call as a training step, with its backward. ``made_at``: the loss scale that its gradients have.

    Gradients that came of outputs which were not finite say nothing of a run where these are: that has those of a mean.
    """

    call: KeptCall
    made_at: float

    def at(self, scale: float) -> TrainingStep:
        return replace(self, scale=scale)

    def on(self, model: nn.Module) -> TrainingStep:
        return replace(self, model=model)

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
