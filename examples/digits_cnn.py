"""Train a VGG-like CNN on scikit-learn's handwritten digits, in FP32 and converted, side by side.

    python examples/digits_cnn.py [--epochs 4] [--width N] [--level O2 | --policy examples/policy.toml]

Blocks of convolution, batch norm and ReLU (32, 64, 128, 256 channels) and a classifier of three layers. Both runs start
from the same weights and see the same batches. The data comes with scikit-learn: nothing is downloaded.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import statistics
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn

import fxprec


class DigitsCNN(nn.Module):
    """Four blocks of convolution, batch norm and ReLU, each with twice the channels; then three linear layers.

    Input: (N, 1, 28, 28) float; output: (N, 10) logits.
    """

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        channels = [1, width, 2 * width, 4 * width, 8 * width]
        blocks: list[nn.Module] = []
        for i, (before, after) in enumerate(itertools.pairwise(channels)):
            blocks += [
                nn.Conv2d(before, after, 3, padding=1, bias=False),
                nn.BatchNorm2d(after),
                nn.ReLU(inplace=True),
            ]
            if i < 3:
                blocks.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*blocks)
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Linear(8 * width * 9, 256),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(256, 128),
            nn.ReLU(inplace=True),
            nn.Linear(128, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.features(images))


@dataclass(frozen=True)
class Data:
    """Images (N, 1, 28, 28) in [0, 1] and labels (N,), split four to one."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor


def load() -> Data:
    """The 1,797 digits, upsampled from 8 x 8 to MNIST's 28 x 28, shuffled by a fixed seed."""
    pixels, labels = load_digits(return_X_y=True)
    x = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    x = F.interpolate(x, size=(28, 28), mode="bilinear", align_corners=False)
    y = torch.tensor(labels)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    cut = len(y) * 4 // 5
    return Data(x[:cut], y[:cut], x[cut:], y[cut:])


def batches(data: Data, size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    order = torch.randperm(len(data.train_y), generator=torch.Generator().manual_seed(seed))
    for index in order.split(size):
        yield data.train_x[index], data.train_y[index]


class Run:
    """A model in training: its losses, and the seconds of each step (forward, backward, optimizer)."""

    def __init__(
        self, name: str, model: nn.Module, scaler: fxprec.LossScaler, optimizer: torch.optim.Optimizer
    ) -> None:
        self.name = name
        self.model = model.train()
        self.scaler = scaler
        self.optimizer = optimizer
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def step(self, x: Tensor, y: Tensor) -> float:
        started = time.perf_counter()
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(x), y)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.losses.append(loss.item())
        self.seconds.append(time.perf_counter() - started)
        return self.losses[-1]

    @torch.inference_mode()
    def accuracy(self, x: Tensor, y: Tensor) -> float:
        self.model.eval()
        return (self.model(x).argmax(1) == y).float().mean().item()


@dataclass(frozen=True)
class Result:
    """What one run gave: mean loss of its last epoch, test accuracy, median seconds of a step, and bytes."""

    name: str
    loss: float
    accuracy: float
    step_seconds: float
    weight_bytes: int
    shadow_bytes: int
    activation_bytes: int


