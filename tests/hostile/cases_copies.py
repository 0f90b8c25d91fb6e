"""Copies, pickles, files, other processes and threads."""

from __future__ import annotations

import copy
import io
import pickle
import queue
import threading

import torch
import torch.multiprocessing
from torch import nn

from tests.hostile.harness import Cases, Run
from tests.hostile.models import Net, Two

CASES = case = Cases("copies")


class Counting(Two):
    """With state of its own, in a class that can be imported."""

    def __init__(self):
        super().__init__()
        self.stats = {"calls": 0}
        self.register_buffer("total", torch.zeros(8))

    def forward(self, x):
        self.stats["calls"] += 1
        h = super().forward(x)
        with torch.no_grad():
            self.total.add_(h.mean(0))
        return h + self.total


def train(t: Run, m, steps=2):
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        t.backward(t(m, t.randn(4, 8)))
        optimizer.step()


def trains_apart(t: Run, copied, make=Two):
    """A copy and its original go on training, each for itself."""
    m = t.convert(make())
    train(t, m)
    twin = copied(m)
    t.watch("twin", twin)
    train(t, twin)
    x = t.randn(4, 8)
    t(m, x)
    train(t, m, 1)
    t(twin, x)


def through_a_file(m):
    file = io.BytesIO()
    torch.save(m, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@case
def deep_copy(t: Run):
    trains_apart(t, copy.deepcopy)


@case
def deep_copy_of_state(t: Run):
    trains_apart(t, copy.deepcopy, Counting)


@case
def pickled(t: Run):
    trains_apart(t, lambda m: pickle.loads(pickle.dumps(m)), Counting)


@case
def saved(t: Run):
    trains_apart(t, through_a_file, Counting)


@case
def shallow_copy(t: Run):
    """The copy has the same parameters; a layer put into one does not come into the other."""
    m, x = t.convert(Two()), t.randn(4, 8)
    t(m, x)
    twin = copy.copy(m)
    t.backward(t(twin, x))
    twin.training = False
    t(m, x)
    t(twin, x)


@case
def shallow_copy_that_is_changed(t: Run):
    m, x = t.convert(Two()), t.randn(4, 8)
    t(m, x)
    twin = copy.copy(m)
    twin._modules = {**m._modules, "l": t.wide(nn.Linear(8, 8))}
    t(twin, x)
    t(m, x)


@case
def copied_before_its_first_call(t: Run):
    m, x = t.convert(Counting()), t.randn(4, 8)
    twin = copy.deepcopy(m)
    t.watch("twin", twin)
    t(twin, x)
    t(m, x)
    t(twin, x)


@case
def copied_inside_a_list(t: Run):
    m, x = t.convert(Two()), t.randn(4, 8)
    t(m, x)
    both = copy.deepcopy([m, m.l])
    t.see("same", both[0].l is both[1])
    t.backward(t(both[0], x))
    t.watch("both", both)


@case
def exponential_average(t: Run):
    m, x = t.convert(Two()), t.randn(4, 8)
    average = copy.deepcopy(m).requires_grad_(False).eval()
    t.watch("average", average)
    for _ in range(3):
        train(t, m, 1)
        with torch.no_grad():
            for ours, theirs in zip(average.parameters(), m.parameters(), strict=True):
                ours.lerp_(theirs, 0.5)
        t(average, x)


@case
def averaged_model(t: Run):
    m, x = t.convert(nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 8))), t.randn(4, 8)
    average = torch.optim.swa_utils.AveragedModel(m)
    for _ in range(2):
        train(t, m, 1)
        average.update_parameters(m)
    with t.casting():
        torch.optim.swa_utils.update_bn([t.randn(4, 8) for _ in range(3)], average)
    t.watch("average", average.module)
    t(average.eval(), x)


@case
def teacher_and_student(t: Run):
    student, x = t.convert(Two()), t.randn(4, 8)
    teacher = copy.deepcopy(student).eval()
    for p in teacher.parameters():
        p.requires_grad = False
    loss = (t(student, x) - t(teacher, x + 1)).square().mean()
    loss.backward()
    t.see("none", [p.grad is None for p in teacher.parameters()])


