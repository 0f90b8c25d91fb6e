"""``python -m benchmarks step --predict``: what torch's ops move, times of parts, and both sides of a tiny step."""

from __future__ import annotations

import json
import multiprocessing
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import kernel_tools
from benchmarks import step
from benchmarks.predict import inductor, steps
from benchmarks.predict.autocast import Autocast
from benchmarks.predict.launches import Launch, Unread
from benchmarks.predict.machines import MACHINES
from benchmarks.predict.model import LAUNCH, Kernel, predict
from benchmarks.predict.ops import Uncomputed, Work
from benchmarks.predict.ours import unseen
from benchmarks.predict.parts import ASSUMED, Parts, times_of
from benchmarks.predict.sass import Instruction
from benchmarks.reports import predicted
from fxprec.kernels.launch.observers import ANY_MODE, TRACING, watcher

H200 = MACHINES["H200"]
needs_inductor = pytest.mark.skipif(bool(inductor.why_not()), reason=inductor.why_not())
#: More bytes than are computed.
SIDE = 1024


# -- torch's ops ------------------------------------------------------------------------------------------------------


def counted(run) -> list[Work]:
    with Uncomputed() as ops:
        run()
    return ops.work


def test_ops_read_and_write_each_tensor_once_and_compute_nothing():
    x, into = torch.full((SIDE, SIDE), 2.0), torch.full((SIDE, SIDE), 3.0)
    row, low = torch.ones(SIDE), into.bfloat16()
    size = 4 * SIDE * SIDE
    results = []
    (add, column, cast, taken, grown, view) = (
        counted(lambda: results.append(x + row)),
        counted(lambda: x + row[:1].expand(SIDE)),
        counted(lambda: x.bfloat16()),
        counted(lambda: into.copy_(low)),
        counted(lambda: into.add_(x)),
        counted(lambda: x.t().reshape(-1, 2)[1:].view(-1)),
    )
    assert add == [Work("add", "other", 0, 2 * size + 4 * SIDE)] and results[0].shape == (SIDE, SIDE)
    assert column[0].bytes == 2 * size + 4
    assert cast == [Work("_to_copy", "other", 0, size + size // 2)]
    assert taken == [Work("copy_", "other", 0, size + size // 2)] and grown[0].bytes == 3 * size
    assert [each.name for each in view] == ["clone"]
    assert (into == 3).all() and (x == 2).all()


def test_a_lookup_reads_what_it_returns_and_small_numbers_are_computed():
    weight, codes = torch.zeros(2**16, 64), torch.arange(512)
    (found,) = counted(lambda: F.embedding(codes, weight))
    assert found.bytes == 2 * 4 * 512 * 64 + 8 * 512
    with Uncomputed():
        assert (codes + 1).sum().item() == 512 * 513 // 2


def test_products_count_as_flops_and_attention_by_its_mask():
    x, w = torch.zeros(SIDE, SIDE, requires_grad=True), torch.zeros(SIDE, 2 * SIDE, requires_grad=True)
    products = counted(lambda: (x @ w).sum().backward())
    assert [each.flops for each in products if each.kind == "product"] == [4 * SIDE**3] * 3
    q = torch.zeros(2, 4, SIDE, 64, requires_grad=True)
    whole, half = (attended(q, causal) for causal in (False, True))
    assert whole == [2 * 2 * 2 * 4 * SIDE**2 * 64, 5 * 2 * 2 * 4 * SIDE**2 * 64]
    assert half == [each // 2 for each in whole]


def attended(q, causal) -> list[int]:
    work = counted(lambda: F.scaled_dot_product_attention(q, q, q, is_causal=causal).sum().backward())
    return [each.flops for each in work if each.kind == "attention"]


def test_gradients_of_convolutions_lie_as_images_and_weights_do():
    images = torch.zeros(8, 64, 32, 32).contiguous(memory_format=torch.channels_last).requires_grad_()
    layer = torch.nn.ConvTranspose2d(64, 16, 2, stride=2).to(memory_format=torch.channels_last)
    made = []
    with Uncomputed() as ops:
        made.append(layer(images))
        made[0].sum().backward()
    last = torch.channels_last
    assert made[0].is_contiguous(memory_format=last) and images.grad.is_contiguous(memory_format=last)
    assert layer.bias.grad.shape == (16,)
    flops = 2 * 8 * 32 * 32 * 64 * 16 * 4
    assert [each.flops for each in ops.work if each.kind == "convolution"] == [flops, 2 * flops]


def test_kernels_see_no_mode_that_counts_and_see_others():
    with unseen(), Uncomputed():
        assert watcher(ANY_MODE) is None
        with FakeTensorMode():
            assert watcher(ANY_MODE) is ANY_MODE and watcher(TRACING) is TRACING
    with Uncomputed():
        assert watcher(ANY_MODE) is ANY_MODE


def test_casts_are_those_of_autocast_on_cuda():
    x, w = torch.ones(4, 8), torch.ones(8, 8)
    with Autocast(torch.bfloat16):
        low = F.linear(x, w)
        kept, wide = F.gelu(low), (F.layer_norm(low, (8,)), F.cross_entropy(low, torch.zeros(4, dtype=torch.int64)))
        products = (x @ w, F.conv2d(torch.ones(1, 8, 4, 4), torch.ones(8, 8, 1, 1)))
        attended = F.scaled_dot_product_attention(*(3 * [torch.ones(1, 2, 4, 8, device="meta")]))
    assert {each.dtype for each in (low, kept, *products, attended)} == {torch.bfloat16}
    assert {each.dtype for each in wide} == {torch.float32}


# -- times ------------------------------------------------------------------------------------------------------------


def launch(programs: int) -> Launch:
    path = (
        Instruction("LDG.E.128", "load", 16, 1, (0, -1), 0), Instruction("STG.E.128", "store", 16, 1, (-1, -1), 1),
    )  # fmt: skip
    return Launch("copy", Kernel(path, (), 32, 0, 4, programs, 512.0 * 4 * programs, 512.0 * 4 * programs), 0)


def test_a_step_takes_the_best_forms_shares_of_the_peak_and_bytes_at_the_rate_of_a_copy():
    fast, slow = launch(4000), launch(8000)
    bound_by_flops, bound_by_bytes = Work("mm", "product", 10**13, 10**6), Work("mm", "product", 10**6, 10**9)
    parts = Parts([(slow, fast), (fast,)], [bound_by_flops, bound_by_bytes, Work("add", "other", 0, 10**9)])
    best, middle, worst = times_of(parts, H200)
    assert best.all < middle.all < worst.all and middle.launches == 5
    simulated = predict(fast.kernel, H200).seconds - LAUNCH
    assert middle.kernels == pytest.approx(2 * (simulated * ASSUMED[1].model + LAUNCH))
    assert middle.others == pytest.approx(1e9 / H200.achieved + LAUNCH)
    assert middle.products == pytest.approx(
        1e13 / (ASSUMED[1].shares["product"] * H200.flops) + 1e9 / H200.achieved + 2 * LAUNCH
    )
    assert times_of(parts.first(), H200)[1].kernels > middle.kernels
    unread = times_of(Parts([], [], [Unread("sums", 1e9, "")]), H200)[1]
    assert unread.kernels == pytest.approx(1e9 / H200.achieved + LAUNCH) and unread.launches == 1


# -- a tiny step, both ways -------------------------------------------------------------------------------------------


def parts_of(side: str, model: str) -> Parts:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(steps.parts_of, side, model, "tiny", "H200", torch.bfloat16).result()


@kernel_tools.compiles
@pytest.mark.slow
@needs_inductor  # Triton 3.6 spills registers in gelu's backward of so few columns, which the pretended GPU refuses
def test_all_launches_of_a_step_are_found():
    parts = parts_of("fxprec", "gpt")
    names = [launch.name for (launch,) in parts.launches]
    # Of two blocks two norms each and one at the end, and two gelus, each with its backward; the loss's two; AdamW. Two
    # kernels look for weights that others wrote before the forward, and one notes what AdamW wrote.
    assert sum("layer_norm" in name for name in names) == 2 * (2 * 2 + 1)
    assert sum("gelu" in name for name in names) == 2 * 2
    assert names.count("cross_entropy_kernel") == 2 and names.count("adam_kernel") == 1
    assert names.count("look_kernel") == 2 and names.count("copy_kernel") == 1
    assert len(names) == 20 and not parts.unread
    # Four projections of a block and the head, each with two products backward; attention, forward and backward.
    kinds = Counter(each.kind for each in parts.work)
    assert kinds["product"] == 3 * (2 * 4 + 1) and kinds["attention"] == 2 * 2


@kernel_tools.compiles
@pytest.mark.slow
@needs_inductor
def test_inductors_code_is_compiled_and_its_kernels_take_what_their_bytes_take():
    parts = parts_of("compile", "mlp")
    assert len(parts.launches) >= 6 and not parts.unread
    products = [each for each in parts.work if each.kind == "product"]
    assert len(products) == 3 * 3 - 1  # the input wants no gradient
    assert sum(each.name == "fused_adamw" for each in parts.work) == 7
    for forms in parts.launches:
        for form in forms:
            made = predict(form.kernel, H200)
            assert form.kernel.moved > 0 and made.seconds >= LAUNCH + 0.9 * made.bound
    casts = [forms[0].kernel for forms in parts.launches if forms[0].name.startswith("triton_poi_fused__to_copy")]
    assert any(each.loaded == 4 * 16 * 16 and each.stored == 2 * 16 * 16 for each in casts)  # a weight's


@kernel_tools.compiles
@pytest.mark.slow
@needs_inductor
def test_the_command_writes_both_sides(tmp_path, capsys):
    arguments = ["--predict", "H100", "H200", "--check", "--only", "mlp", "--output", str(tmp_path)]
    assert step.main(arguments) == 0
    files = sorted(tmp_path.rglob("*.json"))
    assert [file.stem for file in files] == ["step-tiny-bfloat16-H100", "step-tiny-bfloat16-H200"]
    for file, machine in zip(files, ("H100", "H200"), strict=True):
        found = json.loads(file.read_text(encoding="utf-8"))
        assert found["environment"]["device"] == file.parent.name == "predicted"
        assert [(row["side"], row["machine"]) for row in found["rows"]] == [(side, machine) for side in steps.SIDES]
        for row in found["rows"]:
            best, middle, worst = (times["all"] for times in row["times"])
            assert row["floor"] < best < middle < worst and not row["trouble"]
    estimated = predicted.estimate("mlp", "tiny", "bfloat16", "H100", tmp_path)
    assert estimated and list(estimated) == ["floor", *steps.SIDES] and len(estimated["compile"]) == 3
    assert predicted.estimate("mlp", "gpu", "bfloat16", "H100", tmp_path) is None
    assert "nothing was measured" in capsys.readouterr().out
