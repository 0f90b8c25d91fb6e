"""What ``benchmarks.accuracy`` trains: data that is at hand without a download, a model and a loss."""

from __future__ import annotations

import pathlib
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from benchmarks.workloads.convnets import CNN
from benchmarks.workloads.models import Decoder
from benchmarks.workloads.training import Workload

__all__ = ["TASKS", "Task"]


@dataclass(frozen=True)
class Task:
    """What is learned.

    Attributes:
        workload: model and loss.
        inputs, targets: of all examples to train on. test_inputs, test_targets: of the others.
        batch: examples of a step.
        epochs: how many there are.
        lr: AdamW's.
    """

    workload: Workload
    inputs: Tensor
    targets: Tensor
    test_inputs: Tensor
    test_targets: Tensor
    batch: int
    epochs: int
    lr: float

    @property
    def answers(self) -> int:
        """Of the test set."""
        return self.test_targets.numel()


def _digits() -> Task:
    """The 1,797 digits, four fifths to train on."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    x = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    x = F.interpolate(x, size=(28, 28), mode="bilinear", align_corners=False)
    y = torch.tensor(labels)
    shuffled = torch.randperm(len(y), generator=Generator().manual_seed(0))
    train, test = shuffled.split([1437, len(y) - 1437])
    workload = Workload("digits", "cpu", "CNN, 28 x 28, batch 64", CNN, lambda _: (x[:64], y[:64]), F.cross_entropy)
    return Task(workload, x[train], y[train], x[test], y[test], batch=64, epochs=10, lr=1e-3)


#: Of Python's standard library; each window is so many characters, and the last ones are for the test.
_MODULES: Final = ("argparse", "ast", "collections/__init__", "dataclasses", "inspect", "pathlib", "typing")
_WINDOW: Final = 64
_TRAINED: Final = 1024
_TESTED: Final = 128


def _text() -> Task:
    """The next character of Python's own source text, for each character of windows of 64."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    files = [path for name in _MODULES for path in (root / f"{name}.py", root / name / "__init__.py") if path.is_file()]
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    known = {character: code for code, character in enumerate(sorted(set(text)))}
    count = _TRAINED + _TESTED
    length = count * _WINDOW + 1
    if len(text) < length:
        raise ValueError(f"{len(text)} characters of {', '.join(_MODULES)}: {length} are needed")
    codes = torch.tensor([known[character] for character in text[:length]])
    inputs, targets = codes[:-1].view(count, _WINDOW), codes[1:].view(count, _WINDOW)

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())

    workload = Workload(
        "text", "cpu", f"GPT, 2 layers, d 64, 32 x {_WINDOW}",
        lambda: Decoder(layers=2, dim=64, heads=4, vocabulary=len(known), context=_WINDOW),
        lambda _: (inputs[:32], targets[:32]), loss,
    )  # fmt: skip
    return Task(
        workload,
        inputs[:_TRAINED],
        targets[:_TRAINED],
        inputs[_TRAINED:],
        targets[_TRAINED:],
        batch=32,
        epochs=6,
        lr=3e-3,
    )


#: name -> makes it.
TASKS: Final[dict[str, Callable[[], Task]]] = {"digits": _digits, "text": _text}
