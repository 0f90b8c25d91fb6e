"""Defines the plan of a region for inputs of given shapes, strides and dtypes: two kernels and their tensors.

``derive.make_plan`` makes one. Two calls whose inputs differ in the number of rows alone share their row programs; only
the launches are made anew. Sums over rows end after the backward kernel (``Finish``): column partials of its programs
are added up, and the gradient of an input that varies along some of several row dimensions is summed over the others.

Where a dispatch mode is active a launch is a torch op, which modes and fake tensors can see. A plan is named there by
its number, which holds in this process only: compilers and exporters see the torch ops of the region's graph instead.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fxprec.kernels.launch.direct import Run
from fxprec.kernels.launch.observers import ANY_MODE, watcher
from fxprec.kernels.rows.program.layout import Layout, Placed, Spec, place
from fxprec.kernels.rows.program.row_program import Backward, RowProgram

if TYPE_CHECKING:  # Triton is loaded when a plan is made
    from fxprec.kernels.rows.run.kernel import Launch
    from fxprec.kernels.rows.run.loops import Loops


@dataclass(frozen=True, slots=True)
class Finish:
    """Last step of one input's gradient, after the backward kernel.

    Of inputs in a region of shape (8, 12, 512, 512), whose last dimension is the columns::

        x (8, 12, 512, 512)   its store is the gradient                            plain
        bias (512,)           its column sum is the gradient                       partial, plain
        scale (1, 1, 512)     its column sum, reshaped                             partial
        mask (8, 1, 1, 512)   its store, for all rows, summed over the rows that   summed=(1, 2)
                              it does not vary along

    Attributes:
        partial: whether the gradient is a column sum, added up from partials.
        stored: its number among the column sums, or else among the tensors that the kernel stored.
        plain: what is found there has the input's shape already.
        shape: sizes of the columns' dimensions in the layout's order, if the columns are several dimensions that lie in
            another order in memory (channels_last) than in the input's shape; else None.
        order: the permutation that brings these dimensions into the input's order.
        summed: dimensions of the stored tensor to sum over, in which the input has size 1.
    """

    spec: Spec
    partial: bool
    stored: int
    plain: bool
    shape: tuple[int, ...] | None = None
    order: tuple[int, ...] = ()
    summed: tuple[int, ...] = ()

    def shaped(self, x: Tensor) -> Tensor:
        """Return the gradient in the input's shape, summed over the dimensions that the input lacks."""
        if self.summed:
            x = x.sum(self.summed, keepdim=True, dtype=torch.float32)
        elif self.shape is not None:
            x = x.reshape(self.shape).permute(self.order)
        return x.reshape(self.spec.shape)


def _finishes(
    bw: Backward, inputs: Sequence[Spec], gradients: Sequence[Spec | None], layout: Layout
) -> tuple[Finish, ...]:
    """Return the last step of each wanted input's gradient. ``gradients``: specs of the kernel's stores."""
    # For each store its number among those of its kind, partial or not.
    partial = [store.partial for store in bw.program.stores]
    numbers = [partial[:slot].count(own) for slot, own in enumerate(partial)]
    found = []
    for n, slot in zip(bw.wanted, bw.stored_in, strict=True):
        spec, given = inputs[n], gradients[slot]
        if given is None:
            shape, order = _order(spec, layout)
            plain = shape is None and len(spec.shape) == 1
            found.append(Finish(spec, True, numbers[slot], plain, shape, order))
        else:
            # Stored in full in FP32, and summed over the row dimensions that the input lacks.
            padded = (1,) * (len(given.shape) - len(spec.shape)) + spec.shape
            summed = tuple(d for d, size in enumerate(given.shape) if padded[d] == 1 != size)
            found.append(Finish(spec, False, numbers[slot], given.shape == spec.shape, summed=summed))
    return tuple(found)


