"""torch._dynamo's bytecode analysis, with a backend, a code object and a configuration of our own.

Every graph that dynamo finds in a forward is handed to a ``GraphReceiver``; what dynamo leaves to the interpreter
(between graph breaks, in a frame that it skips, beyond its recompile limit) is reported with the reason. That code runs
in the *net*: under torch.autocast in the conversion's dtype (``model/net.py``), which is on around each call.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import threading
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any, Final, Protocol

import torch
from torch import nn
from torch.autograd.function import FunctionCtx
from torch.fx import GraphModule

from fxprec.capture.capturing import CAPTURING, fewer_collections
from fxprec.capture.dynamo.as_original import traced
from fxprec.capture.dynamo.extra_guards import ExtraGuards
from fxprec.capture.dynamo.strict import strict
from fxprec.capture.user_code import place
from fxprec.kernels.launch.observers import ANY_MODE, SCRIPT, TRANSFORM, tracing_mode, watcher
from fxprec.passes.graph.annotations import notes
from fxprec.torch_internals import (
    FrameAction,
    disabled_for_dynamo,
    dispatch_mode_stack,
    original_of_compiled,
    passed_frame,
    reset_code,
    skipped_frame,
    tables_of_weights,
    torch_dynamo,
    wrap_inline,
)

#: Patched around each compilation, never around a call (that costs 23 us).
_CONFIG: Final = {
    "recompile_limit": 64,
    # Of all conversions of a class together.
    "accumulated_recompile_limit": 2**20,
    "skip_nnmodule_hook_guards": False,
    "optimize_ddp": False,
    "allow_rnn": True,
    # A step counter: dynamic from its second value on.
    "allow_unspec_int_on_nn_module": True,
    # Drops dynamo's weak references to parameters: torch.utils.swap_tensors refuses a tensor that has any.
    "invalidate_compile_context_weakrefs": True,
    # Only profiles need it, and it takes two calls of Python's at each call.
    "record_runtime_overhead": False,
}
#: Before torch 2.13 dynamo skips inner guards while no module's dict changed; but a class, or a weight's dtype, may.
_BEFORE_2_13: Final = {"use_recursive_dict_tags_for_guards": False, "skip_tensor_guards_with_matching_dict_tags": False}
#: Whether dynamo's cache and its recompile limit are of each capture alone, of the functions that a forward calls, too.
#: Before torch 2.13 they are not: beyond its limit it runs whatever fits, also graphs of models that are gone.
ISOLATES: Final = "isolate_recompiles" in inspect.signature(torch.compile).parameters
_OF_ITS_OWN: Final = {"isolate_recompiles": True} if ISOLATES else {}
#: Skipped frames that hold no tensor work: torch's own, and those without tensors or operations on them.
_HARMLESS: Final = ("skipfiles", "no tensor-related objects", "namedtuple", "No ops traced")

#: Our own functions, on the way into a user's (those of ``fxprec.amp``): what breaks there breaks further in.
_OWN: Final = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep
#: In the reason that dynamo gives beyond its recompile limit.
_BEYOND_LIMIT: Final = "custom frame execution strategy"
#: Where torch 2.10 keeps a reason to itself, such as a graph break in a loop.
_UNTOLD: Final = "this torch does not say why"
#: dynamo's warnings of what it does by itself (its look at the gradients of non-leaf tensors of a module with backward
#: hooks, caches that it goes through) and of breaks, which our report lists.
_NOISE: Final = (
    "The .grad attribute of a Tensor that is not a leaf",
    "Dynamo detected a call to a `functools.lru_cache`",
    "Dynamo does not know how to trace",
)


class GraphReceiver(Protocol):
    """Receiver of what a capture finds: graphs, and reasons why code was left out."""

    def rewritten(self, gm: GraphModule, inputs: list[Any], part: str) -> Callable[..., Any]:
        """Rewrite one captured graph; return what runs it with dynamo's arguments.

        ``part``: why it is a part of the method only; "" where it is the whole.
        """
        ...

    def in_net(self, where: str, why: str) -> None:
        """Note code that runs in the net, outside of our graphs, and the reason."""
        ...

    def seeing_through(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context for one compilation, in which our wrappers are the functions that they stand for."""
        ...

    def without_net(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which autocast is as it is outside of the call."""
        ...

    def met_sparse(self) -> None:
        """Note that the function has a sparse tensor, which no graph takes: what follows is to run without autocast."""
        ...

    def under_others(self) -> str:
        """Return why the frame that is about to run is not captured: autocast is not as we set it; "" where it is."""
        ...


class DynamoCapture:
    """Capture of one function by dynamo, under a code object, and so a cache and a recompile limit, of its own.

    Args:
        function: the original forward, unbound: called as ``function(module, *args, **kwargs)``.
        receiver: gets the graphs and the reasons. Held weakly: dynamo keeps every backend it has seen for good.
        model: in which it runs.
        fullgraph: refuse graph breaks.

    Attributes:
        extra_guards: our guards, for what dynamo assumes without one.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        receiver: GraphReceiver,
        model: nn.Module | None = None,
        *,
        fullgraph: bool = False,
    ) -> None:
        backend = _Backend(receiver)
        context = torch_dynamo().optimize(backend, nopython=fullgraph, **_OF_ITS_OWN)
        twin = _own_code(function)
        self.extra_guards = ExtraGuards(model)
        self._compiling = _Compiling(context.callback, backend, twin, self.extra_guards)  # type: ignore[attr-defined]
        context.callback = self._compiling  # type: ignore[attr-defined]
        self._run = context(twin)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function, capturing what was not captured yet."""
        skipped = self._compiling.skipped
        self._compiling.first.failed = False
        try:
            output = self._run(*args, **kwargs)
        except BaseException:
            # dynamo never tries a function again that it has skipped. After a call that failed these are reset, so that
            # the next one tries them; after one that went through they stay with the interpreter.
            while skipped:
                reset_code(skipped.pop())
            raise
        if skipped:
            skipped.clear()
        return output

    def failed_at_first(self, error: BaseException) -> bool:
        """Return whether the latest call in this thread failed when its first frame was compiled: nothing ran yet."""
        return failed_while_tracing(error) and self._compiling.first.failed


class _FirstFrame(threading.local):
    failed = False


class _Backend:
    """dynamo's backend: what it calls with each graph, and what reports the code that got none.

    dynamo tells few of its reasons; it counts all of them, in tables of its own. So the counts before a compilation are
    kept (``listen``), and a reason whose count is higher afterwards was met in it.

    Attributes:
        within: why the graphs of the frame that is compiled now are parts of the method only; "" if it is the whole.
    """

    def __init__(self, receiver: GraphReceiver) -> None:
        self._receiver = weakref.ref(receiver)
        self.within = ""
        # dynamo's counts by reason: of what it could not take, and of graph breaks.
        self._not_taken: dict[str, int] = {}
        self._breaks: dict[str, int] = {}
        # dynamo's tables that refer to weights of the graphs of this compilation.
        self._tables: list[Any] = []

    def __call__(self, gm: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Report the break that ended a graph, if one did, and have the graph rewritten."""
        self._tables += tables_of_weights(gm)
        broken = getattr(gm, "compile_subgraph_reason", None)
        part = self.within
        if part:
            for placeholder in gm.graph.find_nodes(op="placeholder"):
                notes(placeholder).handed_over = True
        if broken is not None and broken.graph_break:
            stack = [frame for frame in broken.user_stack if not frame.filename.startswith(_OWN)]
            where = stack[-1] if stack else None
            why = str(broken.reason).strip().split("\n")[0]
            here = place(where.filename, where.lineno or 0, where.name) if where else "?"
            if why == "step_unsupported":  # which says nothing
                why = self.given_up() or why
            part = f"{here}: graph break: {why}"
            self.receiver.in_net(here, f"graph break: {why}")
            # It is reported: ``compiled`` is not to report it again.
            self._breaks = dict(_counted("graph_break"))
        return self.receiver.rewritten(gm, inputs, part)

    @property
    def receiver(self) -> GraphReceiver:
        """Return the receiver of the call in which this is asked."""
        receiver = self._receiver()
        assert receiver is not None
        return receiver

    def forget_weights(self) -> None:
        """Clear dynamo's tables after a compilation: ``swap_tensors`` refuses weights that they refer to weakly."""
        for table in self._tables:
            table.clear()
        self._tables.clear()

    def listen(self) -> None:
        """Note dynamo's counts before a compilation."""
        self._not_taken = dict(_counted("unimplemented"))
        self._breaks = dict(_counted("graph_break"))

    def given_up(self) -> str:
        """Return the heading of what dynamo could not take in this compilation; "" if there was nothing."""
        return _latest("unimplemented", self._not_taken)

    def broke_on_sparse(self) -> bool:
        """Return whether it was a sparse tensor that dynamo could not take."""
        return "sparse Tensor" in self.given_up()

    def compiled(self, code: types.CodeType) -> None:
        """Report a break for which there was no graph, since nothing came before it."""
        why = _latest("graph_break", self._breaks)
        if why:
            self.receiver.in_net(_place(code), f"graph break: {why}")

    def skipped(self, code: types.CodeType, reason: str) -> None:
        """Report a function that dynamo leaves to the interpreter."""
        if _BEYOND_LIMIT in reason:
            why = f"beyond dynamo's limit of {_CONFIG['recompile_limit']} captures of one function"
        else:
            why = f"dynamo skips it: {self.given_up() or reason.split(chr(10))[0]}"
        self.receiver.in_net(_place(code), why)


