"""Show on scikit-learn's handwritten digits what fxprec does on this machine: ``make demo``.

    python examples/digits_cnn.py [--epochs 4] [--seeds 3] [--width N] [--level O2 | --policy examples/policy.toml]

1. Train a VGG-like CNN (four blocks of convolution, batch norm and ReLU; three linear layers) in FP32 and converted,
   side by side: from the same weights, on the same batches, with several seeds. A CPU without bfloat16 units would only
   lose time in that: there the CNN is trained in FP32, and a converted copy is compared with it on two batches.
2. Freeze a wide classifier, which was trained in FP32, and let it serve one image at a time.
3. Ask a model whose attention overflows in float16 where it does, and cure it as told.

The data comes with scikit-learn: nothing is downloaded.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
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
from fxprec.numerics import Finding, locate


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


class WideClassifier(nn.Sequential):
    """Three linear layers, for one image at a time: each call reads all weights, and waits for memory.

    Input: (N, 1, 28, 28) float; output: (N, 10) logits.
    """

    def __init__(self, width: int = 2048) -> None:
        layers = [nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)]
        super().__init__(nn.Flatten(), *layers)


class RowAttention(nn.Module):
    """Attention among the rows of an image, without the usual scale: a slip that FP32 forgives and float16 does not.

    Input: (N, 1, 28, 28) float; output: (N, 10) logits.
    """

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(28, 28) for _ in range(3))
        self.classify = nn.Linear(784, 10)

    def forward(self, images: Tensor) -> Tensor:
        rows = images.squeeze(1)
        scores = self.query(rows) @ self.key(rows).transpose(1, 2)
        return self.classify((scores.softmax(-1) @ self.value(rows)).flatten(1))


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
    """What a way of training gave.

    Attributes:
        loss: mean of the last epoch, over all seeds.
        accuracies: on the test images, one for each seed.
        step_seconds: median of forward, backward and optimizer.
        activation_bytes: what autograd keeps for the backward of one batch.
    """

    name: str
    loss: float
    accuracies: tuple[float, ...]
    step_seconds: float
    weight_bytes: int
    shadow_bytes: int
    activation_bytes: int


@dataclass(frozen=True)
class Checked:
    """A trained model and its converted copy on the same test images: FP32 first, then converted.

    Attributes:
        correct: how many of the images each got right.
        losses: mean cross-entropy of the images.
        activation_bytes: what autograd keeps for the backward of one batch.
    """

    images: int
    correct: tuple[int, int]
    losses: tuple[float, float]
    activation_bytes: tuple[int, int]


@dataclass(frozen=True)
class Served:
    """A model that classifies one image at a time.

    Attributes:
        seconds: of the fastest call.
        accuracy: on the test images.
    """

    name: str
    seconds: float
    accuracy: float
    weight_bytes: int


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


def side_by_side(
    data: Data, width: int, epochs: int, size: int, seeds: int, settings: dict, console: Console
) -> list[Result]:
    """Train the CNN in FP32 and converted with each seed, print a table of both ways, and return its rows."""
    finished: list[list[Run]] = []
    scaler = fxprec.LossScaler("cpu", enabled=False)
    for seed in range(seeds):
        runs, scaler = both_runs(data, width, size, seed, settings)
        with Progress(console=console, transient=True) as progress:
            train(runs, data, epochs, size, progress)
        finished.append(runs)
    # Read before the test, which adds a graph of its own: what the training graph needs.
    headline = fxprec.report(finished[-1][1].model).headline
    x, y = next(batches(data, size, seed=0))
    results = []
    for runs, shadow_bytes in zip(zip(*finished, strict=True), (0, headline.weights.shadow_bytes), strict=True):
        last = [loss for run in runs for loss in run.losses[-len(run.losses) // epochs :]]
        results.append(
            Result(
                name=runs[0].name,
                loss=statistics.fmean(last),
                step_seconds=statistics.median(seconds for run in runs for seconds in run.seconds),
                weight_bytes=weight_bytes(runs[0].model),
                shadow_bytes=shadow_bytes,
                activation_bytes=saved_activation_bytes(copy.deepcopy(runs[0].model), x, y),
                accuracies=tuple(run.accuracy(data.test_x, data.test_y) for run in runs),
            )
        )
    console.print(table(results, size))
    console.print(
        f"loss scale {scaler.get_scale():g}, {scaler.skipped_steps} of {len(finished[-1][0].losses)} steps skipped"
    )
    console.print(headline)
    return results


def both_runs(data: Data, width: int, size: int, seed: int, settings: dict) -> tuple[list[Run], fxprec.LossScaler]:
    """Return a run in FP32 and a converted one from equal weights, and the scaler of the second."""
    torch.manual_seed(seed)
    fp32 = DigitsCNN(width)
    example = data.train_x[:size]  # not needed; with it the report knows sizes, and casts are placed by them
    # bfloat16 needs no loss scale, and has none by default; float16 does, and the loop is the same with one.
    scaler = fxprec.LossScaler("cpu", growth_interval=50)
    converted, scaler = fxprec.convert(copy.deepcopy(fp32), (example,), scaler=scaler, **settings)
    off = fxprec.LossScaler("cpu", enabled=False)
    runs = [
        Run("FP32", fp32, off, torch.optim.AdamW(fp32.parameters(), lr=1e-3, fused=True)),
        Run("converted", converted, scaler, fxprec.optim.AdamW(converted.parameters(), lr=1e-3)),
    ]
    return runs, scaler


def checked(data: Data, width: int, epochs: int, size: int, settings: dict, console: Console) -> Checked:
    """Train the CNN in FP32, compare a converted copy with it on two batches, print and return what came out."""
    (fp32, _), _ = both_runs(data, width, size, 0, settings)
    with Progress(console=console, transient=True) as progress:
        train([fp32], data, epochs, size, progress)
    converted, _ = fxprec.convert(copy.deepcopy(fp32.model), (data.train_x[:size],), **settings)
    x, y = data.test_x[: 2 * size], data.test_y[: 2 * size]
    correct, losses, kept = [], [], []
    for model in (fp32.model, converted):
        kept.append(saved_activation_bytes(model.train(), x[:size], y[:size]))
        with torch.inference_mode():
            scores = model.eval()(x)
        correct.append(int((scores.argmax(1) == y).sum()))
        losses.append(F.cross_entropy(scores, y).item())
    result = Checked(len(x), (correct[0], correct[1]), (losses[0], losses[1]), (kept[0], kept[1]))
    console.print(checked_table(result, size))
    console.print(fxprec.report(converted).headline)
    return result


def checked_table(result: Checked, size: int) -> Table:
    shown = Table(
        title=f"1. A CNN that was trained in FP32, and its converted copy, on {result.images} test images",
        caption=f"kept: what autograd keeps for the backward of a batch of {size}",
        box=box.SIMPLE_HEAD,
        show_edge=False,
    )
    for column in ("run", "loss", "right", "kept"):
        shown.add_column(column, justify="left" if column == "run" else "right", no_wrap=True)
    for i, name in enumerate(("FP32", "converted")):
        kept = f"{result.activation_bytes[i] / 1e6:.1f} MB"
        shown.add_row(name, f"{result.losses[i]:.4f}", f"{result.correct[i]} of {result.images}", kept)
    return shown


def serve(data: Data, width: int, size: int, console: Console) -> list[Served]:
    """Train a wide classifier in FP32, freeze a copy, let both classify one image at a time, and print a table."""
    torch.manual_seed(0)
    fp32 = WideClassifier(width)
    off = fxprec.LossScaler("cpu", enabled=False)
    run = Run("FP32", fp32, off, torch.optim.AdamW(fp32.parameters(), lr=1e-3, fused=True))
    for x, y in itertools.chain(batches(data, size, seed=0), batches(data, size, seed=1)):
        run.step(x, y)
    with torch.inference_mode():  # so that costs of a forward alone decide what is lowered
        frozen, _ = fxprec.convert(copy.deepcopy(fp32).eval(), (data.test_x[:1],), lower="pays")
        fxprec.freeze(frozen)
        models = {"FP32": fp32.eval(), "frozen": frozen}
        seconds, correct = one_at_a_time(list(models.values()), data)
    results = [
        Served(name, min(seconds[i]), correct[i] / len(data.test_y), weight_bytes(model))
        for i, (name, model) in enumerate(models.items())
    ]
    console.print(served_table(results))
    return results


def one_at_a_time(models: Sequence[Callable[[Tensor], Tensor]], data: Data) -> tuple[list[list[float]], list[int]]:
    """Return for each model the seconds of its calls, and how many images it got right; they take turns."""
    seconds: list[list[float]] = [[] for _ in models]
    correct = [0 for _ in models]
    for image, label in zip(data.test_x.split(1), data.test_y, strict=True):
        for i, model in enumerate(models):
            started = time.perf_counter()
            scores = model(image)
            seconds[i].append(time.perf_counter() - started)
            correct[i] += int(scores.argmax() == label)
    return seconds, correct


def served_table(results: list[Served]) -> Table:
    shown = Table(
        title="2. A wide classifier, trained in FP32, serves one image at a time",
        caption="an image: the fastest of 360 calls. frozen: low weights, and no others",
        box=box.SIMPLE_HEAD,
        show_edge=False,
    )
    for column in ("run", "accuracy", "an image", "speed", "weights"):
        shown.add_column(column, justify="left" if column == "run" else "right", no_wrap=True)
    for result in results:
        shown.add_row(
            result.name,
            f"{result.accuracy:.2%}",
            f"{result.seconds * 1e3:.2f} ms",
            f"{results[0].seconds / result.seconds:.2f} x",
            f"{result.weight_bytes / 1e6:.1f} MB",
        )
    return shown


def find_overflow(data: Data, console: Console) -> Finding:
    """Ask where the loss of ``RowAttention`` becomes NaN in float16, convert as the answer says, and print both."""
    torch.manual_seed(0)
    model = RowAttention()
    x, y = 1023 * data.train_x[:32], data.train_y[:32]  # pixels of 10 bits, as a camera gives them
    converted, _ = fxprec.convert(model, (x,), dtype=torch.float16)
    loss = F.cross_entropy(converted(x), y).item()
    console.print(f"\n3. The loss of a model in float16 is {loss}. Where that comes from, and its cure:")
    finding = locate(converted, (x, y), F.cross_entropy)
    assert finding is not None, "the overflow is still there, and was not found"
    console.print(str(finding), highlight=False, soft_wrap=True)
    policy = fxprec.Policy.preset("O1").override(nodes={finding.node: torch.float32})
    cured, _ = fxprec.convert(fxprec.revert(converted), (x,), dtype=torch.float16, policy=policy)
    ours = F.cross_entropy(cured(x), y).item()
    theirs = F.cross_entropy(fxprec.revert(cured)(x), y).item()
    console.print(f"Converted so, its loss is {ours:.2f}; in FP32 {theirs:.2f}.")
    return finding


def weight_bytes(model: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def table(results: list[Result], size: int) -> Table:
    seeds = len(results[0].accuracies)
    shown = Table(
        title="1. A CNN learns digits: 1,437 to train on, 360 for the test",
        caption=f"loss: mean of the last epoch. accuracy: mean of {seeds} seeds ± half of their range. step: median of"
        " forward, backward and optimizer. weights: parameters + shadows. kept: what autograd keeps for the backward"
        f" of a batch of {size}",
        box=box.SIMPLE_HEAD,
        show_edge=False,
    )
    for column in ("run", "loss", "accuracy", "step", "speed", "weights", "kept"):
        shown.add_column(column, justify="left" if column == "run" else "right", no_wrap=True)
    for result in results:
        shadows = f" + {result.shadow_bytes / 1e6:.1f}" if result.shadow_bytes else ""
        spread = (max(result.accuracies) - min(result.accuracies)) / 2
        shown.add_row(
            result.name,
            f"{result.loss:.4f}",
            f"{100 * statistics.fmean(result.accuracies):.1f} ± {100 * spread:.1f} %",
            f"{result.step_seconds * 1e3:.0f} ms",
            f"{results[0].step_seconds / result.step_seconds:.2f} x",
            f"{result.weight_bytes / 1e6:.1f}{shadows} MB",
            f"{result.activation_bytes / 1e6:.1f} MB",
        )
    return shown


def has_no_units() -> bool:
    """Return whether ``convert`` says that the low dtype is slower than FP32 here."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", fxprec.SlowDtypeWarning)
        fxprec.convert(nn.Linear(1, 1))
    return any(issubclass(each.category, fxprec.SlowDtypeWarning) for each in caught)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train a CNN on digits, serve a classifier, and find an overflow")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--width", type=int, help="channels of the CNN's first block: 32; 16 where bfloat16 is slow")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--level", help="O0, O1, O2 or O3; O1 if neither this nor --policy is given")
    parser.add_argument("--policy", help="a policy file, such as examples/policy.toml")
    options = parser.parse_args(arguments)

    console = Console()
    data = load()
    policy = fxprec.Policy.from_toml(options.policy) if options.policy else None
    settings = {"level": options.level, "policy": policy}
    slow = has_no_units()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fxprec.SlowDtypeWarning)  # said here, and of float16 known
        if slow:
            console.print("This CPU has no bfloat16 units: training in bfloat16 would lose time.\n")
            checked(data, options.width or 16, options.epochs, options.batch, settings, console)
        else:
            width = options.width or 32
            side_by_side(data, width, options.epochs, options.batch, options.seeds, settings, console)
        console.print()
        serve(data, 2048, options.batch, console)
        find_overflow(data, console)


if __name__ == "__main__":
    main()
