"""Keep device costs, one JSON file a machine, and choose those that serve a conversion: these, or shipped ones.

Shipped are three measured CPUs, and estimates for the rest:

- A CPU with AMX, whose tiles multiply bfloat16: an Intel Xeon; another one with bfloat16 units: an AMD EPYC 9005
  (Zen 5, AVX512-BF16), but what compiled loops are priced by is an EPYC 9004's (Zen 4). Both torch 2.13, measured with
  one thread and with two (``costs/*.json``, the fastest of three runs of ``python -m fxprec calibrate``). More threads
  are taken to do 0.85 times as much more work each in the same time, while a call costs the same.
- A CPU without bfloat16 units and without AVX-512, as most laptops have: an AMD EPYC 7003 (Zen 3, AVX2 alone), on which
  bfloat16 products take 2 to 23 times FP32's time, but for products of one row, which wait for memory: 0.4 to 0.7.
- A CPU with AVX-512 and without bfloat16 units: an estimate. FP32 as on the EPYC 9005; oneDNN converts the operands of
  products in a low dtype, which takes longer.
- A100, and H100 or H200: estimates from the published rates at usual efficiencies, FP32 products without TF32, and the
  usual cost of a launch from Python, which their files name: a call takes launch + work / rate (``Curve.linear``).
  Sources: NVIDIA's data sheets; 60 to 80 % of the peak where shapes are good.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import re
import warnings
from collections.abc import Mapping
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import Final

import torch

from fxprec.errors import ServiceWarning
from fxprec.kernels.cpu.processor import BFloat16Units, bfloat16_units, cache_folder, cpuinfo, instruction_limit
from fxprec.passes.costs.device_costs import ATTENTION_WAYS, LOOPS, Curve, DeviceCosts, Work

_FILE: Final[Mapping[BFloat16Units, str]] = {
    "amx": "xeon-amx", "other": "epyc-9005", "converted": "epyc-9005", "none": "avx2",
}  # fmt: skip
#: Threads of the CPUs that were measured -> how their files end.
_THREADS: Final = {1: "1-thread", 2: "2-threads"}
_THREAD: Final = 0.85
_OTHER_WAYS: Final = frozenset(chain(*ATTENTION_WAYS.values()))
_PRODUCTS: Final = frozenset(Work) - {Work.STREAM, Work.ROW, Work.POINTWISE, Work.CAST} - _OTHER_WAYS - LOOPS
#: Work in a low dtype that a CPU which converts it does in the time of one unit of FP32 work.
_EMULATED: Final = 0.6

_KINDS: Final[Mapping[BFloat16Units, str]] = {
    "amx": "with AMX", "other": "with bfloat16 units", "converted": "with AVX-512 without bfloat16 units, an estimate",
    "none": "without bfloat16 units",
}  # fmt: skip


@functools.cache  # each `convert` asks, and derives nothing anew
def shipped(device: str, name: str, threads: int, units: BFloat16Units) -> DeviceCosts:
    """Return the costs of the nearest class of device.

    Args:
        device: "cpu" or "cuda".
        name: what the processor calls itself.
        threads: of torch's, on a CPU.
        units: how a CPU multiplies bfloat16.
    """
    if device == "cuda":
        hopper = any(model in name for model in ("H100", "H200", "GH200", "H800", "H20"))
        file, kind = ("h100", "H100 and H200") if hopper else ("a100", "A100")
        return DeviceCosts(device, name, 0, f"shipped for {kind}, an estimate", _shipped_file(file).curves)
    return DeviceCosts(device, name, threads, f"shipped for CPUs {_KINDS[units]}", _cpu(threads, units))


def _cpu(threads: int, units: BFloat16Units) -> dict[torch.dtype, dict[Work, Curve]]:
    base = max(measured for measured in _THREADS if measured <= max(threads, 1))
    curves = {dtype: {**of_work} for dtype, of_work in _shipped_file(f"{_FILE[units]}-{_THREADS[base]}").curves.items()}
    if units == "none":  # compiled loops want AVX-512, which torch may have where oneDNN is held to less
        for dtype, of_work in _shipped_file(f"{_FILE['other']}-{_THREADS[base]}").curves.items():
            curves[dtype] |= {work: curve for work, curve in of_work.items() if work in LOOPS}
    if units == "converted":
        curves[torch.bfloat16] |= {work: curves[torch.float32][work].faster(_EMULATED) for work in _PRODUCTS}
        for work in _OTHER_WAYS:  # how these compare with torch's kernel there, nobody knows
            curves[torch.bfloat16].pop(work, None)
    # Only one and two threads were measured; each further one adds a little less than a whole.
    factor = 1 + _THREAD * (threads / base - 1)
    return {dtype: {work: curve.faster(factor) for work, curve in of.items()} for dtype, of in curves.items()}


@functools.cache
def _shipped_file(name: str) -> DeviceCosts:
    return DeviceCosts.from_dict(json.loads(files("fxprec").joinpath(f"costs/{name}.json").read_text(encoding="utf-8")))


def costs_of(device: str, dtype: torch.dtype = torch.bfloat16) -> DeviceCosts:
    """Return costs measured on this machine by ``python -m fxprec calibrate``, else those that are shipped.

    A file that cannot be read, or is another machine's or another torch's, is passed over with a warning.

    Args:
        device: "cpu" or "cuda".
        dtype: the low dtype that is asked about.
    """
    path = path_of(device)
    try:
        found = read(path)
        # Costs of another processor or torch mislead more than shipped ones of a like machine.
        if not (why := _stale(found, device, dtype)):
            return found
    except FileNotFoundError:
        return shipped_for_here(device)
    except ValueError as error:
        why = str(error)
    # Not an error: the file may be of another torch, which was installed since.
    warnings.warn(
        f"{path} is not used: {why}. Shipped costs serve; measure again: python -m fxprec calibrate --device {device}",
        category=ServiceWarning,
        stacklevel=2,
    )
    return shipped_for_here(device)


def shipped_for_here(device: str) -> DeviceCosts:
    """Return the shipped costs of the nearest class of this machine's device."""
    return shipped(device, processor_name(device), torch.get_num_threads(), bfloat16_units())


