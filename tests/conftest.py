"""What most tests share: graphs traced from small functions, and the pipeline up to a named pass."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, symbolic_trace
from torch.utils._python_dispatch import TorchDispatchMode

import pairwise
from fxprec.capture.symbolic.trace import propagate_shapes
from fxprec.errors import ConversionError
from fxprec.kernels.calls import sizes
from fxprec.kernels.cpu.compiled_attention import why_not as why_no_loops
from fxprec.passes.context import Context
from fxprec.passes.policy.policy import Policy
from fxprec.passes.runner import PIPELINE, run_passes
from two_ranks import two_ranks

torch.set_num_threads(1)  # the tensors are tiny: threads cost more than they give, much more beside other work

os.environ.setdefault("FXPREC_VERIFY_EACH", "1")  # a pass that breaks an invariant is named (passes/runner.py)

# After a compilation dynamo times its guards, for a line in its log, and flushes the processor's caches before that:
# up to 36 ms. Replaced before dynamo, which is imported later, takes it over.
torch._C._dynamo.guards.profile_guard_manager = lambda *arguments: 0.0

# After each compilation it collects garbage as well: a twentieth of the time of the tests that compile.
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")

# dynamo writes a record of all that it does where somebody listens, as pytest does: a tenth of its time.
logging.getLogger("torch.__trace").addHandler = lambda handler: None  # type: ignore[method-assign]


# Of devices that are not there torch.manual_seed notes the stack, lest one comes: a millisecond.
for _device in (torch.cuda, torch.xpu, torch.mtia):
    if not _device.is_available():
        _device.manual_seed_all = lambda seed: None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-cases", action="store_true", help="run whole products of parameters (tests/tools/pairwise.py)"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Run pairs of parameters' values in place of whole products."""
    config.pluginmanager.register(pairwise, "pairwise")


def pytest_collectstart(collector: pytest.Collector) -> None:
    """The random inputs that a file of tests makes when it is imported are the same ones each time."""
    if isinstance(collector, pytest.Module):
        torch.manual_seed(0)


@pytest.hookimpl(tryfirst=True)  # before pytest deselects what ``-m`` leaves out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the core, and put files with many slow tests first, then those with many.

    So no process is left alone with a long one at the end.
    """
    _mark_core(items)
    slow = Counter(item.path for item in items if item.get_closest_marker("slow") or item.get_closest_marker("zoo"))
    size = Counter(item.path for item in items)
    items.sort(key=lambda item: (-slow[item.path], -size[item.path], item.path))


def _mark_core(items: list[pytest.Item]) -> None:
    """Mark what ``make check`` runs: of each test function the first case, unless it is slow."""
    seen: set[str] = set()
    for item in items:
        function = item.nodeid.partition("[")[0]
        if function not in seen and not any(map(item.get_closest_marker, ("slow", "zoo", "gpu"))):
            seen.add(function)
            item.add_marker(pytest.mark.core)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Any:
    """Skip a test that converts with ``fuse=True`` on a CPU where that is an error: it wants AVX-512 and a compiler."""
    with skipped_without_loops():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup() -> Any:
    """Skip the tests of a fixture that converts so, likewise."""
    with skipped_without_loops():
        return (yield)


@contextlib.contextmanager
def skipped_without_loops() -> Iterator[None]:
    try:
        yield
    except ConversionError as error:
        if not (why := why_no_loops()) or not str(error).startswith(f"fuse=True: {why}"):
            raise
        pytest.skip(why)


# An eighth of the time of all tests went into collections of what stays anyway.
gc.set_threshold(50_000, 20, 100)


@pytest.fixture(autouse=True, scope="module")
def _left_by_others() -> None:
    """What modules and other files of tests left behind is collected once, and not looked at by every collection."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _small_ones_too(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of kernels on a GPU have few elements, for which torch's ops would serve there."""
    if request.node.get_closest_marker("gpu"):
        monkeypatch.setattr(sizes, "FEWEST", 0)


def context(level: str = "O1", low: torch.dtype = torch.bfloat16, **settings: Any) -> Context:
    """A context with the defaults of ``convert``."""
    return Context(low=low, policy=settings.pop("policy", None) or Policy.preset(level), **settings)


def traced(function: Callable[..., Any], *inputs: Tensor) -> GraphModule:
    """The FX graph of a function or module; with inputs, dtypes and shapes are known."""
    gm = symbolic_trace(function)
    for node in gm.graph.find_nodes(op="get_attr"):
        value = gm.get_parameter(node.target) if node.target in dict(gm.named_parameters()) else None
        node.meta["kind"] = "parameter" if value is not None else "buffer"
        if value is not None:
            node.meta["sizes"] = tuple(value.shape)
    if inputs:
        propagate_shapes(gm, inputs)
    return gm


def rewritten(gm: GraphModule, ctx: Context, until: str = "verify") -> GraphModule:
    """Run the pipeline up to and including the pass of that name."""
    names = [step.__name__ for step in PIPELINE]
    return run_passes(gm, ctx, PIPELINE[: names.index(until) + 1])


class MatmulDtypes(TorchDispatchMode):
    """Counts the matmuls and convolutions that run, by the dtype of their first operand. Lets dynamo's code run."""

    HEAVY = ("mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_dot_product", "mkldnn")

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[torch.dtype, int] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.removeprefix("aten::").startswith(self.HEAVY):
            dtype = next(a.dtype for a in args if isinstance(a, Tensor))
            self.counts[dtype] = self.counts.get(dtype, 0) + 1
        return func(*args, **(kwargs or {}))


def matmul_dtypes(function: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[torch.dtype, int]:
    """dtype -> matmuls of one call."""
    with MatmulDtypes() as mode:
        function(*args, **kwargs)
    return mode.counts


class Tools:
    """The helpers above, for tests (fixtures travel across files, imports between them do not)."""

    context = staticmethod(context)
    traced = staticmethod(traced)
    rewritten = staticmethod(rewritten)
    matmul_dtypes = staticmethod(matmul_dtypes)


@pytest.fixture
def tools() -> type[Tools]:
    return Tools


@pytest.fixture(scope="session")
def ask_two() -> Iterator[Callable[..., list[Any]]]:
    """``ask_two(function, *arguments)``: what it returns in two gloo processes; see two_ranks.py."""
    with two_ranks() as ask:
        yield ask