def saved_activation_bytes(model: nn.Module, x: Tensor, y: Tensor) -> int:
    """Bytes that autograd keeps from forward to backward: all but the parameters and, told by shape, their shadows."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    shapes = {p.shape for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and tensor.shape not in shapes:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        F.cross_entropy(model(x), y)
    return sum(kept.values())


def train(runs: list[Run], data: Data, epochs: int, size: int, progress: Progress) -> None:
    """Train all runs on the same batches; they take turns, so that whatever else the machine does slows them alike."""
    steps = -(-len(data.train_y) // size)
    tasks = [progress.add_task(run.name, total=epochs * steps) for run in runs]
    for epoch in range(epochs):
        for i, (x, y) in enumerate(batches(data, size, seed=epoch)):
            for run, task in zip(runs, tasks, strict=True):
                torch.manual_seed(epoch * steps + i)  # both drop the same activations
                loss = run.step(x, y)
                progress.update(task, advance=1, description=f"{run.name:<9} loss {loss:.3f}")


def measure(run: Run, data: Data, epochs: int, size: int, shadow_bytes: int) -> Result:
    x, y = next(batches(data, size, seed=0))
    last_epoch = run.losses[-len(run.losses) // epochs :]
    return Result(
        name=run.name,
        loss=statistics.fmean(last_epoch),
        step_seconds=statistics.median(run.seconds),
        weight_bytes=sum(p.numel() * p.element_size() for p in run.model.parameters()),
        shadow_bytes=shadow_bytes,
        activation_bytes=saved_activation_bytes(copy.deepcopy(run.model), x, y),
        accuracy=run.accuracy(data.test_x, data.test_y),
    )


def table(results: list[Result], size: int) -> Table:
    shown = Table(
        title="Handwritten digits: 1,437 to train on, 360 for the test",
        caption="loss: mean of the last epoch. step: median of forward, backward and optimizer. weights: parameters"
        f" + shadows. activations: what autograd keeps for the backward of a batch of {size}",
        box=box.SIMPLE_HEAD,
        show_edge=False,
    )
    for column in ("run", "loss", "accuracy", "step", "speed", "weights", "activations"):
        shown.add_column(column, justify="left" if column == "run" else "right", no_wrap=True)
    for result in results:
        shadows = f" + {result.shadow_bytes / 1e6:.1f}" if result.shadow_bytes else ""
        shown.add_row(
            result.name,
            f"{result.loss:.4f}",
            f"{result.accuracy:.2%}",
            f"{result.step_seconds * 1e3:.0f} ms",
            f"{results[0].step_seconds / result.step_seconds:.2f} x",
            f"{result.weight_bytes / 1e6:.1f}{shadows} MB",
            f"{result.activation_bytes / 1e6:.1f} MB",
        )
    return shown


def why_slow() -> str:
    """What ``convert`` says where the low dtype is slower than FP32; "" where it is not."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", fxprec.SlowDtypeWarning)
        fxprec.convert(nn.Linear(1, 1))
    return "".join(str(each.message) for each in caught)


def main(arguments: list[str] | None = None) -> list[Result]:
    parser = argparse.ArgumentParser(description="Train a CNN on digits, in FP32 and converted, side by side")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--width", type=int, help="channels of the first block: 32; 16 where bfloat16 is slow")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--level", help="O0, O1, O2 or O3; O1 if neither this nor --policy is given")
    parser.add_argument("--policy", help="a policy file, such as examples/policy.toml")
    options = parser.parse_args(arguments)

    console = Console()
    slow = why_slow()
    width = options.width or (16 if slow else 32)
    if slow:
        console.print(f"{slow}\n\nHere the numbers are shown and not the speed: {width} channels, 32 elsewhere.\n")
    data = load()
    torch.manual_seed(0)
    fp32 = DigitsCNN(width)
    policy = fxprec.Policy.from_toml(options.policy) if options.policy else None
    example = data.train_x[: options.batch]  # not needed; with it the report knows sizes, and casts are placed by them
    # bfloat16 needs no loss scale, and has none by default; float16 does, and the loop is the same with one.
    scaler = fxprec.LossScaler("cpu", growth_interval=50)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fxprec.SlowDtypeWarning)  # it was said
        converted, scaler = fxprec.convert(
            copy.deepcopy(fp32), (example,), level=options.level, policy=policy, scaler=scaler
        )
    off = fxprec.LossScaler("cpu", enabled=False)
    runs = [
        Run("FP32", fp32, off, torch.optim.AdamW(fp32.parameters(), lr=1e-3, fused=True)),
        Run("converted", converted, scaler, fxprec.optim.AdamW(converted.parameters(), lr=1e-3)),
    ]
    with Progress(console=console) as progress:
        train(runs, data, options.epochs, options.batch, progress)
    headline = fxprec.report(converted).headline  # of the training graph: the test will add one of its own
    shadows = [0, headline.weights.shadow_bytes]
    results = [measure(run, data, options.epochs, options.batch, n) for run, n in zip(runs, shadows, strict=True)]
    console.print(table(results, options.batch))
    console.print(f"loss scale {scaler.get_scale():g}, {scaler.skipped_steps} of {len(runs[1].losses)} steps skipped")
    console.print(headline)
    return results


if __name__ == "__main__":
    main()
