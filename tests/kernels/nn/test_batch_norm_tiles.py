"""Tiles cover a tensor once, there are few parts, and what the compiler makes of the kernels that walk over them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import kernel_tools
from approximations import check_approximations
from benchmarks.workloads import kernel_bytes
from cubin import usage_of
from fxprec.kernels.nn.batch_norm import apply_kernel
from fxprec.kernels.nn.batch_norm_backward import _BLOCK_PARTS, inputs_kernel, sums_kernel
from fxprec.kernels.nn.batch_norm_statistics import finish_kernel, statistics_kernel
from fxprec.kernels.nn.batch_norm_tiles import (
    BACKWARD_BYTES,
    FORWARD_BYTES,
    WARPS,
    Tiles,
    cut,
    cut_arguments,
    dense,
    like,
)

PROGRAMS = 264  # two on each of 132 multiprocessors


def places(cut: Tiles) -> list[tuple[int, int, int, int]]:
    """(first row, rows, first column, columns) of every program, as ``program_place`` has them; channels in order."""
    found = []
    for block in range(cut.grid[0]):
        for part in range(cut.grid[1]):
            column_parts = -(-cut.columns // cut.columns_each) if cut.planar else 1
            row = part // column_parts * cut.rows_each
            column = part % column_parts * cut.columns_each if cut.planar else block * cut.block_columns
            found.append((row, min(cut.rows_each, cut.rows - row), column, min(cut.columns_each, cut.columns - column)))
    return found


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    st.tuples(st.integers(1, 70), st.integers(1, 5000), st.integers(1, 3000)),
    st.booleans(),
    st.sampled_from([1, 8, 264]),
    st.sampled_from([2048, 4096, 8192]),
)
@example((256, 64, 56 * 56), False, 264, 8192)
@example((2, 3, 2**31), True, 264, 4096)
@example((4, 1, 2**30), True, 264, 4096)
@example((2**20, 1, 1), True, 264, 4096)
def test_every_element_is_of_one_program(shape: tuple[int, ...], contiguous: bool, programs: int, tile: int) -> None:
    """And parts are few, whole blocks, and no larger than others by more than a block."""
    c = cut(shape, contiguous, programs, tile)
    found = places(c)
    assert all(rows > 0 and columns > 0 for _, rows, _, columns in found)
    channels = c.channels if c.planar else 1
    assert sum(rows * columns for _, rows, _, columns in found) == c.rows * c.columns * channels
    own = found[: c.parts] if c.planar else found
    assert len({(row, column) for row, _, column, _ in own}) == len(own)
    assert c.values * c.channels == shape[0] * shape[1] * shape[2]
    assert c.parts <= 256 and (c.parts == 1 or c.grid[0] * c.parts <= programs)
    assert c.rows_each % c.block_rows == 0 and c.columns_each % c.block_columns == 0
    assert c.block_rows & (c.block_rows - 1) == 0 and c.block_columns & (c.block_columns - 1) == 0
    assert 1 <= c.block_rows * c.block_columns <= tile


@pytest.mark.parametrize("shape", [(256, 64, 3136), (256, 256, 784), (256, 2048, 49), (64, 64, 12544), (256, 512, 49)])
@pytest.mark.parametrize("contiguous", [True, False])
def test_training_sizes_fill_the_device_with_few_partials(shape: tuple[int, ...], contiguous: bool) -> None:
    c = cut(shape, contiguous, PROGRAMS, 4096)
    assert c.grid[0] * c.parts >= 0.75 * PROGRAMS
    assert c.parts <= 132
    assert min(rows for _, rows, _, _ in places(c)) > 0.25 * c.rows_each
    if not contiguous:  # what every program of the second kernel reads of the first's: 32 KiB at most
        assert 2 * 4 * c.parts * c.block_columns <= 34 * 1024


def test_dense_tensors_are_themselves_and_others_are_copied_as_they_lie() -> None:
    x = torch.randn(4, 6, 5, 3)
    for kept in (x, x.to(memory_format=torch.channels_last), x[0], x[:, :, 0].transpose(1, 2).contiguous().mT):
        assert dense(kept) is kept
    last = x.to(memory_format=torch.channels_last)
    for strided, channels_last in [
        (x[:, ::2], False),
        (last[:, ::2], False),
        (last[:, :4], True),
        (last[:, :, 1:], True),
    ]:
        copy = dense(strided)
        assert copy is not strided and torch.equal(copy, strided)
        assert copy.is_contiguous(memory_format=torch.channels_last) == channels_last
        assert copy.is_contiguous() != channels_last
    assert like(last, last) is last and like(x, last).stride() == last.stride() and torch.equal(like(x, last), x)


def test_the_widest_operand_limits_a_tile() -> None:
    x = torch.zeros(8, 64, 32, 32, dtype=torch.float16)
    wide = torch.zeros(1)
    sizes = [cut(*cut_arguments(x, 16384, *others)) for others in ((), (None,), (wide,))]
    assert [c.block_rows * c.block_columns for c in sizes] == [8192, 8192, 4096]


# What the compiler makes of the kernels

INTS = {"rows", "columns", "channels", "pitch", "rows_each", "columns_each", "parts"}
TENSORS = {"x", "y", "dy", "dx", "residual", "dresidual"}
#: kernel, bytes of a tile, operands left out and flags: the forms that a training step launches, and the others.
FORMS: dict[str, tuple[Any, int, dict[str, Any]]] = {
    "statistics": (statistics_kernel, FORWARD_BYTES, {}),
    "apply": (apply_kernel, FORWARD_BYTES, {"residual": None, "RELU": True, "TRAINING": True}),
    "apply with residual": (apply_kernel, FORWARD_BYTES, {"RELU": True, "TRAINING": True}),
    "apply running": (apply_kernel, FORWARD_BYTES, {"RELU": True, "TRAINING": False}),
    "sums": (sums_kernel, BACKWARD_BYTES, {"y": None, "dresidual": None, "RELU": True, "TRAINING": True}),
    "sums with residual": (sums_kernel, BACKWARD_BYTES, {"RELU": True, "TRAINING": True}),
    "inputs": (inputs_kernel, BACKWARD_BYTES, {"y": None, "dresidual": None, "RELU": True, "TRAINING": True}),
    "inputs with residual": (
        inputs_kernel,
        BACKWARD_BYTES,
        {"y": None, "dresidual": None, "RELU": False, "TRAINING": True},
    ),
    "inputs running": (
        inputs_kernel,
        BACKWARD_BYTES,
        {"partials": None, "dweight": None, "dbias": None, "RELU": True, "TRAINING": False},
    ),
}
SHAPES = {"last": ((256, 256, 3136), False), "planes": ((256, 64, 3136), True)}


class Built:
    """A kernel compiled as the launcher would have it for operands at 16-byte addresses."""

    def __init__(
        self,
        kernel: Any,
        architecture: int,
        warps: int,
        dtype: torch.dtype,
        constants: dict[str, Any],
        aligned: bool = True,
    ) -> None:
        from triton import compile
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        low = {torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32"}[dtype]
        scalars = {"eps", "share", "momentum"}
        types = {
            name: "constexpr" if name in constants else "i32" if name in INTS else "fp32" if name in scalars
            else low if name in TENSORS else "*fp32"
            for name in kernel.arg_names
        }  # fmt: skip
        divisible = [
            n for n, kind in types.items() if kind[0] == "*" or (aligned and n in ("columns", "pitch", "channels"))
        ]
        divisible += ["columns_each"] if "columns_each" in types else []
        attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in divisible}
        source = ASTSource(kernel, types, constexprs=constants, attrs=attributes)
        options = {"num_warps": warps, "enable_fp_fusion": False}
        built = compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
        self.ttir, self.ptx, self.shared = built.asm["ttir"], built.asm["ptx"], built.metadata.shared
        check_approximations(self.ptx)
        taken = usage_of(built.asm["cubin"])
        self.registers, self.spills = taken.registers, taken.local

    def moved(self, c: Tiles) -> int:
        """Bytes that the kernel loads and stores for each element of a tile."""
        pattern = rf"tt\.(?:load|store) [^:]*: tensor<{c.block_rows}x{c.block_columns}x!tt\.ptr<[a-z]+(\d+)>>"
        return sum(int(bits) // 8 for bits in re.findall(pattern, self.ttir))


def built(
    form: str, shape: str, dtype: torch.dtype, architecture: int = 90, aligned: bool = True, parts: int = _BLOCK_PARTS
) -> tuple[Built, Tiles]:
    kernel, size, constants = FORMS[form]
    c = cut(*SHAPES[shape], PROGRAMS, size // dtype.itemsize)
    blocks = {"PLANAR": c.planar, "VECTOR": c.vector, "BLOCK_ROWS": c.block_rows, "BLOCK_COLUMNS": c.block_columns}
    blocks |= {"BLOCK_PARTS": parts} if kernel is inputs_kernel else {}
    return Built(kernel, architecture, WARPS, dtype, {**blocks, **constants}, aligned), c


@kernel_tools.compiles
@pytest.mark.parametrize(
    ("shape", "dtype", "architecture"),
    [
        *((shape, dtype, 90) for shape in SHAPES for dtype in (torch.float16, torch.float32)),
        ("last", torch.bfloat16, 80),
        ("last", torch.bfloat16, 100),
    ],
)
@pytest.mark.parametrize("form", FORMS)
def test_kernels_move_16_bytes_at_a_time_and_spill_nothing(
    form: str, shape: str, dtype: torch.dtype, architecture: int
) -> None:
    kernel, c = built(form, shape, dtype, architecture)
    print(form, shape, dtype, architecture, kernel.registers, "registers", kernel.shared, "bytes shared")
    # Contiguous memory: ptxas may give up two words a thread to stay at 64 registers, where two programs fit.
    assert kernel.spills <= (8 if shape == "planes" and kernel.registers == 64 else 0) and kernel.registers <= 128
    assert kernel.shared <= 99 * 1024, "the smallest shared memory of a device that runs sm_80's code"
    assert not re.search(r"\b(atom|red)\.(global|shared)", kernel.ptx), "an order of its own every time"
    threads, vector = 32 * WARPS, 16 // dtype.itemsize
    vectors = c.block_rows * c.block_columns // threads // vector
    assert vectors >= 1
    stores = re.findall(r"st\.global\.v4\.b32", kernel.ptx)
    assert len(stores) == vectors * len(written(form))
    # Tiles are on their way while others are computed, 16 bytes a thread.
    copies = re.findall(r"cp\.async\.c[ga]\.shared\.global [^;]*?, (0x[0-9a-f]+|\d+)", kernel.ptx)
    assert len(copies) >= vectors and {int(size, 0) for size in copies} == {16}


def written(form: str) -> set[str]:
    """Tensors that a form writes tile by tile."""
    kernel, _, constants = FORMS[form]
    every = {
        statistics_kernel: set(),
        apply_kernel: {"y"},
        sums_kernel: {"dresidual"},
        inputs_kernel: {"dx", "dresidual"},
    }
    return {name for name in every[kernel] if name not in constants}


@kernel_tools.compiles
def test_rows_that_start_anywhere_claim_no_alignment() -> None:
    for form in ("statistics", "apply", "sums", "inputs"):
        for shape in SHAPES:
            kernel, c = built(form, shape, torch.float16, aligned=False)
            pattern = rf"tt\.load [^:]*: tensor<{c.block_rows}x{c.block_columns}x!tt\.ptr<f16>>"
            assert re.search(pattern, kernel.ttir)
            assert not re.search(
                r"st\.global\.v\d\.b32|cp\.async\.c[ga]\.shared\.global [^;]*?, (0x10|16)\b", kernel.ptx
            )


@kernel_tools.compiles
@pytest.mark.parametrize("form", ["statistics", "apply", "sums", "inputs"])
@pytest.mark.parametrize(
    ("shape", "contiguous", "size"),
    [((32, 64, 14 * 14), True, 8), ((32, 24, 196), False, 16), ((32, 20, 49), False, 8), ((32, 6, 49), False, 4)],
)
def test_rows_of_a_few_elements_more_are_read_by_what_divides_them(
    form: str, shape: tuple[int, ...], contiguous: bool, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton promises multiples of 16 alone: 14 x 14 pixels were read two bytes at a time, and none ahead."""
    monkeypatch.setitem(SHAPES, "few", (shape, contiguous))
    made, _ = built(form, "few", torch.bfloat16, aligned=False)
    copies = re.findall(r"cp\.async\.c[ga]\.shared\.global [^;]*?, (0x[0-9a-f]+|\d+)", made.ptx)
    # Triton 3.6 of torch 2.10 has the assembler of CUDA 12.8, which keeps two numbers of the first form in memory.
    kept = 8 if kernel_tools.triton_release() < (3, 7) and form == "apply" else 0
    assert {int(copied, 0) for copied in copies} == {size} and made.spills <= kept and made.registers <= 128
    stored = re.findall(r"st\.global\.(?:v(\d)\.)?b(\d+)", made.ptx)
    assert not written(form) or size in {int(words or 1) * int(bits) // 8 for words, bits in stored}


@kernel_tools.compiles
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_bytes_moved_are_those_of_the_kernels(shape: str, residual: bool, dtype: torch.dtype) -> None:
    suffix = " with residual" if residual else ""
    # Partials in blocks of a size of their own, or they would be taken for tiles.
    forward = [built(form, shape, dtype, parts=256) for form in ("statistics", f"apply{suffix}")]
    backward = [built(form, shape, dtype, parts=256) for form in (f"sums{suffix}", f"inputs{suffix}")]
    found = tuple(sum(kernel.moved(c) for kernel, c in kernels) for kernels in (forward, backward))
    assert found == kernel_bytes.batch_norm(dtype, training=True, residual=residual, relu=True)


@kernel_tools.compiles
@pytest.mark.parametrize("form", FORMS)
def test_rows_are_addressed_with_64_bits(form: str) -> None:
    for shape in SHAPES:
        kernel, c = built(form, shape, torch.float16, parts=256)
        rows = rf"tensor<{c.block_rows}x1xi(\d+)>"
        assert set(re.findall(rf"arith\.muli [^:]*: {rows}", kernel.ttir)) == {"64"}


@kernel_tools.compiles
@pytest.mark.parametrize("architecture", kernel_tools.ARCHITECTURES)
def test_the_second_kernel_of_the_statistics_holds_all_parts_in_registers(architecture: int) -> None:
    constants = {"BLOCK_PARTS": 256, "BLOCK_CHANNELS": 16}
    kernel = Built(finish_kernel, architecture, 8, torch.float32, constants)
    assert kernel.spills == 0 and kernel.registers <= 255
    assert not re.search(r"\b(atom|red)\.(global|shared)", kernel.ptx)
