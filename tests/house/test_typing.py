"""What a type checker, and so an editor, knows of the results of fxprec's calls."""

from __future__ import annotations

import inspect
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from fxprec.convert import _Options, convert

SNIPPET = """
    from typing import assert_type
    import torch
    from torch import nn
    from torch.fx import GraphModule, symbolic_trace
    import fxprec

    class Net(nn.Module):
        width = 3

    model, scaler = fxprec.convert(Net(), dtype=torch.bfloat16)
    assert_type(model, Net)
    assert_type(model.width, int)
    assert_type(scaler, fxprec.LossScaler)
    assert_type(fxprec.convert(Net()), fxprec.Converted[Net])
    assert_type(fxprec.convert(Net(), (torch.ones(2),), level="O2", scaler=False).module, Net)
    assert_type(fxprec.convert(symbolic_trace(Net()))[0], GraphModule)
    assert_type(fxprec.convert(torch.export.export(Net(), (torch.ones(2),)))[0], GraphModule)
    assert_type(fxprec.convert(torch.matmul)[0], nn.Module)
    assert_type(fxprec.convert(lambda x: x @ x)[0], nn.Module)
    assert_type(fxprec.convert(Net(), loss=nn.functional.cross_entropy)[0], nn.Module)
    assert_type(fxprec.convert(Net(), loss=nn.MSELoss()).module, nn.Module)
    assert_type(fxprec.freeze(model), Net)
    assert_type(fxprec.revert(model), Net)
    with fxprec.original(model) as untouched:
        assert_type(untouched, Net)

    def of_any_class(module: nn.Module) -> nn.Module:
        return fxprec.convert(module).module

    def converted(module: Net) -> fxprec.Converted[nn.Module]:
        return fxprec.convert(module)

    fxprec.convert(Net(), levle="O1")  # error
    fxprec.convert(Net(), level=1)  # error
    fxprec.convert(3)  # error
"""


@pytest.mark.slow
def test_pyright_knows_the_class_of_the_model(tmp_path: Path) -> None:
    pytest.importorskip("pyright", reason="pyright is a tool of developers")
    root, file = Path(__file__).parents[2], tmp_path / "snippet.py"
    file.write_text(textwrap.dedent(SNIPPET), encoding="utf-8")
    run = subprocess.run(
        [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, str(file)],
        capture_output=True,
        text=True,
        cwd=root,
    )
    wrong = {int(line.split(":")[1]) for line in run.stdout.splitlines() if " - error: " in line}
    meant = {number for number, line in enumerate(file.read_text().splitlines(), 1) if line.endswith("# error")}
    assert wrong == meant, run.stdout + run.stderr


def test_type_checkers_are_told_of_every_argument() -> None:
    told = {"model", "example_inputs", "loss", *_Options.__annotations__}
    assert told == set(inspect.signature(convert).parameters)
