"""Private names of torch stand in one file a floor, each with a contract: those of the kernels are here."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fxprec.kernels import torch_internals as of_kernels
from fxprec.kernels.launch import observers as watchers
from private_names import (
    FLOORS,
    ROOT,
    contract,
    contracts,
    defined_names,
    private_names,
    sources,
    taken_names,
    unused_names,
)

# -- where they stand --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_no_other_file_names_something_private_of_torch_or_triton():
    own = defined_names(sources())
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in sources()
        for line, name in private_names(path.read_text(), own)
    ]
    assert not found, "these belong into torch_internals.py of their floor:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "line",
    [
        "import torch._dynamo",
        "import triton._C as c",
        "from torch import _C",
        "from torch._ops import OpOverload",
        "from torch.fx import _symbolic_trace as s",
        "import torch; torch._foreach_add_([], 1)",
        "import torch as t; t.nn._own",
        "from torch import fx; fx.graph._root",
        "from torch.utils import checkpoint as c; c._own",
        "def f(graph): graph._tracer_cls = None",
        "def f(op): return op.target._schema.returns",
        "def f(x): return getattr(x, '_base', None)",
        "def f(x, kind): return getattr(x, f'_autocast_{kind}')",
        "import sys; sys.modules.get('torch.distributed._composable_state')",
        "import torch; vars(torch)['a'] = torch.ops.aten._to_copy.default",
    ],
)
def test_the_scan_finds(line: str):
    assert private_names(line, {"_own"})


@pytest.mark.parametrize(
    "line",
    [
        "import torch; torch.nn.Linear(1, 1).weight._version",
        "def f(module): return module._parameters, module._modules, module._forward_hooks",
        "class A:\n    def f(self): return self._anything, super()._anything",
        "def f(other): return other._own, getattr(other, '_own'), other.__dict__, other._fxprec",
        "def f(pair): return pair._replace(a=1), hasattr(pair, '_fields')",
        "import _thread; from a._b import _c",
        "'torch is a name, torch._C is one within a sentence'",
    ],
)
def test_the_scan_lets_pass(line: str):
    assert private_names(line, {"_own"}) == []


@pytest.mark.slow
@pytest.mark.parametrize("floor", FLOORS)
def test_each_name_that_is_taken_has_a_contract(floor: str):
    assert contracts()[floor] == taken_names()[floor]


@pytest.mark.slow
@pytest.mark.parametrize("floor", FLOORS)
def test_no_name_is_there_for_nobody(floor: str):
    assert not unused_names(floor)


# -- what is relied on -------------------------------------------------------------------------------------------------


def test_nothing_that_is_optional_is_missing_here():
    assert of_kernels.MISSING == {}


def _raised_by(code: str) -> str:
    with pytest.raises(ImportError) as caught, of_kernels.needed:
        exec(code)
    return str(caught.value)


@contract("kernels", "needed", "TESTED_TORCH")
def test_what_moved_is_told_by_name() -> None:
    for code in ("from torch._C import _not_there", "import torch; torch._C._not_there"):
        message = _raised_by(code)
        assert "_not_there" in message and torch.__version__ in message and of_kernels.TESTED_TORCH[-1] in message
    with pytest.raises(ValueError), of_kernels.needed:
        raise ValueError("another error is none of a name")


@contract("kernels", "optional", "MISSING")
def test_what_is_optional_is_noted() -> None:
    assert of_kernels.optional("torch._C:_autograd", "unused") is torch._C._autograd
    try:
        assert of_kernels.optional("torch._C:_autograd._not_there", "slower") is None
        assert of_kernels.optional("torch._not_there:x", "slower") is None
        assert of_kernels.MISSING == {"torch._C._autograd._not_there": "slower", "torch._not_there.x": "slower"}
    finally:
        of_kernels.MISSING.clear()


@contract("kernels", "DispatchModeKey", "current_dispatch_mode", "dispatch_modes")
def test_modes_of_torchs_own_are_found_by_key() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    keys, current = of_kernels.DispatchModeKey, of_kernels.current_dispatch_mode
    assert of_kernels.dispatch_modes() == 0 and current(keys.FAKE) is None
    with FakeTensorMode() as fake:
        assert of_kernels.dispatch_modes() == 1
        assert current(keys.FAKE) is fake and current(keys.PROXY) is current(keys.FUNCTIONAL) is None
    seen: list[object] = []
    make_fx(lambda x: (seen.append(current(keys.PROXY)), x + 1)[1])(torch.ones(1))
    assert type(seen[0]).__name__ == "ProxyTorchDispatchMode"


@contract("kernels", "attention_choice")
def test_torch_tells_where_it_has_no_fused_attention():
    q = torch.randn(1, 2, 4, 8)
    assert of_kernels.attention_choice(q, q, q, None, 0.0, True, enable_gqa=False) != 0
    assert of_kernels.attention_choice(q, q, q[..., :3], None, 0.0, True, enable_gqa=False) == 0
    assert of_kernels.attention_choice(q, q, q, None, 0.1, True, enable_gqa=False) == 0


@contract("kernels", "softmax_backward")
def test_the_derivative_of_a_softmax_can_be_written_over_its_gradient():
    x, gradient = torch.randn(2, 3, 5, requires_grad=True), torch.randn(2, 3, 5)
    p = x.softmax(-1)
    (expected,) = torch.autograd.grad(p, x, gradient)
    result = of_kernels.softmax_backward(gradient, p.detach(), -1, torch.float32, grad_input=gradient)
    assert result is gradient
    torch.testing.assert_close(gradient, expected)


@contract("kernels", "disable_current_modes")
def test_modes_are_off_within_a_block() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        with of_kernels.disable_current_modes():
            assert type(torch.ones(1)) is Tensor and of_kernels.dispatch_modes() == 0
        assert of_kernels.dispatch_modes() == 1


@contract("kernels", "FakeTensor")
def test_fake_tensors_are_known_by_their_class() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        assert isinstance(torch.ones(1), of_kernels.FakeTensor)


@contract("kernels", "is_batched", "add_batch_dim", "remove_batch_dim")
def test_gradients_in_a_batch_say_so() -> None:
    """Of ``torch.autograd.grad(is_grads_batched=True)``, whose vmap shows in no level."""
    seen: list[bool] = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2

    def hook(grad: Tensor) -> Tensor:
        seen.append(of_kernels.is_batched(grad))
        plain = of_kernels.remove_batch_dim(grad, 1, 1, 0)
        seen.append(of_kernels.is_batched(plain))
        return of_kernels.add_batch_dim(plain * torch.tensor([[1.0], [2.0], [3.0]]), 0, 1)

    y.register_hook(hook)
    (found,) = torch.autograd.grad(y, x, torch.ones(3, 2), is_grads_batched=True)
    assert seen == [True, False] and not of_kernels.is_batched(x)
    assert found.tolist() == [[2.0, 2.0], [4.0, 4.0], [6.0, 6.0]]


@contract("kernels", "function_transform_level")
def test_transforms_have_a_level_that_is_true() -> None:
    levels: list[object] = []
    torch.func.vmap(lambda x: (levels.append(of_kernels.function_transform_level()), x)[1])(torch.ones(2))
    assert levels[0] and of_kernels.function_transform_level() is None


@contract("kernels", "forward_ad_level")
def test_forward_mode_has_a_level() -> None:
    assert of_kernels.forward_ad_level() == -1
    with torch.autograd.forward_ad.dual_level():
        assert of_kernels.forward_ad_level() >= 0


@contract("kernels", "jit_tracing_state", "set_jit_tracing_state")
def test_a_jit_trace_has_a_state_that_can_be_taken_from_it() -> None:
    states: list[object] = []

    def function(x: Tensor) -> Tensor:
        states.append(state := of_kernels.jit_tracing_state())
        of_kernels.set_jit_tracing_state(None)
        torch.sin(x)
        of_kernels.set_jit_tracing_state(state)
        return x + 1

    assert of_kernels.jit_tracing_state() is None
    traced = torch.jit.trace(function, torch.ones(1), check_trace=False)
    assert states[0] and "sin" not in str(traced.graph) and "add" in str(traced.graph)


@contract("kernels", "is_fx_tracing")
def test_a_symbolic_trace_is_told() -> None:
    here: list[bool] = []
    there: list[bool] = []

    def look(x: Tensor) -> Tensor:
        here.append(of_kernels.is_fx_tracing())
        thread = threading.Thread(target=lambda: there.append(of_kernels.is_fx_tracing()))
        thread.start()
        thread.join()
        return x + 1

    torch.fx.symbolic_trace(look)
    assert here == [True] and not of_kernels.is_fx_tracing()
    assert there == [not hasattr(torch.fx._symbolic_trace, "_get_is_fx_tracing")]  # of the thread, from torch 2.14 on


@contract("kernels", "is_traceable_wrapper_subclass")
def test_wrappers_of_tensors_are_known() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    assert of_kernels.is_traceable_wrapper_subclass(TwoTensor(torch.ones(1), torch.ones(1)))
    assert not of_kernels.is_traceable_wrapper_subclass(torch.nn.Parameter(torch.ones(1)))


@contract("kernels", "version_of")
def test_writes_are_counted_but_those_to_inference_tensors() -> None:
    x = torch.ones(2)
    before = of_kernels.version_of(x)
    x.add_(1)
    assert of_kernels.version_of(x) == before + 1
    with torch.inference_mode(), pytest.raises(RuntimeError, match="version"):
        of_kernels.version_of(torch.ones(2))


@contract(
    "kernels", "reorder_linear_weight", "linear_pointwise", "reorder_conv_weight", "conv_pointwise", "conv_binary",
    "conv_binary_",    "reorder_transposed_weight", "transposed_pointwise", "has_bfloat16_kernels",
)  # fmt: skip
def test_onednn_takes_weights_that_were_packed_once() -> None:
    if not (torch.backends.mkldnn.is_available() and of_kernels.has_bfloat16_kernels()):
        pytest.skip("no oneDNN with bfloat16")
    x, w, b = (torch.randn(size).bfloat16() for size in ((3, 20), (130, 20), (130,)))
    packed = of_kernels.reorder_linear_weight(w, None)
    linear = F.linear(x, w, b)
    assert torch.equal(of_kernels.linear_pointwise(x, packed, b, "none", [], ""), linear)
    for name, numbers, algorithm, apart in (
        ("relu", [], "", F.relu), ("gelu", [], "none", F.gelu), ("swish", [], "", F.silu),
        ("gelu", [], "tanh", lambda y: F.gelu(y, approximate="tanh")), ("tanh", [], "", torch.tanh),
        ("leaky_relu", [0.2], "", lambda y: F.leaky_relu(y, 0.2)), ("hardtanh", [0.0, 6.0], "", F.relu6),
        ("sigmoid", [], "", torch.sigmoid), ("hardswish", [], "", F.hardswish), ("hardsigmoid", [], "", F.hardsigmoid),
    ):  # fmt: skip
        joined = of_kernels.linear_pointwise(x, packed, b, name, numbers, algorithm)
        torch.testing.assert_close(joined, apart(linear), atol=0.05, rtol=0.02)
    image, kernel, bias = (torch.randn(size).bfloat16() for size in ((2, 8, 5, 5), (16, 8, 3, 3), (16,)))
    around = [1, 1], [1, 1], [1, 1], 1
    packed = of_kernels.reorder_conv_weight(kernel, *around, [2, 8, 5, 5])
    assert torch.equal(packed.to_dense(), kernel)  # nothing is lost in it
    apart = F.conv2d(image, kernel, bias, padding=1)
    joined = of_kernels.conv_pointwise(image, packed, bias.float(), *around, "relu", [], "")
    torch.testing.assert_close(joined, F.relu(apart), atol=0.05, rtol=0.02)
    other = torch.randn_like(apart)
    joined = of_kernels.conv_binary(image, other, packed, bias, *around, "add", 1.0, "relu", [], None)
    torch.testing.assert_close(joined, F.relu(apart + other), atol=0.05, rtol=0.02)
    over = other.contiguous(memory_format=torch.channels_last)
    given = of_kernels.conv_binary_(over, image, packed, bias, *around, "add", 1.0, "relu", [], None)
    assert torch.equal(over, joined) and given.data_ptr() == over.data_ptr()
    kernel, around = torch.randn(8, 16, 3, 3).bfloat16(), ([1, 1], [1, 0], [2, 2], [1, 1], 1)
    packed = of_kernels.reorder_transposed_weight(kernel, *around, [2, 8, 5, 5])
    assert torch.equal(packed.to_dense(), kernel.transpose(0, 1))
    apart = F.conv_transpose2d(image, kernel, bias, 2, 1, (1, 0))
    joined = of_kernels.transposed_pointwise(image, packed, bias.float(), *around, "relu", [], "")
    torch.testing.assert_close(joined, F.relu(apart), atol=0.05, rtol=0.02)


class _Asks(torch.autograd.Function):
    """Saves one of its results, as the losses save a gradient; notes who holds it in the backward."""

    seen: list[tuple[bool, int | None]]

    @staticmethod
    def forward(ctx, x):
        loss, gradient = x.sum(), x * 2
        ctx.save_for_backward(gradient)
        return loss, gradient

    @staticmethod
    def backward(ctx, grad, _):  # type: ignore[override]
        (saved,) = ctx.saved_tensors
        _Asks.seen.append((of_kernels.keeps_graph(), of_kernels.storage_owners(saved)))
        return grad.expand(3)


@contract("kernels", "keeps_graph", "storage_owners")
def test_a_backward_knows_who_else_reads_what_it_saved() -> None:
    from fxprec.kernels.nn.scaled_gradient import _OWNERS

    _Asks.seen = []
    x = torch.ones(3, requires_grad=True)
    loss, gradient = _Asks.apply(x)
    loss.backward(retain_graph=True)
    del gradient
    loss.backward(retain_graph=True)
    loss.backward()
    assert _Asks.seen == [(True, _OWNERS + 1), (True, _OWNERS), (False, _OWNERS)]


# -- who is watching ---------------------------------------------------------------------------------------------------


def _watching() -> set[str]:
    asked = (each for each in vars(watchers).values() if isinstance(each, watchers.Interceptor))
    return {each.name for each in asked if watchers.watcher(each) is each}


def test_nobody_watches_plain_code():
    assert _watching() == set()


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_each_watcher_is_seen_where_it_watches():
    found: list[set[str]] = []

    def look(x: Tensor) -> Tensor:
        found.append(_watching())
        return x + 1

    x = torch.ones(2)
    torch.func.vmap(look)(x)
    torch.func.jvp(look, (x,), (x,))
    with torch.autograd.forward_ad.dual_level():
        look(x)
    torch.jit.trace(look, x, check_trace=False)
    torch.fx.symbolic_trace(look)
    make_fx(look)(x)
    with torch._subclasses.fake_tensor.FakeTensorMode():
        look(torch.ones(2))
    mode, transform, dual = "a dispatch mode", "a torch.func transform", "forward-mode differentiation"
    assert found == [
        {transform},
        {transform, dual},
        {dual},
        {"torch.jit.trace"},
        {"torch.fx.symbolic_trace"},
        {mode, "a tracing mode", "a tracer", "torch.fx.symbolic_trace"},
        {mode, "a tracing mode"},
    ]


def test_the_first_that_watches_is_named():
    with torch._subclasses.fake_tensor.FakeTensorMode() as fake:
        assert watchers.watcher(watchers.DUAL, watchers.ANY_MODE, watchers.TRACING) is watchers.ANY_MODE
        assert watchers.tracing_mode() is fake
    assert watchers.tracing_mode() is None
