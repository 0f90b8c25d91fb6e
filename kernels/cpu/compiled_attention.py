"""Computes attention on a CPU as one compiled loop, forward and backward: ``attention.cpp``.

It computes what ``attention_products`` computes by torch's ops: a softmax in FP32 between products with FP32 results.
Scores never leave the cache: the forward saves nothing, and the backward computes the probabilities anew. Errors
against float64 are those of torch's kernel in the output, and a half to nine tenths of them in the gradients.

The first call compiles (``cpp``): two seconds, once a machine.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

import torch
from torch import Tensor

from fxprec.kernels.cpu.attention import (
    additive,
    elements_side_by_side,
    empty_like,
    gradients_like,
    op_of,
    plain_gradients,
    reference,
    scale_of,
    scores,
)
from fxprec.kernels.cpu.cpp import compiled, pointer, why_no_compiler
from fxprec.kernels.launch.direct import Run

_SOURCE: Final = "cpu/attention.cpp"


def why_not() -> str:
    """Return why the loop cannot run here, or "". It takes an x86 CPU with AVX-512, oneDNN, and a compiler."""
    mkldnn: Any = torch.backends.mkldnn
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not (mkldnn.is_available() and mkldnn.enabled):
        return "C++ kernels want AVX-512 and oneDNN, and torch has none of one of them here"
    return why_no_compiler()


def _forward(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    if query.dtype is not torch.bfloat16:  # FP64, for comparison
        return reference(query, key, value, mask, causal, scale)
    query, key, value = map(elements_side_by_side, (query, key, value))
    out = empty_like(query)
    _call("forward", (query, key, value, mask, out), query, key, (query, key, value, out), mask, causal, scale)
    return out


def _backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value."""
    if query.dtype is not torch.bfloat16:
        p = torch.softmax(scores(query, key, mask, causal, scale), -1)
        return plain_gradients(grad, query, key, value, p, scale)
    grad, query, key, value = map(elements_side_by_side, (grad, query, key, value))
    made = gradients_like(grad, query, key, value)
    tensors = (grad, query, key, value, mask, *made)
    _call("backward", tensors, query, key, (grad, query, key, value), mask, causal, scale)
    return made


def run_for(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None) -> Run | None:
    """Return the forward alone as a function of query, key and value with the shapes and strides of these.

    It runs torch's number of threads. None if the loop cannot read these without copies.

    Raises:
        CompilerError: nothing can be compiled here.
    """
    if any(elements_side_by_side(each) is not each for each in (query, key, value)):
        return None
    batch, heads, rows, width = query.shape
    strided = query, key, value, empty_like(query)
    # The structs are built once for all calls with these shapes and strides.
    shape, strides = _sizes(query, key), _strides(strided, None)
    of = ctypes.c_int64(causal), ctypes.c_double(scale_of(query, scale)), torch.get_num_threads()
    function = _function("forward")

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = query.new_empty(batch, rows, heads, width)
        _check("forward", function(*map(pointer, (query, key, value, None, out)), shape, strides, *of))
        return out.transpose(1, 2)

    return run


def _call(
    name: str, tensors: tuple[Tensor | None, ...], query: Tensor, key: Tensor, strided: tuple[Tensor, ...],
    mask: Tensor | None, causal: bool, scale: float,
) -> None:  # fmt: skip
    status = _function(name)(
        *map(pointer, tensors),
        _sizes(query, key),
        _strides(strided, mask),
        ctypes.c_int64(causal),
        ctypes.c_double(scale),
        torch.get_num_threads(),
    )
    _check(name, status)


def _function(name: str) -> Any:
    return getattr(compiled(_SOURCE), f"fxprec_attention_{name}")


def _sizes(query: Tensor, key: Tensor) -> Any:
    batch, heads, rows, width = query.shape
    return (ctypes.c_int64 * 6)(batch, heads, key.shape[1], rows, key.shape[2], width)


def _strides(strided: tuple[Tensor, ...], mask: Tensor | None) -> Any:
    found = [step for each in strided for step in each.stride()[:3]]
    found += [0, 0, 0] if mask is None else mask.stride()[:3]
    return (ctypes.c_int64 * len(found))(*found)


def _check(name: str, status: int) -> None:
    if status:
        raise RuntimeError(
            f"compiled attention, {name}: oneDNN's kernels take no bfloat16 here, or memory is short. Convert with "
            "fuse='auto'"
        )


_op = op_of("compiled_attention", _forward, _backward)


def compiled_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Compute ``reference`` of these arguments, as one compiled loop.

    Raises:
        CompilerError: nothing can be compiled here.
    """
    return _op(query, key, value, additive(mask, query, key), causal, scale_of(query, scale))
