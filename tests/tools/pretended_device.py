"""A GPU that is not there: every launch goes Triton's own way, is compiled and checked, and none runs.

``pretend(90)`` changes this process for good. CPU tensors say that they are on cuda:0, and Triton has a driver without
a device: its ``JITFunction.run`` looks at the arguments as on a GPU (numbers that are 1 become constants, multiples of
16 promises), compiles for the compute capability, and comes to a launcher that checks and counts. What a kernel would
write stays as it is, and new memory is 0: indices that a kernel was to make are some.

Torch's own ops run on the CPU. While dynamo compiles, and for fake tensors, there is a CPU only: torch would ask a real
device there.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import types
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import triton
from torch import Tensor
from torch._guards import CompileContext
from torch._subclasses.fake_tensor import FakeTensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

import compiled_kernel
from approximations import BOUNDS
from compiled_kernel import CompiledKernel

__all__ = ["DEVICE", "RECORD", "BadLaunchError", "Launchable", "Record", "pretend"]

DEVICE: Final = torch.device("cuda", 0)
#: Compute capability, times ten -> bytes of shared memory that a program may have.
_SHARED: Final = {80: 166912, 90: 232448, 100: 232448}
#: Multiprocessors of an H100.
_PROCESSORS: Final = 132
#: Bytes of local memory a thread that are no spill: frames of calls (a division's slow path), and a few numbers that
#: ptxas puts there well below its limit. What was a spill took 64 to 350.
_LOCAL: Final = 24
_GRID: Final = (2**31 - 1, 65535, 65535)
_POINTERS: Final = {
    torch.float64: "*fp64", torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16",
    torch.int64: "*i64", torch.int32: "*i32", torch.int16: "*i16", torch.int8: "*i8", torch.uint8: "*u8",
    torch.bool: "*u1",
}  # fmt: skip
#: Memory that is larger is not set to 0, so that nothing is behind it: what the system gives is 0 anyway.
_TOUCHED: Final = 1 << 20
#: Linux's ``MAP_NORESERVE``, which Python's module names from 3.13 on.
_NO_RESERVE: Final = 0x4000


class BadLaunchError(Exception):
    """A launch that a GPU would refuse, or run wrongly or slowly."""


@dataclass
class Record:
    """What was launched.

    Attributes:
        launches: compiled kernel -> how often.
        faults: what was raised, whoever caught it.
        counts: what tests count besides.
        look: asked at each launch: what is launched, the grid, the arguments.
    """

    launches: Counter[Launchable] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    look: Callable[[Launchable, Sequence[int], Sequence[Any]], None] | None = None


RECORD: Final = Record()


def _fault(text: str) -> BadLaunchError:
    RECORD.faults.append(text)
    return BadLaunchError(text)


# -- Triton ------------------------------------------------------------------------------------------------------------


class Launchable:
    """A compiled kernel, in the place of the C function that launches it: what it was promised must hold.

    Attributes:
        source: Triton's: the function, the types, constants and promises that it was compiled for.
        files: that came out, by name.
        made: what is in them.
    """

    latest: Launchable
    made: CompiledKernel

    def __init__(self, source: Any, metadata: Any) -> None:
        self.source = source
        self.files: Mapping[str, str] = {}
        Launchable.latest = self

    def __call__(self, x: int, y: int, z: int, stream: Any, function: Any, *rest: Any) -> None:
        name, arguments = self.source.fn.__name__, rest[4:]
        if not all(0 < size <= most for size, most in zip((x, y, z), _GRID, strict=True)):
            raise _fault(f"{name} has a grid of {(x, y, z)}")
        broken = [self._broken(place, given) for place, given in enumerate(arguments)]
        if any(broken):
            raise _fault(f"{name} {'; '.join(filter(None, broken))}")
        if RECORD.look is not None:
            RECORD.look(self, (x, y, z), arguments)
        RECORD.launches[self] += 1
        if name == "_one_kernel":  # whose result shows that kernels run
            arguments[0].fill_(1)

    def _broken(self, place: int, given: Any) -> str:
        """What the kernel was compiled for that this argument is not; "" for nothing."""
        kind, number = self._kinds[place], given.data_ptr() if isinstance(given, Tensor) else given
        constant = self.source.constants.get((place,))
        if isinstance(constant, int) and given != constant:
            return f"was compiled for an argument {place} of {constant}, and got {given}"
        if isinstance(given, Tensor) and kind != _POINTERS[given.dtype]:
            return f"was compiled for an argument {place} of {kind}, and got {given.dtype}"
        if kind == "i32" and not -(2**31) <= number < 2**31:
            return f"was compiled for an argument {place} of 32 bits, and got {number}"
        divides = any(what == "tt.divisibility" for what, _ in self.source.attrs.get((place,), ()))
        if divides and number % 16:
            return f"was compiled for an argument {place} that divides by 16, and got {number}"
        return ""

    @functools.cached_property
    def _kinds(self) -> tuple[str, ...]:
        return tuple(self.source.signature.values())


class _Utils:
    """What Triton's compiler asks of a driver."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[Any, ...]:
        made = Launchable.latest.made = compiled_kernel.read(Launchable.latest.files)
        if made.local > _LOCAL:
            raise _fault(f"{name} has {made.local} bytes of local memory a thread, with {made.registers} registers")
        if unknown := {*made.approximations.split()} - BOUNDS.keys():
            raise _fault(f"{name} uses {unknown}, of whose error tests/tools/approximations.py says nothing")
        return 0, 0, made.registers, made.local, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        shared = _SHARED[self._capability]
        return {
            "max_shared_mem": shared,
            "multiprocessor_count": _PROCESSORS,
            "warpSize": 32,
            "max_num_regs": 65536,
        }


