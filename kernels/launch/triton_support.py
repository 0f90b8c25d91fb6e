"""Provides Triton if it is installed; without it kernel files still import, and no kernel is ever launched.

Triton reads ``TRITON_INTERPRET`` when a kernel is decorated: set it before the first import of a kernel file. Kernel
files take ``jit`` and ``tl`` from here and nothing from Triton itself.

``jit`` keeps compiled kernels by their arguments, so that ``kernel[grid](...)`` takes half the Python. Triton compiles
a kernel for facts about its arguments: dtypes, constants, whether a number is 1, divides by 16 or wants 64 bits,
whether an address divides by 16. At each launch it finds them out, writes them as text and looks for the kernel that
was compiled for them. Here a launch whose grid, dtypes, integers, constants, options and alignment of addresses were
seen before goes to the kernel that Triton took then. Integers are compared themselves, so whatever Triton makes of one
holds for it again; no kernel is compiled for the value of a float. Every other launch is Triton's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from torch import Tensor

try:
    import triton
    import triton.compiler
    import triton.language
    import triton.runtime
    from triton import knobs
except ImportError:
    triton = knobs = None

HAS_TRITON: Final = triton is not None

#: ``triton.language``; None without Triton, where no kernel body ever runs.
tl: Any = triton.language if triton is not None else None
_TRITON: Any = triton
_JITFunction: Any = triton.JITFunction if triton is not None else object

#: Annotations of kernel arguments, which Triton reads by name: compiled in, and of that type whatever its value.
if TYPE_CHECKING or triton is None:
    constexpr: TypeAlias = Any
    int64: TypeAlias = Any
else:
    constexpr, int64 = tl.constexpr, tl.int64

#: Launches that a kernel keeps, one for each number of rows; beyond that the cache is emptied.
_MOST: Final = 1024


def jit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Return ``triton.jit(**options)`` for a ``KeptKernel``; without Triton the identity, as kernels never run."""
    if triton is None:
        return lambda function: function
    return triton.jit(**options) if interpreting() else functools.partial(KeptKernel, **options)


def constant(value: int) -> Any:
    """Return a module's constant that kernels may read (Triton refuses plain globals)."""
    return triton.language.constexpr(value) if triton is not None else value


def triton_dtype(dtype: torch.dtype | None) -> Any:
    """Return Triton's dtype for float32, float16 or bfloat16; None for None: a kernel leaves that part out."""
    return None if dtype is None else getattr(tl, str(dtype).removeprefix("torch."))


@functools.cache
def interpreting() -> bool:
    """Return whether kernels run in Triton's interpreter, also on CPU tensors. Fixed once a kernel is decorated."""
    return knobs is not None and bool(knobs.runtime.interpret)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Return a context that launches on this device; empty if it is current, since entering torch's costs time."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def can_launch(device: torch.device) -> bool:
    """Return whether kernels run on tensors of this device: CUDA with Triton, or any with Triton's interpreter."""
    return HAS_TRITON and (device.type == "cuda" or interpreting())


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return how many multiprocessors a GPU has; of one that is not there, as of fake tensors, an H100's."""
    return torch.cuda.get_device_properties(device).multi_processor_count if torch.cuda.is_available() else 132


def launcher(compiled: Any, grid: tuple[int, ...]) -> Callable[..., None]:
    """Return ``compiled[grid]``, on the current stream of the current device, without Triton's work for its hooks.

    Triton gathers what a hook might ask and calls both chains of hooks at each launch, also where they are empty: of an
    H100's 7.7 us a launch 2.7. If there are hooks, as of its profiler, Triton launches.
    """
    # Triton's launcher takes three dimensions.
    x, y, z = (*grid, 1, 1)[:3]
    hooked = compiled[(x, y, z)]  # which loads the kernel on the device
    run: Any = compiled.run
    function, packed = compiled.function, compiled.packed_metadata
    active, hooks = _TRITON.runtime.driver.active, _TRITON.knobs.runtime
    device, stream = active.get_current_device, active.get_current_stream

    def launch(*args: Any) -> None:
        if _is_empty(hooks.launch_enter_hook) and _is_empty(hooks.launch_exit_hook):
            run(x, y, z, stream(device()), function, packed, None, None, None, *args)
        else:
            hooked(*args)

    return launch


def _is_empty(hook: Any) -> bool:
    return hook is None or not getattr(hook, "calls", True)


