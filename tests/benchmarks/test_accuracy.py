"""``benchmarks.accuracy``: all variants train on tiny tasks; what "equal" means; the command."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks import accuracy
from benchmarks.accuracy import DEFAULT, Run, compare, summary, verdict
from benchmarks.measure.training_step import Setup
from benchmarks.measure.variants import VARIANTS
from benchmarks.workloads import tasks
from benchmarks.workloads.tasks import TASKS, Task
from benchmarks.workloads.training import Workload

CPU = torch.device("cpu")
SETUP = Setup(CPU)


def tiny(epochs: int = 2, count: int = 20) -> Task:
    """Two classes by the sign of the first of eight numbers."""
    x = torch.randn(count + 10, 8, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 2))

    workload = Workload("signs", "tiny", "MLP", make, lambda _: (x[:8], y[:8]), F.cross_entropy)
    return Task(workload, x[:count], y[:count], x[count:], y[count:], batch=8, epochs=epochs, lr=0.01)


# -- training ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs() -> list[Run]:
    chosen = {name: VARIANTS[name] for name in DEFAULT} | {"autocast again": VARIANTS["autocast"]}
    return compare(tiny(), chosen, [0, 1], SETUP)


def test_all_variants_train(runs):
    assert [(run.variant, run.seed) for run in runs] == [
        (name, seed) for seed in (0, 1) for name in (*DEFAULT, "autocast again")
    ]
    for run in runs:
        assert len(run.seconds) == 1  # of two epochs: the first one converts
        assert 0 < run.loss < 2 and run.accuracy * 10 == pytest.approx(round(run.accuracy * 10))


def test_the_same_variant_twice_is_the_same(runs):
    of = {(run.variant, run.seed): run for run in runs}
    for seed in (0, 1):
        one, other = of["autocast", seed], of["autocast again", seed]
        assert (one.loss, one.accuracy) == (other.loss, other.accuracy)


def test_seeds_matter_and_variants_hardly_do(runs):
    """Equal weights, batches and dropout: only the precision differs."""
    of = {(run.variant, run.seed): run.loss for run in runs}
    apart = abs(of["fp32", 0] - of["fp32", 1])
    assert apart > 0.01
    for name in DEFAULT:
        assert abs(of[name, 0] - of["fp32", 0]) < 0.2 * apart


def test_it_learns():
    [run] = compare(tiny(epochs=30, count=80), {"fp32": VARIANTS["fp32"]}, [0], SETUP)
    assert run.loss < 0.3 and run.accuracy >= 0.8


def test_every_example_is_seen_once_an_epoch():
    """But those that fill no batch; and in another order each time."""
    task = replace(tiny(epochs=2), inputs=torch.arange(20.0)[:, None].expand(20, 8).contiguous())
    seen: list[list[float]] = []

    class Recorded:
        model = nn.Linear(1, 1)

        def train(self, x, y):
            seen.append(x[:, 0].tolist())
            return torch.zeros(())

    for epoch in range(2):
        accuracy._epoch(task, Recorded(), 0, epoch, CPU)  # pyright: ignore[reportArgumentType]
    assert [len(batch) for batch in seen] == [8, 8, 8, 8]
    assert len({*seen[0], *seen[1]}) == 16 and seen[:2] != seen[2:]


def test_accuracy_is_without_dropout():
    """And what ran in eval() trains again afterwards."""
    task = tiny()
    step = VARIANTS["fp32"].build(task.workload, replace(SETUP, batches=1))
    seen: list[bool] = []
    step.model.register_forward_hook(lambda model, *_: seen.append(model.training))
    assert 0 <= accuracy._accuracy(task, step, CPU) <= 1
    assert seen == [False, False] and step.model.training


# -- what the figures say ---------------------------------------------------------------------------------------------


def test_equal_is_within_the_seeds_of_the_reference():
    reference = [1.0, 1.2, 1.1]  # mean 1.1, range 0.2
    assert verdict([1.3, 1.3, 1.3], reference, higher=False) == "equal"
    assert verdict([1.31, 1.31, 1.31], reference, higher=False) == "worse"
    assert verdict([0.89, 0.89, 0.89], reference, higher=False) == "better"
    assert verdict([1.31, 1.31, 1.31], reference, higher=True) == "better"
    assert verdict([0.0, 2.6], reference, higher=False) == "equal"  # the means: a spread of its own is no excuse
    assert verdict([1.0], [1.0], higher=True) == "equal"
    assert verdict([0.99], [1.0], higher=True) == "worse"
    assert verdict([0.99], [1.0], higher=True, least=0.01) == "equal"


def test_summary_compares_with_fp32_and_times_with_autocast():
    times = {"fp32": 4.0, "autocast": 2.0, "autocast again": 2.1, "o1": 1.0, "o2": 2.08}
    runs = [
        Run(name, seed, loss=0.5 + 0.1 * seed + (1.0 if name == "o2" else 0.0), accuracy=0.9, seconds=[time] * 3)
        for seed in (0, 1)
        for name, time in times.items()
    ]
    found = summary(tiny(), runs)
    rows = found["variants"]
    assert found["noise"] == pytest.approx(0.05) and "autocast again" not in rows
    assert rows["o1"]["ratio"] == {"value": 2.0, "verdict": "faster"}
    assert rows["o2"]["ratio"]["verdict"] == "=" and rows["fp32"]["ratio"]["verdict"] == "slower"
    assert rows["o1"]["loss"] == {"mean": 0.55, "range": pytest.approx(0.05), "verdict": "equal"}
    assert rows["o2"]["loss"]["verdict"] == "worse" and "verdict" not in rows["fp32"]["loss"]
    assert rows["o2"]["accuracy"]["verdict"] == "equal"


def test_one_answer_of_the_test_set_is_no_difference():
    runs = [
        Run(name, seed, 0.5, 0.8 if name == "fp32" else right)
        for name, right in (("fp32", 0), ("o1", 0.9), ("o2", 0.7))
        for seed in (0, 1)
    ]
    rows = summary(tiny(), runs)["variants"]
    assert tiny().answers == 10
    assert rows["o1"]["accuracy"]["verdict"] == rows["o2"]["accuracy"]["verdict"] == "equal"
    worse = [*runs, Run("o3", 0, 0.5, 0.6), Run("o3", 1, 0.5, 0.6)]
    assert summary(tiny(), worse)["variants"]["o3"]["accuracy"]["verdict"] == "worse"


def test_without_timed_epochs_there_are_no_ratios():
    runs = [Run(name, 0, 0.5, 0.9) for name in ("fp32", "autocast", "autocast again", "o1")]
    found = summary(tiny(), runs)
    assert found["noise"] is None
    assert all("verdict" not in row["loss"] for row in found["variants"].values())  # one seed shows no range
    assert all("ratio" not in row and "epoch_s" not in row for row in found["variants"].values())
    assert accuracy.table(tiny(), found).row_count == 3


# -- tasks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TASKS)
def test_tasks(name):
    if name == "digits":
        pytest.importorskip("sklearn")
    task = TASKS[name]()
    again = TASKS[name]()
    assert torch.equal(task.inputs, again.inputs) and torch.equal(task.test_targets, again.test_targets)
    assert len(task.inputs) == len(task.targets) > 3 * len(task.test_inputs)
    assert task.workload.name == name
    torch.manual_seed(0)
    output = task.workload.make()(task.inputs[:2])
    assert output.argmax(-1).shape == task.targets[:2].shape
    assert task.workload.loss(output, task.targets[:2]).dim() == 0
    assert task.answers == task.test_targets.numel()


def test_text_predicts_the_next_character():
    task = tasks.TASKS["text"]()
    assert torch.equal(task.inputs.flatten()[1:], task.targets.flatten()[:-1])


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(accuracy, "TASKS", {"signs": tiny})
    arguments = ["--variants", "o1", "--seeds", "1", "--epochs", "3", "--output", str(tmp_path)]
    assert accuracy.main(arguments) == 0
    assert "signs: MLP, 3 epochs" in capsys.readouterr().out
    [path] = tmp_path.glob("*/accuracy-bfloat16-signs.json")
    found = json.loads(path.read_text(encoding="utf-8"))
    assert [*found["variants"]] == ["fp32", "autocast", "o1"] and found["epochs"] == 3
    assert [len(run["seconds"]) for run in found["runs"]] == [2, 2, 2, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "digit"], "no task 'digit'; did you mean digits?"),
        (["--variants", "o1-owm"], "no variant 'o1-owm'; did you mean o1-own?"),
        (["--variants", "fp32-tf32"], "fp32-tf32: TF32 is of NVIDIA's tensor cores"),
        (["--seeds", "0"], "--seeds and --epochs are 1 at least"),
        (["--dtype", "float16"], "float16 on a CPU is no speed to measure"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device serves some of them")
def test_bad_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit) as raised:
        accuracy.main(arguments)
    assert raised.value.code == 2
    assert message in capsys.readouterr().err
