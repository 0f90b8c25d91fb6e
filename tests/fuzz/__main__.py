"""The command: see ``--help``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from tests.fuzz.features import FEATURES
from tests.fuzz.kinds import Kind
from tests.fuzz.runs import run

_EXAMPLES = """\
examples, from the root of a checkout:
  python -m tests.fuzz programs --seeds 0:100000 --jobs 2 --progress programs.jsonl
  python -m tests.fuzz stateful --seeds 0:20000 --capture static --progress static.jsonl
  python -m tests.fuzz stateful --seeds 0:2000 --capture dynamo --progress dynamo.jsonl
  python -m tests.fuzz stateful --seed 42            one case, made as small as it still fails
"""


def main(arguments: list[str] | None = None) -> int:
    """0: every seed is right; 1: some are wrong, and were printed."""
    parser = argparse.ArgumentParser(
        "python -m tests.fuzz", description=__doc__, epilog=_EXAMPLES, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=("programs", "stateful"))
    parser.add_argument(
        "--seeds", type=_range, default=range(1000), metavar="FROM:TO", help="the first 1000 by default"
    )
    parser.add_argument("--seed", type=int, help="show this one, and what is left of it when made small")
    parser.add_argument("--capture", choices=("static", "dynamo", "auto"), default="static", help="of stateful modules")
    parser.add_argument("--jobs", type=int, default=1, help="processes; 0: this one")
    parser.add_argument("--progress", type=Path, help="a file to go on from, and to write to")
    parser.add_argument("--minutes", type=float, help="stop after that many")
    parser.add_argument("--known", action="store_true", help="with modules that show known faults")
    parser.add_argument("--only", action="append", default=[], metavar="FEATURE", help="with one of these features")
    options = parser.parse_args(arguments)
    unknown = {*options.only} - {feature.name for feature in FEATURES}
    if unknown:
        parser.error(f"no features: {', '.join(sorted(unknown))}. There are: {', '.join(f.name for f in FEATURES)}")
    kind = Kind(options.what, options.capture, options.known, tuple(options.only))
    if options.seed is not None:
        torch.set_num_threads(1)
        text = kind.smallest(options.seed, lambda text: None)
        print(text or f"seed {options.seed} is right:\n{kind.shown(options.seed)}")
        return int(text is not None)
    wrong = run(kind, options.seeds, options.jobs, options.progress, options.minutes, _say)
    return int(wrong > 0)


def _range(text: str) -> range:
    start, _, stop = text.partition(":")
    return range(int(start), int(stop))


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
