"""Derives a plan from a region's graph and its inputs: shapes, a layout, and the row programs of both directions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from fxprec.kernels.launch.operands import is_dense
from fxprec.kernels.rows.program.backward import backward
from fxprec.kernels.rows.program.forward import forward, reduced_dimensions
from fxprec.kernels.rows.program.layout import Layout, Spec, dense_strides, find_layout
from fxprec.kernels.rows.program.row_program import Port, Store
from fxprec.kernels.rows.program.values import Declined
from fxprec.kernels.rows.run.plan import Derived, RegionPlan


class _Shapes(Interpreter):
    """Interpreter that runs a region's graph on meta tensors and notes shape, dtype and strides of each node."""

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, Tensor):
            n.meta["shape"], n.meta["torch_dtype"] = tuple(result.shape), result.dtype
            n.meta["strides"] = result.stride()
        elif n.op != "output":
            raise Declined(f"{n.name} is no tensor")
        return result


def make_plan(
    name: str, gm: GraphModule, inputs: Sequence[Spec], device: torch.device, known: dict[Any, Derived],
    loops: bool = False,
) -> RegionPlan:  # fmt: skip
    """Derive the plan of a region for some inputs.

    Args:
        gm: its graph; each node carries ``meta["op"]``, inserted casts ``meta["inserted"]``; returns a tuple.
        known: row programs of regions of this structure, to which new ones are added.
        loops: C++ loops are to run them.

    Raises:
        Declined: row programs do not support the region for these inputs.
    """
    # Shapes come from torch itself, for whatever ops the region holds.
    with torch.no_grad():
        _Shapes(gm).run(*[spec.empty(torch.device("meta")) for spec in inputs])
    if any(math.prod(spec.shape) == 0 for spec in inputs):
        raise Declined("an empty tensor")
    try:
        shape = tuple(torch.broadcast_shapes(*[spec.shape for spec in inputs]))
    except RuntimeError:
        raise Declined("inputs that do not line up as rows and columns") from None
    reduced = reduced_dimensions([node for node in gm.graph.nodes if node.op not in ("placeholder", "output")])
    returned: Any = gm.graph.output_node().args[0]
    outputs = [Spec(node.meta["shape"], node.meta["strides"], node.meta["torch_dtype"]) for node in returned]
    # An expanded output has gaps or overlaps, so that it says nothing of the layout; ``_dense`` gives it strides.
    layout = _layout(shape, inputs, [spec for spec in outputs if is_dense(spec.shape, spec.strides)], reduced)
    derived = _cached_programs(gm, inputs, layout, reduced, known)
    # The stores behind the outputs are statistics.
    outputs = [
        _dense(replace(spec, dropped=store.dropped), layout)
        for spec, store in zip(outputs, derived.forward.stores, strict=False)
    ]
    statistics, gradients = [], []
    if derived.backward is not None:
        bw = derived.backward
        statistics = [_statistic(store, layout) for store in derived.forward.stores[len(outputs) :]]
        gradients = [_gradient(inputs[n], s, layout) for n, s in zip(bw.owners, bw.program.stores, strict=True)]
    return RegionPlan(
        name, device, tuple(inputs), tuple(outputs), layout, derived, tuple(statistics), tuple(gradients),
        tuple(node.name for node in gm.graph.find_nodes(op="placeholder")),
        tuple(f"{node.name}_out" for node in returned), loops,
    )  # fmt: skip


def _layout(shape: tuple[int, ...], inputs: Sequence[Spec], outputs: Sequence[Spec], reduced: int) -> Layout:
    """Find the layout for the inputs and outputs.

    An output that a reduction removed dimensions from is left out: its dimensions do not line up with the others.
    """
    whole = [*inputs, *(spec for spec in outputs if not reduced or len(spec.shape) == len(shape))]
    layout = find_layout(shape, [(spec.shape, spec.strides) for spec in whole], reduced)
    scalar = any(spec.wanted and math.prod(spec.shape) == 1 for spec in inputs)
    # The gradient of a scalar is a column partial, summed over rows, which a flat program has not: the outer dimensions
    # become rows.
    if not reduced and layout.flat and scalar and layout.columns > 1:
        return Layout(layout.shape, layout.column_dims[:-1], layout.column_dims[-1:])
    return layout


