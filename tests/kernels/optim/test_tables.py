"""The tables of a multi-tensor launch: what they say, when they are made anew, and what may not go in."""

from __future__ import annotations

import math
import pathlib
import subprocess
import sys
import weakref

import pytest
import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

import kernel_tools
from fxprec.kernels.optim import adam as multi_tensor_adam
from fxprec.kernels.optim import norm as multi_tensor_norm
from fxprec.kernels.optim.adam import AdamSettings, float32, split
from fxprec.kernels.optim.tables import MultiTensorPlan, chunk_size, device_rate
from optim_references import fma, sqrt

CUDA = pytest.mark.skipif(not kernel_tools.CUDA, reason="no CUDA device")
SHAPES = [(5, 3), (0,), (), (8192,), (20000,), (8193,)]


def parameters(device: str = "cpu") -> list[Tensor]:
    return [torch.randn(shape, device=device) for shape in SHAPES]


def adam_plan(params: list[Tensor], **lists: object) -> MultiTensorPlan:
    states = [[torch.zeros_like(p) for p in params] for _ in range(2)]
    return MultiTensorPlan(params, states=states, steps=[p.new_zeros(()) for p in params], **lists)  # type: ignore[arg-type]


# What the tables say


def test_the_chunks_cover_every_element_once_and_an_empty_tensor_has_one() -> None:
    params = parameters()
    plan = MultiTensorPlan(params)
    tables = plan.bind([None] * len(params)).tables
    assert tables.chunks.dtype == torch.int32
    assert tables.chunks.tolist() == [[0, 0], [1, 0], [2, 0], [3, 0], [4, 0], [4, 1], [4, 2], [5, 0], [5, 1]]
    assert tables.entries[:, 0].tolist() == [15, 0, 1, 8192, 20000, 8193]
    assert tables.entries[:, 1].tolist() == [1, 1, 1, 1, 3, 2]


def test_an_entry_holds_every_address_and_zero_for_what_is_not_there() -> None:
    params = [torch.randn(4), torch.randn(0), torch.randn(3)]
    shadows = [None, torch.empty(0, dtype=torch.float16), torch.empty(3, dtype=torch.float16)]
    plan = adam_plan(params, shadows=shadows, indices=[7, 8, 9])
    assert plan.steps is not None
    entries = plan.bind([None] * 3).tables.entries
    assert entries[:, 2].tolist() == [7, 8, 9]
    assert entries[0, 3:].tolist() == [
        params[0].data_ptr(),
        plan.states[0][0].data_ptr(),
        plan.states[1][0].data_ptr(),
        0,
        plan.steps[0].data_ptr(),
        0,
    ]
    assert entries[2, 8] == shadows[2].data_ptr()  # type: ignore[union-attr]
    assert 0 not in entries[1, [3, 4, 5, 7, 8]], "an empty tensor is not a missing one"


def test_chunks_grow_until_there_are_at_most_32768() -> None:
    assert chunk_size([100, 0]) == 8192
    assert chunk_size([8192 * 32768]) == 8192
    assert chunk_size([8192 * 32768 + 1]) == 16384
    assert chunk_size([5] * 40000) == 8192, "tensors cannot share a chunk"


def test_the_gradient_row_holds_addresses_and_zero_for_none() -> None:
    params = parameters()[:3]
    gradients = [torch.randn(5, 3).half(), torch.randn(0).half(), None]
    bound = MultiTensorPlan(params).bind(gradients)
    assert bound.row[0] == gradients[0].data_ptr() and bound.row[1] != 0 and bound.row[2] == 0  # type: ignore[union-attr]
    assert bound.dtype == torch.float16


