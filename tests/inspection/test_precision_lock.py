"""``precision_lock`` in runs of pytest: it compares, says what changed and why, writes, and forgets nothing."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from fxprec.inspection.lock import Locked

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[2]

#: Plugins that the inner runs would import anew each time: seconds.
LEFT_OUT = ("-p", "no:hypothesispytest", "-p", "no:anyio")

MODELS = """
import torch, fxprec
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.relu(self.fc(self.norm(x)))

class Net(nn.Module):
    def __init__(self, layers=3):
        super().__init__()
        self.layers, self.head = nn.ModuleList(Block() for _ in range(layers)), nn.Linear(8, 4)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x).softmax(-1)

def made(overrides=None, **options):
    policy = fxprec.Policy.preset("O1").override(modules=overrides or {})
    model = fxprec.convert(Net(), dtype=torch.bfloat16, policy=policy, **options)[0]
    model(torch.randn(2, 8))
    return model
"""
TEST = """
from models import *

def test_net(precision_lock):
    precision_lock(made({overrides}))
"""
FILE = """\
# What computes in which dtype: written by pytest --precision-lock-update, with torch {version}.

[Net] O1, bfloat16, mincut
forward(x)
  float32 -> float32    layers.0-2.norm  layer_norm
  float32 -> bfloat16   layers.0-2.norm  cast of layer_norm
  bfloat16 -> bfloat16  layers.0-2.fc  linear
  bfloat16 -> bfloat16  layers.0-2  relu
  float32 -> float32    layers.0-2  add
  float32 -> bfloat16   layers.2  cast of add
  bfloat16 -> bfloat16  head  linear
  bfloat16 -> float32   head  cast of linear
  float32 -> float32    -  softmax
