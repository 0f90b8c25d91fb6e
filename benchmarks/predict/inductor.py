"""A training step as torch.compile would run it on a GPU that is not there: inductor's code, compiled and counted.

Forward with loss under autocast and its backward are traced on fake tensors, cut in two and lowered as for a GPU. The
code that comes out is run on tensors without memory: its Triton kernels are compiled for the machine, each in all the
forms that inductor would try there, and what it leaves to torch is counted. The optimizer is torch's fused AdamW.

Torch traces fake tensors of a device only where it is linked with it. So the graph is traced for a CPU, with the casts
of autocast on CUDA and CUDA's attention, and says cuda:0 from when it is lowered. What is private of torch and asked
for the predictions stands in this file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import math
import pathlib
import tempfile
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from benchmarks.predict.autocast import Autocast
from benchmarks.predict.cubin import disassembled, usage
from benchmarks.predict.launches import LOCAL, Launch, Unread
from benchmarks.predict.machines import Machine
from benchmarks.predict.model import Kernel
from benchmarks.predict.ops import Uncomputed, Work, bytes_of, layout_of
from benchmarks.predict.parts import Parts
from benchmarks.predict.sass import Path, SassError, loops, path_of
from benchmarks.predict.trips import touched, trips
from benchmarks.workloads.training import Workload

__all__ = ["parts_of", "why_not"]

DEVICE: Final = torch.device("cuda", 0)
#: The torch whose private names these are.
_KNOWN: Final = "2.13"
#: Launches of torch's fused AdamW for about 150 tensors, as an H200's trace has them.
_OPTIMIZER: Final = 7


def why_not() -> str:
    """Why inductor's code cannot be had here; "" where it can."""
    if not torch.__version__.startswith(_KNOWN):
        return f"what is private of inductor is known of torch {_KNOWN}, and this is {torch.__version__}"
    return "" if importlib.util.find_spec("triton") else "Triton is not installed"


