"""Generated kernels of five models at their real widths: compiled for three architectures, without a GPU.

No register spills, 16-byte accesses wherever a tensor's rows allow them, and no more memory traffic than the tensors
that go in and come out. The models have one layer each; their regions are formed and derived as on a GPU, and nothing
is launched.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import fxprec
import kernel_tools as tools
import region_tools
from fxprec import settings
from fxprec.kernels.launch import triton_support
from fxprec.kernels.nn import rope
from fxprec.kernels.rows.program.layout import Spec
from fxprec.kernels.rows.run.derive import make_plan
from fxprec.kernels.rows.run.plan import bytes_moved
from small_transformers import MODELS

pytestmark = [pytest.mark.zoo, pytest.mark.slow]


#: 16 bytes.
WIDE = {"v4.b32", "v2.b64"}


class NoProducts(TorchDispatchMode):
    """Matrix products give zeros: they are slow on some CPUs, and no region asks for values."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default):
            rows, columns = args[-2:]
            return rows.new_zeros(*rows.shape[:-1], columns.shape[-1])
        return func(*args, **(kwargs or {}))


@functools.cache
def regions(name: str) -> tuple[Any, ...]:
    """The fused regions of a model after one training step in which no kernel ran."""
    pytest.importorskip("transformers")
    from fxprec.kernels.rows.program.layout import Spec
    from fxprec.kernels.rows.run.kernel import Launch

    zeros = Spec.empty

    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_support, "can_launch", lambda device: True)
        patch.setattr(settings, "why_no_kernels", lambda device: "")
        patch.setattr(rope, "can_launch", lambda device: False)  # nor do they run, whoever imported them first
        for op in ("batch_norm", "cross_entropy", "group_norm", "max_pool2d"):  # their kernels have tests of their own
            patch.setattr(import_module(f"fxprec.kernels.calls.{op}"), "triton_serves", lambda x: False)
        patch.setattr(Launch, "__call__", lambda *arguments: None)
        patch.setattr(Spec, "empty", lambda spec, device: zeros(spec, device).zero_())  # some are indices later on
        model, _ = fxprec.convert(model.train(), dtype=torch.bfloat16, fuse=True)
        with NoProducts():
            model(**inputs).logits.float().sum().backward()
    found = [region for gm in fxprec.graphs(model) for region in gm.modules() if hasattr(region, "plans")]
    assert found and all(region.path == "triton" for region in found), [region.reason for region in found]
    return tuple(found)


def launches(name: str) -> Iterator[tuple[Any, list[torch.dtype]]]:
    """(launch, dtypes of its tensors), each source once."""
    seen: set[str] = set()
    for region in regions(name):
        for plan in region.plans:
            for launch, dtypes in plan.launches():
                source = re.sub(r"\w+_(ptr|value|stride_\d|step)|fused_\w+|\b\w+(?=[,)] )", "", launch.source)
                if source not in seen:
                    seen.add(source)
                    yield launch, dtypes


@tools.compiles
@pytest.mark.parametrize("architecture", tools.ARCHITECTURES)
@pytest.mark.parametrize("model", MODELS)
def test_no_spills_and_wide_accesses(model: str, architecture: int) -> None:
    print(f"\n{'kernel':50} registers  shared  form")
    for launch, dtypes in launches(model):
        found = tools.compiled_launch(launch, dtypes, architecture)
        form = launch.tiling
        print(f"{launch.name:50} {found.registers:9} {found.shared:7}  {form.kind} {form.rows} x {form.block}")
        # Below its limit ptxas may keep a number or two in memory, of its own choice, for more warps at one time.
        assert found.spills <= (8 if found.registers <= 128 else 0), launch.name
        assert not re.search(r"\b(atom|red)\.global", found.ptx)
        if launch.wide:  # every full tensor walks its columns one by one, and a row is a multiple of 16 bytes
            whole = re.search(r"tl\.load\([^\n]*\[:, None\] \+ column", launch.source)  # not a row for all rows
            ahead = re.search(r"cp\.async\.c[ag]\.shared\.global [^\n]*, 0x(8|10),", found.ptx)
            assert found.accesses("ld") & WIDE or ahead or not whole, launch.name
            assert found.accesses("st") & WIDE, launch.name
            narrow = found.accesses("ld") - WIDE
            assert narrow <= {"b32", "b64", "v2.b32"}, (launch.name, narrow)  # statistics, seeds, scalars


@tools.compiles
@pytest.mark.parametrize("columns", [512, 768, 1024, 4096, 5120, 8192, 12288, 16384])
@pytest.mark.parametrize("norm", [F.layer_norm, F.rms_norm])
def test_norms_do_not_spill_up_to_the_longest_tile(norm: Any, columns: int) -> None:
    x, weight = Spec((16384, columns), (columns, 1), torch.bfloat16, True), Spec((columns,), (1,), torch.float32, True)
    graph = region_tools.graph_of(lambda x, r, w: norm(x + r, (columns,), w))
    plan = make_plan("fused", graph, [x, x, weight], torch.device("cuda"), {})
    for launch, dtypes in plan.launches():
        found = tools.compiled_launch(launch, dtypes, 90)
        # As above; Triton 3.6's ptxas keeps four numbers of a row's loop so, with 80 registers.
        assert found.spills <= (16 if found.registers <= 128 else 0), (launch.name, launch.tiling, found.spills)


@pytest.mark.parametrize("model", MODELS)
def test_bytes_moved_are_those_of_inputs_and_outputs(model: str) -> None:
    for region in regions(model):
        for plan in region.plans:
            moved, bound = bytes_moved(plan)
            assert moved <= 1.1 * bound, (region.name, moved / bound)
