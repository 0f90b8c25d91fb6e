"""Attention on a CPU in bfloat16: each way that there is to compute it, beside torch's kernel, and how exact it is.

    python -m benchmarks attention [--quick]

Milliseconds of a forward, and of its backward, in turns with the other ways, the fastest of several; "x": both over
those of torch's kernel. The errors are norms of the distance to float64, of the output and the largest of the three
gradients, over those of torch's kernel. "kept": megabytes that the forward keeps for its backward besides query, key,
value and output.

The ways are those of ``fxprec.kernels.cpu``: products both ways, torch's forward with a backward of products
("recomputed"), a compiled loop. Query, key and value lie in memory as models have them, heads next to each other. The
status is 1 where torch has no fused kernel in bfloat16. Nothing is written.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import fxprec
from benchmarks.measure.interleaved import fastest
from fxprec.kernels.cpu.attention import serves
from fxprec.kernels.cpu.attention_products import attention_by_products, recomputed_attention
from fxprec.kernels.cpu.compiled_attention import compiled_attention, why_not

__all__ = ["SIZES", "WAYS", "Size", "Way", "main", "measure"]

LOW: Final = torch.bfloat16
#: Of query, key, value, mask, and whether it is causal: the output.
Attend = Callable[..., Tensor]
#: Seconds for the forward of a way, and for the backward.
_SECONDS: Final = 0.3


class Size(NamedTuple):
    """``kind``: "", "causal", or "padded", a mask that hides the last keys."""

    batch: int
    heads: int
    groups: int
    length: int
    width: int
    kind: str = ""


#: Those of ``python -m benchmarks step --size cpu`` (GPT, Llama, ViT, BERT), and shorter and longer ones.
SIZES: Final = (
    Size(4, 8, 8, 256, 64, "causal"), Size(4, 4, 4, 256, 64, "causal"), Size(4, 4, 4, 197, 64),
    Size(8, 4, 4, 128, 64, "padded"), Size(1, 2, 2, 16, 16), Size(2, 4, 4, 64, 32), Size(32, 12, 12, 64, 64),
    Size(4, 8, 2, 256, 64, "causal"), Size(2, 12, 12, 512, 64, "causal"), Size(1, 8, 8, 1024, 64, "causal"),
    Size(1, 8, 8, 1024, 64),
)  # fmt: skip


@dataclass(frozen=True)
class Way:
    """Seconds of a forward and of its backward, errors of output and gradients, bytes that are kept."""

    forward: float
    backward: float
    output: float
    gradients: float
    kept: int


def _torchs(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, mask, 0.0, causal, enable_gqa=True)


WAYS: Final[Mapping[str, Attend]] = {
    "torch": _torchs, "products": attention_by_products, "recomputed": recomputed_attention,
    "compiled": compiled_attention,
}  # fmt: skip


def _operands(size: Size) -> tuple[list[Tensor], Tensor | None, Tensor]:
    """Query, key and value; the mask; the gradient of the output."""
    batch, heads, groups, length, width, kind = size
    made = [
        torch.randn(batch, length, count, width).to(LOW).transpose(1, 2) for count in (heads, groups, groups, heads)
    ]
    mask = torch.arange(length).lt(length - length // 8).view(1, 1, 1, length) if kind == "padded" else None
    return made[:3], mask, made[3]


def _kept(attend: Attend, inputs: Sequence[Tensor], mask: Tensor | None, causal: bool) -> int:
    """Bytes of what is saved, once each, but for what came in and went out."""
    storages: dict[int, int] = {}

    def pack(saved: Tensor) -> Tensor:
        storages[saved.untyped_storage().data_ptr()] = saved.untyped_storage().nbytes()
        return saved

    with saved_tensors_hooks(pack, lambda saved: saved):
        out = attend(*inputs, mask=mask, causal=causal)
    for each in (*inputs, out):
        storages.pop(each.untyped_storage().data_ptr(), None)
    return sum(storages.values())


def measure(size: Size, names: Sequence[str], seconds: float = _SECONDS) -> dict[str, Way]:
    """Each way by its name."""
    (query, key, value), mask, gradient = _operands(size)
    causal = size.kind == "causal"
    wide = [each.double().requires_grad_() for each in (query, key, value)]
    out = _torchs(*wide, mask=mask, causal=causal)
    exact = [out.detach(), *torch.autograd.grad(out, wide, gradient.double())]
    inputs = [each.requires_grad_() for each in (query, key, value)]
    outs = {name: WAYS[name](*inputs, mask=mask, causal=causal) for name in names}
    found = {name: [out.detach(), *_backward(out, inputs, gradient)] for name, out in outs.items()}
    forward = fastest([lambda own=WAYS[name]: own(*inputs, mask=mask, causal=causal) for name in names], seconds)
    backward = fastest([lambda own=outs[name]: _backward(own, inputs, gradient) for name in names], seconds)
    errors = {name: [_error(*pair) for pair in zip(each, exact, strict=True)] for name, each in found.items()}
    return {
        name: Way(there, back, errors[name][0], max(errors[name][1:]), _kept(WAYS[name], inputs, mask, causal))
        for name, there, back in zip(names, forward, backward, strict=True)
    }


def _backward(out: Tensor, inputs: Sequence[Tensor], gradient: Tensor) -> Sequence[Tensor]:
    return torch.autograd.grad(out, inputs, gradient, retain_graph=True)


def _error(found: Tensor, exact: Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm()).item()


def main(arguments: list[str] | None = None) -> int:
    """Run what the options say; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks attention", description="Time attention on a CPU")
    parser.add_argument("--quick", action="store_true", help="four sizes")
    parser.add_argument("--check", action="store_true", help="one small size, a few runs")
    options = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 160)
    torch.manual_seed(0)
    query, key, value = _operands(Size(1, 1, 1, 8, 8))[0]
    if not serves(query, key, value, None, False, False):
        console.print("torch has no fused attention in bfloat16 here", highlight=False)
        return 1
    if why := why_not():
        console.print(f"nothing is compiled: {why}", highlight=False)
    names = [name for name in WAYS if name != "compiled" or not why]
    table = Table("batch x heads (groups) x length x width", title="bfloat16")
    for heading in ("way", "ms", "x", "error", "of gradients", "kept, MB"):
        table.add_column(heading, justify="left" if heading == "way" else "right")
    for size in (Size(2, 2, 1, 9, 8, "causal"),) if options.check else SIZES[: 4 if options.quick else None]:
        ways = measure(size, names, 0.0 if options.check else _SECONDS)
        torchs = ways["torch"]
        for name, way in ways.items():
            table.add_row(
                f"{size.batch} x {size.heads} ({size.groups}) x {size.length} x {size.width} {size.kind}"
                * (way is torchs),
                name,
                f"{1e3 * way.forward:.3g} + {1e3 * way.backward:.3g}",
                f"{(way.forward + way.backward) / (torchs.forward + torchs.backward):.2f}",
                f"{way.output / torchs.output:.2f}",
                f"{way.gradients / torchs.gradients:.2f}",
                f"{way.kept / 1e6:.2f}",
                end_section=name == names[-1],
            )
    console.print(table)
    return 0


if __name__ == "__main__":
    fxprec.keep_memory()
    sys.exit(main())
