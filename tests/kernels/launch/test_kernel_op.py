"""KernelOp: who gets the op, who the autograd.Function, who the launcher; and that all three are the same function."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from fxprec.kernels.launch.kernel_op import KernelOp, eager_gradients

launches: list[str] = []


def reference(x: Tensor, w: Tensor | None, factor: float) -> tuple[Tensor, Tensor, Tensor]:
    """What the op computes: two results with gradients and one without."""
    y = x * x * factor if w is None else x * x * w * factor
    return y, x.sin(), x > 0


def run(x: Tensor, w: Tensor | None, factor: float) -> tuple[Tensor, Tensor, Tensor]:
    launches.append("forward")
    with torch.no_grad():
        return reference(x, w, factor)


def fake(x: Tensor, w: Tensor | None, factor: float) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)


def run_backward(x: Tensor, w: Tensor | None, factor: float, dy: Tensor, ds: Tensor) -> tuple[Tensor, Tensor]:
    launches.append("backward")
    return 2 * x * dy * (factor if w is None else w * factor) + ds * x.cos(), x * x * dy * factor


def fake_backward(x: Tensor, w: Tensor | None, factor: float, dy: Tensor, ds: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


def setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, w, ctx.factor = inputs
    ctx.save_for_backward(x, w)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[2])


def backward(ctx: Any, dy: Tensor | None, ds: Tensor | None, dm: Tensor | None) -> tuple[Tensor | None, ...]:
    assert dm is None
    launches.extend(["without dy"] if dy is None else [])
    x, w = ctx.saved_tensors
    if torch.is_grad_enabled():
        return eager_gradients(reference, (x, w, ctx.factor), (dy, ds, dm))
    zero = torch.zeros_like(x)
    dx, dw = KERNEL_BACKWARD(x, w, ctx.factor, zero if dy is None else dy, zero if ds is None else ds)
    return dx if ctx.needs_input_grad[0] else None, dw if ctx.needs_input_grad[1] else None, None


KERNEL_BACKWARD = KernelOp("test_kernel_op_backward", run_backward, fake_backward)
KERNEL = KernelOp("test_kernel_op", run, fake, backward=backward, setup_context=setup)


def square(x: Tensor, factor: float) -> Tensor:
    launches.append("forward")
    with torch.no_grad():
        return x * x * factor


def of_square(ctx: Any, dy: Tensor) -> Tensor:
    launches.append("backward")
    (x,) = ctx.saved_tensors
    return 2 * x * dy * ctx.settings[0]


SAVED_BY_DEFAULT = KernelOp(
    "test_saved_by_default", square, lambda x, factor: torch.empty_like(x), backward=of_square,
    reference=lambda x, factor: x * x * factor,
)  # fmt: skip
#: The ways to call it, whatever the inputs are; the last is that of torch.func.
WAYS = [
    pytest.param(KERNEL, id="call"),
    pytest.param(KERNEL.op, id="op"),
    pytest.param(KERNEL._apply, id="function"),
    pytest.param(KERNEL._transformed.apply, id="transformed"),
]
every_way = pytest.mark.parametrize("way", WAYS)
OP = torch.ops.fxprec.test_kernel_op.default


class Square(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.kernel = KERNEL

    def forward(self, x: Tensor) -> Tensor:
        return self.kernel(x, self.weight, 3.0)[0]


class Seen(TorchDispatchMode):
    """The ops of this file that pass."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "fxprec":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


class Wrapped(Tensor):
    """A tensor subclass that notes the ops it is given to."""

    seen: list[str]
    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Wrapped:
        made = Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)  # type: ignore[attr-defined]
        made.held, made.seen = held, []
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for arg in args:
            if isinstance(arg, Wrapped):
                arg.seen.append(func._opname)
        return func(*tree_map_only(Wrapped, lambda t: t.held, args), **(kwargs or {}))


@pytest.fixture(autouse=True)
def _no_launches() -> Iterator[None]:
    launches.clear()
    yield