class _Driver(DriverBase):
    def __init__(self, capability: int) -> None:
        self._capability = capability
        self.utils, self.launcher_cls = _Utils(capability), Launchable
        self.get_current_stream = self.get_current_device = lambda *_: 0
        self.set_current_device = lambda device: None

    @staticmethod
    def is_active() -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_active_torch_device(self) -> torch.device:
        return DEVICE

    def get_device_interface(self) -> Any:
        return torch.cuda

    def get_benchmarker(self) -> Any:
        raise NotImplementedError


def _files_of_latest(module: Any, function: Any, name: str, files: Mapping[str, str], hash: str) -> None:
    """Called between the making of a launcher and the loading of its kernel."""
    Launchable.latest.files = files


# -- torch -------------------------------------------------------------------------------------------------------------

_FACTORIES: Final = (
    "zeros ones full tensor rand randn randint arange zeros_like ones_like full_like rand_like randn_like eye linspace "
    "logspace as_tensor scalar_tensor randperm"
).split()
_EMPTY: Final = "empty empty_like empty_strided".split()
_METHODS: Final = "new_zeros new_ones new_full new_tensor".split()
_EMPTY_METHODS: Final = "new_empty new_empty_strided".split()


def _host(device: Any) -> Any:
    """Where a tensor for the pretended device is made."""
    if isinstance(device, int):
        return torch.device("cpu")
    named = torch.device(device) if isinstance(device, str) else device
    return torch.device("cpu") if isinstance(named, torch.device) and named.type == "cuda" else device


