"""What an optimizer has to do with shadows, the low copies of weights: gradients left low, shadows written in a step.

The shadow stores of converted models, which make the edge from a parameter to its shadow, read which parameters are
marked for low gradients. Weights that no graph lowers keep FP32 gradients. A step writes the shadows of what it
updates, instead of at the next forward; an optimizer that cannot read low gradients ends them.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fxprec.errors import GradientsWarning
from fxprec.scaling.gradients import dtensor_type, parameters_of
from fxprec.shadows import ShadowStore, stores
from fxprec.shadows.low_gradients import Wishes, widened
from fxprec.torch_internals import foreach_copy_


class ShadowCopies:
    """Context of a step that writes shadows; empty if no converted model reads the parameters.

    After an error the parameters count as changed, and no shadow as written.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        known = stores()
        self._owners = [*parameters] if known else []
        # Most models know none of an optimizer's parameters: asked by ids before any list is made.
        ids = {*map(id, self._owners)}
        self._stores = [store for store in known if store.knows_any(ids)]
        self._by_store: list[tuple[ShadowStore, list[Tensor], list[Tensor]]] = []
        for store in self._stores:
            shadows = store.shadows_of(self._owners)
            owners, fitting = self._owners, [shadow for shadow in shadows if shadow is not None]
            if len(fitting) < len(owners):  # the others have no shadow, or one that no longer fits
                store.note_stepping(p for p, shadow in zip(owners, shadows, strict=True) if shadow is None)
                owners = [p for p, shadow in zip(owners, shadows, strict=True) if shadow is not None]
            if owners:
                self._by_store.append((store, owners, fitting))
        self._in_kernel: dict[int, Tensor] = {}

    def __enter__(self) -> ShadowCopies:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            for store in self._stores:
                store.note_stepping(self._owners)
            return
        # Shadows that no kernel wrote are copied, and the stores are told.
        for store, owners, shadows in self._by_store:
            written = [s for p, s in zip(owners, shadows, strict=True) if self._in_kernel.get(id(p)) is s]
            targets, sources = shadows, owners
            if written:
                copies = [(s, p) for p, s in zip(owners, shadows, strict=True) if self._in_kernel.get(id(p)) is not s]
                targets, sources = [s for s, _ in copies], [p for _, p in copies]
            if targets:
                foreach_copy_(targets, sources)
            # Autograd reports a step between forward and backward by versions, and a kernel bumps none.
            if written:
                torch.autograd.graph.increment_version(written)
            store.note_written(owners)

    def for_kernel(self, parameters: Sequence[Tensor]) -> list[Tensor | None]:
        """Return one shadow of each parameter for the kernel to write; those of other models are copied at the end."""
        if not self._by_store:
            return [None] * len(parameters)
        # A kernel writes one copy: that of the first model, as there is mostly one.
        _, owners, shadows = self._by_store[0]
        known = dict(zip(map(id, owners), shadows, strict=True))
        chosen = [known.get(id(p)) for p in parameters]
        self._in_kernel |= {id(p): shadow for p, shadow in zip(parameters, chosen, strict=True) if shadow is not None}
        return chosen


def checked_low_gradients(argument: Any) -> str | None:
    """Return the argument as None (FP32 gradients), "step" (low unless accumulated) or "accumulate" (low then too).

    Raises:
        ValueError: another argument than False, True or "accumulate". RuntimeError: torch has no ``grad_dtype``.
    """
    if argument is False or argument is None:
        return None
    if argument is not True and argument != "accumulate":
        raise ValueError(f"low_gradients must be False, True or 'accumulate', not {argument!r}")
    if not hasattr(Tensor, "grad_dtype"):
        raise RuntimeError(f"low_gradients need Tensor.grad_dtype, which torch {torch.__version__} does not have")
    return "accumulate" if argument == "accumulate" else "step"


def ask_for_low_gradients(parameters: Iterable[Tensor], how: str) -> Wishes:
    """Mark parameters for low gradients, from the next forward on that gives them a shadow.

    The marks count for as long as the optimizer holds the result.

    Raises:
        ValueError: DTensors, which have no persistent shadow.
    """
    # Gathered from shards at each forward, their low copies have no edge that could leave a gradient low.
    parameters = [*parameters]
    dtensor = dtensor_type()
    if dtensor is not None and any(isinstance(parameter, dtensor) for parameter in parameters):
        raise ValueError(
            "low_gradients=True for sharded parameters (DTensors), whose low copies live for one forward only: leave "
            "it out. With FSDP2, MixedPrecisionPolicy(reduce_dtype=...) halves the traffic of gradients"
        )
    _watch_other_optimizers()
    wishes = Wishes(parameters, how)
    # Their shadows' edges cast gradients back: new ones, which do not, are made at the next read.
    for store in stores():
        store.forget(parameters)
    return wishes


def end_low_gradients(parameters: Iterable[Tensor]) -> int:
    """Unmark parameters, whoever marked them, and cast their gradients to FP32; return how many were marked."""
    # Shadows are forgotten, since their edges would go on giving low gradients.
    changed = widened(parameters, how=("step", "accumulate"))
    for store in stores() if changed else ():
        store.forget(changed)
    return len(changed)


@functools.cache
def _watch_other_optimizers() -> None:
    """Register a hook before the steps of all optimizers that widens low gradients for other ones.

    torch's optimizers would fail on a low gradient half-way through their parameters.
    """

    def about_to_step(optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        # Ours read low gradients. A warning, not an error: the step is right, in FP32 from here on.
        if getattr(optimizer, "writes_shadows", False):
            return
        low = [p for p in parameters_of(optimizer) if p.grad is not None and p.grad.dtype is not p.dtype]
        if low and (count := end_low_gradients(low)):
            warnings.warn(
                f"{type(optimizer).__name__} steps on {count} parameters whose gradients another optimizer keeps low "
                "(low_gradients), which only fxprec.optim can read: they are FP32 from now on",
                category=GradientsWarning,
                stacklevel=3,
            )

    register_optimizer_step_pre_hook(about_to_step)
