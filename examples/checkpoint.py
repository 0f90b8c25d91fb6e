"""Train the CNN of digits_cnn.py with checkpoints; kill it whenever you like, start it again, and it goes on.

    python examples/checkpoint.py [--steps 100] [--every 10] [--folder checkpoints] [--dtype float16]

What comes out is bit for bit what a run without interruptions gives. Two things make it so:

- A checkpoint holds everything that a step depends on: model, optimizer, loss scaler, random state, and the place in
  the data. (The low-precision shadows are no part of it: they are made from the FP32 weights again.)
- It is either whole or not there: it is written to a file beside the final one, brought to the disk, then renamed,
  which is atomic. ``kill -9`` or a power cut loses at most the checkpoint that is being written.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import pickle
import re
from typing import Any

import torch
import torch.nn.functional as F

import fxprec
from fxprec.optim import AdamW

if __package__:
    from examples.digits_cnn import DigitsCNN, batches, load
else:  # started as a script: Python looks in its folder
    from digits_cnn import DigitsCNN, batches, load

#: What ``torch.load`` raises for half a file. ``save`` leaves none, but other programs copy files too.
DAMAGED = (RuntimeError, EOFError, pickle.UnpicklingError)


def save(path: pathlib.Path, values: dict[str, Any]) -> None:
    """Write ``values`` to ``path``: whatever happens meanwhile, there is the whole new file, or what was there before.

    One writer at a time (of several ranks, the first). Raises OSError where the disk is full, for example; what was
    there before stays.
    """
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        torch.save(values, file)
        file.flush()
        os.fsync(file.fileno())  # the content before the name, or a power cut leaves an empty file of that name
    os.replace(part, path)
    if os.name == "posix":  # elsewhere folders cannot be opened
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def newest(folder: pathlib.Path) -> dict[str, Any] | None:
    """What the newest whole checkpoint of a folder holds; None: there are none.

    Raises:
        RuntimeError: there are some, and every one is damaged. To start anew would hide that.
    """
    paths = checkpoints(folder)
    for path in reversed(paths):
        try:
            return torch.load(path, weights_only=True)
        except DAMAGED as error:
            print(f"{path} is damaged, trying the one before it: {error}")
    if paths:
        raise RuntimeError(f"every checkpoint in {folder} is damaged; move them away to start anew")
    return None


def checkpoints(folder: pathlib.Path) -> list[pathlib.Path]:
    """Oldest first. Files that were never finished have other names."""
    return sorted(path for path in folder.glob("step-*.pt") if re.fullmatch(r"step-\d{8}\.pt", path.name))


def main(arguments: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description="Train a CNN on digits, with checkpoints that survive kill -9")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--keep", type=int, default=2, help="newest checkpoints to keep")
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("checkpoints"))
    parser.add_argument("--width", type=int, default=8, help="channels of the first block")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--level", default="O1", help="a checkpoint of one level or dtype goes on at any other")
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], help="float16 is slow on a CPU")
    options = parser.parse_args(arguments)
    if min(options.steps, options.every, options.keep, options.batch) < 1:
        parser.error("--steps, --every, --keep and --batch must be at least 1")

    data = load()
    torch.manual_seed(0)
    dtype = getattr(torch, options.dtype) if options.dtype else None
    model, scaler = fxprec.convert(DigitsCNN(options.width), level=options.level, dtype=dtype)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    done = 0
    options.folder.mkdir(parents=True, exist_ok=True)
    saved = newest(options.folder)
    if saved is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
        if saved["scaler"]:  # a disabled scaler, such as that of bfloat16, has no state
            scaler.load_state_dict(saved["scaler"])
        torch.set_rng_state(saved["random"])  # and torch.cuda.get_rng_state_all() where there are GPUs
        done = saved["done"]
        print(f"going on after step {done}")

    an_epoch = -(-len(data.train_y) // options.batch)
    loss = torch.tensor(float("nan"))
    while done < options.steps:
        epoch, place = divmod(done, an_epoch)
        for x, y in [*batches(data, options.batch, seed=epoch)][place : place + options.steps - done]:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            if not scaler.step_was_skipped:
                schedule.step()
            done += 1
            if done % options.every == 0 or done == options.steps:
                path = options.folder / f"step-{done:08}.pt"
                values = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "schedule": schedule.state_dict(),
                    "scaler": scaler.state_dict(),
                    "random": torch.get_rng_state(),
                    "done": done,
                }
                save(path, values)
                for old in checkpoints(options.folder)[: -options.keep]:
                    old.unlink()
                print(f"{path.name} is safe; loss {loss.item():.4f}", flush=True)
    model.eval()
    with torch.inference_mode():
        accuracy = (model(data.test_x).argmax(1) == data.test_y).float().mean().item()
    print(f"{done} steps: accuracy on the test digits {accuracy:.2%}")
    return accuracy


if __name__ == "__main__":
    main()
