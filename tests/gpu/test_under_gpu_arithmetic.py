"""Kernels under both extremes of a GPU's arithmetic (``gpu_arithmetic``), in Triton's interpreter, against float64.

An error may be twice that of eager mode in low precision; and what a region's backward decides again must fall as in
its forward, whichever products each of the two kernels contracts. Here two arithmetics that the interpreter's own is
far from. Under one of one's choice (or ``all``) also longer rows, models' regions, more random ones, and the tests of
all kernels besides, in some minutes each; with ``-s`` it prints how many there were, and the worst error over eager's::

    GPU_ARITHMETIC=first-above TRITON_INTERPRET=1 python -m pytest -s tests/gpu/test_under_gpu_arithmetic.py
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, permutations
from typing import Any, Final

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings
from torch import Tensor, nn

import kernel_tools
import random_regions as random
import region_tools as tools
from benchmarks.workloads import problems
from benchmarks.workloads.problems import PROBLEMS, Problem, Setup
from fxprec.kernels.launch.philox import draw_seeds
from fxprec.kernels.nn.batch_norm import batch_norm
from fxprec.kernels.nn.group_norm import group_norm
from fxprec.kernels.optim import adam, sgd
from fxprec.kernels.optim.adam import AdamSettings
from fxprec.kernels.optim.sgd import SgdSettings
from fxprec.kernels.optim.tables import MultiTensorPlan
from fxprec.kernels.rows.program.values import Declined

if kernel_tools.INTERPRETING:
    from decisions import decided, made_again
    from gpu_arithmetic import ALL, SOME, Arithmetic, computing_as

ROOT: Final = pathlib.Path(__file__).parents[2]
CHOSEN: Final = os.environ.get("GPU_ARITHMETIC", "")
ARITHMETICS: Final = (
    [each for each in ALL if CHOSEN in (str(each), "all")] if CHOSEN else SOME if kernel_tools.INTERPRETING else ()
)
LOW: Final = (torch.bfloat16, torch.float16) if CHOSEN else (torch.bfloat16,)

interpreted = pytest.mark.parametrize("device", kernel_tools.DEVICES if kernel_tools.INTERPRETING else [])
under_each = pytest.mark.parametrize("arithmetic", ARITHMETICS, ids=str)
in_each_dtype = pytest.mark.parametrize("low", LOW, ids=str)
at_length = pytest.mark.parametrize("device", kernel_tools.DEVICES if kernel_tools.INTERPRETING and CHOSEN else [])
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::UserWarning")


# -- what is counted ---------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """Of each kind of kernel: cases by name, the worst error over eager's and whose it is; decisions compared."""

    cases: dict[str, Counter[str]] = field(default_factory=dict)
    worst: dict[str, tuple[float, str]] = field(default_factory=dict)
    decisions: Counter[str] = field(default_factory=Counter)

    def add(self, kind: str, name: str, over: float) -> None:
        self.cases.setdefault(kind, Counter())[name] += 1
        self.worst[kind] = max(self.worst.get(kind, (0.0, "")), (over, name))

    def __str__(self) -> str:
        lines = ["", "| | different ones | cases | worst error over eager's | decisions |", "|---|---|---|---|---|"]
        for kind, cases in self.cases.items():
            (worst, name), decisions = self.worst[kind], self.decisions[kind]
            of = "" if name.startswith("def ") else f" ({name})"  # a random one's source is long
            lines.append(f"| {kind} | {len(cases)} | {cases.total()} | {worst:.2f}{of} | {decisions} |")
        return "\n".join(lines)


@pytest.fixture(scope="module")
def tally() -> Iterator[Tally]:
    counted = Tally()
    yield counted
    print(counted)


def compare(
    ours: Callable[..., Any], eager: Callable[..., Any], exact: Callable[..., Any], inputs: Sequence[Tensor],
    low: torch.dtype, arithmetic: Arithmetic, slack: float | None = None,
) -> float:  # fmt: skip
    """Values and gradients, ours under the arithmetic: the worst error over eager's.

    Args:
        slack: what low results may err by at least; a rounding, if nothing is said.
    """

    def compute(function: Callable[..., Any], context: contextlib.AbstractContextManager[Any]) -> list[list[Tensor]]:
        torch.manual_seed(1)
        with context:
            return list(tools.run_both(exact, inputs, function))

    found, right = compute(ours, computing_as(arithmetic))
    other, _ = compute(eager, contextlib.nullcontext())
    return tools.check_errors(found, other, right, low, slack or torch.finfo(low).eps / 2)


