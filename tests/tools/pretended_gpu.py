"""The pretended GPU (``pretended_device``) as a plugin of pytest: tests for a GPU where there is none.

::

    PRETENDED_GPU=90 python -m pytest -p pretended_gpu -m gpu tests/kernels

A test that compares values fails on a device that computes nothing, and passes here; one fails here if a kernel does
not compile, a grid is too large, an address breaks a promise, a thread spills registers, or anything else is raised
that a real device would not need to be there for.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

import pytest

from pretended_device import RECORD, pretend

CAPABILITY: Final = int(os.environ.get("PRETENDED_GPU", "90"))
#: What only a device can do: streams, graphs, events, ops that CPUs lack.
_WANTS_A_DEVICE: Final = re.compile(
    r"NVIDIA driver|dummy base class|driver version is insufficient|CUDA error|Invalid device argument"
    r"|with arguments from the 'CPU' backend|Compiled functions can't take|has no attribute 'idx'"
)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Values are nobody's, and what wants a device is skipped."""
    outcome: Any = yield
    report = outcome.get_result()
    if call.excinfo is None or report.outcome != "failed":
        return
    error = call.excinfo.value
    if isinstance(error, AssertionError):
        report.outcome = "passed"
    elif _WANTS_A_DEVICE.search(str(error)):
        report.outcome, report.longrepr = "skipped", (str(item.path), 0, "Skipped: wants a device")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """How much was launched; each kernel's most registers and local memory."""
    most: dict[str, tuple[int, int]] = {}
    for launchable in RECORD.launches:
        kernel = launchable.made
        known = most.get(kernel.name, (0, 0))
        most[kernel.name] = max(known[0], kernel.registers), max(known[1], kernel.local)
    for name in sorted(most):
        terminalreporter.line(f"{name:60} {most[name][0]:4} registers {most[name][1]:4} bytes of local memory")
    used = Counter(name for each in RECORD.launches for name in each.made.approximations.split())
    used["fma.rn.f32"] = sum(each.made.fused > 0 for each in RECORD.launches)
    terminalreporter.line(", ".join(f"{name} in {count} kernels" for name, count in sorted(used.items())))
    for what, count in sorted(RECORD.counts.items()):
        terminalreporter.line(f"{what}: {count}")
    terminalreporter.line(
        f"launched {RECORD.launches.total()} times, {len(RECORD.launches)} compiled kernels, "
        f"{sum(each.made.spills for each in RECORD.launches)} spills, {len(RECORD.faults)} faults, sm_{CAPABILITY}"
    )


pretend(CAPABILITY)
