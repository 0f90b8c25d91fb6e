"""What torch.amp's documentation promises of its loops, with converted models, the scaler and the optimizers."""

from __future__ import annotations

import copy
import itertools
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxprec
from fxprec import optim

LOW = [torch.bfloat16, torch.float16]


class Net(nn.Module):
    def __init__(self, inputs=6, outputs=3):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(inputs, 8), nn.LayerNorm(8), nn.Linear(8, outputs)

    def forward(self, x):
        return self.down(torch.tanh(self.norm(self.up(x))))


def net(seed=0, **sizes):
    torch.manual_seed(seed)
    return Net(**sizes)


def batch(seed=0, rows=4):
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(seed))


def penalised(model, x, scaler, autocast=None):
    """Gradients of loss + norm of the loss's gradients, as the examples of torch.amp have it."""
    parameters = [*model.parameters()]
    with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        loss = model(x).square().mean()
    scaled = torch.autograd.grad(scaler.scale(loss), parameters, create_graph=True)
    slopes = [slope / scaler.get_scale() for slope in scaled]
    with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        penalty = sum(slope.square().sum() for slope in slopes).sqrt()
        total = loss + penalty
    scaler.scale(total).backward()
    return [p.grad / scaler.get_scale() for p in parameters]


@pytest.mark.parametrize("dtype", LOW)
def test_gradient_penalty_is_as_exact_as_under_autocast(dtype):
    model, x = net(), batch()
    exact = penalised(copy.deepcopy(model).double(), x.double(), fxprec.LossScaler(enabled=False))
    eager = penalised(copy.deepcopy(model), x, torch.amp.GradScaler("cpu", 1024.0), autocast=dtype)
    converted, _ = fxprec.convert(copy.deepcopy(model), dtype=dtype)
    ours = penalised(converted, x, fxprec.LossScaler("cpu", 1024.0))

    def error(gradients):
        return sum(float((g.double() - e).square().sum()) for g, e in zip(gradients, exact, strict=True)) ** 0.5

    assert 0 < error(ours) <= 2 * error(eager)


@pytest.mark.parametrize("bad", [None, *itertools.product(range(3), range(2))])
def test_two_models_three_losses_two_optimizers(bad):
    """One scaler; an overflow in one loss of one model skips the optimizers that it reaches, and no other."""
    models = [fxprec.convert(net(seed), dtype=torch.bfloat16)[0] for seed in range(2)]
    optimizers = [optim.AdamW(models[0].parameters(), lr=0.1), optim.SGD(models[1].parameters(), lr=0.1, momentum=0.9)]
    scaler = fxprec.LossScaler("cpu", 64.0, num_losses=3)
    before = [[p.detach().clone() for p in model.parameters()] for model in models]
    for loss_id in range(3):
        outputs = [model(batch(loss_id)) for model in models]
        if bad is not None and bad[0] == loss_id:
            outputs[bad[1]] = outputs[bad[1]] * float("inf")
        loss = sum(F.relu(output).square().mean() for output in outputs)
        with scaler.scale_loss(loss, optimizers, loss_id=loss_id) as scaled:
            scaled.backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    moved = [
        any(not torch.equal(p, old) for p, old in zip(model.parameters(), parameters, strict=True))
        for model, parameters in zip(models, before, strict=True)
    ]
    assert moved == [bad is None or bad[1] != i for i in range(2)]
    assert [scaler.get_scale(i) for i in range(3)] == [32.0 if bad and bad[0] == i else 64.0 for i in range(3)]


def test_a_gan_with_one_scaler_follows_torchs():
    def train(generator, critic, scaler, make, autocast):
        optimizers = [make(model.parameters()) for model in (generator, critic)]
        scales = []
        for step in range(6):
            noise, real = batch(step), batch(100 + step)
            for optimizer, sign in zip(optimizers, (1.0, -1.0), strict=True):
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    loss = (critic(generator(noise)).mean() - critic(real).mean()) * sign
                if step == 3:
                    loss = loss * float("nan")
                scaler.scale(loss.float()).backward()
                scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales

    plain = [net(0, outputs=6), net(1, outputs=1)]
    converted = [fxprec.convert(copy.deepcopy(model))[0] for model in plain]
    ours = train(*converted, fxprec.LossScaler("cpu", 16.0), lambda p: optim.SGD(p, lr=0.05), False)
    theirs = train(*plain, torch.amp.GradScaler("cpu", 16.0), lambda p: torch.optim.SGD(p, lr=0.05), True)
    assert ours == theirs == [16.0, 16.0, 16.0, 8.0, 8.0, 8.0]
    for mine, reference in zip(converted, plain, strict=True):
        for p, q in zip(mine.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=0.02, atol=0.01)


