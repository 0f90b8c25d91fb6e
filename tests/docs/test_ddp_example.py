"""examples/ddp.py: as its docstring starts it, and DDP and FSDP2 in two processes that are there already."""

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


def test_ddp_under_torchrun() -> None:
    """Of one process, which takes a while to start."""
    command = [Path(sys.executable).with_name("torchrun"), "--nproc-per-node", "1", EXAMPLES / "ddp.py", *OPTIONS]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert len(LINE.findall(ended.stdout)) == 1


def on_two(tools: Any, rank: int, *options: str) -> str:
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
        ddp.main([*OPTIONS, *options])
    return printed.getvalue()


@pytest.mark.parametrize("options", [(), ("--fsdp",)], ids=["ddp", "fsdp"])
def test_both_ranks_have_the_same_scale_and_weights(ask_two: Any, options: tuple[str, ...]) -> None:
    lines = LINE.findall("".join(ask_two(on_two, *options)))
    assert len(lines) == 2 and lines[0] == lines[1]