def parts_of(workload: Workload, machine: Machine, dtype: torch.dtype) -> Parts:
    """Of one step, in a process of its own.

    Raises:
        RuntimeError: torch is one whose inductor is not known.
    """
    if why := why_not():
        raise RuntimeError(why)
    joint, options = _traced(workload, dtype)
    kernels: list[tuple[Launch, ...]] = []
    work: list[Work] = []
    unread: list[Unread] = []
    with _there(machine):
        for code in _lowered(joint, options):
            runs, ops = _ran(code)
            work += ops
            for run in runs:
                found = run.kernel.forms(run.arguments, machine)
                kernels += [found] if isinstance(found, tuple) else []
                unread += [] if isinstance(found, tuple) else [found]
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in workload.make().parameters())
    # Weights, gradients and moments are read, all but gradients written.
    work += [Work("fused_adamw", "other", 0, 28 * count // _OPTIMIZER)] * _OPTIMIZER
    return Parts(kernels, work, unread)


# -- the graph --------------------------------------------------------------------------------------------------------


class _TracedError(Exception):
    """Stops AOT autograd where it has the joint graph."""


def _traced(workload: Workload, dtype: torch.dtype) -> tuple[torch.fx.GraphModule, dict[str, Any]]:
    """The joint graph of forward, loss and backward, and the partitioner's options."""
    from torch._functorch.aot_autograd import aot_function
    from torch._inductor import config
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes import joint_graph, pad_mm, post_grad
    from torch._inductor.virtualized import V
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():  # patterns are traced, which wants a device that is there
        joint_graph.lazy_init(torch.device("cpu"))
        post_grad.lazy_init(torch.device("cpu"))
    batch = workload.batch(torch.Generator().manual_seed(0))
    kept: list[tuple[Any, dict[str, Any]]] = []

    def keep(gm: Any, inputs: Any, **options: Any) -> Any:
        kept.append((gm, options))
        raise _TracedError

    def as_placed(x: Tensor) -> Tensor:
        last = x.dim() == 4 and workload.channels_last
        return x.detach().contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)

    mode = FakeTensorMode()
    with mode, V.set_fake_mode(mode), patch.object(torch._C, "_conv_determine_backend_memory_format", _layout):
        model = workload.make().train()
        names = [name for name, _ in model.named_parameters()]
        others = [name for name, _ in model.named_buffers()]
        weights = [as_placed(weight).requires_grad_() for weight in model.parameters()]
        given = [as_placed(torch.empty(x.shape, dtype=x.dtype)) for x in batch]

        def loss_of(weights: Sequence[Tensor], buffers: Sequence[Tensor], *batch: Tensor) -> Tensor:
            with Autocast(dtype):
                held = dict(zip([*names, *others], [*weights, *buffers], strict=True))
                return workload.loss(torch.func.functional_call(model, held, batch[:-1]), batch[-1])

        compiled = aot_function(
            loss_of,
            fw_compiler=lambda gm, example_inputs: gm,
            partition_fn=keep,
            decompositions=select_decomp_table(),
            keep_inference_input_mutations=True,
        )
        with contextlib.suppress(_TracedError):
            compiled(weights, [*model.buffers()], *given)
        ((gm, options),) = kept
        # Products of odd sizes are padded, which inductor decides by a measurement.
        with (
            patch.object(pad_mm, "check_device", lambda *_: True),
            patch.object(pad_mm, "has_triton", lambda: True),
            config.patch(force_shape_pad=True),
        ):
            joint_graph.joint_graph_passes(gm)
    return gm, options


def _lowered(joint: torch.fx.GraphModule, options: Mapping[str, Any]) -> Iterator[str]:
    """Code of the forward and of the backward."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor import config
    from torch._inductor.debug import DebugContext
    from torch._inductor.fx_passes.post_grad import post_grad_passes, view_to_reshape
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V
    from torch._subclasses.fake_tensor import FakeTensorMode

    def moved(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=DEVICE)

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, V.set_fake_mode(mode):
        for node in joint.graph.nodes:
            if node.kwargs.get("device") is not None:
                node.kwargs = {**node.kwargs, "device": DEVICE}
            if "val" in node.meta:
                node.meta["val"] = pytree.tree_map(moved, node.meta["val"])
        joint.recompile()
        given = [node.meta["val"] for node in joint.graph.nodes if node.op == "placeholder"]
        halves = min_cut_rematerialization_partition(joint, given, compiler="inductor", **options)
    for backward, gm in enumerate(halves):
        inputs = [node.meta["val"] for node in gm.graph.nodes if node.op == "placeholder"]
        with V.set_fake_mode(mode), config.patch(profile_bandwidth=True, compile_threads=1):  # it writes down bytes
            view_to_reshape(gm)
            post_grad_passes(gm, is_inference=False)
            graph = GraphLowering(gm, example_inputs=inputs, is_backward=bool(backward))
            with V.set_graph_handler(graph), V.set_extern_kernel_nodes([]), V.set_debug_handler(DebugContext()):
                graph.run(*inputs)
                code, _ = graph.codegen()
        yield code.value


@contextlib.contextmanager
def _there(machine: Machine) -> Iterator[None]:
    """Whoever asks is told that there is the machine."""
    import torch._inductor.fx_passes.reinplace as reinplace
    import torch._inductor.runtime.triton_helpers as helpers
    import torch._inductor.scheduler as scheduler
    import torch.utils._triton as triton_there
    import triton
    from torch._dynamo.device_interface import CudaInterface

    major, minor = divmod(machine.capability, 10)
    known = types.SimpleNamespace(
        multi_processor_count=machine.processors, major=major, minor=minor, name=machine.name, total_memory=80 << 30,
        L2_cache_size=machine.cache, warp_size=32, max_threads_per_multi_processor=2048, gcnArchName="",
        regs_per_multiprocessor=65536, shared_memory_per_block=49152,
        shared_memory_per_block_optin=machine.shared - 1024,
    )  # fmt: skip
    answers: dict[Any, dict[str, Any]] = {
        torch.cuda: {
            "is_available": True, "current_device": 0, "device_count": 1, "get_device_properties": known,
            "get_device_capability": (major, minor), "get_device_name": machine.name, "synchronize": None,
            "is_bf16_supported": True, "is_initialized": True, "_lazy_init": None, "current_stream": None,
        },
        CudaInterface: {
            "get_device_properties": known, "get_compute_capability": machine.capability, "is_available": True,
        },
        CudaInterface.Worker: {"get_device_properties": known, "current_device": 0},
        helpers: {"set_driver_to_gpu": None},
        scheduler: {"has_triton": True},
        triton_there: {"has_triton": True},
    }  # fmt: skip

    def put(inp: Tensor, src: Tensor, view_ops: Any) -> Tensor:  # without a copy, which asks the device
        return inp

    with contextlib.ExitStack() as stack:
        for holder, values in answers.items():
            for name, value in values.items():
                answer: Any = functools.partial(_answer, value)
                stack.enter_context(
                    patch.object(holder, name, staticmethod(answer) if type(holder) is type else answer)
                )
        op = reinplace.inplaceable_ops[reinplace._generalized_scatter]
        own = {reinplace._generalized_scatter: dataclasses.replace(op, inplace_op=put)}
        stack.enter_context(patch.dict(reinplace.inplaceable_ops, own))
        stack.enter_context(patch.object(reinplace, "_inplace_generalized_scatter", put))
        for passes in ("joint_graph", "post_grad"):
            stack.enter_context(patch(f"torch._inductor.fx_passes.{passes}.lazy_init", lambda *_: None))
        stack.enter_context(patch.object(torch._C, "_conv_determine_backend_memory_format", _layout))
        triton.runtime.driver.set_active(_driver(machine))
        yield


def _layout(image: Tensor, weight: Tensor, _: Any) -> torch.memory_format:
    return layout_of(image, weight)


def _answer(value: Any, *_: Any, **__: Any) -> Any:
    return value


def _driver(machine: Machine) -> Any:
    """Triton's, of no device."""
    from triton.backends.compiler import GPUTarget

    target = GPUTarget("cuda", machine.capability, 32)
    return types.SimpleNamespace(get_current_target=lambda: target, get_current_device=lambda: 0)


# -- the code ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Run:
    """A launch in inductor's code."""

    kernel: _Kernel
    arguments: tuple[Any, ...]


def _ran(code: str) -> tuple[list[_Run], list[Work]]:
    """What the code launches, and what it has torch do: it runs on tensors without memory."""
    import torch._inductor.runtime.triton_heuristics as heuristics
    from torch._C._dynamo import guards
    from torch._inductor.async_compile import AsyncCompile

    runs: list[_Run] = []

    def strided(size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device="meta")

    def kernel(_: Any, name: str, source: str, *__: Any, **___: Any) -> Any:
        made = _Kernel(name, source)

        def run(*arguments: Any, stream: Any = None, **_: Any) -> None:
            runs.append(_Run(made, arguments))

        return types.SimpleNamespace(run=run)

    def made_up(size: Any, stride: Any, device: Any, dtype: torch.dtype, **_: Any) -> Tensor:
        return strided(size, stride, dtype)

    with contextlib.ExitStack() as stack:
        for holder, name, value in (
            (AsyncCompile, "triton", kernel), (AsyncCompile, "wait", _answer),
            (guards, "_empty_strided_cuda", strided), (guards, "assert_size_stride", functools.partial(_answer, None)),
            (guards, "assert_alignment", functools.partial(_answer, None)),
            (torch._C, "_cuda_getCurrentRawStream", functools.partial(_answer, 0)),
            (heuristics, "start_graph", functools.partial(_answer, None)),
            (heuristics, "end_graph", functools.partial(_answer, None)),
            (torch.cuda, "_DeviceGuard", lambda _: contextlib.nullcontext()), (torch.cuda, "set_device", _answer),
        ):  # fmt: skip
            stack.enter_context(patch.object(holder, name, value, create=True))
        stack.enter_context(patch("torch._dynamo.testing.rand_strided", made_up))
        scope: dict[str, Any] = {"__name__": "inductor_code", "__file__": "inductor_code.py"}
        exec(compile(_on_meta(code), "inductor_code.py", "exec"), scope)
        with Uncomputed(meta=True) as ops:
            given = scope["get_args"]()
            ops.work.clear()
            scope["call"](given)
    return runs, ops.work


def _on_meta(code: str) -> str:
    """Devices that torch's ops are told in the code."""
    return code.replace("device(type='cuda', index=0)", "device(type='meta')").replace("'cuda:0'", "'meta'")


class _Kernel:
    """One of inductor's Triton kernels: each of the forms that inductor would try, compiled."""

    def __init__(self, name: str, source: str) -> None:
        self.name = name
        self._source = source

    @functools.cached_property
    def _tuner(self) -> Any:
        from torch._inductor.codecache import PyCodeCache

        return getattr(PyCodeCache.load(self._source), self.name)

    def forms(self, arguments: Sequence[Any], machine: Machine) -> tuple[Launch, ...] | Unread:
        """Of a launch, those first that inductor has first; or why none is read."""
        tuner = self._tuner
        given = dict(zip(tuner.fn.arg_names, arguments, strict=False))
        sizes = {name: bytes_of(x) for name, x in given.items() if isinstance(x, Tensor)}
        found: list[Launch] = []
        why, moved = "no form compiles", 0.0
        for form in tuner.configs:
            made = self._compiled(form, machine)
            through = touched(made.ttir)
            loaded, stored = (
                sum(sizes.get(name, 0) for name, counts in through.items() if counts[kind]) for kind in (0, 1)
            )
            known = 1e9 * (tuner.inductor_meta.get("kernel_num_gb") or math.inf)  # counts slices
            part = min(1.0, known / (loaded + stored)) if loaded + stored else 1.0
            moved = part * (loaded + stored)
            numbers = {name: x for name, x in given.items() if isinstance(x, int)}
            grid = made.grid(numbers | form.kwargs)
            try:
                kernel = made.kernel(numbers, grid, part * loaded, part * stored)
            except (SassError, ValueError) as error:
                why = str(error)
                continue
            found.append(Launch(self.name, kernel, max(0, made.local - LOCAL)))
        whole = [launch for launch in found if not launch.spills]
        return tuple(whole or found) or Unread(self.name, moved, why)

    def _compiled(self, form: Any, machine: Machine) -> _Compiled:
        if (made := self._made.get(str(form))) is None:
            made = self._made[str(form)] = _compile(self._tuner, form, machine)
        return made

    @functools.cached_property
    def _made(self) -> dict[str, _Compiled]:
        return {}


@dataclass(frozen=True)
class _Compiled:
    """A form: Triton's IR, registers and memory, and the grid of a launch by its numbers."""

    name: str
    ttir: str
    path: Path | SassError
    registers: int
    local: int
    shared: int
    warps: int
    grid: Callable[[Mapping[str, Any]], tuple[int, int, int]]

    def kernel(self, numbers: Mapping[str, int], grid: tuple[int, int, int], loaded: float, stored: float) -> Kernel:
        if isinstance(self.path, SassError):
            raise self.path
        often = trips(self.ttir, numbers, grid) if loops(self.path) else ()  # all of them are unrolled
        if loops(self.path) != len(often):
            raise SassError(f"ptxas unrolled loops: there are {loops(self.path)}, of {len(often)}")
        return Kernel(self.path, often, self.registers, self.shared, self.warps, math.prod(grid), loaded, stored)


def _compile(tuner: Any, form: Any, machine: Machine) -> _Compiled:
    """As inductor's own autotuner compiles a form."""
    import triton
    from torch._inductor.runtime.triton_heuristics import GridExpr
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    meta = tuner._create_compile_meta(form)
    source = ASTSource(tuner.fn, meta["signature"], meta["constants"], meta["configs"][0])
    target = GPUTarget("cuda", machine.capability, 32)
    made: Any = triton.compile(source, target=target, options=tuner._create_compile_options(form, meta))
    with tempfile.TemporaryDirectory() as folder:
        cubin = pathlib.Path(folder) / "kernel.cubin"
        cubin.write_bytes(made.asm["cubin"])
        taken = usage(cubin)
        try:
            path: Path | SassError = path_of(disassembled(cubin))
        except SassError as error:
            path = error
    grid = GridExpr.from_meta(tuner.inductor_meta, form)
    return _Compiled(
        tuner.fn.__name__, made.asm["ttir"], path, taken.registers, taken.local, made.metadata.shared,
        made.metadata.num_warps, lambda numbers: grid.eval_slow(dict(numbers)),
    )  # fmt: skip
