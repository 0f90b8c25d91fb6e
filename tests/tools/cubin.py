"""Read from a compiled kernel which registers and memory it takes, by NVIDIA's tools, which come with Triton."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = ["Usage", "disassembled", "usage", "usage_of"]


@dataclass(frozen=True, slots=True)
class Usage:
    """What a kernel takes.

    Attributes:
        registers: of a thread.
        local: bytes of local memory of a thread: spilled registers, and frames of calls.
        shared: bytes of shared memory of a program that are known when it is compiled.
    """

    registers: int
    local: int
    shared: int


def usage(cubin: Path) -> Usage:
    """Return what the kernel in a file takes."""
    said = _said("cuobjdump", "--dump-resource-usage", str(cubin))
    numbers = {name: int(number) for name, number in re.findall(r"\b(REG|STACK|LOCAL|SHARED):(\d+)", said)}
    return Usage(numbers["REG"], numbers["STACK"] + numbers["LOCAL"], numbers["SHARED"])


def disassembled(cubin: Path) -> str:
    """Return the kernel's SASS."""
    return _said("nvdisasm", "-c", str(cubin))


def _said(tool: Literal["cuobjdump", "nvdisasm"], *options: str) -> str:
    from triton import knobs  # not everywhere installed, where tests are collected

    command = [getattr(knobs.nvidia, tool).path, *options]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def usage_of(cubin: bytes) -> Usage:
    """Return what a kernel takes that is in no file."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return usage(Path(file.name))
