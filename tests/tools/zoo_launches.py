"""Every launch of real models, in training and inference, compiled and checked without a GPU; a table of the kernels.

::

    python tests/tools/zoo_launches.py                                # all models, both dtypes, for 9.0
    python tests/tools/zoo_launches.py gpt2 gpt-wide --capability 80 --dtype bfloat16 --kernels

Each model is converted with ``fuse=True`` and takes a training step with our AdamW, another one as ``capture_step``
records it, and an inference, on a pretended GPU. Those of other packages are small; ``-wide`` are those of the
benchmarks, at the sizes that they have on a GPU, with few samples. The exit status is 1 where a launch is one that a
GPU would refuse, or run wrongly or slowly.
"""

from __future__ import annotations

import argparse
import functools
import logging
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

if __name__ == "__main__":  # as tests are run
    sys.path[:0] = [str(Path(__file__).parents[2])]

import fxprec
from benchmarks.workloads.training import workloads
from benchmarks.workloads.zoo import ZOO
from compiled_kernel import CompiledKernel
from fxprec.kernels.calls import sizes
from fxprec.kernels.launch.triton_support import why_not
from fxprec.kernels.rows.run.kernel import Launch, built
from fxprec.kernels.rows.run.region import FusedRegion
from fxprec.optim import AdamW
from fxprec.whole_step import captured_step
from no_products import skip_products
from pretended_device import DEVICE, RECORD, Launchable, pretend
from recorded_graph import RecordedGraphs

__all__ = ["Found", "launches_of", "narrow", "subjects"]

_DTYPES: Final = {"bfloat16": torch.bfloat16, "float16": torch.float16}
#: Samples of a batch of the benchmarks' models.
_SAMPLES: Final = 1
#: A load of a tile of several rows, which is to be one of 16 bytes where rows are.
_TILE: Final = re.compile(r"tl\.load\([^\n]*\[:, None\] \+ column")
#: A store of a tile or of a row; one of a number a row has no column in its address, and is as narrow as the number.
_STORED: Final = re.compile(r"tl\.store\([^\n]*\bcolumn\b")
_WIDE: Final = 16


@dataclass(frozen=True)
class Subject:
    """A model as it is trained: on ``loss(model(**inputs))``, with ``inside`` on ``loss(model(*inputs), target)``.

    ``inside``: the loss is converted with the model, which then takes inputs and target.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[], Any]
    loss: Callable[..., Tensor]
    inside: bool = False


@dataclass(frozen=True)
class Found:
    """What a model launched.

    Attributes:
        training, captured, inference: compiled kernel -> launches of one step, of one recorded step, of one forward.
        uncaptured: why no step could be recorded; "" where one was.
        unfused: why regions ran op by op -> how many.
        slow: launches that do not keep what their form promises.
    """

    training: Counter[Launchable]
    captured: Counter[Launchable]
    inference: Counter[Launchable]
    uncaptured: str
    unfused: Counter[str]
    slow: tuple[str, ...]

    @property
    def kernels(self) -> tuple[CompiledKernel, ...]:
        """All that were launched."""
        return tuple(each.made for each in self.training | self.captured | self.inference)


def subjects() -> dict[str, Subject]:
    """All models by their names."""
    found = {name: Subject(case.build, case.inputs, case.loss) for name, case in ZOO.items()}
    for workload in workloads("gpu"):

        def inputs(workload: Any = workload) -> tuple[Tensor, ...]:
            (batch,) = workload.batches(1, DEVICE)
            return tuple(x[:_SAMPLES] for x in batch)

        def build(workload: Any = workload) -> nn.Module:
            return workload.placed(workload.make(), DEVICE)

        found[f"{workload.name}-wide"] = Subject(build, inputs, workload.loss, inside=True)
    return found


class CountedGraphs(RecordedGraphs):
    """Counts what is launched while a step is recorded: on a GPU its graph would hold that."""

    device = DEVICE

    def __init__(self) -> None:
        super().__init__()
        self.launched = Counter[Launchable]()

    def record(self, body: Callable[[], Any]) -> tuple[Any, Any]:
        made: list[tuple[Any, Any]] = []
        self.launched = _launched(lambda: made.append(super(CountedGraphs, self).record(body)))
        return made[0]


def launches_of(subject: Subject, dtype: torch.dtype, graphs: CountedGraphs) -> Found:
    """Train, record and run a model."""
    torch.manual_seed(0)
    given = {"loss": subject.loss} if subject.inside else {}
    model, scaler = fxprec.convert(subject.build().train(), dtype=dtype, fuse=True, **given)
    optimizer, inputs = AdamW(model.parameters(), lr=1e-4), subject.inputs()

    def loss() -> Tensor:
        return model(*inputs) if subject.inside else subject.loss(model(**inputs))

    def step() -> None:
        scaler.scale(loss()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    def forward() -> None:
        with torch.no_grad():
            loss()

    training = _launched(step)
    graphs.launched = Counter()
    uncaptured = ""
    try:
        whole = fxprec.capture_step(model, None if subject.inside else subject.loss, optimizer, scaler, inputs)
        whole(*inputs) if subject.inside else whole(**inputs)
    except fxprec.CaptureError as error:
        uncaptured = str(error)
    model.eval()
    inference = _launched(forward)
    regions = [each for gm in fxprec.graphs(model) for each in gm.modules() if isinstance(each, FusedRegion)]
    unfused = Counter(region.reason for region in regions if region.path == "aten")
    captured = graphs.launched
    made = training | captured | inference
    return Found(training, captured, inference, uncaptured, unfused, tuple(_slow(regions, made)))


def _launched(run: Callable[[], object]) -> Counter[Launchable]:
    before = RECORD.launches.copy()
    run()
    return RECORD.launches - before


def _slow(regions: Sequence[FusedRegion], made: Counter[Launchable]) -> Iterator[str]:
    """Regions' kernels with narrow accesses where all tensors allow wide ones, or that wait where they are not to."""
    of: dict[Any, list[CompiledKernel]] = {}
    for launchable in made:
        of.setdefault(launchable.source.fn, []).append(launchable.made)
    for launch in {id(launch): launch for region in regions for launch in _made(region)}.values():
        kernels = of.get(built(*(launch.kernel or (launch.name, launch.source))), [])
        if not kernels or not launch.wide:
            continue
        best = max(kernels, key=lambda kernel: (kernel.ahead, kernel.loads))
        yield from (f"{launch.name} {what}" for what in narrow(launch.source, max(best.loads, best.ahead), best.stores))
        if launch.tiling.stages > 1 and not best.ahead:
            yield f"{launch.name} is to load ahead, and waits"


