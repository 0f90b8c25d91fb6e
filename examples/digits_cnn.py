"""Train a VGG-like CNN on scikit-learn's handwritten digits, in FP32 and converted, side by side.

    python examples/digits_cnn.py [--epochs 4] [--width 32] [--level O1]

Blocks of convolution, batch norm and ReLU (32 -> 64 -> 128 -> 256 channels) and a three-layer classifier. Both runs start
from the same weights and see the same batches. The data comes with scikit-learn: nothing is downloaded.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
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
        for i, (before, after) in enumerate(zip(channels, channels[1:], strict=False)):
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


@dataclass(frozen=True)
class Result:
    """What one run gave: mean loss of its last epoch, test accuracy, seconds, and bytes."""

    name: str
    loss: float
    accuracy: float
    seconds: float
    weight_bytes: int
    shadow_bytes: int
    activation_bytes: int


def batches(data: Data, size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    order = torch.randperm(len(data.train_y), generator=torch.Generator().manual_seed(seed))
    for index in order.split(size):
        yield data.train_x[index], data.train_y[index]


def saved_activation_bytes(model: nn.Module, x: Tensor, y: Tensor) -> int:
    """Bytes that autograd keeps for the backward of one step, parameters and their shadows apart."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    sizes = {p.shape for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and tensor.shape not in sizes:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        F.cross_entropy(model(x), y)
    return sum(kept.values())


def train(
    name: str, model: nn.Module, scaler: torch.amp.GradScaler, data: Data, epochs: int, size: int, progress: Progress
) -> Result:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    steps = -(-len(data.train_y) // size)
    task = progress.add_task(f"{name:<9}", total=epochs * steps)
    x, y = next(batches(data, size, seed=0))
    activation_bytes = saved_activation_bytes(copy.deepcopy(model), x, y)
    model.train()
    torch.manual_seed(1)
    seconds, losses = 0.0, []
    for epoch in range(epochs):
        losses.clear()
        for x, y in batches(data, size, seed=epoch):
            started = time.perf_counter()
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
            seconds += time.perf_counter() - started
            progress.update(task, advance=1, description=f"{name:<9} loss {losses[-1]:.3f}")
    model.eval()
    with torch.inference_mode():
        accuracy = (model(data.test_x).argmax(1) == data.test_y).float().mean().item()
    weight_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    shadow_bytes = sum(2 * p.numel() for p in model.parameters() if p.dim() > 1) if name != "FP32" else 0
    return Result(name, sum(losses) / len(losses), accuracy, seconds, weight_bytes, shadow_bytes, activation_bytes)


def table(results: list[Result]) -> Table:
    shown = Table(
        title="Handwritten digits: 1,437 to train on, 360 for the test",
        caption="weights: FP32 masters + shadows; activations: what autograd keeps for one backward",
    )
    for column in ("run", "loss", "accuracy", "time", "speed", "weights", "activations"):
        shown.add_column(column, justify="left" if column == "run" else "right")
    for result in results:
        shown.add_row(
            result.name,
            f"{result.loss:.4f}",
            f"{result.accuracy:.2%}",
            f"{result.seconds:.1f} s",
            f"{results[0].seconds / result.seconds:.2f} x",
            f"{result.weight_bytes / 2**20:.1f} + {result.shadow_bytes / 2**20:.1f} MiB",
            f"{result.activation_bytes / 2**20:.1f} MiB",
        )
    return shown


def main(arguments: list[str] | None = None) -> list[Result]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--level", default="O1")
    options = parser.parse_args(arguments)

    data = load()
    torch.manual_seed(0)
    fp32 = DigitsCNN(options.width)
    converted, scaler = fxprec.convert(copy.deepcopy(fp32), level=options.level)
    off = torch.amp.GradScaler("cpu", enabled=False)
    console = Console()
    with Progress(console=console) as progress:
        results = [
            train("FP32", fp32, off, data, options.epochs, options.batch, progress),
            train("converted", converted, scaler, data, options.epochs, options.batch, progress),
        ]
    console.print(table(results))
    console.print(fxprec.report(converted).headline)
    return results


if __name__ == "__main__":
    main()
