"""Two ranks that skip together: DDP, FSDP2, DTensors on mixed placements and meshes, pipeline stages."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fxprec
from fxprec import optim
from fxprec.scaling import gradients

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="wants gloo"),
]

WORLD = 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x):
        return x + self.down(F.relu(self.norm(self.up(x))))


def net():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(4, 3))


def batch(step, rank=None):
    x = torch.randn(2 * WORLD, 4, generator=torch.Generator().manual_seed(step))
    return x if rank is None else x[2 * rank : 2 * rank + 2]


OPTIMIZERS = {
    "torch": lambda params: torch.optim.AdamW(params, lr=0.01),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "ours": lambda params: optim.AdamW(params, lr=0.01),
    "clipping": lambda params: optim.AdamW(params, lr=0.01, max_norm=0.5),
    "momentum": lambda params: optim.SGD(params, lr=0.05, momentum=0.9, max_norm=0.5),
}


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach().clone()


def snapshot(model):
    return {name: full(p.detach()) for name, p in model.named_parameters()}


def poisoned(loss, model, step, rank):
    """Inf in the gradients of one rank, of one of its losses, in the second step."""
    return loss * float("inf") if step == 1 and rank == 1 else loss


def train(model, optimizer, scaler, rank, steps=4):
    """(skipped, scale) of each step."""
    seen = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(batch(step, rank)).float().square().mean()
        scaler.scale(poisoned(loss, model, step, rank)).backward()
        scaler.step(optimizer)
        scaler.update()
        seen.append((scaler.step_was_skipped, scaler.get_scale()))
    return seen


EXPECTED = [(False, 64.0), (True, 32.0), (False, 32.0), (False, 32.0)]


# -- what the two processes do


def under_ddp(tools, rank, optimizer):
    model, _ = fxprec.convert(net(), dtype=torch.float16)
    wrapped = DistributedDataParallel(model)
    scaler = fxprec.LossScaler("cpu", 64.0)
    seen = train(wrapped, OPTIMIZERS[optimizer](model.parameters()), scaler, rank)
    return seen, snapshot(model)


def under_fsdp(tools, rank, optimizer, policy):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model, _ = fxprec.convert(net(), dtype=torch.float16)
    single, _ = fxprec.convert(net(), dtype=torch.float16)
    options = {}
    if policy:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
    for part in (model[0], model[1], model):
        fully_shard(part, **options)
    scaler = fxprec.LossScaler("cpu", 64.0)
    seen = train(model, OPTIMIZERS[optimizer](model.parameters()), scaler, rank)
    # the same steps in one process, without the one that overflows
    alone, scaler = OPTIMIZERS[optimizer](single.parameters()), fxprec.LossScaler("cpu", 64.0)
    for step in (0, 2, 3):
        alone.zero_grad()
        scaler.scale(single(batch(step)).float().square().mean()).backward()
        scaler.step(alone)
        scaler.update()
    return seen, snapshot(model), snapshot(single)


def mixed_placements(tools, rank, optimizer, same_mesh, where):
    """Parameters [Replicate, Shard]; inf in rank 1's shard, or only where there is no gradient on rank 0."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    meshes = [init_device_mesh("cpu", (WORLD,), mesh_dim_names=("a",))] * 2
    if not same_mesh:
        both = init_device_mesh("cpu", (1, WORLD), mesh_dim_names=("x", "y"))
        meshes = [both["x"], both["y"]]
    params = [
        nn.Parameter(distribute_tensor(torch.ones(4), mesh, [placement]))
        for mesh, placement in zip(meshes, (Replicate(), Shard(0)), strict=True)
    ]
    made, scaler = OPTIMIZERS[optimizer](params), fxprec.LossScaler("cpu", 64.0)
    seen = []
    for step in range(3):
        made.zero_grad()
        scaler.scale(torch.zeros((), requires_grad=True))
        for parameter in params:
            parameter.grad = copy.deepcopy(parameter.detach())
        if step == 1 and rank == 1:
            params[1].grad.to_local()[1] = float("inf")
        if where == "without gradients" and rank == 0:
            params[0].grad = params[1].grad = None
        scaler.step(made)
        scaler.update()
        seen.append((scaler.step_was_skipped, scaler.get_scale()))
    return seen