@pytest.fixture
def op_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with each call of the torch op by KERNEL."""
    calls: list[int] = []
    op = KERNEL.op

    def spy(*inputs: Any) -> Any:
        calls.append(len(inputs))
        return op(*inputs)

    monkeypatch.setattr(KERNEL, "op", spy)
    return calls


def pair() -> tuple[Tensor, Tensor]:
    return torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)


def gradients(function: Callable[..., Any], x: Tensor, w: Tensor | None) -> list[Tensor]:
    """First and second derivatives of a function of all results, with respect to all inputs."""
    inputs = [t for t in (x, w) if t is not None]
    y, s, _ = function(x, w, 3.0)
    first = torch.autograd.grad((y * y).sum() + (y * s).sum(), inputs, create_graph=True)
    second = torch.autograd.grad(torch.stack(first).square().sum(), inputs)
    return [*first, *second]


def test_without_a_gradient_to_come_the_launcher_runs_and_nothing_else(
    op_calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w = pair()
    monkeypatch.setattr(KERNEL, "_apply", object())  # which cannot be called
    with torch.no_grad():
        results = [KERNEL(x, w, 3.0)]
    with torch.inference_mode():
        results.append(KERNEL(x, w, 3.0))
    results.append(KERNEL(x.detach(), w.detach(), 3.0))
    assert launches == ["forward"] * 3 and op_calls == []
    for y, s, positive in results:
        assert y.grad_fn is None and not y.requires_grad and s.grad_fn is None
        assert torch.equal(positive, x > 0)


def test_where_a_gradient_is_wanted_it_is_the_autograd_function(op_calls: list[int]) -> None:
    x, w = pair()
    for inputs in ((x, None), (x.detach(), w), (x.detach(), nn.Parameter(w.detach()))):
        y = KERNEL(*inputs, 3.0)[0]
        assert y.requires_grad and type(y.grad_fn).__name__ == "test_kernel_opBackward"
    assert launches == ["forward"] * 3 and op_calls == []


def test_a_kernel_without_backward_is_launched_whatever_wants_a_gradient() -> None:
    x, w = pair()
    assert KERNEL_BACKWARD(x, w, 3.0, x, x)[0].grad_fn is not None, "plain torch, recorded: nothing stands between"
    assert launches == ["backward"]


@every_way
def test_every_way_gives_the_references_values_and_gradients(way: Callable[..., Any]) -> None:
    x, w = pair()
    for a, b in zip(way(x, w, 3.0), reference(x, w, 3.0), strict=True):
        assert torch.equal(a, b) and a.requires_grad == b.requires_grad
    found = torch.autograd.grad((way(x, w, 3.0)[0] * x).sum(), (x, w))
    expected = torch.autograd.grad((reference(x, w, 3.0)[0] * x).sum(), (x, w))
    torch.testing.assert_close(found, expected)
    assert launches.count("backward") == 1


@every_way
def test_an_absent_input_has_no_gradient(way: Callable[..., Any]) -> None:
    x, _ = pair()
    torch.testing.assert_close(gradients(way, x, None), gradients(reference, x, None))


@every_way
def test_a_result_that_nobody_uses_comes_as_no_gradient(way: Callable[..., Any]) -> None:
    x, w = pair()
    _, s, positive = way(x, w, 3.0)
    assert not positive.requires_grad and positive.dtype == torch.bool
    (dx,) = torch.autograd.grad(s.sum(), x)
    torch.testing.assert_close(dx, x.cos())
    assert launches == ["forward", "without dy", "backward"]
    with pytest.raises(RuntimeError, match=r"does not require grad|no grad_fn"):
        positive.float().sum().backward()


@every_way
def test_only_what_wants_a_gradient_gets_one(way: Callable[..., Any]) -> None:
    x, w = pair()
    x.requires_grad_(False)
    way(x, w, 3.0)[0].sum().backward()
    torch.testing.assert_close(w.grad, 3 * x * x)
    assert x.grad is None


@every_way
def test_double_backward_is_the_references(way: Callable[..., Any]) -> None:
    x, w = pair()
    torch.testing.assert_close(gradients(way, x, w), gradients(reference, x, w))
    launches.clear()
    torch.autograd.grad(way(x, w, 3.0)[0].sum(), (x, w), create_graph=True)
    assert launches == ["forward"], "a backward to be differentiated is eager"


@every_way
def test_one_tensor_as_two_inputs(way: Callable[..., Any]) -> None:
    x, _ = pair()
    y = way(x, x, 3.0)[0]
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    torch.testing.assert_close(first, 9 * x * x)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(second, 18 * x)
    (plain,) = torch.autograd.grad(way(x, x, 3.0)[0].sum(), x)
    torch.testing.assert_close(plain, 9 * x * x)


@every_way
def test_what_was_saved_may_not_be_written_to(way: Callable[..., Any]) -> None:
    x, w = pair()
    y = way(x, w, 3.0)[0]
    with torch.no_grad():
        x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


class CutOff(torch.autograd.Function):
    """Hands its input on, and no gradient back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


