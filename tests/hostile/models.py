"""Small models that cases start from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Net(nn.Module):
    """One linear layer, ``l``."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        return self.l(x)


class Two(Net):
    """Two of them, with something between."""

    def __init__(self) -> None:
        super().__init__()
        self.r = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        return self.r(torch.relu(self.l(x)))


def net(forward: Callable[..., Any], base: type[nn.Module] = Net, **attributes: Any) -> Any:
    """A ``Net`` with another forward, and attributes of the instance."""
    model = type("Made", (base,), {"forward": forward, "__module__": __name__})()
    for name, value in attributes.items():
        setattr(model, name, value)
    return model


def again(model: Any) -> None:
    """No change, but a further call."""
