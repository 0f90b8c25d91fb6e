"""apex's ``DistributedDataParallel`` on PyTorch's: every argument has its effect or is refused by name."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import fxprec
from fxprec import amp, parallel
from fxprec.amp._amp_state import AmpState, state
from fxprec.parallel import DistributedDataParallel, convert_syncbn_model

WORLD = 2
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32

two_ranks = [
    pytest.mark.slow,
    pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="wants gloo"),
]


class Net(nn.Module):
    """256 elements in four weights, of which the last is not always used."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(4))

    def forward(self, x, skip_last=False):
        for layer in [*self.layers][: 3 if skip_last else 4]:
            x = F.relu(layer(x)) + x
        return x


def batch(step, rank=None):
    x = torch.randn(2 * WORLD, 8, generator=torch.Generator().manual_seed(step))
    return x if rank is None else x[2 * rank : 2 * rank + 2]


def loss_of(model, step, rank=None, **options):
    return model(batch(step, rank).to(next(model.parameters()).dtype), **options).float().square().mean()


def gradients(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def buckets_of(wrapped, steps=3):
    """Sizes of the buckets, in elements, in the order in which they are reduced."""
    sizes = []

    def hook(_state, bucket):
        sizes.append(bucket.buffer().numel())
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    wrapped.register_comm_hook(None, hook)
    for step in range(steps):
        sizes.clear()
        wrapped.zero_grad()
        loss_of(wrapped, step).backward()
    return sizes


# -- what the processes do


def averages(tools, rank, options, opt_level):
    """Gradients against one process with the whole batch, and the buckets are PyTorch's own reduction."""
    vars(state).update(vars(AmpState()))
    model = Net()
    single = copy.deepcopy(model)
    if opt_level is not None:
        model, single = amp.initialize([model, single], opt_level=opt_level, verbosity=0)
    wrapped = DistributedDataParallel(model, **options)
    for step in range(3):
        for net in (wrapped, single):
            net.zero_grad()
        loss_of(wrapped, step, rank).backward()
        loss_of(single, step).backward()
        for ours, reference in zip(gradients(model), gradients(single), strict=True):
            torch.testing.assert_close(
                ours, reference, atol=1e-2 if opt_level else 1e-6, rtol=5e-2 if opt_level else 1e-5
            )
    assert isinstance(wrapped, nn.parallel.DistributedDataParallel)
    return None


def local_and_reduced(tools, rank, options, dtype):
    """This rank's own gradients, and what the wrapper makes of them."""
    model = Net().to(dtype)
    alone = copy.deepcopy(model)
    wrapped = DistributedDataParallel(model, **options)
    loss_of(wrapped, 0, rank).backward()
    loss_of(alone, 0, rank).backward()
    return [g.float().tolist() for g in gradients(alone)], [g.float().tolist() for g in gradients(model)]


def large(tools, rank, options):
    """Gradients of 40000 on each rank, in float16, whose sum is inf there."""
    model = nn.Linear(1, 1, bias=False).half()
    wrapped = DistributedDataParallel(model, **options)
    wrapped(torch.full((1, 1), 40000.0, dtype=F16)).sum().backward()
    return model.weight.grad.item(), str(model.weight.grad.dtype)


def bucket_sizes(tools, rank, options, dtype):
    return buckets_of(DistributedDataParallel(Net().to(dtype), **options))


def unused(tools, rank, options):
    wrapped = DistributedDataParallel(Net(), **options)
    for step in range(2):
        loss_of(wrapped, step, rank, skip_last=True).backward()
    return wrapped.module.layers[3].weight.grad is None


def switched_off(tools, rank):
    model = Net()
    alone = copy.deepcopy(model)
    wrapped = DistributedDataParallel(model)
    wrapped.disable_allreduce()
    for step in range(2):
        loss_of(wrapped, step, rank).backward()
        loss_of(alone, step, rank).backward()
    own = all(map(torch.equal, gradients(model), gradients(alone)))
    wrapped.enable_allreduce()
    loss_of(wrapped, 2, rank).backward()
    gathered = [torch.empty(8, 8) for _ in range(WORLD)]
    dist.all_gather(gathered, model.layers[0].weight.grad)
    return own, torch.equal(*gathered)


def views(tools, rank, options):
    model = Net()
    wrapped = DistributedDataParallel(model, **options)
    for step in range(3):
        loss_of(wrapped, step, rank).backward()
    return len({p.grad.untyped_storage().data_ptr() for p in model.parameters()})


def statistics(tools, rank):
    """Parameters start as those of rank 0; buffers belong to a rank."""
    model = nn.BatchNorm1d(8)
    model.running_mean.fill_(rank)
    nn.init.constant_(model.weight, rank)
    wrapped = DistributedDataParallel(model)
    start = model.running_mean[0].item(), model.weight[0].item()
    for step in range(2):
        wrapped(batch(step, rank)).square().sum().backward()
    gathered = [torch.empty(8) for _ in range(WORLD)]
    dist.all_gather(gathered, model.running_mean)
    return start, torch.equal(*gathered)


def amp_with_an_overflow(tools, rank):
    """Rank 1 overflows: both skip, with the same scale, and go on with the same parameters."""
    vars(state).update(vars(AmpState()))
    model = Net()
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), verbosity=0)
    wrapped = DistributedDataParallel(model)
    skipped = []
    for step in range(3):
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        with amp.scale_loss(loss_of(wrapped, step, rank), optimizer) as scaled:
            (scaled * (float("inf") if (step, rank) == (1, 1) else 1)).backward()
        optimizer.step()
        skipped.append(all(map(torch.equal, before, model.parameters())))
    return skipped, dict(amp.state_dict()), [p.tolist() for p in model.parameters()]


