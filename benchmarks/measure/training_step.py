"""A training step as one writes it with torch.amp, and what all steps of a comparison have in common."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from benchmarks.workloads.training import Workload

__all__ = ["Setup", "Step", "loop", "prepared", "tf32"]


@dataclass(frozen=True)
class Setup:
    """What the variants of a comparison have in common.

    Attributes:
        device, dtype: where, and in which low dtype.
        clip: the norm of all gradients is clipped to this, after unscaling; None: not at all.
        lr: AdamW's.
        batches: how many different ones there are.
        seed: of the weights and of the data.

    Raises:
        ValueError: float16 on a CPU.
    """

    device: torch.device
    dtype: torch.dtype = torch.bfloat16
    clip: float | None = None
    lr: float = 1e-4
    batches: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(f"the low dtype is bfloat16 or float16, not {self.dtype}")
        if self.device.type == "cpu" and self.dtype is torch.float16:
            raise ValueError(
                "float16 on a CPU is no speed to measure: without float16 units a matmul takes hundreds of times as "
                "long as in bfloat16. Take --dtype bfloat16, or a CUDA device"
            )


@dataclass
class Step:
    """One whole training step a call, on one of a few batches in turn.

    Attributes:
        model, optimizer, scaler: what is trained, and with what.
        batches: on the device; the last tensor of each is the target.
        train: a batch -> its loss, detached, after the update.
        ready: ``time.perf_counter()`` when model and data were there; converting, compiling and capturing come after.
        done: steps so far.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    batches: Sequence[tuple[Tensor, ...]]
    train: Callable[..., Tensor]
    ready: float
    done: int = 0
    _last: Tensor | None = field(default=None, repr=False)

    def __call__(self) -> None:
        self._last = self.train(*self.batches[self.done % len(self.batches)])
        self.done += 1

    def loss(self) -> float:
        """Of the last step, before its update. Waits for the device.

        Raises:
            RuntimeError: there was none.
        """
        if self._last is None:
            raise RuntimeError("no step has run yet: call the step first")
        return self._last.item()


def prepared(workload: Workload, setup: Setup) -> tuple[nn.Module, list[tuple[Tensor, ...]], float]:
    """The FP32 model, batches, and when they were there."""
    torch.manual_seed(setup.seed)
    with setup.device:
        model = workload.placed(workload.make(), setup.device)
    batches = workload.batches(setup.batches, setup.device, setup.seed)
    if setup.device.type == "cuda":
        torch.cuda.synchronize()
    return model, batches, time.perf_counter()


def loop(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    loss_of: Callable[..., Tensor],
    clip: float | None,
) -> Callable[..., Tensor]:
    """A step's ``train``; ``loss_of``: a batch -> its loss."""
    parameters = [*model.parameters()]

    def train(*batch: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(*batch)
        scaler.scale(loss).backward()
        if clip is not None:
            scaler.unscale_(optimizer)
            clip_grad_norm_(parameters, clip)
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return train


@contextlib.contextmanager
def tf32(enabled: bool) -> Iterator[None]:
    """FP32 matmuls and convolutions on CUDA in TF32, or exactly; as before afterwards."""
    before, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn
    kept = {name: getattr(cudnn, name) for name in ("enabled", "benchmark", "benchmark_limit", "deterministic")}
    torch.set_float32_matmul_precision("high" if enabled else "highest")
    try:
        with cudnn.flags(**kept, allow_tf32=enabled):
            yield
    finally:
        torch.set_float32_matmul_precision(before)
