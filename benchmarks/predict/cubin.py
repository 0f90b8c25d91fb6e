"""What NVIDIA's tools, which come with Triton, say of a compiled kernel: registers and memory, and its instructions."""

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
    """Of the kernel in a file."""
    said = _said("cuobjdump", "--dump-resource-usage", str(cubin))
    numbers = {name: int(number) for name, number in re.findall(r"\b(REG|STACK|LOCAL|SHARED):(\d+)", said)}
    return Usage(numbers["REG"], numbers["STACK"] + numbers["LOCAL"], numbers["SHARED"])


def usage_of(cubin: bytes) -> Usage:
    """Of a kernel that is in no file."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return usage(Path(file.name))


def disassembled(cubin: Path) -> str:
    """SASS with labels, and with the 128 bits of each instruction beside it."""
    return _said("nvdisasm", "-c", "-hex", str(cubin))


def _said(tool: Literal["cuobjdump", "nvdisasm"], *options: str) -> str:
    from triton import knobs  # not everywhere installed, where tests are collected

    command = [getattr(knobs.nvidia, tool).path, *options]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