class KeptKernel(_JITFunction):
    """Triton kernel that keeps its launches; ``function`` and ``options`` are those of ``triton.jit``."""

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        super().__init__(function, **options)
        self._kept: dict[tuple[Any, ...], tuple[Any, Callable[..., None]]] = {}
        count = len(self.arg_names)
        self._computed = count - len(self.constexprs)
        self._constants_last = self.constexprs == [*range(self._computed, count)]

    def __getitem__(self, grid: Any) -> Any:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: Any, *args: Any, **kwargs: Any) -> Any:
        """Launch on the current stream of the current device; return the compiled kernel, as Triton does."""
        key = None
        if self._constants_last and type(grid) is tuple:
            # By place, as the compiled kernel takes them.
            args = (*args, *[kwargs.pop(name) for name in self.arg_names[len(args) :]])
            key = self._key(args, grid, kwargs)
        if key is not None and (kept := self._kept.get(key)) is not None:
            compiled, launch = kept
            launch(*args)
            return compiled
        compiled = self.run(*args, grid=grid, warmup=False, **kwargs)
        if key is not None and isinstance(compiled, _TRITON.compiler.CompiledKernel):
            if len(self._kept) >= _MOST:
                self._kept.clear()
            self._kept[key] = compiled, launcher(compiled, grid)
        return compiled

    def _key(self, args: tuple[Any, ...], grid: Any, options: dict[str, Any]) -> tuple[Any, ...] | None:
        """Return the facts for which Triton would reuse kernel and launch, or None if Triton must decide."""
        addresses, found = 0, [torch.cuda.current_device(), grid]
        for argument in args[: self._computed]:
            kind = type(argument)
            if kind is int:
                found.append(argument)
            elif isinstance(argument, Tensor):
                addresses |= argument.data_ptr()
                found.append(argument.dtype)
            elif kind is float or argument is None:
                found.append(kind)
            else:
                return None
        if addresses & 15:  # some address is unaligned: Triton compiles for which ones are
            found.append(tuple(each.data_ptr() % 16 == 0 for each in args if isinstance(each, Tensor)))
        return (*found, *args[self._computed :], *options.items())


class Bound:
    """Kernel with bound arguments: ``bound(*given)`` is ``kernel[grid](*given, *rest, **options)``, with few checks.

    A kernel file decides once for tensors of given shapes and strides how they are tiled and which arguments the kernel
    gets, and makes one of these. Between the kernels of a model Python is slow (see ``direct``): arguments by name, and
    looking up grids and arguments, took as long as five launches.

    It launches on the current stream of the tensors' device. ``given`` are tensors, of which all but the first may be
    None, and floats, whose values are not compiled in.

    Triton compiles for dtypes and for whether addresses divide by 16; the numbers of ``rest`` never change. The kernel
    compiled for aligned tensors is launched directly from then on; unaligned ones, each of which matters, go through
    Triton.

    Args:
        kernel: a function under ``triton_support.jit``.
        grid: of at most three dimensions.
        rest: all of its other arguments, constants included, by place.
        options: of the launch, such as ``num_warps``.
    """

    __slots__ = ("_grid", "_kernel", "_known", "_options", "_rest")

    def __init__(self, kernel: Any, grid: tuple[int, ...], *rest: Any, **options: Any) -> None:
        self._kernel, self._grid, self._rest, self._options = kernel, grid, rest, options
        self._known: dict[Any, Callable[..., None]] = {}

    def __call__(self, *given: Tensor | float | None) -> None:
        first: Any = given[0]
        index = first.get_device()
        # One OR of all addresses tells whether each divides by 16.
        kinds: list[Any] = [index]
        bits = 0
        for each in given:
            if each is None or type(each) is float:
                kinds.append(type(each))
            else:
                tensor: Any = each
                bits |= tensor.data_ptr()
                kinds.append(tensor.dtype)
        key = tuple(kinds)
        launch = None if bits & 15 else self._known.get(key)
        if launch is None or index != torch.cuda.current_device():
            # Through Triton: the first time, on another device than the current one, and for unaligned addresses.
            with on_device(first.device):
                compiled = self._kernel[self._grid](*given, *self._rest, **self._options)
            if index >= 0 and not interpreting() and not bits & 15:
                self._known[key] = launcher(compiled, self._grid)
        else:
            launch(*given, *self._rest)


@functools.cache
def why_not(kind: str) -> str:
    """Return why no kernel runs on devices of this type, or "", after trying one."""
    device = torch.device(kind)
    if triton is None:
        return "Triton is not installed"
    if not can_launch(device):
        return f"Triton does not run on '{kind}'"
    if device.type != "cuda" or not torch.cuda.is_available():
        return ""
    try:
        x = torch.zeros(1, device=device)
        _one_kernel[(1,)](x)
        return "" if x.item() == 1.0 else "a test kernel gave a wrong result"
    except Exception as error:  # no compiler, an unknown device, an old driver: any failure of Triton's counts
        return f"a test kernel failed: {type(error).__name__}: {str(error).strip().splitlines()[-1]}"


@jit()
def _one_kernel(x):
    """Write 1 to x, fp32 [1]. Grid: one program."""
    tl.store(x, 1.0)
