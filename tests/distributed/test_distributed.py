"""PyTorch's own distribution around a converted model, with two gloo processes on a CPU: DDP, FSDP2, DTensors."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fxprec
from fxprec.model.conversion import conversion_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="wants gloo"),
]

WORLD = 2
LOW = torch.bfloat16


class Static(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(F.relu(self.up(x)))


class Dynamic(Static):
    """Reads a shape in a branch, so that symbolic tracing declines it."""

    def forward(self, x):
        if x.shape[0] > 100:
            x = x * 2
        return super().forward(x)


class Checkpointed(Static):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class Net(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x))


BLOCKS = {"static": Static, "dynamic": Dynamic, "checkpointed": Checkpointed}


def _batch(step, rank=None):
    x = torch.randn(2 * WORLD, 8, generator=torch.Generator().manual_seed(step))
    return x if rank is None else x[2 * rank : 2 * rank + 2]


# -- what the processes do: each returns something picklable, or raises


def ddp(tools, rank, block, options):
    torch.manual_seed(0)
    model, single = Net(BLOCKS[block]), Net(Static)  # which computes the same, and whose graph is made in no time
    single.load_state_dict(model.state_dict())
    fxprec.convert(model)
    fxprec.convert(single)
    wrapped = DistributedDataParallel(model, **options)
    for step in range(3):
        for net in (wrapped, single):
            net.zero_grad()
        wrapped(_batch(step, rank)).square().mean().backward()
        single(_batch(step)).square().mean().backward()
        for ours, reference in zip(model.parameters(), single.parameters(), strict=True):
            assert ours.grad.dtype is torch.float32
            torch.testing.assert_close(ours.grad, reference.grad, atol=1e-2, rtol=5e-2)
        with torch.no_grad():
            for parameter in (*model.parameters(), *single.parameters()):
                parameter -= 0.1 * parameter.grad
    return tools.matmul_dtypes(wrapped, _batch(0, rank)), len(fxprec.graphs(model)), conversion_of(model).net


def no_sync(tools, rank, block):
    torch.manual_seed(0)
    model, _ = fxprec.convert(Net(BLOCKS[block]))
    wrapped = DistributedDataParallel(model)
    with wrapped.no_sync(), fxprec.accumulate(model):
        for step in range(2):
            wrapped(_batch(step, rank)).square().mean().backward()
    before = _gathered(model.head.weight.grad)
    wrapped(_batch(2, rank)).square().mean().backward()
    after = _gathered(model.head.weight.grad)
    return torch.equal(*before), torch.equal(*after)


def order_of_hooks(tools, rank, convert):
    """Gradients as they arrive, and buckets as they are reduced, in a backward of the second iteration on."""
    torch.manual_seed(0)
    model = Net(Static)
    if convert:
        fxprec.convert(model)
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.0005)
    events = []

    def reduce(_, bucket):
        events.append(("bucket", bucket.index()))
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0] / WORLD)

    wrapped.register_comm_hook(None, reduce)
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: events.append(("gradient", name)))
    for step in range(3):
        events.clear()
        wrapped(_batch(step, rank)).square().mean().backward()
    return events


def fsdp(tools, rank, block, called_before):
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model, reference = Net(BLOCKS[block]), Net(BLOCKS[block])
    reference.load_state_dict(model.state_dict())
    keys = list(model.state_dict())
    fxprec.convert(model)
    if called_before:
        model(_batch(0, rank)).sum().backward()
        model.zero_grad()
    for part in (*model.blocks, model):
        fully_shard(part)
    assert [type(part).__name__ for part in (model.blocks[0], model)] == [f"FSDP{BLOCKS[block].__name__}", "FSDPNet"]
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.05) for net in (model, reference)]
    ours, theirs = [], []
    for step in range(5):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = model(_batch(step, rank)).square().mean()
        expected = reference(_batch(step)).square().mean()
        loss.backward()
        expected.backward()
        for optimizer in optimizers:
            optimizer.step()
        ours.append(torch.stack(_gathered(loss.detach())).mean().item())
        theirs.append(expected.item())
    assert ours == pytest.approx(theirs, rel=0.03), (ours, theirs)
    assert list(model.state_dict()) == keys
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    model.eval()
    with torch.no_grad():
        evaluated = tools.matmul_dtypes(model, _batch(0, rank))
    conversion = conversion_of(model)
    # nothing of a full weight may outlive the forward: neither its storage nor an edge of the autograd graph
    return tools.matmul_dtypes(model, _batch(0, rank)), evaluated, len(conversion.store._entries), bool(conversion.net)


def containers(tools, rank):
    """Sharded modules whose forward is torch's own code, in a forward that only calls them."""
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)), nn.Linear(8, 4))
    reference = copy.deepcopy(model)
    fxprec.convert(model)
    for part in (*model, model):
        fully_shard(part)
    torch.testing.assert_close(model(_batch(0, rank)), reference(_batch(0, rank)), atol=0.05, rtol=0.05)
    graphs = [gm for gm in fxprec.graphs(model) if any(node.target is not None for node in gm.graph.nodes)]
    assert all("forward" not in part.__dict__ for part in model)
    return tools.matmul_dtypes(model, _batch(0, rank)), len(graphs)