# -- kernels by hand ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Middle(Setup):
    """Sizes between those that take no time and real ones."""

    def size(self, full: int, tiny: int) -> int:
        return min(full, 3 * tiny)


def by_hand(setup: Setup) -> Iterator[Problem]:
    """Each kernel's problems, those that only real sizes tell apart once."""
    known: set[tuple[str, str]] = set()
    for source in PROBLEMS:
        for problem in source.make(setup):
            if (problem.kernel, problem.shape) not in known:
                known.add((problem.kernel, problem.shape))
                yield problem


def check_problem(problem: Problem, low: torch.dtype, arithmetic: Arithmetic, tally: Tally) -> None:
    def eager(*inputs: Tensor) -> Any:
        with torch.autocast("cpu", low, enabled=problem.autocast):
            return problem.eager(*inputs)

    over = compare(problem.ours, eager, problem.eager, problem.inputs, low, arithmetic)
    tally.add("kernels by hand", problem.kernel, over)


@interpreted
@under_each
@in_each_dtype
def test_kernels_by_hand(device: str, arithmetic: Arithmetic, low: torch.dtype, tally: Tally) -> None:
    for problem in by_hand(Setup(torch.device(device), low, tiny=True)):
        check_problem(problem, low, arithmetic, tally)


@at_length
@under_each
@in_each_dtype
def test_kernels_by_hand_of_more_elements(device: str, arithmetic: Arithmetic, low: torch.dtype, tally: Tally) -> None:
    """Several tiles, several programs, rows that no tile holds."""
    setup = Middle(torch.device(device), low, tiny=True)
    for problem in by_hand(setup):
        check_problem(problem, low, arithmetic, tally)
    whole = Setup(torch.device(device), low)
    for problem in (
        problems._cross_entropy(whole, 5, 9001), problems._cross_entropy(whole, 5, 9001, True),
        problems._batch_norm(whole, 40, 24, 14, True), problems._max_pool(whole, 2, 24, 15, 3),
        problems._group_norm(whole, 1, 320, 40),
    ):  # fmt: skip
        check_problem(problem, low, arithmetic, tally)


@interpreted
@pytest.mark.parametrize("name", ["Adam", "SGD"])
def test_optimizers(device: str, name: str, tally: Tally) -> None:
    """Parameters after a step, beside those of torch's optimizer in float32: low gradients, which all three read."""
    torch.manual_seed(0)
    start, gradient = torch.randn(500), (torch.randn(500) * 0.1).bfloat16()
    results = []
    for dtype in (torch.float32, torch.float64):
        p = nn.Parameter(start.to(dtype, copy=True))
        options: dict[str, Any] = {"lr": 3e-3, "weight_decay": 0.1}
        options |= {"momentum": 0.9} if name == "SGD" else {}
        optimizer = getattr(torch.optim, "AdamW" if name == "Adam" else name)([p], **options)
        for _ in range(2):
            p.grad = gradient.to(dtype)
            optimizer.step()
        results.append(p.detach())
    for arithmetic in ARITHMETICS:
        p, states, steps = start.clone(), [torch.zeros(500), torch.zeros(500)], [torch.tensor(0.0)]
        with computing_as(arithmetic):
            for _ in range(2):
                if name == "Adam":
                    bound = MultiTensorPlan([p], states=[[s] for s in states], steps=steps).bind([gradient])
                    adam.launch(bound, AdamSettings(weight_decay=0.1), lr=3e-3)
                else:
                    bound = MultiTensorPlan([p], states=[states[:1]]).bind([gradient])
                    sgd.launch(bound, SgdSettings(momentum=0.9, weight_decay=0.1), lr=3e-3)
        over = tools.error(p, results[1]) / tools.error(*results)
        tally.add("optimizers", name, over)
        assert over <= 2


@interpreted
@under_each
def test_the_first_value_is_the_mean_so_far(device: str, arithmetic: Arithmetic) -> None:
    """Of many tiles a lane keeps mean and variance, which begin with its first value and not with one next to it.

    ``value / 1`` may be that; of means far from zero the difference would be a large part of the variance.
    """
    planes = torch.randn(1, 4, 96, 96) + 1000
    with computing_as(arithmetic):
        last = group_norm(planes.to(memory_format=torch.channels_last), 1)
        normed = group_norm(planes, 1), last, batch_norm(planes, None, None, training=True)
    grouped = F.group_norm(planes.double(), 1)
    exact = grouped, grouped, F.batch_norm(planes.double(), None, None, training=True)
    assert all(tools.error(own, right) <= 1e-3 for own, right in zip(normed, exact, strict=True))