def _cached_programs(
    gm: GraphModule, inputs: Sequence[Spec], layout: Layout, reduced: int, known: dict[Any, Derived]
) -> Derived:
    """Return the row programs, from the cache if an equal case was derived before.

    They depend on the sizes of the columns, on which dimensions of each input are 1, and on which inputs have equal
    shapes and strides; on nothing else of sizes and strides. So calls that differ in the number of rows share them.
    """
    ones = tuple((spec.dtype, spec.wanted, tuple(size == 1 for size in spec.shape)) for spec in inputs)
    # Equal shapes and strides have equal numbers: the first position at which they occur.
    lie = [(spec.shape, spec.strides) for spec in inputs]
    alike = tuple(map(lie.index, lie))
    columns = None if layout.flat else tuple(layout.shape[d] for d in layout.column_dims)
    key = (ones, alike, reduced, layout.row_dims, layout.column_dims, columns)
    if key not in known:
        known[key] = _derive(gm, inputs, layout, reduced, alike)
    return known[key]


def _derive(gm: GraphModule, inputs: Sequence[Spec], layout: Layout, reduced: int, alike: tuple[int, ...]) -> Derived:
    fw = forward(gm, layout.shape, reduced, lambda shape, dtype: _port(shape, dtype, layout), layout.columns)
    # Integers and bools have no gradients, whatever autograd was asked for.
    wanted = [n for n, spec in enumerate(inputs) if spec.wanted and spec.dtype.is_floating_point]
    differentiable = [n for n, output in enumerate(fw.outputs) if output.dtype.is_floating_point]
    if not wanted or not differentiable:
        return Derived(fw.program, None)
    bw = backward(fw, wanted, differentiable, layout.rows, alike)
    return Derived(fw.program_with_statistics(bw.statistics), bw)


def _port(shape: Sequence[int], dtype: torch.dtype, layout: Layout) -> Port:
    """Return the port of a tensor that broadcasts to the layout's shape.

    Along a single row or column every tensor counts as varying, so that its gradient needs no sum.
    """
    padded = (1,) * (len(layout.shape) - len(shape)) + tuple(shape)
    rows = [padded[d] != 1 for d in layout.row_dims]
    columns = any(padded[d] != 1 for d in layout.column_dims) or not layout.column_dims
    return Port(dtype, any(rows) or not rows, columns, some_rows=any(rows) and not all(rows))


def _dense(spec: Spec, layout: Layout) -> Spec:
    """Return the spec as it is if it is dense, else with dense strides in the layout's order."""
    if is_dense(spec.shape, spec.strides):
        return spec
    return replace(spec, strides=dense_strides(layout, spec.shape + (1,) * spec.dropped)[: len(spec.shape)])


def _statistic(store: Store, layout: Layout) -> Spec:
    sizes = tuple(1 if d in layout.column_dims or not store.rows else size for d, size in enumerate(layout.shape))
    return Spec(sizes, dense_strides(layout, sizes), torch.float32)


def _gradient(spec: Spec, store: Store, layout: Layout) -> Spec | None:
    """Return the spec of a stored gradient, in full if it is summed over some rows later; None for column partials."""
    if store.partial:
        return None
    if _port(spec.shape, spec.dtype, layout).some_rows:
        sizes = tuple(1 if d in layout.column_dims and not store.columns else n for d, n in enumerate(layout.shape))
        return Spec(sizes, dense_strides(layout, sizes), torch.float32)
    return _dense(Spec(spec.shape, spec.strides, store.dtype), layout)
