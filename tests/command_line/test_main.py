"""``python -m fxprec``: each command on a real factory, its exit status, its JSON, and errors of one line."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fxprec
from fxprec.command_line.main import FAILURES, Waiting, main, parser
from fxprec.command_line.target import TargetError, load
from fxprec.numerics.tune import Told
from fxprec.passes.graph.annotations import Rule
from page_data import data_of

NETS = """
import torch
import torch.nn.functional as F
from torch import nn

import fxprec


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 4)

    def forward(self, x):
        return self.last(self.norm(F.gelu(self.first(x))))


class Nan(Net):
    def forward(self, x):
        return (super().forward(x) - 50).log()


class Vae(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 4)

    def decode(self, x):
        return (self.layer(x) - 50).log()


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.vae = Vae()

    def forward(self, x, y):
        return self.vae.layer(x + y)


def decoding():
    return Both(), batches(), F.cross_entropy


class Routed(Net):
    def forward(self, x):
        h = self.first(x)
        return self.last(h + h.argmax(-1, keepdim=True))


def routed():
    torch.manual_seed(0)
    return Routed(), [(torch.randn(2048, 16), torch.randint(4, (2048,)))], F.cross_entropy


def features():
    return Breaking(), [(x,) for x, _ in batches()]


class Breaking(Net):
    def forward(self, x):
        x = self.first(x)
        if x.sum() > 1e6:
            x = -x
        return self.last(self.norm(x))

    def features(self, x):
        return self.norm(self.first(x))


def batches():
    torch.manual_seed(0)
    return [(torch.randn(8, 16), torch.randint(4, (8,))) for _ in range(40)]


def wants(width, depth, *more, heads=2, **options):
    return Net()


def late():
    given = batches()
    given[2][0][5, 7] = torch.nan
    return Net(), given, F.cross_entropy


def whole():
    torch.manual_seed(0)
    return Net(), batches(), F.cross_entropy


def without_loss():
    return Net(), [{"x": x} for x, _ in batches()]


def nan():
    return Nan(), batches(), F.cross_entropy


def breaking():
    return Breaking(), batches(), F.cross_entropy


def converted():
    return fxprec.convert(Net(), dtype=torch.bfloat16).module


class Factories:
    whole = staticmethod(whole)


instance = Net()
number = 3


def fails():
    return {}["data"]


def of_a_number():
    return 3


def of_no_batches():
    return Net(), 3


def of_failing_batches():
    return Net(), (1 / 0 for _ in range(3))


def of_other_sizes():
    return Net(), [{"x": torch.ones(2, 3)}]


def empty():
    return Net(), []
"""


@pytest.fixture
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file, in the working directory; what it makes of the import system goes again."""
    file = tmp_path / "nets.py"
    file.write_text(NETS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "nets", raising=False)
    monkeypatch.setattr("fxprec.command_line.main._SILENT", 60.0)
    return file


