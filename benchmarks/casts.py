"""Casts executed in forward and backward of a 12-layer pre-LN GPT: eager autocast beside fxprec.

    python -m benchmarks.casts [--layers 12] [--length 32]
    TRITON_INTERPRET=1 python -m benchmarks.casts --fused

Counted by a dispatch mode on a CPU in bfloat16: every ``_to_copy`` between float dtypes. The loss is inside the model,
the optimizer is not. docs/design.md shows what this prints. With ``--fused`` regions are kernels, which run in Triton's
interpreter where there is no GPU.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterable
from typing import Literal

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import fxprec
from benchmarks.workloads.models import GPT
from fxprec.testing import CastCount, count_casts

__all__ = ["VARIANTS", "count", "markdown", "rows"]

COLUMNS = ("variant", "all", "weights", "weight gradients", "activations", "their gradients")


def _autocast(model: nn.Module) -> Callable[..., Tensor]:
    def forward(*inputs: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(*inputs)

    return forward


def _low_gradients(model: nn.Module, fuse: bool | Literal["auto"] = "auto") -> Callable[..., Tensor]:
    converted, _ = fxprec.convert(model, dtype=torch.bfloat16, fuse=fuse)
    fxprec.optim.AdamW(converted.parameters(), low_gradients=True)
    return converted


#: name -> from an FP32 model to what is called in its stead
VARIANTS: dict[str, Callable[[nn.Module], Callable[..., Tensor]]] = {
    "eager autocast": _autocast,
    "fxprec O1": lambda model: fxprec.convert(model, level="O1").module,
    "fxprec O1, low gradients": _low_gradients,
    "fxprec O2": lambda model: fxprec.convert(model, level="O2").module,
}


#: The same with fused regions.
FUSED: dict[str, Callable[[nn.Module], Callable[..., Tensor]]] = {
    "fxprec O1, fused": lambda model: fxprec.convert(model, dtype=torch.bfloat16, fuse=True).module,
    "fxprec O1, fused, low gradients": lambda model: _low_gradients(model, fuse=True),
    "fxprec O2, fused": lambda model: fxprec.convert(model, level="O2", dtype=torch.bfloat16, fuse=True).module,
}


def count(model: nn.Module, inputs: tuple[Tensor, ...], variant: str) -> CastCount:
    """Casts of one forward and backward of a copy of ``model``, after a step that captures and makes shadows."""
    copied = copy.deepcopy(model)
    run = (VARIANTS | FUSED)[variant](copied)
    run(*inputs).backward()
    with count_casts() as counts:
        run(*inputs).backward()
    return counts


def rows(layers: int, variants: Iterable[str] = VARIANTS, length: int = 32) -> list[tuple[str, ...]]:
    """The table: variant, and casts: all, of weights, of weight gradients, of activations, of their gradients.

    Args:
        length: tokens of each of the two sequences that go in; no count depends on it.
    """
    torch.manual_seed(0)
    model = GPT(layers=layers)
    inputs = (torch.randint(256, (2, length)), torch.randint(256, (2, length)))
    table = []
    for variant in variants:
        casts = count(model, inputs, variant)
        figures = (casts.total, casts.weights, casts.weight_gradients, casts.activations, casts.gradients)
        table.append((variant, *map(str, figures)))
    return table


def markdown(table: list[tuple[str, ...]]) -> str:
    """Return the table as docs/design.md has it."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (COLUMNS, ("---",) * len(COLUMNS), *table))


def main() -> None:
    parser = argparse.ArgumentParser(description="Count executed casts")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--length", type=int, default=32, help="tokens of a sequence")
    parser.add_argument("--markdown", action="store_true", help="print the table of docs/design.md")
    parser.add_argument("--fused", action="store_true", help="with fused regions; set TRITON_INTERPRET=1")
    options = parser.parse_args()
    table = rows(options.layers, FUSED if options.fused else VARIANTS, options.length)
    if options.markdown:
        print(markdown(table))
        return
    shown = Table(title=f"Casts executed, forward + backward, {options.layers}-layer pre-LN GPT, bfloat16, CPU")
    for column in COLUMNS:
        shown.add_column(column, justify="left" if column == "variant" else "right")
    for row in table:
        shown.add_row(*row)
    Console().print(shown)


if __name__ == "__main__":
    main()