#: Methods of an autograd.Function's context but ``save_for_backward``, which dynamo calls.
_MARKS: Final = frozenset({"mark_dirty", "mark_non_differentiable", "mark_shared_storage", "set_materialize_grads"})


class _Compiling:
    """dynamo's compile callback, with our configuration around it; it reports the functions that dynamo skips.

    A frame that dynamo fails to compile after others ran is left to the interpreter, and so to the net: to run the
    whole forward again would repeat what it wrote.

    Attributes:
        first: whether, in this thread, the first frame failed to compile: nothing ran before.
        skipped: code objects that dynamo left to the interpreter in the present call.
    """

    def __init__(self, inner: Any, backend: _Backend, function: types.FunctionType, extra_guards: ExtraGuards) -> None:
        self._inner = inner
        self._backend = backend
        self._function = function
        self._code = function.__code__
        self._code_around: types.CodeType = wrap_inline(function).__code__  # type: ignore[attr-defined]
        self.first = _FirstFrame()
        # dynamo's cache compares backends through this name.
        self._torchdynamo_orig_backend = inner
        self.skipped: list[types.CodeType] = []
        # It holds the model's attributes, and dynamo this, for good.
        self._extra_guards = weakref.ref(extra_guards)

    def __call__(self, frame: Any, *args: Any, **kwargs: Any) -> Any:
        """Compile a frame, unless it must not be, and report what became of it."""
        if _marks_tensors(frame):
            return skipped_frame("it tells autograd about its tensors, which dynamo leaves out")
        if others := self._backend.receiver.under_others():
            self._backend.receiver.in_net(_place(frame.f_code), others)
            return passed_frame()
        result = self._compiled(frame, args, kwargs)
        if self._backend.broke_on_sparse():
            self._backend.receiver.met_sparse()
        self._report(result, frame.f_code)
        return result

    def _compiled(self, frame: Any, args: Any, kwargs: Any) -> Any:
        """Have dynamo compile a frame; return what it made, or a skipped frame where it failed behind the first one."""
        extra_guards = self._extra_guards()
        # It belongs to what runs this very call.
        assert extra_guards is not None
        with (
            CAPTURING,
            self._backend.receiver.seeing_through(),
            _configured(),
            strict(extra_guards),
            fewer_collections(),
            warnings.catch_warnings(),
        ):
            for message in _NOISE:
                warnings.filterwarnings("ignore", message=message)
            self._backend.listen()
            extra_guards.frame(frame.f_code, frame.f_globals, frame.f_locals)
            self._backend.within = "" if self._is_first(frame) else f"a piece begins in {_place(frame.f_code)}"
            try:
                return traced(
                    functools.partial(self._inner, frame, *args, **kwargs),
                    self._backend.receiver.without_net,
                    first=not self._backend.within,
                )
            except Exception as error:
                if frame.f_code is self._code or not failed_while_tracing(error) or backend_error(error) is not None:
                    self.first.failed = frame.f_code is self._code
                    raise
                return skipped_frame(f"dynamo fails there: {(str(error).splitlines() or [type(error).__name__])[0]}")
            finally:
                self._backend.forget_weights()

    def _report(self, result: Any, code: types.CodeType) -> None:
        """Report a frame that was skipped, or broke; nothing of generated code (``<string>``) and of our own."""
        if "<" in code.co_filename or code.co_filename.startswith(_OWN):
            return
        reason = self._skip_reason(result, code)
        if reason and not any(harmless in reason for harmless in _HARMLESS):
            self.skipped.append(code)
            self._backend.skipped(code, reason)
        else:
            self._backend.compiled(code)

    def _is_first(self, frame: Any) -> bool:
        """Return whether a frame is the function's own, or the one that dynamo puts around torch's, which it skips."""
        around = frame.f_code is self._code_around and frame.f_locals.get("fn") is self._function
        return around or frame.f_code is self._code

    def _skip_reason(self, result: Any, code: types.CodeType) -> str | None:
        """Return why dynamo leaves a function to the interpreter; None where it does not, or nothing is lost."""
        if hasattr(result, "skip_reason") or result is None:
            return getattr(result, "skip_reason", None)
        # Torch before 2.13 gives no reason with its result.
        if result.guarded_code is not None:
            return None
        if result.frame_exec_strategy.cur_action != FrameAction.SKIP:
            return _BEYOND_LIMIT
        # Most of the functions that a forward calls, and dynamo skips without a reason, have no tensors.
        untold = _UNTOLD if code is self._code else ""
        return self._backend.given_up() or untold

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _marks_tensors(frame: Any) -> bool:
    """Return whether a frame is the forward of an autograd.Function that marks its tensors: dynamo drops the marks."""
    if _MARKS.isdisjoint(frame.f_code.co_names):
        return False
    return any(isinstance(value, FunctionCtx) for value in frame.f_locals.values())


