"""Convolutional models for the benchmarks and the tests, written here: no download, sizes by argument."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["CNN", "ResNet", "UNet"]


class CNN(nn.Module):
    """The network of PyTorch's MNIST example: (N, 1, 28, 28) -> (N, 10) logits.

    Args:
        dropout: before the first and before the second linear layer; the example has 0.25 and 0.5.
        side: of the images, in pixels.
    """

    def __init__(self, dropout: tuple[float, float] = (0.25, 0.5), side: int = 28) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.dropout1 = nn.Dropout(dropout[0])
        self.dropout2 = nn.Dropout(dropout[1])
        self.fc1 = nn.Linear(64 * ((side - 4) // 2) ** 2, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(images))))
        x = torch.flatten(self.dropout1(F.max_pool2d(x, 2)), 1)
        return self.fc2(self.dropout2(F.relu(self.fc1(x))))


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions with batch norms, and a shortcut: (N, C, H, W) -> (N, 4 * width, H/s, W/s)."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != 4 * width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.relu(self.norm2(self.conv2(y)))
        return self.relu(self.norm3(self.conv3(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """ResNet of bottlenecks, with the stride in the 3x3 convolution: (N, 3, H, W) -> (N, classes) logits.

    Args:
        depths: blocks of the four stages; (3, 4, 6, 3) is ResNet-50.
        width: of the first stage; each further one has twice as much.
        classes: of the logits.

    Source: He et al., "Deep Residual Learning for Image Recognition", CVPR 2016.
    """

    def __init__(self, depths: Sequence[int] = (3, 4, 6, 3), width: int = 64, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, padding=1),
        )
        blocks: list[nn.Module] = []
        channels = width
        for stage, depth in enumerate(depths):
            for block in range(depth):
                stride = 2 if stage > 0 and block == 0 else 1
                blocks.append(Bottleneck(channels, width << stage, stride))
                channels = 4 * (width << stage)
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.blocks(self.stem(images))
        return self.head(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


def _double(channels: int, width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.Conv2d(width, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    """U-Net with padded convolutions and batch norms: (N, 3, H, W) -> (N, classes, H, W) logits of each pixel.

    Args:
        width: channels at full resolution, twice as many at each of ``depth`` halvings (H and W are divisible by
            ``2 ** depth``).
        classes: of the logits.

    Source: Ronneberger et al., "U-Net: Convolutional Networks for Biomedical Image Segmentation", MICCAI 2015.
    """

    def __init__(self, width: int = 64, depth: int = 4, classes: int = 2) -> None:
        super().__init__()
        widths = [width << level for level in range(depth + 1)]
        self.down = nn.ModuleList(_double(before, after) for before, after in zip([3, *widths], widths, strict=False))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * each, each, 2, 2) for each in reversed(widths[:-1]))
        self.merge = nn.ModuleList(_double(2 * each, each) for each in reversed(widths[:-1]))
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        x = self.down[0](images)
        skipped = []
        for block in list(self.down)[1:]:
            skipped.append(x)
            x = block(F.max_pool2d(x, 2))
        for up, merge, skip in zip(self.up, self.merge, reversed(skipped), strict=True):
            x = merge(torch.cat([skip, up(x)], 1))
        return self.head(x)
