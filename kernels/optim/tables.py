"""Makes one launch of hundreds of tensors of different sizes: a table of addresses and a table of chunks.

Each program of a launch takes one *chunk*: a run of at most ``plan.chunk`` elements of one tensor, in memory order. It
reads three tables:

- ``chunks``, int32 [programs, 2]: the tensor's position, and the chunk's number within the tensor;
- ``entries``, int64 [tensors, 9]: elements, chunks, rounding index, then the addresses of the parameter, three states,
  the step count and the shadow (0: none);
- the gradient row, int64 [tensors]: the address of the gradient (0: none, and its programs do nothing).

The plan keeps the first two while no address changes. Gradients are new tensors every step, so ``bind`` sends one row:
one copy from pinned memory, no host sync. An empty tensor has one chunk of no elements, so that its step counts too.

Kernels read tensors by raw addresses, so lists of them are checked before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Parameter

from fxprec.kernels.launch.operands import FLOATS, is_dense_tensor
from fxprec.kernels.launch.triton_support import constant, constexpr, jit, on_device, tl, triton_dtype
from fxprec.kernels.torch_internals import is_traceable_wrapper_subclass

#: Elements of the smallest chunk: every chunk is a multiple of it, and it is a multiple of every kernel's block.
_SMALLEST_CHUNK: Final = 8192
#: More programs would only lengthen the tables and the last reduction of a norm.
_MOST_CHUNKS: Final = 32768
_MOST_STATES: Final = 3
#: Warps of a program that updates.
UPDATE_WARPS: Final = 4
#: Address given for a tensor without elements: not 0, and never read.
_NOWHERE: Final = 16

# The columns of ``entries``; from STATE on there are _MOST_STATES.
ELEMENTS, CHUNKS, INDEX, PARAM, STATE, STEP, SHADOW, COLUMNS = (constant(c) for c in (0, 1, 2, 3, 4, 7, 8, 9))


@dataclass(frozen=True, slots=True)
class Tables:
    """Tables that the kernels read besides gradients, on the plan's device."""

    chunks: Tensor
    entries: Tensor
    arrivals: Tensor  # int32 [tensors], zero between launches: how many programs of a tensor have finished
    aligned: bool  # every address divides by 16


@dataclass(frozen=True, slots=True)
class Gradients:
    """Gradients of one step, bound to the tables of its launches. Keeps them alive: drop it with the step."""

    plan: MultiTensorPlan
    tensors: tuple[Tensor | None, ...]
    dtype: torch.dtype | None  # None: no parameter has a gradient
    tables: Tables
    row: Tensor
    aligned: bool  # theirs and the tables' addresses divide by 16

    def scalars(
        self, lr: float | Tensor, grad_scale: Tensor | None, found_inf: Tensor | None
    ) -> tuple[Tensor | None, float]:
        """Check the scalars of an update, and return the learning rate as ``device_rate`` does.

        Raises:
            ValueError: a scalar is not one float32 on the plan's device.
        """
        for name, scalar in (("grad_scale", grad_scale), ("found_inf", found_inf)):
            check_scalar(name, scalar, self.plan.device)
        return device_rate(lr, self.plan.device)

    def update(self, kernel: Any, block: int, **given: Any) -> None:
        """Launch the kernel of an update, on the current stream, without host sync.

        Only those products and sums are FMAs that the kernel writes so.
        """
        # No parameter has a gradient: then there is no dtype to compile for.
        if self.dtype is None:
            return
        plan, tables = self.plan, self.tables
        dtypes = {"GRADIENT": self.dtype, "PARAM": plan.param_dtype, "STATE": plan.state_dtype}
        dtypes["SHADOW"] = plan.shadow_dtype
        with on_device(plan.device):
            kernel[(len(tables.chunks),)](
                tables.chunks, tables.entries, self.row, **given,
                **{f"{name}_DTYPE": triton_dtype(dtype) for name, dtype in dtypes.items()},
                ALIGNED=self.aligned, CHUNK=plan.chunk, BLOCK=block, num_warps=UPDATE_WARPS, enable_fp_fusion=False,
            )  # fmt: skip


