"""Memory traffic of one training step that is owed to the weights: eager autocast beside fxprec's optimizer.

    python -m benchmarks.traffic [--markdown]

Counted, not estimated: a dispatch mode adds up the bytes of the tensors that every operator reads and writes, by its
schema, for operators on tensors of the size of a weight (or lists of them): casts of weights and of their gradients,
unscaling, the check for inf, clipping, the update, the shadows. Matrix products are not among them, and so are not the
reads of the backward. "held" and "peak" are what the allocator reports: bytes a parameter between steps (weights,
moments, shadows), and allocated at most at one time beyond them during a step (gradients, casts, temporaries).

docs/training.md shows the table that this prints. The rows of CUDA are what our kernels load and store, as
tests/kernels/optim finds in the compiled code.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import fxprec
from benchmarks.measure.peak import HostMeter, Marks, peak_of
from fxprec.model.conversion import conversion_of, is_converted
from fxprec.torch_internals import OpMode

__all__ = ["COLUMNS", "Traffic", "markdown", "rows"]

COLUMNS = (
    "variant", "weight casts", "gradient casts", "unscale, check, clip", "update, shadows", "moved", "kernels", "held",
    "peak",
)  # fmt: skip
WIDTH, BATCH = 256, 4


class Traffic(OpMode):
    """Bytes moved by operators on tensors of ``numel`` elements or more, by the phase that is set."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel = numel
        self.phase = "forward"
        self.bytes: dict[str, int] = {}
        self.operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func._schema.name
        if func.is_view or name.startswith(_NOT_COUNTED):
            return result
        moved = sum(self._moved(func, args, kwargs)) + sum(self._written(func, result))
        if moved:
            self.operators += 1
            phase = "update" if name.startswith(_UPDATES) else self.phase
            self.bytes[phase] = self.bytes.get(phase, 0) + moved
        return result

    def _moved(self, func: Any, args: Any, kwargs: Any) -> Iterator[int]:
        """What is read, and written in place. Of ``copy_`` and the like the target is only written."""
        for i, argument in enumerate(func._schema.arguments):
            value = kwargs.get(argument.name, args[i] if i < len(args) and not argument.kwarg_only else None)
            written = argument.alias_info is not None and argument.alias_info.is_write
            if func._schema.name.startswith("aten::_fused") and argument.name == "grads":
                written = kwargs.get("grad_scale") is not None  # only then are gradients written back
            read = not (written and func._schema.name in _OVERWRITES)
            for tensor in tree_leaves(value):
                if isinstance(tensor, Tensor) and tensor.numel() >= self.numel:
                    yield tensor.nbytes * (read + written)

    def _written(self, func: Any, result: Any) -> Iterator[int]:
        returned = [r for r in func._schema.returns if r.alias_info is None]
        for tensor in tree_leaves(result) if returned else ():
            if isinstance(tensor, Tensor) and tensor.numel() >= self.numel:
                yield tensor.nbytes


#: Creation without a write, and what is the model's own work. (Views are not counted either.)
_NOT_COUNTED = (
    "aten::mm", "aten::addmm", "aten::empty", "aten::new_empty", "aten::mse_loss", "aten::threshold", "aten::relu",
    "aten::lift", "aten::_unsafe_view", "mkldnn", "aten::linear",
)  # fmt: skip
_UPDATES = ("aten::_fused", "aten::_foreach_copy", "aten::_foreach_add")
_OVERWRITES = ("aten::copy_", "aten::_foreach_copy_", "aten::zero_", "aten::fill_")


@dataclass(frozen=True)
class Variant:
    """How a step is made: the optimizer, and how the loss is computed and clipped."""

    make: Callable[[nn.Module], torch.optim.Optimizer]
    converted: bool
    max_norm: float | None  # clipped by torch, between unscale_ and step


