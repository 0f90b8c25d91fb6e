"""examples/ddp.py: DDP as its docstring starts it, and FSDP2 in two processes that are there already."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"
OPTIONS = ["--steps", "3", "--width", "2", "--batch", "8"]
LINE = re.compile(r"rank \d: 3 steps, 0 skipped, loss \d\.\d{3}, (scale \d+, sum of weights \S+\.\d{6})")


def agree(printed: str) -> bool:
    """Both ranks printed their line, with the same scale and the same weights."""
    lines = LINE.findall(printed)
    return len(lines) == 2 and lines[0] == lines[1]


def test_ddp_under_torchrun() -> None:
    command = [Path(sys.executable).with_name("torchrun"), "--nproc-per-node", "2", EXAMPLES / "ddp.py", *OPTIONS]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert agree(ended.stdout)


def fsdp(tools: Any, rank: int) -> str:
    """What the example prints on this rank, whose process group exists and lives on."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        import ddp  # type: ignore[import-not-found]
    finally:
        sys.path.remove(str(EXAMPLES))
    printed = io.StringIO()
    with (
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group"),
        contextlib.redirect_stdout(printed),
    ):
        ddp.main([*OPTIONS, "--fsdp"])
    return printed.getvalue()


def test_fsdp(ask_two) -> None:
    assert agree("".join(ask_two(fsdp)))
