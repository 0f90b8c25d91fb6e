"""The models of the benchmarks: as published, trained in every size, and as exact converted as under eager autocast."""

from __future__ import annotations

import copy
import inspect
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import fxprec
from benchmarks.workloads.models import BERT, CNN, GPT, Block, Decoder, Llama, UNet
from benchmarks.workloads.training import NAMES, SIZES, workloads

CPU = torch.device("cpu")
TINY = {workload.name: workload for workload in workloads("tiny")}

# -- architectures -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "published"),
    [("gpt", 124_439_808), ("resnet50", 25_557_032), ("bert", 109_514_298), ("vit", 86_567_656), ("cnn", 1_199_882)],
)
def test_parameters_of_the_gpu_sizes_are_the_published_ones(name, published):
    assert workloads("gpu", [name])[0].parameters() == published


@pytest.mark.parametrize(("name", "published"), [("resnet50", 4.09e9), ("vit", 17.58e9)])
def test_multiplications_of_a_224_x_224_image_are_the_published_ones(name, published):
    """A backward has twice the forward's, but for the images' gradient. Source: torchvision's table of weights."""
    two = torch.randn(2, 3, 224, 224), torch.tensor([1, 2])
    flops = replace(workloads("gpu", [name])[0], batch=lambda _: two).flops()
    assert flops / (2 * 3 * 2) == pytest.approx(published, rel=0.02)  # images, forward and backward, and additions


def test_the_u_net_is_the_papers_but_for_padding_and_norms():
    with torch.device("meta"):
        model = UNet()
        assert model(torch.empty(2, 3, 256, 256)).shape == (2, 2, 256, 256)
    assert model.down[-1][0].weight.shape == (1024, 512, 3, 3)


def test_the_example_network_has_its_dropouts():
    assert (CNN().dropout1.p, CNN().dropout2.p) == (0.25, 0.5)
    assert CNN(side=16)(torch.randn(2, 1, 16, 16)).shape == (2, 10)


def test_gpt_is_the_decoder_with_the_loss_inside():
    assert list(inspect.signature(GPT).parameters) == [
        "layers", "dim", "heads", "vocabulary", "context", "dropout", "tied",
    ]  # fmt: skip
    torch.manual_seed(0)
    gpt = GPT(layers=1, dim=16)
    torch.manual_seed(0)
    decoder = Decoder(layers=1, dim=16)
    codes, targets = torch.randint(256, (2, 8)), torch.randint(256, (2, 8))
    expected = F.cross_entropy(decoder(codes).flatten(0, 1), targets.flatten())
    assert torch.equal(gpt(codes, targets), expected)
    assert [name.partition(".")[0] for name in gpt.state_dict()][-3:] == ["norm", "norm", "head"]
    assert gpt.head.weight is not gpt.tokens.weight


def test_tied_heads_share_the_parameter():
    for model in (Decoder(1, 16, 2, 31, 8, tied=True), BERT(1, 16, 2, 31, 8)):
        assert model.head.weight is model.tokens.weight
        assert model.tokens.weight.std().item() == pytest.approx(0.02, rel=0.2)


@pytest.mark.parametrize("make", [lambda: Decoder(2, 16, 2, 31, 8), lambda: Llama(2, 16, 2, 24, 31, 8)])
def test_what_comes_later_changes_nothing_before(make):
    model = make()
    codes = torch.randint(31, (2, 8))
    later = codes.clone()
    later[:, 5] = (later[:, 5] + 1) % 31
    before, after = model(codes), model(later)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_a_vision_block_sees_everything():
    torch.manual_seed(0)
    block, x = Block(16, 2, 0.0, causal=False), torch.randn(1, 4, 16)
    changed = x.clone()
    changed[:, 3] *= -1
    assert not torch.allclose(block(x)[:, 0], block(changed)[:, 0])


def test_padding_is_not_read():
    model = BERT(2, 16, 2, 31, 8)
    codes = torch.randint(31, (2, 8))
    mask = torch.arange(8) < torch.tensor([[5], [8]])
    padded = codes.clone()
    padded[0, 5:] = (padded[0, 5:] + 1) % 31
    before, after = model(codes, mask), model(padded, mask)
    torch.testing.assert_close(before[mask], after[mask])
    assert not torch.allclose(model(codes, torch.ones_like(mask))[0, :5], before[0, :5])


