"""What a region does for inputs of given shapes, strides and dtypes: derived once, then launched.

Two calls whose inputs differ in the number of rows alone share their row programs; only the launches are made anew.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from fxprec.kernels.rows import ops
from fxprec.kernels.rows import row_program as rp
from fxprec.kernels.rows.evaluate import evaluate
from fxprec.kernels.rows.kernel import Launch, prepare
from fxprec.kernels.rows.layout import Layout, dense_strides, find_layout, is_dense, place
from fxprec.kernels.rows.lowering import Declined

__all__ = ["Plan", "Spec", "make_plan", "spec_of"]


@dataclass(frozen=True, slots=True)
class Spec:
    """A tensor without its numbers. ``dropped``: how many trailing dimensions a reduction took from it."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    wanted: bool = False
    dropped: int = 0

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)


def spec_of(x: Tensor) -> Spec:
    """``wanted``: it wants a gradient."""
    return Spec(tuple(x.shape), x.stride(), x.dtype, x.requires_grad)


@dataclass(slots=True)
class Derived:
    """Row programs of one region, for all numbers of rows."""

    forward: rp.Program
    backward: rp.Backward | None


@dataclass(eq=False)
class Plan:
    """A region for given inputs on a device.

    Attributes:
        outputs: what the forward gives.
        statistics: FP32 tensors that it keeps for the backward besides.
        gradients: as the backward stores them, for each of its stores; None for column partials.
    """

    name: str
    device: torch.device
    inputs: tuple[Spec, ...]
    outputs: tuple[Spec, ...]
    layout: Layout
    derived: Derived
    statistics: tuple[Spec, ...]
    gradients: tuple[Spec | None, ...]
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]

    @property
    def draws(self) -> int:
        """How many seeds it reads."""
        return self.derived.forward.seeds

    @property
    def keeps(self) -> tuple[tuple[str, int], ...]:
        """("input" | "output" | "statistic", number) of what a forward keeps for the backward."""
        bw = self.derived.backward
        return () if bw is None else (*bw.saved, *(source for _, source in bw.also))

    # -- running -----------------------------------------------------------------------------------------------------

    @property
    def number(self) -> int:
        """What names it in a call of the ops."""
        return ops.number(self)

    def launch_forward(self, inputs: Sequence[Tensor], seeds: Tensor | None, seed: int, keep: bool) -> list[Tensor]:
        """``forward``, as an op where a dispatch mode is to see it."""
        if torch._C._len_torch_dispatch_stack() > 0:
            return torch.ops.fxprec.region_forward(list(inputs), seeds, seed, keep, self.number)
        return self.forward(inputs, seeds, seed, keep)

    def launch_backward(
        self, saved: Sequence[Tensor], cotangents: Sequence[Tensor], seeds: Tensor | None, seed: int
    ) -> list[Tensor]:
        """``backward``, likewise."""
        if torch._C._len_torch_dispatch_stack() > 0:
            return torch.ops.fxprec.region_backward(list(saved), list(cotangents), seeds, seed, self.number)
        return self.backward(saved, cotangents, seeds, seed)

    def forward(self, inputs: Sequence[Tensor], seeds: Tensor | None, seed: int, keep: bool) -> list[Tensor]:
        """Outputs, and with ``keep`` the statistics."""
        made = [spec.empty(self.device) for spec in (*self.outputs, *(self.statistics if keep else ()))]
        launch = self.forward_launch if keep else self.inference_launch
        launch((*inputs, *made), seeds, seed, None)
        return made

    def backward(
        self, saved: Sequence[Tensor], cotangents: Sequence[Tensor], seeds: Tensor | None, seed: int
    ) -> list[Tensor]:
        """What the backward kernel stores: gradients that are no column partials, then the partials of the others.

        :param saved: of ``keeps``.
        :param cotangents: as ``laid_out`` gives them.
        """
        made = self.empty_gradients()
        launch = self.backward_launch
        partials = made[-1] if launch.partials else None
        tensors = made[:-1] if launch.partials else made
        launch((*saved[: len(self.derived.backward.saved)], *cotangents, *tensors), seeds, seed, partials)  # type: ignore[union-attr]
        return made

    def laid_out(self, cotangents: Sequence[Tensor]) -> list[Tensor]:
        """Gradients of the outputs in the outputs' strides, as the kernel walks them: copied where they differ."""
        bw = self.derived.backward
        assert bw is not None
        return [_laid(c, self.outputs[n]) for c, n in zip(cotangents, bw.cotangents, strict=True)]

    def finished(self, made: Sequence[Tensor]) -> list[Tensor]:
        """A gradient for each wanted input, in its shape and dtype, from what ``backward`` gave."""
        bw = self.derived.backward
        assert bw is not None
        sums: Tensor | None = None
        if self.backward_launch.partials:
            sums = made[-1].sum(0) if len(made[-1]) > 1 else made[-1][0]
        stored, found, offset = iter(made), [], 0
        for store in bw.program.stores:
            width = bw.program.columns if store.columns else 1
            found.append(sums.narrow(0, offset, width) if store.partial and sums is not None else next(stored))
            offset += width if store.partial else 0
        return [
            self._shaped(found[slot], bw.program.stores[slot].partial, self.inputs[n])
            for n, slot in zip(bw.wanted, bw.stored_in, strict=True)
        ]

    def _shaped(self, gradient: Tensor, partial: bool, spec: Spec) -> Tensor:
        if partial:
            gradient = self._column_shaped(gradient, spec)
        elif gradient.shape != spec.shape:
            missing = gradient.dim() - len(spec.shape)
            dims = [
                d for d in range(gradient.dim()) if d < missing or spec.shape[d - missing] == 1 != gradient.shape[d]
            ]
            gradient = gradient.sum(dims, keepdim=True, dtype=torch.float32).reshape(spec.shape)
        return gradient.to(spec.dtype)

    def empty_gradients(self) -> list[Tensor]:
        """What ``backward`` gives, without numbers."""
        made = [spec.empty(self.device) for spec in self.gradients if spec is not None]
        launch = self.backward_launch
        if launch.partials:
            made.append(torch.empty((launch.grid[0], launch.partials), dtype=torch.float32, device=self.device))
        return made

    def eager_backward(
        self, saved: Sequence[Tensor], cotangents: Sequence[Tensor], seeds: Tensor | None, seed: int,
        dtype: torch.dtype = torch.float32,
    ) -> list[Tensor]:  # fmt: skip
        """Both steps in plain torch ops on the saved inputs and outputs, which autograd can differentiate.

        Statistics are computed again from these: as saved they have no history.
        """
        bw = self.derived.backward
        assert bw is not None
        kinds = [kind for kind, _ in (*bw.saved, *(source for _, source in bw.also))]
        loads = [load for load, (kind, _) in zip(bw.program.loads, bw.saved, strict=False) if kind != "statistic"]
        loads += [(value, self._port(source)) for value, source in bw.also] + [*bw.program.loads[len(bw.saved) :]]
        kept = [tensor for tensor, kind in zip(saved, kinds, strict=True) if kind != "statistic"]
        program = rp.Program(tuple(loads), bw.program.stores, bw.program.seeds, bw.program.columns)
        kept = [
            self._padded(tensor, source)
            for tensor, source in zip(kept, [s for s in self.keeps if s[0] != "statistic"], strict=True)
        ]
        given = [self._padded(c, ("output", n)) for c, n in zip(cotangents, bw.cotangents, strict=True)]
        found = evaluate(program, self.layout, [*kept, *given], seeds, seed, dtype)
        results = []
        for n, slot in zip(bw.wanted, bw.stored_in, strict=True):
            spec, gradient, store = self.inputs[n], found[slot], bw.program.stores[slot]
            if store.partial:
                gradient = self._column_shaped(gradient.reshape(-1), spec)
            else:
                if not store.columns or gradient.shape[0] != self.layout.rows:
                    gradient = gradient.expand(self.layout.rows, self.layout.columns if store.columns else 1)
                gradient = self._torch_shaped(gradient, store.columns).sum_to_size(spec.shape)
            results.append(gradient.to(spec.dtype) if dtype is torch.float32 else gradient)
        return results

    def _padded(self, x: Tensor, source: tuple[str, int]) -> Tensor:
        lacking = self.outputs[source[1]].dropped if source[0] == "output" else 0
        return x.reshape(x.shape + (1,) * lacking) if lacking else x

    def _port(self, source: tuple[str, int]) -> rp.Port:
        return rp.Port((self.inputs if source[0] == "input" else self.outputs)[source[1]].dtype, True, True)

    def _torch_shaped(self, x: Tensor, columns: bool) -> Tensor:
        if columns:
            return self.layout.torch_shaped(x)
        shape = _row_shape(self.layout)
        order = self.layout.row_dims
        others = [d for d in range(len(shape)) if d not in order]
        back = sorted(range(len(shape)), key=[*others, *order].index)
        return x.reshape([1] * len(others) + [shape[d] for d in order]).permute([*back])

    def _column_shaped(self, x: Tensor, spec: Spec) -> Tensor:
        """Columns, which lie in the layout's order, in the shape of an input that varies along nothing else."""
        rank, own = len(self.layout.shape), len(spec.shape)
        dims = [d for d in self.layout.column_dims if d >= rank - own and spec.shape[d - rank + own] != 1]
        if x.numel() == 1 or len(dims) <= 1:
            return x.reshape(spec.shape)
        back = sorted(range(len(dims)), key=lambda i: dims[i])
        return x.reshape([self.layout.shape[d] for d in dims]).permute(back).reshape(spec.shape)

    # -- launches, each made when it is first wanted -----------------------------------------------------------------

    def launches(self) -> list[tuple[Launch, list[torch.dtype]]]:
        """What a forward and a backward launch, each with the dtypes of its tensors."""
        bw = self.derived.backward
        if bw is None:
            return [(self.inference_launch, [spec.dtype for spec in (*self.inputs, *self.outputs)])]
        made = [spec.dtype for spec in (*self.inputs, *self.outputs, *self.statistics)]
        read = [self._saved(kind, n)[1] for kind, n in bw.saved] + [self.outputs[n] for n in bw.cotangents]
        written = [spec for spec in self.gradients if spec is not None]
        return [(self.forward_launch, made), (self.backward_launch, [spec.dtype for spec in (*read, *written)])]

    @functools.cached_property
    def inference_launch(self) -> Launch:
        """Of the forward where no gradient will be asked for."""
        program = self.derived.forward
        stores = program.stores[: len(self.outputs)]
        return self._launch(self.name, rp.Program(program.loads, stores, program.seeds, program.columns), self.outputs)

    @functools.cached_property
    def forward_launch(self) -> Launch:
        """Of the forward, with statistics."""
        return self._launch(self.name, self.derived.forward, (*self.outputs, *self.statistics))

    @functools.cached_property
    def backward_launch(self) -> Launch:
        """Of the backward."""
        bw = self.derived.backward
        assert bw is not None
        read = [*(self._saved(kind, n) for kind, n in bw.saved)]
        read += [(f"grad_{self.output_names[n]}", self.outputs[n]) for n in bw.cotangents]
        write = [(f"grad_{self.input_names[n]}", spec) for n, spec in zip(bw.owners, self.gradients, strict=True)]
        return self._prepared(f"{self.name}_backward", bw.program, read, write)

    def _saved(self, kind: str, n: int) -> tuple[str, Spec]:
        if kind == "input":
            return self.input_names[n], self.inputs[n]
        return (self.output_names[n], self.outputs[n]) if kind == "output" else (f"statistic_{n}", self.statistics[n])

    def _launch(self, name: str, program: rp.Program, stores: Sequence[Spec]) -> Launch:
        names = [*self.output_names, *(f"statistic_{n}" for n in range(len(self.statistics)))]
        read = [*zip(self.input_names, self.inputs, strict=True)]
        return self._prepared(name, program, read, [*zip(names, stores, strict=False)])

    def _prepared(self, name: str, program: rp.Program, read: Any, write: Any) -> Launch:
        def placed(tensor: str, spec: Spec | None) -> Any:
            if spec is None:
                return tensor, None
            lacking = spec.dropped
            return tensor, place(self.layout, spec.shape + (1,) * lacking, spec.strides + (0,) * lacking)

        loads = [placed(*each) for each in read]
        stores = [placed(*each) for each in write]
        return prepare(name, program, self.layout, loads, stores, self.device)

    @property
    def kernels(self) -> int:
        """Launches of a forward and a backward; second stages of sums counted, copies of odd gradients not."""
        if self.derived.backward is None:
            return 1
        launch = self.backward_launch
        stages = int(bool(launch.partials) and launch.grid[0] > 1)
        sums = sum(
            self._is_summed(n, self.gradients[slot])
            for n, slot in zip(self.derived.backward.wanted, self.derived.backward.stored_in, strict=True)
        )
        return 2 + stages + sums

    def _is_summed(self, n: int, spec: Spec | None) -> bool:
        return spec is not None and spec.shape != self.inputs[n].shape

    def bytes_moved(self) -> tuple[int, int]:
        """(bytes, their bound) of a forward and a backward.

        The bound reads each tensor once that the computation starts from and writes each result once. Above it are the
        row statistics, the partial sums, gradients in FP32 that are summed afterwards, and what longer rows read again.
        """
        launch = self.forward_launch if self.derived.backward else self.inference_launch
        moved = self._moved(launch, self.derived.forward, self.inputs, (*self.outputs, *self.statistics))
        bound = sum(map(_size, (*self.inputs, *self.outputs)))
        bw = self.derived.backward
        if bw is not None:
            saved = [self._saved(kind, n)[1] for kind, n in bw.saved]
            given = [self.outputs[n] for n in bw.cotangents]
            written = [spec for spec in self.gradients if spec is not None]
            moved += self._moved(self.backward_launch, bw.program, (*saved, *given), written)
            slots = [*zip(bw.wanted, bw.stored_in, strict=True)]
            summed = {slot for n, slot in slots if self._is_summed(n, self.gradients[slot])}
            moved += sum(_size(spec) for slot in summed if (spec := self.gradients[slot]) is not None)
            kept = [spec for spec, (kind, _) in zip(saved, bw.saved, strict=True) if kind != "statistic"]
            bound += sum(map(_size, (*kept, *given, *(self.inputs[n] for n in bw.wanted))))
        return moved, bound

    def _moved(self, launch: Launch, program: rp.Program, read: Sequence[Spec], written: Sequence[Spec]) -> int:
        """A tensor that is broadcast comes from the cache after the first time; long rows from memory each pass."""
        ports = [port for _, port in program.loads]
        times = [launch.passes if port.rows and port.columns else 1 for port in ports]
        loaded = sum(_size(spec) * count for spec, count in zip(read, times, strict=True))
        return loaded + sum(map(_size, written)) + 2 * 4 * launch.partials * launch.grid[0]


