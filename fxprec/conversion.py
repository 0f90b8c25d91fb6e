"""What runs when a converted module is called: which graph, on which weights, and what serves where there is no graph."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from fxprec import dynamo
from fxprec.errors import CaptureError, ConversionError, NotCapturedError
from fxprec.outputs import has_low_input, restore_dtypes
from fxprec.passes.canonicalize import subgraphs
from fxprec.passes.runner import run_passes
from fxprec.program import Program, lift
from fxprec.settings import Settings
from fxprec.shapes import propagate_shapes
from fxprec.shadows import ShadowStore
from fxprec.trace import CaptureDeclined, StaticCapture, call_key, default_key, trace_static

__all__ = ["Conversion", "StaticEntry"]


#: Input dtypes for which a graph captured without inputs is right as it stands: its run-time tests tell them apart.
_ASSUMED = frozenset({torch.float32, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool})


@dataclass(frozen=True, slots=True)
class StaticEntry:
    """One statically captured graph, ready to run: guards, program, and where its weights are read from at each call.

    ``dtypes``: the input dtypes it was rewritten for; None: FP32 floats were assumed.
    """

    capture: StaticCapture
    program: Program
    low: tuple[tuple[Mapping[str, Any], str], ...]
    plain: tuple[tuple[Mapping[str, Any], str], ...]
    dtypes: tuple[torch.dtype, ...] | None

    def serves(self, tensors: tuple[Tensor, ...] | None) -> bool:
        """Whether these inputs have the dtypes that the graph was rewritten for, and what tracing read still holds."""
        if tensors is not None:
            if self.dtypes is None:
                if not all(tensor.dtype in _ASSUMED and tensor.dim() for tensor in tensors):
                    return False
            elif self.dtypes != tuple(tensor.dtype for tensor in tensors):
                return False
        return self.capture.guards.failing() is None

    def run(self, store: ShadowStore, tensors: tuple[Any, ...]) -> Any:
        """The program on the weights as they are now."""
        low = store.read([owner[name] for owner, name in self.low])
        return self.program.function(*low, *[owner[name] for owner, name in self.plain], *tensors)


@dataclass
class Conversion:
    """The state of one converted module. Never saved: a copy or a loaded module redoes the conversion from ``settings``.

    Attributes:
        graphs: the rewritten graphs, in the order of their capture.
        net: 'where' -> 'why' of what ran outside them, under torch.autocast.
        declined: why static capture was declined, per argument pattern.
    """

    settings: Settings
    module: Any
    graphs: list[GraphModule] = field(default_factory=list)
    net: dict[str, str] = field(default_factory=dict)
    declined: list[str] = field(default_factory=list)
    bypassed: int = 0
    frozen: frozenset[str] | None = None

    def __post_init__(self) -> None:
        self.original_class: type[torch.nn.Module] = type(self.module)
        self.instance_forward: Callable[..., Any] | None = self.module.__dict__.pop("forward", None)
        self.module = weakref.ref(self.module)
        self.store = ShadowStore(self.settings.dtype)
        self.captures = 0
        self.programs: list[Program] = []
        self._static: dict[Any, list[StaticEntry]] = {}
        self._static_allowed = self.settings.capture != "dynamo"
        self._dynamo: dynamo.DynamoCapture | None = None
        self._under_net = True
        self._warned_autocast = False
        self.settled = False  # no call has gone through yet
        self._policy_checked = not self.settings.policy.overrides and not self.settings.policy.rules
        self._lock = threading.RLock()

    def __deepcopy__(self, memo: dict[int, Any]) -> Conversion:
        raise AssertionError("a converted module copies through __reduce_ex__")

    # -- calling ---------------------------------------------------------------------------------------------------

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.bypassed:
            return self.original_forward(module, *args, **kwargs)
        if torch.compiler.is_exporting():
            raise ConversionError(
                f"torch.export of the converted {self.original_class.__name__}: its forward runs graphs of its own. "
                "Export the rewritten graph: torch.export.export(fxprec.graph_module(model), inputs)"
            )
        if torch.is_autocast_enabled(self.settings.device):
            self._warn_autocast()
        return self._call(module, args, kwargs)

    def _call(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if module is not self.module():
            return self.run_in_net(module, args, kwargs, "a replica of the converted module")
        if self.frozen is not None and module.training and torch.is_grad_enabled():
            self.refuse_if_frozen("a training forward")
        self.store.begin()
        output = self._run(module, args, kwargs)
        if not self.settled:
            self.check_policy(module)
            self.settled = True
        if self.settings.policy.lowers_parameters or self.frozen is not None:
            output = self._restored(output, args, kwargs)  # the graph sees low weights, the original program had FP32
        return output

    def _run(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._static_allowed:
            try:
                entry, tensors = self._static_entry(module, args, kwargs)
            except CaptureDeclined as reason:
                if self.settings.capture == "symbolic":
                    raise CaptureError(
                        f"capture='symbolic' cannot take {self.original_class.__name__}: {reason}. "
                        "Leave capture out: dynamo takes such models"
                    ) from None
            else:
                with self._autocast_off():
                    return entry.run(self.store, tensors)
        return self._run_dynamo(module, args, kwargs)

    def original_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        """The untouched forward of the module."""
        if self.instance_forward is not None:
            return self.instance_forward(*args, **kwargs)
        return self.original_class.forward(module, *args, **kwargs)

    # -- static capture --------------------------------------------------------------------------------------------

    def _static_entry(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[StaticEntry, tuple[Any, ...]]:
        names, constants, tensors = call_key(self.signature, args, kwargs)
        return self._entry(module, names, constants, tensors), tensors

    def _entry(
        self, module: torch.nn.Module, names: tuple[str, ...], constants: Any, tensors: tuple[Tensor, ...] | None
    ) -> StaticEntry:
        for entry in self._static.get((names, constants), ()):
            if entry.serves(tensors):
                return entry
        with self._lock:
            return self._trace(module, names, constants, tensors)

    def _trace(
        self, module: torch.nn.Module, names: tuple[str, ...], constants: Any, tensors: tuple[Tensor, ...] | None
    ) -> StaticEntry:
        try:
            with self.as_original(module):
                capture = trace_static(module, names, dict(constants))
        except CaptureDeclined as reason:
            self.declined.append(str(reason))
            self._static_allowed = self.settings.capture == "symbolic"
            raise
        self.captures += 1
        if tensors is not None:
            propagate_shapes(capture.gm, tensors)
        program = self.rewrite(capture.gm)
        dtypes = None if tensors is None else tuple(tensor.dtype for tensor in tensors)
        entry = StaticEntry(
            capture, program, _owners(module, program.low), _owners(module, program.plain), dtypes
        )
        self._static.setdefault((names, constants), []).insert(0, entry)
        return entry

    def capture_now(self, module: torch.nn.Module) -> bool:
        """Capture statically for the default call pattern, if the model can be; False where it takes a call."""
        if self.graphs:
            return True
        if not self._static_allowed:
            return False
        try:
            names, constants = default_key(self.signature)
            self._entry(module, names, constants, None)
        except CaptureDeclined as reason:
            if self.settings.capture == "symbolic":
                raise CaptureError(
                    f"capture='symbolic' cannot take {self.original_class.__name__}: {reason}. "
                    "Leave capture out: dynamo takes such models"
                ) from None
            return False
        return True

    # -- dynamo ----------------------------------------------------------------------------------------------------

    def _run_dynamo(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        why = dynamo.modes_active()
        if why is not None:
            return self.run_in_net(module, args, kwargs, why)
        if self._dynamo is None:
            self._dynamo = dynamo.DynamoCapture(self._unbound_forward(), self)
        try:
            with self._net() if self._under_net else contextlib.nullcontext():
                output = self._dynamo.call(module, *args, **kwargs)
        except RuntimeError as error:
            if not self._under_net or (self.graphs and not dynamo.failed_while_tracing(error)):
                raise
            output = self._run_without_net(module, args, kwargs, error)
        if not self.graphs:
            raise CaptureError(
                f"no graph of {self.original_class.__name__} was captured (is TORCHDYNAMO_DISABLE set, or dynamo "
                f"disabled for its forward?): {self.net or 'dynamo gave no reason'}. Nothing would have been rewritten"
            )
        if self.net:
            output = self._restored(output, args, kwargs)
        return output

    def _run_without_net(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], error: RuntimeError
    ) -> Any:
        """What eager autocast itself cannot run (mixed dtypes in scatter_add) is captured whole, with autocast off."""
        capture = dynamo.DynamoCapture(self._unbound_forward(), self, fullgraph=True)
        graphs, programs = list(self.graphs), list(self.programs)
        try:
            output = capture.call(module, *args, **kwargs)
        except Exception:
            self.graphs, self.programs = graphs, programs
            raise error from None
        self._dynamo, self._under_net = capture, False
        self.net.clear()
        return output

    def _unbound_forward(self) -> Callable[..., Any]:
        bound = self.instance_forward
        if bound is None:
            return self.original_class.forward
        return lambda _, *args, **kwargs: bound(*args, **kwargs)

    def rewritten(self, gm: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """dynamo's backend: rewrite one graph, and run it on dynamo's arguments with shadows in the weights' places."""
        weights, inputs_at = dynamo.name_weights(gm, inputs, self._names())
        dynamo.relocate(gm)
        program = self.rewrite(gm)
        low = [weights[name] for name in program.low]
        rest = [weights[name] for name in program.plain] + inputs_at
        self.captures += 1
        store, function, device = self.store, program.function, self.settings.device

        def run(*arguments: Any) -> Any:
            shadows = store.read([arguments[i] for i in low])
            enabled = torch.is_autocast_enabled(device)
            torch.set_autocast_enabled(device, False)
            try:
                return function(*shadows, *[arguments[i] for i in rest])
            finally:
                torch.set_autocast_enabled(device, enabled)

        return run

    def in_net(self, where: str, why: str) -> None:
        self.net.setdefault(where, why)

    def run_in_net(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], why: str) -> Any:
        """The original forward under torch.autocast: lowered, though not by our graphs. Recorded."""
        self.in_net("the whole forward", why)
        with self._net():
            output = self.original_forward(module, *args, **kwargs)
        return self._restored(output, args, kwargs)

    # -- shared ----------------------------------------------------------------------------------------------------

    def rewrite(self, gm: GraphModule) -> Program:
        """Run the passes on a captured graph and make its program."""
        run_passes(gm, self.settings.context())
        program = lift(gm, self.settings.dtype, self.settings.executor)
        self.graphs.append(gm)
        self.programs.append(program)
        return program

    def check_policy(self, module: torch.nn.Module) -> None:
        """Once graphs exist: raise PolicyError if an override matched nothing in any of them."""
        if self._policy_checked or not self.graphs:
            return
        everything = [node for gm in self.graphs for graph in (gm, *subgraphs(gm)) for node in graph.graph.nodes]
        ops = {node.meta["op"].name for node in everything if "op" in node.meta}
        self.settings.policy.check_matches(
            ops, dict(module.named_modules()), {node.name for node in everything}
        )
        self._policy_checked = True

    def active(self, module: torch.nn.Module) -> GraphModule:
        """The graph captured last, capturing statically if nothing was yet."""
        if not self.graphs and not self.capture_now(module):
            why = f" ({self.declined[-1]})" if self.declined else ""
            raise NotCapturedError(
                f"{self.original_class.__name__} is captured at its first call{why}: call it once, "
                "or give convert(model, example_inputs=(...)), and look again"
            )
        return self.graphs[-1]

    @contextlib.contextmanager
    def as_original(self, module: torch.nn.Module) -> Iterator[None]:
        """The module with its own class again, for the time of a trace."""
        swapped = module.__class__
        module.__class__ = self.original_class
        if self.instance_forward is not None:
            module.__dict__["forward"] = self.instance_forward
        try:
            yield
        finally:
            module.__dict__.pop("forward", None)
            module.__class__ = swapped

    def refuse_if_frozen(self, what: str) -> None:
        if self.frozen is not None:
            raise ConversionError(
                f"{what}: the model was frozen by fxprec.freeze, its FP32 weights are gone. "
                "Keep the original checkpoint, and load and train an unfrozen model"
            )

    @functools.cached_property
    def signature(self) -> inspect.Signature:
        """That of the original forward, without self."""
        if self.instance_forward is not None:
            return inspect.signature(self.instance_forward)
        signature = inspect.signature(self.original_class.forward)
        return signature.replace(parameters=list(signature.parameters.values())[1:])

    def _net(self) -> contextlib.AbstractContextManager[Any]:
        if self.settings.policy.level == "O0":
            return contextlib.nullcontext()
        return torch.autocast(self.settings.device, dtype=self.settings.dtype)

    def _autocast_off(self) -> contextlib.AbstractContextManager[Any]:
        if torch.is_autocast_enabled(self.settings.device):
            return torch.autocast(self.settings.device, enabled=False)
        return contextlib.nullcontext()

    def _restored(self, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.settings.keep_output_dtype or has_low_input((args, kwargs), self.settings.dtype):
            return output
        return restore_dtypes(output, self.settings.dtype)

    def lowered_weights(self, module: torch.nn.Module) -> list[str]:
        """Names of the parameters that every graph so far reads in the low dtype only."""
        low = {id(_tensor(module, name)) for program in self.programs for name in program.low}
        plain = {id(_tensor(module, name)) for program in self.programs for name in program.plain}
        return [name for name, value in module.named_parameters() if id(value) in low - plain]

    def _names(self) -> dict[int, tuple[str, str]]:
        module = self.module()
        assert module is not None
        names = {id(value): (name, "parameter") for name, value in module.named_parameters()}
        return names | {id(value): (name, "buffer") for name, value in module.named_buffers() if id(value) not in names}

    def _warn_autocast(self) -> None:
        if not self._warned_autocast:
            self._warned_autocast = True
            warnings.warn(
                f"the converted {self.original_class.__name__} was called under torch.autocast: its own graphs decide "
                "what is lowered and run with autocast off. Leave the autocast context away",
                stacklevel=5,
            )


def _tensor(module: torch.nn.Module, name: str) -> Any:
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    return owner._parameters.get(leaf, owner._buffers.get(leaf))


def _owners(module: torch.nn.Module, targets: tuple[str, ...]) -> tuple[tuple[Mapping[str, Any], str], ...]:
    """(dict, key) of each dotted tensor name: read at each call, so that functional_call and replaced tensors count."""
    owners = []
    for target in targets:
        path, _, leaf = target.rpartition(".")
        owner = module.get_submodule(path)
        kind: Mapping[str, Tensor | None] = owner._parameters if leaf in owner._parameters else owner._buffers
        owners.append((kind, leaf))
    return tuple(owners)