class MultiTensorPlan:
    """Tensors of one launch and their tables; the optimizer holds it for as long as its lists stay the same.

    All tensors of a parameter have its device, shape and strides and are dense; a list has one dtype. A plan that a
    CUDA graph was captured with must live as long as the graph. Not for several threads or streams at once.

    Args:
        params: float32, bfloat16 or float16.
        states: up to three lists (Adam: exp_avg, exp_avg_sq[, max_exp_avg_sq]; SGD: momentum_buffer), of one dtype.
        steps: one-element float32 tensors on the same device, which the kernel counts up.
        shadows: low-precision copies that the kernel writes; None where a parameter has none.
        indices: numbers of the tensors in stochastic rounding, in [0, 2**31); default: their positions.

    Raises:
        TypeError: a tensor that the kernels cannot read.
        ValueError: lists of different lengths, devices, dtypes, shapes or strides.
        RuntimeError: a CUDA graph is being captured: tables must be there before.
    """

    __slots__ = (
        "_addresses", "_captured", "_last_row", "_operands", "_places", "_spare", "_tables", "chunk", "device",
        "indices", "param_dtype", "params", "shadow_dtype", "shadows", "state_dtype", "states", "steps",
    )  # fmt: skip

    def __init__(
        self,
        params: Sequence[Tensor],
        *,
        states: Sequence[Sequence[Tensor]] = (),
        steps: Sequence[Tensor] | None = None,
        shadows: Sequence[Tensor | None] | None = None,
        indices: Sequence[int] | None = None,
    ) -> None:
        if not params:
            raise ValueError("A plan needs at least one parameter.")
        self.params = tuple(params)
        self.states = tuple(tuple(state) for state in states)
        self.steps = None if steps is None else tuple(steps)
        self.shadows = None if shadows is None else tuple(shadows)
        self.indices = tuple(range(len(params))) if indices is None else tuple(indices)
        self.chunk = chunk_size([param.numel() for param in self.params])
        self.device = self.params[0].device
        self._check()
        self.param_dtype = self.params[0].dtype
        self.state_dtype = only_dtype("states", [tensor for state in self.states for tensor in state])
        if self.state_dtype == torch.float16:
            raise TypeError("States are float16, which cannot hold exp_avg_sq; the kernels take float32 and bfloat16.")
        self.shadow_dtype = only_dtype("shadows", self.shadows or ())
        lists = (self.params, *self.states, self.steps or (), self.shadows or ())
        self._operands = [tensor for tensors in lists for tensor in tensors if tensor is not None]
        self._addresses = [tensor.data_ptr() for tensor in self._operands]
        self._tables = self._build()
        self._last_row: tuple[list[int], Tensor] | None = None
        self._captured: list[object] = []
        self._spare = self._staging()

    def bind(self, gradients: Sequence[Tensor | None]) -> Gradients:
        """Bind one step's gradients, one for each parameter; the kernels skip a parameter whose gradient is None.

        A gradient whose strides are not its parameter's is copied. Nothing is sent while no address has changed.

        Raises:
            TypeError: sparse, complex, float64 or distributed gradients.
            ValueError: another number, shape or device than the parameters have, or mixed dtypes.
        """
        if len(gradients) != len(self.params):
            raise ValueError(f"Got {len(gradients)} gradients for {len(self.params)} parameters.")
        tables = self._current_tables()
        dtype = next((gradient.dtype for gradient in gradients if gradient is not None), None)
        usual = dtype if dtype in FLOATS else None
        # There are hundreds at every step: an ordinary gradient passes by a few comparisons.
        tensors = tuple(
            [
                gradient
                if gradient is None
                or (
                    type(gradient) is Tensor
                    and gradient.dtype is usual
                    and gradient.layout is torch.strided
                    and gradient.device == self.device
                    and gradient.shape == shape
                    and gradient.stride() == stride
                )
                else self._fitting(position, gradient)
                for position, (gradient, (shape, stride)) in enumerate(zip(gradients, self._places, strict=True))
            ]
        )
        only_dtype("gradients", tensors)
        addresses = [_address(tensor) for tensor in tensors]
        aligned = tables.aligned and not any(address % 16 for address in addresses)
        return Gradients(self, tensors, dtype, tables, self._row(addresses, tables), aligned)

    def _fitting(self, position: int, gradient: Tensor) -> Tensor:
        """Return the gradient if it has its parameter's memory layout, else a copy that has (one more pass over it)."""
        param = self.params[position]
        if param.shape != self._places[position][0]:
            raise ValueError(
                f"params[{position}] had shape {tuple(self._places[position][0])} when the plan was made, and has "
                f"{tuple(param.shape)} now: make a new plan."
            )
        if gradient.device == param.device and gradient.shape == param.shape and gradient.layout == torch.strided:
            if not _same_layout(gradient, param):
                gradient = torch.empty_like(param, dtype=gradient.dtype, requires_grad=False).copy_(gradient.detach())
        check_operand("gradients", position, gradient, param)
        return gradient

    def _row(self, addresses: list[int], tables: Tables) -> Tensor:
        known = None if self._last_row is None or self._last_row[0] != addresses else self._last_row[1]
        if not self._capturing():
            if known is None:
                # A fresh pinned block each time: torch's host allocator lends it again only after the copy has run.
                known = sent_to(int64_table(addresses), self.device)
                self._last_row = (addresses, known)
            if self._spare is None:
                self._spare = self._staging()
            return known
        if known is None:
            # The row is empty until the first replay, so launches outside of the graph must not find it in _last_row.
            if self._spare is None:
                raise RuntimeError(
                    "New gradients were bound twice while CUDA graphs were captured: run one step between captures."
                )
            staging, self._spare = self._spare, None
            staging.copy_(int64_table(addresses))
            known = staging.to(self.device, non_blocking=True)
            self._captured.append(staging)  # every replay copies from it again
        self._captured += [known, tables]  # and reads these
        return known

    def _current_tables(self) -> Tables:
        addresses = [tensor.data_ptr() for tensor in self._operands]
        # Compared at every bind, since kernels would go on writing to freed memory.
        if addresses != self._addresses:  # tensors got other memory: p.data = …, module.to(…)
            self._check()
            self._tables = self._build()
            self._addresses = addresses
        return self._tables

    def _check(self) -> None:
        lists = {f"states[{number}]": state for number, state in enumerate(self.states)}
        lists |= {"shadows": self.shadows} if self.shadows is not None else {}
        for name, values in {**lists, "steps": self.steps, "indices": self.indices}.items():
            if values is not None and len(values) != len(self.params):
                raise ValueError(f"{name} has {len(values)} items for {len(self.params)} parameters.")
        only_dtype("params", self.params)
        for position, param in enumerate(self.params):
            if param.device != self.device:
                raise ValueError(f"params[{position}] is on '{param.device}', params[0] on '{self.device}'.")
            check_operand("params", position, param)
            for name, tensors in lists.items():
                tensor = tensors[position]
                if tensor is not None:
                    check_operand(name, position, tensor, param)
        for position, step in enumerate(self.steps or ()):
            check_scalar(f"steps[{position}]", step, self.device)
        self._places = [(param.shape, param.stride()) for param in self.params]

    def _build(self) -> Tables:
        if self._capturing():
            raise RuntimeError(
                "Tables of a multi-tensor launch cannot be made while a CUDA graph is being captured: run one step "
                "before the capture, and put no other memory under parameters or states after it."
            )
        missing = (None,) * len(self.params)
        # Every entry has the same columns, so that all kernels share one table.
        states = (*self.states, *[missing] * (_MOST_STATES - len(self.states)))
        columns = zip(self.params, *states, self.steps or missing, self.shadows or missing, strict=True)
        elements = [param.numel() for param in self.params]
        chunks = [max(1, -(-count // self.chunk)) for count in elements]
        entries = [
            (count, parts, index, *map(_address, tensors))
            for count, parts, index, tensors in zip(elements, chunks, self.indices, columns, strict=True)
        ]
        count = int64_table(chunks)
        owner = torch.arange(len(chunks), device="cpu").repeat_interleave(count)
        # Number of a chunk within its tensor: its position less the chunks of the tensors before.
        place = torch.arange(len(owner), device="cpu") - (count.cumsum(0) - count)[owner]
        return Tables(
            chunks=sent_to(torch.stack((owner, place), dim=1).int(), self.device),
            entries=sent_to(int64_table(entries), self.device),
            arrivals=torch.zeros(len(chunks), dtype=torch.int32, device=self.device),
            aligned=not any(address % 16 for entry in entries for address in (*entry[3:7], entry[8])),  # not the step's
        )

    def _capturing(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _staging(self) -> Tensor | None:
        if self.device.type != "cuda":
            return None
        return torch.empty(len(self.params), dtype=torch.int64, device="cpu", pin_memory=True)


def check_operand(name: str, position: int, tensor: Tensor, param: Tensor | None = None) -> None:
    """Raise for a tensor whose memory a kernel cannot traverse in step with its parameter's.

    Raises:
        TypeError: not strided, a wrapper of other tensors (a DTensor), or neither float32, bfloat16 nor float16.
        ValueError: not dense; or not of the parameter's device, shape and strides.
    """
    where = f"{name}[{position}]"
    # The address of a wrapper is not that of its elements.
    if type(tensor) not in (Tensor, Parameter) and is_traceable_wrapper_subclass(tensor):
        raise TypeError(f"{where} is a {type(tensor).__name__}, which has no memory of its own: pass its local tensor.")
    if tensor.layout != torch.strided:
        raise TypeError(f"{where} has layout {tensor.layout}; the kernels take strided tensors: densify it first.")
    if tensor.dtype not in FLOATS:
        raise TypeError(f"{where} is {tensor.dtype}; the kernels take float32, bfloat16 and float16.")
    if param is None:
        if not is_dense_tensor(tensor):
            raise ValueError(
                f"{where} of shape {tuple(tensor.shape)} and strides {tensor.stride()} overlaps itself or has gaps; "
                "the kernels take dense tensors: use a contiguous copy."
            )
        return
    if tensor.device != param.device:
        raise ValueError(f"{where} is on '{tensor.device}', its parameter on '{param.device}'.")
    if tensor.shape != param.shape:
        raise ValueError(f"{where} has shape {tuple(tensor.shape)}, its parameter {tuple(param.shape)}.")
    if not _same_layout(tensor, param):
        raise ValueError(
            f"{where} has strides {tensor.stride()}, its parameter {param.stride()}: make it with torch.empty_like of "
            "the parameter, so that both lie in memory in the same order."
        )


def only_dtype(name: str, tensors: Sequence[Tensor | None]) -> torch.dtype | None:
    """Return the one dtype of a list, or None if it holds no tensor. A launch reads one: two raise ValueError."""
    dtypes = {tensor.dtype for tensor in tensors if tensor is not None}
    if len(dtypes) > 1:
        listed = " and ".join(sorted(map(str, dtypes)))
        raise ValueError(f"{name} mixes {listed}; one launch reads one dtype: make one plan for each.")
    return dtypes.pop() if dtypes else None


def check_scalar(name: str, scalar: Tensor | None, device: torch.device) -> Tensor | None:
    """Return a scalar, or raise ValueError if a kernel cannot read it as one FP32 number on its device; None passes."""
    if scalar is None or (scalar.dtype == torch.float32 and scalar.numel() == 1 and scalar.device == device):
        return scalar
    raise ValueError(
        f"{name} must be one float32 number on '{device}', got {scalar.dtype} of shape {tuple(scalar.shape)} on "
        f"'{scalar.device}'."
    )


def device_rate(lr: float | Tensor, device: torch.device) -> tuple[Tensor | None, float]:
    """Return the learning rate as a kernel takes it: a pointer, or None and a number. Reads no device tensor.

    Raises:
        ValueError: a tensor on another device than the CPU and the plan's, or not one float32 or float64.
    """
    if not isinstance(lr, Tensor):
        return None, float(lr)
    if lr.device == device and lr.dtype == torch.float64 and lr.numel() == 1:
        return lr, 0.0
    # A number on the CPU is read without a sync.
    if lr.device.type == "cpu" and not (lr.device == device and lr.dtype == torch.float32):
        return None, float(lr.item())
    return check_scalar("lr", lr, device), 0.0


def _same_layout(tensor: Tensor, param: Tensor) -> bool:
    # Strides of dimensions of size 1 mean nothing, and autograd fills them in differently.
    if tensor.stride() == param.stride() or (tensor.is_contiguous() and param.is_contiguous()):
        return True
    return all(size == 1 or a == b for size, a, b in zip(param.shape, tensor.stride(), param.stride(), strict=True))


def chunk_size(elements: Sequence[int]) -> int:
    """Return the elements of a program: 8192, doubled until the tensors make at most 32768 chunks."""
    chunk = _SMALLEST_CHUNK
    while sum(-(-count // chunk) for count in elements) > _MOST_CHUNKS and chunk < max(elements):
        chunk *= 2
    return chunk


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr() or _NOWHERE


def int64_table(numbers: Sequence[int] | Sequence[tuple[int, ...]]) -> Tensor:
    """Return numbers as a tensor on the CPU, whatever the default device is."""
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def sent_to(table: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the CPU on the device, from pinned memory, so that the host does not wait for the copy."""
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


@jit()
def chunk_place(chunks, entries, CHUNK: constexpr):
    """Return this program's tensor: its position, its row of ``entries``, and the chunk's start and length."""
    program = tl.program_id(0).to(tl.int64)
    tensor = tl.load(chunks + 2 * program)
    entry = entries + tensor * COLUMNS
    start = tl.load(chunks + 2 * program + 1).to(tl.int64) * CHUNK
    length = tl.minimum(tl.load(entry + ELEMENTS) - start, CHUNK).to(tl.int32)
    return tensor, entry, start, length


@jit()
def elements_at(address, start, DTYPE: constexpr, ALIGNED: constexpr):
    """Return a pointer to the chunk's first element; with ALIGNED the compiler may use 16-byte accesses from there."""
    pointer = address.to(tl.pointer_type(DTYPE)) + start
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@jit()
def written_aligned(entry):
    """Return whether the addresses of a tensor's parameter, states and shadow, as far as present, divide by 16."""
    states = tl.load(entry + STATE) | tl.load(entry + STATE + 1) | tl.load(entry + STATE + 2)
    return (tl.load(entry + PARAM) | states | tl.load(entry + SHADOW)) % 16 == 0


@jit()
def count_step(arrivals, programs, step_count, step):
    """Store ``step`` (fp32) if this is the last program of its tensor to arrive: all have read the old one by then.

    arrivals: int32 [1], zero before the launch and after it. programs: how many come. step_count: fp32 [1].
    """
    tl.debug_barrier()  # every thread of this program has read the count
    if tl.atomic_add(arrivals, 1, sem="acq_rel") == programs - 1:
        tl.store(arrivals, 0)
        tl.store(step_count, step)
