"""Find an overflow that no result shows: an inf of the run that the reference has not, and that was made finite again.

::

    scores = x @ x.T                    # inf in float16, 7.8e5 in float64: the birth
    x / (scores.diagonal() + 1).sqrt()  # 0, and its gradients are 0: the division swallows it

Beside the run every op runs in the reference's dtype on the reference's own values. An op that makes inf of finite
values, which a wider dtype does not, is known without that (``births``). Whether an inf behind it is a fault, as the
reference has a number there, is not. Masks that the model means (``masks``) are none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn

from fxprec.model.module import conversion_of
from fxprec.numerics.births import Birth, Births, OpCall, Source, first_of, observed
from fxprec.numerics.masks import Masks, is_fault
from fxprec.tape.attribution import written_by
from fxprec.tape.operation import OpOrigin
from fxprec.tape.recorder import OpRecorder
from fxprec.torch_internals import storage_key, tree_leaves

R = TypeVar("R")
#: Of a value: what the run has instead is another one, and not the same with its roundings.
_OTHER: Final = 0.1


class Compared(Births):
    """Births beside a reference, which tells the faults among those that were swallowed.

    Args:
        model: converted.
        reference: the dtype of the reference.
        sources, weights, flushed: as of ``Births``.
    """

    def __init__(
        self,
        model: nn.Module,
        reference: torch.dtype,
        sources: Iterable[tuple[Tensor, Source]],
        weights: Mapping[str, Tensor],
        flushed: bool = False,
    ) -> None:
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
            id(leaf): self._exact(leaf).clone()
            for leaf in tree_leaves((args, kwargs))
            if id(leaf) in written and leaf.layout is torch.strided
        }
        return self.recorder.op(function, args, kwargs, origin)

    def wrote(self, call: OpCall, made: Sequence[Tensor]) -> None:
        for result in made:
            self._masks.note(call, result, self._exact(result), self._read)

    def birth_of(self, call: OpCall, result: Tensor, inherited: Sequence[tuple[Tensor, Birth]]) -> Birth:
        """Return the birth of what is not finite in a result; a fault goes before what the reference has as well."""
        faults = [birth for _, birth in inherited if self.counts(birth)]
        if faults:
            return min(faults, key=lambda birth: birth.number)
        own = is_fault(result, self._exact(result), self._masks.of(result))
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
        pairs = [(result.to(exact.dtype), exact) for result in made for exact in (self._exact(result),)]
        return any(bool(((low - exact).abs() > _OTHER * exact.abs()).any()) for low, exact in pairs)

    def example(self, call: OpCall, read: Sequence[Tensor], made: Sequence[Tensor]) -> str:
        """Show the element furthest off of those that inf or nan came into: ``0 where the reference has 0.0031``."""
        for result in made:
            exact = self._exact(result)
            error = (result.to(exact.dtype) - exact).abs().nan_to_num(0.0)
            for value in read if torch.Tag.pointwise in call.function.tags else ():
                with contextlib.suppress(RuntimeError):  # of another shape
                    error = error * ~value.isfinite().expand(error.shape)
            if bool(error.any()):
                index = first_of(error == error.max())
                own, other = (f"{each[index].item():.4g}" for each in (result, exact))
                return f"{own} where the reference has {other}" if own != other else ""
        return ""

    def remarks(self, what: str, loss: Tensor | None) -> tuple[str, ...]:
        """Say what the reference has for the run's loss; None: the run has none."""
        if loss is None:
            return ()
        return (f"the {what} is {float(loss):.6g}, and {float(self._exact(loss)):.6g} in the reference",)

    def _is_constant(self, tensor: Tensor) -> bool:
        source = self._sources.get(storage_key(tensor))
        return source is None or source.phase == "buffer"

    def _exact(self, tensor: Tensor) -> Tensor:
        return self.recorder.memory.exact(self.recorder.memory.place(tensor))

    def _read(self, tensor: Tensor) -> Tensor:
        before = self._before.get(id(tensor))
        return self._exact(tensor) if before is None else before

    def _noted(self, birth: Birth) -> Birth:
        self._faults[id(birth)] = birth
        return birth


def compared(
    model: nn.Module,
    run: Callable[[], R],
    sources: Callable[[], Iterable[tuple[Tensor, Source]]] = tuple,
    flushed: bool = False,
) -> tuple[Compared, R]:
    """Run a converted model beside a reference: float64 on a CPU, elsewhere FP32, as ``audit`` has it."""
    reference = torch.float64 if conversion_of(model).settings.device == "cpu" else torch.float32
    return observed(model, run, lambda weights: Compared(model, reference, sources(), weights, flushed))
