"""What fusion is for, counted: kernels of a transformer block, casts of a GPT, bytes of its regions, derivations.

Kernels and casts are counted by dispatch modes in Triton's interpreter, for which no GPU is needed; bytes follow from
the plans for real sizes, which nothing runs.
"""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fxprec
import kernel_tools
from benchmarks.workloads.models import GPT, Block
from fxprec.capture.symbolic.trace import propagate_shapes, trace_static
from fxprec.kernels.rows.program.layout import spec_of
from fxprec.kernels.rows.run.derive import make_plan
from fxprec.kernels.rows.run.plan import RegionPlan, bytes_moved
from fxprec.kernels.rows.run.region import FusedRegion
from fxprec.passes.insert_casts import actual_dtype
from fxprec.testing import count_casts

on_devices = pytest.mark.parametrize("device", kernel_tools.DEVICES)
outside = pytest.mark.skipif(kernel_tools.INTERPRETING, reason="wants to be outside of the interpreter")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::UserWarning")  # of the interpreter


@pytest.mark.slow
def test_the_kernels_in_the_interpreter() -> None:
    kernel_tools.run_in_the_interpreter(__file__)


class Kernels(TorchDispatchMode):
    """Counts what launches a kernel, without matrix products, attention and casts of parameters' gradients."""

    HEAVY = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_scaled_dot_product")
    VIEWS = (
        "view _unsafe_view t transpose permute expand unsqueeze squeeze select slice split split_with_sizes detach "
        "alias as_strided unbind reshape empty empty_strided empty_like new_empty_strided narrow lift_fresh new_empty "
        "_reshape_alias"
    ).split()

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        node = torch._C._current_autograd_node()
        of_weight = name == "aten::_to_copy" and node is not None and node.name().startswith("ToCopyBackward")
        alone = name.removeprefix("aten::") in self.VIEWS or name.startswith(self.HEAVY)
        if not alone and not (of_weight and args[0].dim() < 3):
            self.names[name] += 1
        return result


def gpt(layers: int, dim: int = 16, dropout: float = 0.1) -> nn.Module:
    torch.manual_seed(0)
    return GPT(layers, dim, heads=2, vocabulary=32, context=16, dropout=dropout)


def codes(batch: int, time: int, device: str) -> tuple[Tensor, Tensor]:
    return torch.randint(32, (batch, time), device=device), torch.randint(32, (batch, time), device=device)


def fused(model: nn.Module, dtype: torch.dtype = torch.float16, **settings: Any) -> nn.Module:
    return fxprec.convert(model, fuse=True, dtype=dtype, **settings).module


def launched(run: nn.Module, device: str) -> Counter[str]:
    """Of the second of two steps."""
    inputs = codes(16, 16, device)
    run(*inputs).backward()
    run.zero_grad()
    with Kernels() as seen:
        run(*inputs).backward()
    return seen.names


class Autocast(nn.Module):
    """What fxprec stands beside."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor) -> Tensor:
        with torch.autocast(inputs[0].device.type, dtype=torch.bfloat16):
            return self.model(*inputs)


@on_devices
def test_a_block_runs_at_most_12_kernels(device: str) -> None:
    own = launched(fused(gpt(3).to(device)), device) - launched(fused(gpt(2).to(device)), device)
    other = launched(Autocast(gpt(3).to(device)), device) - launched(Autocast(gpt(2).to(device)), device)
    assert own["fxprec::region_forward"] == own["fxprec::region_backward"] == 3
    assert own.total() <= 12
    assert other.total() > 2 * own.total()


@on_devices
def test_casts_of_a_gpt(device: str) -> None:
    """Eager autocast: 270 (benchmarks.casts)."""
    model, inputs = gpt(12, dim=4).to(device), codes(1, 2, device)
    casts = []
    for low_gradients in (False, True):
        own = fused(copy.deepcopy(model))
        if low_gradients:
            fxprec.optim.AdamW(own.parameters(), low_gradients=True)
        own(*inputs).backward()
        with count_casts() as counts:
            own(*inputs).backward()
        casts.append(counts.total)
    assert casts[0] <= 100
    assert casts[1] <= 4


@on_devices
def test_equal_layers_are_derived_once(device: str) -> None:
    model = fused(gpt(24, dim=4).to(device))
    model(*codes(1, 2, device))
    (graph,) = fxprec.graphs(model)
    regions = [module for module in graph.children() if isinstance(module, FusedRegion)]
    assert {region.path for region in regions} == {"triton"} and len(regions) == 24 * 3 + 1
    derived = [plan.derived for region in regions for plan in region.plans]
    assert len(derived) == len(regions)
    # the first, the MLP's, that of a residual and its norm, and the last: nobody reads its residual
    assert len({id(each) for each in derived}) == 4
    launches = [plan.forward_launch for region in regions for plan in region.plans]
    compiled = {launch.kernel or (launch.name, launch.source) for launch in launches}
    assert len(compiled) == 4 and len({launch.source for launch in launches}) == len(launches)
    assert len({id(launch._compiled) for launch in launches}) == 4, "with one compiled kernel each"


# -- bytes -------------------------------------------------------------------------------------------------------------


def plans(tools: Any, module: nn.Module, *inputs: Tensor) -> list[RegionPlan]:
    """Of the regions of a module, for CUDA."""
    gm = trace_static(module, tuple("xyz"[: len(inputs)]), {}).gm
    assert propagate_shapes(gm, inputs)
    gm = tools.rewritten(gm, tools.context(regions="triton", device="cuda"), until="fuse")
    found = []
    for call in gm.graph.find_nodes(op="call_module"):
        region = gm.get_submodule(call.target)
        specs = []
        for source in call.args:
            if source.name == "draw_seeds_like":
                continue
            value, dtype = source.meta["val"], actual_dtype(source)
            like = torch.empty_strided(value.shape, value.stride(), dtype=dtype or value.dtype, device="meta")
            specs.append(spec_of(like.requires_grad_(like.is_floating_point())))
        found.append(make_plan(region.name, region.graph_module, specs, torch.device("cuda"), {}))
    return found


class Row(Block):
    """A block, named by its first argument."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


@outside
@pytest.mark.parametrize(("dim", "time"), [(768, 1024), (1024, 2048)])
def test_regions_move_little_more_than_they_must(tools, dim: int, time: int) -> None:
    with torch.device("meta"):
        block, x = Row(dim, dim // 64, 0.1), torch.empty(4, time, dim)
    found = plans(tools, block, x)
    assert [plan.name for plan in found] == [
        "fused_layer_norm", "fused_bias_dropout_add_layer_norm", "fused_bias_gelu", "fused_bias_dropout_add",
    ]  # fmt: skip
    for plan in found:
        moved, bound = bytes_moved(plan)
        assert bound <= moved <= 1.1 * bound, plan.name