@case
def state_into_a_plain_model(t: Run):
    m = t.convert(Two())
    train(t, m)
    plain = t.wide(Two())
    plain.load_state_dict(m.state_dict())
    t.see("plain", plain)
    t.see("keys", list(m.state_dict()))


@case
def state_saved_and_loaded(t: Run):
    m, x = t.convert(Two()), t.randn(4, 8)
    train(t, m)
    file = io.BytesIO()
    torch.save(m.state_dict(), file)
    train(t, m)
    file.seek(0)
    m.load_state_dict(torch.load(file))
    t(m, x)
    with torch.no_grad():
        t(m, x)


def in_threads(t: Run, work, count=3):
    """Run in threads of this process; results in the order of the threads, errors raised."""
    results: queue.Queue = queue.Queue()

    def run(number):
        try:
            results.put((number, work(number), None))
        except BaseException as error:
            results.put((number, None, error))

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    found = sorted((results.get(timeout=120) for _ in threads), key=lambda result: result[0])
    for _, _, error in found:
        if error is not None:
            raise error
    return [value for _, value, _ in found]


@case
def first_calls_in_threads(t: Run):
    m, xs = t.convert(Two()), [t.randn(4, 8) for _ in range(3)]
    t.see("outputs", in_threads(t, lambda n: t.quiet(m, xs[n])))
    t(m, xs[0])


@case
def first_calls_of_several_models_in_threads(t: Run):
    ms, x = [t.convert(Two()) for _ in range(3)], t.randn(4, 8)
    t.see("outputs", in_threads(t, lambda n: t.quiet(ms[n], x)))


@case
def conversions_in_threads(t: Run):
    ms, x = [Two() for _ in range(3)], t.randn(4, 8)

    def work(n):
        m = t.convert(ms[n], name=f"m{n}")
        return t.quiet(m, x)

    t.see("outputs", in_threads(t, work))


@case
def backward_in_another_thread(t: Run):
    m, x = t.convert(Two()), t.randn(4, 8)
    out = t(m, x)
    in_threads(t, lambda n: t.backward(out), 1)
    t.backward(t(m, x))


@case
def gradients_off_in_one_thread(t: Run):
    m, x = t.convert(Two()), t.randn(4, 8)

    def work(n):
        with torch.set_grad_enabled(n != 1):
            return t.quiet(m, x).requires_grad

    t.see("requires", in_threads(t, work))
    t(m, x)


@case
def state_that_threads_share(t: Run):
    """Reads of a flag that another thread sets between two calls."""
    m, x = t.convert(Counting()), t.randn(4, 8)
    t(m, x)
    in_threads(t, lambda n: m.stats.update(calls=10), 1)
    in_threads(t, lambda n: t.quiet(m, x).detach(), 1)
    t(m, x)


def of_a_child(m, x, results):
    torch.set_num_threads(1)
    results.put(m(x).detach().numpy())


def in_a_process(t: Run, how):
    context = torch.multiprocessing.get_context(how)
    m, x = t.convert(Counting()), t.randn(4, 8)
    t(m, x)
    results = context.Queue()
    with t.casting():
        child = context.Process(target=of_a_child, args=(m, x, results))
        child.start()
        got = results.get(timeout=120)
        child.join(30)
    expected = m(x)
    t.see("close", bool((torch.from_numpy(got) - expected.detach()).abs().max() < 0.1))


@case
def forked(t: Run):
    in_a_process(t, "fork")


_SECONDS = "a process of its own costs seconds"


@case(
    slow=True,
    no_dynamo=f"{_SECONDS}, and what is pickled is the same",
    no_twin=_SECONDS,
    no_autocast=f"{_SECONDS}; forked compares the same numbers with it",
)
def spawned(t: Run):
    in_a_process(t, "spawn")


@case
def shared_memory(t: Run):
    m, x = t.convert(Net()), t.randn(4, 8)
    m.share_memory()
    train(t, m)
    t(m, x)
