"""Runs a fused region: one module of a rewritten graph that is one kernel forward and one backward.

Its graph stays as it was before fusion, and can be printed and run. For the inputs of a call a plan is looked up by
their shapes, strides and dtypes, or made: Triton kernels, or on a CPU compiled loops. If row programs do not support
them (float64, a layout), loops do not pay, or a compiler must see the ops, the graph itself runs, op by op. ``path``
and ``reason`` tell which of these the last call did, and why.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Proxy

from fxprec.kernels.launch.direct import Run
from fxprec.kernels.launch.kernel_op import one_by_one
from fxprec.kernels.launch.observers import COMPILER, DUAL, PROXY, SCRIPT, TRANSFORM, watcher
from fxprec.kernels.rows.program.prices import LoopPrices, SlowerThanOps, check_gain
from fxprec.kernels.rows.program.region_graph import RegionModule, structure_of
from fxprec.kernels.rows.program.values import Declined
from fxprec.kernels.rows.run.evaluate import eager_backward
from fxprec.kernels.torch_internals import FakeTensor, disable_current_modes

if TYPE_CHECKING:
    from fxprec.kernels.rows.run.plan import RegionPlan

#: Kernels that fused regions run as.
RegionKernels: TypeAlias = Literal["triton", "loops", "aten"]
_PLAIN: Final = frozenset({Tensor, nn.Parameter})
#: Plans of a region. A model that calls it with ever new shapes keeps the latest.
_MOST_PLANS: Final = 64
_LOCK: Final = threading.RLock()
#: Row programs by the structure of a region's graph: equal layers of any model share them.
_DERIVED: dict[str, dict[Any, Any]] = {}


class FusedRegion(RegionModule):
    """Module of a rewritten graph that runs a group of its nodes as one kernel.

    Attributes:
        name: of its ops, such as ``fused_add_layer_norm``.
        graph_module: its nodes, as they were in the graph; returns a tuple.
        draws: number of dropouts; if there are any, the last argument of a call is the tensor of seeds.
        seed: index of its first seed there.
        kernels: form that row programs are compiled to; "aten": none, the ops run one by one.
        prices: a loop runs only if it is faster than the ops by these; None: wherever it can.
        path: kernels that ran last: "triton", "loops", "aten", or "" before the first call.
        reason: why, in one clause.
        single: the graph returns one tensor, and a call gives that, not a tuple of it.
    """

    def __init__(
        self, name: str, graph_module: GraphModule, draws: int, seed: int, kernels: RegionKernels,
        prices: LoopPrices | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.name = name
        self.graph_module = graph_module
        self.draws, self.seed = draws, seed
        self.kernels: RegionKernels = kernels
        self.prices = prices
        self.path, self.reason = "", "not called yet"
        self._reads = len(graph_module.graph.find_nodes(op="placeholder"))
        self.single = len(graph_module.graph.output_node().args[0]) == 1  # type: ignore[arg-type]
        self._plans: dict[Any, RegionPlan | str] = {}
        # Reason by ``_size`` of the input number ``_sized_by``, for sizes at which the ops are faster than a loop.
        self._slower_sizes: dict[Any, str] = {}
        self._sized_by = 0

    def forward(self, *inputs: Any) -> Any:
        """Run the region on the inputs of its graph, followed by the seeds if it has dropouts.

        The first that holds decides::

            a size at which the ops are known to be faster      the ops, without any other question
            a trace by torch.fx (the first input is a proxy)    one call_module node
            ``fuse="aten"``, or somebody must see the ops       the ops
            no plan for such inputs, by the plan's reason       the ops
            an input wants a gradient                           the forward kernel, within an autograd function
            otherwise                                           the forward kernel
        """
        # Asked before anything else: for small tensors the rest of the lookup takes longer than the ops.
        if self._slower_sizes and not torch.compiler.is_compiling():
            found = self._slower_sizes.get(_size(inputs, self._sized_by))
            if found is not None:
                if self.reason is not found:
                    self.path, self.reason = "aten", found
                return self._run_ops_directly(*inputs)
        # A node for the whole region, as it is in the traced graph: ops of it would not round as the kernel does.
        if isinstance(inputs[0], Proxy):
            tracer: Any = inputs[0].tracer
            return tracer.create_proxy("call_module", tracer.path_of_module(self), inputs, {})
        seeds = None
        if self.draws and len(inputs) > self._reads:
            seeds, inputs = inputs[-1], inputs[:-1]
        # A compiler, a transform or a tensor subclass must see the ops, not one opaque kernel.
        why_ops = "fuse='aten'" if self.kernels == "aten" else _why_ops(inputs)
        if why_ops:
            self.path, self.reason = "aten", why_ops
            return self._run_ops(inputs)
        recording = torch.is_grad_enabled()
        key = _key(inputs, recording)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plan(key, inputs, recording)
        path, reason = ("aten", plan) if isinstance(plan, str) else (self.kernels, "")
        if self.path != path or self.reason != reason:  # a module's attributes take a microsecond each
            self.path, self.reason = path, reason
        if isinstance(plan, str):
            return self._run_ops(inputs)
        if seeds is not None and seeds.device != plan.device:  # drawn where the graph begins, on another device
            seeds = seeds.to(plan.device)
        if plan.derived.backward is not None:
            results = _apply(self, plan, seeds, *inputs)
        else:
            results = tuple(plan.launch_forward(inputs, seeds, self.seed, False))
        return results[0] if self.single else results

    def as_ops(self, *inputs: Any) -> Any:
        """Run the region op by op, for a trace that is to fuse anew. Dropouts draw their own random numbers."""
        return self._run_ops(inputs[: self._reads])

    def note_path(self, *inputs: Tensor) -> None:
        """Set ``path`` and ``reason`` before the function that ``run_for`` returned for inputs like these runs."""
        plan = self._plans.get(_key(inputs, torch.is_grad_enabled()), "")
        self.path, self.reason = ("aten", plan) if isinstance(plan, str) else (self.kernels, "")

    def run_for(self, *inputs: Tensor) -> Run | None:
        """Return the function to run for inputs of these shapes and strides on a CPU, or None: ``forward`` must run.

        It is None before the first such call, under a tracer, and where kernels are to record a gradient.
        """
        # Dropouts draw seeds at each call, and a Triton launch needs no shorter way.
        plan = self._plans.get(_key(inputs, torch.is_grad_enabled()))
        if plan is None or self.draws or self.kernels != "loops" or _why_ops(inputs):
            return None
        return self._run_ops_directly if isinstance(plan, str) else plan.run_for(self.single)

    def _run_ops(self, inputs: Sequence[Any]) -> Any:
        """Run op by op, by the graph module's forward, which shows every op to tracers."""
        results = self.graph_module.forward(*inputs)
        return results[0] if self.single else results

    def _run_ops_directly(self, *inputs: Any) -> Any:
        """Run op by op, by the function that torch.fx generated from the graph.

        In a converted model the graph module's forward is a wrapper of that function, which looks for a tracer at each
        call. No proxy comes here, and other tracers see the ops that torch dispatches anyway.
        """
        forward: Any = type(self.graph_module).forward
        results = getattr(forward, "__wrapped__", forward)(self.graph_module, *inputs)
        return results[0] if self.single else results

    def _plan(self, key: Any, inputs: Sequence[Any], recording: bool) -> RegionPlan | str:
        """Make and remember the plan for these inputs, or the reason why the ops run for them."""
        with _LOCK:
            try:
                plan: RegionPlan | str = self._make(inputs, recording)
            except SlowerThanOps as reason:
                plan = str(reason)
                self._remember(inputs, plan)
            except Declined as reason:
                plan = str(reason)
            # Dictionaries keep the order of insertion: the oldest plan goes first.
            while len(self._plans) >= _MOST_PLANS:
                del self._plans[next(iter(self._plans))]
            self._plans[key] = plan
        return plan

    def _remember(self, inputs: Sequence[Tensor], reason: str) -> None:
        """Note that the ops are faster for inputs of this size, so that the next call asks nothing else.

        For small sizes the lookup of a plan costs as much as a loop gains. Results of the ops are right for any strides
        and dtypes, so the size alone may decide. It is that of the largest input, to which the others are broadcast: a
        call in which this input is as large as before, and another one larger, runs op by op as well.
        """
        number = max(range(len(inputs)), key=lambda number: inputs[number].numel())
        size = _size(inputs, number)
        if size is None:  # of a fake tensor: proxies, too, have no size, and would find the reason under None
            return
        # Sizes of another input say nothing of this one.
        if number != self._sized_by:
            self._slower_sizes, self._sized_by = {}, number
        while len(self._slower_sizes) >= _MOST_PLANS:
            del self._slower_sizes[next(iter(self._slower_sizes))]
        self._slower_sizes[size] = reason

    def _make(self, inputs: Sequence[Any], recording: bool) -> RegionPlan:
        """Make a plan; raise ``Declined`` where no kernel runs for these inputs, or the ops take less time."""
        from fxprec.kernels.rows.program.layout import Spec
        from fxprec.kernels.rows.run.derive import make_plan

        # A 0-dim tensor may be a CPU scalar beside tensors of a device.
        device = next((x.device for x in inputs if x.dim()), inputs[0].device)
        loops = self.kernels == "loops"
        _check_device(device, loops)
        if any(x.device != device for x in inputs if x.dim()):
            raise Declined("inputs on several devices")
        if any(x.device != device for x in inputs):
            raise Declined("a scalar on another device")
        known = _DERIVED.setdefault(structure_of(self.graph_module), {})
        specs = [Spec(tuple(x.shape), x.stride(), x.dtype, recording and x.requires_grad) for x in inputs]
        with disable_current_modes():  # it runs the graph on meta tensors, which no mode should see
            plan = make_plan(self.name, self.graph_module, specs, device, known, loops)
            if loops and self.prices is not None:
                check_gain(self.graph_module, plan.programs, plan.layout.rows * plan.layout.columns, self.prices)
            plan.launches()  # made now, since they may be declined as well
        return plan

    @property
    def plans(self) -> tuple[RegionPlan, ...]:
        """Plans derived so far, one for each pattern of inputs."""
        return tuple(plan for plan in self._plans.values() if not isinstance(plan, str))

    def __dir__(self) -> list[str]:
        """Return the attributes without ``source`` before there is any: torch.jit reads every attribute listed here."""
        return [name for name in super().__dir__() if name != "source" or self.plans]

    @property
    def source(self) -> str:
        """Triton or C++ source of the kernels of the last plan, forward and backward.

        Raises:
            RuntimeError: nothing was derived yet.
        """
        if not self.plans:
            raise RuntimeError(f"{self.name} has no kernels ({self.reason}): call the model first, where they run")
        return "\n\n".join(launch.source for launch, _ in self.plans[-1].launches())

    def __getstate__(self) -> dict[str, Any]:
        # Plans hold launches of this process.
        return {**self.__dict__, "_plans": {}, "_slower_sizes": {}}

    def __deepcopy__(self, memo: dict[int, Any]) -> FusedRegion:
        import copy

        # Plans hold launches of this process, and are made again by the copy's first call.
        graph_module = copy.deepcopy(self.graph_module, memo)
        return FusedRegion(self.name, graph_module, self.draws, self.seed, self.kernels, self.prices)