def _order(spec: Spec, layout: Layout) -> tuple[tuple[int, ...] | None, tuple[int, ...]]:
    """Return the sizes of the columns' dimensions as stored (None: in the input's order), and their permutation."""
    missing = len(layout.shape) - len(spec.shape)
    dims = [d for d in layout.column_dims if d >= missing and spec.shape[d - missing] != 1]
    if dims == sorted(dims):
        return None, ()
    return tuple(layout.shape[d] for d in dims), tuple(sorted(range(len(dims)), key=dims.__getitem__))


@dataclass(slots=True)
class Derived:
    """Row programs of one region, for all numbers of rows.

    Attributes:
        launches: the first launch by (which program, device, layout, strides). Equal layers, whose sources differ in
            names only, run the kernel that was compiled for it.
    """

    forward: RowProgram
    backward: Backward | None
    launches: weakref.WeakValueDictionary[Any, Launch] = field(default_factory=weakref.WeakValueDictionary, repr=False)


@dataclass(eq=False)
class RegionPlan:
    """Kernels of a region for given inputs on a device.

    Attributes:
        outputs: of the forward.
        statistics: FP32 tensors that the forward saves for the backward besides.
        gradients: as the backward stores them, for each of its stores; None for column partials.
        loops: C++ loops run the row programs; else Triton.
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
    loops: bool = False

    @property
    def backward_program(self) -> Backward:
        """Backward program; only for a plan with inputs that require gradients, as others have none."""
        assert self.derived.backward is not None
        return self.derived.backward

    @functools.cached_property
    def saved_sources(self) -> tuple[tuple[str, int], ...]:
        """("input" | "output" | "statistic", number) of each tensor that a forward saves for the backward."""
        bw = self.derived.backward
        return () if bw is None else (*bw.saved, *(source for _, source in bw.double_backward_sources))

    @functools.cached_property
    def saved_positions(self) -> tuple[int, ...]:
        """Positions of the saved tensors in the list of all inputs and results of ``forward``."""
        first = {"input": 0, "output": len(self.inputs), "statistic": len(self.inputs) + len(self.outputs)}
        return tuple(first[kind] + n for kind, n in self.saved_sources)

    @functools.cached_property
    def finishes(self) -> tuple[Finish, ...]:
        """Last step of each wanted input's gradient, after ``backward``."""
        return _finishes(self.backward_program, self.inputs, self.gradients, self.layout)

    @functools.cached_property
    def partial_widths(self) -> tuple[int, ...]:
        """Number of columns of each column sum."""
        program = self.backward_program.program
        return tuple(program.columns if store.columns else 1 for store in program.stores if store.partial)

    @property
    def programs(self) -> tuple[RowProgram, ...]:
        """Row programs of the forward and, if there is one, of the backward."""
        backward = self.derived.backward
        return (self.derived.forward,) if backward is None else (self.derived.forward, backward.program)

    # -- running -----------------------------------------------------------------------------------------------------

    def launch_forward(
        self, inputs: Sequence[Tensor], seeds: Tensor | None, seed: int, with_statistics: bool
    ) -> list[Tensor]:
        """Run ``forward``, as a torch op if a dispatch mode is active, which must see it."""
        # As an op the launch is one node for the mode; called directly it would be invisible.
        if watcher(ANY_MODE) is not None:
            return torch.ops.fxprec.region_forward(list(inputs), seeds, seed, with_statistics, number(self))
        return self.forward(inputs, seeds, seed, with_statistics)

    def launch_backward(
        self, saved: Sequence[Tensor], cotangents: Sequence[Tensor], seeds: Tensor | None, seed: int
    ) -> list[Tensor]:
        """Run ``backward``, as a torch op if a dispatch mode is active."""
        if watcher(ANY_MODE) is not None:
            return torch.ops.fxprec.region_backward(list(saved), list(cotangents), seeds, seed, number(self))
        return self.backward(saved, cotangents, seeds, seed)

    def forward(self, inputs: Sequence[Tensor], seeds: Tensor | None, seed: int, with_statistics: bool) -> list[Tensor]:
        """Run the forward kernel; return the outputs, and then the statistics if they are wanted.

        ``seed``: index of the region's first seed in ``seeds``.
        """
        made = self.empty_results(with_statistics)
        launch = self.forward_launch if with_statistics else self.inference_launch
        launch([*inputs, *made], seeds, seed, None)
        return made

    def run_for(self, single: bool) -> Run | None:
        """Return a function from inputs to outputs (``single``: to the only one), if loops run without a gradient."""
        if self.derived.backward is not None or not self.loops:
            return None
        launch: Any = self.inference_launch
        return launch.run_for(self.outputs, single)

    def backward(
        self, saved: Sequence[Tensor], cotangents: Sequence[Tensor], seeds: Tensor | None, seed: int
    ) -> list[Tensor]:
        """Run the backward kernel; return what it stored, then one tensor with all column partials if there are any.

        Args:
            saved: the tensors of ``saved_sources``.
            cotangents: from ``laid_out``.
        """
        made, launch = self.empty_gradients(), self.backward_launch
        # The rest of the saved tensors is for a double backward.
        read = saved[: len(self.backward_program.saved)]
        *stored, partials = made if launch.partials else [*made, None]
        launch([*read, *cotangents, *stored], seeds, seed, partials)
        return made

    def laid_out(self, cotangents: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradients of the outputs that have one, in the outputs' strides and dtypes, as the kernel expects.

        Args:
            cotangents: one for each output; copied if its strides or dtype differ.
        """
        # Autograd hands on what the next layer's backward made: expanded, transposed, or of a wider dtype.
        pairs = [(cotangents[n], self.outputs[n]) for n in self.backward_program.cotangents]
        return [
            x if x.stride() == spec.strides and x.dtype is spec.dtype else spec.empty(x.device).copy_(x)
            for x, spec in pairs
        ]

    def finished(self, made: Sequence[Tensor]) -> list[Tensor]:
        """Return a gradient for each wanted input, in its shape and dtype, from the results of ``backward``."""
        sums: Sequence[Tensor] = ()
        # Partials of all column sums lie in one tensor: one sum finishes them.
        if self.backward_launch.partials is not None:
            partials = made[-1]
            total = partials.sum(0) if len(partials) > 1 else partials.view(-1)
            sums = total.split_with_sizes(self.partial_widths)
        found = []
        for each in self.finishes:
            gradient = sums[each.stored] if each.partial else made[each.stored]
            if not each.plain:
                gradient = each.shaped(gradient)
            dtype = each.spec.dtype
            found.append(gradient if gradient.dtype is dtype else gradient.to(dtype))
        return found

    def empty_results(self, with_statistics: bool) -> list[Tensor]:
        """Allocate the results of ``forward``."""
        device = self.device
        made = [spec.empty(device) for spec in self.outputs]
        return made + [spec.empty(device) for spec in self.statistics] if with_statistics else made

    def empty_gradients(self) -> list[Tensor]:
        """Allocate the results of ``backward``."""
        made = [spec.empty(self.device) for spec in self.gradients if spec is not None]
        partials = self.backward_launch.partials
        return [*made, torch.empty(partials, dtype=torch.float32, device=self.device)] if partials else made

    # -- launches, each made when it is first needed -----------------------------------------------------------------

    @functools.cached_property
    def inference_launch(self) -> Launch | Loops:
        """Launch of the forward without statistics, for inputs that need no gradient."""
        program = self.derived.forward
        stores = program.stores[: len(self.outputs)]
        # Statistics are the last stores: without a backward they are left out.
        alone = RowProgram(program.loads, stores, program.seeds, program.columns)
        return self._forward_launch("inference", alone, self.outputs)

    @functools.cached_property
    def forward_launch(self) -> Launch | Loops:
        """Launch of the forward that also stores the statistics."""
        return self._forward_launch("forward", self.derived.forward, (*self.outputs, *self.statistics))

    @functools.cached_property
    def backward_launch(self) -> Launch | Loops:
        """Launch of the backward."""
        bw = self.backward_program
        # In the order of the program's loads: what the forward saved, then the gradients of outputs.
        read = [*(self.named_saved(kind, n) for kind, n in bw.saved)]
        read += [(f"grad_{self.output_names[n]}", self.outputs[n]) for n in bw.cotangents]
        write = [(f"grad_{self.input_names[n]}", spec) for n, spec in zip(bw.owners, self.gradients, strict=True)]
        return self._prepared("backward", f"{self.name}_backward", bw.program, read, write)

    def named_saved(self, kind: str, n: int) -> tuple[str, Spec]:
        """Return the name and spec of one of ``saved_sources``."""
        if kind == "input":
            return self.input_names[n], self.inputs[n]
        return (self.output_names[n], self.outputs[n]) if kind == "output" else (f"statistic_{n}", self.statistics[n])

    def _forward_launch(self, kind: str, program: RowProgram, stores: Sequence[Spec]) -> Launch | Loops:
        names = [*self.output_names, *(f"statistic_{n}" for n in range(len(self.statistics)))]
        # There may be more names than stores: an inference stores no statistics.
        read = [*zip(self.input_names, self.inputs, strict=True)]
        return self._prepared(kind, self.name, program, read, [*zip(names, stores, strict=False)])

    def _prepared(
        self, kind: str, name: str, program: RowProgram,
        read: Sequence[tuple[str, Spec]], write: Sequence[tuple[str, Spec | None]],
    ) -> Launch | Loops:  # fmt: skip
        def placed(spec: Spec) -> Placed:
            # The layout counts dimensions from the end, so those that a reduction took are put back, of size 1.
            lacking = spec.dropped
            return place(self.layout, spec.shape + (1,) * lacking, spec.strides + (0,) * lacking)

        loads = [(tensor, placed(spec)) for tensor, spec in read]
        stores = [(tensor, None if spec is None else placed(spec)) for tensor, spec in write]
        if self.loops:
            from fxprec.kernels.rows.run.loops import prepare_loops

            return prepare_loops(program, self.layout, loads, stores)
        from fxprec.kernels.rows.run.kernel import prepare  # which loads Triton

        launch = prepare(name, program, self.layout, loads, stores, self.device)
        places = [where for _, where in (*loads, *stores)]
        lie = tuple(None if where is None else (*where[0], where[1]) for where in places)
        # Equal layers differ in the names of their tensors only: they share the first one's compiled kernel.
        first = self.derived.launches.setdefault((kind, self.device, self.layout, lie), launch)
        return launch if first is launch else launch.with_kernel_of(first)

    # -- inspection -----------------------------------------------------------------------------------------------

    def launches(self) -> list[tuple[Launch | Loops, list[torch.dtype]]]:
        """Return the launches of a forward and a backward, each with the dtypes of its tensors."""
        bw = self.derived.backward
        if bw is None:
            return [(self.inference_launch, [spec.dtype for spec in (*self.inputs, *self.outputs)])]
        made = [spec.dtype for spec in (*self.inputs, *self.outputs, *self.statistics)]
        read = [self.named_saved(kind, n)[1] for kind, n in bw.saved] + [self.outputs[n] for n in bw.cotangents]
        written = [spec for spec in self.gradients if spec is not None]
        return [(self.forward_launch, made), (self.backward_launch, [spec.dtype for spec in (*read, *written)])]


# -- launches as torch ops --------------------------------------------------------------------------------------------

_PLANS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def number(plan: Any) -> int:
    """Return the number that stands for a ``RegionPlan`` in calls of the ops, for as long as the plan is alive."""
    _PLANS[id(plan)] = plan
    return id(plan)


def plan_of(number: int) -> Any:
    """Return the ``RegionPlan`` that a number stands for."""
    return _PLANS[number]


@torch.library.custom_op("fxprec::region_forward", mutates_args=())
def _forward(inputs: list[Tensor], seeds: Tensor | None, seed: int, keep: bool, plan: int) -> list[Tensor]:
    return _PLANS[plan].forward(inputs, seeds, seed, keep)


@_forward.register_fake
def _(inputs: list[Tensor], seeds: Tensor | None, seed: int, keep: bool, plan: int) -> list[Tensor]:
    return _PLANS[plan].empty_results(keep)


@torch.library.custom_op("fxprec::region_backward", mutates_args=())
def _backward(
    saved: list[Tensor], cotangents: list[Tensor], seeds: Tensor | None, seed: int, plan: int
) -> list[Tensor]:
    return _PLANS[plan].backward(saved, cotangents, seeds, seed)


@_backward.register_fake
def _(saved: list[Tensor], cotangents: list[Tensor], seeds: Tensor | None, seed: int, plan: int) -> list[Tensor]:
    return _PLANS[plan].empty_gradients()


# -- the kernels of a plan, counted, and the bytes that they move, beside the fewest that must be moved ----------------


def count_kernels(plan: RegionPlan) -> int:
    """Return the launches of a forward and a backward, with second stages of sums, without copies of gradients."""
    bw = plan.derived.backward
    if bw is None:
        return 1
    partials = plan.backward_launch.partials
    return 2 + int(partials is not None and partials[0] > 1) + len(_summed(plan))


def bytes_moved(plan: RegionPlan) -> tuple[int, int]:
    """Return (bytes moved, lower bound) of a forward and a backward.

    The bound reads each tensor once that the computation starts from and writes each result once. Above it are the row
    statistics, the partial sums, gradients in FP32 that are summed afterwards, and what longer rows read again.
    """
    bw = plan.derived.backward
    launch = plan.inference_launch if bw is None else plan.forward_launch
    moved = _moved(launch, plan.derived.forward, plan.inputs, (*plan.outputs, *plan.statistics))
    bound = sum(spec.bytes for spec in (*plan.inputs, *plan.outputs))
    if bw is not None:
        saved = [plan.named_saved(kind, n)[1] for kind, n in bw.saved]
        given = [plan.outputs[n] for n in bw.cotangents]
        written = [spec for spec in plan.gradients if spec is not None]
        moved += _moved(plan.backward_launch, bw.program, (*saved, *given), written)
        moved += sum(spec.bytes for slot in {*_summed(plan)} if (spec := plan.gradients[slot]) is not None)
        kept = [spec for spec, (kind, _) in zip(saved, bw.saved, strict=True) if kind != "statistic"]
        bound += sum(spec.bytes for spec in (*kept, *given, *(plan.inputs[n] for n in bw.wanted)))
    return moved, bound


def _summed(plan: RegionPlan) -> list[int]:
    """Return the number of the store of each input whose gradient is summed after the kernel."""
    bw = plan.derived.backward
    assert bw is not None
    pairs = [(plan.inputs[n], slot) for n, slot in zip(bw.wanted, bw.stored_in, strict=True)]
    stored = [(own, plan.gradients[slot], slot) for own, slot in pairs]
    return [slot for own, spec, slot in stored if spec is not None and spec.shape != own.shape]


def _moved(launch: Launch | Loops, program: RowProgram, read: Sequence[Spec], written: Sequence[Spec]) -> int:
    """Return the bytes that one launch moves.

    A broadcast tensor is read from the cache after the first time; a long row is read from memory in each pass.
    """
    ports = [port for _, port in program.loads]
    times = [launch.passes if port.rows and port.columns else 1 for port in ports]
    loaded = sum(spec.bytes * count for spec, count in zip(read, times, strict=True))
    return loaded + sum(spec.bytes for spec in written) + 2 * 4 * math.prod(launch.partials or (0,))