def _size(spec: Spec) -> int:
    return spec.dtype.itemsize * math.prod(spec.shape)


def _laid(x: Tensor, spec: Spec) -> Tensor:
    """A gradient in the strides of its output, as the kernel walks it: the tensor itself where it lies so."""
    if x.stride() == spec.strides and x.dtype == spec.dtype:
        return x
    return torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype, device=x.device).copy_(x)


class _Shapes(Interpreter):
    """Runs a region's graph on meta tensors and writes down what each node gives."""

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, Tensor):
            n.meta["shape"], n.meta["torch_dtype"] = tuple(result.shape), result.dtype
            n.meta["strides"] = result.stride()
        elif n.op != "output":
            raise Declined(f"{n.name} is no tensor")
        return result


def make_plan(
    name: str, gm: GraphModule, inputs: Sequence[Spec], device: torch.device, known: dict[Any, Derived]
) -> Plan:
    """Derive a region for some inputs.

    :param gm: its graph; each node carries ``meta["op"]``, inserted casts ``meta["inserted"]``; returns a tuple.
    :param known: row programs of regions of this structure, to which new ones are added.
    :raises Declined: why row programs do not serve it.
    """
    with torch.no_grad():
        _Shapes(gm).run(*[spec.empty(torch.device("meta")) for spec in inputs])
    if any(math.prod(spec.shape) == 0 for spec in inputs):
        raise Declined("an empty tensor")
    calls = [node for node in gm.graph.nodes if node.op not in ("placeholder", "output")]
    try:
        shape = tuple(torch.broadcast_shapes(*[spec.shape for spec in inputs]))
    except RuntimeError:
        raise Declined("inputs that do not line up as rows and columns") from None
    reduced = rp.reduced_dimensions(calls, len(shape))
    full = [(spec.shape, spec.strides) for spec in inputs]
    returned = [node for node in gm.graph.output_node().args[0]]  # type: ignore[union-attr]
    outputs = tuple(Spec(n.meta["shape"], n.meta["strides"], n.meta["torch_dtype"]) for n in returned)  # type: ignore[union-attr]
    layout = _layout(shape, full, [(o.shape, o.strides) for o in outputs], reduced, inputs)
    derived = _derived(gm, inputs, layout, reduced, known)
    outputs = tuple(
        replace(spec, dropped=store.dropped) for spec, store in zip(outputs, derived.forward.stores, strict=False)
    )
    if derived.backward is not None:
        statistics = tuple(
            Spec(
                _row_shape(layout) if s.rows else (1,) * len(shape),
                _row_strides(layout) if s.rows else (1,) * len(shape),
                torch.float32,
            )
            for s in derived.forward.stores[len(outputs) :]
        )
        gradients = tuple(
            _gradient(inputs[n], s, layout)
            for n, s in zip(derived.backward.owners, derived.backward.program.stores, strict=True)
        )
    else:
        statistics, gradients = (), ()
    names = tuple(node.name for node in gm.graph.find_nodes(op="placeholder"))
    return Plan(
        name, device, tuple(inputs), outputs, layout, derived, statistics, gradients, names,
        tuple(f"{node.name}_out" for node in returned),  # type: ignore[union-attr]
    )  # fmt: skip


