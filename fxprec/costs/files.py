"""Keep device costs, one JSON file a machine, and choose those that serve a conversion: these or shipped ones."""

from __future__ import annotations

import functools
import json
import os
import platform
import re
import warnings
from pathlib import Path
from typing import Final

import torch

from fxprec.costs.shipped import shipped
from fxprec.errors import ServiceWarning
from fxprec.kernels.cpu.processor import bfloat16_units, cpuinfo, instruction_limit
from fxprec.kernels.launch.cache_folder import cache_folder
from fxprec.passes.costs.device_costs import DeviceCosts


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
    except FileNotFoundError:
        pass
    except ValueError as error:
        _warn(path, str(error), device)
    else:
        # Costs of another processor or torch mislead more than shipped ones of a like machine.
        why = _stale(found, device, dtype)
        if not why:
            return found
        _warn(path, why, device)
    return shipped_for_here(device)


def shipped_for_here(device: str) -> DeviceCosts:
    """Return the shipped costs of the nearest class of this machine's device."""
    return shipped(device, processor_name(device), torch.get_num_threads(), bfloat16_units())


def path_of(device: str) -> Path:
    """Return the path for costs of this machine's device, with the present number of threads.

    The folder is ``$FXPREC_CACHE_DIR``, else ``$XDG_CACHE_HOME/fxprec``, else ``~/.cache/fxprec``.
    """
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
        return DeviceCosts.from_dict(json.loads(path.read_text()))
    except FileNotFoundError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"it holds no costs that this version reads ({type(error).__name__}: {error})") from None


def write(costs: DeviceCosts, path: Path) -> None:
    """Write costs to a file: all of it or nothing, whoever reads meanwhile.

    Raises:
        OSError: nothing can be written there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Readers see the old file or the new one: a rename within a folder is atomic.
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        beside.write_text(_text(costs))
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


_NO_SPACE: Final = str.maketrans("", "", " \n")


def _text(costs: DeviceCosts) -> str:
    """Write JSON, a curve a line."""
    data = json.dumps(costs.to_dict(), indent=1)
    return re.sub(r"\[[\s\d.,e+\-\[\]]+\]", lambda found: found[0].translate(_NO_SPACE).replace(",", ", "), data) + "\n"


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
    threads = torch.get_num_threads() if device == "cpu" else 0
    for what, have, want in (
        ("device", costs.device, device),
        ("processor", costs.name, processor_name(device)),
        ("threads", costs.threads, threads),
        ("torch", _release(costs.torch), _release(torch.__version__)),
    ):
        if have != want:
            return f"its {what} is {have}, here it is {want}"
    return "" if dtype in costs.curves else f"it knows nothing of {dtype}"


def _release(version: str) -> str:
    return version.partition("+")[0]


def _warn(path: Path, why: str, device: str) -> None:
    warnings.warn(
        f"{path} is not used: {why}. Shipped costs serve; measure again: python -m fxprec calibrate --device {device}",
        category=ServiceWarning,
        stacklevel=2,
    )
