"""What static capture declines: with a reason that names module or line, and the model and torch left as they were."""

from __future__ import annotations

import random
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from function_module import as_module
from fxprec.capture.capturing import CaptureDeclined
from fxprec.capture.symbolic.opaque_code import TRIPWIRES
from fxprec.capture.symbolic.recorder import Recorder
from fxprec.capture.symbolic.trace import trace_static
from fxprec.kernels.torch_internals import is_fx_tracing

Forward = Callable[[Any, Tensor], Any]


class Model(nn.Module):
    """Something of everything that a forward could spoil; ``forward`` is set by each test."""

    def __init__(self, body: Forward | None = None) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.BatchNorm1d(4)])
        self.register_buffer("count", torch.zeros(1))
        self.steps, self.history, self.cache, self.seen = 0, [], {"a": 1}, set()
        self.nested = nn.Module()
        self.nested.level = 3
        self.body = body

    def forward(self, x: Tensor) -> Any:
        return x if self.body is None else self.body(self, x)


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Attributes by identity, containers and tensors by contents."""
    state: dict[str, Any] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            state[f"{path}.{name}"] = id(value)
            if isinstance(value, dict | list | set):
                state[f"{path}.{name}/"] = [*map(id, value.values() if isinstance(value, dict) else value)], [*value]
    state.update({name: tensor.tolist() for name, tensor in model.state_dict().items()})
    return state


def torch_state() -> list[Any]:
    """What a trace patches, and the random number generators."""
    patched = [vars(nn.Module).get(n) for n in ("__getattribute__", "__getattr__", "__call__")]
    patched += [vars(owner).get(name) for owner, name, _ in TRIPWIRES]
    modes = [torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")]
    numbers = [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]
    return [*patched, *modes, *numbers, is_fx_tracing()]


def reason(model: Any, *names: str) -> str:
    """Why the capture was declined; nothing may have moved."""
    names = names or ("x",)
    before = snapshot(model) if isinstance(model, nn.Module) else {}, torch_state()
    with pytest.raises(CaptureDeclined) as declined:
        trace_static(model if isinstance(model, nn.Module) else as_module(model), names, {})
    assert (snapshot(model) if isinstance(model, nn.Module) else {}, torch_state()) == before
    assert str(declined.value) == declined.value.reason
    return declined.value.reason


def line_of(body: Forward, text: str) -> str:
    """The source line of a lambda below is the test's own: reasons quote it."""
    return f"at test_tracer.py:{body.__code__.co_firstlineno + 1} `{text}`"


def test_branch_names_the_line() -> None:
    def body(self: Model, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x
        return -x

    assert reason(Model(body)) == "branches on a traced value, " + line_of(body, "if x.sum() > 0:")


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (lambda self, x: [row for row in x], "iterates over a traced value"),
        (lambda self, x: x * len(x), "takes len\\(\\) of a traced value"),
        (lambda self, x: x * int(x.shape[0]), "makes a Python number of a traced value"),
        (lambda self, x: x * float(x.sum()), "makes a Python number of a traced value"),
        (lambda self, x: [x for _ in range(x.shape[0])], "tracing failed with TypeError: .*integer"),
        (lambda self, x: 1 in x, "iterates over a traced value"),
        (lambda self, x: x.numpy(), "leaves torch for numpy"),
        (lambda self, x: x.sum().backward(), "runs a backward pass"),
        (lambda self, x: torch.autograd.grad(x.sum(), [x]), "runs a backward pass"),
        (lambda self, x: x.chunk(2)[0] if isinstance(x.chunk(2), list) else x, "asks for the type"),
        (lambda self, x: setattr(x, "requires_grad", True), "sets the attribute 'requires_grad'"),
    ],
)
def test_values_are_not_known(body: Forward, expected: str) -> None:
    got = reason(Model(body))
    assert_matches(expected, got)
    assert "at test_tracer.py:" in got


def assert_matches(pattern: str, text: str) -> None:
    with pytest.raises(ValueError, match=pattern):
        raise ValueError(text)