@pytest.mark.parametrize("which", ["params", "states", "shadows", "gradients"])
def test_one_misaligned_address_is_enough_to_forbid_wide_accesses(which: str) -> None:
    def tensor(misaligned: bool, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(9, dtype=dtype)[1:] if misaligned else torch.zeros(8, dtype=dtype)

    def bound(which: str) -> bool:
        plan = MultiTensorPlan(
            [tensor(False), tensor(which == "params")],
            states=[[tensor(False), tensor(which == "states")]],
            # A step count is read alone: where it lies does not matter.
            steps=[torch.zeros(2)[1], torch.zeros(2)[1]],
            shadows=[None, tensor(which == "shadows", torch.bfloat16)],
        )
        return plan.bind([None, tensor(which == "gradients")]).aligned

    assert bound("nothing") and not bound(which)


def test_a_copied_gradient_has_no_history() -> None:
    gradient = torch.randn(3, 4, requires_grad=True).t().contiguous().t()
    (bound,) = MultiTensorPlan([torch.nn.Parameter(torch.zeros(3, 4))]).bind([gradient]).tensors
    assert bound is not None and bound is not gradient and not bound.requires_grad


# When they are made anew


def test_new_gradients_send_one_row_and_nothing_else() -> None:
    plan = adam_plan(parameters())
    first, second = (plan.bind(parameters()) for _ in range(2))
    assert first.tables is second.tables and not torch.equal(first.row, second.row)


def test_the_same_gradients_send_nothing() -> None:
    params, gradients = parameters(), parameters()
    plan = adam_plan(params)
    assert plan.bind(gradients).row is plan.bind(list(gradients)).row


@pytest.mark.parametrize("which", ["params", "exp_avg", "shadows"])
def test_other_memory_under_a_tensor_makes_the_tables_anew(which: str) -> None:
    params = parameters()
    shadows = [p.half() for p in params]
    plan = adam_plan(params, shadows=shadows)
    before = plan.bind(params).tables
    moved = {"params": params, "exp_avg": plan.states[0], "shadows": shadows}[which][0]
    moved.data = moved.data.clone()
    after = plan.bind(params).tables
    assert after is not before
    assert after.entries[0, {"params": 3, "exp_avg": 4, "shadows": 8}[which]] == moved.data_ptr()


def test_other_memory_that_does_not_fit_is_refused_and_the_old_tables_stay() -> None:
    params = parameters()
    plan = adam_plan(params)
    old, tables = params[0].data, plan.bind(params).tables
    params[0].data = torch.zeros(7)
    with pytest.raises(ValueError, match=r"states\[0\]\[0\] has shape \(5, 3\), its parameter \(7,\)"):
        plan.bind([None] * len(params))
    params[0].data = old
    assert plan.bind(params).tables is tables


def test_a_parameter_that_shrinks_in_its_own_memory_is_noticed() -> None:
    params = [torch.zeros(8)]
    plan = MultiTensorPlan(params)
    params[0].data = params[0].data[:5]
    with pytest.raises(ValueError, match=r"had shape \(8,\) when the plan was made, and has \(5,\) now"):
        plan.bind([torch.zeros(5)])


def test_a_default_device_does_not_matter() -> None:
    with torch.device("meta"):
        bound = MultiTensorPlan([torch.zeros(3, device="cpu")]).bind([torch.zeros(3, device="cpu")])
    assert {t.device.type for t in (bound.row, bound.tables.chunks, bound.tables.entries)} == {"cpu"}


def test_a_plan_does_not_keep_gradients_alive() -> None:
    plan = MultiTensorPlan([torch.zeros(4)])
    gradient = torch.zeros(4)
    seen = weakref.ref(gradient)
    bound = plan.bind([gradient])
    del gradient
    assert seen() is not None, "until the step is done"
    del bound
    assert seen() is None


# What may go in, and what not


@pytest.mark.parametrize(
    "gradient",
    [
        torch.randn(2, 3, 4, 5),  # contiguous, the parameter is channels_last
        torch.randn(1, 1, 1, 1).expand(2, 3, 4, 5),
        torch.randn(2, 6, 4, 5)[:, ::2],
    ],
)
def test_a_gradient_in_another_order_is_copied_into_the_parameters(gradient: Tensor) -> None:
    param = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    (bound,) = MultiTensorPlan([param]).bind([gradient]).tensors
    assert bound is not None and bound is not gradient
    assert bound.stride() == param.stride() and torch.equal(bound, gradient)


@pytest.mark.parametrize("param", [torch.randn(6, 4, 1), torch.randn(4, 6, 1).transpose(0, 1)])
def test_strides_of_dimensions_of_size_one_do_not_matter(param: Tensor) -> None:
    gradient = torch.randn(24).as_strided((6, 4, 1), (*param.stride()[:2], 99))
    (bound,) = MultiTensorPlan([param]).bind([gradient]).tensors
    assert bound is gradient


def test_a_transposed_parameter_is_as_good_as_any() -> None:
    param = torch.randn(6, 4).t()
    plan = MultiTensorPlan([param], states=[[torch.zeros_like(param)]])
    assert plan.bind([torch.zeros_like(param)]).tensors[0] is not None


@pytest.mark.parametrize(
    ("gradient", "error", "message"),
    [
        (torch.eye(3).to_sparse(), TypeError, r"gradients\[1\] has layout torch.sparse_coo.*densify"),
        (torch.eye(3).cfloat(), TypeError, r"gradients\[1\] is torch.complex64; the kernels take float32"),
        (torch.eye(3).double(), TypeError, r"gradients\[1\] is torch.float64"),
        (TwoTensor(torch.eye(3), torch.eye(3)), TypeError, r"gradients\[1\] is a TwoTensor.*its local tensor"),
        (torch.zeros(9), ValueError, r"gradients\[1\] has shape \(9,\), its parameter \(3, 3\)"),
        (torch.zeros(3, 3, device="meta"), ValueError, r"gradients\[1\] is on 'meta', its parameter on 'cpu'"),
    ],
)
def test_a_gradient_that_kernels_cannot_read_is_refused(gradient: Tensor, error: type[Exception], message: str) -> None:
    plan = MultiTensorPlan([torch.zeros(3, 3), torch.zeros(3, 3)])
    with pytest.raises(error, match=message):
        plan.bind([None, gradient])


def test_gradients_of_two_dtypes_are_refused() -> None:
    plan = MultiTensorPlan([torch.zeros(3), torch.zeros(3)])
    with pytest.raises(ValueError, match=r"gradients mixes torch.float16 and torch.float32.*one plan for each"):
        plan.bind([torch.zeros(3), torch.zeros(3).half()])


def test_one_gradient_for_two_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match="Got 1 gradients for 2 parameters"):
        MultiTensorPlan([torch.zeros(3), torch.zeros(3)]).bind([torch.zeros(3)])


