"""Launches: the compiled kernel is called at once from the second time on, with the very arguments, where it may be."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import kernel_tools
import region_tools as tools
from fxprec.kernels.rows.emit import addresses
from fxprec.kernels.rows.run import kernel
from fxprec.kernels.rows.run.kernel import Launch, built


@dataclass
class OnDevice:
    """A tensor as a launch sees it."""

    address: int
    index: int = 0

    def data_ptr(self) -> int:
        return self.address

    def get_device(self) -> int:
        return self.index


@dataclass
class Triton:
    """Stands for ``built``'s kernel, and for what its launch gives back."""

    grid: tuple[int, ...] = ()
    looked_up: list[Any] = field(default_factory=list)
    direct: list[Any] = field(default_factory=list)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.grid = grid
        return self._run

    def _run(self, *arguments: Any, num_warps: int | None = None, enable_fp_fusion: bool = True) -> Any:
        if num_warps is None:
            self.direct.append((self.grid, arguments))
        else:
            self.looked_up.append((self.grid, arguments, num_warps))
        return self


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[Triton]:
    fake = Triton()
    entered: list[int] = []

    class Device:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            entered.append(self.index)

        def __exit__(self, *_: Any) -> None:
            pass

    monkeypatch.setattr(kernel, "built", lambda name, source: fake)
    monkeypatch.setattr(kernel, "interpreting", lambda: False)
    monkeypatch.setattr(kernel, "launcher", lambda compiled, grid: compiled[grid])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", Device)
    fake.entered = entered  # type: ignore[attr-defined]
    yield fake


def launch_of(function: Any, *inputs: torch.Tensor) -> Launch:
    launch = tools.plan_of(function, *inputs).inference_launch
    assert isinstance(launch, Launch)
    return launch


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(shape).requires_grad_()


def test_the_second_launch_does_not_ask_triton(triton: Triton) -> None:
    launch = launch_of(lambda x, b: F.silu(x) + b, torch.randn(40, 12), torch.randn(12))
    tensors: list[Any] = [OnDevice(16 * n) for n in range(1, 4)]
    launch(tensors, None, 0, None)
    others: list[Any] = [OnDevice(32 * n) for n in range(1, 4)]
    launch(others, None, 0, None)
    launch(others, None, 0, None)
    grid = (2, 1, 1)  # of 32 rows: those of 12 columns are read one by one
    assert triton.looked_up == [(grid, (*tensors, 40), launch.tiling.warps)]
    assert triton.direct == [(grid, (*others, 40))] * 2


def test_a_launch_that_runs_anothers_kernel_does_not_ask_triton_again(triton: Triton) -> None:
    first, second = (launch_of(lambda x: F.silu(x), torch.randn(40)) for _ in range(2))
    second = second.with_kernel_of(first)
    tensors: list[Any] = [OnDevice(16), OnDevice(32)]
    first(tensors, None, 0, None)
    second(tensors, None, 0, None)
    assert len(triton.looked_up) == 1 and len(triton.direct) == 1
    assert second.kernel == (first.name, first.source)


def test_unaligned_tensors_ask_each_time(triton: Triton) -> None:
    launch = launch_of(lambda x: F.silu(x), torch.randn(40))
    odd: list[Any] = [OnDevice(8), OnDevice(32)]
    even: list[Any] = [OnDevice(16), OnDevice(32)]
    for tensors in (odd, odd, even, even, odd):
        launch(tensors, None, 0, None)
    assert [arguments[0].address for _, arguments, _ in triton.looked_up] == [8, 8, 16, 8]
    assert [arguments[0].address for _, arguments in triton.direct] == [16]


def test_each_device_has_a_kernel_of_its_own(triton: Triton) -> None:
    launch = launch_of(lambda x: F.silu(x), torch.randn(40))
    for index in (0, 1, 1, 0):
        tensors: list[Any] = [OnDevice(16, index), OnDevice(32, index)]
        launch(tensors, None, 0, None)
    assert [arguments[0].index for _, arguments, _ in triton.looked_up] == [0, 1]
    assert [arguments[0].index for _, arguments in triton.direct] == [1, 0]
    assert triton.entered == [0, 1, 1]  # type: ignore[attr-defined]  # the last one is the current device


