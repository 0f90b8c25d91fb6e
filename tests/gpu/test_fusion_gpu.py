"""Fused training on a GPU: the same losses, no more memory, gradients of five models, CUDA graphs and streams.

What needs a device is marked ``gpu``. The helpers are the same at tiny sizes on a CPU, where regions run op by op, or
with TRITON_INTERPRET=1 as kernels in Triton's interpreter: so they are known to run before a device is there.
"""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxprec
import kernel_tools
import region_tools
from benchmarks.workloads import zoo
from benchmarks.workloads.models import GPT
from examples import char_gpt
from fxprec.kernels.launch.triton_support import can_launch, interpreting
from fxprec.kernels.rows.run.region import FusedRegion
from small_transformers import MODELS

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BFLOAT16, FLOAT16 = torch.bfloat16, torch.float16


def gpu(test: Callable[..., Any]) -> Any:
    return pytest.mark.gpu(pytest.mark.skipif(not kernel_tools.CUDA, reason="no CUDA device")(test))


def regions(model: nn.Module) -> list[FusedRegion]:
    return [each for gm in fxprec.graphs(model) for each in gm.modules() if isinstance(each, FusedRegion)]


def kernel_calls(model: nn.Module, name: str) -> int:
    """How many nodes became calls of a hand-written kernel, such as "batch_norm"."""
    nodes = [node for gm in fxprec.graphs(model) for node in gm.graph.nodes]
    return sum(f"the kernel of {name}" in node.meta.get("fused", "") for node in nodes)


def fused_here(device: torch.device) -> Any:
    return True if can_launch(device) else "aten"


# -- data: Python's own source text, and the digits of scikit-learn ----------------------------------------------------


def text_batches(steps: int, batch: int, length: int, device: torch.device, order: int) -> list[dict[str, Tensor]]:
    """Windows of the standard library's text; ``order`` seeds which."""
    codes = char_gpt.load().train
    generator = torch.Generator().manual_seed(order)
    starts = torch.randint(len(codes) - length, (steps, batch), generator=generator)
    windows = torch.stack([torch.stack([codes[s : s + length] for s in row]) for row in starts.tolist()]).to(device)
    return [{"input_ids": ids, "labels": ids} for ids in windows]


def digit_batches(steps: int, batch: int, side: int, device: torch.device, order: int) -> list[tuple[Tensor, Tensor]]:
    """Images [batch, 3, side, side] in channels_last, and their classes."""
    datasets = pytest.importorskip("sklearn.datasets")
    digits = datasets.load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1
    labels = torch.tensor(digits.target)
    generator = torch.Generator().manual_seed(order)
    found = []
    for _ in range(steps):
        chosen = torch.randint(len(images), (batch,), generator=generator)
        x = F.interpolate(images[chosen], size=(side, side), mode="bilinear").expand(-1, 3, -1, -1).to(device)
        found.append((x.contiguous(memory_format=torch.channels_last), labels[chosen].to(device)))
    return found