VARIANTS: dict[str, Variant] = {
    "eager autocast, AdamW(fused=True)": Variant(lambda m: torch.optim.AdamW(m.parameters(), fused=True), False, 1.0),
    "fxprec, AdamW(fused=True)": Variant(lambda m: torch.optim.AdamW(m.parameters(), fused=True), True, 1.0),
    "fxprec, optim.AdamW": Variant(lambda m: fxprec.optim.AdamW(m.parameters(), max_norm=1.0), True, None),
    "fxprec, optim.AdamW, low gradients": Variant(
        lambda m: fxprec.optim.AdamW(m.parameters(), max_norm=1.0, low_gradients=True), True, None
    ),
}


def count(name: str) -> tuple[str, ...]:
    """One row, measured in the third step."""
    variant = VARIANTS[name]
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))
    if variant.converted:
        fxprec.convert(model)
    optimizer = variant.make(model)
    scaler = fxprec.LossScaler("cpu") if variant.converted else torch.amp.GradScaler("cpu")
    parameters = sum(p.numel() for p in model.parameters())
    x, y = torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)
    mode = Traffic(WIDTH * WIDTH)
    for counting in (None, None, mode):
        _step(model, optimizer, scaler, x, y, variant, counting)
    optimizer.zero_grad()
    held = _allocated(lambda: copy.deepcopy((model, optimizer)))[1]  # a copy allocates what is held
    held += sum(store.dtype.itemsize * parameters for store in _stores(model))
    peak = _allocated(lambda: _step(model, optimizer, scaler, x, y, variant, None))[0]
    phases = [mode.bytes.get(phase, 0) / parameters for phase in ("forward", "backward", "step", "update")]
    figures = (f"{figure:.0f}" for figure in (*phases, sum(phases)))
    return (name, *figures, str(mode.operators), *(f"{figure / parameters:.1f}" for figure in (held, peak)))


def _stores(model: nn.Module) -> list[Any]:
    """Shadows are never copied: they are counted by their elements."""
    return [conversion_of(model).store] if is_converted(model) else []


def _allocated(work: Callable[[], object]) -> tuple[int, int]:
    """Bytes that the CPU's allocator gave out during ``work``: at most at one time, and still there at its end."""
    kept: list[object] = []
    segments = HostMeter().measure(lambda: kept.append(work()), Marks())
    return peak_of(segments).bytes, segments[-1].live


def _step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: Any,
    x: Tensor,
    y: Tensor,
    variant: Variant,
    mode: Traffic | None,
) -> None:
    def during(phase: str, work: Callable[[], Any]) -> Any:
        if mode is None:
            return work()
        mode.phase = phase
        with mode:
            return work()

    def forward() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=not variant.converted):
            return model(x)

    optimizer.zero_grad()
    loss = F.mse_loss(during("forward", forward).float(), y)
    during("backward", scaler.scale(loss).backward)

    def update() -> None:
        if variant.max_norm is not None:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), variant.max_norm, foreach=True)
        scaler.step(optimizer)

    during("step", update)
    scaler.update()


def rows() -> list[tuple[str, ...]]:
    """The table: bytes a parameter and step by what moves them, and operators."""
    table = [count(name) for name in VARIANTS]
    for name, low in (("FP32 gradients", torch.float32), ("low gradients", torch.bfloat16)):
        check = low.itemsize
        update = low.itemsize + 2 * 3 * 4 + torch.bfloat16.itemsize  # parameter and two moments are read and written
        casts = 0 if low is torch.bfloat16 else 6
        figures = (0, casts, check, update, casts + check + update)
        table.append((f"CUDA: optim.AdamW, {name}", *map(str, figures), "3", "", ""))
    return table


def markdown(table: list[tuple[str, ...]]) -> str:
    """As docs/training.md has it."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (COLUMNS, ("---",) * len(COLUMNS), *table))


def main() -> None:
    parser = argparse.ArgumentParser(description="Count the bytes that a step moves for each parameter")
    parser.add_argument("--markdown", action="store_true", help="print the table of docs/training.md")
    table = rows()
    if parser.parse_args().markdown:
        print(markdown(table))
        return
    shown = Table(title="Bytes a parameter and training step, bfloat16, clipped, with a loss scale")
    for column in COLUMNS:
        shown.add_column(column, justify="left" if column == "variant" else "right")
    for row in table:
        shown.add_row(*row)
    Console().print(shown)


if __name__ == "__main__":
    main()
