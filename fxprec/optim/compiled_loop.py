"""Compiles the C++ loop that updates an optimizer's parameters by Adam or SGD and writes their shadows.

``kernels/cpu/update.cpp``: gradients of any float dtype are read, each tensor once, and the new values are written
twice::

    load gradient, parameter, moments -> update in FP32 registers -> store parameter, moments, shadow

The loop reads hyper-parameters as numbers, so a process needs one library for each set of dtypes and kind of update. It
is compiled in a third of a second when a step first needs it, and stays on disk.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, repeat
from typing import Final, Literal

import torch
from torch import Tensor

from fxprec.kernels.cpu import cpp
from fxprec.kernels.launch.operands import FLOATS
from fxprec.kernels.optim.lists import is_dense
from fxprec.kernels.torch_internals import FakeTensor, is_traceable_wrapper_subclass

#: Elements that a thread takes at a time.
_CHUNK: Final = 1 << 14
_TYPES: Final = {torch.float32: "float", torch.bfloat16: "BFloat16", torch.float16: "_Float16"}
#: Names of the tensors, in the order of the source's struct.
_NAMES: Final = ("params", "grads", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "shadow", "scalars")


@dataclass(frozen=True, slots=True)
class Loop:
    """Kind and dtypes of a compiled update.

    Attributes:
        kind: Adam's update or SGD's.
        l2: the weight decay is added to the gradient; else a parameter is multiplied (which SGD never does).
        nesterov: Nesterov momentum of SGD.
        gradient, shadow: their dtypes; None: no shadow.
        amsgrad, momentum: Adam has the state ``max_exp_avg_sq``, SGD has a momentum buffer.
    """

    kind: Literal["adam", "sgd"]
    l2: bool
    nesterov: bool
    gradient: torch.dtype
    shadow: torch.dtype | None
    amsgrad: bool = False
    momentum: bool = False

    @property
    def macros(self) -> tuple[str, ...]:
        """Macro definitions of the C++ source."""
        flags = {
            "ADAM": self.kind == "adam", "L2": self.l2, "AMSGRAD": self.amsgrad, "MOMENTUM": self.momentum,
            "NESTEROV": self.nesterov,
        }  # fmt: skip
        types = f"GRADIENT={_TYPES[self.gradient]}", f"SHADOW={_TYPES[self.shadow or torch.float32]}"
        return *(f"{name}={flag:d}" for name, flag in flags.items()), *types, f"CHUNK={_CHUNK}"


#: The tensors of all parameters, by the names of ``_NAMES``: those of one parameter have one size and memory order.
#: "scalars" are FP32, Adam's (scale, decay, 1 - beta1, beta2, 1 - beta2, correction, eps, size) or SGD's
#: (scale, decay, momentum, share, rate).
Lists = Mapping[str, Sequence[Tensor]]


def check_compiler() -> None:
    """Raise before any step if loops cannot be compiled.

    Raises:
        RuntimeError: there is no C++ compiler.
    """
    if why := cpp.why_no_compiler():
        raise RuntimeError(
            f"compiled=True wants a C++ compiler for parameters on a CPU ({why}): install g++ or clang++, name one "
            "by the environment variable CXX, or leave compiled out: torch's fused kernels update then"
        )


@functools.cache
def compiled(loop: Loop) -> Callable[[Lists], None]:
    """Return the compiled loop as a function of the lists of any parameters, run with torch's number of threads.

    Raises:
        RuntimeError: it could not be compiled.
    """
    try:
        function = cpp.compiled("cpu/update.cpp", *loop.macros).fxprec_update
    except (cpp.CompilerError, OSError) as error:
        raise RuntimeError(
            f"compiled=True: the update of {loop} could not be compiled; leave it out, and torch's fused kernels "
            f"update: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        ) from error
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int), None
    return functools.partial(_run, function)


def _run(function: Callable[..., None], lists: Lists) -> None:
    sizes = [*map(Tensor.numel, lists["params"])]
    before = accumulate((-(-size // _CHUNK) for size in sizes), initial=0)
    addresses = [map(Tensor.data_ptr, lists[name]) if name in lists else repeat(0) for name in _NAMES]
    # ``before`` has one number more: ``sizes`` ends the zip.
    numbers = [*chain.from_iterable(zip(*addresses, sizes, before, strict=False))]
    function((ctypes.c_int64 * len(numbers))(*numbers), len(sizes), torch.get_num_threads())


def why_no_loop(param: Tensor, gradient: Tensor) -> str | None:
    """Return why no compiled loop can update a local parameter with this gradient, or None."""
    if param.device.type != "cpu":
        return f"on {param.device.type}"
    if param.dtype is not torch.float32 or gradient.dtype not in FLOATS:
        return f"{param.dtype} with a gradient of {gradient.dtype}"
    if gradient.layout is not torch.strided:
        return "sparse gradient"
    if isinstance(param, FakeTensor) or is_traceable_wrapper_subclass(param):
        return f"a {type(param).__name__}, which has no memory of its own"
    return None if is_dense(param) else "not dense in memory"
