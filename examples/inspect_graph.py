"""Look into a conversion: the graph before and after, the report, one module explained, and a policy that changes it.

Runs in seconds: ``python examples/inspect_graph.py``
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxprec
from fxprec.testing import assert_annotations_hold, assert_precision, count_casts, format_graph


class Block(nn.Module):
    """A pre-norm attention block of one head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        weights = F.softmax(q @ k.transpose(-2, -1) * k.size(-1) ** -0.5, dim=-1)
        return x + self.proj(weights @ v)


class Classifier(nn.Module):
    def __init__(self, width: int = 32, classes: int = 10) -> None:
        super().__init__()
        self.embed = nn.Linear(16, width)
        self.block = Block(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.embed(x)).mean(dim=1))


def section(title: str) -> None:
    print(f"\n=== {title}\n")


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 12, 16)

    section("before: level O0 changes nothing")
    untouched, _ = fxprec.convert(Classifier(), (x,), level="O0")
    print(format_graph(untouched))

    section("after: level O1")
    model, _ = fxprec.convert(Classifier(), (x,), dtype=torch.bfloat16)
    print(format_graph(model))

    section("report")
    print(fxprec.report(model), fxprec.report(model).nodes, sep="\n\n")

    section("explain block.norm, and every softmax")
    print(fxprec.explain(model, "block.norm"))
    print(fxprec.explain(model, "op:softmax"))

    section("assertions, as in a unit test")
    assert_precision(model, "*.norm", torch.float32)
    assert_precision(model, "op:linear", torch.bfloat16)
    assert_annotations_hold(model, x)
    print("norms compute in float32, linears in bfloat16, and every value has the dtype that the graph states")
    try:
        assert_precision(model, "block.proj", torch.float32)
    except AssertionError as error:
        print("and a wrong one says why:", error)

    section("casts that run in a training step: eager autocast, and converted")
    plain = Classifier()
    with count_casts() as autocast, torch.autocast("cpu", torch.bfloat16):
        plain(x).float().sum().backward()
    model(x).sum().backward()  # the first training forward makes the shadows
    with count_casts() as converted:
        model(x).sum().backward()
    print("autocast ", autocast)
    print("converted", converted)
    print("(autocast casts every weight; on a CPU it leaves softmax and mean in bfloat16: fewer casts, fewer digits)")

    section("a policy keeps the head in float32")
    policy = fxprec.Policy.preset("O1").override(modules={"head": torch.float32})
    careful, _ = fxprec.convert(Classifier(), (x,), dtype=torch.bfloat16, policy=policy)
    assert_precision(careful, "head", torch.float32)
    print(fxprec.explain(careful, "head"))
    print(fxprec.report(careful).headline)


if __name__ == "__main__":
    main()
