"""What tests of Triton kernels share: where kernels run, what they compile to without a GPU, and how far bits differ.

Kernel tests take ``device`` from ``DEVICES``: Triton's interpreter, or a CUDA device where there is one. Triton decides
at import whether it interprets, so those for the interpreter run in another process, which one test of the file starts
with ``run_in_the_interpreter``. ``TRITON_INTERPRET=1 pytest tests/kernels/optim/test_adam.py`` runs them directly.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import types
from dataclasses import dataclass
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from approximations import check_approximations
from cubin import usage_of

HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETING = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"
CUDA = torch.cuda.is_available() and not INTERPRETING

_INTERPRETER = pytest.param("cpu", id="interpreter")
_GPU = pytest.param("cuda", id="gpu", marks=[pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="no CUDA device")])
DEVICES = [_INTERPRETER] if INTERPRETING else [_GPU]
compiles = pytest.mark.skipif(not HAS_TRITON or INTERPRETING, reason="wants Triton's compiler")
#: Compute capabilities that kernels are compiled for.
ARCHITECTURES = [80, 90, 100]
_ROOT: Final = pathlib.Path(__file__).parents[2]


def run_in_the_interpreter(path: str) -> None:
    """Run the interpreter's tests of a file in their own process: all must pass, and there must be some."""
    if not HAS_TRITON or INTERPRETING or importlib.util.find_spec("numpy") is None:
        pytest.skip("wants Triton and numpy, and to be outside of the interpreter")
    skip_where_loops_cannot_be_interpreted()
    status, output = _server().run(path)
    assert status == 0 and re.search(r"\d+ passed, \d+ deselected", output), output


def skip_where_loops_cannot_be_interpreted() -> None:
    """By Triton before 3.7, which takes int() of arrays with a dimension: numpy 2.4 refuses that."""
    numpy = pytest.importorskip("numpy")
    if triton_release() < (3, 7) and _release(numpy.__version__) >= (2, 4):
        pytest.skip("Triton before 3.7 cannot interpret loops with numpy 2.4")


class _Server:
    """A process that runs files in Triton's interpreter (``interpreter_server``): one for all files of this process."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(pathlib.Path(__file__).with_name("interpreter_server.py"))],
            env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(_ROOT)},
            cwd=_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, path: str) -> tuple[int, str]:
        """The exit status of the tests of a file, and what they printed."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{path}\n")
        self._process.stdin.flush()
        status, name = json.loads(self._process.stdout.readline())
        output = pathlib.Path(name)
        try:
            return status, output.read_text(encoding="utf-8")
        finally:
            output.unlink()


@functools.cache
def _server() -> _Server:
    return _Server()


