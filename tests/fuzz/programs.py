"""Random programs through the whole pipeline: invariants, dtypes, values, gradients, and the same answer every time."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree

from fxprec.capture.symbolic.trace import propagate_shapes, trace_static
from fxprec.passes.context import Context
from fxprec.passes.graph.casts import CASTS
from fxprec.passes.graph.text import format_graph
from fxprec.passes.policy.policy import Policy
from fxprec.passes.runner import run_passes
from fxprec.testing import assert_annotations_hold
from tests.fuzz.steps import STEPS, Values

__all__ = ["ROUNDING", "Model", "Unrounded", "check", "everything", "expected", "inputs", "program_of", "rewrite"]

#: Steps that round on the user's behalf: what differs after them is theirs.
ROUNDING = frozenset({"bfloat16", "half"})
_NAMES = sorted(STEPS)
_FP32_NAMES = sorted(STEPS.keys() - ROUNDING)


class Model(nn.Module):
    """Runs the steps; returns the last values, and the one that steps write to most."""

    def __init__(self, steps: list[tuple[str, int, int]], returned: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        shapes = {"weight": (4, 4), "bias": (4,), "kernel": (3, 3, 3), "table": (4, 4), "gain": (4,)}
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape, generator=generator) * 0.5))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("var", torch.ones(3))
        self.steps = tuple(steps)
        self.returned = returned

    def extra_repr(self) -> str:
        return f"{list(self.steps)}, {self.returned}"

    def forward(self, x: Any, y: Any, index: Any) -> Any:
        values = Values(self, [], [x > 0.1, y <= 0.0], [index, (x + 4).argmax(-1)])
        values.floats = [(value, torch.float32) for value in (x * 1.0, y, x)]
        for name, a, b in self.steps:
            STEPS[name](values, a, b)
        return [value for value, _ in values.floats[-self.returned :]], values.floats[0][0]


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Values that both low dtypes hold exactly: no mask or index depends on rounding."""
    generator = torch.Generator().manual_seed(2)
    x, y = (torch.randint(-8, 9, (2, 3, 4), generator=generator) / 8 for _ in range(2))
    return x, y, torch.randint(0, 4, (2, 3), generator=generator)


def expected(model: Model) -> list[Tensor] | None:
    """What eager gives; None for what it refuses, or what leaves the numbers: that is no program."""
    try:
        with torch.no_grad():
            values = pytree.tree_leaves(copy.deepcopy(model)(*inputs()))
    except RuntimeError:
        return None
    return values if all(value.isfinite().all() for value in values) else None


def rewrite(model: Model, context: Context, *, known: bool = False, shapes: bool = False) -> GraphModule:
    gm = trace_static(model, ("x", "y", "index"), {}).gm
    if shapes:
        assert propagate_shapes(gm, inputs())
    for node, tensor in zip(gm.graph.find_nodes(op="placeholder"), inputs() if known else (), strict=known):
        node.meta["dtype"] = tensor.dtype
    return run_passes(gm, context)


class Unrounded(Interpreter):
    """A rewritten graph whose casts, ours alone, copy where they convert, and do not round."""

    def run_node(self, n: Node) -> Any:
        if n.target not in CASTS:
            return super().run_node(n)
        (source, dtype), _ = self.fetch_args_kwargs_from_env(n)
        if n.args[0].meta["precision"].output is dtype:  # type: ignore[union-attr]
            return source  # guarded: of a dtype nobody knew
        return pytree.tree_map_only(Tensor, torch.clone, source)


def everything(model: Model, call: Callable[..., Any]) -> list[Any]:
    x, y, index = inputs()
    leaves = x.requires_grad_(), y.requires_grad_()
    arguments = x.clone(), y.clone(), index
    values = pytree.tree_leaves(call(*arguments))
    differentiable = [value.double().sum() for value in values if value.requires_grad]
    if differentiable:
        sum(differentiable).backward()  # type: ignore[union-attr]
    return [values, arguments, list(model.buffers()), [p.grad for p in (*leaves, *model.parameters())]]


def program_of(seed: int) -> tuple[Model, Context, random.Random]:
    """The program of a seed, the settings it is rewritten with, and what further choices are drawn from."""
    choose = random.Random(f"program {seed}")
    names = _NAMES if choose.random() < 0.3 else _FP32_NAMES
    steps = [(choose.choice(names), choose.randrange(6), choose.randrange(6)) for _ in range(choose.randint(1, 10))]
    model = Model(steps, choose.randint(1, 3))
    context = Context(
        policy=Policy.preset(choose.choice(("O1", "O2", "O3"))),
        low=choose.choice((torch.bfloat16, torch.float16)),
        placement=choose.choice(("mincut", "autocast")),
        native_mixed=choose.random() < 0.5,
    )
    return model, context, choose


def check(model: Model, context: Context, choose: random.Random) -> str | None:
    """What is wrong with the rewritten program, or None.

    Its dtypes are known beforehand or not, with shapes or without, by chance; every fourth program is rewritten at O0
    too, and every eighth twice.
    """
    wanted = expected(model)
    if wanted is None:
        return None
    known, shapes, plain, twice = (choose.random() < share for share in (0.6, 0.25, 0.25, 0.125))
    try:
        gm = rewrite(model, context, known=known, shapes=shapes)
        with torch.no_grad():  # as above: eager refuses writes to views of some leaves
            if known:
                assert_annotations_hold(gm, *inputs())
            dtypes = [value.dtype for value in pytree.tree_leaves(gm(*inputs()))]
        assert dtypes == [value.dtype for value in wanted], f"{dtypes}, expected {[value.dtype for value in wanted]}"
        if not ROUNDING & {name for name, _, _ in model.steps}:
            _check_values(model, gm)
        if plain:
            unchanged = rewrite(model, Context(low=context.low, policy=Policy.preset("O0")))
            with torch.no_grad():
                values = pytree.tree_leaves(unchanged(*inputs()))
            assert all(map(torch.equal, values, wanted)), "level O0 changes values"
        if twice:
            again = format_graph(rewrite(model, context, known=known, shapes=shapes))
            assert format_graph(gm) == again, f"another graph the second time:\n{format_graph(gm)}\n\n{again}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _check_values(model: Model, gm: GraphModule) -> None:
    """Where casts do not round, values, gradients and what was written to inputs and buffers are the program's."""
    twin = copy.deepcopy(model)
    try:
        original = everything(twin, twin)
    except RuntimeError:  # its backward wants what was written over
        return
    rewritten = everything(model, Unrounded(gm).run)  # the graph holds the model's own tensors
    torch.testing.assert_close(rewritten, original, rtol=1e-5, atol=1e-6)
