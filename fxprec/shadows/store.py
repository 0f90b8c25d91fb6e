"""Low-precision copies of FP32 weights, made once and kept up to date.

A rewritten graph does not cast the weights it lowers: it reads their shadows::

    before   %weight_low: bfloat16 = to(%weight, torch.bfloat16)       one cast a weight and forward
    after    [%weight_low, ...] = store.read([%weight, ...])           one multi-tensor copy a forward

A shadow is made once (see ``entry``), and later its storage is overwritten under ``no_grad``.

When: at the first read of every forward that records gradients, whatever else is known; otherwise only when something
says that weights changed: ``mark_stale``, a step of any optimizer, a weight's ``_version`` or address, or one of its
sampled elements (``samples``), which a collective or ``weight.data.mul_(2)`` changes and no counter shows. A write past
the counters to other elements alone wants ``refresh``.

Under FSDP there are none. Its full weight exists from its block's pre-forward to its post-forward hook, at an address
that the allocator may give again. A shadow kept until the next forward would hold the whole model on every rank, and
its autograd edge would miss the block's reduction of gradients: weights are cast at each read.

Weights that an optimizer of ``fxprec.optim`` stepped are skipped while all of these stay: it wrote their shadows.

How: a weight that changed is copied *in place on the shadow*, so that autograd reports a step taken between a forward
and its backward, as it does for the weight itself. A weight without a sign of change is copied through an alias with a
version counter of its own: two forwards before one backward (a GAN, siamese towers, recomputation) stay legal.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from fxprec.scaling.cuda_graphs import capturing
from fxprec.shadows.entry import Entry, is_lasting, is_traced, stale
from fxprec.shadows.low_gradients import refuse_ddp, widen, wish_for
from fxprec.shadows.plan import Plan
from fxprec.shadows.samples import Look, Samples, look_at, note, same, samples_of
from fxprec.torch_internals import foreach_copy_, sharded_modules

#: Python references to a weight that only its own shadow keeps alive, as `_living` counts them: the list, the call of
#: `getrefcount`, and the entry's, or the one that torch holds while C++ (here: AccumulateGrad) refers to the tensor.
_HELD_BY_SHADOW_ONLY = 3

#: Lists of weights whose comparison is kept ready: those of a step, of a forward, of each piece between graph breaks.
_MOST_LOOKS = 64


class ShadowStore:
    """The shadows of one converted model.

    Parameters and other plain FP32 leaves get a persistent shadow; anything else (DTensors and other subclasses,
    non-leaves such as parametrized weights, meta, sparse or inference tensors) and every weight under a functorch
    transform or a tracer is cast afresh. A weight that is already low is handed back.

    Attributes:
        dtype: dtype of the shadows.
        debug: under ``no_grad`` compare every shadow with its weight at each ``begin``, and raise on a stale one.
        looked: how often it went through weights one by one, since something changed, or might have.
        refreshes: multi-tensor copies so far (the first cast of a weight is none).
        come_and_go: FSDP manages weights of the model.
    """

    def __init__(self, dtype: torch.dtype, debug: bool = False) -> None:
        self.dtype = dtype
        self.debug = debug
        self.refreshes = self.looked = 0
        self.come_and_go = False
        self._sharded: tuple[int, ...] = ()  # the living FSDP modules when it was last asked
        self._entries: dict[int, Entry] = {}
        self._plans: dict[tuple[int, ...], Plan] = {}
        self._stepped: set[int] = set()
        self._written: set[int] = set()  # by the optimizer, in its step
        self._entered = False  # a forward began and no recording read has refreshed it yet
        self._stale = False
        self._low_gradients: set[int] = set()  # of these shadows
        self._unseen: set[int] = set()  # these weights may be written without a sign (``Entry.unseen``)
        self._samples: dict[torch.device, Samples] = {}
        self._looks: dict[tuple[int, ...], tuple[list[Entry], list[Look]]] = {}  # by the entries' ids
        self._accumulating = 0
        self._held = False  # the first micro-batch was refreshed
        self._lock = threading.RLock()
        _stores().add(self)

    def __reduce__(self) -> tuple[type[ShadowStore], tuple[torch.dtype, bool]]:
        """Copies and pickles are empty: shadows belong to the weights of this model in this process."""
        return ShadowStore, (self.dtype, self.debug)

    def begin(self, model: torch.nn.Module | None = None) -> None:
        """Note the start of a forward of the whole model, which names weights in errors."""
        came_and_went, sharded = self.come_and_go, sharded_modules()
        if (ids := tuple(map(id, sharded))) != self._sharded:
            self._sharded, self.come_and_go = ids, model is not None and _manages_part_of(model, sharded)
        if self.come_and_go and not came_and_went:
            self.clear()  # made before the model was sharded: they would keep the whole weights alive
        self._entered = True
        if self._unseen and not self._held:
            self._stale = True
        if self._low_gradients:
            refuse_ddp()
        if self.debug:
            self._check(self._written if torch.is_grad_enabled() else self._entries, model)

    def read(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """The low copies of ``weights``, in order."""
        if self.come_and_go:
            return [weight.to(self.dtype) for weight in weights]
        if is_traced():
            self.looked += 1
            return [weight.to(self.dtype) for weight in weights]
        ids = tuple(map(id, weights))
        plan = self._plans.get(ids)
        if (
            plan is not None
            and not self._stale
            and not (self._entered and torch.is_grad_enabled())
            and plan.holds(weights)
        ):
            return plan.shadows.copy()
        self.looked += 1
        # Nothing may hold an old shadow while a new one is made: its memory, and an AccumulateGrad of the old shape.
        del plan
        return self._settle(weights, ids)

    def refresh(self) -> None:
        """Copy every weight to its shadow now."""
        with self._lock:
            self._written.clear()
            self._refresh_all(everything=True)

    def mark_stale(self) -> None:
        """Refresh at the next read, also under ``no_grad``."""
        self._written.clear()
        self._stale = True

    def shadow_of(self, weight: Tensor) -> Tensor | None:
        """The shadow of a weight without its edge, for an optimizer to write, as low precision of its new value."""
        return self.shadows_of([weight])[0]

    def shadows_of(self, weights: Sequence[Tensor]) -> list[Tensor | None]:
        """``shadow_of`` each."""
        entries = map(self._entries.get, map(id, weights))
        return [
            entry.plain if entry and entry.pointer == w.data_ptr() and entry.shadow.shape == w.shape else None
            for w, entry in zip(weights, entries, strict=True)
        ]

    def knows_any(self, keys: Set[int]) -> bool:
        """Whether one of the weights with these ids has a shadow, even one that does not fit it now."""
        return not self._entries.keys().isdisjoint(keys)

    def marks_of(self, weights: Iterable[Tensor]) -> list[object]:
        """For each weight an object that is there for as long as its shadow is, or None."""
        return [*map(self._entries.get, map(id, weights))]

    def made_on(self, stream: torch.cuda.Stream | None) -> bool:
        """Whether every shadow was made on this CUDA stream: else a graph captured there cannot hold its backward."""
        return all(entry.stream == stream for entry in [*self._entries.values()])

    def note_stepping(self, weights: Iterable[Tensor]) -> None:
        """They are about to change: until ``note_written`` says otherwise, their shadows are stale."""
        with self._lock:
            keys = self._entries.keys() & {*map(id, weights)}
            self._written -= keys
            self._stepped |= keys
            self._stale = True

    def note_written(self, weights: Iterable[Tensor]) -> None:
        """Their shadows were just written: the next forwards need not copy them."""
        written: list[tuple[Tensor, Entry]] = []
        with self._lock:
            for weight in weights:
                if (entry := self._entries.get(id(weight))) is not None:
                    entry.version = weight._version
                    if not entry.unseen:
                        self._written.add(entry.key)
                        written.append((weight, entry))
                    self._stepped.discard(entry.key)
            note(self._looks_at(written) or ())

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Between optimizer steps: after the first forward inside, copy only what shows a sign of change."""
        self._accumulating += 1
        try:
            yield
        finally:
            self._accumulating -= 1
            self._held = self._held and self._accumulating > 0

    def forget(self, weights: Iterable[Tensor]) -> None:
        """Drop the shadows of these weights; the next reads make them again."""
        for weight in weights:
            self._drop(id(weight))

    def forget_moved(self) -> None:
        """Drop the shadows of weights that lie elsewhere by now, and with them what keeps their old memory."""
        with self._lock:
            self._divided(self._living(), everything=False)

    def clear(self) -> None:
        """Drop every shadow; the next reads make them again. Until then gradients are as wide as the weights."""
        with self._lock:
            narrow = [entry for key in [*self._low_gradients] if (entry := self._entries.get(key)) is not None]
            widen(weight for entry in narrow if (weight := entry.weight()) is not None)
            for known in (
                self._low_gradients,
                self._unseen,
                self._entries,
                self._plans,
                self._samples,
                self._looks,
                self._stepped,
                self._written,
            ):
                known.clear()
            self._stale = False

    def _settle(self, weights: Sequence[Tensor], ids: tuple[int, ...]) -> list[Tensor]:
        """``read`` when something changed, or might have."""
        with self._lock:
            recording = self._entered and torch.is_grad_enabled()
            if recording and not self._accumulating and (plan := self._plans.get(ids)) is not None:
                if self._refreshed_by(plan, weights, ids):
                    self._entered = False
                    return plan.shadows.copy()
                del plan  # see ``read``
            if recording or self._stale:
                everything = recording and not self._held and any(e.requires_grad for e in [*self._entries.values()])
                self._refresh_all(everything or self._stale)
            else:
                known = [weight for weight in weights if id(weight) in self._entries]
                self._sync([(weight, self._entries[id(weight)]) for weight in known], everything=False)
            if recording:
                # Only now: a thread that comes in meanwhile has to wait for the copies.
                self._entered = False
                self._held = self._accumulating > 0
            entries = [*map(self._entries.get, ids)]
            if None in entries:
                self._living()  # new weights often replace old ones: let those go before memory grows
                before = {*self._entries}
                entries = [*map(self._entry, weights)]
                pairs = zip(weights, entries, strict=True)
                made = {entry.key: (weight, entry) for weight, entry in pairs if entry and entry.key not in before}
                note(self._looks_at([*made.values()]) or ())
            lasting = [entry for entry in entries if entry is not None]
            distinct = {entry.key: (weight, entry) for weight, entry in zip(weights, lasting, strict=False)}
            looks = self._looks_at([*distinct.values()]) if len(lasting) == len(entries) else None
            if looks is None:
                # No plan: the id of a temporary may come back as that of a weight.
                pairs = zip(weights, entries, strict=True)
                return [weight.to(self.dtype) if entry is None else entry.shadow for weight, entry in pairs]
            plan = self._plans[ids] = Plan.of(weights, lasting, looks)
            return plan.shadows.copy()

    def _refreshed_by(self, plan: Plan, weights: Sequence[Tensor], ids: tuple[int, ...]) -> bool:
        """Refresh everything by one plan: the usual case, a step of the optimizer on all weights and no other change.

        False, and nothing was done: something else is the case.
        """
        known = len(self._entries)
        if plan.distinct != known or plan.device is None or not any(plan.requires_grad) or not plan.fits(weights):
            return False
        changed, stepped, written = plan.changed(weights), len(self._stepped), len(self._written)
        if changed is None or stepped not in (0, known) or written not in (0, 0 if changed or stepped else known):
            return False
        if changed and any(self._entries[key].version != then for key, then in zip(ids, plan.versions, strict=True)):
            return False  # copied since, by another plan: a copy that autograd sees would spoil a pending backward
        if written and not same(plan.looks):
            return False
        if not written:
            note(plan.looks)
            self._copy(lambda: plan.copy(weights, changed=changed or stepped > 0))
        if changed:
            for key, version in zip(ids, plan.note_versions(weights), strict=True):
                self._entries[key].version = version
        self._stepped.clear()
        self._stale = False
        return True

    def _entry(self, weight: Tensor) -> Entry | None:
        """The entry of a weight, made on first sight; None where it is to be cast afresh."""
        key = id(weight)
        if key in self._entries or not is_lasting(weight):
            return self._entries.get(key)
        wish = wish_for(weight)
        forget = functools.partial(_forget, weakref.ref(self), key)
        entry = Entry.of(weight, self.dtype, wish, forget, samples_of(weight))
        if wish is not None:
            self._low_gradients.add(key)
        if entry.unseen:
            self._unseen.add(key)
        else:
            rows = self._samples.get(entry.device) or self._samples.setdefault(entry.device, Samples(entry.device))
            entry.row = rows.take_row()
        self._entries[key] = entry
        return entry

    def _refresh_all(self, everything: bool) -> None:
        self._sync(self._living(), everything)
        self._stepped.clear()
        self._stale = False

    def _living(self) -> list[tuple[Tensor, Entry]]:
        """Weights and their entries, after letting go of dead weights.

        A frozen weight that is no parameter takes its entry along when it dies (`_forget`). Others are kept alive, by
        the edge of their shadow or by their entry: one that nobody else refers to is dead.
        """
        entries = [*self._entries.values()]
        weights = [entry.weight() for entry in entries]
        counts = [*map(sys.getrefcount, weights)]
        pairs: list[tuple[Tensor, Entry]] = []
        for entry, weight, count in zip(entries, weights, counts, strict=True):
            alone = count <= _HELD_BY_SHADOW_ONLY and not isinstance(entry.weight, weakref.ref)
            # An edge that leads to another tensor by now: swap_tensors gave the weight another inside.
            if weight is None or id(weight) != entry.key or alone:
                self._drop(entry.key)
            else:
                pairs.append((weight, entry))
        return pairs

    def _sync(self, pairs: list[tuple[Tensor, Entry]], everything: bool) -> None:
        """Copy the changed weights, or ``everything``, to their shadows; drop the shadows that no longer fit."""
        moving, resting = self._divided(pairs, everything)
        looks = self._looks_at(resting)
        if looks is None or not same(looks):
            # Written past the version counters, and so may others be in whose samples it does not show.
            self._written.clear()
            moving, _ = self._divided(self._living(), everything=True)
        if not moving:
            return
        copies: dict[torch.device, tuple[list[Tensor], list[Tensor]]] = {}
        for weight, entry, changed in moving:
            entry.version = weight._version
            self._written.discard(entry.key)
            targets, sources = copies.get(entry.device) or copies.setdefault(entry.device, ([], []))
            targets.append(entry.shadow if changed else entry.alias)
            sources.append(weight)
        # Before the copy: a write by another thread meanwhile shows at the next look.
        note(self._looks_at([(weight, entry) for weight, entry, _ in moving]) or ())
        self._copy(lambda: [foreach_copy_(*lists) for lists in copies.values()])

    def _divided(
        self, pairs: list[tuple[Tensor, Entry]], everything: bool
    ) -> tuple[list[tuple[Tensor, Entry, bool]], list[tuple[Tensor, Entry]]]:
        """Return the weights to copy (and which of them show a change), and the others; drop what no longer fits."""
        moving: list[tuple[Tensor, Entry, bool]] = []
        resting: list[tuple[Tensor, Entry]] = []
        stepped = self._stepped
        for weight, entry in pairs:
            changed = weight._version != entry.version or entry.key in stepped
            if not entry.fits(weight) or (changed and weight.shape != entry.shadow.shape):
                if entry.key in self._low_gradients:
                    widen([weight])  # it may have no shadow again: model.double()
                self._drop(entry.key)
            elif changed or (everything and entry.key not in self._written):
                moving.append((weight, entry, changed))
            else:
                resting.append((weight, entry))
        return moving, resting

    def _looks_at(self, pairs: list[tuple[Tensor, Entry]]) -> list[Look] | None:
        """Return the comparisons of these weights, which lie where their entries say.

        None: they are not made yet, and cannot be while a CUDA graph is captured.
        """
        key = tuple([id(entry) for _, entry in pairs])
        if (known := self._looks.get(key)) is not None:
            return known[1]
        by_device: dict[torch.device, list[tuple[Tensor, Entry]]] = {}
        for weight, entry in pairs:
            if entry.row >= 0:
                by_device.setdefault(entry.device, []).append((weight, entry))
        if any(map(capturing, by_device)):
            return None
        looks = [look_at(self._samples[device], of_device) for device, of_device in by_device.items()]
        if len(self._looks) >= _MOST_LOOKS:
            self._looks.clear()
        self._looks[key] = [entry for _, entry in pairs], looks
        return looks

    def _copy(self, copy: Callable[[], object]) -> None:
        try:
            with torch.no_grad():
                copy()
        except BaseException:
            self.clear()  # half copied, and the keys say otherwise
            raise
        self.refreshes += 1

    def _drop(self, key: int) -> None:
        """Without the lock, since weakref callbacks come at any time: single dict operations only."""
        entry = self._entries.pop(key, None)
        if entry is not None and entry.row >= 0 and (rows := self._samples.get(entry.device)) is not None:
            rows.give_back(entry.row)
        self._looks.clear()
        for keys in (self._written, self._low_gradients, self._unseen):
            keys.discard(key)
        for ids in [*self._plans]:
            if key in ids:
                self._plans.pop(ids, None)

    def _note_step(self, optimizer: Optimizer) -> None:
        # Its weights that have gradients changed (fused kernels do not bump `_version`), unless it told by itself
        # which. Others may have: an EMA is updated after a step, a wrapper copies its masters back; they are copied,
        # but count as unchanged, so that a backward that waits for them goes on.
        with self._lock:
            if not (getattr(optimizer, "writes_shadows", False) or _was_skipped(optimizer)):
                groups = (group["params"] for group in optimizer.param_groups)
                changed = {id(weight) for weight in chain.from_iterable(groups) if weight.grad is not None}
                self._stepped |= self._entries.keys() & changed
            self._stale = True

    def _check(self, keys: Container[int], model: torch.nn.Module | None) -> None:
        with self._lock:
            pairs = [
                (weight, entry)
                for weight, entry in self._living()
                if entry.key in keys and not (self._stale and entry.key not in self._written) and entry.fits(weight)
            ]
            if not same(self._looks_at(pairs) or ()):
                return  # the next read sees it too
            found = [(weight, entry) for weight, entry in pairs if entry.is_stale(weight)]
        if found:
            raise stale([weight for weight, _ in found], self.dtype, model)