# -- regions -----------------------------------------------------------------------------------------------------------


def leaf(*shape: int, low: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(low).requires_grad_()


def mixed(x: Tensor, y: Tensor) -> Tensor:
    return x.float() * 1.3 + y.float() * 0.7 + (x * y).float() * 0.1


def llamas_norm(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    s = (x + y).float()
    return w * (s * torch.rsqrt(s.pow(2).mean(-1, keepdim=True) + 1e-6))


def divided(x: Tensor, y: Tensor, w: Tensor) -> Any:
    z = x.float() / (y.float().abs() + 1.3)
    return z.amax(-1, keepdim=True) * x, z


#: Functions of low x and y [rows, columns] and FP32 w [columns].
REGIONS: Final[dict[str, Callable[..., Any]]] = {
    "bias, gelu": lambda x, y, w: F.gelu(x + w) * y,
    "bias, gelu by tanh": lambda x, y, w: F.gelu(x + w, approximate="tanh") + y,
    "gate": lambda x, y, w: F.silu(x * w) * y,
    "sum, layer norm": lambda x, y, w: (x + F.silu(y + w), F.layer_norm((x + F.silu(y + w)).float(), (40,), w, w)),
    "sum, rms norm": llamas_norm,
    "softmax": lambda x, y, w: F.softmax(x * 0.125 + y, -1) * w,
    "log softmax, FP32": lambda x, y, w: F.log_softmax(x.float() * 3 + y * w, -1),
    "logsumexp": lambda x, y, w: torch.logsumexp(x.float() * 5, -1, keepdim=True) * y,
    "variance": lambda x, y, w: (x.float() * w).var(-1, keepdim=True) * y,
    "normalized": lambda x, y, w: F.normalize(x.float() * w, dim=-1) + y,
    "exponentials": lambda x, y, w: torch.exp(x * w) / (torch.exp(y.float()) + 1) + torch.expm1(x) * torch.log1p(y * y),
    "sigmoids": lambda x, y, w: torch.sigmoid(x * w) * torch.tanh(y) + F.mish(x.float()) - F.softplus(y.float()),
    "relu": lambda x, y, w: F.relu(mixed(x, y)) * w,
    "relu of a difference": lambda x, y, w: F.relu(x * w - y * w) + x,
    "maximum of a row": lambda x, y, w: mixed(x, y) / (mixed(x, y).amax(-1, keepdim=True) + 9),
    "minimum of a row": lambda x, y, w: mixed(x, y) - mixed(x, y).amin(-1, keepdim=True) * w,
    "larger of two": lambda x, y, w: torch.maximum(x * w, y * w) + torch.minimum(mixed(x, y), w),
    "clamped": lambda x, y, w: (x * w - y * w).clamp(-0.5, 0.0) + F.hardswish(mixed(x, y)) + F.leaky_relu(x * w),
    "of equal quotients": lambda x, y, w: torch.where(x / 0.7 > y / 0.7, x * w, y.float()),
    "in steps": lambda x, y, w: torch.floor(x.float() / 0.25) * y + torch.sign(x * w - y * w) * w,
    "a maximum in FP32 and in low": divided,
    "a maximum of exponentials": lambda x, y, w: (
        torch.exp(x * w).amax(-1, keepdim=True) * y, torch.exp(x * w),
    ),
}  # fmt: skip


def operands(low: torch.dtype, *, rows: int = 12, columns: int = 40, ties: bool = False) -> list[Tensor]:
    """x, y and w; with ``ties`` x and y have few different values, so that comparisons meet equal operands."""
    torch.manual_seed(0)
    x, y, w = leaf(rows, columns, low=low), leaf(rows, columns, low=low), leaf(columns)
    if ties:
        x, y = ((torch.randint(-4, 5, (rows, columns)) / 3).to(low).requires_grad_() for _ in range(2))
    return [x, y, w]


def check_region(
    function: Callable[..., Any], kind: str, name: str, inputs: Sequence[Tensor], low: torch.dtype,
    arithmetic: Arithmetic, tally: Tally,
) -> None:  # fmt: skip
    region = tools.region_of(function)
    plan = tools.plan_of(function, *inputs)
    over = compare(region, region.graph_module, tools.in_float64(plan), inputs, low, arithmetic)
    assert region.path == "triton", region.reason
    tally.add(kind, name, over)


@interpreted
@under_each
@in_each_dtype
def test_regions(device: str, arithmetic: Arithmetic, low: torch.dtype, tally: Tally) -> None:
    for number, (name, function) in enumerate(REGIONS.items()):
        if CHOSEN or number % len(ARITHMETICS) == ARITHMETICS.index(arithmetic):
            check_region(function, "regions", name, operands(low), low, arithmetic, tally)


@at_length
@under_each
def test_regions_of_long_rows(device: str, arithmetic: Arithmetic, tally: Tally) -> None:
    """Longer than a tile: read once a level of reductions."""
    low = torch.bfloat16
    for name in (
        "gate",
        "softmax",
        "log softmax, FP32",
        "sum, rms norm",
        "maximum of a row",
        "a maximum in FP32 and in low",
    ):
        inputs = operands(low, rows=2, columns=17001)
        check_region(REGIONS[name], "regions", f"{name}, of long rows", inputs, low, arithmetic, tally)


@at_length
@pytest.mark.zoo
@pytest.mark.parametrize("model", ["GPT-2 small", "BERT-base", "Llama 1B", "ViT-B/16"])
@in_each_dtype
def test_models_regions(device: str, low: torch.dtype, model: str, tally: Tally) -> None:
    pytest.importorskip("transformers")
    from benchmarks.workloads import regions

    def without_dropout(setup: Setup) -> tuple[nn.Module, dict[str, Any]]:
        made, inputs = regions.MODELS[model](setup)
        for each in made.modules():
            if isinstance(each, nn.Dropout):
                each.p = 0.0
        return made, inputs

    for region, inputs in regions.calls(model, without_dropout, Setup(torch.device(device), low, tiny=True)):
        assert not region.draws and region.path == "triton", region.reason
        for arithmetic in ARITHMETICS:
            exact = tools.in_float64(region.plans[-1])
            over = compare(region, region.graph_module, exact, inputs, low, arithmetic)
            tally.add("models' regions", f"{model}: {region.name}", over)


# -- random regions ----------------------------------------------------------------------------------------------------


@interpreted
@settings(
    max_examples=150 if CHOSEN else 5, deadline=None, derandomize=True, database=None, report_multiple_bugs=False,
    suppress_health_check=[*HealthCheck], phases=(Phase.generate, Phase.shrink),
)  # fmt: skip
@given(made=random.regions(casts=True))
def test_random_regions(device: str, tally: Tally, made: Any) -> None:
    low = torch.float16
    inputs = made.tensors(low, device)
    region = tools.region_of(made.function(random.dropped), made.draws)
    try:
        plan = tools.plan_of(region.graph_module, *inputs)
    except Declined:
        return
    seeds = draw_seeds(made.draws, torch.device(device)) if made.draws else None
    function = made.function(random.with_masks(plan, seeds))
    extra = () if seeds is None else (seeds,)
    for arithmetic in ARITHMETICS:
        # Where a region casts by itself, the last bit before decides how it rounds there.
        over = compare(lambda *x: region(*x, *extra), function, function, inputs, low, arithmetic, 2.0**-9)
        tally.add("random regions", made.source, over)
    if plan.derived.backward is not None:
        tally.decisions["random regions"] += check_decisions(plan, inputs, seeds)


# -- decisions ---------------------------------------------------------------------------------------------------------


def orders() -> list[tuple[Arithmetic, Arithmetic]]:
    """What a forward and its backward may contract, where approximations err alike: it is one device."""
    each = [Arithmetic(contracts, "mixed") for contracts in ("nothing", "first", "second")]
    return list(permutations(each, 2) if CHOSEN else pairwise(each))


def check_decisions(plan: Any, inputs: Sequence[Tensor], seeds: Tensor | None, **changes: Any) -> int:
    """How many there were; in the forward and in the backward they fall alike."""
    if not made_again(plan):
        return 0
    count = 0
    for forward, backward in orders():
        firsts, seconds = decided(plan, inputs, seeds, computing_as(forward), computing_as(backward), **changes)
        for value, first, second in zip(made_again(plan), firsts, seconds, strict=True):
            assert torch.equal(first, second), f"{value} of {int((first != second).sum())} elements"
            count += first.numel()
    return count


@interpreted
@in_each_dtype
def test_a_backward_decides_as_its_forward_did(device: str, low: torch.dtype, tally: Tally) -> None:
    for name, function in REGIONS.items():
        inputs = operands(low, ties=True)
        plan = tools.plan_of(function, *inputs)
        found = check_decisions(plan, inputs, None)
        assert found or not plan.backward_program.program.is_discontinuous, name
        tally.decisions["regions"] += found


@interpreted
@pytest.mark.parametrize("name", ["relu of a difference", "maximum of a row", "minimum of a row", "clamped"])
def test_contracted_it_would_decide_otherwise(device: str, name: str) -> None:
    """Or else these tests would show nothing."""
    inputs = operands(torch.bfloat16, ties=True)
    plan = tools.plan_of(REGIONS[name], *inputs)
    with pytest.raises(AssertionError, match="elements"):
        check_decisions(plan, inputs, None, contracts=True)


@interpreted
@pytest.mark.parametrize("training", [True, False])
def test_batch_norms_relu_is_decided_alike(device: str, training: bool, tally: Tally) -> None:
    """From x in both kernels; y is 0 at a third of the elements, but for what rounding leaves of it."""
    torch.manual_seed(0)
    x = (torch.randint(-3, 4, (4, 6, 5, 7)) / 3).requires_grad_()
    running = torch.randn(6), torch.rand(6) + 0.5
    mean, var = (x.detach().mean((0, 2, 3)), x.detach().var((0, 2, 3), correction=0)) if training else running
    weight = torch.randn(6)
    bias = -(1 / 3 - mean) * weight * (var + 1e-5).rsqrt()
    for forward, backward in orders():
        with computing_as(forward):
            y = batch_norm(x, *(t.clone() for t in running), weight, bias, training=training, relu=True)
        with computing_as(backward):
            (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
        if not training:  # dx is weight * rstd where y is positive, and 0 elsewhere
            assert torch.equal(dx != 0, y.detach() > 0)
            tally.decisions["kernels by hand"] += y.numel()
        else:
            off = (x.detach() - mean.view(-1, 1, 1)) * (var + 1e-5).rsqrt().view(-1, 1, 1)
            dy = (y.detach() > 0).double()
            level, slope = dy.mean((0, 2, 3), keepdim=True), (dy * off).mean((0, 2, 3), keepdim=True)
            right = (dy - level - off * slope) * (weight * (var + 1e-5).rsqrt()).view(-1, 1, 1)
            assert tools.error(dx, right) <= 1e-5
            tally.decisions["kernels by hand"] += y.numel()


# -- the tests of all kernels ------------------------------------------------------------------------------------------

#: Tests whose bounds only exact arithmetic keeps, by the beginning of their names.
EXACT: Final = {
    "rows/test_row_functions.py::test_distance_from_float64": "ulps: tests/gpu/test_gpu_arithmetic.py has these",
    "rows/run/test_region.py::test_softmax_with_scale_and_mask[1-": "a gradient of exactly 0, from 1 / 1 = 1",
    "rows/run/test_region.py::test_bias_and_activation[1-": "a sum in FP32 within 1e-6, which is 2e-6 here",
    "rows/run/test_region.py::test_operands_of_every_kind": "the same",
    "nn/test_batch_norm_statistics.py::test_a_mean_of_ten_thousand": "4e-5 of the deviation, which is 6e-5 here",
}


@at_length
@under_each
def test_the_tests_of_all_kernels(device: str, arithmetic: Arithmetic) -> None:
    left_out = [f"--deselect=tests/kernels/{name}" for name in EXACT]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-s",
        "-p",
        "gpu_arithmetic",
        "-p",
        "no:cacheprovider",
        "--tb=short",
    ]
    env = {
        **os.environ,
        "GPU_ARITHMETIC": str(arithmetic),
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests' / 'tools'}",
    }
    command += ["-k", "interpreter]", *left_out, "tests/kernels"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env)
    assert run.returncode == 0 and " passed" in run.stdout, run.stdout[-4000:]
    print(f"\n{arithmetic}: " + re.search(r"\d+ launches of .*", run.stdout)[0], run.stdout.splitlines()[-1])  # type: ignore[index]


@pytest.mark.slow
@pytest.mark.skipif(kernel_tools.INTERPRETING, reason="runs once, outside of the interpreter")
def test_the_kernels_in_the_interpreter() -> None:
    kernel_tools.run_in_the_interpreter(__file__)
