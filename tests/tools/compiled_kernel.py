"""What Triton's compiler made of a kernel: registers, memory, and the width of its accesses, read from its files."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Final

import cubin
from approximations import approximations

__all__ = ["CompiledKernel", "read"]

#: An access of global memory in PTX: "ld" or "st", of how many values, of how many bits each.
_ACCESS: Final = re.compile(r"\b(ld|st)\.global(?:\.[\w:]+)*?(?:\.v(\d))?\.[bfsu](\d+)\b")
#: A load that does not wait, of so many bytes.
_AHEAD: Final = re.compile(r"cp\.async\.c[ag]\.shared\.global [^\n;]*?, (0x[0-9a-f]+|\d+)")


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """A kernel, compiled for arguments of one kind.

    Attributes:
        name: of the function.
        registers: of a thread.
        local: bytes of local memory of a thread: spilled registers, and frames of calls.
        spills: instructions that store a register there.
        shared: bytes of shared memory of a program.
        warps: of a program.
        loads, stores: bytes of the widest access of global memory; 0 without any.
        ahead: bytes of the widest load that does not wait (``cp.async``).
        fused: multiply-adds in FP32 that are rounded once, the library's own among them.
        approximations: instructions whose results are not the correctly rounded ones, each once.
    """

    name: str
    registers: int
    local: int
    spills: int
    shared: int
    warps: int
    loads: int
    stores: int
    ahead: int
    fused: int
    approximations: str


_FIELDS: Final = {each.name for each in fields(CompiledKernel)}


def read(files: Mapping[str, str]) -> CompiledKernel:
    """From the files that Triton's cache keeps of it, by their names; what is found is kept beside them."""
    by_kind = {Path(name).suffix: Path(path) for name, path in files.items()}
    binary = by_kind[".cubin"]
    known = binary.with_suffix(".usage")
    if known.exists() and (kept := json.loads(known.read_text())).keys() == _FIELDS:
        return CompiledKernel(**kept)
    taken = cubin.usage(binary)
    metadata = json.loads(by_kind[".json"].read_text())
    ptx = by_kind[".ptx"].read_text()
    widths = {"ld": [0], "st": [0]}
    for kind, count, bits in _ACCESS.findall(ptx):
        widths[kind].append(int(count or 1) * int(bits) // 8)
    found = CompiledKernel(
        name=metadata["name"],
        registers=taken.registers,
        local=taken.local,
        spills=len(re.findall(r"\bSTL\b", cubin.disassembled(binary))) if taken.local else 0,
        shared=metadata["shared"],
        warps=metadata["num_warps"],
        loads=max(widths["ld"]),
        stores=max(widths["st"]),
        ahead=max((int(size, 0) for size in _AHEAD.findall(ptx)), default=0),
        fused=len(re.findall(r"\bfma\.rn(?:\.ftz)?\.f32\b", ptx)),
        approximations=" ".join(sorted(approximations(ptx))),
    )
    new = known.with_suffix(f".{os.getpid()}")
    new.write_text(json.dumps(asdict(found)))
    new.replace(known)  # whole at any time, for other processes
    return found
