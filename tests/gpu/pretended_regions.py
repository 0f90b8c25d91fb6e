"""Random row programs on a pretended GPU: ``test_pretended_gpu`` runs this file. ``PRETENDED_REGIONS``: how many."""

from __future__ import annotations

import os
from typing import Any, Final

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, example, given, settings

import random_regions
import region_tools
from fxprec.kernels.launch.philox import draw_seeds
from pretended_device import DEVICE, RECORD, BadLaunchError

MANY: Final = int(os.environ.get("PRETENDED_REGIONS", "300"))
#: Norms in a row: their seven numbers a row, which the backward wants, had spilled.
THREE_NORMS: Final = random_regions.Random(
    """def f(x, w):
    shown = 3 / (F.layer_norm(x, (64,), eps=0.1).square() + 2)
    normed = F.layer_norm(shown, (64,), eps=0.1)
    share = F.softmax(F.rms_norm(shown, (64,), w, 0.1), -1)
    return (1 - x) / (shown * shown + 1), share.mean(-1), normed.to(torch.float16).float()
""",
    (((2, 3, 64), "single", "rows swapped", True), ((64,), "single", "dense", True)),
    0,
)


@settings(
    max_examples=MANY, deadline=None, derandomize=True, database=None, phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[*HealthCheck],
)  # fmt: skip
@example(made=THREE_NORMS)
@given(made=random_regions.regions(casts=True))
def test_random_programs_launch(made: Any) -> None:
    inputs = made.tensors(torch.bfloat16 if made.draws % 2 else torch.float16, "cuda")
    region = region_tools.region_of(made.function(lambda x, n: F.dropout(x, random_regions.P, True)), made.draws)
    seeds = (draw_seeds(made.draws, DEVICE),) if made.draws else ()
    try:
        outputs = region(*inputs, *seeds)
        RECORD.counts[f"random programs, {region.path}"] += 1
        wanted = [x for x in inputs if x.requires_grad]
        sources = [each for each in outputs if each.requires_grad]
        if wanted and sources:
            torch.autograd.grad(sources, wanted, [torch.ones_like(each) for each in sources], allow_unused=True)
        with torch.no_grad():
            region(*inputs, *seeds)
    except BadLaunchError as error:
        raise BadLaunchError(f"{error}\n{made.source}{made.inputs}") from error
