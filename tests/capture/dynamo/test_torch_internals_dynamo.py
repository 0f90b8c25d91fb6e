"""What is relied on of dynamo and inductor, a test a name."""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import os
import random
import subprocess
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from fxprec import torch_internals as of_fxprec
from fxprec.capture.dynamo import analysis as dynamo
from fxprec.capture.dynamo.extra_guards import ExtraGuards
from fxprec.capture.dynamo.strict import strict
from private_names import contract


def _plus_one(x: Tensor) -> Tensor:
    return x + 1


@contract("fxprec", "torch_dynamo")
def test_dynamo_has_what_a_capture_is_made_of() -> None:
    package = of_fxprec.torch_dynamo()
    graphs: list[object] = []
    frames: list[str] = []

    def backend(gm: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        graphs.append(gm)
        return gm.forward

    context = package.optimize(backend, nopython=False)
    inner = context.callback

    def callback(frame: Any, *rest: object) -> object:
        frames.append(frame.f_code.co_name)
        return inner(frame, *rest)

    callback._torchdynamo_orig_backend = inner  # type: ignore[attr-defined]
    context.callback = callback
    with package.config.patch(recompile_limit=3):
        assert context(types.FunctionType(_plus_one.__code__.replace(), globals()))(torch.ones(1)).item() == 2
    assert len(graphs) == 1 and "_plus_one" in frames
    before = dict(package.utils.counters["graph_break"])
    torch.compile(lambda x: (x + 1, torch._dynamo.graph_break(), x * 2), backend=backend)(torch.ones(1))
    assert package.utils.counters["graph_break"] != before
    assert issubclass(package.exc.BackendCompilerFailed, package.exc.TorchDynamoException)


@contract("fxprec", "dynamo_classes")
def test_what_dynamo_takes_liberties_with_can_be_refused() -> None:
    """Each of them is met, so that what ``strict`` puts in its place is called."""
    kept, drawn = functools.cache(_plus_one), random.Random(0)

    def cached(x: Tensor) -> Tensor:
        return kept(x) * 2

    def random_number(x: Tensor) -> Tensor:
        return x * drawn.random()

    def generator(x: Tensor) -> Iterator[Tensor]:
        return (part + 1 for part in (x, x))

    classes = of_fxprec.dynamo_classes()
    assert issubclass(classes.graph_break, _errors().TorchDynamoException)
    for function in (cached, random_number, generator):
        compiled = torch.compile(function, backend="eager", fullgraph=True)
        compiled(torch.ones(1))
        torch._dynamo.reset()
        with strict(ExtraGuards()), pytest.raises(_errors().TorchDynamoException):
            compiled(torch.ones(1))


def test_a_trace_can_be_ended_at_a_node_and_made_again_without_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``dynamo.bits`` does, and the graph serves later calls, which are under autocast again."""
    classes = of_fxprec.dynamo_classes()
    create, run = classes.graph.create_node, classes.frame.run
    made: list[object] = []
    dtypes: list[torch.dtype] = []

    def create_node(graph: Any, op: str, target: Any, *args: Any, **more: Any) -> Any:
        made.append(target)
        return create(graph, op, target, *args, **more)

    def run_without(frame: Any) -> None:
        with torch.autocast("cpu", enabled=False):
            run(frame)

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        dtypes.append(next(n for n in gm.graph.nodes if n.target is torch.mm).meta["example_value"].dtype)
        return gm.forward

    monkeypatch.setattr(classes.graph, "create_node", create_node)
    monkeypatch.setattr(classes.frame, "run", run_without)
    compiled, x = torch.compile(lambda x: torch.mm(x, x), backend=backend), torch.ones(2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(3):
            compiled(x)
    assert torch.mm in made and dtypes == [torch.float32]


@contract("fxprec", "unwrapped", "type_of_error")
def test_errors_scalars_and_questions_for_the_compiler_are_seen() -> None:
    """``strict`` answers as the interpreter does; plain dynamo would not."""
    half = numpy.float64(0.5)

    def raises() -> None:
        raise KeyError("two")

    def text(x: Tensor) -> tuple[Tensor, str]:
        y = x + 1
        try:
            raises()
        except KeyError as error:
            return y, str(error)
        return y, ""

    def kind(x: Tensor) -> tuple[Tensor, bool]:
        return x + 1, isinstance(half, float)

    def method(x: Tensor) -> tuple[Tensor, bool]:
        return x + 1, hasattr(half, "is_integer")

    def asks(x: Tensor) -> tuple[Tensor, bool]:
        return x + 1, not torch.compiler.is_compiling()

    def sign(x: Tensor, number: float = 2.0) -> tuple[Tensor, bool]:
        return x + 1, math.copysign(1, number) < 0

    x = torch.ones(1)
    for function in (text, kind, method, asks):
        assert torch.compile(function, backend="eager")(x)[1] != function(x)[1]
        torch._dynamo.reset()
        with strict(ExtraGuards()):
            assert torch.compile(function, backend="eager")(x)[1] == function(x)[1]
    compiled = torch.compile(sign, backend="eager")
    with strict(ExtraGuards()):
        assert [compiled(x, number)[1] for number in (2.0, 3.0, -0.0, 0.0)] == [False, False, True, False]


@contract("fxprec", "with_function", "guard_identity")
def test_another_function_can_be_traced_in_a_methods_place(monkeypatch: pytest.MonkeyPatch) -> None:
    class Holder(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1

    def other(holder: Holder, x: Tensor) -> Tensor:
        return x + 2

    classes = of_fxprec.dynamo_classes()
    build, forward = classes.inliner.build_inline_tracer, Holder.forward

    def built(parent: Any, function: Any, args: Any, *rest: Any, **more: Any) -> Any:
        if of_fxprec.function_behind(function) is forward:
            assert of_fxprec.guard_identity(args[0].source)
            function = of_fxprec.with_function(function, other)
        return build(parent, function, args, *rest, **more)

    monkeypatch.setattr(classes.inliner, "build_inline_tracer", staticmethod(built))
    holder = Holder()
    assert torch.compile(lambda x: holder(x) * 1, backend="eager")(torch.ones(1)).item() == 3


@contract("fxprec", "function_behind", "value_behind", "outlives_call", "guarded_value", "add_guard")
def test_what_a_capture_looks_at_is_told_and_can_be_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    classes = of_fxprec.dynamo_classes()
    inlined: list[tuple[object, object, object]] = []
    lasting: list[bool] = []
    build, guard_on = classes.inliner.build_inline_tracer, classes.guards.EQUALS_MATCH

    def built(parent: Any, function: Any, args: Any, *rest: Any, **more: Any) -> Any:
        inlined.append((of_fxprec.function_behind(function), *of_fxprec.value_behind(args[0])))
        lasting.append(of_fxprec.outlives_call(args[0], {"holder"}))
        return build(parent, function, args, *rest, **more)

    def guarded(builder: Any, guard: Any, *rest: Any, **more: Any) -> None:
        guard_on(builder, guard, *rest, **more)
        if repr(of_fxprec.guarded_value(builder, guard)) == "0.0":
            of_fxprec.add_guard(builder, guard, lambda value: repr(value) == "0.0", "the very same")

    monkeypatch.setattr(classes.inliner, "build_inline_tracer", staticmethod(built))
    monkeypatch.setattr(classes.guards, "EQUALS_MATCH", guarded)
    graphs: list[torch.fx.GraphModule] = []

    def backend(gm: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        graphs.append(gm)
        return gm.forward

    holder = types.SimpleNamespace(number=0.0)

    def read(held: types.SimpleNamespace) -> float:
        return held.number

    compiled = torch.compile(lambda x: _plus_one(x) * read(holder), backend=backend)
    compiled(torch.ones(1))
    compiled(torch.ones(1))
    assert [function for function, _, _ in inlined] == [_plus_one, read] and len(graphs) == 1
    assert inlined[0][2] == [Tensor] and lasting == [False, True]
    assert inlined[1][1:] == (holder, [types.SimpleNamespace])
    holder.number = -0.0  # equal
    compiled(torch.ones(1))
    assert len(graphs) == 2


@contract("fxprec", "guard_class_attribute", "GUARDS_CLASSES")
def test_a_constant_of_a_class_is_guarded_or_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    class Holder:
        number = 2.0

    if not of_fxprec.GUARDS_CLASSES:
        variables = of_fxprec.dynamo_classes().user_class
        read = variables.var_getattr

        def var_getattr(variable: Any, frame: Any, name: str) -> Any:
            found = read(variable, frame, name)
            of_fxprec.guard_class_attribute(variable, found, name)
            return found

        monkeypatch.setattr(variables, "var_getattr", var_getattr)
    held, x = Holder(), torch.ones(1)
    compiled = torch.compile(lambda x: x * type(held).number, backend="eager")
    assert compiled(x).item() == 2
    Holder.number = 3.0
    assert compiled(x).item() == 3


@contract("fxprec", "guard_argument", "guard_order")
def test_an_argument_and_the_order_of_a_dict_can_be_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    classes = of_fxprec.dynamo_classes()
    read, install = (
        getattr(classes.tensor, classes.attribute), classes.dictionary.install_dict_keys_match_guard,
    )  # fmt: skip

    def is_result(builder: Any, guard: Any) -> None:
        then = of_fxprec.guarded_value(builder, guard).grad_fn is None
        of_fxprec.add_guard(builder, guard, lambda now: (now.grad_fn is None) is then, "grad_fn")

    def attribute(variable: Any, frame: Any, name: str, *rest: Any) -> Any:
        of_fxprec.guard_argument(variable, frame, is_result)
        return read(variable, frame, name, *rest)

    def keys(variable: Any) -> None:
        of_fxprec.guard_order(variable)
        install(variable)

    monkeypatch.setattr(classes.tensor, classes.attribute, attribute)
    monkeypatch.setattr(classes.dictionary, "install_dict_keys_match_guard", keys)

    def asks(x: Tensor) -> tuple[Tensor, bool]:
        return x * 1, x.grad_fn is None

    def reads(given: dict[str, Tensor]) -> Tensor:
        names = tuple(given)
        return given["a"] * ord(names[0])

    leaf = torch.ones(1, requires_grad=True)
    compiled = torch.compile(asks, backend="eager")
    assert [compiled(x)[1] for x in (leaf, leaf * 1)] == [True, False]
    compiled = torch.compile(reads, backend="eager")
    for order in ("abc", "cba", "bca"):
        assert compiled({name: torch.ones(1) for name in order}).item() == ord(order[0])


@contract("fxprec", "looks_into")
def test_the_built_in_part_of_an_object_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    class Named(dict[str, int]):
        name = "ab"

    classes = of_fxprec.dynamo_classes()
    read = getattr(classes.object, classes.attribute)
    seen: dict[str, bool] = {}

    def attribute(variable: Any, *args: Any) -> Any:
        seen[type(variable.value).__name__] = of_fxprec.looks_into(variable)
        return read(variable, *args)

    monkeypatch.setattr(classes.object, classes.attribute, attribute)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, one, other: x * len(one.name) * other.scale, backend="eager")
    assert compiled(torch.ones(1), Named(), types.SimpleNamespace(scale=3)).item() == 6
    assert seen["SimpleNamespace"] is False and seen.get("Named", True)  # a class of its own reads it in some torch


@contract("fxprec", "guard_source", "guard_absence", "add_relation", "is_key_of_dict")
def test_objects_can_be_guarded_by_what_they_lack_and_are_to_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    classes = of_fxprec.dynamo_classes()
    build, read = classes.inliner.build_inline_tracer, getattr(classes.object, classes.attribute)
    keys: list[bool] = []

    def built(parent: Any, function: Any, args: Any, *rest: Any, **more: Any) -> Any:
        one, other = (each.source for each in args)

        def guard_on(builder: Any, guard: Any) -> None:
            of_fxprec.add_relation(builder, guard, other, operator.is_)

        of_fxprec.guard_source(one, guard_on)
        keys.extend(map(of_fxprec.is_key_of_dict, (one, other)))
        return build(parent, function, args, *rest, **more)

    def attribute(variable: Any, frame: Any, name: str, *rest: Any) -> Any:
        try:
            return read(variable, frame, name, *rest)
        except classes.absent:
            of_fxprec.guard_absence(variable.source, variable.value, name)
            raise

    def same(one: types.SimpleNamespace, other: types.SimpleNamespace) -> bool:
        try:
            return one.answer
        except AttributeError:
            return False

    monkeypatch.setattr(classes.inliner, "build_inline_tracer", staticmethod(built))
    monkeypatch.setattr(classes.object, classes.attribute, attribute)
    first, second = types.SimpleNamespace(), types.SimpleNamespace()
    graphs: list[torch.fx.GraphModule] = []

    def backend(gm: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        graphs.append(gm)
        return gm.forward

    compiled = torch.compile(lambda x, one, other: (x * 1, same(one, other)), backend=backend)
    for other in (second, types.SimpleNamespace(), first, second):
        assert compiled(torch.ones(1), first, other)[1] is False
    assert len(graphs) == 2 and not any(keys)
    first.answer = True
    assert compiled(torch.ones(1), first, second)[1] is True


@contract("fxprec", "raw_environment")
def test_the_environment_has_a_dict_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    before = of_fxprec.raw_environment(os.environ).copy()
    assert of_fxprec.raw_environment(os.environ) == before
    monkeypatch.setenv("FXPREC_TEST", "1")
    assert len(of_fxprec.raw_environment(os.environ)) == len(before) + 1


def _errors() -> Any:
    return of_fxprec.torch_dynamo().exc


@contract("fxprec", "hide_from_dynamo", "shown_to_dynamo", "disabled_for_dynamo", "original_of_compiled")
def test_a_hidden_function_is_left_to_the_interpreter() -> None:
    def hidden(x: Tensor) -> Tensor:
        return x + 1

    assert not of_fxprec.disabled_for_dynamo(hidden) and of_fxprec.disabled_for_dynamo(
        torch.compiler.disable(_plus_one)
    )
    of_fxprec.hide_from_dynamo(hidden, "since it is hidden")
    assert of_fxprec.disabled_for_dynamo(hidden)
    graphs: list[torch.fx.GraphModule] = []

    def backend(gm: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        graphs.append(gm)
        return gm.forward

    compiled = torch.compile(lambda x: hidden(x * 2) * 3, backend=backend)
    assert compiled(torch.ones(1)).item() == 9 and len(graphs) == 2
    with pytest.raises(Exception, match="since it is hidden"):
        torch.compile(lambda x: hidden(x * 2), backend=backend, fullgraph=True)(torch.ones(1))
    with of_fxprec.shown_to_dynamo([hidden]):  # a capture of ours looks into it, others wait for its end
        graphs.clear()
        assert torch.compile(lambda x: hidden(x * 2) * 3, backend=backend)(torch.ones(1)).item() == 9
        assert len(graphs) == 1 and not of_fxprec.disabled_for_dynamo(hidden)
    assert of_fxprec.disabled_for_dynamo(hidden)
    plain = torch.compile(_plus_one, backend=backend)
    assert of_fxprec.original_of_compiled(plain) is _plus_one is of_fxprec.original_of_compiled(_plus_one)


@contract("fxprec", "set_eval_frame", "reset_code", "FrameAction", "skipped_frame", "passed_frame")
def test_frames_are_skipped_and_looked_at_again() -> None:
    assert of_fxprec.set_eval_frame(None) is None
    seen: list[str] = []
    passed = True

    def callback(frame: Any, *_: object) -> object:
        seen.append(frame.f_code.co_name)
        return of_fxprec.passed_frame() if passed else of_fxprec.skipped_frame("for a test")

    function = types.FunctionType(_plus_one.__code__.replace(), globals())
    context = of_fxprec.torch_dynamo().optimize("eager")
    callback._torchdynamo_orig_backend = None  # type: ignore[attr-defined]
    context.callback = callback
    run = context(function)
    for _ in range(2):
        assert run(torch.ones(1)).item() == 2
    assert seen.count("_plus_one") == 2  # asked each time
    passed = False
    seen.clear()
    for _ in range(2):
        assert run(torch.ones(1)).item() == 2
    assert seen.count("_plus_one") == 1  # skipped for good
    of_fxprec.reset_code(function.__code__)
    run(torch.ones(1))
    assert seen.count("_plus_one") == 2
    skipped = of_fxprec.skipped_frame("for a test")
    assert skipped.guarded_code is None
    assert of_fxprec.FrameAction.SKIP != of_fxprec.FrameAction.DEFAULT


@contract("fxprec", "is_compiled")
def test_a_compiled_module_is_told() -> None:
    model = nn.Linear(1, 1)
    assert of_fxprec.is_compiled(torch.compile(model, backend="eager")) and not of_fxprec.is_compiled(model)


@contract("fxprec", "skipped_by_dynamo", "wrap_inline")
def test_torchs_own_code_is_skipped_unless_it_is_wrapped() -> None:
    graphs: list[object] = []

    def backend(gm: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        graphs.append(gm)
        return gm.forward

    linear = nn.Linear(1, 1)
    assert of_fxprec.skipped_by_dynamo(linear.forward) and not of_fxprec.skipped_by_dynamo(_plus_one)
    of_fxprec.torch_dynamo().optimize(backend)(of_fxprec.wrap_inline(linear.forward))(torch.ones(1, 1))
    assert len(graphs) == 1


@contract("fxprec", "tag_activation_checkpoint", "checkpoint_context")
def test_dynamo_tags_a_checkpointed_region() -> None:
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    def contexts() -> object:
        return create_selective_checkpoint_contexts(lambda *_, **__: CheckpointPolicy.PREFER_RECOMPUTE)

    for given, expected in (({}, None), ({"context_fn": contexts}, contexts)):
        graphs: list[torch.fx.GraphModule] = []

        def backend(gm: torch.fx.GraphModule, _: object, graphs=graphs) -> Callable[..., object]:
            graphs.append(gm)
            return gm.forward

        def function(x: Tensor, given=given) -> Tensor:
            return checkpoint(torch.sin, x, use_reentrant=False, **given)

        torch.compile(function, backend=backend, fullgraph=True)(torch.ones(1, requires_grad=True))
        (node,) = graphs[0].graph.find_nodes(op="call_function", target=of_fxprec.tag_activation_checkpoint())
        body = graphs[0].get_submodule(str(node.args[0].target))
        assert of_fxprec.checkpoint_context(body) is expected


# -- what dynamo says, by which it is understood -----------------------------------------------------------------------


class _Notes:
    """Receives the graphs of a capture as they are, and notes what is outside of them."""

    def __init__(self) -> None:
        self.graphs = 0
        self.outside: list[str] = []

    def rewritten(self, gm: torch.fx.GraphModule, inputs: list[Any], part: str) -> Callable[..., Any]:
        self.graphs += 1
        return gm.forward

    def in_net(self, where: str, why: str) -> None:
        self.outside.append(why)

    def without_net(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def met_sparse(self) -> None:
        return None

    def under_others(self) -> str:
        return ""

    def seeing_through(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def test_a_frame_beyond_the_limit_is_told_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(dynamo._CONFIG, "recompile_limit", 2)  # type: ignore[arg-type]
    notes = _Notes()

    def function(x: Tensor, kind: str) -> Tensor:
        return x + len(kind) if kind < "b" else x * 2

    capture = dynamo.DynamoCapture(function, notes)
    for kind in ("a", "ab", "b", "c", "d"):
        capture.call(torch.ones(1), kind)
    assert notes.graphs == 2
    assert notes.outside == ["beyond dynamo's limit of 2 captures of one function"]


def test_a_frame_without_tensors_is_no_loss() -> None:
    notes = _Notes()

    def number() -> int:
        return 3

    def function(x: Tensor) -> Tensor:
        y = x + 1
        torch._dynamo.graph_break()
        return y * number()

    assert dynamo.DynamoCapture(function, notes).call(torch.ones(1)).item() == 6
    assert notes.graphs == 2 and [why.partition(":")[0] for why in notes.outside] == ["graph break"]


def test_a_break_in_a_loop_is_named() -> None:
    notes = _Notes()

    def function(x: Tensor) -> Tensor:
        for _ in range(2):
            x = x + 1
            if x.sum() > 0:
                x = x * 2
        return x

    assert dynamo.DynamoCapture(function, notes).call(torch.ones(1)).item() == 10
    told = "graph break in loop" if torch.__version__ >= "2.11" else "this torch does not say why"
    assert notes.outside == [f"dynamo skips it: {told}"]


def test_what_dynamo_does_by_itself_is_no_warning() -> None:
    cached = functools.lru_cache(lambda factor: torch.full((1,), factor))
    notes = _Notes()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dynamo.DynamoCapture(lambda x: x * cached(2.0), notes).call(torch.ones(1))
    with pytest.warns(UserWarning) as told:
        torch.compile(lambda x: x * cached(2.0), backend="eager")(torch.ones(1))
    assert all(any(str(each.message).startswith(noise) for noise in dynamo._NOISE) for each in told)


def test_a_trace_that_is_in_dynamos_way_is_known_by_its_error() -> None:
    errors: list[BaseException] = []
    compiled = torch.compile(_plus_one, backend="eager")

    def traced(x: Tensor) -> Tensor:
        try:
            compiled(torch.ones(1))
        except RuntimeError as error:
            errors.append(error)
        return x + 1

    torch.fx.symbolic_trace(traced)
    assert len(errors) == 1 and dynamo.met_a_trace(errors[0])


_IMPORTS_DYNAMO = """
import sys, torch
from fxprec.torch_internals import dynamo_sees_torchs_own_call

own = torch.nn.Module.__call__
assert "torch._dynamo.utils" not in sys.modules
with dynamo_sees_torchs_own_call():
    torch.nn.Module.__call__ = lambda *args: None  # as torch.fx does
    import torch._dynamo.variables.nn_module as variables
    torch.nn.Module.__call__ = own
assert torch._dynamo.utils.unpatched_nn_module_call is own
assert variables.unpatched_nn_module_call is own
"""


@pytest.mark.slow
@contract("fxprec", "dynamo_sees_torchs_own_call")
def test_dynamo_that_is_imported_in_a_trace_takes_no_tracer_for_torch() -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", _IMPORTS_DYNAMO], check=True)


@contract("fxprec", "tables_of_weights")
def test_weights_that_dynamo_knows_can_be_swapped() -> None:
    tables: list[Any] = []

    def backend(gm: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        kept.append(gm)
        tables.extend(of_fxprec.tables_of_weights(gm))
        return gm.forward

    kept: list[torch.fx.GraphModule] = []
    layer = torch.nn.Linear(2, 2)
    with torch._dynamo.config.patch(of_this_torch({"invalidate_compile_context_weakrefs": True})):
        torch.compile(layer, backend=backend)(torch.ones(1, 2))
    assert kept and bool(tables) == (torch.__version__ < "2.11")
    for table in tables:
        table.clear()
    torch.utils.swap_tensors(layer.weight, torch.nn.Parameter(torch.zeros(2, 2)))


def of_this_torch(options: dict[str, bool]) -> dict[str, bool]:
    return {name: value for name, value in options.items() if hasattr(torch._dynamo.config, name)}