def _layout(shape: Any, full: Any, outputs: Any, reduced: int, inputs: Sequence[Spec]) -> Layout:
    whole = [each for each in (*full, *outputs) if not reduced or len(each[0]) == len(shape) or each in full]
    layout = find_layout(shape, [(s, t) for s, t in whole if len(s) <= len(shape)], reduced)
    if not reduced and layout.flat:
        scalar = any(spec.wanted and math.prod(spec.shape) == 1 for spec in inputs) and layout.columns > 1
        if scalar:  # its gradient is a sum, which takes rows
            layout = Layout(layout.shape, layout.column_dims[:-1], layout.column_dims[-1:])
    return layout


def _derived(
    gm: GraphModule, inputs: Sequence[Spec], layout: Layout, reduced: int, known: dict[Any, Derived]
) -> Derived:
    ones = tuple((spec.dtype, spec.wanted, tuple(size == 1 for size in spec.shape)) for spec in inputs)
    alike = tuple([(s.shape, s.strides) for s in inputs].index((s.shape, s.strides)) for s in inputs)
    key = (
        ones,
        alike,
        reduced,
        layout.row_dims,
        layout.column_dims,
        tuple(layout.shape[d] for d in layout.column_dims) if not layout.flat else None,
    )
    found = known.get(key)
    if found is None:
        found = known[key] = _derive(gm, inputs, layout, reduced)
    return found