class TestModes:
    @pytest.mark.parametrize(
        "context",
        [
            torch.no_grad,
            torch.enable_grad,
            torch.inference_mode,
            lambda: torch.set_grad_enabled(True),
            lambda: torch.inference_mode(False),
        ],
    )
    def test_grad_mode(self, context: Callable[[], Any]) -> None:
        def body(self: Model, x: Tensor) -> Tensor:
            with context():
                return self.fc(x)

        assert reason(Model(body)).startswith("sets or asks for the grad mode")

    def test_grad_mode_asked_for(self) -> None:
        body = lambda self, x: self.fc(x) if torch.is_grad_enabled() else x  # noqa: E731
        assert reason(Model(body)).startswith("reads torch.is_grad_enabled: is_grad_enabled, which looks at more than")

    def test_decorator(self) -> None:
        assert reason(Model(torch.no_grad()(lambda self, x: self.fc(x)))).startswith("sets or asks for the grad mode")

    @pytest.mark.parametrize("enabled", [True, False])
    def test_autocast(self, enabled: bool) -> None:
        def body(self: Model, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=enabled, dtype=torch.bfloat16):
                return self.fc(x)

        assert reason(Model(body)).startswith("enters a torch.autocast region, at test_tracer.py:")

    @pytest.mark.parametrize("use_reentrant", [True, False])
    def test_checkpoint(self, use_reentrant: bool) -> None:
        body = lambda self, x: checkpoint(self.fc, x, use_reentrant=use_reentrant)  # noqa: E731
        assert reason(Model(body)).startswith("uses activation checkpointing, at test_tracer.py:")

    @pytest.mark.filterwarnings("ignore:None of the inputs")
    @pytest.mark.parametrize("use_reentrant", [True, False])
    def test_checkpoint_that_touches_no_mode(self, use_reentrant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("fxprec.capture.symbolic.tracer.tripwires", lambda decline: [])
        body = lambda self, x: checkpoint(self.fc, x, use_reentrant=use_reentrant)  # noqa: E731
        assert reason(Model(body)).startswith("uses activation checkpointing, at test_tracer.py:")

    def test_caught_by_the_forward(self) -> None:
        def body(self: Model, x: Tensor) -> Tensor:
            try:
                with torch.no_grad():
                    return self.fc(x)
            except Exception:
                return x

        assert reason(Model(body)).startswith("sets or asks for the grad mode")


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 2


def plus_one(x: Tensor) -> Tensor:
    return x + 1


class TestCalls:
    def test_autograd_function(self) -> None:
        assert reason(Model(lambda self, x: Double.apply(x))).startswith("calls a torch.autograd.Function, at ")

    def test_function_that_handles_stand_ins_itself(self) -> None:
        def overridable(x: Tensor) -> Tensor:
            return torch.overrides.handle_torch_function(overridable, (x,), x)

        assert reason(Model(lambda self, x: overridable(x))).startswith("calls overridable, which is no function of")

    @pytest.mark.filterwarnings("ignore:.torch.jit.script")
    def test_scripted_function(self) -> None:
        scripted = torch.jit.script(plus_one)
        assert "text of a traced value" in reason(Model(lambda self, x: scripted(x)))  # of its error

    def test_higher_order_operators(self) -> None:
        body = lambda self, x: torch.cond(x.sum() > 0, lambda y: y, lambda y: -y, (x,))  # noqa: E731
        assert "at test_tracer.py:" in reason(Model(body))
        out_dtype = torch.ops.higher_order.out_dtype
        body = lambda self, x: out_dtype(torch.ops.aten.mm.default, torch.int32, x, x)  # noqa: E731
        why = reason(Model(body))  # before torch 2.11 in torch's own words
        assert (
            "the higher-order operator out_dtype" in why or "HigherOrderOperators" in why
        ) and "at test_tracer" in why

    def test_module_that_is_no_submodule(self) -> None:
        assert reason(Model(lambda self, x: nn.ReLU()(x))).startswith("calls a ReLU that is no submodule, at ")

    def test_function_that_uses_a_tensor_of_its_own(self) -> None:
        weight = torch.ones(2)
        assert reason(lambda x: x * weight).startswith("uses a tensor that is no attribute of the model")
        weight = nn.Parameter(weight)
        assert reason(lambda x: x * weight).startswith("uses a Parameter that is no parameter or buffer")

    def test_result_of_a_class_that_is_not_kept(self) -> None:
        assert reason(lambda x: OrderedDict(x=x)).startswith("passes on or returns an object (OrderedDict)")

    def test_function_without_a_signature(self) -> None:
        assert "signature" in reason(torch.relu, "input")


class Config:
    scale = 2.0


class CallsItself(nn.Linear):
    def __call__(self, *args: Any) -> Any:
        return super().__call__(*args)


class Overrides(nn.Linear):
    @classmethod
    def __torch_function__(cls, *args: Any) -> Any:
        return NotImplemented


def compiled() -> nn.Module:
    module = nn.Linear(4, 4)
    module.compile(backend="eager")
    return module


def sharded() -> nn.Module:
    fsdp_module = type("FSDPModule", (), {"__module__": "torch.distributed.fsdp"})
    return type("FSDPLinear", (fsdp_module, nn.Linear), {})(4, 4)


class TestModules:
    @pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
    def test_hooks_on_a_submodule(self, kind: str) -> None:
        model = Model(lambda self, x: self.fc(x))
        getattr(model.fc, f"register_{kind}_hook")(lambda *args: None)
        assert reason(model).startswith("submodule 'fc' has hooks")

    def test_hook_that_is_always_called(self) -> None:
        model = Model(lambda self, x: self.fc(x))
        model.fc.register_forward_hook(lambda *args: None, always_call=True)
        assert reason(model).startswith("submodule 'fc' has hooks")

    def test_hooks_of_the_model_itself_and_of_what_is_not_called_are_fine(self) -> None:
        model = Model(lambda self, x: self.fc(x))
        model.register_forward_hook(lambda *args: None)
        model.blocks[0].register_forward_hook(lambda *args: None)
        assert trace_static(model, ["x"], {}).guards.failing() is None

    def test_hooks_for_all_modules(self) -> None:
        handle = nn.modules.module.register_module_forward_hook(lambda *args: None)
        try:
            assert reason(Model()) == "hooks are registered for all modules"
        finally:
            handle.remove()

    @pytest.mark.filterwarnings("ignore:.torch.jit.script", "ignore:Lazy modules")
    @pytest.mark.parametrize(
        ("make", "what"),
        [
            (lambda: nn.LSTM(4, 4), "recurrent layer"),
            (lambda: nn.GRU(4, 4), "recurrent layer"),
            (lambda: nn.LSTMCell(4, 4), "recurrent cell"),
            (lambda: nn.TransformerEncoderLayer(4, 2), "nn.TransformerEncoderLayer"),
            (lambda: torch.jit.script(nn.Linear(4, 4)), "TorchScript module"),
            (lambda: nn.LazyLinear(4), "lazy module"),
            (lambda: nn.DataParallel(nn.Linear(4, 4)), "DataParallel"),
            (lambda: torch.compile(nn.Linear(4, 4), backend="eager"), "torch.compile'd module"),
            (compiled, "is compiled"),
            (sharded, "FSDP"),
            (lambda: CallsItself(4, 4), "has a __call__ of its own"),
            (lambda: Overrides(4, 4), "has a __torch_function__"),
        ],
    )
    def test_left_to_dynamo(self, make: Callable[[], nn.Module], what: str) -> None:
        model = Model(lambda self, x: self.child(x))
        model.child = make()
        text = reason_of_odd_model(model)
        assert text.startswith("submodule 'child' ") and what in text
        assert what in reason_of_odd_model(model.child, "input")

    def test_attention_of_torch(self) -> None:
        model = Model(lambda self, x: self.child(x, x, x))
        model.child = nn.MultiheadAttention(4, 2)
        assert reason(model).startswith("submodule 'child' is nn.MultiheadAttention")

    def test_batch_norm_that_averages_over_its_count(self) -> None:
        model = Model(lambda self, x: self.blocks[1](x))
        model.blocks[1].momentum = None
        assert reason(model).startswith("'blocks.1' has momentum=None")
        model.eval()
        assert trace_static(model, ["x"], {}).guards.failing() is None

    def test_sync_batch_norm_in_training(self) -> None:
        assert "process group" in reason(nn.Sequential(nn.SyncBatchNorm(4)), "input")

    def test_object_attribute(self) -> None:
        model = Model(lambda self, x: x * self.config.scale)
        model.config = Config()
        assert reason(model).startswith("the forward reads config, an object (Config) that may change inside, at ")

    def test_attribute_that_somebody_set_on_a_weight(self) -> None:
        model = Model(lambda self, x: x * self.fc.weight.tag)
        model.fc.weight.tag = 3
        assert reason(model).startswith("reads the attribute 'tag'")


def reason_of_odd_model(model: nn.Module, name: str = "x") -> str:
    """``reason`` for modules whose state cannot be listed (lazy, scripted)."""
    before = torch_state()
    with pytest.raises(CaptureDeclined) as declined:
        trace_static(model, [name], {})
    assert torch_state() == before
    return declined.value.reason


class TestRandomness:
    @pytest.mark.parametrize(
        ("draw", "expected"),
        [
            (random.random, "reads draw: Random.random, which looks at more than its arguments, at test_tracer.py"),
            (np.random.rand, "reads draw: an object .*, at test_tracer.py"),
            (lambda: torch.manual_seed(3), "reads torch.manual_seed: .*, at test_tracer.py"),
            (lambda: torch.rand(1), "draws random numbers while tracing .aten.rand.default., at test_tracer.py"),
            (lambda: torch.empty(1).normal_(), "draws random numbers while tracing"),
            (lambda: F.dropout(torch.ones(3)), "draws random numbers while tracing"),
        ],
    )
    def test_drawn_while_tracing(self, draw: Callable[[], Any], expected: str) -> None:
        assert_matches(expected, reason(Model(lambda self, x: (draw(), x)[1])))

    def test_recorded_draws_are_fine(self) -> None:
        model = Model(lambda self, x: F.dropout(x) + torch.rand_like(x) + torch.rand(x.shape))
        before = torch_state()
        gm = trace_static(model, ["x"], {}).gm
        assert torch_state() == before
        assert not torch.equal(gm(torch.ones(4)), gm(torch.ones(4)))


class TestWrites:
    @pytest.mark.parametrize(
        ("write", "expected"),
        [
            (lambda self, x: setattr(self, "steps", self.steps + 1), "writes steps of"),
            (lambda self, x: setattr(self, "last", x), "writes last of"),
            (lambda self, x: setattr(self, "count", self.count + 1), "writes count of"),
            (lambda self, x: setattr(self.nested, "level", 4), "writes nested.level of"),
            (lambda self, x: setattr(self, "extra", nn.Linear(2, 2)), "writes extra of"),
            (lambda self, x: self.register_buffer("extra", torch.ones(2)), "writes extra of"),
            (lambda self, x: delattr(self, "steps"), "writes steps of"),
            (lambda self, x: self.history.append(x), "writes the contents of history of"),
            (lambda self, x: self.cache.update(a=x), "writes the contents of cache of"),
            (lambda self, x: self.seen.add("x"), "writes the contents of seen of"),
            (lambda self, x: self.fc.train(False), "writes fc.training of"),
            (lambda self, x: self.fc.register_forward_hook(print), "writes the contents of fc._forward_hooks of"),
        ],
    )
    def test_undone(self, write: Forward, expected: str) -> None:
        def body(self: Model, x: Tensor) -> Tensor:
            write(self, x)
            return x + 1

        assert expected in reason(Model(body))

    def test_undone_after_a_failure_and_an_interrupt(self) -> None:
        def body(self: Model, x: Tensor) -> Tensor:
            self.steps, self.last = 5, x
            raise self.error

        model = Model(body)
        model.error = type("Boom", (RuntimeError,), {})
        assert "tracing failed with Boom" in reason(model)
        model.error = KeyboardInterrupt
        before = snapshot(model), torch_state()
        with pytest.raises(KeyboardInterrupt):
            trace_static(model, ["x"], {})
        assert (snapshot(model), torch_state()) == before

    def test_tensor_attribute_is_not_written(self) -> None:
        model = Model(lambda self, x: self.plain.add_(1))
        model.plain = torch.zeros(1)
        assert reason(model).startswith("computes with the values of a tensor while tracing (aten.add_.Tensor), at ")
        assert model.plain == 0

    def test_values_of_weights_are_not_baked(self) -> None:
        body = lambda self, x: x * sum(p.sum() for p in self.parameters())  # noqa: E731
        assert reason(Model(body)).startswith("computes with the values of a tensor while tracing")

    @pytest.mark.parametrize(
        "write",
        [
            lambda c, x: c.add_(x),
            lambda c, x: c.view(x.size(0)).add_(1),
            lambda c, x: c.__iadd__(x),
            lambda c, x: c.__setitem__(0, x.sum()),
            lambda c, x: torch.add(x, x, out=c),
            lambda c, x: F.relu(c.to(x.device), inplace=True),
        ],
    )
    def test_constant_that_the_graph_would_change(self, write: Callable[[Tensor, Tensor], Any]) -> None:
        def body(self: Model, x: Tensor) -> Tensor:
            total = torch.zeros(3)
            write(total, x)
            return x + total

        assert "writes into a tensor that the graph would keep, at `" in reason(Model(body))

    def test_constant_that_the_graph_would_give_away(self) -> None:
        assert "returns a tensor that it makes anew" in reason(Model(lambda self, x: (x, torch.zeros(3))))


def test_trace_within_a_trace() -> None:
    inner = Model()

    def body(self: Model, x: Tensor) -> Tensor:
        trace_static(inner, ["x"], {})
        return x

    assert reason(Model(body)) == "another torch.fx trace is running"


def test_other_threads_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even with the very module that is being traced."""
    seen: list[Any] = []
    called = Recorder.called

    def work(model: Model) -> None:
        with torch.no_grad():
            seen.append(model.fc(torch.ones(1, 4)) * model.config.scale * model.count)

    def called_meanwhile(recorder: Recorder, module: nn.Module) -> None:
        thread = threading.Thread(target=work, args=(model,))
        thread.start()
        thread.join()
        called(recorder, module)

    model = Model(lambda self, x: self.fc(x))
    model.config = Config()
    model.count += 1
    monkeypatch.setattr(Recorder, "called", called_meanwhile)
    trace_static(model, ["x"], {})
    assert torch.equal(seen[0], model.fc(torch.ones(1, 4)) * 2) and not seen[0].requires_grad
