"""Skipped steps: which optimizers skip on the device by themselves, which steps were skipped, and what a skip says.

A step that is skipped on the device goes by torch's contract: an optimizer that sets ``_step_supports_amp_scaling``
reads its attributes ``grad_scale`` and ``found_inf`` in ``step``. The host never learns whether it ran, and does not
wait: flags are kept on the device, and read when somebody asks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fxprec.errors import NoGradientsError, few
from fxprec.scaling.gradients import local_values, parameters_of
from fxprec.torch_internals import is_wrapped_by_scheduler

#: That many flags of one device are kept before they are added up there: a kernel in so many steps.
_FLAGS = 256


def can_skip_on_device(optimizer: Optimizer) -> bool:
    """Return whether a skip by the optimizer itself leaves everything as it was.

    Not so where somebody wrapped ``step`` to see whether it runs (Accelerate; torch's lr schedulers only count calls),
    and not in the first step of torch's fused optimizers, which makes their state, for a skipped step too.
    """
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    return is_plain_step(optimizer) and not makes_state(optimizer)


def wants_scaler(optimizer: Optimizer) -> bool:
    """Return whether ``step`` takes the scaler itself, by the older contract of torch's."""
    return getattr(optimizer, "_step_supports_amp_scaling", False) and _takes_scaler(type(optimizer))


@lru_cache(maxsize=64)
def _takes_scaler(optimizer: type[Optimizer]) -> bool:
    return "grad_scaler" in signature(optimizer.step).parameters


def is_plain_step(optimizer: Optimizer) -> bool:
    """Return whether ``step`` is its class's, perhaps wrapped by torch's lr schedulers. (Others copy their mark.)"""
    # Whoever wraps a step sets it on the instance: Accelerate does, to see whether it runs.
    step: Any = optimizer.__dict__.get("step")
    return step is None or (is_wrapped_by_scheduler(step) and step.__wrapped__ is type(optimizer).step)


@contextmanager
def scaling_attributes(optimizer: Any, grad_scale: Tensor | None, found_inf: Tensor, check: Any) -> Iterator[None]:
    """Set, for a step in the block, what an optimizer that can skip by itself reads; it is gone afterwards.

    Args:
        optimizer: may have a ``grad_scale`` of the user's, which is multiplied in.
        grad_scale: the loss scale of its gradients; None: they are unscaled.
        found_inf: one flag. Of 1 at most: fused kernels take it off the step count again.
        check: result of its own ``check_gradients``, or None.
    """
    given = getattr(optimizer, "grad_scale", None)
    optimizer.grad_scale = given if grad_scale is None else grad_scale if given is None else grad_scale * given
    optimizer.found_inf = found_inf
    if check is not None:
        optimizer.gradient_check = check
    try:
        yield
    finally:
        del optimizer.grad_scale, optimizer.found_inf
        if check is not None:
            del optimizer.gradient_check


def combined_flag(flags: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return one 0-dim flag on a device for several on any devices."""
    here = [flag.view(()).to(device, non_blocking=True) for flag in flags]
    return here[0] if len(here) == 1 else torch.stack(here).amax()


def makes_state(optimizer: Optimizer) -> bool:
    """Return whether the next step of one of torch's fused optimizers, or of ours, makes state."""
    if isinstance(optimizer, torch.optim.SGD) and all(group["momentum"] == 0 for group in optimizer.param_groups):
        return False
    if not isinstance(optimizer, (torch.optim.Adam, torch.optim.SGD)):
        return False
    known = optimizer.state
    if len(known) == sum(len(group["params"]) for group in optimizer.param_groups) and all(known.values()):
        return False  # the usual case, without a look at each parameter
    return any(p.grad is not None and not known.get(p) for p in parameters_of(optimizer))


class Skips:
    """Skipped steps of one scaler.

    Args:
        total: skipped steps before.
        without_gradients: those among them that were passed over, since their optimizers had no gradients.
    """

    def __init__(self, total: int = 0, without_gradients: int = 0) -> None:
        self._known = total - without_gradients
        self.without_gradients = without_gradients
        self._passed_over = False  # a step of the newest iteration
        self._flags: dict[torch.device, list[Tensor]] = {}
        self._last: list[bool | Tensor] = []
        self._open = False
        #: Of the last iteration that is known to have skipped: names, and which of them overflowed.
        self._overflow: list[tuple[list[str], Tensor]] = []
        #: The skips there had been when it was noted.
        self._noted_at = self._known
        #: The newest iteration's steps that only the device knows about.
        self._unread: list[tuple[weakref.ref[Optimizer], Tensor]] = []

    @property
    def last(self) -> bool:
        """Return whether a step of the newest iteration that stepped was skipped."""
        return self._passed_over or any(bool(flag) for flag in self._last)

    @property
    def count(self) -> int:
        """Return how many steps were skipped for an overflow. Reads the device."""
        return self._known + sum(int(torch.stack(flags).sum().item()) for flags in self._flags.values())

    @property
    def total(self) -> int:
        """Return how many steps were skipped, those without gradients among them. Reads the device."""
        return self.count + self.without_gradients

    def begin(self) -> None:
        """Begin a new iteration with the next step."""
        self._open = False

    def note_step(self, skipped: bool | Tensor = False) -> None:
        """Note a step that the host knows to have run; or whether it was skipped, as a flag on a device perhaps."""
        # The first step of an iteration ends what was known of the last one.
        if not self._open:
            self._open = True
            self._passed_over = False
            self._last.clear()
            self._unread.clear()
        self._last.append(skipped)

    def note_without_gradients(self) -> None:
        """Note a step that was passed over. The parameters of the last overflow stay known."""
        self.note_step()
        self._passed_over = True
        self.without_gradients += 1

    def note_skip(self, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        """Note a step that the host knows to have been skipped: and where, before the gradients go."""
        # Several optimizers of one iteration may overflow; the first of them forgets the iteration before.
        first = not any(flag is True for flag in self._last) or not self._open
        self.note_step(True)
        self._known += 1
        if first:
            self._overflow.clear()
        self._note_overflow(optimizer, names)

    def note_on_device(self, optimizer: Optimizer, found: Mapping[torch.device, Tensor]) -> None:
        """Note a step that only the device knows about. ``found``: its flags, each 0 or 1."""
        device = next(iter(found))
        flag = combined_flag(found.values(), device)
        self.note_step(flag)
        # Nobody reads it now: whether it skipped, and where, is looked up when somebody asks.
        self._unread.append((weakref.ref(optimizer), flag))
        flags = self._flags.setdefault(device, [])
        flags.append(flag)
        if len(flags) == _FLAGS:
            flags[:] = [torch.stack(flags).sum(dtype=torch.float32)]

    def parameters(self, names_of: Callable[[Optimizer], Mapping[int, str]]) -> list[str]:
        """Return the parameters of the last overflow; none if it was skipped on the device and nobody asked then.

        Backwards, as the gradients came: an overflow spreads from the layer where it began to those before it.
        """
        # Steps that were skipped on the device are told only now; their gradients must still be there.
        if self._unread:
            skipped = [reference() for reference, flag in self._unread if bool(flag)]
            self._unread.clear()
            if skipped and not any(flag is True for flag in self._last):
                self._overflow.clear()
            for optimizer in skipped:
                if optimizer is not None:
                    self._note_overflow(optimizer, names_of(optimizer))
        if self._noted_at != self.count:
            return []
        overflow = [pair for names, bad in self._overflow for pair in zip(names, bad.tolist(), strict=True)]
        return [name for name, bad in reversed(overflow) if bad]

    def _note_overflow(self, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        held = [(names[id(p)], local_values(p.grad)) for p in parameters_of(optimizer) if p.grad is not None]
        if held:  # not so on a rank that skips because others do
            flags = torch.stack([torch.isfinite(g).all().to(held[0][1].device, non_blocking=True) for _, g in held])
            self._overflow.append(([name for name, _ in held], ~flags))
        self._noted_at = self.count


def no_gradients(optimizer: Optimizer, model: nn.Module | None) -> NoGradientsError:
    """Return the error for a step without any gradient, with the likely causes; ``model``: the converted one."""
    count = sum(1 for _ in parameters_of(optimizer))
    known = set() if model is None else {id(parameter) for parameter in model.parameters()}
    if known and not any(id(parameter) in known for parameter in parameters_of(optimizer)):
        return NoGradientsError(
            f"No inf checks were recorded for this optimizer: none of the {count} parameters of "
            f"{type(optimizer).__name__} has a gradient, and none of them is one of {type(model).__name__}'s: was it "
            "made for another model or a copy, or before model.to() or fully_shard(), which may replace parameters?"
        )
    return NoGradientsError(
        f"No inf checks were recorded for this optimizer: none of the {count} parameters of "
        f"{type(optimizer).__name__} has a gradient. Was backward() called; are they frozen (requires_grad=False); "
        "does the loss depend on them; were they replaced after the optimizer was made (model.to, fully_shard); "
        "was zero_grad() called between backward() and step()? If it is to be passed over where it has none: "
        "LossScaler(skip_without_gradients=True)"
    )


def floor_message(scales: Iterable[float], skipped: int, names: list[str], known: Iterable[str] = ()) -> str:
    """Say what to look at when gradients overflow at every scale; ``known``: what observers know of it."""
    found = ", ".join(f"{scale:g}" for scale in scales)
    where = f" The last overflow was in the gradients of {few(names)}." if names else ""
    steps = f"{skipped} skipped step{'' if skipped == 1 else 's'}"
    return (
        f"the loss scale fell to its floor ({found}) after {steps}: gradients held "
        f"inf or nan at every scale above, so it is the model that makes them.{where} "
        "fxprec.numerics.locate(model, (*inputs, target), loss, scaler) on the batch of the last step names the op "
        "that makes them and what cures it; with fxprec.numerics.watch(model, optimizer, scaler) around the loop this "
        "message does. Look at the loss and the inputs too, and at the learning rate; and train weights that were "
        "pretrained in bfloat16 in bfloat16 (dtype=torch.bfloat16)" + "".join(f".\n{text}" for text in known if text)
    )
