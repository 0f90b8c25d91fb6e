"""One training iteration: on a CPU it runs as it stands, on CUDA it is captured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fxprec.model.conversion import Conversion
from fxprec.model.inference import accumulate
from fxprec.model.module import conversion_of, is_converted
from fxprec.model.watcher import CallWatcher
from fxprec.scaling.gradients import parameters_of
from fxprec.scaling.loss_scaler import LossScaler
from fxprec.shadows import ShadowStore
from fxprec.whole_step.batch import Batch
from fxprec.whole_step.scales import forget_iteration
from fxprec.whole_step.strangers import refuse_strangers


class Iteration:
    """Forward, loss, backward, unscale, clip, update and scale update; see ``capture_step`` for the arguments.

    Attributes:
        parameters: of the model, the loss and the optimizer, each once, when ``look`` was called last.
        conversions: of the converted modules among them.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any] | None,
        optimizer: Optimizer,
        scaler: torch.amp.GradScaler,
        parts: int,
        max_norm: float | None,
    ) -> None:
        self.model, self.loss_fn, self.optimizer, self.scaler = model, loss_fn, optimizer, scaler
        self.parts, self.max_norm = parts, max_norm
        self.parameters: list[Tensor] = []
        self.conversions: list[Conversion] = []

    def look(self) -> None:
        """Find the parameters and conversions anew: a walk through all modules, which would take long at every step."""
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
        found = self._found_inf()
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
        with torch.enable_grad(), self._one_refresh(), self._no_old_casts():
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

    def _one_refresh(self) -> AbstractContextManager[object]:
        # Weights do not move between micro-batches: their shadows are refreshed once.
        if self.parts > 1 and is_converted(self.model):
            return accumulate(self.model)
        return nullcontext()

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

    def _found_inf(self) -> Tensor | None:
        if not isinstance(self.scaler, LossScaler) or not self.scaler.is_enabled():
            return None
        return self.scaler._records.found_by(self.optimizer)
