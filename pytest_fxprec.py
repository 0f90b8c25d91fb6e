"""pytest: the fixture ``precision_lock``, which compares a model's precisions with those of a committed file.

::

    def test_precision(precision_lock):
        model, _ = fxprec.convert(Net())
        model(torch.randn(2, 8))
        precision_lock(model)

Each test has a file, ``precision/<test file>/<test>.lock`` beside the test's. A test fails where its model has other
precisions, with what changed and why, and where there is no file. ``--precision-lock-update`` writes the files of the
tests that run, says what changed in them, and removes those of tests that are gone. ``--precision-lock`` is for CI:
files of tests that are gone fail the run, where otherwise they are reported.

A module of its own, as pytest imports it at each start: fxprec, and with it torch, is imported by the fixture alone.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import pytest

if TYPE_CHECKING:
    from torch import nn

    from fxprec.inspection.lock import Locked

_UPDATE: Final = "--precision-lock-update"
_FIXTURE: Final = "precision_lock"
#: What no file system is asked to have in a name.
_FOREIGN: Final = re.compile(r"[^\w.=+\[\]-]")
_LONGEST: Final = 120


_LOCK: Final = pytest.StashKey["PrecisionLock"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fxprec")
    group.addoption(
        "--precision-lock", action="store_true", help="fail where a precision lock is of a test that is gone"
    )
    group.addoption(_UPDATE, action="store_true", help="write the precision locks of the tests that run")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Session(config), "precision_locks")


@pytest.fixture
def precision_lock(request: pytest.FixtureRequest) -> PrecisionLock:
    """``precision_lock(model)``: the model computes in the dtypes that the test's lock file says."""
    item: pytest.Item = request.node
    lock = PrecisionLock(item.nodeid, _lock_file(item), bool(request.config.getoption(_UPDATE)), item.config.rootpath)
    item.stash[_LOCK] = lock
    return lock


class PrecisionLock:
    """Of one test.

    Args:
        test: the id of its node.
        path: of its file.
        update: write the file.
        root: what shown paths are relative to.
    """

    def __init__(self, test: str, path: Path, update: bool, root: Path) -> None:
        self._test, self._path, self._update, self._root = test, path, update, root
        self._models: dict[str, Locked] = {}
        #: What was written, for the summary.
        self.changes: list[str] = []

    def __call__(self, model: nn.Module, name: str | None = None) -> None:
        """Compare a converted model, which was called before, with the file.

        Args:
            model: whose graphs are looked at, all that it has.
            name: of its part of the file; else the name of its class. Two models of a test need two names.

        Raises:
            ConversionError: the model is not converted.
            NotCapturedError: it is captured at its first call, which did not happen yet.
            ValueError: the test has another model of that name, or it is none.
        """
        from fxprec.inspection.lock import Locked, review

        __tracebackhide__ = True
        found = Locked.of(model)
        name = _name_of(model) if name is None else name
        if not re.fullmatch(r"[^\[\]\n]+", name):
            raise ValueError(f"name={name!r}: the name of a model in a lock file is a line without brackets")
        if name in self._models:
            raise ValueError(
                f"this test has locked a {name!r} before: give precision_lock(model, name=...) another name"
            )
        self._models[name] = found
        if self._update:
            return
        before = self._committed().get(name)
        if before is None:
            self._fail(f"no precisions of {name} are locked yet in {self._shown}; write them")
        elif changes := review(before, found):
            self._fail(
                "\n".join([f"the precisions of {name} are not those of {self._shown}:", *changes, "accept them"])
            )

    def finish(self) -> None:
        """The test passed: nothing of the file may be left over, or the file is written."""
        __tracebackhide__ = True
        if not self._models:
            pytest.fail(f"the test asks for {_FIXTURE} and locks no model: call {_FIXTURE}(model)", pytrace=False)
        elif self._update:
            self._write()
        elif gone := [name for name in self._committed() if name not in self._models]:
            self._fail(f"{self._shown} has {', '.join(gone)}, and the test locks no such model; remove that")

    def _committed(self) -> dict[str, Locked]:
        from fxprec.inspection.lock import parse_file

        __tracebackhide__ = True
        if not self._path.exists():
            return {}
        try:
            return parse_file(self._path.read_text(encoding="utf-8"))
        except ValueError as error:
            self._fail(f"{self._shown}: {error}; write it anew")

    def _write(self) -> None:
        import torch

        from fxprec.inspection.lock import file_text, parse_file, review

        try:
            before = parse_file(self._path.read_text(encoding="utf-8")) if self._path.exists() else None
        except ValueError:
            before = None
        changes = []
        for name, found in self._models.items():
            old = (before or {}).get(name)
            changes += [f"{name}: new"] if old is None else [f"{name}: {line}" for line in review(old, found)]
        changes += [f"{name}: removed" for name in before or {} if name not in self._models]
        if not changes:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(file_text(self._models, torch.__version__), encoding="utf-8")
        self.changes = [f"wrote {self._shown}", *(f"  {change}" for change in changes)]

    @property
    def _shown(self) -> str:
        return _shown(self._path, self._root)

    def _fail(self, what: str) -> NoReturn:
        __tracebackhide__ = True
        pytest.fail(f'{what}: pytest "{self._test}" {_UPDATE}', pytrace=False)