def _manages_part_of(module: torch.nn.Module, sharded: list[torch.nn.Module]) -> bool:
    """Whether one of them is in the module, or around it: FSDP manages the weights of submodules too."""
    ours = {*map(id, module.modules())}
    return any(id(part) in ours for each in sharded for part in each.modules())


def _was_skipped(optimizer: Optimizer) -> bool:
    """Whether a scaler told a fused optimizer, whose step runs all the same, to change nothing. CPUs are asked."""
    found: Tensor | None = getattr(optimizer, "found_inf", None)
    if found is None or found.device.type != "cpu":
        return False
    try:
        return bool(found)
    except RuntimeError:  # while a step is recorded, no number can be asked for: it counts as a step
        return False


def stores() -> list[ShadowStore]:
    """Every live store of this process."""
    return [*_stores()]


@functools.cache
def _stores() -> weakref.WeakSet[ShadowStore]:
    """Every live store, told of steps by one hook that is registered with the first of them.

    A hook of its own for each store would need no set, but would be removed when its store is collected, perhaps in
    the middle of torch's loop over the hooks, which that breaks.
    """
    stores: weakref.WeakSet[ShadowStore] = weakref.WeakSet()

    def stepped(optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        for store in list(stores):  # dynamo before torch 2.13 cannot unpack it, in a compiled step
            store._note_step(optimizer)

    register_optimizer_step_post_hook(stepped)
    return stores


def _forget(store: weakref.ref[ShadowStore], key: int, _dead: weakref.ref[Tensor]) -> None:
    if (alive := store()) is not None:
        alive._drop(key)
