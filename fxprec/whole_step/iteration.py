"""Run one training iteration on a checked batch, in micro-batches, and handle its scaler.

On a CPU it runs as it stands, on CUDA for a capture.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer

from fxprec.errors import CaptureError
from fxprec.model.conversion import Conversion, conversion_of, is_converted
from fxprec.model.entry_point import CallWatcher
from fxprec.model.inference import accumulate
from fxprec.model.warm_up import values_kept
from fxprec.scaling.gradients import leaves_below, parameters_of
from fxprec.scaling.loss_scaler import LossScaler
from fxprec.shadows import ShadowStore
from fxprec.torch_internals import fresh_states, place_scale, scale_names, scaler_states, set_scaler_states, tree_leaves


@dataclass(frozen=True, slots=True)
class Batch:
    """Positional and keyword arguments of one step, checked.

    Attributes:
        names: of the keyword arguments, which are the last of ``values``.
        values: tensors; anything else is a constant of the graph.
    """

    names: tuple[str, ...]
    values: tuple[Any, ...]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any], parts: int) -> Batch:
        """Check the arguments of a call. A dict that is the only one is a batch of keyword arguments.

        Raises:
            TypeError: no tensor; a tensor that is not plain and strided; a constant that is not hashable.
            ValueError: a tensor that wants a gradient; a first dimension that ``parts`` does not divide, or that is
                not the same for all tensors.
        """
        # ``step(batch)`` with the dict of a data loader means the same as ``step(**batch)``.
        if len(args) == 1 and not kwargs and isinstance(args[0], Mapping):
            args, kwargs = (), args[0]
        names = tuple(sorted(kwargs))  # one graph, however they are ordered
        batch = cls(names, (*args, *map(kwargs.__getitem__, names)))
        if not any(isinstance(value, Tensor) for value in batch.values):
            raise TypeError("a step takes the tensors of one batch, step(x, y), and got none")
        for where, value in batch._named():
            _check(where, value)
        if parts > 1:
            batch._check_parts(parts)
        return batch

    def key(self) -> Hashable:
        """Return a key that is equal for the batches that one graph serves."""
        # A graph is bound to strides as well: kernels were chosen by them.
        return self.names, tuple(
            (value.shape, value.stride(), value.dtype) if isinstance(value, Tensor) else (type(value), value)
            for value in self.values
        )

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and keyword arguments as they were given."""
        count = len(self.values) - len(self.names)
        return self.values[:count], dict(zip(self.names, self.values[count:], strict=True))

    def parts(self, count: int) -> list[Batch]:
        """Return ``count`` micro-batches: views, cut along dimension 0."""
        if count == 1:
            return [self]
        # Views, so that a graph reads its micro-batches from the one static batch.
        cut = [v.chunk(count) if isinstance(v, Tensor) else (v,) * count for v in self.values]
        return [Batch(self.names, values) for values in zip(*cut, strict=True)]

    def static(self, device: torch.device) -> Batch:
        """Copy the batch to memory of its own on ``device``, which a graph reads at every replay."""
        return self._copied(lambda value: torch.empty_like(value, device=device).copy_(value))

    def copy(self) -> Batch:
        """Copy the batch to memory of its own, where it is."""
        return self._copied(Tensor.clone)

    def _copied(self, copy: Callable[[Tensor], Tensor]) -> Batch:
        return Batch(self.names, tuple(copy(v) if isinstance(v, Tensor) else v for v in self.values))

    def fill(self, other: Batch) -> None:
        """Take the values of another batch of the same key. From pinned memory nothing waits for the copies."""
        with torch.no_grad():
            for mine, given in zip(self.values, other.values, strict=True):
                if isinstance(mine, Tensor):
                    mine.copy_(given, non_blocking=True)

    def described(self) -> str:
        """Write shapes and dtypes, for messages."""
        found = [
            f"{str(v.dtype).removeprefix('torch.')}{[*v.shape]}" if isinstance(v, Tensor) else repr(v)
            for v in self.values
        ]
        first = len(found) - len(self.names)
        return ", ".join([*found[:first], *map("=".join, zip(self.names, found[first:], strict=True))])

    def _named(self) -> list[tuple[str, Any]]:
        first = len(self.values) - len(self.names)
        return [*zip((*map(str, range(first)), *self.names), self.values, strict=True)]

    def _check_parts(self, parts: int) -> None:
        sizes: dict[str, int] = {}
        for where, value in self._named():
            if isinstance(value, Tensor):
                if not value.dim():
                    raise ValueError(f"accumulate={parts}: argument {where} has no dimension to cut micro-batches from")
                sizes[where] = value.shape[0]
        # A mean over unequal parts would be no mean of the batch.
        if len({*sizes.values()}) > 1 or next(iter(sizes.values())) % parts:
            raise ValueError(
                f"accumulate={parts} cuts a batch into {parts} equal parts along dimension 0, and the sizes there are "
                f"{', '.join(f'{size} (argument {where})' for where, size in sizes.items())}"
            )