"""


@pytest.fixture(autouse=True, scope="module")
def _warm() -> None:
    """All that is imported late is imported now: an inner run would import it, and take that back."""
    space: dict[str, Any] = {}
    exec(MODELS, space)
    space["made"](capture="dynamo")
    assert Locked.of(space["made"]()).dtypes


@pytest.fixture(autouse=True)
def _folder(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    pytester.makepyfile(models=MODELS)
    pytester.syspathinsert()


def run(pytester: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    """Files that another run has just written are read again."""
    sys.dont_write_bytecode = True
    return pytester.runpytest_inprocess("-p", "pytest_fxprec", "-p", "no:cacheprovider", *LEFT_OUT, *arguments)


def lock(pytester: pytest.Pytester, name: str = "test_net") -> Path:
    return pytester.path / "precision" / "test_it" / f"{name}.lock"


def write(pytester: pytest.Pytester, source: str = TEST, overrides: str = "None") -> None:
    pytester.makepyfile(test_it=source.replace("{overrides}", overrides))


@pytest.mark.slow
def test_from_the_first_run_to_a_change(pytester: pytest.Pytester) -> None:
    write(pytester)
    missing = run(pytester)
    missing.assert_outcomes(failed=1)
    missing.stdout.fnmatch_lines(
        [
            "no precisions of Net are locked yet in precision/test_it/test_net.lock; write them: "
            'pytest "test_it.py::test_net" --precision-lock-update'
        ]
    )
    written = run(pytester, "--precision-lock-update", "-q")
    written.assert_outcomes(passed=1)
    written.stdout.fnmatch_lines(["*precision locks*", "wrote precision/test_it/test_net.lock", "  Net: new"])
    assert lock(pytester).read_text() == FILE.format(version=torch.__version__)
    for flags in ((), ("--precision-lock",), ("--precision-lock-update",)):
        again = run(pytester, *flags)
        again.assert_outcomes(passed=1)
        assert "precision locks" not in again.stdout.str()

    lock(pytester).write_text(FILE.format(version="1.0"))  # another torch, the same precisions
    run(pytester).assert_outcomes(passed=1)

    write(pytester, overrides='{"layers.[12].fc": torch.float32}')
    changed = run(pytester)
    changed.assert_outcomes(failed=1)
    changed.stdout.fnmatch_lines(
        [
            "the precisions of Net are not those of precision/test_it/test_net.lock:",
            "forward(x)",
            "  layers.1-2.fc  linear: bfloat16 -> bfloat16, now float32 -> float32",
            "      full: override modules 'layers.[[]12[]].fc' = float32",
            'accept them: pytest "test_it.py::test_net" --precision-lock-update',
        ]
    )
    assert "layers.0" not in changed.stdout.str() and "Traceback" not in changed.stdout.str()
    accepted = run(pytester, "--precision-lock-update")
    accepted.assert_outcomes(passed=1)
    accepted.stdout.fnmatch_lines(["  Net:   layers.1-2.fc  linear: bfloat16 -> bfloat16, now float32 -> float32"])
    run(pytester).assert_outcomes(passed=1)


def test_casts_that_come_and_go(pytester: pytest.Pytester) -> None:
    write(pytester, overrides='{"head": torch.float32}')
    run(pytester, "--precision-lock-update").assert_outcomes(passed=1)
    write(pytester)
    run(pytester).stdout.fnmatch_lines(
        ["  + head  cast of linear: bfloat16 -> float32", "      cast inserted for softmax"]
    )
    write(pytester, overrides='{"layers": torch.float32}')
    run(pytester).stdout.fnmatch_lines(["  - layers.0-2.norm  cast of layer_norm: float32 -> bfloat16"])


@pytest.mark.slow
def test_several_models_in_a_test(pytester: pytest.Pytester) -> None:
    both = """
        from models import *

        def test_two(precision_lock):
            precision_lock(made(), "low")
            precision_lock(made({"*": torch.float32}), name="wide"){more}
    """
    write(pytester, both.replace("{more}", ""))
    run(pytester, "--precision-lock-update").assert_outcomes(passed=1)
    text = lock(pytester, "test_two").read_text()
    assert text.index("\n[low] ") < text.index("\n[wide] ")
    run(pytester).assert_outcomes(passed=1)
    write(pytester, both.replace("{more}", "; precision_lock(made())"))
    run(pytester).stdout.fnmatch_lines(["no precisions of Net are locked yet*"])
    write(pytester, both.replace("{more}", "; precision_lock(made(), 'low')"))
    run(pytester).stdout.fnmatch_lines(["*ValueError: this test has locked a 'low' before*"])
    write(pytester, both.replace('precision_lock(made(), "low")', "").replace("{more}", ""))
    run(pytester).stdout.fnmatch_lines(["*test_two.lock has low, and the test locks no such model*"])
    run(pytester, "--precision-lock-update").stdout.fnmatch_lines(["  low: removed"])
    assert "[low]" not in lock(pytester, "test_two").read_text()


@pytest.mark.slow
def test_nothing_passes_without_a_word(pytester: pytest.Pytester) -> None:
    write(
        pytester,
        """
        from models import *

        def test_never(precision_lock):
            pass

        def test_not_called(precision_lock):
            precision_lock(fxprec.convert(Net(), capture="dynamo")[0])

        def test_not_converted(precision_lock):
            precision_lock(Net())

        def test_name(precision_lock):
            precision_lock(made(), "a]")

        def test_skipped(precision_lock):
            import pytest
            pytest.skip("not here")

        def test_fails(precision_lock):
            precision_lock(made())
            assert False, "the test's own"
        """,
    )
    for flags in ((), ("--precision-lock-update",)):
        result = run(pytester, *flags)
        result.assert_outcomes(failed=5, skipped=1)
        result.stdout.fnmatch_lines(["the test asks for precision_lock and locks no model*"])
        result.stdout.fnmatch_lines(["*NotCapturedError*"])
        result.stdout.fnmatch_lines(["*ConversionError*"])
        result.stdout.fnmatch_lines(["*ValueError: name='a]'*"])
    result.stdout.fnmatch_lines(["*AssertionError: the test's own*"])
    assert not (pytester.path / "precision").exists(), "a test that fails writes nothing"


@pytest.mark.slow
def test_a_file_that_is_none(pytester: pytest.Pytester) -> None:
    write(pytester)
    lock(pytester).parent.mkdir(parents=True)
    for text in ("<<<<<<< ours\n", FILE.replace("forward(x)", "======="), FILE + "  bfloat16\n"):
        lock(pytester).write_text(text)
        run(pytester).stdout.fnmatch_lines(["precision/test_it/test_net.lock: line *is none of a precision lock*"])
    run(pytester, "--precision-lock-update").assert_outcomes(passed=1)
    run(pytester).assert_outcomes(passed=1)


GONE = "of no test that there is, --precision-lock-update removes it:"
MANY = """
import pytest
from models import *

class TestA:
    @pytest.mark.parametrize("what", ["a/b", "a:b", "plain"])
    def test_b(self, precision_lock, what):
        precision_lock(made())

def test_other():
    pass

def test_net(precision_lock):
    precision_lock(made())