def refused_by_initialize(tools, rank):
    vars(state).update(vars(AmpState()))
    for wrap, words in (
        (DistributedDataParallel, "fxprec.parallel.DistributedDataParallel"),
        (nn.parallel.DistributedDataParallel, "torch.nn.parallel.distributed.DistributedDataParallel"),
    ):
        with pytest.raises(RuntimeError, match=f"instance of {words}".replace(".", r"\.")):
            amp.initialize(wrap(Net()))
    return None


# -- what is asked of them


@pytest.mark.parametrize("opt_level", [None, "O1", "O2"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"delay_allreduce": True},
        {"retain_allreduce_buffers": True},
        {"message_size": 64},
        {"allreduce_always_fp32": True},
        {"gradient_predivide_factor": 4.0},
    ],
    ids=lambda options: next(iter(options), "plain"),
)
class TestAverages:
    pytestmark = two_ranks

    @pytest.mark.slow
    def test_gradients_are_those_of_one_process(self, ask_two, options, opt_level):
        ask_two(averages, options, opt_level)


class TestArguments:
    pytestmark = two_ranks

    @pytest.mark.parametrize(
        "options, factor",
        [
            ({}, 0.5),
            ({"gradient_average": False}, 1.0),
            ({"gradient_predivide_factor": 8.0}, 0.5),
            ({"gradient_average": False, "gradient_predivide_factor": 8.0}, 0.125),
        ],
    )
    @pytest.mark.parametrize("dtype", [F32, BF16])
    def test_gradients_are_summed_and_divided(self, ask_two, options, factor, dtype):
        (one, reduced), (other, reduced_there) = ask_two(local_and_reduced, options, dtype)
        assert reduced == reduced_there
        for a, b, both in zip(one, other, reduced, strict=True):
            expected = (torch.tensor(a) + torch.tensor(b)) * factor
            tolerance = {} if dtype is F32 else {"rtol": 2e-2, "atol": 1e-3}
            torch.testing.assert_close(torch.tensor(both), expected, **tolerance)

    @pytest.mark.parametrize(
        "options, expected",
        [
            ({"gradient_average": False}, float("inf")),
            ({"gradient_predivide_factor": 2.0}, 40000.0),
            ({"gradient_average": False, "gradient_predivide_factor": 2.0}, 40000.0),
            ({"allreduce_always_fp32": True}, 40000.0),
        ],
    )
    def test_what_keeps_a_sum_in_float16_from_overflowing(self, ask_two, options, expected):
        assert ask_two(large, options) == [(expected, "torch.float16")] * WORLD

    @pytest.mark.parametrize(
        "options, dtype, sizes",
        [
            ({}, F32, [256]),
            ({"message_size": 64}, F32, [64] * 4),
            ({"message_size": 128}, F32, [128] * 2),
            ({"message_size": 128}, BF16, [128] * 2),
            ({"message_size": 1, "delay_allreduce": True}, F32, [256]),
        ],
    )
    def test_message_size_is_that_of_a_bucket_in_elements(self, ask_two, options, dtype, sizes):
        assert ask_two(bucket_sizes, options, dtype) == [sizes] * WORLD

    def test_delayed_communication_allows_parameters_without_gradients(self, ask_two):
        assert ask_two(unused, {"delay_allreduce": True}) == [True] * WORLD

    def test_communication_can_be_switched_off_and_on(self, ask_two):
        assert ask_two(switched_off) == [(True, True)] * WORLD

    def test_retained_buffers_are_what_gradients_look_into(self, ask_two):
        assert ask_two(views, {"retain_allreduce_buffers": True}) == [1] * WORLD
        assert ask_two(views, {}) == [4] * WORLD

    def test_parameters_are_broadcast_at_the_start_and_buffers_never(self, ask_two):
        assert sorted(ask_two(statistics)) == [((0.0, 0.0), False), ((1.0, 0.0), False)]

    def test_amp_skips_on_both_ranks(self, ask_two):
        one, other = ask_two(amp_with_an_overflow)
        assert one == other
        assert one[0] == [False, True, False]
        assert one[1] == {"loss_scaler0": {"loss_scale": 32768.0, "unskipped": 1}}

    def test_a_wrapped_model_is_refused_by_initialize(self, ask_two):
        ask_two(refused_by_initialize)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"shared_param": True}, "shared_param means nothing to PyTorch's engine: shared parameters work"),
        ({"shared_param": False}, "shared_param"),
        ({"allreduce_trigger_params": []}, "allreduce_trigger_params .* use message_size"),
        ({"num_allreduce_streams": 2}, "num_allreduce_streams .* leave it out"),
        ({"allreduce_communicators": ([], [])}, "allreduce_communicators .* process_group="),
        ({"gradient_average_split_factor": 2.0}, "it is called gradient_predivide_factor"),
        ({"prof": True}, "prof .* torch.profiler"),
        ({"message_size": 0}, "message_size must be finite and greater than 0, not 0"),
        ({"gradient_predivide_factor": -1.0}, "gradient_predivide_factor must be"),
        ({"gradient_predivide_factor": float("nan")}, "gradient_predivide_factor must be"),
    ],
)
def test_arguments_without_meaning_are_refused_by_name(options, words):
    with pytest.raises(ValueError, match=words):
        DistributedDataParallel(Net(), **options)


def test_batch_norms_become_synchronized_ones():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    weight = model[1].weight
    model = convert_syncbn_model(model)
    assert type(model[1]) is nn.SyncBatchNorm and model[1].weight is weight
    with pytest.raises(ValueError, match="channel_last=True"):
        convert_syncbn_model(model, channel_last=True)


def test_a_converted_model_keeps_its_name_in_the_wrapper():
    assert parallel.__all__ == ["DistributedDataParallel", "convert_syncbn_model"]
    assert fxprec.parallel is parallel
