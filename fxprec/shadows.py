"""Low-precision copies of FP32 weights, made once and kept up to date.

A rewritten graph does not cast the weights it lowers: it reads their shadows::

    before   %weight_low: bfloat16 = to(%weight, torch.bfloat16)       one cast a weight and forward
    after    [%weight_low, ...] = store.read([%weight, ...])           one multi-tensor copy a forward

A shadow is ``weight.to(dtype)`` made once with its autograd edge: the backward of the cast saves nothing, so that one
edge can be walked at every step, and each weight keeps its own AccumulateGrad (hooks and DDP see nothing new). Later
its storage is overwritten under ``no_grad``.

When: at the first read of every forward that records gradients, whatever the keys say (``weight.data.mul_(2)`` changes
none of them); otherwise only when something says that weights changed: ``mark_stale``, a step of any optimizer, or a
weight's ``_version`` or address. What no key shows under ``no_grad`` (writes through ``.data``) wants ``refresh``.

How: a weight that changed is copied *in place on the shadow*, so that autograd reports a step taken between a forward
and its backward, as it does for the weight itself. A weight without a sign of change is copied through an alias with a
version counter of its own: two forwards before one backward (a GAN, siamese towers, recomputation) stay legal.
"""

from __future__ import annotations

import functools
import operator
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from fxprec.errors import FxprecError

__all__ = ["ShadowStore", "StaleShadowError"]

_version = operator.attrgetter("_version")
_pointer = Tensor.data_ptr

#: Modes under which a persistent tensor would enter a trace as a constant, or be made fake.
_TRACING_MODES = (
    torch._C._TorchDispatchModeKey.FAKE,
    torch._C._TorchDispatchModeKey.PROXY,
    torch._C._TorchDispatchModeKey.FUNCTIONAL,
)

#: Python references to a weight that only its own shadow keeps alive, as `_living` counts them: the list, the call of
#: `getrefcount`, and the one that torch holds while C++ (here: AccumulateGrad) refers to the tensor.
_HELD_BY_SHADOW_ONLY = 3


class StaleShadowError(FxprecError, RuntimeError):
    """A weight was written in a way that nothing shows, and a forward under ``no_grad`` would have read the old value."""


@dataclass(slots=True, eq=False)
class _Entry:
    """One shadow. ``alias`` shares its storage, not its version counter; the rest is the key it was last copied under."""

    weight: weakref.ref[Tensor]
    shadow: Tensor
    alias: Tensor
    device: torch.device
    requires_grad: bool
    version: int
    pointer: int


@dataclass(frozen=True, slots=True)
class _Plan:
    """The answer to one ``read``, good for as long as the keys of its weights are these."""

    shadows: list[Tensor]
    versions: list[int]
    pointers: list[int]