def _check(where: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        try:
            hash(value)
        except TypeError:
            constant = False
        else:  # a tuple of tensors has a hash too, another for each batch
            constant = not any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))
        if not constant:
            raise TypeError(
                f"argument {where} is a {type(value).__name__}: a step takes tensors, and hashable constants such as "
                "numbers; give the tensors within it one by one"
            )
    elif type(value) not in (Tensor, torch.nn.Parameter) or value.layout is not torch.strided:
        raise TypeError(f"argument {where} is a {type(value).__name__} of layout {value.layout}: give a strided tensor")
    elif value.requires_grad:
        raise ValueError(f"argument {where} requires a gradient, which a step has no place for: detach() it")


class Iteration:
    """Forward, loss, backward, unscale, clip, update and scale update; see ``capture_step`` for the arguments.

    Attributes:
        parameters: of the model, the loss and the optimizer, each once, when ``look`` was called last.
        conversions: of the converted modules among them.
    """

    def __init__(
        self, model: nn.Module, loss_fn: Callable[..., Any] | None, optimizer: Optimizer, scaler: torch.amp.GradScaler,
        parts: int, max_norm: float | None,
    ) -> None:  # fmt: skip
        self.model, self.loss_fn, self.optimizer, self.scaler = model, loss_fn, optimizer, scaler
        self.parts, self.max_norm = parts, max_norm
        self.parameters: list[Tensor] = []
        self.conversions: list[Conversion] = []

    def look(self) -> None:
        """Find the parameters and conversions anew: a walk through all modules, which would take long at every step."""
        # A set by identity: tied weights, and parameters that only the optimizer knows, count once.
        everything = [module for root in self.roots() for module in root.modules()]
        found: dict[int, Tensor] = {id(p): p for root in self.roots() for p in root.parameters()}
        self.parameters = [*(found | {id(p): p for p in parameters_of(self.optimizer)}).values()]
        self.conversions = [conversion_of(module) for module in everything if is_converted(module)]

    def run(self, batch: Batch, *, zeroed: bool = False) -> tuple[Tensor, Tensor | None]:
        """Run one step. Gradients are gone before and after it, and the scaler is between iterations, also on an error.

        Args:
            batch: of this step.
            zeroed: the first of a warm-up, with gradients of zero, so that there is no overflow, and the optimizer
                makes its state.

        Returns:
            The loss, 0-dim FP32 and detached: the mean over micro-batches; and what the scaler found, 0-dim FP32, above
            0 where the step was skipped. None: a scaler of torch's, or a disabled one.

        Raises:
            CaptureError: ``zeroed``, and the backward reaches parameters that are none of these.
        """
        self.drop_gradients()
        try:
            return self._run(batch, zeroed)
        except BaseException:
            forget_iteration(self.scaler)
            raise
        finally:
            self.drop_gradients()

    def _run(self, batch: Batch, zeroed: bool) -> tuple[Tensor, Tensor | None]:
        losses = self.backward(batch, self.scaler.scale, known=self.parameters if zeroed else None)
        if zeroed:
            # Gradients of zero never overflow: the optimizer makes its state, and no value moves much.
            for parameter in self.parameters:
                if parameter.grad is not None:
                    parameter.grad.zero_()
        self._clip()
        self.scaler.step(self.optimizer)
        ours = scaler if isinstance(scaler := self.scaler, LossScaler) and scaler.is_enabled() else None
        found = None if ours is None else ours._records.found_by(self.optimizer)
        self.scaler.update()
        return losses[0] if self.parts == 1 else torch.stack(losses).mean(), found

    def backward(
        self, batch: Batch, scaled: Callable[[Tensor], Tensor], *, known: list[Tensor] | None = None
    ) -> list[Tensor]:
        """Run forward and backward of each micro-batch.

        Args:
            batch: of this step.
            scaled: what a loss is multiplied by.
            known: the backward may reach no others.

        Returns:
            The losses, 0-dim FP32 and detached.
        """
        losses: list[Tensor] = []
        # Weights do not move between micro-batches: their shadows are refreshed once.
        once = accumulate(self.model) if self.parts > 1 and is_converted(self.model) else nullcontext()
        with torch.enable_grad(), once, self._no_old_casts():
            for part in batch.parts(self.parts):
                loss = self._loss(part)
                losses.append(loss.detach().float())
                if known is not None:
                    refuse_strangers(loss, known)
                scaled(loss if self.parts == 1 else loss / self.parts).backward()
                del loss  # and its autograd graph, before the next micro-batch makes one
        return losses

    def roots(self) -> list[nn.Module]:
        """Return the model, and a loss that is a module."""
        return [self.model, *([self.loss_fn] if isinstance(self.loss_fn, nn.Module) else [])]

    def stores(self) -> list[ShadowStore]:
        """Return the shadow stores of every converted module in the step."""
        return [conversion.store for conversion in self.conversions]

    def watchers(self) -> list[CallWatcher]:
        """Return the watchers of its models (``fxprec.numerics.watch``)."""
        return [each.watcher for each in self.conversions if each.watcher is not None]

    def drop_gradients(self) -> None:
        """Drop the gradients of everything that a backward may reach."""
        for parameter in (*self.parameters, *parameters_of(self.optimizer)):  # a group may have been added
            parameter.grad = None

    @contextmanager
    def _no_old_casts(self) -> Iterator[None]:
        """Keep the caller's autocast from using weights that were cast before this step, and from keeping any."""
        around = torch.is_autocast_enabled(self.parameters[0].device.type)
        before = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(before and not around)
        try:
            yield
        finally:
            torch.set_autocast_cache_enabled(before)

    def _loss(self, batch: Batch) -> Tensor:
        args, kwargs = batch.arguments()
        if self.loss_fn is None:
            loss = self.model(*args, **kwargs)
            whose = "the output of the model (there is no loss_fn)"
        else:
            # As convert(loss=...): the last positional argument is the target.
            inputs, targets = (args[:-1], args[-1:]) if len(args) > 1 else (args, ())
            loss = self.loss_fn(self.model(*inputs, **kwargs), *targets)
            whose = "what loss_fn returned"
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            got = f"{loss.dtype}{[*loss.shape]}" if isinstance(loss, Tensor) else type(loss).__name__
            raise TypeError(f"{whose} must be the loss, a tensor of one floating-point number, not {got}")
        return loss.view(())

    def _clip(self) -> None:
        if self.max_norm is None:
            return
        # Norms are of unscaled gradients.
        if self.scaler.is_enabled():
            self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(parameters_of(self.optimizer), self.max_norm)