@pytest.mark.parametrize("create_graph", [False, True])
def test_without_a_gradient_nothing_is_looked_at(create_graph: bool) -> None:
    """What was saved by default may be overwritten by then, and the inputs get no gradient either."""
    x, _ = pair()
    leaf = x.detach().clone().requires_grad_()
    given = leaf * 1
    y = SAVED_BY_DEFAULT(given, 3.0)
    cut = CutOff.apply(y)
    with torch.no_grad():
        given.add_(1)
    launches.clear()
    cut.sum().backward(create_graph=create_graph)
    assert leaf.grad is None and launches == []


@pytest.mark.parametrize("create_graph", [False, True])
def test_inputs_are_saved_by_default(create_graph: bool) -> None:
    x, _ = pair()
    launches.clear()
    (first,) = torch.autograd.grad(SAVED_BY_DEFAULT(x, 3.0).sum(), x, create_graph=create_graph)
    torch.testing.assert_close(first, 6 * x)
    assert launches == ["forward"] + ["backward"] * (not create_graph)
    if create_graph:
        (second,) = torch.autograd.grad(first.sum(), x)
        torch.testing.assert_close(second, torch.full_like(x, 6.0))


@pytest.mark.parametrize("absent", [False, True])
def test_opcheck(absent: bool) -> None:
    x, w = pair()
    torch.library.opcheck(OP, (x, None if absent else w, 3.0))
    detached = (x.detach(), None if absent else w.detach(), 3.0, torch.ones(4), torch.ones(4))
    torch.library.opcheck(torch.ops.fxprec.test_kernel_op_backward.default, detached)


def test_compile_sees_one_op_and_its_gradients() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        graphs.append(gm)
        return aot_eager(gm, inputs)

    module, x = Square(), torch.randn(4, requires_grad=True)
    y = torch.compile(module, fullgraph=True, backend=backend)(x)
    assert len(graphs) == 1 and OP in {node.target for node in graphs[0].graph.nodes}
    expected = reference(x, module.weight, 3.0)[0]
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(
        torch.autograd.grad(y.sum(), (x, module.weight)), torch.autograd.grad(expected.sum(), (x, module.weight))
    )
    assert launches.count("backward") == 1


def test_export_keeps_the_op() -> None:
    module, x = Square(), torch.randn(4)
    program = torch.export.export(module, (x,))
    assert [node.target for node in program.graph.nodes].count(OP) == 1
    torch.testing.assert_close(program.module()(x), module(x))


def test_a_dispatch_mode_sees_the_op_and_its_backward() -> None:
    x, w = pair()
    with Seen() as seen:
        KERNEL(x, w, 3.0)[0].sum().backward()
        KERNEL(x.detach(), w.detach(), 3.0)
    assert seen.names == ["test_kernel_op", "test_kernel_op_backward", "test_kernel_op"]
    assert x.grad is not None


def test_fake_tensors_launch_nothing() -> None:
    with FakeTensorMode():
        x = torch.empty(5, dtype=torch.float16)
        y, _, positive = KERNEL(x, None, 3.0)
    assert launches == []
    assert (y.shape, y.dtype, positive.dtype) == (x.shape, torch.float16, torch.bool)


