"""Keeps compiled Triton kernels by their arguments, so that ``kernel[grid](...)`` takes half the Python.

Triton compiles a kernel for facts about its arguments: dtypes, constants, whether a number is 1, divides by 16 or wants
64 bits, whether an address divides by 16. At each launch it finds them out, writes them as text and looks for the
kernel that was compiled for them. Here a launch whose grid, dtypes, integers, constants, options and alignment of
addresses were seen before goes to the kernel that Triton took then. Integers are compared themselves, so whatever
Triton makes of one holds for it again; no kernel is compiled for the value of a float. Every other launch is Triton's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from triton import JITFunction, knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver

#: Launches that a kernel keeps, one for each number of rows; beyond that the cache is emptied.
_MOST: Final = 1024


def launcher(compiled: CompiledKernel, grid: tuple[int, ...]) -> Callable[..., None]:
    """Return ``compiled[grid]``, on the current stream of the current device, without Triton's work for its hooks.

    Triton gathers what a hook might ask and calls both chains of hooks at each launch, also where they are empty: of an
    H100's 7.7 us a launch 2.7. If there are hooks, as of its profiler, Triton launches.
    """
    # Triton's launcher takes three dimensions.
    x, y, z = (*grid, 1, 1)[:3]
    hooked = compiled[(x, y, z)]  # which loads the kernel on the device
    run: Any = compiled.run
    function, packed = compiled.function, compiled.packed_metadata
    active: Any = driver.active
    device, stream, hooks = active.get_current_device, active.get_current_stream, knobs.runtime

    def launch(*args: Any) -> None:
        if _is_empty(hooks.launch_enter_hook) and _is_empty(hooks.launch_exit_hook):
            run(x, y, z, stream(device()), function, packed, None, None, None, *args)
        else:
            hooked(*args)

    return launch


def _is_empty(hook: Any) -> bool:
    return hook is None or not getattr(hook, "calls", True)


class KeptKernel(JITFunction):
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
        if key is not None and isinstance(compiled, CompiledKernel):
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