def _key(inputs: Sequence[Tensor], recording: bool) -> Any:
    """Return the properties of inputs that a plan is made for."""
    return (recording, *[(x.shape, x.stride(), x.dtype, x.requires_grad, x.device) for x in inputs])


def _size(inputs: Sequence[Any], number: int) -> Any:
    """Return the shape of one input, and whether a backward follows: these two decide whether a loop pays.

    None for tensor subclasses, fake tensors among them, and for proxies.
    """
    x = inputs[number]
    if type(x) not in _PLAIN:
        return None
    return x.shape, torch.is_grad_enabled() and any(each.requires_grad for each in inputs)


def _check_device(device: torch.device, loops: bool) -> None:
    """Raise ``Declined`` if the kernels do not run on the device."""
    if loops:
        if device.type != "cpu":
            raise Declined(f"C++ loops do not run on '{device.type}'")
        return
    from fxprec.kernels.launch.triton_support import HAS_TRITON, can_launch

    if not HAS_TRITON:
        raise Declined("Triton is not installed")
    if not can_launch(device):
        raise Declined(f"Triton does not run on '{device.type}'")


def _why_ops(inputs: Sequence[Any]) -> str:
    """Return who must see the region's ops one by one, or "".

    Fake tensors and dispatch modes are not among them: they see each launch of a kernel as one op of torch's.
    """
    seen_by = watcher(COMPILER, TRANSFORM, DUAL, SCRIPT, PROXY)
    if seen_by is not None:
        return f"{seen_by.name} sees the ops"
    for x in inputs:
        if type(x) not in _PLAIN and not isinstance(x, FakeTensor):
            return f"a {type(x).__name__} dispatches the ops itself"
        # A kernel would read such memory without the sign. Conjugates are complex, which no plan supports.
        if x.is_neg():
            return "memory that is read negated, as of the imaginary part of a conjugate"
    return ""