def without_dropout(model: nn.Module) -> nn.Module:
    """All rates of a model of transformers become 0, those that attention reads from its config among them."""
    for holder in [
        *model.modules(),
        *{id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values(),
    ]:
        if isinstance(holder, nn.Dropout):
            holder.p = 0.0
        for name, value in list(vars(holder).items()):
            if ("drop" in name or name.endswith("pdrop")) and isinstance(value, float):
                setattr(holder, name, 0.0)
    return model


# -- training ---------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """A training: losses, skipped steps, bytes at most beyond those before, the model, and its weights before."""

    model: nn.Module
    losses: list[float] = field(default_factory=list)
    skipped: int = 0
    peak: int = 0
    start: dict[str, Tensor] = field(default_factory=dict)


def train(
    model: nn.Module,
    batches: list[Any],
    low: torch.dtype,
    fuse: Any,
    *,
    rate: float,
    loss: Callable[..., Tensor] | None = None,
    again: Run | None = None,
) -> Run:
    """Train a copy of ``model``, converted. Batches of keywords give the model's own ``.loss``, tuples go with loss.

    ``again``: a run of the same, whose converted model starts anew from its first weights.
    """
    device = next(model.parameters()).device
    gc.collect()
    before = _allocated(device)
    if again is None:
        converted, scaler = fxprec.convert(copy.deepcopy(model), dtype=low, fuse=fuse, loss=loss)
    else:
        converted, scaler = again.model, fxprec.LossScaler(device.type, enabled=low is FLOAT16)
        converted.load_state_dict(again.start)
    run = Run(converted, start={name: value.to(CPU, copy=True) for name, value in converted.state_dict().items()})
    optimizer = torch.optim.AdamW(converted.parameters(), lr=rate, fused=True)
    losses: list[Tensor] = []
    for step, batch in enumerate(batches):
        if step == 3 and device.type == "cuda":  # captured and compiled by then, and the optimizer has its state
            torch.cuda.reset_peak_memory_stats(device)
        value = converted(**batch).loss if isinstance(batch, dict) else converted(*batch)
        scaler.scale(value).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(converted.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(value.detach().float())
    run.losses = torch.stack(losses).tolist()
    run.skipped = scaler.skipped_steps
    run.peak = torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else 0
    assert all(map(math.isfinite, run.losses)), run.losses
    for name, tensor in converted.state_dict().items():
        assert tensor.isfinite().all(), name
    return run


def _allocated(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(device)


def gap(one: list[float], other: list[float]) -> float:
    """Mean distance of two loss curves, each averaged over five steps."""

    def smooth(losses: list[float]) -> list[float]:
        return [statistics.fmean(losses[i : i + 5]) for i in range(max(1, len(losses) - 4))]

    return statistics.fmean(abs(a - b) for a, b in zip(smooth(one), smooth(other), strict=True))


def compare(
    model: nn.Module, batches: Callable[[int], list[Any]], low: torch.dtype, fuse: Any, **options: Any
) -> tuple[Run, Run]:
    """Fused and unfused trainings on the same batches; between their losses lies no more than another order makes.

    Trainings drift apart whatever the first difference was, and gaps are as random as the losses: of the fused run's
    and one other order's either may be the larger. The bound is the largest of the three gaps between three orders.
    """
    plain = train(model, batches(0), low, False, **options)
    assert not regions(plain.model)
    peak = plain.peak
    fused = train(model, batches(0), low, fuse, **options)
    others = [train(model, batches(order), low, False, again=plain, **options) for order in (1, 2)]
    assert abs(fused.losses[0] - plain.losses[0]) <= 4 * torch.finfo(low).eps * plain.losses[0]
    floor = max(gap(one.losses, other.losses) for one, other in itertools.combinations([plain, *others], 2))
    found = gap(plain.losses, fused.losses)
    print(
        f"\nlosses {plain.losses[0]:.3f} -> {plain.losses[-1]:.3f}, fused {fused.losses[-1]:.3f}; gap {found:.4f}, "
        f"of other orders {floor:.4f}; skipped {plain.skipped}, fused {fused.skipped}; "
        f"peak {peak / 2**20:.0f} MiB, fused {fused.peak / 2**20:.0f}"
    )
    assert 0 < floor and found <= floor, (found, floor)
    assert abs(fused.skipped - plain.skipped) <= 2  # an overflow more or less, in fp16
    return fused, plain


def gpt2(tiny: bool) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 128, "n_positions": 32} if tiny else {}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **ends, **sizes)
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config).train()


def on_triton(model: nn.Module) -> None:
    found = regions(model)
    assert found
    assert all(each.path == "triton" for each in found), {each.name: each.reason for each in found}


@gpu
@pytest.mark.slow
@pytest.mark.zoo
@pytest.mark.parametrize("low", [BFLOAT16, FLOAT16], ids=str)
def test_gpt2_small_trains_alike(low: torch.dtype) -> None:
    fused, plain = compare(
        gpt2(tiny=False).to(CUDA), lambda order: text_batches(50, 8, 512, CUDA, order), low, True, rate=3e-4
    )
    on_triton(fused.model)
    assert kernel_calls(fused.model, "cross_entropy") == 1
    assert plain.losses[-1] < plain.losses[0] - 3  # both learned something
    assert fused.peak <= 1.01 * plain.peak