def _name_of(model: nn.Module) -> str:
    from fxprec.model.conversion import conversion_of, is_converted

    return (conversion_of(model).original_class if is_converted(model) else type(model)).__name__


def _lock_file(item: pytest.Item) -> Path:
    """``precision/test_x/TestA.test_b.lock``."""
    own = item.nodeid.partition("::")[2].replace("::", ".") or item.name
    name = _FOREIGN.sub("_", own)[:_LONGEST]
    if name != own:
        name += "-" + hashlib.sha256(own.encode()).hexdigest()[:8]  # another test may come to the same name
    return item.path.parent / "precision" / item.path.stem / f"{name}.lock"


def _shown(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    result = yield
    if (lock := item.stash.get(_LOCK, None)) is not None:
        lock.finish()
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    report = yield
    lock = item.stash.get(_LOCK, None)
    if lock is not None and call.when == "call":
        report.precision_lock = lock.changes
    return report


class _Session:
    """The whole run: which lock files are of tests that are gone, and what is to be said at the end.

    With xdist the workers collect, and tell the process that writes the summary.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._whole: set[Path] = set()  # test files of which every test was collected
        self._stale: set[str] = set()
        self._changes: list[str] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Generator[None, Any, Any]:
        report = yield
        if isinstance(collector, pytest.Module) and report.passed:
            self._whole.add(collector.path)
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Before any are deselected: what -k leaves out is not gone."""
        if self._config.getoption("lf", False):  # then files are not collected whole
            return
        parts = [argument.partition("::") for argument in self._config.args]
        named = {(self._config.invocation_params.dir / path).resolve() for path, some, _ in parts if some}
        if not all(path.is_file() for path in named):
            return
        asked = {_lock_file(item) for item in items if _FIXTURE in getattr(item, "fixturenames", ())}
        for path in self._whole - named:
            self._stale |= {str(lock) for lock in (path.parent / "precision" / path.stem).glob("*.lock")}
        for folder in {path.parent for path in self._whole}:
            locks = (folder / "precision").glob("*/*.lock")
            self._stale |= {str(lock) for lock in locks if not (folder / f"{lock.parent.name}.py").exists()}
        self._stale -= {str(lock) for lock in asked}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """With xdist this comes to the process that writes the summary, too."""
        self._changes += getattr(report, "precision_lock", ())

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """A worker of xdist is done."""
        self._stale |= {*getattr(node, "workeroutput", {}).get("precision_locks", ())}

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        told = getattr(self._config, "workeroutput", None)
        if told is not None:
            told["precision_locks"] = sorted(self._stale)
        elif exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
            self._stale.clear()
        elif self._config.getoption(_UPDATE):
            for path in map(Path, sorted(self._stale)):
                path.unlink()
                if not any(path.parent.iterdir()):
                    path.parent.rmdir()
        elif self._stale and self._config.getoption("precision_lock"):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        did = "removed" if self._config.getoption(_UPDATE) else f"of no test that there is, {_UPDATE} removes it:"
        stale = [f"{did} {_shown(Path(path), self._config.rootpath)}" for path in sorted(self._stale)]
        if lines := [*self._changes, *stale]:
            terminalreporter.section("precision locks")
            for line in lines:
                terminalreporter.line(line)
