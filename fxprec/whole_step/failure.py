"""Explain why a step cannot be a graph: the line of the user's code, and what to do about it."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch

from fxprec.errors import CaptureError, FxprecError

#: What torch and CUDA say -> what it comes from.
_CAUSES: Final = {
    "synchroniz|stream is capturing|StreamCaptureUnsupported|not permitted": (
        "it waits for the device, which a graph cannot: .item(), .cpu(), print, a boolean mask, torch.nonzero, `if` on "
        "a tensor, or a tensor made from Python numbers on the device. Compute with tensors (torch.where), make "
        "constants once, before, or do it after the step on what it returns"
    ),
    "legacy stream|StreamCaptureImplicit|AccumulateGrad|StreamCaptureIsolation|uncaptured": (
        "it reaches work of another stream: most likely a loss or an output of an earlier iteration is still alive, "
        "and the autograd graph with it. Delete it (del loss), and call capture_step again"
    ),
    "out of memory": "a graph keeps its memory, and while it is captured there are copies of weights and states",
    "generator|rng_state|RNG": (
        "it sets or reads the state of a random number generator, which a graph cannot (activation checkpointing: "
        "preserve_rng_state=False)"
    ),
}

_PACKAGES: Final = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Explain a failure in the block, of code that worked eagerly before.

    Raises:
        CaptureError: instead, with the line of the user's code.
    """
    try:
        yield
    except FxprecError:
        raise
    except Exception as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        # torch's own words name a CUDA error; users need the line of code that causes it.
        cause = next((why for pattern, why in _CAUSES.items() if re.search(pattern, str(error), re.I)), None)
        raise CaptureError(
            f"{what} cannot be a CUDA graph{_line_of(error)}: {said[0]}. "
            f"{'In words: ' + cause if cause else 'It ran without a graph just before'}. Nothing was changed; the "
            "usual loop goes on to work"
        ) from error


def _line_of(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    # Not the frame of a dispatch mode either, through which an operator of the user's line went.
    users = [f for f in frames if not f.filename.startswith((*_PACKAGES, "<")) and f.name != "__torch_dispatch__"]
    if not users:
        return ""
    last = users[-1]
    return f", because of {Path(last.filename).name}:{last.lineno} in {last.name}, `{last.line}`"