@gpu
@pytest.mark.slow
def test_resnet50_trains_alike() -> None:
    torch.manual_seed(0)
    model = zoo.resnet().to(CUDA, memory_format=torch.channels_last).train()
    fused, plain = compare(
        model, lambda order: digit_batches(50, 64, 96, CUDA, order), BFLOAT16, True, rate=1e-3, loss=F.cross_entropy
    )
    assert kernel_calls(fused.model, "batch_norm") == 53
    assert all(each.path == "triton" for each in regions(fused.model))
    assert plain.losses[-1] < 0.7 * plain.losses[0]
    assert fused.peak <= 1.01 * plain.peak


@pytest.mark.slow
@pytest.mark.zoo
def test_the_training_of_gpt2_at_a_tiny_size() -> None:
    fused, _ = compare(
        gpt2(tiny=True), lambda order: text_batches(8, 2, 16, CPU, order), BFLOAT16, fused_here(CPU), rate=1e-3
    )
    assert {each.path for each in regions(fused.model)} == {"triton" if interpreting() else "aten"}


@pytest.mark.slow
def test_the_training_of_resnet_at_a_tiny_size() -> None:
    torch.manual_seed(0)
    model = zoo.resnet((1, 1), 8).to(memory_format=torch.channels_last).train()
    fused, _ = compare(
        model, lambda order: digit_batches(6, 8, 24, CPU, order), BFLOAT16, fused_here(CPU), rate=1e-3,
        loss=F.cross_entropy,
    )  # fmt: skip
    assert kernel_calls(fused.model, "batch_norm") == (7 if interpreting() else 0)


def test_batch_norms_of_resnet50_become_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, without running any: 53, of which four, in shortcuts, have nothing behind them to join."""
    from fxprec import settings
    from fxprec.kernels.launch import triton_support

    monkeypatch.setattr(triton_support, "can_launch", lambda device: True)
    monkeypatch.setattr(settings, "why_no_kernels", lambda device: "")
    model = zoo.resnet()
    assert sum(isinstance(each, nn.BatchNorm2d) for each in model.modules()) == 53
    assert kernel_calls(fxprec.convert(model, dtype=BFLOAT16, fuse=True)[0], "batch_norm") == 53


# -- gradients of five models -----------------------------------------------------------------------------------------


def gradients(model: nn.Module, inputs: dict[str, Any], low: torch.dtype | None, fuse: Any = None) -> Any:
    """(converted model or None, gradients by name) of one step of a copy: in float64 (``low`` None), by autocast, or
    converted with ``fuse``."""
    own = copy.deepcopy(model)
    device = next(own.parameters()).device
    if low is None:
        own, inputs = own.double(), {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    elif fuse is not None:
        own, _ = fxprec.convert(own, dtype=low, fuse=fuse)
    with torch.autocast(device.type, dtype=low or BFLOAT16, enabled=low is not None and fuse is None):
        logits = own(**inputs).logits
    generator = torch.Generator().manual_seed(1)  # some gradient that no norm makes vanish
    weights = torch.randn(logits.shape, generator=generator).to(device, logits.dtype)
    (logits * weights).sum().backward()
    found = {name: p.grad.double() for name, p in own.named_parameters() if p.grad is not None}
    return own, found


def agree(model: nn.Module, inputs: dict[str, Any], low: torch.dtype, fuse: Any) -> nn.Module:
    """Gradients of a fused step are off float64's at most twice as far as those of eager autocast."""
    _, exact = gradients(model, inputs, None)
    _, eager = gradients(model, inputs, low)
    fused, found = gradients(model, inputs, low, fuse)
    assert found.keys() == exact.keys() == eager.keys() and found
    whole = math.sqrt(sum(float(g.square().sum()) for g in exact.values()))
    slack = torch.finfo(low).eps
    for name, right in exact.items():
        mine, theirs = (float((each[name] - right).norm()) for each in (found, eager))
        # A gradient that is zero but for rounding (a key's bias) is as small as all others are large.
        limit = 2 * theirs + slack * (float(right.norm()) + 1e-2 * whole / math.sqrt(len(exact)))
        assert mine <= limit, f"{name}: off by {mine:.2e}, eager by {theirs:.2e}, of {float(right.norm()):.2e}"
    return fused