def path_of(device: str) -> Path:
    """Return the path for costs of this machine's device, with the present number of threads.

    The folder is ``$FXPREC_CACHE_DIR``, else ``$XDG_CACHE_HOME/fxprec``, else ``~/.cache/fxprec``.
    """
    # Threads are in the name: a CPU with another number of them is another machine.
    threads = f"-{torch.get_num_threads()}-threads" if device == "cpu" else ""
    name = re.sub(r"\W+", "-", processor_name(device)).strip("-").lower()
    return cache_folder() / f"costs-{device}-{name}{threads}.json"


def read(path: Path) -> DeviceCosts:
    """Read a file that ``write`` made.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is something else, or broken, or may not be read.
    """
    try:
        now = path.stat()
        return _read(path, (now.st_mtime_ns, now.st_ino))
    except FileNotFoundError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"it holds no costs that this version reads ({type(error).__name__}: {error})") from None


@functools.lru_cache(maxsize=4)  # each `convert` asks twice; another state of the file is read anew
def _read(path: Path, _state: tuple[int, int]) -> DeviceCosts:
    return DeviceCosts.from_dict(json.loads(path.read_text()))


def write(costs: DeviceCosts, path: Path) -> None:
    """Write costs to a file: all of it or nothing, whoever reads meanwhile.

    Raises:
        OSError: nothing can be written there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Readers see the old file or the new one: a rename within a folder is atomic.
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        data = json.dumps(costs.to_dict(), indent=1)
        # Indented JSON puts each number on a line; here a curve is one, so that a diff of two machines is read by
        # curves.
        text = re.sub(r"\[[\s\d.,e+\-\[\]]+\]", lambda curve: "".join(curve[0].split()).replace(",", ", "), data)
        beside.write_text(text + "\n")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


@functools.cache
def processor_name(device: str) -> str:
    """Return the GPU's or CPU's name; a CPU that is held to fewer instructions than it has is another one."""
    if device == "cuda":
        return torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
    name = cpuinfo("model name") or platform.processor() or platform.machine()
    limit = instruction_limit()
    return f"{name} held to {limit}" if limit else name


def _stale(costs: DeviceCosts, device: str, dtype: torch.dtype) -> str:
    """Return why costs are not this machine's; "" where they are."""
    # A torch's build ("+cpu") changes no kernel's time that is measured here; its release may.
    release, here = (version.partition("+")[0] for version in (costs.torch, torch.__version__))
    for what, have, want in (
        ("device", costs.device, device),
        ("processor", costs.name, processor_name(device)),
        ("threads", costs.threads, torch.get_num_threads() if device == "cpu" else 0),
        ("torch", release, here),
    ):
        if have != want:
            return f"its {what} is {have}, here it is {want}"
    return "" if dtype in costs.curves else f"it knows nothing of {dtype}"