def _on_the_host(function: Any, empty: bool = False) -> Any:
    def make(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _host(kwargs["device"])
        kwargs.pop("pin_memory", None)
        try:
            made = function(*args, **kwargs)
        except RuntimeError as error:
            if not empty or "allocate memory" not in str(error):
                raise
            return _nowhere(function(*args, **{**kwargs, "device": "meta"}))
        if empty and type(made) is Tensor and made.numel() <= _TOUCHED:
            made.detach().zero_()
        return made

    return make


def _nowhere(like: Tensor) -> Tensor:
    """A tensor that is larger than this machine: addresses, behind each of which there is memory once it is touched."""
    size = like.untyped_storage().nbytes()
    addresses = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    made = torch.frombuffer(addresses, dtype=like.dtype).as_strided(like.size(), like.stride())
    return made.requires_grad_(like.requires_grad)


def _unless_compiling(own: Any, value: Any) -> Any:
    def answer(*args: Any, **kwargs: Any) -> Any:
        return value if CompileContext.try_get() is None else own(*args, **kwargs)

    return answer


def _tensors_say_so() -> None:
    place = torch._C.TensorBase.device  # type: ignore[attr-defined]

    def device_of(tensor: Tensor) -> torch.device:
        own = place.__get__(tensor)
        return DEVICE if own.type == "cpu" and CompileContext.try_get() is None else own

    torch.Tensor.device = property(device_of)  # type: ignore[assignment, method-assign]
    torch.Tensor.is_cuda = property(lambda tensor: device_of(tensor).type == "cuda")  # type: ignore[assignment]
    torch.Tensor.get_device = lambda tensor: 0 if device_of(tensor).type == "cuda" else -1  # type: ignore[method-assign]
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign, assignment]
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor  # type: ignore[method-assign]
    move, new = torch.Tensor.to, FakeTensor.__new__

    def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        kwargs = {name: _host(each) if name == "device" else each for name, each in kwargs.items()}
        return move(tensor, *(_host(each) if isinstance(each, str | torch.device) else each for each in args), **kwargs)

    def fake(cls: Any, mode: Any, elem: Any, device: Any, *args: Any, **kwargs: Any) -> Any:
        return new(cls, mode, elem, _host(device), *args, **kwargs)

    torch.Tensor.to = to  # type: ignore[method-assign, assignment]
    FakeTensor.__new__ = fake  # type: ignore[method-assign, assignment]
    for holder, names, empty in (
        (torch, _FACTORIES, False),
        (torch, _EMPTY, True),
        (torch.Tensor, _METHODS, False),
        (torch.Tensor, _EMPTY_METHODS, True),
    ):
        for name in names:
            setattr(holder, name, _on_the_host(getattr(holder, name), empty))


def _cuda_says_so(capability: int) -> None:
    major, minor = divmod(capability, 10)
    known = types.SimpleNamespace(
        multi_processor_count=_PROCESSORS,
        major=major,
        minor=minor,
        name="pretended",
        total_memory=80 << 30,
        L2_cache_size=50 << 20,
    )
    for name, value in {
        "is_available": True, "current_device": 0, "device_count": 1, "get_device_properties": known,
        "get_device_capability": (major, minor), "get_device_name": known.name, "is_current_stream_capturing": False,
        "synchronize": None, "is_bf16_supported": True, "is_initialized": True, "_lazy_init": None,
        "memory_allocated": 0, "get_sync_debug_mode": 0, "set_sync_debug_mode": None, "current_stream": None,
    }.items():  # fmt: skip
        setattr(torch.cuda, name, _unless_compiling(getattr(torch.cuda, name), value))

    class OnDevice(contextlib.nullcontext[None]):
        def __init__(self, *_: Any) -> None:
            super().__init__()

    class Done:
        """An event: the device has done all that it was told."""

        def __init__(self, *_: Any, **__: Any) -> None:
            self.record = self.synchronize = self.wait = lambda *_: None
            self.query = lambda: True

    torch.cuda.device = torch.cuda.device_of = OnDevice  # type: ignore[misc, assignment]
    torch.cuda.Event = Done  # type: ignore[misc, assignment]


def pretend(capability: int) -> None:
    """Pretend, for the rest of this process, a GPU of this compute capability, times 10."""
    knobs.runtime.kernel_load_start_hook.add(_files_of_latest)
    triton.runtime.driver.set_active(_Driver(capability))
    _tensors_say_so()
    _cuda_says_so(capability)