@gpu
@pytest.mark.slow
@pytest.mark.zoo
@pytest.mark.parametrize("low", [BFLOAT16, FLOAT16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_five_models(name: str, low: torch.dtype) -> None:
    pytest.importorskip("transformers")
    model, inputs = MODELS[name]()
    inputs = {key: value.to(CUDA) for key, value in inputs.items()}
    on_triton(agree(without_dropout(model).to(CUDA).train(), inputs, low, True))


@gpu
@pytest.mark.slow
@pytest.mark.zoo
@pytest.mark.parametrize("name", MODELS)
def test_a_training_step_of_five_models_with_dropout(name: str) -> None:
    pytest.importorskip("transformers")
    model, inputs = MODELS[name]()
    inputs = {key: value.to(CUDA) for key, value in inputs.items()}
    fused, found = gradients(model.to(CUDA).train(), inputs, BFLOAT16, True)
    on_triton(fused)
    assert found and all(g.isfinite().all() for g in found.values())


@pytest.mark.slow
@pytest.mark.zoo
def test_the_comparison_of_gradients_at_a_tiny_size(monkeypatch: pytest.MonkeyPatch) -> None:
    model = without_dropout(gpt2(tiny=True))
    inputs = {"input_ids": torch.randint(1, 100, (2, 8))}
    gradients_of = gradients
    once = functools.cache(lambda low, fuse: gradients_of(model, inputs, low, fuse))
    monkeypatch.setitem(globals(), "gradients", lambda model, inputs, low, fuse=None: once(low, fuse))
    fused = agree(model, inputs, BFLOAT16, fused_here(CPU))
    assert {each.path for each in regions(fused)} == {"triton" if interpreting() else "aten"}

    def wrong(model: nn.Module, inputs: Any, low: Any, fuse: Any = None) -> Any:
        own, found = once(low, fuse)
        return own, {name: 1.1 * g if fuse and "ln_f.weight" in name else g for name, g in found.items()}

    monkeypatch.setitem(globals(), "gradients", wrong)
    with pytest.raises(AssertionError, match=r"ln_f.weight: off by"):
        agree(model, inputs, BFLOAT16, fused_here(CPU))


@pytest.mark.zoo
def test_no_rate_of_dropout_is_left() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
    model = without_dropout(transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=99, **sizes)))
    model.train()
    ids = torch.randint(99, (2, 8))
    assert torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)


# -- CUDA graphs, streams, devices -------------------------------------------------------------------------------------


def small_gpt(device: torch.device, dropout: float, fuse: Any) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = GPT(layers=2, dim=64, heads=4, dropout=dropout).to(device)
    codes, targets = (torch.randint(256, (4, 32), device=device) for _ in range(2))
    return fxprec.convert(model.train(), dtype=BFLOAT16, fuse=fuse)[0], (codes, targets)