def refuse_strangers(loss: Tensor, known: Iterable[Tensor]) -> None:
    """Check that the backward of a loss reaches no other parameters than those known.

    A gradient that stays from step to step is added to in place: a graph would go on to write where it was when the
    step was captured, also after a ``zero_grad`` gave that memory to somebody else.

    Raises:
        CaptureError: it reaches a parameter, or a tensor with a gradient, that is not ``known``.
    """
    # By identity: tensors compare by element.
    ours = {*map(id, known)}
    for leaf in leaves_below(loss):
        if id(leaf) not in ours and (isinstance(leaf, nn.Parameter) or leaf.grad is not None):
            raise CaptureError(
                f"the backward reaches a parameter of shape {tuple(leaf.shape)} and {leaf.dtype} that belongs neither "
                "to the model nor to loss_fn nor to the optimizer (a discriminator, a frozen network within a "
                "function?): requires_grad_(False) if it is not to be trained, else give loss_fn as a module that "
                "holds it"
            )


def scale_tensors(scaler: GradScaler) -> list[Tensor]:
    """Return scale and trackers, where they were placed."""
    losses: Any = scaler._scales.losses if isinstance(scaler, LossScaler) else [scaler]
    names = ("scale", "growth_tracker", "hysteresis_left") if isinstance(scaler, LossScaler) else scale_names
    if not scaler.is_enabled():
        return []
    return [tensor for loss in losses for name in names if (tensor := getattr(loss, name)) is not None]


def refuse_open_iteration(scaler: GradScaler) -> None:
    """Raise a RuntimeError if something was scaled, unscaled or stepped since the last update.

    The step ends with an update of its own, which would move the scale under these gradients.
    """
    if not scaler.is_enabled():
        return
    open_ = any(state["stage"] is not OptState.READY for state in scaler_states(scaler).values())
    if open_ or (isinstance(scaler, LossScaler) and scaler._records.scaled):
        raise RuntimeError(
            "the scaler has begun an iteration (scale, unscale_ or step was called since its last update), and a "
            "captured step is a whole one: finish it with scaler.step and scaler.update, drop it with "
            "scaler.update(scaler.get_scale()), or give the captured step a scaler of its own"
        )


def forget_iteration(scaler: GradScaler) -> None:
    """Drop an iteration that an error ended, whose gradients are gone: the next one may begin."""
    if not scaler.is_enabled():
        return
    if isinstance(scaler, LossScaler):
        scaler._drop_iteration()
    else:
        set_scaler_states(scaler, fresh_states())


@contextmanager
def scaler_untouched(scaler: GradScaler, device: torch.device) -> Iterator[None]:
    """Undo iterations of the block: scales and trackers, what was skipped, and what is known of gradients.

    The scales are placed on the device, where a graph will find them.
    """
    if not scaler.is_enabled():
        yield
        return
    # A scale made lazily within the capture would lie in the graph's pool.
    place_scale(scaler, device)
    aside = scaler._aside() if isinstance(scaler, LossScaler) else _states_aside(scaler)
    with values_kept(scale_tensors(scaler)), aside:
        yield


@contextmanager
def _states_aside(scaler: GradScaler) -> Iterator[None]:
    kept = scaler_states(scaler)
    set_scaler_states(scaler, fresh_states())
    try:
        yield
    finally:
        set_scaler_states(scaler, kept)