def _configured() -> Any:
    config = torch_dynamo().config
    ours = _CONFIG | (_BEFORE_2_13 if torch.__version__ < "2.13" else {})
    return config.patch({key: value for key, value in ours.items() if hasattr(config, key)})


def _counted(category: str) -> dict[str, int]:
    """Return dynamo's own count of the constructs that it met and could not take, by reason."""
    return torch_dynamo().utils.counters[category]


def _latest(category: str, seen: dict[str, int]) -> str:
    """Return the heading of a reason that was counted since, the last one in dynamo's table; "" if there is none."""
    new = [reason for reason, times in _counted(category).items() if times > seen.get(reason, 0)]
    return new[-1].rpartition("***\n\n")[2].split("\n")[0] if new else ""


def _place(code: types.CodeType) -> str:
    return place(code.co_filename, code.co_firstlineno, code.co_name)


def _own_code(function: Callable[..., Any]) -> types.FunctionType:
    """Return a twin of ``function`` with a code object of its own: dynamo counts recompilations per code object."""
    if not disabled_for_dynamo(function):
        function = original_of_compiled(function)
    if not isinstance(function, types.FunctionType):
        inner = function

        def call(*args: Any, **kwargs: Any) -> Any:
            return inner(*args, **kwargs)

        function = call
    twin = types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin


