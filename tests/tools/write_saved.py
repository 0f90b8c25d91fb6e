"""Save what users save, by the fxprec that runs: ``python tests/tools/write_saved.py FOLDER``.

``tests/saved/0.1.0`` was written so by commit 99f6f64, on one thread; ``tests/saved/test_saved.py`` loads it.
"""

from __future__ import annotations

import copy
import pickle
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fxprec

INPUT = torch.arange(24, dtype=torch.float32).reshape(3, 8) / 16 - 0.5


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(0.5), nn.Linear(16, 4))


def stepped(made: nn.Module, optimizer: torch.optim.Optimizer, scaler: fxprec.LossScaler) -> None:
    scaler.scale(made(INPUT).square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def converted(**arguments: Any) -> dict[str, Any]:
    """A converted model, one of its graphs, and what the model gave."""
    made, _ = fxprec.convert(model(), **arguments)
    made.eval()
    output = made(INPUT).detach()
    return {"model": made, "graph": fxprec.graph_module(made), "output": output}


def trained(make: Any, **arguments: Any) -> dict[str, Any]:
    """A model, an optimizer and a scaler within a training."""
    made, scaler = fxprec.convert(
        model().eval(), scaler=fxprec.LossScaler(init_scale=2.0**12, hysteresis=2, num_losses=2), **arguments
    )
    optimizer = make(made.parameters())
    for _ in range(3):
        stepped(made, optimizer, scaler)
    saved = pickle.loads(pickle.dumps({"model": made, "optimizer": optimizer, "scaler": scaler}))
    states = copy.deepcopy({"optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()})
    stepped(made, optimizer, scaler)
    return {**saved, "states": states, "after": {name: p.detach().clone() for name, p in made.named_parameters()}}


CASES = {
    "static": lambda: converted(),
    "policy": lambda: converted(
        policy=fxprec.Policy.preset("O2").override(modules={"0": torch.float32}, ops={"gelu": "full"}),
        fuse="aten",
    ),
    "O3": lambda: converted(level="O3"),
    "float16": lambda: converted(dtype=torch.float16, example_inputs=(INPUT,)),
    "dynamo": lambda: converted(capture="dynamo"),
    "autocast": lambda: converted(placement="autocast"),
    "adamw": lambda: trained(lambda p: fxprec.optim.AdamW(p, lr=1e-2)),
    "sgd": lambda: trained(lambda p: fxprec.optim.SGD(p, lr=1e-2, momentum=0.9)),
}


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)  # as in the tests: sums are the same
    for name, make in CASES.items():
        torch.save(make(), folder / f"{name}.pt")


if __name__ == "__main__":
    main()