"""


@pytest.mark.slow
def test_files_of_tests_that_are_gone(pytester: pytest.Pytester) -> None:
    write(pytester, MANY)
    run(pytester, "--precision-lock-update").assert_outcomes(passed=5)
    files = sorted(path.name for path in lock(pytester).parent.iterdir())
    assert len(files) == 4 and "TestA.test_b[plain].lock" in files and "test_net.lock" in files
    run(pytester, "--precision-lock").assert_outcomes(passed=5)

    pytester.makepyfile(test_gone=TEST.replace("{overrides}", "None"))
    run(pytester, "--precision-lock-update", "test_gone.py").assert_outcomes(passed=1)
    (pytester.path / "test_gone.py").unlink()
    write(pytester, MANY.replace("def test_net", "def test_renamed"))
    gone = {"precision/test_gone/test_net.lock", "precision/test_it/test_net.lock"}

    def told(*arguments: str) -> tuple[set[str], int]:
        result = run(pytester, *arguments)
        lines = [line for line in result.outlines if line.startswith((GONE, "removed"))]
        return {line.split()[-1] for line in lines}, int(result.ret)

    part = ("-k", "test_b or test_other")
    assert told(*part) == (gone, 0)
    assert told("-k", "test_other") == (gone, 0), "what is left out this time is not gone"
    assert told(*part, "--precision-lock") == (gone, 1)
    assert told("test_it.py::test_other") == ({"precision/test_gone/test_net.lock"}, 0), "not collected whole"
    assert told("--collect-only", "-q")[0] == gone
    assert all((pytester.path / path).exists() for path in gone)
    assert told(*part, "--precision-lock-update") == (gone, 0)
    assert (
        not any((pytester.path / path).exists() for path in gone) and not lock(pytester).with_name("test_gone").exists()
    )
    assert not (pytester.path / "precision" / "test_gone").exists()
    assert told(*part, "--precision-lock") == (set(), 0)


@pytest.mark.slow
def test_with_several_processes(pytester: pytest.Pytester) -> None:
    """What they wrote and found is said once, and one process compares the same."""
    write(pytester, "def test_other():\n    pass\ndef test_more():\n    pass\n")  # whose process imports no torch
    gone = lock(pytester, "test_gone")
    gone.parent.mkdir(parents=True)
    gone.write_text("")
    one = run(pytester, "-n", "1", "--precision-lock", "-k", "test_other")
    assert one.ret == 1 and one.outlines.count(f"{GONE} precision/test_it/test_gone.lock") == 1
    write(pytester, MANY)
    several = run(pytester, "-n", "2", "--precision-lock-update")
    several.assert_outcomes(passed=5)
    said = [line for line in several.outlines if line.startswith(("wrote ", "removed "))]
    assert len(said) == len({*said}) == 5 and not gone.exists()
    run(pytester, "--precision-lock").assert_outcomes(passed=5)


@pytest.mark.slow
def test_graphs_modes_and_what_is_outside(pytester: pytest.Pytester) -> None:
    write(
        pytester,
        """
        from models import *

        class Broken(Net):
            def forward(self, x):
                x = self.layers[0](x)
                x = x * 2 if x.abs().max().item() > 0 else x
                torch._dynamo.graph_break()
                return self.head(x)

        def test_modes(precision_lock):
            model = made(capture="dynamo")
            model.eval()(torch.randn(3, 8))
            precision_lock(model)
            broken = fxprec.convert(Broken(), dtype=torch.bfloat16)[0]
            broken(torch.randn(2, 8))
            precision_lock(broken)
            precision_lock(fxprec.graph_module(made()), "graph")
        """,
    )
    run(pytester, "--precision-lock-update").assert_outcomes(passed=1)
    text = lock(pytester, "test_modes").read_text()
    assert "[graph]\ngraph(x)\n" in text and text.partition("[Broken]")[0].count("forward(") == 1, "of both modes"
    assert "outside of the graphs\n  autocast              test_it.py in forward\n" in text
    pytester.path.joinpath("test_it.py").write_text("\n\n\n" + pytester.path.joinpath("test_it.py").read_text())
    run(pytester).assert_outcomes(passed=1)


def test_pytest_starts_without_torch() -> None:
    code = "import sys, pytest; pytest.main(['-p', 'pytest_fxprec', '--version']); "
    code += "print({'torch', 'fxprec'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.endswith("set()\n"), done.stdout + done.stderr


def test_it_is_registered_under_the_name_of_its_module() -> None:
    """So that -p with the module's name, and the entry point, are one plugin."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["entry-points"]["pytest11"] == {"pytest_fxprec": "pytest_fxprec"}
    assert project["tool"]["setuptools"]["py-modules"] == ["pytest_fxprec"]
