"""What the tests of the norms share: gradients of several results, nearness, kernels compiled for aligned operands."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import kernel_tools
from approximations import check_approximations
from cubin import usage_of

#: Within one rounding of a dtype and the order of FP32 sums.
TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
_TYPES = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}


def gradients(results: Any, wanted: list[Tensor], cotangents: list[Tensor], **options: Any) -> list[Tensor]:
    """Of one result or of a tuple of them; cotangents may be more than there are."""
    results = list(results) if isinstance(results, tuple) else [results]
    options.setdefault("retain_graph", True)
    return list(torch.autograd.grad(results, wanted, cotangents[: len(results)], **options))


def error(found: Tensor, truth: Tensor) -> float:
    return (found.double().cpu() - truth.double().cpu()).abs().max().item() if found.numel() else 0.0


def near(found: Any, expected: Any, low: torch.dtype = torch.float32) -> None:
    """Assert equal dtypes and shapes, and values as near as ``TOLERANCES`` says of ``low``."""
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        scale = max(1.0, b.double().abs().max().item()) if b.numel() else 1.0
        assert error(a, b) <= TOLERANCES[low] * scale


@dataclass(frozen=True)
class Compiled:
    """A kernel as it came out of the compiler."""

    ttir: str
    ptx: str
    registers: int
    spills: int  # bytes of local memory a thread, beyond what the compiler's version may take
    shared: int  # bytes of shared memory a program

    def moved(self, rows: int, block: int) -> tuple[int, int]:
        """Bytes that accesses of whole tiles [rows, block] load and store for each element."""
        tile = rf"tensor<{rows}x{block}x!tt\.ptr<\w+?(\d+)>>"
        found = (re.findall(rf"tt\.{kind} [^\n]*{tile}", self.ttir) for kind in ("load", "store"))
        return tuple(sum(int(bits) // 8 for bits in each) for each in found)  # type: ignore[return-value]

    def narrow(self) -> list[str]:
        """Accesses to global memory in less than 16 bytes a thread."""
        found = re.findall(r"\b(?:ld|st)\.global[.\w:]*|cp\.async\.c[ag][^;]*", self.ptx)
        return [a for a in found if not re.search(r"v4\.b32|, 0x10|, 16", a)]


def compiled(
    kernel: Any,
    architecture: int,
    warps: int,
    types: dict[str, str | torch.dtype],
    constants: dict[str, Any],
    dynamic: tuple[str, ...] = (),
) -> Compiled:
    """Compile a kernel without a GPU; arguments of no type are FP32 scalars.

    :param architecture: 10 times the compute capability.
    :param types: a dtype is a pointer to it. Pointers and int32 are multiples of 16, as at most sizes in use.
    :param dynamic: of these nothing is known.
    """
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = {k: _TYPES[v] if isinstance(v, torch.dtype) else v for k, v in types.items() if k not in constants}
    signature = {n: "constexpr" if n in constants else names.get(n, "fp32") for n in kernel.arg_names}
    known = [i for i, n in enumerate(kernel.arg_names) if n in names and n not in dynamic]
    constants = {n: v for n, v in constants.items() if n in kernel.arg_names}
    attributes = {(i,): [["tt.divisibility", 16]] for i in known}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    built = compile(source, target=GPUTarget("cuda", architecture, 32), options={"num_warps": warps})
    taken = usage_of(built.asm["cubin"])
    # Before 3.7 a few kernels at the limit of registers put up to four values aside.
    old = kernel_tools.triton_release() < (3, 7)
    spills = max(0, taken.local - 16 * old)
    check_approximations(built.asm["ptx"])
    return Compiled(built.asm["ttir"], built.asm["ptx"], taken.registers, spills, built.metadata.shared)
