"""PyTorch's own distribution around a converted model, with two gloo processes on a CPU: DDP, FSDP2, DTensors.

The processes are started once a module and asked for one check after the other.
"""

from __future__ import annotations

import copy
import importlib.util
import os
import pathlib
import socket
import subprocess
import sys
import traceback
from multiprocessing.connection import Client, Listener

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fxprec
from fxprec.module import conversion_of

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


class Net(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x))


BLOCKS = {"static": Static, "dynamic": Dynamic}


def _batch(step, rank=None):
    x = torch.randn(2 * WORLD, 8, generator=torch.Generator().manual_seed(step))
    return x if rank is None else x[2 * rank : 2 * rank + 2]


# -- what the processes do: each returns something picklable, or raises


def ddp(tools, rank, block, options):
    torch.manual_seed(0)
    model = Net(BLOCKS[block])
    single = copy.deepcopy(model)
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


# -- starting and asking them


def _serve(rank: int, port: int, rendezvous: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(rendezvous))
    torch.set_num_threads(1)
    spec = importlib.util.spec_from_file_location("fxprec_conftest", pathlib.Path(__file__).with_name("conftest.py"))
    assert spec is not None and spec.loader is not None
    conftest = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(conftest)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    with Client(("127.0.0.1", port), authkey=b"fxprec") as parent:
        while (job := parent.recv()) is not None:
            check, arguments = job
            try:
                parent.send((True, globals()[check](conftest.Tools, rank, *arguments)))
            except Exception:
                parent.send((False, traceback.format_exc()))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ask():
    """``ask(check, *arguments)``: what both processes returned."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        rendezvous = free.getsockname()[1]
    with Listener(("127.0.0.1", 0), authkey=b"fxprec") as listener:
        command = [sys.executable, __file__]
        rest = [str(listener.address[1]), str(rendezvous)]
        processes = [subprocess.Popen([*command, str(rank), *rest]) for rank in range(WORLD)]
        connections = [listener.accept() for _ in range(WORLD)]

    def ask_both(check, *arguments):
        for connection in connections:
            connection.send((check.__name__, arguments))
        answers = []
        for connection in connections:
            assert connection.poll(120), f"{check.__name__}{arguments} hangs"
            answers.append(connection.recv())
        for good, answer in answers:
            assert good, answer
        return [answer for _, answer in answers]

    yield ask_both
    for connection in connections:
        connection.send(None)
        connection.close()
    for process in processes:
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize(
    "options",
    [{}, {"static_graph": True}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}],
    ids=lambda options: next(iter(options), "plain"),
)
def test_ddp_has_the_gradients_of_one_process(ask, block, options):
    assert ask(ddp, block, options) == [({LOW: 7}, 1, {})] * WORLD


@pytest.mark.parametrize("block", BLOCKS)
def test_ddp_no_sync(ask, block):
    assert ask(no_sync, block) == [(False, True)] * WORLD


@pytest.mark.parametrize("called_before", [False, True])
@pytest.mark.parametrize("block", BLOCKS)
def test_fsdp_per_block_and_around(ask, block, called_before):
    for trained, evaluated, shadows, in_net in ask(fsdp, block, called_before):
        assert trained == evaluated == {LOW: 7}
        assert shadows == 0
        assert in_net  # the loop over blocks is left to the interpreter, and the report says so


def test_fsdp_around_a_converted_submodule(ask):
    assert ask(around) == [({LOW: 2, torch.float32: 1}, 0)] * WORLD


def test_weights_that_are_dtensors(ask):
    assert ask(replicated_dtensors) == [{LOW: 2}] * WORLD


if __name__ == "__main__":
    _serve(*map(int, sys.argv[1:]))