@pytest.mark.parametrize(
    ("lists", "error", "message"),
    [
        ({"params": []}, ValueError, "at least one parameter"),
        ({"params": [torch.zeros(3, dtype=torch.float64)]}, TypeError, r"params\[0\] is torch.float64"),
        ({"params": [torch.zeros(3), torch.zeros(3).half()]}, ValueError, "params mixes"),
        ({"params": [torch.zeros(4, 4)[:, ::2]]}, ValueError, r"params\[0\] of shape \(4, 2\).*has gaps"),
        ({"params": [torch.zeros(1).expand(4)]}, ValueError, "overlaps itself"),
        ({"params": [torch.zeros(3), torch.zeros(3, device="meta")]}, ValueError, r"params\[1\] is on 'meta'"),
        ({"states": [[]]}, ValueError, r"states\[0\] has 0 items for 1 parameters"),
        ({"states": [[torch.zeros(3).half()]]}, TypeError, "float16, which cannot hold exp_avg_sq"),
        ({"states": [[torch.zeros(3)], [torch.zeros(3).bfloat16()]]}, ValueError, "states mixes"),
        ({"params": [torch.zeros(2, 2).t()], "states": [[torch.zeros(2, 2)]]}, ValueError, "same order"),
        ({"steps": [torch.zeros((), dtype=torch.float64)]}, ValueError, r"steps\[0\] must be one float32 number"),
        ({"steps": [torch.zeros(2)]}, ValueError, r"steps\[0\] must be one float32 number"),
        ({"shadows": [torch.zeros(4).half()]}, ValueError, r"shadows\[0\] has shape \(4,\)"),
        ({"indices": [1, 2]}, ValueError, "indices has 2 items"),
    ],
)
def test_lists_that_do_not_fit_are_refused(lists: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        MultiTensorPlan(**{"params": [torch.zeros(3)], **lists})  # type: ignore[arg-type]


@pytest.mark.slow
def test_without_triton_everything_imports_and_torchs_kernels_update() -> None:
    program = """
import sys
sys.modules["triton"] = None
import torch
from fxprec.kernels.optim import adam, norm, sgd
from fxprec.optim import AdamW
parameter = torch.nn.Parameter(torch.zeros(3))
parameter.grad = torch.ones(3)
optimizer = AdamW([parameter], lr=1.0)
optimizer.step()
assert (parameter + 1).abs().max() < 1e-6 and optimizer.implementations() == {"torch (Triton is not installed)": 1}
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=pathlib.Path(__file__).parents[3])


# Arithmetic


def test_fma_rounds_once() -> None:
    a = torch.tensor(1 + 2.0**-12)
    product = (1 + 2.0**-12) ** 2  # 1 + 2**-11 + 2**-24: FP32 drops the last term
    assert fma(a, a, torch.tensor(-1.0)).item() == product - 1
    assert (a * a - 1).item() != product - 1
    assert fma(a, 0.1, torch.zeros(())).item() == float32(float32(0.1) * a.item())


def test_the_square_root_is_correctly_rounded() -> None:
    x = torch.rand(20000)
    root = sqrt(x).double()
    spacing = (torch.nextafter(sqrt(x), torch.tensor(2.0)).double() - root).max()
    assert ((root - x.double().sqrt()).abs() <= spacing / 2).all()


@pytest.mark.parametrize("value", [0.0, 1e-3, -0.1, math.log(0.999), 3.0, math.inf, -math.inf, 1e300])
def test_two_float32_hold_48_bits_of_a_double(value: float) -> None:
    high, low = split(value)
    assert float32(high) == high and float32(low) == low
    assert high + low == pytest.approx(value, rel=2.0**-48) or (abs(value) > 1e38 and math.isinf(high) and low == 0)


def test_a_rate_on_the_cpu_is_a_number_and_one_on_the_device_a_pointer() -> None:
    on_cpu, device = torch.tensor(0.5, dtype=torch.float64), torch.device("meta")
    on_device, wide = torch.tensor(0.5, device="meta"), torch.tensor(0.5, device="meta", dtype=torch.float64)
    assert device_rate(0.25, device) == (None, 0.25)
    assert device_rate(on_cpu, device) == (None, 0.5)
    assert device_rate(on_device, device)[0] is on_device and device_rate(wide, device)[0] is wide
    with pytest.raises(ValueError, match="lr must be one float32 number on 'meta'"):
        device_rate(torch.zeros(2, device="meta"), device)


# On a device


@pytest.mark.gpu
@CUDA
def test_nothing_waits_for_the_device() -> None:
    params = parameters("cuda")
    plan = adam_plan(params)
    scale = torch.tensor(2.0, device="cuda")
    multi_tensor_norm.launch(plan.bind(params))  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            bound = plan.bind([torch.zeros_like(p) for p in params])
            found = multi_tensor_norm.launch(bound, grad_scale=scale).found_inf
            multi_tensor_adam.launch(bound, AdamSettings(), lr=0.1, grad_scale=scale, found_inf=found)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@CUDA
def test_a_captured_step_replays_as_it_runs() -> None:
    start = parameters("cuda")
    eager, captured = ([p.clone() for p in start] for _ in range(2))
    plans = [adam_plan(eager), adam_plan(captured)]
    source = [torch.zeros_like(p) for p in start]

    def step(plan: MultiTensorPlan) -> None:
        bound = plan.bind([g * 2 for g in source])  # new memory at every step
        found = multi_tensor_norm.launch(bound).found_inf
        multi_tensor_adam.launch(bound, AdamSettings(), lr=0.1, found_inf=found)

    def fill(seed: int) -> None:
        torch.manual_seed(seed)
        for g in source:
            g.normal_()

    fill(0)
    step(plans[0])
    step(plans[1])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(plans[1])
    for seed in range(1, 4):
        fill(seed)
        step(plans[0])
        graph.replay()
    for a, b in zip(eager, captured, strict=True):
        assert torch.equal(a, b)
    step(plans[1])  # what the capture sent is not taken for what is there
    step(plans[0])
    for a, b in zip(eager, captured, strict=True):
        assert torch.equal(a, b)


@pytest.mark.gpu
@CUDA
def test_tables_are_not_made_during_a_capture() -> None:
    params = [torch.zeros(8, device="cuda")]
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="run one step before the capture"), torch.cuda.graph(graph):
        MultiTensorPlan(params)