def _quicken_the_interpreter() -> None:
    """Spare the interpreter what it does at every call and op: most of its time.

    It puts its own functions into triton.language and takes them out again, makes a table of dtypes to look into,
    checks and wraps each size of each tensor, and computes all integers a second time in 64 bits, to say where 32 were
    too few. Here its functions stay, and tests on more than 2**31 elements see that by what is read instead.
    """
    from triton.runtime import interpreter

    patch, patched, nothing = interpreter._patch_lang, set(), types.SimpleNamespace(restore=lambda: None)

    def patch_once(fn: Any) -> Any:
        if id(fn.__globals__) not in patched:
            patched.add(id(fn.__globals__))
            patch(fn)
        return nothing

    interpreter._patch_lang = patch_once
    of_scalar = functools.cache(interpreter._get_np_dtype)
    of_pointer = interpreter._get_np_dtype(interpreter.tl.pointer_type(interpreter.tl.float32))
    interpreter._get_np_dtype = lambda kind: of_pointer if kind.scalar.is_ptr() else of_scalar(kind.scalar)
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)

    tl, semantic = interpreter.tl.core, type(interpreter.interpreter_semantic)
    make_type, broadcast = tl.block_type.__init__, semantic.broadcast_impl_value
    of_scalars = tl.tuple([]), tl.constexpr(1)

    @functools.cache
    def of_sizes(sizes: tuple[int, ...]) -> tuple[Any, ...]:
        """What a type of these sizes has, how its name begins, and what a tensor of it has."""
        block = tl.block_type.__new__(tl.block_type)
        make_type(block, tl.float32, list(sizes))
        of_tensor = tl.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(block.numel)
        return block.shape, block.numel, f"<{block.shape}, ", of_tensor

    def make_type_by_table(self: Any, element_ty: Any, shape: Any) -> None:
        self.element_ty = element_ty
        self.shape, self.numel, name, _ = of_sizes(tuple([getattr(size, "value", size) for size in shape]))
        self.name = f"{name}{element_ty}>"

    def make_tensor_by_table(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = of_sizes(tuple(type.shape.values))[3] if type.is_block() else of_scalars

    def broadcast_where_sizes_differ(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    tl.block_type.__init__ = make_type_by_table
    tl.tensor.__init__ = make_tensor_by_table
    semantic.broadcast_impl_value = broadcast_where_sizes_differ


def triton_release() -> tuple[int, ...]:
    """Of the Triton that is installed: ``(3, 7)``."""
    import triton

    return _release(triton.__version__)


def _release(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


@pytest.fixture
def fused_multiply_add(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter round a multiply-add once, as every GPU does (it rounds twice)."""
    if INTERPRETING:
        from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

        def fma(self: Any, x: Any, y: Any, z: Any) -> Any:
            wide = x.data.astype("float64") * y.data.astype("float64") + z.data.astype("float64")
            return TensorHandle(wide.astype(z.data.dtype), z.dtype.scalar)

        monkeypatch.setattr(InterpreterBuilder, "create_fma", fma)


def ulps(a: Tensor, b: Tensor) -> int:
    """The largest distance of two float32 tensors, counted in float32 values between them. NaN equals NaN."""

    def place(x: Tensor) -> Tensor:
        bits = x.contiguous().view(torch.int32).long()
        bits = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
        return torch.where(x.isnan(), torch.full_like(bits, 1 << 40), bits)

    assert a.dtype == b.dtype == torch.float32 and a.shape == b.shape
    return int((place(a) - place(b)).abs().max()) if a.numel() else 0


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equality to the bit, also of NaN and of the sign of zero."""
    kind = {4: torch.int32, 2: torch.int16}[a.itemsize]
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


@dataclass(frozen=True)
class Compiled:
    """A kernel as it came out of the compiler."""

    ttir: str
    ptx: str
    registers: int
    spills: int  # bytes of local memory a thread
    shared: int = 0  # bytes of shared memory a program

    def accesses(self, kind: str) -> set[str]:
        """The global accesses in the PTX: "ld" or "st" -> such as {"v4.b32"}."""
        return {width.lstrip(".") for width in re.findall(rf"\b{kind}\.global((?:\.v\d)?\.b\d+)", self.ptx)}

    def moved_in_the_loop(self) -> tuple[int, int]:
        """Bytes that one pass of the main loop loads and stores for each element of a block."""
        return tuple(sum(map(_itemsize, re.findall(pattern, self._loop()))) for pattern in (_LOAD, _STORE))  # type: ignore[return-value]

    def _loop(self) -> str:
        (start,) = [match.start() for match in re.finditer(r"scf\.for", self.ttir)]
        start = self.ttir.index("{", start)
        depth, end = 1, start + 1
        while depth:
            depth += {"{": 1, "}": -1}.get(self.ttir[end], 0)
            end += 1
        return self.ttir[start:end]


_LOAD = r"tt\.load [^:]*: tensor<\d+x!tt\.ptr<(\w+)>>"
_STORE = r"tt\.store [^:]*: tensor<\d+x!tt\.ptr<(\w+)>>"


def _itemsize(name: str) -> int:
    return int(re.sub(r"\D", "", name)) // 8


def compiled(
    kernel: Any, architecture: int, warps: int, pointers: dict[str, str], constants: dict[str, Any]
) -> Compiled:
    """Compile a kernel without a GPU; arguments that are neither pointers nor constants are FP32 scalars.

    ``architecture`` is 10 times the compute capability. Constants of None leave an optional argument out.
    """
    types = {name: "constexpr" if name in constants else pointers.get(name, "fp32") for name in kernel.arg_names}
    return _compiled(kernel, architecture, {"num_warps": warps, "enable_fp_fusion": False}, types, constants, {})


def _compiled(
    kernel: Any, architecture: int, options: dict[str, Any], types: dict[str, str], constants: Any, attributes: Any
) -> Compiled:
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    given = {"attrs": attributes} if attributes else {}
    source = ASTSource(kernel, types, constexprs=constants, **given)
    built = compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    taken = usage_of(built.asm["cubin"])
    check_approximations(built.asm["ptx"])
    return Compiled(built.asm["ttir"], built.asm["ptx"], taken.registers, taken.local, taken.shared)


_POINTERS = {
    torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16",
    torch.int64: "*i64", torch.int32: "*i32", torch.uint8: "*u8", torch.bool: "*i1",
}  # fmt: skip


def compiled_launch(launch: Any, dtypes: list[torch.dtype], architecture: int) -> Compiled:
    """Compile the kernel of a row program's launch as its first call would: aligned tensors, its own numbers."""
    from fxprec.kernels.rows.run.kernel import built

    kernel = built(launch.name, launch.source)
    types: dict[str, str] = {}
    constants: dict[Any, Any] = {}
    attributes: dict[Any, Any] = {}
    numbers = iter(launch.numbers)
    for position, name in enumerate(kernel.arg_names):
        if position < len(dtypes) or name in ("seeds", "partials"):
            fixed = {"seeds": "*i64", "partials": "*fp32"}.get(name)
            types[name] = fixed if fixed and position >= len(dtypes) else _POINTERS[dtypes[position]]
            attributes[(position,)] = [["tt.divisibility", 16]]
        elif name == "seed":
            types[name] = "i32"
        else:
            number = next(numbers)
            types[name] = "constexpr" if number == 1 else "i32" if number < 2**31 else "i64"
            if number == 1:
                constants[(position,)] = 1
            elif number % 16 == 0:
                attributes[(position,)] = [["tt.divisibility", 16]]
    assert next(numbers, None) is None
    options = {"num_warps": launch.tiling.warps, "enable_fp_fusion": launch.contracts}
    return _compiled(kernel, architecture, options, types, constants, attributes)


if INTERPRETING:
    _quicken_the_interpreter()


def backwards_of(y: Tensor) -> set[str]:
    """Names of the backward functions behind a tensor."""
    names, todo = set[str](), [y.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None:
            names.add(node.name())
            todo += [each for each, _ in node.next_functions]
    return names