class _Run(torch.autograd.Function):
    """Autograd function of a region: the forward kernel saves the tensors that the backward kernel loads."""

    @staticmethod
    def forward(
        ctx: Any, region: FusedRegion, plan: RegionPlan, seeds: Tensor | None, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        # The kernel that stores the statistics as well: a backward will follow.
        made = plan.launch_forward(inputs, seeds, region.seed, True)
        there = (*inputs, *made)
        ctx.save_for_backward(*[there[place] for place in plan.saved_positions])
        ctx.run = plan, seeds, region.seed
        return tuple(made[: len(plan.outputs)])

    @staticmethod
    @one_by_one  # a batch of gradients (``is_grads_batched``) has no memory that a kernel could read
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        plan, seeds, seed = ctx.run
        if torch.is_grad_enabled():
            gradients = eager_backward(plan, ctx.saved_tensors, cotangents, seeds, seed)
        else:
            given = plan.laid_out(cotangents)
            gradients = plan.finished(plan.launch_backward(ctx.saved_tensors, given, seeds, seed))
        found: list[Any] = [None] * (3 + len(plan.inputs))
        for n, gradient in zip(plan.backward_program.wanted, gradients, strict=True):
            found[3 + n] = gradient
        return tuple(found)


#: ``_Run.apply`` without its look for function transforms, which took a third of a call: none are active by then.
_apply: Final = super(torch.autograd.Function, _Run).apply  # type: ignore[misc]
