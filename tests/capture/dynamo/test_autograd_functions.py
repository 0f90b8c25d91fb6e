"""A torch.autograd.Function of the user's is run by autograd, between two graphs: all that it can do it does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

import fxprec

BF16 = torch.bfloat16
Step = Callable[[nn.Module, Tensor], list[Tensor | None]]


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return g * 3 * x * x


class CubeInTwoStages(Cube):
    @staticmethod
    def forward(x: Tensor) -> Tensor:  # type: ignore[override]
        return x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)


class CubeOnce(Cube):
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return g * 3 * x * x


class SavesItsOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.tanh()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        (y,) = ctx.saved_tensors
        return g * (1 - y * y)


class MarksNothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_non_differentiable()
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g * 2


class MarksItsMask(torch.autograd.Function):
    """The saved mask is an output, too: without the mark a second derivative would go through it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        mask = (x > 0).float()
        ctx.mark_non_differentiable(mask)
        ctx.save_for_backward(mask)
        return x * mask, mask

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Tensor) -> Tensor:  # type: ignore[override]
        return g * ctx.saved_tensors[0]


class SeesNone(torch.autograd.Function):
    """Its second output is never used: its gradient is None, and not zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, g: Tensor, h: Tensor | None) -> Tensor:  # type: ignore[override]
        return 2 * g + (0 if h is None else 3 * h + 1)


class Doubles(torch.autograd.Function):
    """In place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x.mul_(2))
        return x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g * 2


class Nested(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            ctx.y = Cube.apply(ctx.x)
        return ctx.y.detach()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return torch.autograd.grad(ctx.y, ctx.x, g)[0]


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None]:  # type: ignore[override]
        x, w = ctx.saved_tensors
        of_x = g.to(w.dtype) @ w if ctx.needs_input_grad[0] else None
        return of_x, g.to(x.dtype).t() @ x if ctx.needs_input_grad[1] else None


class Net(nn.Module):
    def __init__(self, function: type[torch.autograd.Function], blocks: int = 1, checkpointed: bool = False) -> None:
        super().__init__()
        self.blocks, self.last = nn.ModuleList(nn.Linear(4, 4) for _ in range(blocks)), nn.Linear(4, 1)
        self.function, self.checkpointed = function, checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(self.part, block, x, use_reentrant=False) if self.checkpointed else self.part(block, x)
        return self.last(x)

    def part(self, block: nn.Module, x: Tensor) -> Tensor:
        out = self.function.apply(block(x) * 1)
        return out[0] if isinstance(out, tuple) else out


class WithProduct(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(Product.apply(self.first(x), self.second.weight))


NETS: dict[str, Callable[[], nn.Module]] = {
    "cube": lambda: Net(Cube),
    "in two stages": lambda: Net(CubeInTwoStages),
    "saves its output": lambda: Net(SavesItsOutput),
    "marks nothing": lambda: Net(MarksNothing),
    "marks its mask": lambda: Net(MarksItsMask),
    "sees None": lambda: Net(SeesNone),
    "in place": lambda: Net(Doubles),
    "nested": lambda: Net(Nested),
    "in each block": lambda: Net(SavesItsOutput, blocks=3),
    "in checkpoints": lambda: Net(SavesItsOutput, blocks=2, checkpointed=True),
    "with a product": WithProduct,
}


def gradients(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    given = x.clone().requires_grad_()
    out = model(given)
    out.square().sum().backward()
    return [out.detach(), given.grad, *(parameter.grad for parameter in model.parameters())]


def penalty(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    """Gradients of the squared norm of a gradient."""
    given = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(given).sum(), given, create_graph=True)
    gradient.square().sum().backward()
    return [parameter.grad for parameter in model.parameters()]


def packed(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    """Gradients where what is saved is packed and comes back as something else; and how much was packed."""
    seen: list[int] = []
    given = x.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (seen.append(t.numel()), t)[1], lambda t: 1.5 * t):
        out = model(given)
    out.sum().backward()
    return [torch.tensor(sorted(seen)), given.grad, *(parameter.grad for parameter in model.parameters())]


@pytest.mark.filterwarnings("ignore::fxprec.FxprecWarning")
@pytest.mark.parametrize("step", [gradients, penalty, packed], ids=lambda step: step.__name__)
@pytest.mark.parametrize("make", NETS.values(), ids=NETS)
def test_at_o0_it_is_the_original_to_the_bit(make: Callable[[], nn.Module], step: Step) -> None:
    original, x = make(), torch.randn(5, 4)
    converted, _ = fxprec.convert(copy.deepcopy(original), level="O0")
    for ours, theirs in zip(step(converted, x), step(original, x), strict=True):
        assert (ours is None) is (theirs is None)
        if ours is not None and theirs is not None:
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore::fxprec.FxprecWarning")
@pytest.mark.parametrize("step", [gradients, penalty], ids=lambda step: step.__name__)
@pytest.mark.parametrize("make", NETS.values(), ids=NETS)
def test_low_it_is_as_exact_as_under_autocast(make: Callable[[], nn.Module], step: Step) -> None:
    original, x = make(), torch.randn(200, 4)
    exact = step(copy.deepcopy(original).double(), x.double())
    converted, _ = fxprec.convert(copy.deepcopy(original), dtype=BF16)
    ours = step(converted, x)
    if step is gradients or make is not WithProduct:  # whose second derivative mixes dtypes under autocast
        with torch.autocast("cpu", dtype=BF16):
            theirs = step(copy.deepcopy(original), x)
        assert [got is None for got in ours] == [want is None for want in exact]
        assert apart(ours, exact) <= 2 * apart(theirs, exact)


def apart(got: list[Tensor | None], exact: list[Tensor | None]) -> float:
    """The relative distance of two lists of tensors, over all of them."""
    pairs = [(a.double(), b) for a, b in zip(got, exact, strict=True) if a is not None and b is not None]
    return sum(((a - b).norm() / b.norm()).item() ** 2 for a, b in pairs) ** 0.5


class Overwritten(nn.Module):
    """Gives what its function saved."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        saved = self.first(x) * 1
        return Cube.apply(saved), saved


def test_what_is_saved_and_overwritten_raises() -> None:
    model, _ = fxprec.convert(Overwritten(), level="O0")
    out, saved = model(torch.randn(3, 4))
    with torch.no_grad():
        saved.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.filterwarnings("ignore::fxprec.FxprecWarning")
def test_once_is_once() -> None:
    model, _ = fxprec.convert(Net(CubeOnce))
    with pytest.raises(RuntimeError, match="differentiate twice"):
        penalty(model, torch.randn(3, 4))


@pytest.mark.filterwarnings("ignore::fxprec.FxprecWarning")
def test_the_report_says_which_and_where() -> None:
    model, _ = fxprec.convert(Net(Cube), dtype=BF16)
    gradients(model, torch.randn(5, 4))
    told = " ".join(str(fxprec.report(model)).split())
    assert "graph break: a call of Cube, a torch.autograd.Function, which autograd runs itself" in told
    assert "test_autograd_functions.py" in told


def test_without_gradients_it_is_part_of_one_graph() -> None:
    model, _ = fxprec.convert(Net(Cube), dtype=BF16)
    with torch.no_grad():
        model(torch.randn(5, 4))
    assert len(fxprec.graphs(model)) == 1
