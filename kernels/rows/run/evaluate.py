"""Evaluates row programs in plain torch ops, differentiably: the reference of the kernels, and double backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from fxprec.kernels.rows.program.layout import Layout, Spec
from fxprec.kernels.rows.program.row_program import Port, RowProgram
from fxprec.kernels.rows.program.values import COMPARISONS, REDUCTIONS, Value, walk

if TYPE_CHECKING:  # Triton is loaded when a plan is made
    from fxprec.kernels.rows.run.plan import RegionPlan


def evaluate(
    program: RowProgram,
    layout: Layout,
    tensors: Sequence[Tensor],
    seeds: Tensor | None,
    seed: int,
    dtype: torch.dtype = torch.float32,
    rounds: bool = True,
) -> list[Tensor]:
    """Return the values of a program's stores, before their final rounding, as rows x columns (1 where constant).

    Args:
        tensors: the operands of its loads, in any memory layout.
        seed: index of the region's first seed in ``seeds``.
        dtype: to compute in; float64 for a reference.
        rounds: apply the program's intermediate roundings.
    """
    known: dict[Value, Any] = {}
    for (value, port), tensor in zip(program.loads, tensors, strict=True):
        seen = layout.two_dimensional(tensor)
        known[value] = seen.to(dtype) if port.dtype.is_floating_point else seen
    # Arguments come first in a walk, so each is known when its result is computed.
    roots = [store.value for store in program.stores if isinstance(store.value, Value)]
    for value in walk(roots, known.__contains__):
        if value not in known:
            arguments = [known[a] if isinstance(a, Value) else a for a in value.args]
            left_out = value.op == "round" and not rounds
            known[value] = arguments[0] if left_out else _apply(value, arguments, layout, seeds, seed, dtype)
    results = []
    for store in program.stores:
        if isinstance(store.value, Value):
            result = known[store.value]
        else:
            result = torch.full((1, 1), store.value, dtype=dtype, device=tensors[0].device)
        # A kernel's programs store parts of this sum; a second stage adds them up.
        if store.partial:
            result = result.expand(layout.rows, result.shape[1]).sum(0, keepdim=True)
        shape = (1 if store.partial or not store.rows else layout.rows, layout.columns if store.columns else 1)
        results.append(result.expand(shape))
    return results


def _apply(
    value: Value, arguments: list[Any], layout: Layout, seeds: Tensor | None, seed: int, dtype: torch.dtype
) -> Any:
    if value.op == "keep":
        from fxprec.kernels.launch.philox import keep_mask  # which loads Triton

        assert seeds is not None
        number, p = value.attribute
        return keep_mask(seeds[seed + number], layout.rows, layout.columns, p)
    if value.op == "round":
        x = arguments[0]
        rounded = x.to(value.attribute).to(dtype)
        # The rounding is a constant to autograd, so that the gradient passes it in full precision.
        return x + (rounded - x).detach() if x.requires_grad else rounded
    if value.op == "float":
        return arguments[0].to(dtype)
    if value.op in REDUCTIONS:
        x = arguments[0].expand(-1, layout.columns)
        return {"sum": torch.sum, "max": torch.amax, "min": torch.amin}[value.op](x, 1, keepdim=True)
    tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
    if value.op in COMPARISONS and not tensors[0].is_floating_point():
        dtype = torch.int64  # exact for integers
    if value.op in _OF_TENSORS:
        arguments = [
            a if isinstance(a, Tensor) else torch.tensor(a, dtype=dtype, device=tensors[0].device) for a in arguments
        ]
    return _OPS[value.op](*arguments)


#: Functions that take no numbers in the place of tensors.
_OF_TENSORS: Final = COMPARISONS | {"where", "maximum", "minimum"}
_OPS: Final[Mapping[str, Callable[..., Tensor]]] = MappingProxyType(
    {
        "add": torch.add, "sub": lambda a, b: a - b, "mul": torch.mul, "div": lambda a, b: a / b,
        **{name: getattr(torch, name) for name in (
            "neg", "abs", "exp", "exp2", "expm1", "log", "log2", "log1p", "sqrt", "rsqrt", "erf", "tanh",
            "sigmoid", "sign", "floor", "ceil", "trunc", "isnan", "ne", "lt", "le", "gt", "ge", "eq",
            "where", "maximum", "minimum",
        )},
        "and": torch.logical_and, "or": torch.logical_or, "not": torch.logical_not, "stop": lambda x: x.detach(),
    }
)  # fmt: skip


def eager_backward(
    plan: RegionPlan, saved: Sequence[Tensor], cotangents: Sequence[Tensor], seeds: Tensor | None, seed: int,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:  # fmt: skip
    """Run the backward in plain torch ops on the saved inputs and outputs, which autograd can differentiate.

    Args:
        cotangents: one for each output.
        seed: index of the region's first seed in ``seeds``.
        dtype: to compute in. Gradients come in those of the inputs, except in float64: then they stay in it.
    """
    bw, layout = plan.backward_program, plan.layout
    given = [cotangents[n] for n in bw.cotangents]
    found = raw_gradients(plan, saved, given, seeds, seed, dtype)
    gradients = []
    for n, slot, finish in zip(bw.wanted, bw.stored_in, plan.finishes, strict=True):
        spec, gradient, store = plan.inputs[n], found[slot], bw.program.stores[slot]
        # A sum over all rows is done already; any other gradient is summed to the input's shape here.
        if store.partial:
            gradient = finish.shaped(gradient.reshape(-1))
        else:
            rows, columns = layout.rows, layout.columns if store.columns else 1
            gradient = layout.torch_shaped(gradient.expand(rows, columns), store.columns).sum_to_size(spec.shape)
        gradients.append(gradient.to(spec.dtype) if dtype is torch.float32 else gradient)
    return gradients


def raw_gradients(
    plan: RegionPlan, saved: Sequence[Tensor], cotangents: Sequence[Tensor], seeds: Tensor | None, seed: int,
    dtype: torch.dtype, rounds: bool = True,
) -> list[Tensor]:  # fmt: skip
    """Return the backward program's stores, as rows x columns, computed from the saved inputs and outputs.

    Statistics among the saved tensors are left out, and computed again: they have no autograd history, and in another
    dtype than theirs a maximum would equal none of the values that it is compared with.

    Args:
        cotangents: of the outputs that have one, in the order of ``Backward.cotangents``.
        seed, rounds: as for ``evaluate``.
    """
    bw = plan.backward_program
    loads, tensors = [], []
    values = [value for value, _ in (*bw.program.loads[: len(bw.saved)], *bw.double_backward_sources)]
    for value, (kind, n), tensor in zip(values, plan.saved_sources, saved, strict=True):
        if kind != "statistic":
            spec = (plan.inputs if kind == "input" else plan.outputs)[n]
            # ``evaluate`` broadcasts by shape, so the port tells the dtype alone.
            loads.append((value, Port(spec.dtype, True, True)))
            tensors.append(_padded(tensor, spec))
    loads += bw.program.loads[len(bw.saved) :]
    tensors += [_padded(x, plan.outputs[n]) for x, n in zip(cotangents, bw.cotangents, strict=True)]
    return evaluate(replace(bw.program, loads=tuple(loads)), plan.layout, tensors, seeds, seed, dtype, rounds)


def _padded(x: Tensor, spec: Spec) -> Tensor:
    """Return the tensor with the dimensions, of size 1, that a reduction removed."""
    return x.reshape(x.shape + (1,) * spec.dropped) if spec.dropped else x
