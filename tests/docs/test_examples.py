"""The examples run and show what they claim; README.md's code runs, and its excerpts are what the examples print."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import fxprec
from examples import char_gpt, digits_cnn, explain_numbers, inspect_graph
from fxprec.testing import assert_precision

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """README.md's code blocks in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


@pytest.fixture(autouse=True)
def _as_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """80 columns, started in the checkout: reports name files relative to it."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "80")


def demo(monkeypatch: pytest.MonkeyPatch, *arguments: str, units: bool) -> None:
    """The demo on a CPU with or without bfloat16 units, whichever this one is; its classifier is less wide."""
    serve = digits_cnn.serve
    monkeypatch.setattr(digits_cnn, "has_no_units", lambda: not units)
    monkeypatch.setattr(digits_cnn, "serve", lambda data, _, *rest: serve(data, 256, *rest))
    digits_cnn.main(["--epochs", "1", "--width", "4", "--batch", "256", *arguments])


@pytest.mark.slow
def test_digits_cnn_where_training_gains(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    demo(monkeypatch, "--seeds", "2", units=True)
    printed = capsys.readouterr().out
    assert "DigitsCNN: O1, bfloat16, mincut" in printed and "no bfloat16 units: training" not in printed
    table = next(line for line in printed.splitlines() if re.match(r" *run +loss +accuracy", line))
    assert table.split() == ["run", "loss", "accuracy", "step", "speed", "weights", "kept"]
    assert "mean of 2 seeds" in printed and "unknown" not in printed
    told = printed.partition("\n3. ")[0]  # then come lines to paste
    assert "…" not in printed and max(map(len, told.splitlines())) <= 80


@pytest.mark.slow
def test_digits_cnn_side_by_side(monkeypatch: pytest.MonkeyPatch):
    console = Console(quiet=True)
    fp32, converted = digits_cnn.side_by_side(digits_cnn.load(), 4, 1, 64, 1, {}, console)
    assert (fp32.name, converted.name) == ("FP32", "converted")
    assert fp32.loss < math.log(10)  # what guessing one of ten digits costs
    assert converted.loss == pytest.approx(fp32.loss, rel=0.05)
    assert 0 <= converted.accuracies[0] <= 1
    assert fp32.step_seconds > 0 and converted.step_seconds > 0
    assert converted.weight_bytes == fp32.weight_bytes
    assert fp32.shadow_bytes == 0
    lowered = [p for p in digits_cnn.DigitsCNN(4).classifier.parameters()]
    lowered += [p for p in digits_cnn.DigitsCNN(4).features.parameters() if p.dim() == 4]
    assert converted.shadow_bytes == 2 * sum(p.numel() for p in lowered)
    assert converted.activation_bytes < 0.7 * fp32.activation_bytes


@pytest.mark.slow
def test_digits_cnn_where_training_would_lose(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    demo(monkeypatch, units=False)
    printed = capsys.readouterr().out
    assert printed.startswith("This CPU has no bfloat16 units: training in bfloat16 would lose time.\n")
    assert "speed" not in printed.partition("2. A wide classifier")[0], "nothing is timed that loses"
    assert "DigitsCNN: O1, bfloat16, mincut" in printed
    told = printed.partition("\n3. ")[0]
    assert "…" not in printed and max(map(len, told.splitlines())) <= 80


@pytest.mark.slow
def test_digits_cnn_checked_where_training_would_lose():
    result = digits_cnn.checked(digits_cnn.load(), 4, 2, 32, {}, Console(quiet=True))
    assert result.images == 64 and abs(result.correct[0] - result.correct[1]) <= 3
    assert result.losses[1] == pytest.approx(result.losses[0], rel=0.05)
    assert result.activation_bytes[1] < 0.7 * result.activation_bytes[0]


@pytest.mark.slow
def test_digits_cnn_serves_from_low_weights_as_well():
    fp32, frozen = digits_cnn.serve(digits_cnn.load(), 256, 256, Console(quiet=True))
    assert fp32.weight_bytes == 4 * (784 * 256 + 256 + 256 * 256 + 256 + 256 * 10 + 10)
    assert frozen.weight_bytes <= fp32.weight_bytes
    assert abs(frozen.accuracy - fp32.accuracy) < 0.02 and fp32.accuracy > 0.5
    assert fp32.seconds > 0 and frozen.seconds > 0


@pytest.mark.slow
def test_digits_cnn_finds_an_overflow_and_its_cure_cures(capsys: pytest.CaptureFixture[str]):
    finding = digits_cnn.find_overflow(digits_cnn.load(), Console())
    assert (finding.kind, finding.dtype, finding.op) == ("overflow", "float16", "matmul")
    line = int(finding.source.rpartition(":")[2])
    assert "self.query(rows) @ self.key(rows)" in Path(digits_cnn.__file__).read_text().splitlines()[line - 1]
    printed = capsys.readouterr().out
    assert f'nodes={{"{finding.node}": torch.float32}}' in printed
    told, fp32 = re.search(r"its loss is (\S+); in FP32 (\S+)\.\n", printed).groups()
    assert float(told) == pytest.approx(float(fp32), rel=0.01)


@pytest.mark.slow
def test_digits_cnn_with_the_policy_file(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    for without_it in ("serve", "find_overflow"):
        monkeypatch.setattr(digits_cnn, without_it, lambda *_: None)
    digits_cnn.main(["--epochs", "1", "--width", "2", "--batch", "256", "--policy", "examples/policy.toml"])
    assert "DigitsCNN: O1, bfloat16" in capsys.readouterr().out
    with pytest.raises(ValueError, match="a policy carries its level"):
        digits_cnn.main(["--width", "2", "--level", "O2", "--policy", "examples/policy.toml"])


def test_what_the_policy_file_says():
    model, _ = fxprec.convert(digits_cnn.DigitsCNN(2), policy=fxprec.Policy.from_toml("examples/policy.toml"))
    for path, dtype in (
        ("features.0", torch.float32),
        ("features.4", torch.bfloat16),
        ("op:max_pool2d", torch.bfloat16),
        ("classifier.4", torch.bfloat16),
        ("classifier.6", torch.float32),
    ):
        assert_precision(model, path, dtype)
    assert model(torch.randn(2, 1, 28, 28)).dtype is torch.float32


@pytest.mark.slow
def test_char_gpt(capsys: pytest.CaptureFixture[str]):
    size = ["--steps", "2", "--layers", "1", "--dim", "32"]
    converted = char_gpt.main(size)
    printed = capsys.readouterr().out
    characters = len(char_gpt.load().characters)
    assert converted.before == pytest.approx(math.log(characters), abs=0.1)
    assert converted.after < converted.before
    assert len(converted.text) == len("def ") + 300
    assert "CharGPT: O1, bfloat16" in printed and "uses activation checkpointing, at char_gpt.py:" in printed
    fp32 = char_gpt.main([*size, "--fp32"])
    assert converted.before == pytest.approx(fp32.before, abs=0.01)
    assert converted.after == pytest.approx(fp32.after, abs=0.01)


@pytest.mark.slow
def test_explain_numbers_and_what_docs_show_of_it(capsys: pytest.CaptureFixture[str]):
    explain_numbers.main()
    printed = capsys.readouterr().out
    page = (ROOT / "docs" / "numerics.md").read_text(encoding="utf-8")
    _, _, located = page.partition("## A NaN that is found: `locate`")
    shown = re.search(r"^```text\n(.*?)^```$", located, re.DOTALL | re.MULTILINE)
    assert shown is not None and shown[1].startswith("forward: matmul (")
    assert f"loss: nan\n{_rounded(shown[1])}loss, cured: " in _rounded(printed)
    cured = re.search(r"loss, cured: (.+)", printed)
    assert cured is not None and math.isfinite(float(cured[1]))
    told = re.search(
        r"an error of ([\d.e-]+) in bfloat16, and (\d+) % of its mean square is the low copy of\s`frequencies.weight`"
        r".*?the error is ([\d.e-]+):", page, re.DOTALL,
    )  # fmt: skip
    worst = re.search(r"the largest row was frequencies.weight, (\d+)%", printed)
    errors = re.search(r"error of the loss ([\d.e-]+) -> ([\d.e-]+)\n", printed)
    assert told is not None and worst is not None and errors is not None
    assert float(errors[1]) == pytest.approx(float(told[1]), rel=0.1)
    assert float(errors[2]) == pytest.approx(float(told[3]), rel=0.1)
    assert int(worst[1]) == pytest.approx(int(told[2]), abs=2)
    assert "at most 1 of the time: " in printed and '[policy]\nlevel = "O1"' in printed


def _rounded(text: str) -> str:
    """Without the last digit of values, which differs from CPU to CPU, and where the first of them stands."""
    return re.sub(r"(\d\.\d)\de", r"\1e", re.sub(r"first at \[[\d, ]+\]", "first", text))


def test_inspect_graph_and_the_excerpts_in_readme(capsys: pytest.CaptureFixture[str]):
    inspect_graph.main()
    printed = capsys.readouterr().out
    assert re.search(r"because +full: override modules 'head' = float32", printed)
    assert "%linear_2 = linear computes in bfloat16: low, matrix units" in printed
    excerpts = blocks("text")
    assert len(excerpts) == 2
    for excerpt in excerpts:
        assert excerpt in printed


def pasted(start: str) -> dict[str, Any]:
    """What there is once README.md's blocks were pasted, one after the other, until the one that begins so."""
    names: dict[str, Any] = {}
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), names)
        if block.startswith(start):
            return names
    raise AssertionError(f"no block begins with {start}")


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to be in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_readmes_first_block_runs_by_itself(capsys: pytest.CaptureFixture[str], elsewhere: Path):
    names = pasted("import torch")
    assert names["loss"].dtype is torch.float32 and names["loss"].isfinite() and not names["scaler"].is_enabled()
    printed = capsys.readouterr().out
    assert "Sequential: O1, bfloat16, mincut: all 2 matrix products in bfloat16" in printed
    assert "1 layer_norm: the variance sums squares" in printed
    assert "linear_1" in printed, "of the nodes"
    assert (elsewhere / "report.html").stat().st_size > 50_000


