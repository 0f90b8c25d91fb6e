"""Kernels as a GPU would get them: launched on the pretended GPU of the tests, and read from what was compiled.

::

    pretended(machine)
    for launch in launches_of(lambda: cross_entropy(logits, target)):
        predict(launch.kernel, machine)

A process pretends one machine only, for good.
"""

from __future__ import annotations

import functools
import math
import pathlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks.predict.cubin import disassembled
from benchmarks.predict.machines import Machine
from benchmarks.predict.model import Kernel
from benchmarks.predict.ops import bytes_of
from benchmarks.predict.sass import Path, SassError, loops, path_of
from benchmarks.predict.trips import touched, trips
from fxprec.kernels.launch.triton_support import why_not

__all__ = ["LOCAL", "Launch", "Unread", "launches_of", "pretended"]

_TOOLS: Final = pathlib.Path(__file__).parents[2] / "tests" / "tools"
#: Bytes of local memory that are no spill (frames of calls): what spills is not predicted.
LOCAL: Final = 24


@dataclass(frozen=True)
class Launch:
    """A kernel by its name; ``spills``: bytes of registers that a thread puts into memory."""

    name: str
    kernel: Kernel
    spills: int


@dataclass(frozen=True)
class Unread:
    """A kernel that cannot be simulated. ``bytes``: that it loads and stores; ``why``: in words."""

    name: str
    bytes: float
    why: str


def pretended(machine: Machine) -> torch.device:
    """This process has that GPU from now on, on which products give memory and no numbers; returns the device."""
    if str(_TOOLS) not in sys.path:
        sys.path.insert(0, str(_TOOLS))
    import no_products
    import pretended_device

    pretended_device.pretend(machine.capability, machine.processors)
    _kept.append(no_products.skip_products())
    why_not("cuda")  # launches a kernel, to see whether kernels run
    return pretended_device.DEVICE


_kept: list[object] = []


def launches_of(
    run: Callable[[], object], moved: tuple[float, float] | None = None, unread: list[Unread] | None = None
) -> list[Launch]:
    """What a function launches.

    Args:
        moved: bytes that are loaded and stored, of kernels that find their tensors in tables; None: all tensors among
            the arguments that a kernel loads or stores, each once.
        unread: takes the kernels whose code is not understood.

    Raises:
        SassError: the code is not understood, and ``unread`` is None.
    """
    from pretended_device import RECORD

    found: list[Launch] = []

    def look(launched: Any, grid: Sequence[int], arguments: Sequence[Any]) -> None:
        made = launched.made
        files = {pathlib.Path(path).suffix: pathlib.Path(path) for path in launched.files.values()}
        text = files[".ttir"].read_text(encoding="utf-8")
        given = dict(zip(launched.source.fn.arg_names, arguments, strict=False))
        numbers = {name: number for name, number in given.items() if isinstance(number, int)}
        # Chunks of optimizers are as long as a constant says, but for the last one of a tensor.
        tables = "CHUNK" in numbers
        unknown = numbers["CHUNK"] / numbers["BLOCK"] if tables else None
        often = trips(text, numbers, grid, unknown)
        through = touched(text)
        sizes = {name: bytes_of(x) for name, x in given.items() if isinstance(x, Tensor)}
        loaded, stored = (moved if tables else None) or (
            sum(sizes.get(name, 0) for name, counts in through.items() if counts[kind]) for kind in (0, 1)
        )
        try:
            path = _path(files[".cubin"])
            if loops(path) != len(often):
                raise SassError(f"ptxas unrolled loops of {made.name}: there are {loops(path)}, of {len(often)}")
        except SassError as error:
            if unread is None:
                raise
            unread.append(Unread(made.name, loaded + stored, str(error)))
            return
        kernel = Kernel(path, often, made.registers, made.shared, made.warps, math.prod(grid), loaded, stored)
        found.append(Launch(made.name, kernel, max(0, made.local - LOCAL)))

    RECORD.look = look
    try:
        run()
    finally:
        RECORD.look = None
    return found


@functools.cache
def _path(cubin: pathlib.Path) -> Path:
    return path_of(disassembled(cubin))