def _derive(gm: GraphModule, inputs: Sequence[Spec], layout: Layout, reduced: int) -> Derived:
    rank = len(layout.shape)

    def port(shape: Sequence[int], dtype: torch.dtype) -> rp.Port:
        padded = (1,) * (rank - len(shape)) + tuple(shape)
        own = [padded[d] != 1 for d in layout.row_dims]
        return rp.Port(
            dtype, any(own) or not own, any(padded[d] != 1 for d in layout.column_dims), any(own) and not all(own)
        )

    fw = rp.forward(gm, layout.shape, reduced, port, layout.columns)
    wanted = [n for n, spec in enumerate(inputs) if spec.wanted and spec.dtype.is_floating_point]
    if not wanted:
        return Derived(fw.program, None)
    differentiable = [n for n, output in enumerate(fw.outputs) if output.dtype.is_floating_point]
    bw = rp.backward(fw, wanted, differentiable, layout.rows, [(spec.shape, spec.strides) for spec in inputs])
    return Derived(fw.with_statistics(bw.statistics), bw)


def _row_shape(layout: Layout) -> tuple[int, ...]:
    return tuple(1 if d in layout.column_dims else size for d, size in enumerate(layout.shape))


def _row_strides(layout: Layout) -> tuple[int, ...]:
    strides, step = [0] * len(layout.shape), 1
    for d in reversed(layout.row_dims):
        strides[d] = step
        step *= layout.shape[d]
    return tuple(strides)


def _gradient(spec: Spec, store: rp.Store, layout: Layout) -> Spec | None:
    if store.partial:
        return None
    if store.dtype is not spec.dtype or _some_rows(spec, layout):
        shape = layout.shape if store.columns else _row_shape(layout)
        strides = dense_strides(layout, shape)
        return Spec(shape, strides, torch.float32)
    if is_dense(spec.shape, spec.strides):
        return spec
    return Spec(spec.shape, dense_strides(layout, spec.shape), spec.dtype)


def _some_rows(spec: Spec, layout: Layout) -> bool:
    rank = len(layout.shape)
    padded = (1,) * (rank - len(spec.shape)) + spec.shape
    own = [padded[d] != 1 for d in layout.row_dims]
    return any(own) and not all(own)