def around(tools, rank):
    """A converted model in one that is sharded as a whole: its weights come and go, though no module in it says so."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(Static(), nn.Linear(8, 8))
    fxprec.convert(model[0])
    fully_shard(model)
    for step in range(2):
        model(_batch(step, rank)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    return tools.matmul_dtypes(model, _batch(0, rank)), len(conversion_of(model[0]).store._entries)


def replicated_dtensors(tools, rank):
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (WORLD,))
    torch.manual_seed(0)
    model = Static()
    reference = copy.deepcopy(model)
    fxprec.convert(model)
    model(_batch(0))
    for part in (model.up, model.down):
        for name, parameter in [*part.named_parameters()]:
            part.register_parameter(name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Replicate()])))
    x = distribute_tensor(_batch(0), mesh, [Replicate()])
    output = model(x)
    torch.testing.assert_close(output.full_tensor(), reference(_batch(0)), atol=0.05, rtol=0.05)
    output.sum().backward()
    assert isinstance(model.up.weight.grad, DTensor) and model.up.weight.grad.dtype is torch.float32
    return tools.matmul_dtypes(model, x)


def _gathered(tensor):
    gathered = [torch.empty_like(tensor) for _ in range(WORLD)]
    dist.all_gather(gathered, tensor)
    return gathered


@pytest.mark.parametrize(
    ("block", "options"),
    [
        *((block, ()) for block in BLOCKS),
        ("dynamic", ("static_graph",)),
        ("dynamic", ("gradient_as_bucket_view", "find_unused_parameters")),
        ("checkpointed", ("static_graph",)),
    ],
    ids=str,
)
def test_ddp_has_the_gradients_of_one_process(ask_two, block, options):
    assert ask_two(ddp, block, dict.fromkeys(options, True)) == [({LOW: 5}, 1, {})] * WORLD


def test_ddp_reduces_buckets_while_gradients_still_come(ask_two):
    converted, plain = (ask_two(order_of_hooks, convert)[0] for convert in (True, False))
    assert converted == plain
    kinds = [kind for kind, _ in converted]
    assert kinds.count("bucket") >= 3
    assert kinds.index("bucket") < len(kinds) / 2  # the first does not wait for the last gradient


@pytest.mark.parametrize("block", BLOCKS)
def test_ddp_no_sync(ask_two, block):
    assert ask_two(no_sync, block) == [(False, True)] * WORLD


@pytest.mark.slow
@pytest.mark.parametrize(("block", "called_before"), [*((block, False) for block in BLOCKS), ("dynamic", True)])
def test_fsdp_per_block_and_around(ask_two, block, called_before):
    for trained, evaluated, shadows, in_net in ask_two(fsdp, block, called_before):
        assert trained == evaluated == {LOW: 5}
        assert shadows == 0
        assert in_net  # the loop over blocks is left to the interpreter, and the report says so


def test_fsdp_of_torchs_own_modules(ask_two):
    assert ask_two(containers) == [({LOW: 3}, 2)] * WORLD


def test_fsdp_around_a_converted_submodule(ask_two):
    assert ask_two(around) == [({LOW: 2, torch.float32: 1}, 0)] * WORLD


def test_weights_that_are_dtensors(ask_two):
    assert ask_two(replicated_dtensors) == [{LOW: 2}] * WORLD


def beside_a_sharded_one(tools, rank):
    """A model that nobody sharded keeps its shadows while another one in the process is sharded."""
    from torch.distributed.fsdp import fully_shard

    sharded, _ = fxprec.convert(Static())
    fully_shard(sharded)
    sharded(_batch(0, rank)).sum().backward()
    model, _ = fxprec.convert(Static())
    model(_batch(0, rank)).sum().backward()
    return len(conversion_of(sharded).store._entries), len(conversion_of(model).store._entries)


def test_a_model_beside_a_sharded_one(ask_two):
    assert ask_two(beside_a_sharded_one) == [(0, 4)] * WORLD


def low_gradients(tools, rank):
    from fxprec import optim

    model, _ = fxprec.convert(Net(Static))
    optim.AdamW(model.parameters(), low_gradients=True)
    wrapped = DistributedDataParallel(model)
    with pytest.raises(fxprec.ConversionError, match="low_gradients=True under DistributedDataParallel"):
        wrapped(_batch(0, rank))
    model(_batch(0, rank)).sum().backward()  # outside of it
    gradient = str(model.head.weight.grad.dtype)
    with pytest.raises(fxprec.ConversionError, match="low_gradients=True under DistributedDataParallel"):
        wrapped(_batch(0, rank))
    model.zero_grad()
    with pytest.warns(UserWarning, match="FP32 from now on"), fxprec.accumulate(model):
        wrapped(_batch(0, rank)).sum().backward()  # turned off, they are no reason to refuse
    assert model.head.weight.grad.dtype is torch.float32

    from torch.distributed.fsdp import fully_shard

    fully_shard(model)
    with pytest.raises(ValueError, match="for sharded parameters"):
        optim.AdamW(model.parameters(), low_gradients=True)
    return gradient


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="wants Tensor.grad_dtype")
def test_low_gradients_are_refused_under_ddp_and_fsdp(ask_two):
    assert ask_two(low_gradients) == ["torch.bfloat16"] * WORLD
