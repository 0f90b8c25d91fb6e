import ast
import os
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

import fxprec

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def python(code: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_importing_fxprec_loads_nothing_heavy():
    heavy = ["torch._dynamo", "torch._inductor", "triton", "networkx", "rich", "sympy", "transformers"]
    run = python(
        f"import sys, fxprec; print([name for name in {heavy} if name in sys.modules]); import fxprec.passes.policy; "
        "print([name for name in sys.modules if name.startswith('torch._dynamo')])"  # nor do the passes load that
    )
    assert run.stdout.split() == ["[]", "[]"] and run.stderr == "", run.stdout + run.stderr


def test_passes_imported_from_the_checkouts_root_are_refused():
    run = python("import passes")
    assert run.returncode != 0
    assert "ImportError: import fxprec.passes, not passes" in run.stderr


def test_kernels_imported_from_the_checkouts_root_are_empty():
    run = python("import kernels; print(kernels.__file__, kernels.__path__, [n for n in vars(kernels) if n[0] != '_'])")
    assert run.stdout.strip() == "None [] []", run.stdout + run.stderr


@pytest.mark.parametrize("floor", ["passes", "kernels"])
def test_a_floor_is_one_package_through_its_relative_link(floor):
    link = ROOT / "fxprec" / floor
    assert link.is_symlink() and os.readlink(link) == f"../{floor}"
    assert PROJECT["tool"]["setuptools"]["package-dir"][f"fxprec.{floor}"] == floor


def test_the_version_is_written_the_same_everywhere():
    assert fxprec.__version__ == PROJECT["project"]["version"]
    try:
        installed = version("fxprec")
    except PackageNotFoundError:  # tests also run in a checkout that was never installed
        return
    assert installed == fxprec.__version__


def test_every_folder_of_code_is_in_the_wheel():
    folders = {"fxprec": ROOT / "fxprec", "fxprec.passes": ROOT / "passes", "fxprec.kernels": ROOT / "kernels"}
    found = set(folders)
    for package, folder in folders.items():
        for file in folder.rglob("*.py"):
            inside = file.relative_to(folder).parent.parts
            if not (package == "fxprec" and inside[:1] in [("passes",), ("kernels",)]):
                found.add(".".join([package, *inside]))
    assert found == set(PROJECT["tool"]["setuptools"]["packages"])


def test_every_file_that_is_read_at_run_time_is_in_the_wheel():
    setuptools = PROJECT["tool"]["setuptools"]
    packed = {
        file
        for package, patterns in setuptools["package-data"].items()
        for pattern in patterns
        for file in ROOT.joinpath(*package.split(".")).glob(pattern)
    }
    folders = [ROOT.joinpath(*package.split(".")) for package in setuptools["packages"]]
    found = {
        file for folder in folders for file in folder.iterdir() if file.suffix in (".cpp", ".h", ".json", ".typed")
    }
    assert found and found <= packed


def test_kernels_import_only_torch_and_triton():
    allowed = {"torch", "triton", *sys.stdlib_module_names}
    for file in (ROOT / "kernels").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            foreign = [n for n in names if n.partition(".")[0] not in allowed and not n.startswith("fxprec.kernels")]
            assert not foreign, f"{file.name}:{node.lineno} imports {foreign}"


def test_ci_can_run():
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_completion_shows_what_users_import():
    assert set(dir(fxprec)) == {*fxprec.__all__, "__version__"}
    assert all(hasattr(fxprec, name) for name in dir(fxprec))
