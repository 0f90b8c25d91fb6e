"""One loop over the elements of a parameter, compiled by inductor: the update of Adam or SGD, and the shadow's.

Gradients of any float dtype are read, each tensor once, and the parameter's new value is written twice::

    load gradient, parameter, moments -> update in FP32 registers -> store parameter, moments, shadow

Hyper-parameters are a tensor that it reads, so a process wants one loop for each set of dtypes and kind of update. It
takes some seconds to compile, and is kept by inductor's cache on disk.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from fxprec.capture.locks import CAPTURING
from fxprec.kernels.launch.observers import unwatched
from fxprec.kernels.launch.operands import FLOATS
from fxprec.kernels.optim.lists import is_dense
from fxprec.kernels.torch_internals import is_traceable_wrapper_subclass
from fxprec.torch_internals import compiled_standalone, cpp_compiler

#: Elements from which a loop of its own pays; below, torch's kernels take many parameters in one call.
LEAST: Final = 1 << 16

#: Elements of the tensors that inductor sees: enough that it divides the loop among threads.
_EXAMPLE: Final = 1 << 22

#: A length that no vector divides, for which each loop runs once before it is used.
_ODD: Final = 77


@dataclass(frozen=True, slots=True)
class Loop:
    """What one compiled loop computes.

    Attributes:
        kind: Adam's update or SGD's.
        decay: how the weight decay enters.
        nesterov: of SGD.
        dtypes: of the tensors, by the names of their arguments.
    """

    kind: Literal["adam", "sgd"]
    decay: Literal["", "l2", "decoupled"]
    nesterov: bool
    dtypes: tuple[tuple[str, torch.dtype], ...]

    def __call__(self, scalars: Tensor, *tensors: Tensor) -> tuple[()]:
        """Update flat tensors of one length; ``scalars`` [5 or 8], FP32."""
        update = _adam if self.kind == "adam" else _sgd
        names = (name for name, _ in self.dtypes)
        update(self, scalars.unbind(), **dict(zip(names, tensors, strict=True)))
        return ()


def _adam(
    loop: Loop,
    scalars: Sequence[Tensor],
    params: Tensor,
    grads: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    max_exp_avg_sq: Tensor | None = None,
    shadow: Tensor | None = None,
) -> None:
    scale, decay, share, beta2, share2, correction, eps, size = scalars
    gradient = _gradient(loop, params, grads, scale, decay)
    param = params * decay if loop.decay == "decoupled" else params
    first = torch.lerp(exp_avg, gradient, share)
    second = exp_avg_sq * beta2 + gradient * share2 * gradient
    exp_avg.copy_(first)
    exp_avg_sq.copy_(second)
    if max_exp_avg_sq is not None:
        second = torch.maximum(max_exp_avg_sq, second)
        max_exp_avg_sq.copy_(second)
    _write(param - first * size / (second.sqrt() * correction + eps), params, shadow)


def _sgd(
    loop: Loop,
    scalars: Sequence[Tensor],
    params: Tensor,
    grads: Tensor,
    momentum_buffer: Tensor | None = None,
    shadow: Tensor | None = None,
) -> None:
    scale, decay, momentum, share, rate = scalars
    gradient = _gradient(loop, params, grads, scale, decay)
    if momentum_buffer is not None:
        kept = momentum_buffer * momentum + gradient * share
        momentum_buffer.copy_(kept)
        gradient = gradient + kept * momentum if loop.nesterov else kept
    _write(params - gradient * rate, params, shadow)


def _gradient(loop: Loop, params: Tensor, grads: Tensor, scale: Tensor, decay: Tensor) -> Tensor:
    gradient = grads.float() * scale
    return gradient + params * decay if loop.decay == "l2" else gradient


def _write(values: Tensor, params: Tensor, shadow: Tensor | None) -> None:
    params.copy_(values)
    if shadow is not None:
        shadow.copy_(values)


def check_compiler() -> None:
    """Before any step.

    Raises:
        RuntimeError: inductor finds no C++ compiler.
    """
    try:
        cpp_compiler()
    except Exception as error:
        raise RuntimeError(
            f"compiled=True wants a C++ compiler for parameters on a CPU ({error}): install g++ or clang++, name one "
            "by the environment variable CXX, or leave compiled out: torch's fused kernels update then"
        ) from error


@functools.cache
def compiled(loop: Loop, threads: int) -> Callable[..., Any]:
    """The loop for flat tensors of any one length on the CPU, by as many threads.

    Raises:
        RuntimeError: inductor could not compile it.
    """
    with CAPTURING, unwatched():  # those of the caller, which count operators, are not to be traced
        try:
            from torch.fx.experimental.proxy_tensor import make_fx

            count = 8 if loop.kind == "adam" else 5
            dtypes = [dtype for _, dtype in loop.dtypes]
            scalars = torch.ones(count, dtype=torch.float32, device="cpu")
            examples: list[Any] = [scalars, *(torch.empty(_EXAMPLE, dtype=dtype, device="cpu") for dtype in dtypes)]
            graph = make_fx(loop, tracing_mode="symbolic")(*examples)
            # Inductor's cache on disk may hold a loop for other threads: before torch 2.13 only this is in its key.
            options = {"config_patches": {"cpp.threads": threads, "freezing": False}}
            run = compiled_standalone(graph, examples, dynamic_shapes="from_graph", options=options)
            run(scalars, *(torch.ones(_ODD, dtype=dtype, device="cpu") for dtype in dtypes))
        except Exception as error:
            raise RuntimeError(
                f"compiled=True: inductor could not compile the update of {dict(loop.dtypes)}; leave it out, and "
                f"torch's fused kernels update: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            ) from error
    return cast(Callable[..., Any], run)


def why_no_loop(param: Tensor, gradient: Tensor) -> str | None:
    """Why torch's kernels update a parameter, local as its gradient is, though loops are asked for; None: one does."""
    if param.device.type != "cpu":
        return f"on {param.device.type}"
    if param.dtype is not torch.float32 or gradient.dtype not in FLOATS:
        return f"{param.dtype} with a gradient of {gradient.dtype}"
    if gradient.layout is not torch.strided:
        return "sparse gradient"
    if param.numel() < LEAST:
        return f"fewer than {LEAST} elements"
    if type(param) not in (Tensor, Parameter) and is_traceable_wrapper_subclass(param):
        return f"a {type(param).__name__}, which has no memory of its own"
    return None if is_dense(param) else "not dense in memory"