def met_a_trace(error: BaseException) -> bool:
    """Return whether dynamo refused to run because torch.fx traces something, in whatever thread."""
    return "using FX to symbolically trace" in str(error)


def failed_while_tracing(error: BaseException) -> bool:
    """Return whether an op failed on dynamo's fake tensors (nothing has run yet), not in a graph or in eager code."""
    return isinstance(error, torch_dynamo().exc.TorchDynamoException)


def backend_error(error: BaseException) -> BaseException | None:
    """Return the error of our own passes that dynamo wrapped, if it is one."""
    if isinstance(error, torch_dynamo().exc.BackendCompilerFailed):
        return error.__cause__ or getattr(error, "inner_exception", None)
    return None


def why_not_now() -> str | None:
    """Return why dynamo must not be entered now, since it would skip the frame for good; None where it may be."""
    if watcher(ANY_MODE):
        if (tracing := tracing_mode()) is not None:
            return f"under {type(tracing).__name__}"
        for mode in dispatch_mode_stack():
            if not getattr(type(mode), "ignore_compile_internals", lambda: False)():
                return f"under the dispatch mode {type(mode).__name__}, in which dynamo runs no compiled code"
    seen_by = watcher(TRANSFORM, SCRIPT)
    return None if seen_by is None else f"under {seen_by.name}"