def test_readme_reasons_and_assertions(capsys: pytest.CaptureFixture[str], elsewhere: Path):
    pasted("print(fxprec.explain")
    printed = capsys.readouterr().out
    assert "\n2: 1 node\n%layer_norm = layer_norm" in printed and "op:gelu: 1 node" in printed
    assert "def forward(self, input" in printed


def test_readme_policy(elsewhere: Path):
    model = pasted("policy = ")["model"]
    assert_precision(model, "3", torch.float32)
    assert_precision(model, "op:layer_norm", torch.bfloat16)


def test_readme_numbers(elsewhere: Path, capsys: pytest.CaptureFixture[str]):
    pasted("from fxprec.numerics import audit, locate")
    printed = capsys.readouterr().out
    assert re.search(r"^loss [\d.]+, reference [\d.]+: error ", printed, re.MULTILINE)
    assert printed.endswith("\nNone\n")


@pytest.mark.parametrize(
    "page",
    ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", *(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))],
)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text(encoding="utf-8")):
        assert target.startswith("https://") or (ROOT / page).parent.joinpath(target).exists(), target


@pytest.mark.slow
def test_the_cells_of_the_notebook_run_in_order(capsys: pytest.CaptureFixture[str]):
    cells = json.loads((ROOT / "examples" / "first_steps.ipynb").read_text(encoding="utf-8"))["cells"]
    names: dict[str, Any] = {}
    for cell in (each for each in cells if each["cell_type"] == "code"):
        exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
        assert not cell["outputs"], "they are the reader's"
    printed = capsys.readouterr().out
    assert "becomes" in printed and "2.up.weight of module 2.up has values that are not finite" in printed
    assert "<iframe" in fxprec.report(names["model"])._repr_html_()
