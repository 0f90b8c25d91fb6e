"""Runs the interpreter's tests of one file after another, each in a fork that finds everything imported.

Started by ``kernel_tools.run_in_the_interpreter`` with TRITON_INTERPRET=1, which Triton reads when it is imported. A
line of its input is the path of a file; a line of its output the exit status and where the output lies, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

# Most of these are imported for the forks, which would spend more time on them than on kernels.
import hypothesis  # noqa: F401
import pytest
import torch
import torch._dynamo
import torch.testing._internal.optests
import triton  # noqa: F401
from torch.fx.experimental import symbolic_shapes  # noqa: F401

import fxprec.convert
import fxprec.kernels
import fxprec.passes.runner
import fxprec.testing  # noqa: F401


def run(path: str) -> int:
    return int(pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:logging", "-k", "interpreter]", path]))


def forked(path: str) -> tuple[int, str]:
    """The status of a run in a process of its own, and the file that its output went to."""
    handle, name = tempfile.mkstemp(suffix=".txt")
    child = os.fork()
    if child == 0:
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        status = 70
        try:
            status = run(path)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    os.close(handle)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), name


def main() -> None:
    torch.set_num_threads(1)
    sys.path.insert(0, str(Path(__file__).parent))
    for line in sys.stdin:
        print(json.dumps(forked(line.strip())), flush=True)


if __name__ == "__main__":
    main()