@pytest.mark.parametrize("make", [optim.SGD, torch.optim.SGD, torch.optim.SparseAdam])
def test_sparse_gradients_of_an_embedding(make):
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(20, 6, sparse=True), nn.Linear(6, 2)

        def forward(self, index):
            return self.head(self.table(index).mean(1))

    torch.manual_seed(0)
    model, _ = fxprec.convert(Words(), dtype=torch.float16)
    scaler = fxprec.LossScaler("cpu", 256.0)
    optimizers = [make(model.table.parameters(), lr=0.1), optim.AdamW(model.head.parameters(), lr=0.1)]
    index = torch.tensor([[1, 2, 2], [1, 3, 2]])
    for bad in (True, False):
        before = model.table.weight.detach().clone()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = model(index).square().mean()
        scaler.scale(loss * float("inf") if bad else loss).backward()
        assert model.table.weight.grad.is_sparse
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        changed = (model.table.weight != before).any(1).nonzero().flatten().tolist()
        assert changed == ([] if bad else [1, 2, 3])
    assert scaler.get_scale() == 128


def test_conversions_beside_each_other_do_not_meet():
    models = {
        (level, dtype): fxprec.convert(net(), level=level, dtype=dtype)[0] for level in ("O1", "O2") for dtype in LOW
    }
    alone = {key: fxprec.convert(net(), level=key[0], dtype=key[1])[0] for key in models}
    optimizers = {key: optim.AdamW(model.parameters(), lr=0.05) for key, model in models.items()}
    scaler = fxprec.LossScaler("cpu", 8.0)
    for step in range(2):
        for key, model in models.items():  # interleaved
            optimizers[key].zero_grad()
            scaler.scale(model(batch(step)).square().mean()).backward()
        for optimizer in optimizers.values():
            scaler.step(optimizer)
        scaler.update()
    for key, model in alone.items():  # one after the other
        optimizer, own = optim.AdamW(model.parameters(), lr=0.05), fxprec.LossScaler("cpu", 8.0)
        for step in range(2):
            optimizer.zero_grad()
            own.scale(model(batch(step)).square().mean()).backward()
            own.step(optimizer)
            own.update()
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), models[key].parameters(), strict=True))


def test_threads_run_replicas_as_data_parallel_does():
    """Forward of every replica in a thread of its own, one loss over all outputs, one backward."""

    def train(threaded):
        model, _ = fxprec.convert(net())
        replicas = [model, copy.deepcopy(model)]
        scaler, optimizer = fxprec.LossScaler("cpu", 4.0), optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            outputs, errors = [None, None], []

            def forward(i, outputs=outputs, errors=errors, step=step):
                try:
                    outputs[i] = replicas[i](batch(10 * step + i))
                except Exception as error:
                    errors.append(error)

            for replica in replicas[1:]:
                replica.load_state_dict(model.state_dict())
                replica.zero_grad()
            optimizer.zero_grad()
            workers = [threading.Thread(target=forward, args=(i,)) for i in range(2)]
            for worker in workers:
                worker.start()
                if not threaded:
                    worker.join()
            for worker in workers:
                worker.join()
            assert not errors
            scaler.scale(torch.cat(outputs).square().mean()).backward()
            for parameter, other in zip(model.parameters(), replicas[1].parameters(), strict=True):
                parameter.grad += other.grad
            scaler.step(optimizer)
            scaler.update()
        return [*model.parameters()]

    assert all(torch.equal(p, q) for p, q in zip(train(True), train(False), strict=True))
