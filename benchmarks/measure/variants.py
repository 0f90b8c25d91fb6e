"""Ways to train a model in mixed precision, each as one call that is a whole training step: fxprec's and its peers'.

::

    setup = Setup(torch.device("cpu"), torch.bfloat16, clip=1.0)
    step = VARIANTS["o1-own"].build(workload, setup)
    step()                                                # zero_grad, forward, loss, backward, clip, optimizer, scaler
    step.loss()

Every step starts from the same weights and sees the same few batches in turn, which lie on the device before. float16
trains with a dynamic loss scale, the peers' by ``torch.amp.GradScaler``; bfloat16 and FP32 without. All use AdamW. TF32
is off but where a variant says so. torch.compile is given forward and loss as one function of a fixed shape.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

import fxprec
from benchmarks.measure.training_step import Setup, Step, loop, prepared, tf32
from benchmarks.workloads.training import Workload, named

__all__ = ["BASELINE", "VARIANTS", "Setup", "Step", "Variant", "converted", "variants"]

#: What ratios are taken against.
BASELINE: Final = "autocast"


@dataclass(frozen=True)
class Variant:
    """A way to train.

    Attributes:
        name: as options and tables have it.
        what: the same in words.
        build: makes the model and all that its step needs.
        devices, dtypes: those that it serves; None: all.
        why: it serves no others.
        refuses: errors by which it declines a model as documented.
        counted: operators are called one by one, so that a dispatch mode sees its casts.
        inductor: compiles with torch.compile's inductor.
    """

    name: str
    what: str
    build: Callable[[Workload, Setup], Step]
    devices: tuple[str, ...] | None = None
    dtypes: tuple[torch.dtype, ...] | None = None
    why: str = ""
    refuses: tuple[type[Exception], ...] = ()
    counted: bool = True
    inductor: bool = False

    def unserved(self, setup: Setup) -> str:
        """Why it does not serve a device or dtype; "": it does."""
        served = (self.devices is None or setup.device.type in self.devices) and (
            self.dtypes is None or setup.dtype in self.dtypes
        )
        return "" if served else self.why


def variants(names: Sequence[str] = ()) -> list[Variant]:
    """All, or those that are named; the one that ratios are taken against is always there.

    Raises:
        ValueError: an unknown name; says which is nearest.
    """
    chosen = {BASELINE, *named(names, VARIANTS, "variant")} if names else set(VARIANTS)
    return [variant for name, variant in VARIANTS.items() if name in chosen]


# -- peers ------------------------------------------------------------------------------------------------------------


def _peer(
    workload: Workload, setup: Setup, *, autocast: bool = True, mode: str | None = None, foreach: bool = False
) -> Step:
    """Eager FP32 or torch.autocast, or the same with torch.compile in a ``mode``."""
    model, batches, ready = prepared(workload, setup)
    optimizer = torch.optim.AdamW(model.parameters(), lr=setup.lr, foreach=foreach, fused=not foreach)
    scaler = torch.amp.GradScaler(setup.device.type, enabled=autocast and setup.dtype is torch.float16)

    def loss_of(*batch: Tensor) -> Tensor:
        with torch.autocast(setup.device.type, dtype=setup.dtype, enabled=autocast):
            return workload.loss(model(*batch[:-1]), batch[-1])

    run = loss_of if mode is None else _compiled(loss_of, mode)
    train = loop(model, optimizer, scaler, run, setup.clip)
    return Step(model, optimizer, scaler, batches, train, ready)


def _compiled(function: Callable[..., Tensor], mode: str) -> Callable[..., Tensor]:
    """Compiled with a code object of its own, by which dynamo keeps it: others there would be tried at each call."""
    assert isinstance(function, types.FunctionType)
    code = function.__code__.replace()
    own = types.FunctionType(code, function.__globals__, function.__name__, None, function.__closure__)
    compiled = torch.compile(own, mode=mode, dynamic=False)

    def run(*batch: Tensor) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()  # nothing of the step before is read any more
        return compiled(*batch)

    return run


def _with_tf32(workload: Workload, setup: Setup) -> Step:
    step = _peer(workload, setup, autocast=False)
    train = step.train

    def train_with_tf32(*batch: Tensor) -> Tensor:
        with tf32(True):
            return train(*batch)

    step.train = train_with_tf32
    return step


def _low_model(workload: Workload, setup: Setup) -> Step:
    """``model.bfloat16()``: weights, moments and float inputs are low, the loss is FP32."""
    model, wide, ready = prepared(workload, setup)
    model.to(setup.dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=setup.lr, fused=True)
    scaler = torch.amp.GradScaler(setup.device.type, enabled=False)
    batches = [(*(x.to(setup.dtype) if x.is_floating_point() else x for x in batch[:-1]), batch[-1]) for batch in wide]

    def loss_of(*batch: Tensor) -> Tensor:
        return workload.loss(model(*batch[:-1]).float(), batch[-1])

    return Step(model, optimizer, scaler, batches, loop(model, optimizer, scaler, loss_of, setup.clip), ready)


# -- fxprec -----------------------------------------------------------------------------------------------------------


def converted(
    workload: Workload,
    setup: Setup,
    *,
    own: bool = False,
    low: bool = False,
    compiled: bool = False,
    inside: bool = False,
    whole: bool = False,
    **options: Any,
) -> Step:
    """A converted model.

    Args:
        own: fxprec's optimizer, which clips in its step; otherwise torch's fused one.
        low: low gradients.
        compiled: update by compiled loops.
        inside: the loss is converted with the model, as one graph.
        whole: the step is captured; on a GPU, where it has no host, with regions of any size.
        options: of ``fxprec.convert``.
    """
    if whole and setup.device.type == "cuda":  # small regions are left to torch's ops for a host's sake: it has none
        options.setdefault("fuse", True)
    model, batches, ready = prepared(workload, setup)
    if inside:
        model, scaler = fxprec.convert(model, batches[0], dtype=setup.dtype, loss=workload.loss, **options)
    else:
        model, scaler = fxprec.convert(model, batches[0][:-1], dtype=setup.dtype, **options)
    if own:
        optimizer: torch.optim.Optimizer = fxprec.optim.AdamW(
            model.parameters(), lr=setup.lr, max_norm=setup.clip, low_gradients=low, compiled=compiled
        )
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=setup.lr, fused=True)

    def loss_of(*batch: Tensor) -> Tensor:
        return model(*batch) if inside else workload.loss(model(*batch[:-1]), batch[-1])

    if whole:
        train = fxprec.capture_step(model, None if inside else workload.loss, optimizer, scaler, batches[0])
    else:
        train = loop(model, optimizer, scaler, loss_of, None if own else setup.clip)
    return Step(model, optimizer, scaler, batches, train, ready)


# -- all of them ------------------------------------------------------------------------------------------------------

_CUDA: Final[dict[str, Any]] = {"devices": ("cuda",)}
_COMPILED: Final[dict[str, Any]] = {"counted": False, "inductor": True}
_CAPTURED: Final[dict[str, Any]] = {"counted": False, "refuses": (fxprec.FxprecError,)}
_LOOPS: Final[dict[str, Any]] = {
    "devices": ("cpu",), "refuses": (fxprec.ConversionError,),
    "why": "on a GPU regions are fused in any case, but for small ones",
}  # fmt: skip
_TABLE: Final = (
    Variant("fp32", "FP32, TF32 off", partial(_peer, autocast=False)),
    Variant("fp32-tf32", "FP32 with TF32", _with_tf32, **_CUDA, why="TF32 is of NVIDIA's tensor cores"),
    Variant("autocast-foreach", "torch.autocast, AdamW(foreach=True)", partial(_peer, foreach=True)),
    Variant(BASELINE, "torch.autocast, AdamW(fused=True)", _peer),
    Variant("compile", "torch.autocast, torch.compile", partial(_peer, mode="default"), **_COMPILED),
    Variant(
        "compile-graphs", 'torch.autocast, torch.compile(mode="reduce-overhead")',
        partial(_peer, mode="reduce-overhead"), **_CUDA, **_COMPILED, why="its CUDA graphs want a CUDA device",
    ),
    Variant(
        "bfloat16", "model.bfloat16()", _low_model, dtypes=(torch.bfloat16,),
        why="weights in float16 do not train: small updates are lost, and torch's scaler refuses their gradients",
    ),
    Variant("o1", "fxprec O1, torch's AdamW(fused=True)", converted),
    Variant("o1-own", "fxprec O1, its AdamW", partial(converted, own=True)),
    Variant("o1-low", "fxprec O1, its AdamW, low gradients", partial(converted, own=True, low=True)),
    Variant(
        "o1-compiled", "fxprec O1, its AdamW(compiled=True), low gradients",
        partial(converted, own=True, low=True, compiled=True), devices=("cpu",),
        why="compiled=True is for CPUs; on a GPU the update is one kernel in any case",
    ),
    Variant(
        "o1-fused", "fxprec O1, fuse=True, its AdamW", partial(converted, own=True, fuse=True), **_LOOPS,
    ),
    Variant(
        "o1-fused-low", "fxprec O1, fuse=True, its AdamW(compiled=True), low gradients",
        partial(converted, own=True, low=True, compiled=True, fuse=True), **_LOOPS,
    ),
    Variant(
        "o1-fused-loss", "fxprec O1, fuse=True, its AdamW(compiled=True), low gradients, the loss inside",
        partial(converted, own=True, low=True, compiled=True, fuse=True, inside=True), **_LOOPS,
    ),
    Variant("o1-loss", "fxprec O1 with the loss inside, its AdamW", partial(converted, own=True, inside=True)),
    Variant("o2", "fxprec O2, torch's AdamW(fused=True)", partial(converted, level="O2")),
    Variant("o2-own", "fxprec O2, its AdamW", partial(converted, level="O2", own=True)),
    Variant(
        "o1-inductor", 'fxprec O1, executor="inductor", its AdamW',
        partial(converted, own=True, executor="inductor"), **_COMPILED,
    ),
    Variant("o1-dynamo", 'fxprec O1, capture="dynamo"', partial(converted, capture="dynamo")),
    Variant("o1-pays", 'fxprec O1, lower="pays"', partial(converted, lower="pays")),
    Variant(
        "o1-whole", "fxprec O1, whole step captured, its AdamW", partial(converted, own=True, whole=True),
        **_CAPTURED,
    ),
    Variant(
        "o1-loss-whole", "fxprec O1 with the loss inside, whole step captured, its AdamW",
        partial(converted, own=True, inside=True, whole=True), **_CAPTURED,
    ),
    Variant(
        "o2-whole", "fxprec O2, whole step captured, its AdamW", partial(converted, level="O2", own=True, whole=True),
        **_CAPTURED,
    ),
)  # fmt: skip
VARIANTS: Final[dict[str, Variant]] = {variant.name: variant for variant in _TABLE}
