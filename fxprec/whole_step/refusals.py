"""Refuse what a captured step cannot be made of before anything has run, and explain what failed in its capture."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from fxprec.errors import CaptureError, FxprecError
from fxprec.scaling.gradients import dtensor_type, parameters_of
from fxprec.scaling.loss_scaler import LossScaler
from fxprec.scaling.skips import is_plain_step
from fxprec.whole_step.iteration import Iteration

#: What torch and CUDA say -> what it comes from.
_CAUSES: Final = {
    "synchroniz|stream is capturing|StreamCaptureUnsupported|not permitted": (
        "it waits for the device, which a graph cannot: .item(), .cpu(), print, a boolean mask, torch.nonzero, `if` on "
        "a tensor, or a tensor made from Python numbers on the device. Compute with tensors (torch.where), make "
        "constants once, before, or do it after the step on what it returns"
    ),
    "legacy stream|StreamCaptureImplicit|AccumulateGrad|StreamCaptureIsolation|uncaptured": (
        "it reaches work of another stream: most likely a loss or an output of an earlier iteration is still alive, "
        "and the autograd graph with it. Delete it (del loss), and call capture_step again"
    ),
    "out of memory": "a graph keeps its memory, and while it is captured there are copies of weights and states",
    "generator|rng_state|RNG": (
        "it sets or reads the state of a random number generator, which a graph cannot (activation checkpointing: "
        "preserve_rng_state=False)"
    ),
}
_PACKAGES: Final = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


def check_types(iteration: Iteration) -> None:
    """Raise TypeError for what is no model, optimizer, scaler or loss function."""
    model, optimizer = iteration.model, iteration.optimizer
    if not isinstance(model, nn.Module):
        raise TypeError(f"capture_step takes a module, not a {type(model).__name__}")
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"capture_step takes a torch.optim.Optimizer, not a {type(optimizer).__name__}")
    if not isinstance(iteration.scaler, torch.amp.GradScaler):
        raise TypeError(
            f"capture_step takes a fxprec.LossScaler, a torch.amp.GradScaler or None, not a "
            f"{type(iteration.scaler).__name__}"
        )
    if iteration.loss_fn is not None and not callable(iteration.loss_fn):
        raise TypeError(f"loss_fn must be callable, or None, not a {type(iteration.loss_fn).__name__}")


def check_values(iteration: Iteration) -> None:
    """Check what holds on a CPU too.

    Raises:
        ValueError: arguments out of range, or that contradict each other. CaptureError: several processes.
    """
    optimizer = iteration.optimizer
    if isinstance(iteration.parts, bool) or not isinstance(iteration.parts, int) or iteration.parts < 1:
        raise ValueError(f"accumulate must be a whole number of at least 1, not {iteration.parts!r}")
    own = getattr(optimizer, "max_norm", None)
    if iteration.max_norm is not None and own is not None:
        raise ValueError(
            f"max_norm={iteration.max_norm} and an optimizer with max_norm={own}: give one; the optimizer's costs less"
        )
    if iteration.max_norm is not None and not iteration.max_norm > 0:
        raise ValueError(f"max_norm must be greater than 0, not {iteration.max_norm!r}; None: no clipping")
    # An optimizer of another copy would train nothing, and nobody would notice.
    reached = {id(p) for root in iteration.roots() for p in root.parameters()}
    if not any(id(p) in reached for p in parameters_of(optimizer)):
        raise ValueError(
            "none of the optimizer's parameters belongs to the model: was it made for another copy, or before "
            "model.to(), which may replace them?"
        )
    _refuse_distributed(iteration)


def _refuse_distributed(iteration: Iteration) -> None:
    # Looked up, not imported: a model that uses neither should not pay for their import.
    fsdp, dtensor = sys.modules.get("torch.distributed.fsdp"), dtensor_type()
    wrappers: list[Any] = [nn.parallel.DistributedDataParallel, nn.DataParallel]
    wrappers += [] if fsdp is None else [fsdp.FullyShardedDataParallel, fsdp.FSDPModule]
    wrapped = next((m for root in iteration.roots() for m in root.modules() if isinstance(m, tuple(wrappers))), None)
    sharded = dtensor is not None and any(isinstance(p, dtensor) for p in iteration.parameters)
    ranks = isinstance(iteration.scaler, LossScaler) and iteration.scaler.process_group is not None
    if wrapped is not None or sharded or ranks:
        what = "parameters that are DTensors" if wrapped is None else type(wrapped).__name__
        raise CaptureError(
            f"capture_step works in one process, and this model has {what if wrapped or sharded else 'several ranks'}: "
            "its collectives are not captured. Use the usual loop (docs/training.md, Several processes)"
        )


def device_of(iteration: Iteration) -> torch.device:
    """Return the device that everything is on.

    Raises:
        CaptureError: on several devices.
    """
    # A graph belongs to one device, and so does its memory pool.
    devices = {p.device for p in iteration.parameters}
    devices |= {b.device for root in iteration.roots() for b in root.buffers()}
    if len(devices) > 1:
        raise CaptureError(
            f"capture_step takes a model, loss and optimizer on one device, and these are on "
            f"{', '.join(sorted(map(str, devices)))}: move them with .to(device)"
        )
    return devices.pop()


def refuse_ungraphable(iteration: Iteration) -> None:
    """Refuse optimizers whose step a CUDA graph cannot hold.

    Raises:
        CaptureError: it reads ``lr`` or its step count on the host, or cannot skip a step on the device.
    """
    optimizer = iteration.optimizer
    name = type(optimizer).__name__
    ours = getattr(optimizer, "writes_shadows", False)
    fused = isinstance(optimizer, (torch.optim.Adam, torch.optim.SGD)) and _all(optimizer, "fused")
    if not (ours or fused or _all(optimizer, "capturable")):
        raise CaptureError(
            f"{name} reads its learning rate or its step count on the host, which a CUDA graph does not: take "
            f"{_instead(optimizer)}"
        )
    if iteration.scaler.is_enabled() or iteration.watchers():
        if not getattr(optimizer, "_step_supports_amp_scaling", False):
            why = "with a loss scaler an overflow" if iteration.scaler.is_enabled() else "what watch finds"
            raise CaptureError(
                f"{name} cannot skip a step on the device, and {why} has to be skipped there: take "
                f"{_instead(optimizer)}"
            )
    if not is_plain_step(optimizer):
        raise CaptureError(
            f"the step of this {name} was replaced (a wrapper counts or watches it), and a graph does not call it: "
            "capture the optimizer as it was made"
        )
    # Adam and SGD begin with states of zeros; another first step, which differs, would be repeated by every replay.
    unborn = any(p.requires_grad and not optimizer.state.get(p) for p in parameters_of(optimizer))
    if not isinstance(optimizer, (torch.optim.Adam, torch.optim.SGD)):
        if unborn:
            raise CaptureError(f"{name} makes its state in its first step: take one step before capture_step")
    elif any(group.get("dampening") and group["momentum"] for group in optimizer.param_groups) and unborn:
        raise CaptureError(f"the first step of {name} with dampening is unlike the others: take it before capture_step")


@contextmanager
def buffers_in_place(iteration: Iteration) -> Iterator[None]:
    """Check that a step captured in the block writes buffers in place.

    Raises:
        CaptureError: it made another tensor of a buffer: each replay would begin with the values of now.
    """
    modules = [(path, module) for root in iteration.roots() for path, module in root.named_modules()]
    before = [(path, module, name, b) for path, module in modules for name, b in module._buffers.items()]
    yield
    for path, module, name, buffer in before:
        if buffer is not None and module._buffers.get(name) is not buffer:
            where = f"{path}.{name}" if path else name
            raise CaptureError(
                f"the step replaces the buffer {where}, and a graph reads and writes where it was: write its values "
                f"in place, self.{name}.copy_(...)"
            )


def _all(optimizer: Optimizer, option: str) -> bool:
    return all(bool(group.get(option)) for group in optimizer.param_groups)


def _instead(optimizer: Optimizer) -> str:
    for cls in (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD):
        if isinstance(optimizer, cls):
            return f"fxprec.optim.{cls.__name__}, or torch.optim.{cls.__name__}(..., fused=True)"
    return "an optimizer of fxprec.optim, or a fused one of torch's (Adam, AdamW, SGD)"


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Explain a failure in the block, of code that worked eagerly before.

    Raises:
        CaptureError: instead, with the line of the user's code.
    """
    try:
        yield
    except FxprecError:
        raise
    except Exception as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        # torch's own words name a CUDA error; users need the line of code that causes it.
        cause = next((why for pattern, why in _CAUSES.items() if re.search(pattern, str(error), re.I)), None)
        raise CaptureError(
            f"{what} cannot be a CUDA graph{_line_of(error)}: {said[0]}. "
            f"{'In words: ' + cause if cause else 'It ran without a graph just before'}. Nothing was changed; the "
            "usual loop goes on to work"
        ) from error


def _line_of(error: BaseException) -> str:
    # The innermost frame of the user's is the line to change.
    frames = traceback.extract_tb(error.__traceback__)
    # Not the frame of a dispatch mode either, through which an operator of the user's line went.
    users = [f for f in frames if not f.filename.startswith((*_PACKAGES, "<")) and f.name != "__torch_dispatch__"]
    if not users:
        return ""
    last = users[-1]
    return f", because of {Path(last.filename).name}:{last.lineno} in {last.name}, `{last.line}`"