def stages(tools, rank, optimizer):
    """A model split over the ranks by torch's pipeline; only the last stage has a loss."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    whole = net()
    part = nn.Sequential(whole[0]) if rank == 0 else nn.Sequential(whole[1], whole[2])
    fxprec.convert(part, dtype=torch.float16)
    scaler = fxprec.LossScaler("cpu", 64.0, process_group=dist.group.WORLD)
    made = OPTIMIZERS[optimizer](part.parameters())
    seen, step = [], 0

    def loss_of(output, target):
        loss = F.mse_loss(output.float(), target)
        return scaler.scale(poisoned(loss, part, step, rank))

    stage = PipelineStage(part, rank, WORLD, torch.device("cpu"), input_args=(batch(0)[:2],))
    schedule = ScheduleGPipe(stage, 2, loss_fn=loss_of)
    for step in range(4):
        made.zero_grad()
        if rank == 0:
            schedule.step(batch(step))
        else:
            schedule.step(target=torch.zeros(4, 3))
        scaler.step(made)
        scaler.update()
        seen.append((scaler.step_was_skipped, scaler.get_scale()))
    return seen, all(p.isfinite().all() for p in part.parameters())


def tensor_parallel(tools, rank, optimizer):
    from torch.distributed.tensor import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (WORLD,))
    model, single = Block(), None
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    single = copy.deepcopy(model)
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fxprec.convert(model, dtype=torch.float16)
    fxprec.convert(single, dtype=torch.float16)
    results = []
    for net_ in (model, single):
        made, scaler = OPTIMIZERS[optimizer](net_.parameters()), fxprec.LossScaler("cpu", 64.0)
        for step in range(3):
            made.zero_grad()
            scaler.scale(net_(batch(step)).float().square().mean()).backward()
            scaler.step(made)
            scaler.update()
        results.append(snapshot(net_))
    return results


def reductions(tools, rank, optimizer):
    """All-reduces of one scaled step under FSDP2 with parameters on one mesh."""
    from torch.distributed.fsdp import fully_shard

    model = net()
    fully_shard(model)
    scaler, made = fxprec.LossScaler("cpu", 4.0), OPTIMIZERS[optimizer](model.parameters())
    scaler.scale(model(batch(0, rank)).sum()).backward()
    calls, original = [], dist.all_reduce
    gradients.dist.all_reduce = lambda *args, **kwargs: (calls.append(args[0].numel()), original(*args, **kwargs))[1]
    try:
        scaler.step(made)
        scaler.update()
    finally:
        gradients.dist.all_reduce = original
    return calls


# -- what is asked of them


def assert_same(first, second, **tolerance):
    assert first.keys() == second.keys()
    for name, value in first.items():
        torch.testing.assert_close(value, second[name], msg=lambda m, n=name: f"{n}: {m}", **tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_ddp_with_an_overflow_on_one_rank(ask_two, optimizer):
    (seen, one), (other_seen, other) = ask_two(under_ddp, optimizer)
    assert seen == other_seen == EXPECTED
    assert_same(one, other, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "policy"), [(optimizer, optimizer in ("torch", "clipping")) for optimizer in OPTIMIZERS]
)
def test_fsdp_with_an_overflow_on_one_rank(ask_two, optimizer, policy):
    (seen, one, single), (other_seen, other, _) = ask_two(under_fsdp, optimizer, policy)
    assert seen == other_seen == EXPECTED
    assert_same(one, other, rtol=0, atol=0)
    assert_same(one, single, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("where", ["in a shard", "without gradients"])
@pytest.mark.parametrize("same_mesh", [True, False])
@pytest.mark.parametrize("optimizer", ["torch", "ours", "clipping"])
def test_replicated_and_sharded_parameters(ask_two, optimizer, same_mesh, where):
    first, second = ask_two(mixed_placements, optimizer, same_mesh, where)
    assert first == second == EXPECTED[:3]


@pytest.mark.parametrize("optimizer", ["torch", "clipping"])
def test_pipeline_stages_of_which_one_has_the_loss(ask_two, optimizer):
    assert ask_two(stages, optimizer) == [(EXPECTED, True)] * WORLD


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_tensor_parallel_training_is_that_of_one_process(ask_two, optimizer):
    for parallel, single in ask_two(tensor_parallel, optimizer):
        assert_same(parallel, single, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(("optimizer", "calls"), [("torch", [1]), ("fused", [1]), ("ours", [1]), ("clipping", [1, 1])])
def test_one_number_is_agreed_upon_once(ask_two, optimizer, calls):
    assert ask_two(reductions, optimizer) == [calls] * WORLD


def partial_gradients(tools, rank, optimizer):
    """A gradient whose value is the sum over ranks, as tensor parallelism may leave it; once only the sum is inf."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (WORLD,))
    parameter = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Replicate()]))
    plain = nn.Parameter(torch.ones(4))
    results = []
    for owner, single in ((parameter, False), (plain, True)):
        made, scaler = OPTIMIZERS[optimizer]([owner]), fxprec.LossScaler("cpu", 1.0)
        for size in (0.5, 3e38):
            scaler.scale(torch.zeros((), requires_grad=True))
            part = torch.full((4,), size)
            owner.grad = part * 2 if single else DTensor.from_local(part, mesh, [Partial()])
            scaler.step(made)
            scaler.update()
        results.append((full(owner.detach()), scaler.skipped_steps))
    return results


@pytest.mark.parametrize("optimizer", ["torch", "fused", "ours", "clipping", "momentum"])
def test_partial_gradients_are_summed_before_they_are_looked_at(ask_two, optimizer):
    for (parallel, skipped), (single, expected) in ask_two(partial_gradients, optimizer):
        assert skipped == expected == 1
        torch.testing.assert_close(parallel, single, rtol=1e-6, atol=1e-7)


def loss_that_is_a_dtensor(tools, rank):
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (WORLD,))
    weight = nn.Parameter(distribute_tensor(torch.tensor([1.0, 2.0]), mesh, [Replicate()]))
    scaler, made = fxprec.LossScaler("cpu", 8.0), torch.optim.SGD([weight], lr=0.5)
    loss = scaler.scale(weight.square().sum() / 2)
    loss.backward()
    scaler.step(made)
    scaler.update()
    return isinstance(loss, DTensor), full(loss.detach()).item(), full(weight.detach()).tolist()


def test_a_loss_that_is_a_dtensor(ask_two):
    assert ask_two(loss_that_is_a_dtensor) == [(True, 20.0, [0.5, 1.0])] * WORLD
