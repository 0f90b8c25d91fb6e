"""Steps in turns, and what their figures allow to say: nothing within the noise is a win."""

from __future__ import annotations

import gc
import pathlib
import statistics
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from benchmarks.measure.interleaved import Ratio, Samples, Schedule, device_times, host_times, measure, noise, order

ROOT = pathlib.Path(__file__).parents[2]

# -- in turns ----------------------------------------------------------------------------------------------------------


def test_the_order_rotates_and_turns_round():
    assert ["".join(order("abcd", number)) for number in range(5)] == ["abcd", "badc", "cdab", "dcba", "abcd"]


@pytest.fixture(params=[False, True])
def frozen(request):
    """Whether somebody else froze objects before."""
    (gc.freeze if request.param else gc.unfreeze)()
    yield request.param
    gc.freeze()


@pytest.mark.slow
def test_variants_run_in_turns(frozen):
    ran: list[str] = []

    def clock(work, count):
        assert gc.isenabled() is False
        for _ in range(count):
            work()
        return [float(len(ran))] * count

    works = {name: lambda name=name: ran.append(name) for name in "ab"}
    found = measure(works, Schedule(warm_up=9, rounds=2, steps=2, settle=1), clock)
    assert "".join(ran) == "aaabbb" + "bbbaaa"
    assert found["a"].rounds == ((3.0, 3.0), (12.0, 12.0)) and found["b"].rounds == ((6.0, 6.0), (9.0, 9.0))
    assert gc.isenabled() and (gc.get_freeze_count() > 0) is frozen


@pytest.mark.slow
def test_a_failure_leaves_the_collector_on(frozen):
    def clock(work, count):
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        measure({"a": lambda: None}, Schedule(), clock)
    assert gc.isenabled() and (gc.get_freeze_count() > 0) is frozen


def test_the_schedule_fits_into_the_time():
    cpu = Schedule(warm_up=3, rounds=40, steps=4, settle=1)
    assert (cpu.total, cpu.within(1e9, 1.0)) == (203, cpu)
    assert cpu.within(50.0, 1.0) == replace(cpu, rounds=10)
    assert cpu.within(15.0, 1.0) == replace(cpu, rounds=5, steps=2)
    assert cpu.within(1e-9, 1.0) == replace(cpu, rounds=5, steps=2)
    cuda = Schedule()
    assert (cuda.warm_up, cuda.rounds, cuda.steps) == (20, 5, 50)
    assert cuda.within(120.0, 0.4) == cuda and cuda.within(60.0, 0.5) == replace(cuda, steps=22)


def test_host_times_are_of_each_call():
    calls = []
    found = host_times(lambda: calls.append(None), 3)
    assert len(found) == len(calls) == 3 and all(0 <= each < 1e3 for each in found)


def test_device_times_do_not_wait_between_steps(monkeypatch):
    log: list[str] = []
    now = iter(range(0, 100, 7))

    class Event:
        def __init__(self, enable_timing=False):
            assert enable_timing

        def record(self):
            log.append("event")
            self.at = next(now)

        def elapsed_time(self, other):
            return float(other.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("wait"))
    assert device_times(lambda: log.append("step"), 2) == [7.0, 7.0]
    assert log == ["event", "step", "event", "step", "event", "wait"]


# -- figures -----------------------------------------------------------------------------------------------------------


def times(*medians, least=None):
    """A round for each: one fast sample, and the median."""
    return Samples(tuple(((m if least is None else least), m, 2.0 * m) for m in medians))


def test_statistics_of_samples():
    found = Samples(((5.0, 1.0, 3.0), (2.0, 4.0, 100.0)))
    assert (found.median, found.least, found.quantile(0.2), found.quantile(0.8)) == (3.5, 1.0, 2.0, 5.0)


def test_a_ratio_is_taken_round_by_round():
    """The machine was three times slower in one round: medians of all samples would say 0.5 or 2."""
    one, other = times(1.0, 3.0, 1.0, 3.0, 3.0), times(2.0, 6.0, 2.0, 6.0, 6.0)
    assert Ratio.of(one, other) == Ratio(2.0, 2.0, 0.0)
    assert Ratio.of(other, one).value == 0.5
    assert Ratio.of(times(4.0, 4.0, least=1.0), times(4.0, 4.0, least=3.0)).least == 3.0
    with pytest.raises(ValueError):
        Ratio.of(times(1.0), times(1.0, 2.0))


def test_the_error_of_a_ratio_is_twice_the_standard_error_of_its_median():
    """Of normal samples, as drawn; with few rounds rather more than less."""
    generator = torch.Generator().manual_seed(0)
    for rounds, least, most in ((5, 1.0, 1.5), (40, 0.95, 1.1)):
        drawn = 1 + 0.05 * torch.randn(4000, rounds, generator=generator, dtype=torch.float64)
        # of an even number torch's median is the lower of the two in the middle
        medians = [statistics.median(each) for each in drawn.tolist()]
        found = [Ratio.of(times(*[1.0] * rounds), times(*each)).error for each in drawn.tolist()]
        assert least < statistics.mean(found) / (2 * statistics.stdev(medians)) < most
    assert Ratio.of(times(1.0), times(2.0)).error == float("inf")


def test_the_noise_is_what_twins_show():
    assert noise([Ratio(1.0, 1.0, 0.0)]) == 0.005
    assert noise([Ratio(1.0, 1.0, 0.0), Ratio(0.8, 1.0, 0.0)]) == pytest.approx(0.25)
    assert noise([Ratio(1.25, 1.0, 0.0)]) == pytest.approx(0.25)
    assert noise([Ratio(1.25, 1.0, 0.4)]) == pytest.approx(0.4)
    assert noise([]) == float("inf")


def test_nothing_within_the_noise_is_a_win():
    def verdicts(error, noise):
        return [Ratio(value, value, error).verdict(noise) for value in (1.11, 1.1, 1.0, 0.91, 0.9)]

    assert verdicts(0.0, 0.1) == ["faster", "=", "=", "=", "slower"]
    assert verdicts(0.105, 0.01) == ["faster", "=", "=", "=", "="]  # nor within its own error
    assert verdicts(0.0, float("inf")) == ["="] * 5


def succeeds(program: str) -> None:
    """In a process of its own: what is told to malloc stays so."""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    if "not glibc" in done.stderr:
        pytest.skip("another C library")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="resident memory as Linux counts it")
def test_memory_is_given_back_when_asked():
    """Also from the middle of the heap, and though it is kept otherwise."""
    program = """if True:
        import sys, torch
        from benchmarks.measure.interleaved import give_memory_back
        from fxprec import keep_memory
        def resident():
            return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20
        if not keep_memory():
            sys.exit("not glibc")
        large, above = torch.ones(50 * 2**20), torch.ones(1000)
        full = resident()
        del large
        assert resident() > full - 20
        give_memory_back()
        assert resident() < full - 180
    """
    succeeds(program)


def test_a_variant_rests_after_each_turn():
    log = []
    steps = {name: lambda name=name: log.append(name) for name in ("a", "b")}
    schedule = Schedule(warm_up=0, rounds=1, steps=2, settle=1)
    measure(steps, schedule, host_times, lambda name: log.append(f"{name} rests"))
    assert log == ["a", "a", "a", "a rests", "b", "b", "b", "b rests"]
