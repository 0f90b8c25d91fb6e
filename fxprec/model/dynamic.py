"""Captures a method by dynamo: every graph is rewritten, and torch.autocast runs what stays outside of graphs.

A forward that symbolic tracing cannot take is captured at its first call. Every graph that dynamo finds is rewritten;
what it leaves to the interpreter runs under ``torch.autocast`` in the same dtype and is recorded: nothing is silently
FP32. dynamo traces under autocast too, where tensors are low that are FP32 in the original program: dtypes that the
forward asks of them are followed (``capture/dynamo/as_original.py``).

Modules of ``torch.nn`` that FSDP shards by themselves need a frame of their own: a call of a sharded module is a graph
break, for its hooks, and what comes next is the frame of its ``forward``. Of a class of the user's dynamo captures it;
frames of torch's own code (``nn.Sequential``, ``nn.Linear``) it skips unless it is within a graph already.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule

from fxprec.capture.capturing import CAPTURING
from fxprec.capture.dynamo import analysis as dynamo
from fxprec.capture.dynamo.graph import own_copy, own_graph
from fxprec.capture.originals import Wrappers
from fxprec.kernels.torch_internals import is_fx_tracing
from fxprec.model.method import Call, Method
from fxprec.model.net import RUNS_AS_TOLD, RUNS_FP32, Net, turn_off, under_others, without_net
from fxprec.passes.graph.annotations import SPARSE
from fxprec.programs.call_form import form_of_call
from fxprec.programs.dynamo_programs import ArgumentProgram, Calls, ProgramsByMemory, Ran
from fxprec.programs.memory import mark_all_shared, mark_shared
from fxprec.programs.packed_weights import PackedWeights, rewrite
from fxprec.programs.program import Program
from fxprec.settings import Settings
from fxprec.shadows.store import ShadowStore
from fxprec.torch_internals import skipped_by_dynamo, wrap_inline


class Resources:
    """Settings, weights in the low dtype and wrappers that the graphs of one converted model are made by and run on.

    Attributes:
        settings: of the conversion.
        store: the low copies of its weights.
        wrappers: the functions that stand in the places of its methods.
        packed: the packed copies of the weights of a frozen model; None: it runs on plain ones.
    """

    def __init__(self, settings: Settings, packs: bool) -> None:
        self.settings = settings
        self.store = ShadowStore(settings.dtype)
        self.wrappers = Wrappers()
        self.packed = self.new_packed() if packs else None

    def new_packed(self) -> PackedWeights | None:
        """Return a store of packed weights, where what runs the graphs is not inductor, which has its own."""
        if self.settings.executor != "eager":
            return None
        return PackedWeights(self.settings.context(gradients=False), self.store)

    def net_context(self) -> contextlib.AbstractContextManager[Any]:
        """Return torch.autocast in the low dtype, for what runs outside of the graphs; at O0 a context of nothing."""
        if self.settings.policy.level == "O0":
            return contextlib.nullcontext()
        return Net(self.settings.device, self.settings.dtype)


@contextlib.contextmanager
def frames_of_shards(module: nn.Module) -> Iterator[None]:
    """Within the block dynamo captures the modules of torch's own in ``module`` that FSDP shards by themselves.

    They get a ``forward`` in their ``__dict__`` that dynamo does not skip. FSDP must be in use, so that it is imported.
    """
    fsdp = sys.modules["torch.distributed.fsdp"]
    shards = [part for part in module.modules() if part is not module and isinstance(part, fsdp.FSDPModule)]
    framed = [part for part in shards if "forward" not in part.__dict__ and skipped_by_dynamo(part.forward)]
    for part in framed:
        part.__dict__["forward"] = wrap_inline(part.forward)
    try:
        yield
    finally:
        for part in framed:
            part.__dict__.pop("forward", None)


class LeftToNet(Exception):
    """Dynamo cannot take the forward, of which nothing ran yet."""


class DynamicGraphs:
    """Dynamic capture of one method.

    It is also the ``GraphReceiver`` of its ``DynamoCapture``, which calls back, while dynamo compiles in a call:
    ``rewritten`` for each graph, ``in_net``, ``met_sparse``, ``under_others`` and ``without_net`` about what stays
    outside, and ``seeing_through``.

    Args:
        resources: of the model.
        method: of which.

    Attributes:
        seeing_through: makes the context of a compilation, in which our wrappers are the functions around which they
            stand.
        found: the graphs captured since somebody took them: graph, program, mode of the method's module, its calls.
        notes_all_modes: each call notes the modes of all modules, since somebody asked for a graph that fits them.
        net_notes: 'where' -> 'why' of what runs outside of graphs, since somebody took these.
    """

    def __init__(self, resources: Resources, method: Method) -> None:
        self._resources = resources
        self._method = method
        self.seeing_through = resources.wrappers.compiled
        self._capture: dynamo.DynamoCapture | None = None
        self._under_net = True
        # True: a call met a sparse tensor. False: the model has none, and of a call the arguments alone are looked at.
        # None: nobody looked yet.
        self._sparse: bool | None = None
        self._model: weakref.ref[nn.Module] | None = None
        self.found: list[tuple[GraphModule, Program, bool, Calls]] = []
        self._ran = Ran()
        self._calls = 0
        self.notes_all_modes = False
        self.net_notes: dict[str, str] = {}
        #: They live here. dynamo keeps for good the function that runs one (``rewritten``), which refers to it weakly.
        self._programs: list[ProgramsByMemory] = []

    def run(self, call: Call) -> Any:
        """Run the graphs for a call, capturing them if need be.

        Raises:
            LeftToNet: dynamo cannot take it; nothing ran.
        """
        capture = self._capture
        module = self._method.stand_in(call.module)
        call = call._replace(module=module)
        # At the first call: two threads must not make two.
        if capture is None:
            with CAPTURING:
                self._model = weakref.ref(call.model)
                capture = self._capture = self._capture or dynamo.DynamoCapture(self._method.unbound, self, call.model)
        if not self._sparse and not self._resources.settings.policy.lowers_parameters:
            known = () if self._sparse is False else (*call.model.parameters(), *call.model.buffers())
            self._sparse = _any_sparse((*known, *call.args, *call.kwargs.values()))
        with self._ran.noted() as ran:
            output = self._run(capture, call)
            self._calls += 1
            # What ran tells of a graph for which modes, and in which form, it was called.
            for calls, inputs, results in ran:
                calls.number = self._calls
                calls.note_mode(module, self.notes_all_modes)
                if not calls.looked_at:
                    form_of = functools.partial(
                        form_of_call,
                        model=call.model,
                        owner=(next(iter(inspect.signature(self._method.unbound).parameters), ""), module),
                        signature=self._method.signature,
                        call=(call.args, call.kwargs),
                        inputs=inputs,
                        results=results,
                        output=output,
                    )
                    calls.look(form_of)
        return output

    def _run(self, capture: dynamo.DynamoCapture, call: Call) -> Any:
        try:
            with contextlib.ExitStack() as stack:
                if self._under_net and not self._sparse:
                    stack.enter_context(self._resources.net_context())
                if self._resources.store.come_and_go:
                    stack.enter_context(frames_of_shards(call.model))
                return capture.call(call.module, *call.args, **call.kwargs)
        except RuntimeError as error:
            return self._after(error, call)

    def changed(self) -> str | None:
        """Return what changed that dynamo has no guard for, so that all must be captured anew, or None."""
        return None if self._capture is None else self._capture.extra_guards.failing()

    def rewritten(self, gm: GraphModule, inputs: list[Any], part: str) -> Callable[..., Any]:
        """Rewrite one graph, as dynamo's backend, to run on its arguments with shadows in the weights' places."""
        make = functools.partial(self._argument_program, part=part)
        # The first program serves this call; others come when arguments share memory in other ways.
        program = make(gm, inputs, any_memory=False)
        # Only weak references: dynamo keeps this function with the user's code object, which outlives the model.
        store, ran = weakref.ref(self._resources.store), self._ran
        programs = ProgramsByMemory(None if program.memory is None else own_copy(gm), make, program)
        self._programs.append(programs)
        known = weakref.ref(programs)
        # Where dynamo does not keep the graphs of different models apart, a call of another model of the same code may
        # come here when this one is gone. For that the graph is kept as dynamo captured it.
        original = None if dynamo.ISOLATES else gm.forward

        def run(*given: Any) -> Any:
            serving, weights = known(), store()
            if serving is None or weights is None:
                # This model is gone, and dynamo runs what it made for it in a call of another one of the same code.
                assert original is not None
                return original(*given)
            return serving.serving(given).run(weights, given, ran)

        return run

    def _argument_program(self, gm: GraphModule, inputs: Sequence[Any], any_memory: bool, part: str) -> ArgumentProgram:
        """Rewrite one graph for these arguments; ``any_memory``: for any, however they share memory."""
        model, module = self._model and self._model(), self._method.owner()
        assert model is not None and module is not None  # they run this very call
        gm, arguments = own_graph(gm, inputs, model, self._method.name.path)
        calls = Calls.of(gm, part)
        if any_memory:
            mark_all_shared(gm)
        else:
            placeholders = gm.graph.find_nodes(op="placeholder")
            mark_shared(gm, dict(zip(placeholders, [inputs[i] for i in arguments.inputs], strict=True)))
        program = rewrite(gm, self._resources.settings, self._resources.packed)
        self.found.append((gm, program, module.training, calls))
        return ArgumentProgram.of(program, arguments, inputs, any_memory, calls)

    def without_net(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which autocast is as it is outside of the net."""
        return without_net()

    def met_sparse(self) -> None:
        """Go on without autocast, in this call and in later ones; not at O3, whose low weights need it."""
        if not self._sparse and not self._resources.settings.policy.lowers_parameters:
            self._sparse = True
            turn_off()

    def under_others(self) -> str:
        """Return why the frame that is about to run must be left alone: the user's own autocast is on; "" if not."""
        return RUNS_AS_TOLD if under_others() else ""

    def in_net(self, where: str, why: str) -> None:
        """Note code outside our graphs, and the reason."""
        if self._sparse:
            why = f"{why}; {RUNS_FP32} autocast has few kernels for sparse tensors"
        self.net_notes.setdefault(where, why)

    def _after(self, error: RuntimeError, call: Call) -> Any:
        """Decide what to do about an error of a call: perhaps it was none of the model's own."""
        capture = self._capture
        assert capture is not None
        # An error of the passes comes wrapped in one of dynamo's: the user gets the inner one, as fxprec's own fault.
        ours = dynamo.backend_error(error)
        if ours is not None:
            raise ours
        # dynamo refuses to run while any thread traces by torch.fx, before anything has run: wait for that thread.
        if dynamo.met_a_trace(error):
            with CAPTURING:
                # A trace of this thread's own would go on for ever.
                if not is_fx_tracing():
                    return self._run(capture, call)
        # Unless the first frame failed to compile, a part of the forward ran, or all of it: it must not run again.
        if not capture.failed_at_first(error):
            raise error
        # What eager autocast cannot run may run without it; if that fails as well, the first error is told.
        if self._under_net:
            with contextlib.suppress(Exception):
                return self._captured_whole_without_net(call)
        raise LeftToNet(f"dynamo: {(str(error).splitlines() or [type(error).__name__])[0]}")

    def _captured_whole_without_net(self, call: Call) -> Any:
        """Capture as a whole, with autocast off, what eager autocast cannot run (mixed dtypes in scatter_add).

        The net was left with the error, by the ``with`` of ``_run``. From now on calls run without it.
        """
        capture = dynamo.DynamoCapture(self._method.unbound, self, call.model, fullgraph=True)
        found, notes = [*self.found], {**self.net_notes}
        try:
            output = capture.call(call.module, *call.args, **call.kwargs)
        except BaseException:
            self.found, self.net_notes = found, notes
            raise
        self._capture, self._under_net = capture, False
        self.net_notes = {}
        return output


def _any_sparse(values: Sequence[Any]) -> bool:
    """Return whether one of these is a sparse tensor."""
    return any(isinstance(value, Tensor) and value.layout in SPARSE for value in values)
