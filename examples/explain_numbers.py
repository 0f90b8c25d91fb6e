"""Three stories of numbers: a NaN that is found, an accuracy that is cured, a policy that is tuned.

Runs within a minute: ``python examples/explain_numbers.py``. docs/numerics.md tells what the calls do.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxprec
from fxprec.numerics import audit, locate, tune

Batch = tuple[Tensor, Tensor]


class Attention(nn.Module):
    """Classifies rows of tokens by one head that divides its scores after the product, as many a model does."""

    def __init__(self, width: int = 16, classes: int = 4) -> None:
        super().__init__()
        self.embed, self.qkv, self.head = nn.Linear(8, width), nn.Linear(width, 3 * width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.embed(x)).chunk(3, -1)
        scores = q @ k.transpose(-2, -1)
        weights = (scores / math.sqrt(q.size(-1))).softmax(-1)
        return self.head((weights @ v).mean(1))


class Signal(nn.Module):
    """A value over time, from features of many frequencies: (N, 1) days -> (N, 1)."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.frequencies, self.hidden, self.out = nn.Linear(1, width), nn.Linear(width, width), nn.Linear(width, 1)

    def forward(self, days: Tensor) -> Tensor:
        return self.out(F.gelu(self.hidden(self.frequencies(days).cos())))


def days(count: int, generator: torch.Generator) -> Batch:
    """Times of 1,000 days, by quarters, and a signal of a week's period."""
    t = torch.randint(4000, (count, 1), generator=generator) / 4
    return t, (2 * math.pi * t / 7).sin()


def section(title: str) -> None:
    print(f"\n=== {title}\n")


def a_nan_is_found() -> None:
    """float16 holds nothing above 65,504: scores of a model with large weights are beyond that before the division."""
    torch.manual_seed(0)
    x, y = torch.randn(2, 6, 8), torch.randint(4, (2,))
    original = Attention()
    with torch.no_grad():
        original.qkv.weight *= 250
    model, scaler = fxprec.convert(original, dtype=torch.float16)
    print("loss:", F.cross_entropy(model(x), y).item())
    finding = locate(model, (x, y), F.cross_entropy, scaler)
    print(finding)
    assert finding is not None
    model = fxprec.revert(model)
    model, scaler = eval(finding.cure, {"fxprec": fxprec, "torch": torch, "model": model})  # what one would paste
    print("loss, cured:", F.cross_entropy(model(x), y).item())


def an_accuracy_is_cured() -> None:
    """bfloat16 has eight bits: of day 700.25 it makes 700, and of a quarter of a day's phase nothing is left."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    batches = [days(64, generator) for _ in range(16)]
    model, _ = fxprec.convert(Signal(), dtype=torch.bfloat16)
    ledger = audit(model, batches, F.mse_loss)
    print(ledger)
    worst = ledger.rows[0]
    model = fxprec.revert(model)
    policy = fxprec.Policy.preset("O1").override(modules={"frequencies": torch.float32})
    model, _ = fxprec.convert(model, dtype=torch.bfloat16, policy=policy)
    cured = audit(model, batches, F.mse_loss)
    print(f"\nthe largest row was {worst.node}, {worst.share:.0%}; with frequencies in FP32:")
    print(f"error of the loss {ledger.measured:.1e} -> {cured.measured:.1e}")


def a_policy_is_tuned() -> None:
    """As exact as may be in the time that a step takes now; by the costs of this machine."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(2)
    batches = [days(64, generator) for _ in range(16)]
    model, _ = fxprec.convert(Signal(), dtype=torch.bfloat16)
    tuned = tune(model, batches, F.mse_loss, time=1.0)
    print(tuned)
    print(f"\nas a file, for fxprec.Policy.from_toml:\n\n{tuned.to_toml()}")


def main() -> None:
    section("a NaN is found")
    a_nan_is_found()
    section("an accuracy is cured")
    an_accuracy_is_cured()
    section("a policy is tuned")
    a_policy_is_tuned()


if __name__ == "__main__":
    main()