def narrow(source: str, loads: int, stores: int) -> Iterator[str]:
    """What is wrong with the widest accesses, in bytes, of a kernel whose tensors allow wide ones."""
    if _TILE.search(source) and loads < _WIDE:
        yield f"loads {loads} bytes at once"
    if _STORED.search(source) and stores < _WIDE:
        yield f"stores {stores} bytes at once"


def _made(region: FusedRegion) -> Iterator[Launch]:
    """The launches that a region has made so far."""
    for plan in region.plans:
        for name in ("inference_launch", "forward_launch", "backward_launch"):
            if isinstance(made := vars(plan).get(name), Launch):
                yield made


# -- the table ---------------------------------------------------------------------------------------------------------

_HEAD: Final = (
    f"{'model':<14} {'dtype':<9} {'kernels':>7} {'training':>8} {'captured':>8} {'inference':>9} {'registers':>9} "
    f"{'warps':>6} {'shared':>7} {'local':>5} {'spills':>6}"
)


def _row(name: str, dtype: str, found: Found) -> str:
    kernels = found.kernels
    most = functools.partial(max, default=0)
    warps = sorted({kernel.warps for kernel in kernels}) or [0]
    captured = "-" if found.uncaptured else str(found.captured.total())
    return (
        f"{name:<14} {dtype:<9} {len(kernels):>7} {found.training.total():>8} {captured:>8} "
        f"{found.inference.total():>9} {most(k.registers for k in kernels):>9} {f'{warps[0]}-{warps[-1]}':>6} "
        f"{most(k.shared for k in kernels):>7} {most(k.local for k in kernels):>5} {sum(k.spills for k in kernels):>6}"
    )


def _lines(kernels: Sequence[CompiledKernel]) -> Iterator[str]:
    for kernel in sorted(set(kernels), key=lambda kernel: kernel.name):
        yield (
            f"    {kernel.name:<52} {kernel.registers:>3} registers, {kernel.warps:>2} warps, "
            f"{kernel.shared:>6} shared, {kernel.local:>3} local; "
            f"{kernel.loads:>2} loaded, {kernel.stores:>2} stored, {kernel.ahead:>2} ahead"
        )


def main() -> int:
    """Print the table."""
    known = subjects()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}; default: all")
    parser.add_argument("--capability", type=int, choices=(80, 90, 100), default=90, help="ten times it; default: 90")
    parser.add_argument("--dtype", choices=_DTYPES, action="append", help="default: both")
    parser.add_argument("--kernels", action="store_true", help="each kernel of each model, too")
    options = parser.parse_args()
    if unknown := set(options.names) - set(known):
        parser.error(f"no model {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    logging.disable()
    warnings.simplefilter("ignore")
    pretend(options.capability)
    sizes.FEWEST = 0  # what is small becomes kernels, too, which is torch's otherwise
    kept = skip_products()
    graphs = CountedGraphs()
    captured_step.recorder_of = lambda device: graphs
    why_not(DEVICE.type)  # launches a kernel that is no model's
    print(_HEAD, flush=True)
    slow: list[str] = []
    for name in options.names or known:
        for dtype in options.dtype or _DTYPES:
            found = launches_of(known[name], _DTYPES[dtype], graphs)
            print(_row(name, dtype, found), flush=True)
            for reason, count in found.unfused.items():
                print(f"    {count} regions op by op: {reason}")
            if found.uncaptured:
                print(f"    not captured: {found.uncaptured.splitlines()[0]}")
            slow += found.slow
            if options.kernels:
                print(*_lines(found.kernels), sep="\n", flush=True)
    del kept
    print(
        f"{RECORD.launches.total()} launches of {len(RECORD.launches)} compiled kernels for sm_{options.capability}, "
        f"{sum(each.made.spills for each in RECORD.launches)} spills"
    )
    wrong = RECORD.faults + slow
    print(*(f"WRONG: {fault}" for fault in wrong), sep="\n", end="\n" if wrong else "")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