def test_arguments_are_in_the_order_of_the_kernels(triton: Triton) -> None:
    function = lambda x, b: F.dropout(F.layer_norm(x, (12,), b), 0.5, True)  # noqa: E731
    plan = tools.plan_of(function, leaf(400, 12), leaf(12))
    for launch in (plan.forward_launch, plan.backward_launch):
        header = re.search(rf"def {launch.name}\(\n    (.*),\n\):", launch.source)
        assert header is not None
        names = header[1].split(", ")
        pointers = [name for name in names if name.endswith("_ptr")]
        tensors: list[Any] = [OnDevice(16 * n) for n, _ in enumerate(pointers, 1)]
        seeds, partials = OnDevice(160), OnDevice(320)
        launch(tensors, seeds, 7, partials if launch.partials else None)  # type: ignore[arg-type]
        given = dict(zip(names, triton.looked_up[-1][1], strict=True))
        assert [given[name] for name in pointers] == tensors
        assert (given["seeds"], given["seed"], given["rows"]) == (seeds, 7, 400)
        assert given.get("partials") == (partials if launch.partials else None)
        assert [given[name] for name in names if "stride" in name] == [*launch.numbers[1:]]
    assert plan.forward_launch.partials is None and plan.backward_launch.partials == (3, 12)


def test_seeds_that_are_not_aligned_count_as_tensors(triton: Triton) -> None:
    launch = launch_of(lambda x: F.dropout(x, 0.5, True), torch.randn(40))
    tensors: list[Any] = [OnDevice(16), OnDevice(32)]
    for address in (16, 24, 16):
        launch(tensors, OnDevice(address), 0, None)  # type: ignore[arg-type]
    assert len(triton.looked_up) == 2 and len(triton.direct) == 1


@pytest.mark.skipif(not kernel_tools.HAS_TRITON, reason="reads Triton")
def test_triton_gives_back_what_can_be_called_with_all_arguments() -> None:
    """A ``JITFunction`` launches with the bound arguments in order, and so does the kernel that it returns."""
    from triton.compiler.compiler import CompiledKernel
    from triton.runtime.jit import JITFunction

    run, runner = inspect.getsource(JITFunction.run), inspect.getsource(CompiledKernel.__getitem__)
    assert "*bound_args.values())" in run and run.rstrip().endswith("return kernel")
    hooks = "knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook, "
    assert f"{hooks}*bound_args.values())" in run and f"{hooks}*args)" in runner
    assert "get_current_stream(device)" in runner


def test_a_kernel_is_built_once_and_can_be_read() -> None:
    launch = launch_of(lambda x: F.silu(x), torch.randn(40))
    one = built(launch.name, launch.source)
    assert one is built(launch.name, launch.source)
    if kernel_tools.HAS_TRITON:
        assert inspect.getsource(one.fn).strip() in launch.source


def test_names_and_strides() -> None:
    x = torch.randn(5, 14, 12)[:, :7, ::2]
    launch = launch_of(lambda x, b: x * b, x, torch.randn(6))
    assert "x_ptr + (row_0 * x_stride_0 + row_1 * x_stride_1)[:, None] + column.to(tl.int64) * x_step" in launch.source
    assert launch.numbers == (35, 7, 168, 12, 2, 42)
    assert not launch.wide and launch_of(lambda x, b: x * b, torch.randn(40, 16), torch.randn(16)).wide
    assert not launch_of(lambda x, b: x * b, torch.randn(40, 12), torch.randn(12)).wide


def test_a_name_that_is_taken_gets_a_number() -> None:
    taken: set[str] = set()
    assert [addresses._unique(name, taken) for name in ("x", "y", "x", "x", "x_2")] == ["x", "y", "x_2", "x_3", "x_2_2"]


@pytest.mark.parametrize(("rows", "programs"), [(100, 100), (3000, 187), (5000, 312), (20000, 528), (10**6, 528)])
def test_programs_that_add_up_columns_fill_the_device_and_no_more(rows: int, programs: int) -> None:
    device = torch.device("cuda", 0)
    x = torch.empty(rows, 2048, device="meta").requires_grad_()
    plan = tools.plan_of(lambda x, b: F.layer_norm(x, (2048,), b), x, leaf(2048), device=device)
    if torch.cuda.is_available() and programs > 100:
        programs = kernel._resident(device, rows, plan.backward_launch.tiling.resident)
    assert plan.backward_launch.partials == (programs, 2048) and plan.backward_launch.grid == (programs, 1, 1)
    assert plan.forward_launch.grid == (rows, 1, 1)
