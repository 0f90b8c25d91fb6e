"""What the benchmarks train: a model, data and a loss, in sizes for a CPU, for a GPU, launch-bound and tiny.

::

    for workload in workloads("cpu", only=("gpt", "mlp")):
        model = workload.make()
        *inputs, target = workload.batch(torch.Generator().manual_seed(0))
        workload.loss(model(*inputs), target).backward()

Launch-bound: the arithmetic is so small that the host, which prepares and launches each operator, sets the time. Tiny:
for checks that a thing runs. Dropout is 0 everywhere, so that losses of variants are comparable.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, Literal, cast, get_args

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.workloads.models import BERT, CNN, MLP, Decoder, Llama, ResNet, UNet, ViT

__all__ = ["NAMES", "SIZES", "Size", "Workload", "named", "workloads"]

Size = Literal["cpu", "gpu", "launch", "tiny"]
SIZES: Final[tuple[Size, ...]] = get_args(Size)


@dataclass(frozen=True)
class Workload:
    """A model at a size, with data and loss: ``loss(model(*batch[:-1]), batch[-1])``.

    Attributes:
        name: of the model.
        size: which of ``SIZES``.
        shape: the sizes in words.
        make: the FP32 model, made on the current default device from torch's generator, which the caller seeds.
        batch: random data on the CPU, never zeros; the last tensor is the target.
        loss: (output, target) -> scalar.
        channels_last: whether the model's weights and images are to be in that memory format on a GPU.
    """

    name: str
    size: Size
    shape: str
    make: Callable[[], nn.Module]
    batch: Callable[[Generator], tuple[Tensor, ...]]
    loss: Callable[[Any, Tensor], Tensor]
    channels_last: bool = False

    def batches(self, count: int, device: torch.device, seed: int = 0) -> list[tuple[Tensor, ...]]:
        """So many different batches on a device, in the memory format of the workload."""
        generator = Generator().manual_seed(seed)
        return [tuple(self._placed(x, device) for x in self.batch(generator)) for _ in range(count)]

    def placed(self, model: nn.Module, device: torch.device) -> nn.Module:
        """The same model on the device, in the memory format of the workload, training."""
        if self._channels_last(device):
            model.to(device=device, memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        return model.to(device).train()

    def _placed(self, x: Tensor, device: torch.device) -> Tensor:
        x = x.to(device)
        return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 and self._channels_last(device) else x

    def _channels_last(self, device: torch.device) -> bool:
        return self.channels_last and device.type == "cuda"

    def flops(self) -> int:
        """Floating-point operations of matmuls, convolutions and attention in a forward and backward; none is run."""
        meta = torch.device("meta")
        with meta:
            model = self.make()
        *inputs, target = (x.to(meta) for x in self.batch(Generator().manual_seed(0)))
        with FlopCounterMode(display=False) as counter:
            self.loss(model(*inputs), target).backward()
        return counter.get_total_flops()

    def parameters(self) -> int:
        with torch.device("meta"):
            return sum(p.numel() for p in self.make().parameters())


# -- data and losses --------------------------------------------------------------------------------------------------


def _each_token(logits: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of (batch, time, vocabulary) logits; targets of -100 do not count."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def _codes(vocabulary: int, batch: int, time: int) -> Callable[[Generator], tuple[Tensor, ...]]:
    def make(generator: Generator) -> tuple[Tensor, ...]:
        codes = torch.randint(vocabulary, (batch, time + 1), generator=generator)
        return codes[:, :-1].contiguous(), codes[:, 1:].contiguous()

    return make


def _masked_codes(vocabulary: int, batch: int, time: int) -> Callable[[Generator], tuple[Tensor, ...]]:
    """Codes, padding mask (rows are full to between a half and the end) and targets at 15 % of the tokens."""

    def make(generator: Generator) -> tuple[Tensor, ...]:
        codes = torch.randint(vocabulary, (batch, time), generator=generator)
        lengths = torch.randint(time // 2, time + 1, (batch, 1), generator=generator)
        mask = torch.arange(time) < lengths
        asked = mask & (torch.rand(batch, time, generator=generator) < 0.15)
        asked[:, 0] = True  # there is always one
        return codes, mask, torch.where(asked, codes, -100)

    return make


def _images(
    batch: int, side: int, classes: int, channels: int = 3, pixels: bool = False
) -> Callable[[Generator], tuple[Tensor, ...]]:
    """Images and their classes, or with ``pixels`` those of each pixel."""

    def make(generator: Generator) -> tuple[Tensor, ...]:
        target = (batch, side, side) if pixels else (batch,)
        images = torch.randn(batch, channels, side, side, generator=generator)
        return images, torch.randint(classes, target, generator=generator)

    return make


# -- the models, each at any size -------------------------------------------------------------------------------------


def _mlp(width: int, batch: int) -> dict[str, Any]:
    def data(generator: Generator) -> tuple[Tensor, ...]:
        return torch.randn(batch, width, generator=generator), torch.randn(batch, width, generator=generator)

    return {"shape": f"3 x {width}, batch {batch}", "make": lambda: MLP(width), "batch": data, "loss": F.mse_loss}


def _cnn(batch: int) -> dict[str, Any]:
    return {
        "shape": f"28 x 28, batch {batch}",
        "make": lambda: CNN(dropout=(0.0, 0.0)),
        "batch": _images(batch, 28, 10, channels=1),
        "loss": F.cross_entropy,
    }


def _resnet(depths: tuple[int, ...], width: int, side: int, batch: int) -> dict[str, Any]:
    return {
        "shape": f"width {width}, {side} x {side}, batch {batch}",
        "make": lambda: ResNet(depths, width),
        "batch": _images(batch, side, 1000),
        "loss": F.cross_entropy,
        "channels_last": True,
    }


def _unet(width: int, depth: int, side: int, batch: int) -> dict[str, Any]:
    return {
        "shape": f"width {width}, {side} x {side}, batch {batch}",
        "make": lambda: UNet(width, depth),
        "batch": _images(batch, side, 2, pixels=True),
        "loss": F.cross_entropy,
        "channels_last": True,
    }


def _gpt(layers: int, dim: int, heads: int, vocabulary: int, batch: int, time: int) -> dict[str, Any]:
    return {
        "shape": f"{layers} layers, d {dim}, {batch} x {time}",
        "make": lambda: Decoder(layers, dim, heads, vocabulary, time, tied=True),
        "batch": _codes(vocabulary, batch, time),
        "loss": _each_token,
    }


def _llama(layers: int, dim: int, heads: int, inner: int, vocabulary: int, batch: int, time: int) -> dict[str, Any]:
    return {
        "shape": f"{layers} layers, d {dim}, {batch} x {time}",
        "make": lambda: Llama(layers, dim, heads, inner, vocabulary, time),
        "batch": _codes(vocabulary, batch, time),
        "loss": _each_token,
    }


def _bert(layers: int, dim: int, heads: int, vocabulary: int, batch: int, time: int) -> dict[str, Any]:
    return {
        "shape": f"{layers} layers, d {dim}, {batch} x {time}, padded",
        "make": lambda: BERT(layers, dim, heads, vocabulary, time),
        "batch": _masked_codes(vocabulary, batch, time),
        "loss": _each_token,
    }


def _vit(layers: int, dim: int, heads: int, side: int, patch: int, batch: int) -> dict[str, Any]:
    return {
        "shape": f"{layers} layers, d {dim}, {side} x {side} by {patch}, batch {batch}",
        "make": lambda: ViT(layers, dim, heads, side, patch),
        "batch": _images(batch, side, 1000),
        "loss": F.cross_entropy,
    }


#: model -> size -> what it is. Of the GPU's the models are GPT-2 small, BERT-base, ViT-B/16 and ResNet-50.
_TABLE: Final[dict[str, dict[Size, dict[str, Any]]]] = {
    "mlp": {"cpu": _mlp(2048, 256), "gpu": _mlp(8192, 4096), "launch": _mlp(256, 8), "tiny": _mlp(16, 4)},
    "cnn": {"cpu": _cnn(64), "gpu": _cnn(4096), "launch": _cnn(4), "tiny": _cnn(2)},
    "resnet50": {
        "cpu": _resnet((3, 4, 6, 3), 64, 64, 8),
        "gpu": _resnet((3, 4, 6, 3), 64, 224, 256),
        "launch": _resnet((3, 4, 6, 3), 16, 64, 2),
        "tiny": _resnet((1, 1, 1, 1), 4, 33, 3),
    },
    "unet": {
        "cpu": _unet(16, 4, 96, 2),
        "gpu": _unet(64, 4, 256, 32),
        "launch": _unet(8, 4, 32, 1),
        "tiny": _unet(4, 2, 12, 2),
    },
    "gpt": {
        "cpu": _gpt(4, 512, 8, 1024, 4, 256),
        "gpu": _gpt(12, 768, 12, 50257, 16, 1024),
        "launch": _gpt(8, 64, 4, 256, 1, 32),
        "tiny": _gpt(2, 16, 2, 31, 2, 9),
    },
    "gpt-50k": {"cpu": _gpt(4, 512, 8, 50257, 4, 256)},  # GPT-2's vocabulary, whose logits outweigh all else
    "llama": {
        "cpu": _llama(4, 256, 4, 688, 1024, 4, 256),
        "gpu": _llama(8, 1024, 16, 2816, 32000, 8, 1024),
        "launch": _llama(8, 64, 4, 176, 256, 1, 32),
        "tiny": _llama(2, 16, 2, 24, 31, 2, 9),
    },
    "bert": {
        "cpu": _bert(4, 256, 4, 1024, 8, 128),
        "gpu": _bert(12, 768, 12, 30522, 32, 512),
        "launch": _bert(8, 64, 4, 256, 2, 32),
        "tiny": _bert(2, 16, 2, 31, 3, 9),
    },
    "vit": {
        "cpu": _vit(4, 256, 4, 112, 8, 4),
        "gpu": _vit(12, 768, 12, 224, 16, 256),
        "launch": _vit(8, 64, 4, 32, 8, 1),
        "tiny": _vit(2, 16, 2, 12, 4, 3),
    },
}
#: Of the models, in the order in which they are measured.
NAMES: Final = tuple(_TABLE)


def named(names: Iterable[str], known: Iterable[str], what: str) -> tuple[str, ...]:
    """The names as they are given, each of which must be known.

    Raises:
        ValueError: one is not; says which is nearest.
    """
    names, known = tuple(names), tuple(known)
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            raise ValueError(f"no {what} {name!r}; {hint}")
    return names


def workloads(size: str, only: Iterable[str] = ()) -> list[Workload]:
    """All models at a size, or those that are named, as far as they are there.

    Raises:
        ValueError: an unknown size or name; says which is nearest.
    """
    named([size], SIZES, "size")
    known = cast(Size, size)
    chosen = named(only, NAMES, "model") or NAMES
    return [
        Workload(name=name, size=known, **sizes[known])
        for name, sizes in _TABLE.items()
        if name in chosen and known in sizes
    ]