def test_rotary_embedding_is_a_rotation_by_position():
    torch.manual_seed(0)
    model = Llama(1, 16, 2, 24, 31, 8)  # 2 heads of 8
    block, x = model.blocks[0], torch.randn(1, 8, 16)
    q, k, v = (each(block.norm1(x)).view(1, 8, 2, 8).transpose(1, 2) for each in (block.q, block.k, block.v))
    angles = torch.outer(torch.arange(8), 10000.0 ** (-torch.arange(4) / 4))
    turn = torch.polar(torch.ones_like(angles), angles)
    q, k = (torch.complex(each[..., :4], each[..., 4:]) * turn for each in (q, k))
    scores = (q @ k.mH).real / 8**0.5
    weights = scores.masked_fill(torch.ones(8, 8).triu(1).bool(), float("-inf")).softmax(-1)
    y = x + block.proj((weights @ v).transpose(1, 2).reshape(1, 8, 16))
    h = block.norm2(y)
    expected = y + block.down(F.silu(block.gate(h)) * block.up(h))
    torch.testing.assert_close(block(x, model.cos, model.sin), expected)


# -- workloads ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_every_model_is_there_in_every_size(size):
    found = workloads(size)
    there = [name for name in NAMES if size == "cpu" or name != "gpt-50k"]
    assert [workload.name for workload in found] == there and {workload.size for workload in found} == {size}


def test_data_is_random_and_repeatable():
    for workload in TINY.values():
        first, second = workload.batches(2, CPU)
        again = workload.batches(1, CPU)[0]
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        assert not torch.equal(first[0], second[0])
        assert all(x.count_nonzero() > 0.5 * x.numel() for x in first if x.is_floating_point())
        assert not torch.equal(workload.batches(1, CPU, seed=1)[0][0], first[0])


def test_masked_tokens_are_asked_for_and_padding_never():
    codes, mask, target = workloads("cpu", ["bert"])[0].batches(1, CPU)[0]
    asked = target != -100
    assert torch.equal(target[asked], codes[asked]) and not (asked & ~mask).any()
    assert 0.1 < asked.sum() / mask.sum() < 0.2 and not mask.all() and asked.any(1).all()


def test_next_tokens_are_the_targets():
    codes, target = TINY["gpt"].batches(1, CPU)[0]
    assert torch.equal(codes[:, 1:], target[:, :-1])


def test_floating_point_operations_are_counted():
    forward = 3 * 2 * 4 * 16 * 16  # three layers, batch 4, width 16
    assert TINY["mlp"].flops() == forward + forward + forward * 2 // 3  # of weights, of inputs but the first


def test_channels_last_is_for_gpus():
    resnet = TINY["resnet50"]
    assert resnet.batches(1, CPU)[0][0].is_contiguous()
    model, meta = resnet.make(), torch.device("cuda")
    assert resnet._channels_last(meta) and not TINY["vit"]._channels_last(meta)
    assert not resnet.placed(model, CPU).stem[0].weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("size", "only", "message"),
    [
        ("cpus", (), r"^no size 'cpus'; did you mean cpu\?$"),
        ("cpu", ["gtp"], r"^no model 'gtp'; did you mean gpt\?$"),
        ("cpu", ["zzzzzz"], r"^no model 'zzzzzz'; there are mlp, cnn, "),
    ],
)
def test_unknown_names(size, only, message):
    with pytest.raises(ValueError, match=message):
        workloads(size, only)


# -- converted ---------------------------------------------------------------------------------------------------------


def _outputs_and_gradients(model, workload, batch, autocast=False):
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = model(*batch[:-1])
    target = batch[-1].double() if batch[-1].is_floating_point() else batch[-1]  # torch 2.11 wants one dtype
    loss = workload.loss(output.double(), target)
    gradients = torch.autograd.grad(loss, [*model.parameters()])
    return torch.cat([x.detach().double().flatten() for x in (output, *gradients)]), output.numel()


@pytest.mark.parametrize("name", TINY)
def test_converted_it_is_as_exact_as_under_autocast(name):
    workload = TINY[name]
    model = workload.placed(workload.make(), CPU)
    batch = workload.batches(1, CPU)[0]
    wide = tuple(x.double() if x.is_floating_point() else x for x in batch)
    exact, size = _outputs_and_gradients(copy.deepcopy(model).double(), workload, wide)
    eager, _ = _outputs_and_gradients(copy.deepcopy(model), workload, batch, autocast=True)
    converted, _ = fxprec.convert(model, dtype=torch.bfloat16, level="O1")
    ours, _ = _outputs_and_gradients(converted, workload, batch)
    assert ours.isfinite().all() and exact[size:].count_nonzero() > 0
    for part in (slice(0, size), slice(size, None)):  # outputs, gradients

        def error(found, part=part):
            return float(torch.linalg.vector_norm(found[part] - exact[part]) / torch.linalg.vector_norm(exact[part]))

        assert 0 < error(ours) <= 2 * error(eager)
