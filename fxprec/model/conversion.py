"""Dispatches the calls of a converted module: to which graph, on which weights, and to autocast where there is none."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any, Final, TypeVar

import torch
from torch import nn
from torch.fx import Proxy
from torch.nn.parameter import is_lazy

from fxprec.capture.call_key import Key, call_key, default_key
from fxprec.capture.capturing import CAPTURING, CaptureDeclined, fewer_collections
from fxprec.capture.dynamo import analysis as dynamo
from fxprec.capture.dynamo.encoders import fused_path
from fxprec.capture.pytrees import has_low_input, restore_dtypes
from fxprec.capture.stepwise import is_stepwise, stepwise
from fxprec.errors import (
    ConversionError,
    NotCapturedError,
    did_you_mean,
)
from fxprec.kernels.launch.observers import TRANSFORM, unwatched, watcher
from fxprec.kernels.launch.operands import LOW_DTYPES
from fxprec.model.captured import Captured, CapturedGraphs
from fxprec.model.dynamic import LeftToNet, Resources
from fxprec.model.entry_point import MOST_RESTARTS, CallWatcher, EntryPoint
from fxprec.model.messages import Messages
from fxprec.model.method import Call, MethodName, twin_of
from fxprec.model.net import RUNS_FP32, inside_net
from fxprec.model.static import OtherDtypes, StaticEntry
from fxprec.passes.fuse import region_names
from fxprec.passes.graph.annotations import notes
from fxprec.passes.graph.subgraphs import every_graph
from fxprec.programs.packed_weights import rewrite
from fxprec.settings import Settings
from fxprec.torch_internals import NormBase

_Module = TypeVar("_Module", bound=nn.Module)

#: The attribute of a converted module that holds its conversion.
STATE: Final = "_fxprec"
#: Why a function that was just set on the instance runs in the net.
_NEW: Final = "it was set on the instance, and is captured from its second call on"


class Conversion(Resources):
    """The state of one converted module. Never saved: a copied or loaded module is converted again from ``settings``.

    Attributes:
        methods: by name, "forward" first: what runs in the places of the model's methods.
        captured: the rewritten graphs that calls can reach.
        net: 'where' -> 'why' of what ran outside them, under torch.autocast.
        declined: why static captures were declined, after the method's name unless it is forward.
        captures: how often a forward, or a piece of one, was captured.
        calls: how often a method was called.
        bypassed: how many ``fxprec.original`` blocks are open.
        frozen: names of the weights whose FP32 masters ``fxprec.freeze`` dropped.
        lowered: weights are low that were FP32 in the original: at O3, and where they are frozen.
        settled: a call has gone through: what is refused from now on does not undo the conversion.
        converting: ``convert`` is still at it, and will undo what is refused.
        undo: until a call has gone through, puts back what the conversion changed besides the class: at O3 dtypes.
        watcher: runs the calls that record gradients, if there is one.
    """

    def __init__(
        self, settings: Settings, module: nn.Module, frozen: frozenset[str] | None = None, packs: bool = False
    ) -> None:
        super().__init__(settings, packs)
        self.module = weakref.ref(module)
        self.original_class = type(module)
        self.name = self.original_class.__name__
        self.messages = Messages(self.name, settings)
        self.captured = CapturedGraphs()
        self._numbers = itertools.count()
        self.methods = {name: self.entry_point(name) for name in ("forward", *settings.methods)}
        self.calls = 0
        self.bypassed = 0
        self.frozen = frozen
        self.lowered = settings.policy.lowers_parameters or frozen is not None
        self.settled = False
        self.converting = False
        self.undo: Callable[[], None] | None = None
        self.watcher: CallWatcher | None = None
        self._forget()
        self._policy_checked = not settings.policy.overrides and not settings.policy.rules and not settings.chooses

    def entry_point(self, name: str) -> EntryPoint:
        """Return a new entry point, which is not one of ``methods`` yet."""
        return EntryPoint(self, MethodName.parse(name), next(self._numbers))

    def entries(self) -> list[EntryPoint]:
        """Return the entry points that calls of the methods reach now, in the order of ``methods``."""
        return [active for entry in self.methods.values() if (active := entry.active) is not None]

    def start_over(self) -> None:
        """Forget every capture: the code is another one now."""
        self._forget()
        for entry in {*self.methods.values(), *self.entries()}:
            entry.start_over()

    def _forget(self) -> None:
        self.captured.clear()
        self.net: dict[str, str] = {}
        self.declined: list[str] = []
        self.captures = 0

    def __call__(self, entry: EntryPoint, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call of a method of ``module``."""
        model: Any = self.module()
        call = Call(entry, model, module, args, kwargs)
        if self.bypassed:
            return call.untouched()
        # Others' traces would record the wrapper, or our program with shadows as constants.
        if torch.compiler.is_exporting():
            raise self.messages.traced(
                "torch.export", "torch.export.export(fxprec.graph_module(model), inputs), or torch.onnx.export likewise"
            )
        if any(map(isinstance, (*args, *kwargs.values()), itertools.repeat(Proxy))):
            raise self.messages.traced(
                "torch.fx.symbolic_trace",
                "it is fxprec.graph_module(model). For torchvision's create_feature_extractor and others that take a "
                "model apart: first those, then fxprec.convert",
            )
        if torch.is_autocast_enabled(self.settings.device) and not inside_net():
            self.messages.warn_autocast("called under")
        # DataParallel and the like copy a module, class and all; shadows and guards are the original's.
        if model is None or module is not entry.owner():
            return self.run_in_net(call, "a replica of the converted module")
        # A training step on frozen weights would go nowhere without a word.
        if self.frozen is not None and module.training and torch.is_grad_enabled():
            self.refuse_if_frozen("a training forward")
        # Before the first call there may be parameters without shapes, which no capture can read.
        if not self.settled and any(map(is_lazy, model.parameters())):
            # What was declined without shapes may be captured at the next call.
            self.start_over()
            return self.run_in_net(call, "lazy modules take their shapes, and classes, from a first call")
        if entry.new:
            entry.new = False
            return self.run_in_net(call, _NEW)
        if entry.code_changed:
            entry.start_over()
            self.captured.drop(self.captured.of(entry))
        # ``watch`` runs training calls itself: it may want to run them again.
        if self.watcher is not None and torch.is_grad_enabled():
            return self.watcher.call(entry, args, kwargs, lambda: self._run_counted(entry, call))
        return self._run_counted(entry, call)

    def _run_counted(self, entry: EntryPoint, call: Call) -> Any:
        """Run a call that graphs may serve, and count it."""
        self.store.begin(call.model)
        self.calls += 1
        output = self._run(entry, call)
        # An override that matches nothing is known only once there are graphs.
        if not self._policy_checked:
            self.check_policy(call.model)
        if not self.settled:
            self.settled, self.undo = True, None
        return self.restored(output, call) if self.lowered and self.settings.keep_output_dtype else output

    @property
    def restores(self) -> torch.dtype | None:
        """Return the low dtype, if results in it are to be cast back to FP32 here; else None.

        Graphs that were captured with low weights do not end in such casts.
        """
        return self.settings.dtype if self.lowered and self.settings.keep_output_dtype else None

    def _run(self, entry: EntryPoint, call: Call) -> Any:
        """Run a call on a static graph if there can be one, else on dynamo's."""
        static = entry.static
        # A generator runs after the call, when no graph of ours could be around it.
        if entry.runs_later is not None:
            reason = CaptureDeclined(f"{entry.called_here} is {entry.runs_later}, which runs after the call")
            self._refuse_if_symbolic(entry, reason)
            output = self.run_in_net(call, reason.reason)
            if not entry.called:
                self.messages.warn_nothing_captured(entry, self.net)
            entry.called = True
            return output
        if static.allowed:
            try:
                key, tensors = call_key(entry.signature, call.args, call.kwargs)
                found, is_another = static.find(key, tensors)
                if found is None and self._became_low(call.model):
                    return self._run_low(entry, call)
                if found is None:
                    found = self._trace(entry, call.model, key, tensors)
                # The model's state changed since the last call, so weights may have been written past their counters.
                elif is_another:
                    self.store.mark_stale()
            # Nothing ran yet: dynamo takes the call.
            except CaptureDeclined as reason:
                self._refuse_if_symbolic(entry, reason)
            else:
                entry.by_dynamo = False
                try:
                    return found.run(self.store, tensors)
                # The weights have other dtypes than that graph was rewritten for: it goes, and the call begins anew.
                except OtherDtypes:
                    self.captured.drop(static.retire(found))
                return self._run(entry, call)
        return self._run_dynamic(entry, call)

    def _run_dynamic(self, entry: EntryPoint, call: Call) -> Any:
        if self._became_low(call.model):
            return self._run_low(entry, call)
        # What dynamo cannot run now, or must not, runs in the net.
        why = dynamo.why_not_now() or entry.hooks.late
        if why is None and self.settings.policy.level == "O0":  # equal bit for bit
            why = fused_path(call.module)
        if why is None and (what := entry.out_of_date) is not None:
            if entry.restarts < MOST_RESTARTS:
                self._renew(entry)
                return self._run(entry, call)
            why = f"{what}, after {MOST_RESTARTS} changes of that kind"
        if why is not None:
            return self.run_in_net(call, why, low=not self._norm_is_transformed(call.model))
        dynamic = entry.dynamic
        known, calls, first = len(self.net), self.calls, not entry.called
        entry.called = entry.by_dynamo = True
        try:
            output = dynamic.run(call)
        except LeftToNet as reason:
            return self.run_in_net(call, str(reason))
        finally:
            if dynamic.found or dynamic.net_notes:
                self._take_found(entry)
        # Warned of at the first call alone, unless that called other methods of the model, which have graphs; what
        # later calls run outside of graphs is in the report.
        if first and not self.captured.of(entry) and calls == self.calls:
            if len(self.net) == known:
                self.in_net(entry.whole, "dynamo found nothing in it to capture")
            self.messages.warn_nothing_captured(entry, self.net)
        if is_stepwise(output):
            self.in_net(f"what {entry.called_here} returns", f"a {type(output).__name__}, which runs after the call")
        # Graphs give FP32 themselves: only what ran outside of them can give anything low.
        return self.restored(output, call) if self.net else output

    def _renew(self, entry: EntryPoint) -> None:
        """Forget what dynamo captured, and what is said of it: it is out of date."""
        with CAPTURING:
            # The lock may have been waited for.
            if entry.out_of_date is None:  # another thread was at it
                return
            entry.restarts += 1
            self.captured.drop([captured for captured in self.captured.of(entry) if captured.guards is None])
            others = {where for other in self.methods.values() if other is not entry for where in other.outside}
            for where in entry.outside - others:
                self.net.pop(where, None)
            if entry.hooks.gone:  # the hook was why static capture was declined: it is tried again
                self.declined = [why for why in self.declined if why not in entry.declined]
                entry.start_over()
            else:
                entry.start_dynamic_over()

    def _became_low(self, model: nn.Module) -> bool:
        """Return whether all weights are low since ``model.half()`` or the like: a model that convert would refuse."""
        if self.lowered:
            return False
        # Asked before each capture: one FP32 weight, mostly the first, settles it.
        weights = (parameter for parameter in model.parameters() if parameter.is_floating_point())
        are_low = (weight.dtype in LOW_DTYPES for weight in weights)
        return next(are_low, False) and all(are_low)  # mostly the first one is not

    def _run_low(self, entry: EntryPoint, call: Call) -> Any:
        self.in_net(entry.whole, "its weights are low themselves by now: it runs in their dtype, as it stands")
        return call.untouched()

    def _norm_is_transformed(self, model: nn.Module) -> bool:
        """Return whether a transform of ``torch.func`` would meet a norm of low values with FP32 weights."""
        if self.lowered or watcher(TRANSFORM) is None:
            return False
        return any(isinstance(module, NormBase | nn.LayerNorm | nn.GroupNorm) for module in model.modules())

    def run_in_net(self, call: Call, why: str, low: bool = True) -> Any:
        """Run the original method under torch.autocast, and note in ``net`` that no graph served.

        Args:
            call: the call.
            why: it has no graph.
            low: False: without autocast.
        """
        if not low:
            why = f"{why}; {RUNS_FP32} torch.func has no derivatives of a norm of low values with FP32 weights"
        with self.net_context() if low else contextlib.nullcontext():
            output = call.untouched()
        self.in_net(call.method.whole, why)
        return self.restored(output, call)

    def in_net(self, where: str, why: str) -> None:
        """Record what runs outside our graphs."""
        self.net.setdefault(where, why)

    def restored(self, output: Any, call: Call) -> Any:
        """Return low outputs as FP32, unless the caller passed low inputs, or wants them as they come.

        A generator that is returned is wrapped: each of its steps runs under autocast, and what it yields is restored.
        """
        # The usual case, by itself: the rest takes microseconds.
        if type(output) is torch.Tensor and output.dtype is not self.settings.dtype:
            return output
        low = self.settings.dtype
        as_it_comes = not self.settings.keep_output_dtype or has_low_input((call.args, call.kwargs), low)

        def restore(value: Any) -> Any:
            return value if as_it_comes else restore_dtypes(value, low)

        return stepwise(restore(output), self.net_context, restore)

    def _trace(
        self, entry: EntryPoint, model: nn.Module, key: Key, tensors: tuple[torch.Tensor, ...] | None
    ) -> StaticEntry:
        """Capture statically for a call that no graph serves.

        Raises:
            CaptureDeclined: there can be no graph; nothing was run.
        """
        static = entry.static
        with CAPTURING, unwatched(), fewer_collections():
            if (found := static.find(key, tensors)[0]) is not None:  # another thread was at it
                return found
            try:
                root, method = self._traceable(entry, model)
                with self.wrappers.traced():
                    capture = static.trace(root, key, tensors, method, entry.name.path)
            except CaptureDeclined as reason:
                entry.declined.append(reason.reason if entry.key == "forward" else f"{entry.key}: {reason.reason}")
                self.declined.append(entry.declined[-1])
                self.captured.drop(static.give_up())
                raise
            # From here on the call has a graph: what fails now is an error of ours, and no decline.
            # Where a graph was outgrown, this one gets all its regions.
            program = rewrite(capture.gm, self.settings, self.packed, by_size=not static.outgrown(key, tensors))
            captured = Captured(
                entry.key,
                entry.number,
                capture.gm,
                program,
                capture.gm.training,
                torch.is_grad_enabled(),
                capture.guards,
                key,
            )
            found = StaticEntry.of(capture, captured, tensors)
            self._drop_note_of_new(entry)
            self.captured.drop(static.add(found))
            # What made another graph necessary may have written weights past their counters.
            self.store.mark_stale()
            self.captured.append(captured)
            self.captures += 1
            return found

    def _take_found(self, entry: EntryPoint) -> None:
        """Keep what a call under dynamo captured."""
        with CAPTURING:
            dynamic = entry.dynamic
            found, notes = dynamic.found, dynamic.net_notes
            dynamic.found, dynamic.net_notes = [], {}
        for gm, program, training, calls in found:
            recorded = torch.is_grad_enabled()
            self.captured.append(Captured(entry.key, entry.number, gm, program, training, recorded, calls=calls))
        self.captures += len(found)
        self.captured.drop_gone()
        if found:
            self._drop_note_of_new(entry)
        if (owner := entry.owner()) is not None:
            entry.hooks.note(owner)
        entry.outside.update(notes)
        for where, why in notes.items():
            self.in_net(where, why)

    def _drop_note_of_new(self, entry: EntryPoint) -> None:
        """Drop the note that a function was just set, and had no graph yet: it has one now."""
        if self.net.get(entry.whole) == _NEW:
            del self.net[entry.whole]

    @property
    def ran_in_net(self) -> bool:
        """Return whether there were calls, and no graph for any of them."""
        return self.settled and not self.captured and bool(self.net)

    def capture_now(self, model: nn.Module) -> None:
        """Capture each method without graphs statically, with its required arguments as tensors, as far as that goes.

        Methods that only dynamo can take wait for their first call.
        """
        for entry in self.entries():
            if not self.captured.of(entry):
                self._capture_alike(entry, model, None)

    def _capture_alike(self, entry: EntryPoint, model: nn.Module, other: Captured | None) -> None:
        """Capture a method statically in the present modes, if it can be, with the arguments of another graph."""
        if not entry.static.allowed or entry.runs_later is not None:
            return
        # Whether lowering pays depends on the sizes of a call.
        if self.settings.pays:
            return
        try:
            key = None if other is None else other.key
            self._trace(entry, model, key or default_key(entry.signature, entry.name.name), None)
        except CaptureDeclined as reason:
            self._refuse_if_symbolic(entry, reason)

    def capture_present(self, model: nn.Module) -> None:
        """Capture each method that has graphs, but none for the present modes, statically, if that can be."""
        for entry in self.entries():
            if (found := self.captured.of(entry)) and self._present(entry, model) is None:
                self._capture_alike(entry, model, found[-1])

    def active(self, model: nn.Module, method: str = "forward") -> Captured:
        """Return the whole graph of a method that was captured last for the present modes.

        Raises:
            SeveralGraphsError: it has several.
            NotCapturedError: it has none for these modes; static capture was tried.
        """
        entry = self.method(method)
        if (captured := self._present(entry, model, torch.is_grad_enabled())) is None:
            found = self.captured.of(entry)
            if not self._became_low(model):
                self._capture_alike(entry, model, found[-1] if found else None)
            if (captured := self._present(entry, model)) is None:
                entry.dynamic.notes_all_modes = True  # so that a later question finds its graph
                raise self._not_captured(entry)
        # One graph of a method in pieces would be taken for the whole.
        calls = captured.calls
        if calls is not None and calls.part:
            parts = [each.calls.part for each in self.captured.of(entry) if each.calls is not None]
            broken = next((part for part in parts if "graph break" in part), calls.part)
            raise self.messages.several(entry, broken)
        owner = entry.owner()
        if calls is not None and calls.form is not None and owner is not None and (what := calls.form.changed(owner)):
            raise self.messages.changed(entry, what)
        if calls is not None and calls.form is None:
            self.messages.warn_of_form(entry, calls.why_not)
        return captured

    def _present(self, entry: EntryPoint, model: nn.Module, gradients: bool = False) -> Captured | None:
        """Return the latest graph that a call would run now, in these modes; forget those for weights of other dtypes.

        Args:
            gradients: it must have been captured with gradients.
        """
        owner = entry.owner()
        if owner is None:
            return None
        for captured in reversed(self.captured.of(entry)):
            if not captured.reads_dtypes_of(model, self.frozen or ()):
                self.captured.drop(entry.static.forget(captured))
            elif captured.fits(owner) and (captured.gradients or not gradients):
                return captured
        return None

    def all_graphs(self, model: nn.Module) -> list[Captured]:
        """Return the graphs that calls of the methods run, capturing statically what can be."""
        self.capture_now(model)
        reached = self.captured.reached((entry, entry.active) for entry in self.methods.values())
        if not self.captured:
            raise self._not_captured(self.method("forward"))
        return reached

    def _not_captured(self, entry: EntryPoint) -> NotCapturedError:
        net = self.net if self.ran_in_net else None
        return self.messages.not_captured(entry, bool(self.captured.of(entry)), net, self.declined)

    def method(self, name: str) -> EntryPoint:
        """Return the entry point of that name; the path of a module stands for its forward.

        Raises:
            ValueError: there is none; with the nearest names.
        """
        named = self.methods.get(name) or self.methods.get(f"{name}.forward")
        if named is None:
            raise ValueError(
                f"method={name!r}: {self.name} was converted with {', '.join(self.methods)}"
                f"{did_you_mean(name, self.methods)}; name others when converting: convert(model, methods=({name!r},))"
            )
        return named.active or named

    def _traceable(self, entry: EntryPoint, model: nn.Module) -> tuple[nn.Module, Callable[..., Any]]:
        """Return what a trace runs on, and its method: a twin of the model, of the original class, on its attributes.

        The model itself stays as it is, since other threads may call it meanwhile. For a function set on the instance,
        which may be bound to the model, it is the model itself.
        """
        if entry.of_instance is not None:
            return model, entry.of_instance
        twin = twin_of(model)
        return twin, MethodType(entry.unbound, twin.get_submodule(entry.name.path))

    def check_policy(self, module: nn.Module) -> None:
        """Raise PolicyError if an override matched nothing, once every method has graphs, or was called."""
        if self._policy_checked or not self.captured:
            return
        # A later method may match what this one does not.
        if not all(entry.called or self.captured.of(entry) for entry in self.entries()):
            return
        everything = [node for each in self.captured for graph in every_graph(each.gm) for node in graph.graph.nodes]
        ops = {notes(node).op.name for node in everything if notes(node).state("op")}
        self.settings.policy.check_matches(ops, dict(module.named_modules()), {node.name for node in everything})
        self.settings.check_regions([name for each in self.captured for name in region_names(each.gm)])
        self._policy_checked = True

    def refuse_if_frozen(self, what: str) -> None:
        if self.frozen is not None:
            raise self.messages.frozen(what)

    def _refuse_if_symbolic(self, entry: EntryPoint, reason: CaptureDeclined) -> None:
        if self.settings.capture == "symbolic":
            raise self.messages.not_symbolic(entry, reason) from None


def is_converted(module: object) -> bool:
    """Return whether ``module`` itself was converted."""
    return isinstance(module, nn.Module) and STATE in module.__dict__


def conversion_of(module: object) -> Conversion:
    """Return the conversion of a converted module.

    Raises:
        ConversionError: it is not converted.
    """
    if not is_converted(module):
        inner = getattr(module, "module", None)
        if is_converted(inner):
            raise ConversionError(
                f"{type(module).__name__} is a wrapper: pass the converted {type(inner).__name__} inside it, "
                "wrapped.module"
            )
        raise ConversionError(
            f"{type(module).__name__} is not converted: call fxprec.convert(model) first, "
            "and pass the module that it returned"
        )
    return module.__dict__[STATE]  # type: ignore[attr-defined]


@contextlib.contextmanager
def original(module: _Module) -> Iterator[_Module]:
    """Within the block the module runs its untouched forward, in its own dtypes."""
    conversion = conversion_of(module)
    conversion.bypassed += 1
    try:
        yield module
    finally:
        conversion.bypassed -= 1