class ShadowStore:
    """The shadows of one converted model.

    Parameters and other plain FP32 leaves get a persistent shadow; anything else (DTensors and other subclasses,
    non-leaves such as parametrized weights, meta, sparse or inference tensors) and every weight under a functorch
    transform or a tracer is cast afresh. A weight that is already low is handed back.

    Attributes:
        dtype: dtype of the shadows.
        debug: under ``no_grad`` compare every shadow with its weight at each ``begin``, and raise on a stale one.
        refreshes: multi-tensor copies so far (the first cast of a weight is none).
    """

    def __init__(self, dtype: torch.dtype, debug: bool = False) -> None:
        self.dtype = dtype
        self.debug = debug
        self.refreshes = 0
        self._entries: dict[int, _Entry] = {}
        self._plans: dict[tuple[int, ...], _Plan] = {}
        self._stepped: set[int] = set()
        self._entered = False  # a forward began and no recording read has refreshed it yet
        self._stale = False
        self._accumulating = 0
        self._held = False  # the first micro-batch was refreshed
        self._lock = threading.RLock()
        _stores().add(self)

    def __reduce__(self) -> tuple[type[ShadowStore], tuple[torch.dtype, bool]]:
        """Copies and pickles are empty: shadows belong to the weights of this model in this process."""
        return ShadowStore, (self.dtype, self.debug)

    def begin(self) -> None:
        """Note the start of a forward of the whole model."""
        self._entered = True
        if self.debug and not torch.is_grad_enabled():
            self._check()

    def read(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """The low copies of ``weights``, in order."""
        if _is_traced():
            return [weight.to(self.dtype) for weight in weights]
        plan = self._plans.get(tuple(map(id, weights)))
        if (
            plan is None
            or self._stale
            or (self._entered and torch.is_grad_enabled())
            or [*map(_version, weights)] != plan.versions
            or [*map(_pointer, weights)] != plan.pointers
        ):
            return self._settle(weights)
        return plan.shadows.copy()

    def refresh(self) -> None:
        """Copy every weight to its shadow now."""
        with self._lock:
            self._refresh_all(every=True)

    def mark_stale(self) -> None:
        """Refresh at the next read, also under ``no_grad``."""
        self._stale = True

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Between optimizer steps: after the first forward inside, copy only what shows a sign of change."""
        self._accumulating += 1
        try:
            yield
        finally:
            self._accumulating -= 1
            self._held = self._held and self._accumulating > 0

    def clear(self) -> None:
        """Drop every shadow; the next reads make them again."""
        with self._lock:
            self._entries.clear()
            self._plans.clear()
            self._stepped.clear()
            self._stale = False

    def _settle(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """``read`` when something changed, or might have."""
        with self._lock:
            recording = self._entered and torch.is_grad_enabled()
            if recording or self._stale:
                copies = recording and not self._held and any(e.requires_grad for e in [*self._entries.values()])
                self._refresh_all(every=copies or self._stale)
            if recording:
                # Only now: a thread that came in meanwhile has to wait for the copies.
                self._entered = False
                self._held = self._accumulating > 0
            self._sync([(weight, entry) for weight in weights if (entry := self._entries.get(id(weight)))], every=False)
            if any(_is_lasting(weight) and id(weight) not in self._entries for weight in weights):
                self._living()  # new weights often replace old ones: let those go before memory grows
            entries = [self._entry(weight) for weight in weights]
            shadows = [
                weight.to(self.dtype) if entry is None else entry.shadow
                for weight, entry in zip(weights, entries, strict=True)
            ]
            # A plan may hold lasting shadows only: an id that a temporary leaves behind can come back as a weight.
            lasting = [entry for entry in entries if entry is not None]
            if len(lasting) == len(entries):
                self._plans[tuple(map(id, weights))] = _Plan(
                    shadows.copy(), [entry.version for entry in lasting], [entry.pointer for entry in lasting]
                )
            return shadows

    def _entry(self, weight: Tensor) -> _Entry | None:
        """The entry of a weight, made on first sight; None where it is to be cast afresh."""
        entry = self._entries.get(id(weight))
        if entry is not None or not _is_lasting(weight):
            return entry
        # Whatever mode is on now, the shadow outlives it: made here under inference_mode or no_grad it could never
        # give a gradient.
        with torch.inference_mode(False), torch.enable_grad():
            shadow = weight.to(self.dtype)
        reference = weakref.ref(weight, functools.partial(_forget, weakref.ref(self), id(weight)))
        entry = _Entry(
            reference, shadow, shadow.data, weight.device, weight.requires_grad, weight._version, weight.data_ptr()
        )
        self._entries[id(weight)] = entry
        return entry

    def _refresh_all(self, every: bool) -> None:
        self._sync(self._living(), every)
        self._stepped.clear()
        self._stale = False

    def _living(self) -> list[tuple[Tensor, _Entry]]:
        """Weights and entries. A frozen weight takes its entry along when it dies (`_forget`), but the edge of a
        shadow keeps its weight alive: weights that nobody else refers to are let go here."""
        items = [*self._entries.items()]
        weights = [entry.weight() for _, entry in items]
        references = [*map(sys.getrefcount, weights)]
        pairs: list[tuple[Tensor, _Entry]] = []
        for (key, entry), weight, count in zip(items, weights, references, strict=True):
            if weight is None or (entry.requires_grad and count <= _HELD_BY_SHADOW_ONLY):
                self._drop(key)
            else:
                pairs.append((weight, entry))
        return pairs

    def _sync(self, pairs: Iterable[tuple[Tensor, _Entry]], every: bool) -> None:
        """Copy the changed weights (or ``every`` weight) to their shadows, and drop the shadows that no longer fit."""
        copies: dict[torch.device, tuple[list[Tensor], list[Tensor]]] = {}
        for weight, entry in pairs:
            key, version = id(weight), weight._version
            changed = version != entry.version or key in self._stepped
            if (
                weight.data_ptr() != entry.pointer
                or weight.requires_grad is not entry.requires_grad
                or (changed and weight.shape != entry.shadow.shape)
            ):
                self._drop(key)
            elif changed or every:
                entry.version = version
                targets, sources = copies.get(entry.device) or copies.setdefault(entry.device, ([], []))
                targets.append(entry.shadow if changed else entry.alias)
                sources.append(weight)
        if not copies:
            return
        try:
            with torch.no_grad():
                for targets, sources in copies.values():
                    torch._foreach_copy_(targets, sources)
        except BaseException:
            self.clear()  # half copied, and the keys say otherwise
            raise
        self.refreshes += 1

    def _drop(self, key: int) -> None:
        """Without the lock, since weakref callbacks come at any time: single dict operations only."""
        self._entries.pop(key, None)
        for ids in [*self._plans]:
            if key in ids:
                self._plans.pop(ids, None)

    def _note_step(self, optimizer: Optimizer) -> None:
        # The optimizer's own weights changed (fused kernels do not bump `_version`). Others may have: an EMA is
        # updated after a step, a wrapper copies its masters back; they are copied, but count as unchanged.
        with self._lock:
            for group in optimizer.param_groups:
                self._stepped.update(key for key in map(id, group["params"]) if key in self._entries)
            self._stale = True

    def _check(self) -> None:
        with self._lock:
            for weight, entry in [] if self._stale else self._living():
                if weight._version != entry.version or weight.data_ptr() != entry.pointer:
                    continue
                if not torch.equal(weight.detach().to(self.dtype).view(torch.int16), entry.alias.view(torch.int16)):
                    raise StaleShadowError(
                        f"the {self.dtype} shadow of a weight of shape {tuple(weight.shape)} on {entry.device} is stale: "
                        "the weight was written through .data (or by a kernel that bumps no version) since the last "
                        "forward that recorded gradients. Call fxprec.refresh(model) after such a write."
                    )


@functools.cache
def _stores() -> weakref.WeakSet[ShadowStore]:
    """Every live store, told of steps by one hook that is registered with the first of them.

    A hook of its own for each store would need no set, but would be removed when its store is collected, perhaps in
    the middle of torch's loop over the hooks, which that breaks.
    """
    stores: weakref.WeakSet[ShadowStore] = weakref.WeakSet()

    def stepped(optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        for store in list(stores):
            store._note_step(optimizer)

    register_optimizer_step_post_hook(stepped)
    return stores


def _forget(store: weakref.ref[ShadowStore], key: int, reference: weakref.ref[Tensor]) -> None:
    alive = store()
    if alive is not None and (entry := alive._entries.get(key)) is not None and entry.weight is reference:
        alive._drop(key)


def _is_lasting(weight: Tensor) -> bool:
    """Whether a weight can have a persistent shadow. An address of 0: meta, empty, or freed by a sharding wrapper."""
    return (
        type(weight) in (torch.nn.Parameter, Tensor)
        and weight.dtype is torch.float32
        and weight.is_leaf
        and weight.layout is torch.strided
        and not weight.is_inference()
        and weight.data_ptr() != 0
    )


def _is_traced() -> bool:
    """Whether a functorch transform or a tracer is running: what is made or read now must not outlive it."""
    return (
        torch._C._functorch.maybe_current_level() is not None
        or torch._C._get_tracing_state() is not None
        or (
            torch._C._len_torch_dispatch_stack() > 0
            and any(torch._C._get_dispatch_mode(mode) is not None for mode in _TRACING_MODES)
        )
    )