def ran(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit status, stdout, stderr without warnings."""
    try:
        status = main(arguments)
    except SystemExit as stopped:
        status = int(stopped.code or 0)
    out, err = capsys.readouterr()
    return status, out, "".join(line for line in err.splitlines(True) if not line.startswith("warning: "))


@pytest.mark.parametrize("name", ["nets.py:whole", "nets:whole", "nets:Factories.whole", "nets:without_loss"])
def test_report(name: str, nets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = ran(capsys, "report", name)
    assert (status, err) == (0, "")
    assert out.startswith("Net: O1, bfloat16, mincut: all 2 matrix products in bfloat16, ")
    assert len(out.splitlines()) <= 40 and "graph 1 of 1" not in out


@pytest.mark.parametrize("name", ["nets:Net", "nets:instance", "nets:converted", "nets:empty"])
def test_report_needs_no_batches(name: str, nets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ran(capsys, "report", name)[:1] == (0,)


def test_nodes_settings_and_json(nets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = ran(capsys, "report", "nets:whole", "--nodes", "--level", "O2", "--json", "all.json")
    assert "Net: O2, bfloat16" in out and "\ngraph 1 of 1" in out and "\nlayer_norm" in out
    data = json.loads(Path("all.json").read_text())
    assert data["headline"]["settings"] == "O2, bfloat16, mincut"
    status, out, _ = ran(capsys, "report", "nets:whole", "--json", "-", "--dtype", "float16", "--nodes")
    assert status == 0 and json.loads(out)["headline"]["low"] == "float16"


def test_a_page(nets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command, line in (("report", "weights"), ("audit", "error"), ("ranges", "ranges")):
        status, _, err = ran(capsys, command, "nets:whole", "--batches", "2", "--html", f"{command}.html")
        assert (status, err) == (0, f"written to {command}.html\n")
        page = Path(f"{command}.html").read_text()
        assert page.startswith("<!doctype html>") and line in dict(data_of(page)["lines"])


def test_a_policy(nets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy = fxprec.Policy.preset("O1").override(modules={"last": Rule.FULL})
    Path("policy.toml").write_text(policy.to_toml())
    status, out, _ = ran(capsys, "report", "nets:whole", "--policy", "policy.toml")
    assert status == 0 and "1 of 2 matrix products in bfloat16" in out


@pytest.mark.parametrize(
    ("name", "what", "status", "words"),
    [
        ("nets:whole", "outside,fp32-matmul,not-named", 0, ""),
        ("nets:breaking", "outside", 1, "fails on outside: nets.py:"),
        ("nets:breaking", "fp32-matmul", 0, ""),
        ("nets:breaking", "not-named", 1, "fails on not-named: features calls"),
    ],
)
def test_fail_on(name: str, what: str, status: int, words: str, nets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, out, err = ran(capsys, "report", name, "--fail-on", what)
    assert found == status and words in err and out


def test_fail_on_products_and_risks(nets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, _, err = ran(capsys, "report", "nets:whole", "--level", "O0", "--fail-on", "fp32-matmul,risk")
    assert found == 1 and err == "fxprec report: fails on fp32-matmul: 2 of 2\n"
    slow = fxprec.report(fxprec.convert(nn.Linear(2, 2), dtype=torch.float16).module).headline
    assert slow.slow and "1 risk" in slow.verdict() and not FAILURES["risk"][0](slow), "that is the machine's"
    policy = fxprec.Policy.preset("O1").override(ops={"softmax": "bfloat16"})
    low = fxprec.report(fxprec.convert(nn.Sequential(nn.Linear(2, 2), nn.Softmax(-1)), policy=policy).module).headline
    assert "softmax in bfloat16" in FAILURES["risk"][0](low)


def test_audit(nets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = ran(capsys, "audit", "nets:whole", "--batches", "3", "--json", "ledger.json")
    assert (status, err) == (0, "") and out.startswith("error of the loss over 3 batches") and "nets.py:" in out
    data = json.loads(Path("ledger.json").read_text())
    assert {row["node"] for row in data["rows"]} >= {"linear", "linear_1"}
    status, savings, _ = ran(capsys, "audit", "nets:whole", "--batches", "2", "--savings")
    assert status == 0 and "an override saves" in savings and "an override saves" not in out
    status, routes, _ = ran(capsys, "audit", "nets:routed", "--batches", "1", "--routes")
    assert status == 0 and "Route: argmax (nets.py:" in routes
    status, gradients, _ = ran(capsys, "audit", "nets:whole", "--batches", "2", "--gradients")
    assert status == 0 and "gradient" in gradients


def test_locate(nets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ran(capsys, "locate", "nets:whole", "--batches", "2") == (
        0, "in the 2 batches taken (--batches) all is finite, and nothing was flushed that counts\n", "",
    )  # fmt: skip
    status, out, err = ran(capsys, "locate", "nets:nan")
    assert (status, err) == (1, "") and out.startswith("batch 1 of 1: forward: log (nets.py:") and "cure: " in out
    status, out, _ = ran(capsys, "locate", "nets:nan", "--json", "-")
    found = json.loads(out, parse_constant=pytest.fail)  # NaN and Infinity are none of JSON's
    assert status == 1 and (found["phase"], found["batch"], found["magnitude"]) == ("forward", 1, None)
    status, out, _ = ran(capsys, "locate", "nets:late", "--batches", "9")
    assert status == 1 and out.startswith("batch 3 of 9: batch[0] has values")
    status, out, _ = ran(capsys, "locate", "nets:whole", "--json", "-", "--scale", "8")
    assert status == 0 and json.loads(out) is None


def test_another_method_is_run_where_one_is_named(nets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = ran(capsys, "locate", "nets:decoding", "--method", "vae.decode")
    assert (status, err) == (1, "") and out.startswith("batch 1 of 1: forward: log of module vae (nets.py:")
    status, out, err = ran(capsys, "audit", "nets:features", "--method", "features", "--json", "-")
    assert (status, err) == (0, "")
    assert {row["node"] for row in json.loads(out)["rows"]} >= {"linear", "first.weight"}
    status, _, err = ran(capsys, "locate", "nets:decoding", "--method", "vae.encode")
    assert status == 2 and "Both.vae has no method 'encode'" in err


def test_ranges(nets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = ran(capsys, "ranges", "nets:whole", "--batches", "2")
    assert (status, err) == (0, "") and "largest safe loss scale" in out
    largest = []
    for scale in ("1", "1024"):
        asked = ("ranges", "nets:whole", "--dtype", "float16", "--batches", "1", "--scale", scale, "--json", "-")
        rows = json.loads(ran(capsys, *asked)[1])["rows"]
        largest.append(max(row["values"]["largest"] for row in rows if row["phase"] == "backward"))
    assert largest[1] == pytest.approx(1024 * largest[0], rel=0.01)


@pytest.mark.slow
def test_tune(nets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = ran(capsys, "tune", "nets:whole", "--error", "1e-4", "--output", "tuned.toml", "--batches", "8")
    assert (status, err) == (0, "written to tuned.toml\n") and out.startswith("an error of at most 0.0001")
    assert "linear" in Path("tuned.toml").read_text()
    status, out, _ = ran(capsys, "report", "nets:whole", "--policy", "tuned.toml")
    assert status == 0 and "override" in out


@pytest.mark.slow
def test_a_page_of_a_tuned_model_compares(nets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("tune", "nets:whole", "--error", "1e-4", "--batches", "4", "--html", "tuned.html", "--output", "p.toml")
    assert ran(capsys, *asked)[0] == 0
    data = data_of(Path("tuned.html").read_text())
    assert data["other"] is not None and data["other"]["nodes"] != data["nodes"]
    ran(capsys, "report", "nets:whole", "--policy", "p.toml", "--html", "as.html")
    assert data["nodes"] == data_of(Path("as.html").read_text())["nodes"], "the page is of the policy that was found"


@pytest.mark.slow
def test_tune_says_what_it_does(nets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: dict[str, None] = {}
    monkeypatch.setattr(Waiting, "say", lambda _, what: said.setdefault(what))
    assert main(["tune", "nets:whole", "--error", "1e-4", "--batches", "4"]) == 0
    assert [*said][-6:] == [
        "capturing", "auditing: batch 1 of 3", "auditing: batch 2 of 3", "auditing: batch 3 of 3", "deciding",
        "measuring: batch 1 of 1",
    ]  # fmt: skip


def test_calibrate_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = ran(capsys, "calibrate", "--show", "--device", "cpu", "--json", "-")
    assert status == 0 and "bfloat16" in json.loads(out)["curves"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["report", "nets:wants"], "nets:wants wants width, depth: a factory is called without arguments"),
        (["report", "nets"], "'nets' is no target: write package.module:factory or file.py:factory"),
        (["report", ":whole"], "is no target"),
        (["report", "nothing:whole"], "no module 'nothing'"),
        (["report", "nothing.at.all:whole"], "no module 'nothing.at.all'"),
        (["report", "nothing.py:whole"], "no file nothing.py"),
        (["report", "broken.py:whole"], "importing broken.py failed: SyntaxError"),
        (["report", "nets:whol"], "nets has no 'whol' (did you mean 'whole' or"),
        (["report", "nets:number"], "nets:number is a int: a factory is a function"),
        (["report", "nets:fails"], "nets:fails failed: KeyError: 'data' (at nets.py:"),
        (["report", "nets:of_a_number"], "nets:of_a_number gives a int: it must give model, (model, batches)"),
        (["report", "nets:of_no_batches"], "gives a int as batches"),
        (["report", "nets:of_failing_batches"], "the batches of nets:of_failing_batches failed: ZeroDivisionError"),
        (["report", "nets:converted", "--level", "O2"], "--level: nets:converted gives a model that is converted"),
        (["report", "nets:whole", "--level", "O2", "--policy", "p.toml"], "p.toml"),
        (["report", "nets:whole", "--batches", "0"], "--batches 0: at least one"),
        (["report", "nets:whole", "--fail-on", "slow"], "'slow' is none of outside, fp32-matmul"),
        (
            ["report", "nets:of_other_sizes"],
            "nets:of_other_sizes: the model failed on the first batch: RuntimeError: mat1",
        ),
        (["audit", "nets:Net"], "nets:Net gives no batches, which audit runs"),
        (["audit", "nets:empty"], "nets:empty gives no batches"),
        (["tune", "nets:whole"], "one of the arguments --error --time is required"),
        (["tune", "nets:whole", "--time", "-1"], "time"),
        (["report", "nets:whole", "--html", "nowhere/page.html"], "--html: there is no folder 'nowhere'"),
        (["tune", "nets:whole", "--time", "1", "--output", "."], "--output: '.' is a folder"),
        (["nothing"], "invalid choice"),
    ],
)
def test_errors_are_one_line(arguments: list[str], words: str, nets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("broken.py").write_text("def whole(:\n")
    status, out, err = ran(capsys, *arguments)
    assert (status, out) == (2, "") and words in err and err.count("\n") == 1 and err.startswith("fxprec")


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = ran(capsys, "--help")
    assert status == 0 and all(name in out for name in ("report", "audit", "locate", "ranges", "tune", "calibrate"))
    for name in ("report", "audit", "locate", "ranges", "tune"):
        status, out, _ = ran(capsys, name, "--help")
        assert status == 0 and "(model, batches, loss)" in " ".join(out.split()) and "Exit status: 0; 1" in out
        (example,) = [line for line in out.splitlines() if line.startswith("  python -m fxprec ")]
        assert parser().parse_args(example.split()[3:]).command == name


def test_batches_of_a_loader_and_no_more_than_wanted(nets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    module = importlib.import_module("nets")
    loader = DataLoader(TensorDataset(torch.arange(12.0)), batch_size=2)
    monkeypatch.setattr(module, "whole", lambda: (nn.Identity(), loader))
    target = load("nets:whole", 4)
    assert [batch[0].tolist() for batch in target.batches] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    with pytest.raises(TargetError):
        load("nets", 1)


@pytest.mark.slow
def test_waiting_is_told_after_two_seconds_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fxprec.command_line.main._SILENT", 0.1)
    with Waiting() as waiting:
        waiting.say("capturing")
    assert capsys.readouterr().err == ""
    with Waiting() as waiting:
        for _ in Told("running", [(1,), (2,)], waiting.say):
            time.sleep(0.25)
    assert [line.partition(" (")[0] for line in capsys.readouterr().err.splitlines()] == [
        "running: batch 1 of 2", "running: batch 2 of 2",
    ]  # fmt: skip


@pytest.mark.slow
def test_as_a_process(nets: Path) -> None:
    command = [sys.executable, "-m", "fxprec", "locate", "nets.py:nan"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stdout.startswith("batch 1 of 1: forward: log (nets.py:"), done.stderr
    assert "Traceback" not in done.stderr