def recorded_step(model: nn.Module, inputs: tuple[Tensor, ...]) -> Callable[[], tuple[float, list[Tensor]]]:
    """Forward and backward as a CUDA graph: a call replays it, and gives the loss and copies of the gradients.

    All on one stream: the backward of an op runs where its forward did, that of a shadow where it was made.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for _ in range(3):
            model.zero_grad()
            model(*inputs).backward()
        model.zero_grad()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            loss = model(*inputs)
            loss.backward()

    def replay() -> tuple[float, list[Tensor]]:
        graph.replay()
        torch.cuda.synchronize()
        return loss.item(), [p.grad.clone() for p in model.parameters() if p.grad is not None]

    return replay


@gpu
def test_a_cuda_graph_draws_its_dropouts_anew_at_each_replay() -> None:
    model, inputs = small_gpt(CUDA, 0.3, True)
    replay = recorded_step(model, inputs)
    on_triton(model)
    assert any(each.draws for each in regions(model))
    torch.manual_seed(5)
    runs = [replay() for _ in range(4)]
    losses = [loss for loss, _ in runs]
    assert len(set(losses)) == 4 and all(map(math.isfinite, losses))
    assert len(runs[0][1]) == len([*model.parameters()])
    torch.manual_seed(5)
    assert replay()[0] == losses[0]  # and by torch's generator


@gpu
def test_a_cuda_graph_computes_what_the_calls_do() -> None:
    model, inputs = small_gpt(CUDA, 0.0, True)
    replay = recorded_step(model, inputs)
    loss, graphed = replay()
    model.zero_grad()
    value = model(*inputs)
    value.backward()
    assert value.item() == pytest.approx(loss, rel=1e-3)
    for parameter, gradient in zip(model.parameters(), graphed, strict=True):
        assert parameter.grad is not None
        assert float((parameter.grad - gradient).norm()) <= 1e-2 * float(gradient.norm()) + 1e-6


def test_the_model_of_the_graphs_on_a_cpu() -> None:
    model, inputs = small_gpt(CPU, 0.3, fused_here(CPU))
    losses = {float(model(*inputs).detach()) for _ in range(3)}
    assert len(losses) == 3 and regions(model)


@gpu
def test_nothing_waits_for_the_device() -> None:
    model, inputs = small_gpt(CUDA, 0.1, True)
    for _ in range(3):
        model(*inputs).backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(*inputs).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def add_gelu_norm(h: Tensor, x: Tensor, bias: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    s = x + F.gelu(h + bias)
    return s, F.layer_norm(s, (256,), weight, bias)


def region_inputs(device: torch.device, rows: int = 512) -> Iterator[list[Tensor]]:
    """Ever other inputs of ``add_gelu_norm``, seeded."""
    generator = torch.Generator().manual_seed(0)
    for _ in itertools.count():
        shapes = ((rows, 256), (rows, 256), (256,), (256,))
        made = [torch.randn(shape, generator=generator).to(device) for shape in shapes]
        yield [x.to(BFLOAT16).requires_grad_() if x.dim() == 2 else x.requires_grad_() for x in made]


def everything(region: Callable[..., Any], inputs: list[Tensor]) -> list[Tensor]:
    """Outputs and gradients."""
    outputs = region(*inputs)
    gradients = torch.autograd.grad(outputs, inputs, [torch.ones_like(x) for x in outputs])
    return [*(x.detach() for x in outputs), *gradients]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


@gpu
def test_one_region_on_two_streams_at_once() -> None:
    region = region_tools.region_of(add_gelu_norm)
    source = region_inputs(CUDA, rows=8192)
    given = [next(source) for _ in range(8)]
    expected = [everything(region, inputs) for inputs in given]
    assert region.path == "triton"
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    found: list[list[Tensor]] = []
    for _ in range(4):
        for number, inputs in enumerate(given):
            with torch.cuda.stream(streams[number % 2]):
                found.append(everything(region, inputs))
    torch.cuda.synchronize()
    assert all(same(a, b) for a, b in zip(itertools.cycle(expected), found, strict=False)) and len(found) == 32


@gpu
def test_a_launch_goes_to_the_device_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where another one is current, which with a single device only ``current_device`` says here."""
    region = region_tools.region_of(add_gelu_norm)
    inputs = next(region_inputs(torch.device("cuda", 0)))
    expected = everything(region, inputs)
    entered: list[Any] = []

    class Noted(torch.cuda.device):
        def __enter__(self) -> None:
            entered.append(self.idx)
            super().__enter__()

    monkeypatch.setattr(torch.cuda, "device", Noted)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "current_device", lambda: 1)
        assert same(everything(region, inputs), expected)
    assert len(entered) >= 2 and set(entered) == {0}  # forward and backward
    entered.clear()
    assert same(everything(region, inputs), expected) and not entered
    with torch.cuda.device(0):
        assert same(everything(region, inputs), expected)


@gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device only")
def test_regions_on_a_device_that_is_not_the_current_one() -> None:
    region = region_tools.region_of(add_gelu_norm)
    first, second = (next(region_inputs(torch.device("cuda", index))) for index in (0, 1))
    assert torch.cuda.current_device() == 0
    expected = everything(region, first)
    for _ in range(2):  # the launch that compiles, and the one that does not
        found = everything(region, second)
        assert region.path == "triton" and {x.device.index for x in found} == {1}
        assert same([x.cpu() for x in found], [x.cpu() for x in expected])
    model, inputs = small_gpt(torch.device("cuda", 1), 0.1, True)
    model(*inputs).backward()
    on_triton(model)


def test_the_region_of_the_streams_on_a_cpu() -> None:
    region = region_tools.region_of(add_gelu_norm)
    inputs = next(region_inputs(CPU, rows=6))
    found = everything(region, inputs)
    assert len(found) == 6 and same(found, everything(region, inputs))
    assert region.path == ("triton" if interpreting() else "aten")
