"""Compiles C++ on the machine that runs it: once for each source, compiler, torch and CPU; libraries stay on disk.

``compiled("cpu/attention.cpp")`` returns a library, whose functions take addresses and sizes; ``compiled_text`` takes
generated source (``rows.emit.loops``). The first call in a process compiles, or loads what another one compiled::

    ~/.cache/fxprec/cpp/attention-<hash of source, compiler, flags, torch and CPU>.so

The folder is private, since its libraries are executed: one that others own or may write to is refused.
``$FXPREC_CACHE_DIR`` and ``$XDG_CACHE_HOME`` move it, ``$CXX`` names the compiler.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import re
import shutil
import stat
import subprocess
import tempfile
import threading
from importlib.resources import files
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from fxprec.kernels.cpu.processor import cache_folder

_X86: Final = platform.machine() in ("x86_64", "AMD64")
#: No fast math: NaN and infinities stay. No contraction to FMA, which vectors and the rest of a row might do in
#: different ways.
_FLAGS: Final = (
    "-O3", "-march=native", *(["-mprefer-vector-width=512"] if _X86 else []), "-fno-math-errno", "-fno-trapping-math",
    "-ffp-contract=off", "-std=c++20", "-fPIC", "-shared", "-fopenmp",
)  # fmt: skip
_LIBRARIES: Final = (*(["-lmvec"] if _X86 else []), "-lm")
_COMPILERS: Final = ("c++", "g++", "clang++")
_LOCK: Final = threading.Lock()


class CompilerError(RuntimeError):
    """Failure to compile C++: no compiler, an error of it, or no safe folder for its libraries."""


def why_no_compiler() -> str:
    """Return why nothing can be compiled here, or ""."""
    if platform.system() != "Linux":
        return f"C++ kernels are built on Linux, and this is {platform.system()}"
    if _compiler() is None:
        named = os.environ.get("CXX")
        looked = f"$CXX is {named}" if named else f"none of {', '.join(_COMPILERS)} is there"
        return f"no C++ compiler was found: {looked}"
    return ""


@functools.cache
def compiled(source: str, *definitions: str) -> ctypes.CDLL:
    """Return the library of a source file of this package, such as "cpu/attention.cpp", with the headers beside it.

    Args:
        definitions: of its macros, such as "ADAM=1".

    Raises:
        CompilerError: see there; with what the compiler said.
    """
    folder, name = os.path.split(source)

    def read(file: str) -> str:
        return files("fxprec.kernels").joinpath(folder, file).read_text(encoding="utf-8")

    # Own headers are pasted in, so that the hash of the text covers them.
    text = re.sub(r'^#include "([^"]+)"$', lambda include: read(include[1]), read(name), flags=re.MULTILINE)
    return _library(Path(source).stem, text, tuple(f"-D{each}" for each in definitions))


@functools.cache
def compiled_text(name: str, text: str) -> ctypes.CDLL:
    """Return the library of a generated source; ``name``: of its file.

    Raises:
        CompilerError: see there; with what the compiler said.
    """
    return _library(name, text)


def pointer(x: Tensor | None) -> ctypes.c_void_p:
    """Return the address of a tensor's first element, as a library's functions take it; null for None."""
    return ctypes.c_void_p(None if x is None else x.data_ptr())


def _library(name: str, text: str, macros: tuple[str, ...] = ()) -> ctypes.CDLL:
    with _LOCK:  # of two threads one compiles
        if why := why_no_compiler():
            raise CompilerError(f"{name} cannot be compiled: {why}. Install g++, or convert with fuse='auto'")
        compiler = _compiler()
        assert compiler is not None
        # Whatever the machine code depends on is part of the file's name.
        parts = (text, _version(compiler), *_FLAGS, *macros, torch.__version__, _cpu())
        key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
        library = _private(cache_folder() / "cpp") / f"{name}-{key}.so"
        if not library.exists():
            _compile(compiler, text, macros, library)
        _check_owner(library)
        try:
            return ctypes.CDLL(str(library))
        except OSError as error:
            raise CompilerError(f"{name} cannot be loaded with torch {torch.__version__}: {error}") from error


def _compile(compiler: str, text: str, macros: tuple[str, ...], library: Path) -> None:
    """Compile a library into a temporary folder and rename it, so that other processes never see a part of it."""
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        source, made = Path(folder) / "source.cpp", Path(folder) / library.name
        source.write_text(text, encoding="utf-8")
        command = [compiler, *_FLAGS, *macros, str(source), "-o", str(made), *_LIBRARIES]
        # The source calls torch's functions.
        if "at::" in text:
            command += [f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch_cpu"]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        if ran.returncode:
            raise CompilerError(f"{' '.join(command)}\nfailed with status {ran.returncode}:\n{ran.stderr[-4000:]}")
        made.replace(library)


def _compiler() -> str | None:
    if named := os.environ.get("CXX"):
        return shutil.which(named)
    return next((path for name in _COMPILERS if (path := shutil.which(name))), None)


@functools.cache
def _version(compiler: str) -> str:
    ran = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    return f"{compiler} {ran.stdout}"


@functools.cache
def _cpu() -> str:
    """Return a description of the CPU, which ``-march=native`` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(("model", "flags", "cpu family", "CPU "))))


def _private(folder: Path) -> Path:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_owner(folder)
    return folder


def _check_owner(path: Path) -> None:
    found = path.stat()
    if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise CompilerError(
            f"{path} belongs to somebody else, or others may write to it: what lies there is not run. "
            "Set FXPREC_CACHE_DIR to a folder of your own, or chmod 700 it"
        )
