import subprocess
import sys
import warnings

import pytest

from fxprec.errors import UntestedTorchWarning, warn_if_untested
from fxprec.kernels.torch_internals import TESTED_TORCH
from private_names import ROOT


def said(version: str, missing: dict[str, str]) -> str:
    with pytest.warns(UntestedTorchWarning) as caught:
        warn_if_untested(version, missing)
    (warning,) = caught
    return str(warning.message)


@pytest.mark.parametrize("version", [*TESTED_TORCH, "2.14.2", "2.14.1+cu130", "2.12.0", "2.10.0a0+git1234"])
def test_a_torch_as_old_as_a_tested_one_passes(version: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_untested(version, {})


@pytest.mark.parametrize("version", ["2.15.0", "2.100.0", "3.0.0.dev20270101+cpu"])
def test_a_newer_one_is_told_with_what_to_do(version: str) -> None:
    message = said(version, {})
    assert version in message and TESTED_TORCH[-1] in message and "install" in message


def test_it_can_be_silenced_as_it_says() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="torch .*fxprec")
        warn_if_untested("99.0", {})
        warn_if_untested(TESTED_TORCH[0], {"torch._C._gone": "something is slower"})
    assert "'torch .*fxprec'" in said("99.0", {})


def test_a_name_that_is_gone_is_told_on_any_torch() -> None:
    message = said(TESTED_TORCH[0], {"torch._C._gone": "something is slower"})
    assert "torch._C._gone: something is slower" in message and "newer than" not in message


def run(version: str, more: str = "") -> subprocess.CompletedProcess[str]:
    code = f"import torch; torch.__version__ = {version!r}; {more}import fxprec; import fxprec.amp"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)


@pytest.mark.slow
def test_the_import_warns_once_where_it_is_written() -> None:
    told = run("99.1.0")
    assert told.returncode == 0 and told.stderr.count("UntestedTorchWarning") == 1
    assert told.stderr.startswith("<string>:1: UntestedTorchWarning: torch 99.1.0"), told.stderr


@pytest.mark.slow
def test_a_needed_name_that_moved_fails_the_import_by_name() -> None:
    failed = run("99.1.0", "del torch._C._len_torch_dispatch_stack; ")
    last = failed.stderr.strip().splitlines()[-1]
    assert failed.returncode == 1 and last.startswith("ImportError: torch 99.1.0")
    assert "_len_torch_dispatch_stack" in last and TESTED_TORCH[-1] in last


@pytest.mark.slow
def test_an_optional_name_that_moved_is_told_and_the_rest_goes_on() -> None:
    told = run(TESTED_TORCH[-1], "del torch._C._storage_Use_Count; ")
    assert told.returncode == 0 and "torch._C._storage_Use_Count: gradients" in told.stderr
    assert "newer than" not in told.stderr, "nothing is said of a version that is tested"


def test_the_readme_and_the_makefile_name_the_versions() -> None:
    *most, last = TESTED_TORCH
    assert f"tested with {', '.join(most)} and {last}" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"TORCH ?= {' '.join(TESTED_TORCH)}\n" in (ROOT / "Makefile").read_text(encoding="utf-8")
