"""What runs when a converted module is called: which graph, on which weights, and what serves where there is none."""

from __future__ import annotations

import contextlib
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch.fx import GraphModule, Proxy
from torch.nn.parameter import is_lazy

from fxprec import dynamo
from fxprec.capture.call_key import Constants, call_key, default_key
from fxprec.capture.collection import fewer_collections
from fxprec.capture.trace import CaptureDeclined
from fxprec.captured import Captured, rewrite
from fxprec.dynamic import LeftToNet
from fxprec.entry_point import EntryPoint
from fxprec.errors import CaptureError, ConversionError, NotCapturedError, ServiceWarning, UnusedSettingWarning
from fxprec.kernels.torch_internals import disable_current_modes, is_fx_tracing
from fxprec.locks import CAPTURING
from fxprec.net import Net, inside_net
from fxprec.outputs import has_low_input, restore_dtypes
from fxprec.passes.canonicalize import every_graph
from fxprec.passes.fuse import region_names
from fxprec.settings import Settings
from fxprec.static import OtherDtypes, StaticEntry
from fxprec.stepwise import is_stepwise, stepwise
from fxprec.user_line import user_level
from fxprec.weights import Weights

__all__ = ["Conversion"]


class Conversion:
    """The state of one converted module. Never saved: a copied or loaded module is converted again from ``settings``.

    Attributes:
        captured: the rewritten graphs that calls can reach, in the order of their capture. Nobody else keeps a list.
        net: 'where' -> 'why' of what ran outside them, under torch.autocast.
        declined: why static capture was declined, per argument pattern.
        captures: how often a forward, or a piece of one, was captured.
        bypassed: how many ``fxprec.original`` blocks are open.
        frozen: names of the weights whose FP32 masters ``fxprec.freeze`` dropped.
        settled: a call has gone through: what is refused from now on does not undo the conversion.
        converting: ``convert`` is still at it, and will undo what is refused.
        undo: puts back what the conversion changed besides class and forward, until then.
    """

    def __init__(self, settings: Settings, module: torch.nn.Module, frozen: frozenset[str] | None = None) -> None:
        self.settings = settings
        self.module = weakref.ref(module)
        self.original_class = type(module)
        self.name = self.original_class.__name__
        self.weights = Weights(settings.dtype)
        self.store = self.weights.store
        self.forward = EntryPoint(
            settings, self.weights, "forward", type(module), module.__dict__.pop("forward", None), self.net_context
        )
        self.bypassed = 0
        self.frozen = frozen
        self.settled = False
        self.converting = False
        self.undo: Callable[[], None] | None = None
        self._forget()
        self._warned_autocast = False
        self._policy_checked = not settings.policy.overrides and not settings.policy.rules and not settings.chooses

    def start_over(self) -> None:
        """Forget every capture: the forward is another one now."""
        self._forget()
        self.forward.start_over()

    def _forget(self) -> None:
        self.captured: list[Captured] = []
        self.net: dict[str, str] = {}
        self.declined: list[str] = []
        self.captures = 0

    @property
    def signature(self) -> inspect.Signature:
        """That of the original forward, without self."""
        return self.forward.signature

    # -- calling ---------------------------------------------------------------------------------------------------

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.bypassed:
            return self.original_forward(module, *args, **kwargs)
        if torch.compiler.is_exporting():
            self._refuse_tracer("torch.export", "torch.export.export(fxprec.graph_module(model), inputs)")
        if is_fx_tracing() and any(isinstance(a, Proxy) for a in (*args, *kwargs.values())):
            self._refuse_tracer("torch.fx.symbolic_trace", "it is fxprec.graph_module(model)")
        if torch.is_autocast_enabled(self.settings.device) and not self._warned_autocast and not inside_net():
            self._warn_autocast()
        if module is not self.module():
            return self.run_in_net(module, args, kwargs, "a replica of the converted module")
        if self.frozen is not None and module.training and torch.is_grad_enabled():
            self.refuse_if_frozen("a training forward")
        if not self.settled and any(map(is_lazy, module.parameters())):
            self.start_over()  # what was declined now may be captured at the next call
            return self.run_in_net(
                module, args, kwargs, "lazy modules take their shapes, and classes, from a first call"
            )
        self.weights.begin(module)
        output = self._run(module, args, kwargs)
        if not self.settled:
            self.check_policy(module)
            self.settled, self.undo = True, None
        if self.frozen is not None or self.settings.policy.lowers_parameters:
            output = self.restored(output, args, kwargs)  # the graph sees low weights, the original program had FP32
        return output

    def _run(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        static = self.forward.static
        if self.forward.steps is not None:
            reason = CaptureDeclined(f"the forward is {self.forward.steps}, which runs after the call")
            self._refuse_if_symbolic(reason)
            output = self.run_in_net(module, args, kwargs, reason.reason)
            if not self.settled:
                self._warn_nothing_captured()
            return output
        if static.allowed:
            try:
                names, constants, tensors = call_key(self.signature, args, kwargs)
                found = static.find(names, constants, tensors)
                if found is None and self._became_low(module):
                    return self._run_low(module, args, kwargs)
                found = found or self._trace(module, names, constants, tensors)
            except CaptureDeclined as reason:
                self._refuse_if_symbolic(reason)
            else:
                try:
                    return found.run(self.weights, tensors)
                except OtherDtypes:
                    self._drop(static.retire(found))
                return self._run(module, args, kwargs)
        return self._run_dynamic(module, args, kwargs)

    def _run_dynamic(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        dynamic = self.forward.dynamic
        if self._became_low(module):
            return self._run_low(module, args, kwargs)
        why = dynamo.why_not_now()
        if why is not None:
            return self.run_in_net(module, args, kwargs, why)
        try:
            output = dynamic.run(module, args, kwargs)
        except LeftToNet as reason:
            return self.run_in_net(module, args, kwargs, str(reason))
        finally:
            if dynamic.found or dynamic.net_notes:
                self._take_found()
        if not self.captured and not self.settled and not self.net:
            self.in_net("the whole forward", "dynamo found nothing in it to capture")
        if not self.captured and not self.settled:
            self._warn_nothing_captured()
        if is_stepwise(output):
            self.in_net("what the forward returns", f"a {type(output).__name__}, which runs after the call")
        return self.restored(output, args, kwargs) if self.net else output

    def _became_low(self, module: torch.nn.Module) -> bool:
        """Whether its weights are all low since ``model.half()`` or the like: a model that convert would refuse."""
        if self.frozen is not None or self.settings.policy.lowers_parameters:
            return False
        dtypes = (parameter.dtype for parameter in module.parameters() if parameter.is_floating_point())
        low = (torch.float16, torch.bfloat16)
        return next(dtypes, None) in low and all(dtype in low for dtype in dtypes)

    def _run_low(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.in_net("the whole forward", "its weights are low themselves by now: it runs in their dtype, as it stands")
        return self.original_forward(module, *args, **kwargs)

    def original_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        """The untouched forward of the module."""
        return self.forward.unbound(module, *args, **kwargs)

    # -- the net ---------------------------------------------------------------------------------------------------

    def run_in_net(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], why: str) -> Any:
        """The original forward under torch.autocast: lowered, though not by our graphs. Recorded."""
        with self.net_context():
            output = self.original_forward(module, *args, **kwargs)
        self.in_net("the whole forward", why)
        return self.restored(output, args, kwargs)

    def in_net(self, where: str, why: str) -> None:
        """Record what runs outside our graphs."""
        self.net.setdefault(where, why)

    def net_context(self) -> contextlib.AbstractContextManager[Any]:
        """torch.autocast in the low dtype; at O0 nothing."""
        if self.settings.policy.level == "O0":
            return contextlib.nullcontext()
        return Net(self.settings.device, self.settings.dtype)

    def restored(self, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Low outputs as FP32, unless the caller passed low inputs, or wants them as they come.

        Of outputs that run later, step by step, each step is in the net, and what it gives is restored.
        """
        as_it_comes = not self.settings.keep_output_dtype or has_low_input((args, kwargs), self.settings.dtype)

        def restore(value: Any) -> Any:
            return value if as_it_comes else restore_dtypes(value, self.settings.dtype)

        return stepwise(restore(output), self.net_context, restore)

    # -- capture ---------------------------------------------------------------------------------------------------

    def _trace(
        self,
        module: torch.nn.Module,
        names: tuple[str, ...],
        constants: Constants,
        tensors: tuple[torch.Tensor, ...] | None,
    ) -> StaticEntry:
        """Capture statically for a call that no graph serves.

        Raises:
            CaptureDeclined: there can be no graph; nothing was run.
        """
        static = self.forward.static
        with CAPTURING, disable_current_modes(), fewer_collections():
            if (found := static.find(names, constants, tensors)) is not None:  # another thread was at it
                return found
            try:
                with self.twin(module) as twin:
                    capture = static.trace(twin, names, constants, tensors)
            except CaptureDeclined as reason:
                self.declined.append(reason.reason)
                self._drop(static.give_up())
                raise
            program = rewrite(capture.gm, self.settings)
            captured = Captured(capture.gm, program, module.training, capture.guards)
            entry = StaticEntry.of(capture, captured, tensors)
            self._drop(static.add(names, constants, entry))
            self.captured.append(captured)
            self.captures += 1
            return entry

    def _take_found(self) -> None:
        """Keep what a call under dynamo captured."""
        with CAPTURING:
            dynamic = self.forward.dynamic
            found, notes = dynamic.found, dynamic.net_notes
            dynamic.found, dynamic.net_notes = [], {}
        self.captured += found
        self.captures += len(found)
        for where, why in notes.items():
            self.in_net(where, why)

    def _drop(self, dead: list[Captured]) -> None:
        """Forget graphs that no call can reach any more."""
        self.captured = [captured for captured in self.captured if captured not in dead]

    def capture_now(self, module: torch.nn.Module) -> bool:
        """Capture statically for the call that one expects, if the model can be; False where it takes a call."""
        if not self.captured:
            if (
                not self.forward.static.allowed or self.forward.steps or self.settings.pays
            ):  # which waits for the sizes of a call
                return False
            try:
                names, constants = default_key(self.signature)
                self._trace(module, names, constants, None)
            except CaptureDeclined as reason:
                self._refuse_if_symbolic(reason)
                return False
        return True

    @property
    def ran_in_net(self) -> bool:
        """Whether there were calls, and no graph for any of them."""
        return self.settled and not self.captured and bool(self.net)

    def active(self, module: torch.nn.Module) -> GraphModule:
        """The graph captured last, capturing statically if nothing was yet."""
        if not self.capture_now(module):
            if self.ran_in_net:
                where, why = next(iter(self.net.items()))
                raise NotCapturedError(f"{self.name} has no graph: it {self._served()}. {where}: {why}")
            waits = ["lower='pays' asks for sizes"] if self.settings.pays else []
            why = "".join(f" ({reason})" for reason in (self.declined or waits)[-1:])
            raise NotCapturedError(
                f"{self.name} is captured at its first call{why}: call it once, "
                "or give convert(model, example_inputs=(...)), and look again"
            )
        return self.captured[-1].gm

    @contextlib.contextmanager
    def twin(self, module: torch.nn.Module) -> Iterator[torch.nn.Module]:
        """The module as it was before its conversion, with the very same attributes: for a trace.

        The module itself stays as it is, since other threads may call it meanwhile.
        """
        if self.forward.of_instance is not None:  # may be bound to the module
            with self.as_original(module):
                yield module
        else:
            twin = object.__new__(self.original_class)
            object.__setattr__(twin, "__dict__", module.__dict__)
            yield twin

    @contextlib.contextmanager
    def as_original(self, module: torch.nn.Module) -> Iterator[None]:
        """The module as it was before its conversion, for a while."""
        swapped, attributes = module.__class__, module.__dict__
        kept = {name: attributes.pop(name) for name in ("forward", "_fxprec") if name in attributes}
        module.__class__ = self.original_class
        if self.forward.of_instance is not None:
            attributes["forward"] = self.forward.of_instance
        try:
            yield
        finally:
            attributes.pop("forward", None)
            attributes.update(kept)
            module.__class__ = swapped

    def lowered_weights(self, module: torch.nn.Module) -> list[str]:
        """Names of the parameters that every graph so far reads in the low dtype only."""
        tensors = dict(module.named_parameters(remove_duplicate=False))
        low = {id(tensors.get(name)) for captured in self.captured for name in captured.program.low}
        plain = {id(tensors.get(name)) for captured in self.captured for name in captured.program.plain}
        return [name for name, value in module.named_parameters() if id(value) in low - plain]

    # -- refusals --------------------------------------------------------------------------------------------------

    def check_policy(self, module: torch.nn.Module) -> None:
        """Once graphs exist: raise PolicyError if an override matched nothing in any of them."""
        if self._policy_checked or not self.captured:
            return
        everything = [node for each in self.captured for graph in every_graph(each.gm) for node in graph.graph.nodes]
        ops = {node.meta["op"].name for node in everything if "op" in node.meta}
        self.settings.policy.check_matches(ops, dict(module.named_modules()), {node.name for node in everything})
        self.settings.check_regions([name for each in self.captured for name in region_names(each.gm)])
        self._policy_checked = True

    def refuse_if_frozen(self, what: str) -> None:
        if self.frozen is not None:
            raise ConversionError(
                f"{what}: the model was frozen by fxprec.freeze, its FP32 weights are gone. "
                "Keep the original checkpoint, and load and train an unfrozen model"
            )

    def _refuse_if_symbolic(self, reason: CaptureDeclined) -> None:
        if self.settings.capture == "symbolic":
            raise CaptureError(
                f"capture='symbolic' cannot take {self.name}: {reason}. Leave capture out: dynamo takes such models"
            ) from None

    def _refuse_tracer(self, tracer: str, instead: str) -> NoReturn:
        raise ConversionError(
            f"{tracer} of the converted {self.name}: its forward runs graphs of its own. "
            f"Take the rewritten graph: {instead}"
        )

    def _warn_autocast(self) -> None:
        self._warned_autocast = True
        warnings.warn(
            f"the converted {self.name} was called under torch.autocast: its own graphs decide "
            "what is lowered and run with autocast off. Leave the autocast context away",
            category=UnusedSettingWarning,
            stacklevel=user_level(),
        )

    def _served(self) -> str:
        """How it runs where there is no graph."""
        under = "" if self.settings.policy.level == "O0" else f" under torch.autocast({self.settings.device!r})"
        return f"runs{under} as it stands"

    def _warn_nothing_captured(self) -> None:
        why = "; ".join(dict.fromkeys(self.net.values()))
        warnings.warn(
            f"no graph of {self.name} was captured: it {self._served()}. Why: {why}",
            category=ServiceWarning,
            stacklevel=user_level(),
        )
