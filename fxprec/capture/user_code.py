"""Tells whose code it is: the user's, or that of torch, of the standard library, of installed packages and of fxprec.

Warnings and messages name a line of the user's. A trace may run only what gives the same for the same arguments, and
changes nothing: all of torch is trusted, but functions that read or set its global state; of the standard library a
list of modules is. What is on no list (clocks, generators of random numbers, files, loggers) is not.
"""

from __future__ import annotations

import builtins
import contextlib
import operator
import os
import re
import sys
import sysconfig
import types
from types import FrameType
from typing import Any, Final

import torch

_OURS: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
#: What is no code of the user's; "<frozen runpy>" calls those of `python -m`.
_LIBRARIES: Final = (os.path.dirname(os.path.abspath(torch.__file__)) + os.sep, _OURS + os.sep, "<frozen ")


def _out_of_libraries(frame: FrameType | None) -> tuple[int, FrameType | None]:
    """Return the innermost frame of the user's, from ``frame`` outwards, and its level: 1 is ``frame`` itself."""
    level = 1
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame, level = frame.f_back, level + 1
    return level, frame


def user_level() -> int:
    """Return the ``stacklevel`` of the innermost caller that is neither torch's code nor ours."""
    return _out_of_libraries(sys._getframe(1))[0]


def user_line() -> tuple[str, int]:
    """Return file and line number of the innermost caller that is neither torch's code nor ours; or ("", 0)."""
    frame = _out_of_libraries(sys._getframe(1))[1]
    return ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)


#: What dynamo calls the rest of a function after a graph break (before torch 2.13 also in the stacks that it tells).
_REST: Final = re.compile(r"^torch_dynamo_resume_in_(.+)_at_\d+$")

#: Where installed code lies, and this package's own, which may lie in a checkout.
_INSTALLED: Final = (
    *{sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), sysconfig.get_path("stdlib")},
    _OURS,
)


def is_installed(file: str) -> bool:
    """Return whether a file is not the user's own: of an installed package, the standard library, or fxprec."""
    return file.startswith(_INSTALLED)


def place(file: str, line: int | str, function: str) -> str:
    """Return ``model.py:12 in forward``."""
    name = _REST.sub(r"\1", function)
    return f"{file}:{line} in {name}"


#: Packages whose functions and classes are taken for pure, or are recorded in the graph when they get a traced value.
_PACKAGES: Final = frozenset({"torch", "fxprec", "triton", "numpy", "typing_extensions"})
_PURE: Final = frozenset(
    "_abc _bisect _collections _collections_abc _functools _heapq _operator _struct _weakrefset abc bisect cmath "
    "collections copy copyreg contextlib dataclasses enum functools heapq itertools keyword math numbers operator re "
    "statistics string struct textwrap types typing".split()
)
#: How the names of modules, or of ``module.type``, begin that are not trusted, of packages that are.
_UNTRUSTED: Final = (
    *("numpy.random", "torch.random", "torch.cuda.random", "functools._lru_cache_wrapper"),
    *("torch.backends", "torch.cuda.memory", "torch.cuda.graphs", "torch.distributed.distributed_c10d"),
    *("torch.autograd.anomaly_mode", "torch.utils.deterministic"),
)
#: What looks at the interpreter's state, leaves something behind, ends errors, or tells objects apart.
_BUILTINS: Final = frozenset(
    map(
        id,
        (
            *(builtins.print, builtins.open, builtins.input, builtins.globals, builtins.locals, builtins.vars),
            *(builtins.dir, builtins.eval, builtins.exec, builtins.compile, builtins.id, builtins.breakpoint),
            *(builtins.__import__, contextlib.suppress, operator.is_, operator.is_not),
        ),
    )
)
_STATE: Final = (
    "is_grad_enabled is_inference_mode_enabled is_autocast_enabled is_autocast_cpu_enabled get_autocast_dtype "
    "get_autocast_gpu_dtype get_autocast_cpu_dtype is_autocast_cache_enabled get_rng_state set_rng_state "
    "initial_seed seed manual_seed get_num_threads set_num_threads get_num_interop_threads "
    "are_deterministic_algorithms_enabled use_deterministic_algorithms "
    "is_deterministic_algorithms_warn_only_enabled get_deterministic_debug_mode set_deterministic_debug_mode "
    "is_anomaly_enabled is_anomaly_check_nan_enabled is_warn_always_enabled set_warn_always set_printoptions "
    "get_default_device set_default_device set_default_dtype set_default_tensor_type get_float32_matmul_precision "
    "set_float32_matmul_precision save load"
).split()
#: Functions of torch that tell of its state, or change it.
_TORCH_STATE: Final = frozenset(id(getattr(torch, name)) for name in _STATE if hasattr(torch, name))


def is_torchs(thing: Any) -> bool:
    """Return whether torch itself made this function, class or module."""
    return _module_of(thing).partition(".")[0] == "torch"


def is_stdlib(thing: Any) -> bool:
    """Return whether a function, class or module is of Python's standard library."""
    return _module_of(thing).partition(".")[0] in sys.stdlib_module_names


def is_library(thing: Any) -> bool:
    """Return whether a function, class or module is torch's or of the standard library."""
    return is_torchs(thing) or is_stdlib(thing)


def is_trusted(thing: Any) -> bool:
    """Return whether a function, class or module may be used while tracing."""
    if id(thing) in _TORCH_STATE or id(thing) in _BUILTINS:
        return False
    module = _module_of(thing)
    if module.startswith(_UNTRUSTED) or f"{module}.{type(thing).__name__}".startswith(_UNTRUSTED):
        return False
    package = module.partition(".")[0]
    return package in _PACKAGES or package in _PURE or package == "builtins"


def _module_of(thing: Any) -> str:
    """Return the module that it is from; of a builtin function, which may not say, that of its class or owner."""
    if isinstance(thing, types.ModuleType):
        return thing.__name__
    # What a decorator made says that it is from where the function was.
    if isinstance(thing, types.FunctionType):
        return str(thing.__globals__.get("__name__") or "")
    module = getattr(thing, "__module__", None)
    if module is None:
        owner = getattr(thing, "__self__", None)
        owner = getattr(thing, "__objclass__", None) if owner is None else owner
        if isinstance(owner, types.ModuleType):
            return owner.__name__
        module = getattr(owner if isinstance(owner, type) else type(owner), "__module__", None)
    return module if isinstance(module, str) else ""