def test_a_tensor_subclass_is_given_the_op() -> None:
    x = Wrapped(torch.randn(4))
    y = KERNEL(x, None, 3.0)[0]
    assert x.seen == ["test_kernel_op"]
    torch.testing.assert_close(y, reference(x.held, None, 3.0)[0])


@pytest.mark.parametrize("argnums", [0, 1, (0, 1)])
def test_func_grad(argnums: Any) -> None:
    x, w = (t.detach() for t in pair())

    def of(function: Callable[..., Any]) -> Any:
        return torch.func.grad(lambda x, w: (function(x, w, 3.0)[0] * x).sum(), argnums)(x, w)

    torch.testing.assert_close(of(KERNEL), of(reference))


def test_func_grad_twice() -> None:
    x, w = (t.detach() for t in pair())

    def of(function: Callable[..., Any]) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            return torch.func.grad(lambda x: function(x, w, 3.0)[0].square().sum())(x).sum()

        return torch.func.grad(inner)(x)

    torch.testing.assert_close(of(KERNEL), of(reference))


@pytest.mark.parametrize("requires_grad", [False, True])
def test_func_jacrev_and_vjp(requires_grad: bool) -> None:
    x, w = (t.detach().requires_grad_(requires_grad) for t in pair())
    found = torch.func.jacrev(lambda x: KERNEL(x, w, 3.0)[0])(x)
    torch.testing.assert_close(found, torch.diag(6 * x * w))
    pull = torch.func.vjp(lambda x, w: KERNEL(x, w, 3.0)[:2], x, w)[1]
    torch.testing.assert_close(pull((torch.ones(4), torch.ones(4))), (6 * x * w + x.cos(), 3 * x * x))


def test_func_vmap_is_refused_with_a_word() -> None:
    with pytest.raises(RuntimeError, match=r"vmap.*test_kernel_op"):
        torch.func.vmap(lambda x: KERNEL(x, None, 3.0)[0])(torch.randn(2, 4))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_runs_it_again_in_the_backward(reentrant: bool) -> None:
    module, x = Square(), torch.randn(4, requires_grad=True)
    expected = torch.autograd.grad(module(x).sum(), (x, module.weight))
    launches.clear()
    checkpoint(module, x, use_reentrant=reentrant).sum().backward()
    assert launches == ["forward", "forward", "backward"]
    torch.testing.assert_close((x.grad, module.weight.grad), expected)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_module_that_holds_one_can_be_copied(copied: Callable[[Any], Any]) -> None:
    module, x = Square(), torch.randn(4)
    twin = copied(module)
    assert twin.kernel is KERNEL and torch.equal(twin(x), module(x))


def test_a_kernel_may_write_to_the_arguments_it_names() -> None:
    def add(x: Tensor, total: Tensor) -> None:
        total += x

    kernel = KernelOp("test_kernel_op_in_place", add, lambda x, total: None, mutates_args=("total",))
    total = torch.zeros(4)
    kernel(torch.ones(4), total)
    assert torch.equal(total, torch.ones(4))
    torch.library.opcheck(torch.ops.fxprec.test_kernel_op_in_place.default, (torch.ones(4), total))


# eager_gradients


def test_eager_gradients_are_none_where_none_are_wanted() -> None:
    x, w = pair()
    one = torch.ones(4)
    assert eager_gradients(reference, (x, w, 3.0), (None, None, None)) == (None, None, None)
    assert eager_gradients(reference, (x.detach(), None, 3.0), (one, None, None)) == (None, None, None)
    dx, dw, factor = eager_gradients(reference, (x.detach(), w, 3.0), (one, None, None))
    assert dx is None and factor is None
    torch.testing.assert_close(dw, 3 * x * x)


def test_eager_gradients_take_a_single_result_and_go_no_further_than_the_call() -> None:
    x, _ = pair()
    doubled = x * 2
    (found,) = eager_gradients(lambda x: x * x, (doubled,), (torch.ones(4),))
    torch.testing.assert_close(found, 2 * doubled)
    assert found is not None and found.requires_grad
    torch.testing.assert_close(torch.autograd.grad(found.sum(), x)[0], torch.full((4,), 4.0))
