"""What the passes rely on of private names of torch, a test a name."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from fxprec.kernels import torch_internals as of_kernels
from fxprec.passes import torch_internals as of_passes
from private_names import contract


@contract("passes", "FakeTensorMode", "no_autocast")
def test_fake_tensors_are_computed_with_autocast_off() -> None:
    with torch.autocast("cpu", torch.bfloat16), of_passes.FakeTensorMode() as mode:
        x = torch.ones(2, 2)
        with of_passes.no_autocast():
            assert (x @ x).dtype is torch.float32
        assert isinstance(x, of_kernels.FakeTensor) and x.fake_mode is mode and (x @ x).dtype is torch.bfloat16
        assert mode.shape_env is None


@contract("passes", "OpOverload", "OpOverloadPacket", "HigherOrderOperator")
def test_operators_are_known_by_their_class() -> None:
    assert isinstance(torch.ops.aten.add.Tensor, of_passes.OpOverload)
    assert isinstance(torch.ops.aten.add, of_passes.OpOverloadPacket)
    assert isinstance(torch.ops.higher_order.cond, of_passes.HigherOrderOperator)
    assert not isinstance(torch.ops.aten.add, of_passes.HigherOrderOperator)


@contract("passes", "schema_of")
def test_an_operator_tells_what_it_takes_and_writes() -> None:
    add = torch.ops.aten.add_.Tensor
    schema = of_passes.schema_of(add)
    assert schema.is_mutable and not of_passes.schema_of(torch.ops.aten.add.Tensor).is_mutable
    assert [argument.name for argument in schema.arguments] == ["self", "other", "alpha"]
    assert schema.arguments[0].alias_info.is_write and schema.arguments[1].alias_info is None
    assert len(of_passes.schema_of(torch.ops.aten.max.dim).returns) == 2


@contract("passes", "autocast_key", "custom_op_autocast")
def test_what_was_registered_for_autocast_is_found() -> None:
    assert of_passes.autocast_key("cpu") == torch._C.DispatchKey.AutocastCPU
    assert of_passes.autocast_key("nowhere") is None

    @torch.library.custom_op("fxprec_tests::internals", mutates_args=())
    def doubled(x: Tensor) -> Tensor:
        return x * 2

    assert of_passes.custom_op_autocast("fxprec_tests::internals", "cpu") is None
    doubled.register_autocast("cpu", torch.bfloat16)
    assert of_passes.custom_op_autocast("fxprec_tests::internals", "cpu") is torch.bfloat16
    assert of_passes.custom_op_autocast("fxprec_tests::internals", "cuda") is None
    assert of_passes.custom_op_autocast("fxprec_tests::none", "cpu") is None


@contract("passes", "builtin_nn", "builtins_of_torch")
def test_builtins_of_torch_are_the_functions_that_users_reach() -> None:
    assert of_passes.builtins_of_torch.cat is torch.cat
    for name in ("adaptive_max_pool2d", "adaptive_max_pool3d", "fractional_max_pool2d", "fractional_max_pool3d"):
        assert callable(getattr(of_passes.builtin_nn, name))
    assert of_passes.builtin_nn.gelu is torch.nn.functional.gelu


def _graph_of_dynamo(function: Callable[..., object]) -> torch.fx.Graph:
    graphs: list[torch.fx.Graph] = []

    def backend(gm: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        graphs.append(gm.graph)
        return gm.forward

    torch.compile(function, backend=backend, fullgraph=True)(torch.ones(2))
    return graphs[0]


@contract("passes", "enter_autocast", "exit_autocast")
def test_dynamo_writes_autocast_as_two_calls() -> None:
    def function(x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return x * 2

    graph = _graph_of_dynamo(function)
    (enter,) = graph.find_nodes(op="call_function", target=of_passes.enter_autocast)
    (leave,) = graph.find_nodes(op="call_function", target=of_passes.exit_autocast)
    enabled = enter.args[2] if len(enter.args) > 2 else enter.kwargs["enabled"]
    assert enabled is False and leave.args == (enter,)


@contract("passes", "wrap_with_autocast")
def test_a_body_runs_under_autocast() -> None:
    x = torch.ones(2, 2)
    assert of_passes.wrap_with_autocast("cpu", torch.float16, True, None, torch.mm, x, x).dtype is torch.float16
    assert of_passes.wrap_with_autocast("cpu", torch.float16, False, None, torch.mm, x, x).dtype is torch.float32


@contract("passes", "set_grad_enabled", "enter_inference_mode", "exit_inference_mode")
def test_dynamo_writes_modes_of_autograd_as_two_calls() -> None:
    def function(x: Tensor) -> Tensor:
        with torch.no_grad():
            y = x * 2
        with torch.inference_mode():
            return y + x

    graph = _graph_of_dynamo(function)
    modes = graph.find_nodes(op="call_function", target=of_passes.set_grad_enabled)
    assert [node.args for node in modes] == [(False,), (True,)]
    (enter,) = graph.find_nodes(op="call_function", target=of_passes.enter_inference_mode)
    (leave,) = graph.find_nodes(op="call_function", target=of_passes.exit_inference_mode)
    assert enter.args == (True,) and leave.args == (enter,)


@contract("passes", "data_of")
def test_dynamo_writes_data_as_a_call() -> None:
    graph = _graph_of_dynamo(lambda x: x.data * 2)
    assert len(graph.find_nodes(op="call_function", target=of_passes.data_of)) == 1


@contract("passes", "LazyBase")
def test_a_lazy_graph_module_compiles_when_it_is_called() -> None:
    gm = of_passes.LazyBase({}, torch.fx.symbolic_trace(lambda x: x + 1).graph, "Region")
    assert type(gm).__name__ == "Region" and isinstance(gm, torch.fx.GraphModule) and gm._needs_recompile()
    assert torch.equal(gm(torch.ones(1)), torch.full((1,), 2.0)) and "x + 1" in gm.code and not gm._needs_recompile()


@contract("passes", "OF_GRAPH")
def test_a_graph_module_has_the_rest_of_its_state_when_it_is_empty() -> None:
    empty = torch.fx.GraphModule({}, torch.fx.Graph())
    full = torch.fx.GraphModule({}, torch.fx.symbolic_trace(lambda x: x + 1).graph)
    assert vars(full).keys() - vars(empty).keys() <= of_passes.OF_GRAPH
    changed = {name for name, value in vars(full).items() if str(vars(empty)[name]) != str(value)}
    assert changed - {"_tracer_cls"} <= of_passes.OF_GRAPH and {"_graph", "_code"} <= changed


@contract("passes", "tree_leaves", "tree_map")
def test_trees_are_mapped() -> None:
    assert of_passes.tree_leaves({"a": [1, (2,)], "b": None}) == [1, 2, None]
    assert of_passes.tree_map(lambda x: x + 1, {"a": [1, (2,)]}) == {"a": [2, (3,)]}


@contract("passes", "unlogged")
def test_torch_logs_what_fails_on_fake_tensors_only_where_asked():
    seen: list[logging.LogRecord] = []

    class Listening(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record)

    def fail() -> None:
        with pytest.raises(RuntimeError), of_passes.FakeTensorMode():
            torch.ones(2, 3) @ torch.ones(2, 3)

    log, listening = logging.getLogger("torch._subclasses.fake_tensor"), Listening()
    log.addHandler(listening)
    try:
        with of_passes.unlogged():
            fail()
        assert not seen
        fail()
        assert seen
    finally:
        log.removeHandler(listening)


@contract("passes", "numpy_call")
def test_numpy_calls_of_dynamo_tell_what_they_wrap() -> None:
    found: list[str | None] = []

    def look(gm: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        found.extend(of_passes.numpy_call(node.target) for node in gm.graph.nodes if node.op == "call_function")
        return gm

    def f(x: torch.Tensor) -> torch.Tensor:
        a = x.numpy()
        b = np.multiply(a.T, 2)
        b += a
        b.fill(2)
        return torch.relu(torch.from_numpy(b))

    torch.compile(f, backend=look)(torch.ones(2, 2))
    assert [name for name in found if name is not None] == ["attribute", "multiply", "iadd", "fill"]
    assert found[-1] is None
