"""Stores low-precision copies (shadows) of FP32 weights, made once and kept up to date.

A rewritten graph does not cast the weights it lowers: it reads their shadows::

    before   %weight_low: bfloat16 = to(%weight, torch.bfloat16)       one cast a weight and forward
    after    [%weight_low, ...] = store.read([%weight, ...])           one multi-tensor copy a forward

A shadow is made once (see ``entry``), and later its storage is overwritten under ``no_grad``.

Shadows are refreshed at the first read of every forward that records gradients of weights, whether or not there is a
sign that weights changed; otherwise only on one:

- ``mark_stale``, or a step of any optimizer;
- a weight's ``_version`` or address;
- one of its sampled elements (``samples``), which a collective or ``weight.data.mul_(2)`` changes and no counter shows.

A write past the counters to other elements alone needs ``refresh``.

Under FSDP there are no shadows. Its full weight exists from its block's pre-forward to its post-forward hook, at an
address that the allocator may give again. A shadow kept until the next forward would hold the whole model on every
rank, and its autograd edge would miss the block's reduction of gradients: weights are cast at each read.

Weights that an optimizer of ``fxprec.optim`` stepped are skipped without such a sign: it wrote their shadows.

A weight that changed is copied *in place on the shadow*, so that autograd reports a step taken between a forward
and its backward, as it does for the weight itself. A weight without a sign of change is copied through an alias with a
version counter of its own: two forwards before one backward (a GAN, siamese towers, recomputation) stay legal.
"""

from __future__ import annotations

import functools
import operator
import sys
import threading
import weakref
from collections.abc import Container, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, compress
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from fxprec.host_reads import capturing
from fxprec.kernels.launch.observers import ANY_MODE, SCRIPT, TRANSFORM, watcher
from fxprec.shadows.entry import Entry, is_lasting, is_traced, stale_error
from fxprec.shadows.low_gradients import refuse_ddp, widen, wish_for
from fxprec.shadows.samples import Look, Samples, look_at, note, same, samples_of
from fxprec.torch_internals import foreach_copy_, sharded_modules

_version = operator.attrgetter("_version")
_requires_grad = operator.attrgetter("requires_grad")
_shape = operator.attrgetter("shape")
_variable = operator.attrgetter("variable")
_pointer = Tensor.data_ptr


@dataclass(frozen=True, slots=True)
class CachedRead:
    """Shadows of a list of weights, and the weights' metadata when they were copied.

    Attributes:
        shadows, aliases: of each weight; an alias shares the storage of the shadow but not its version counter.
        distinct: number of different weights.
        device: of all of them; None if there are several.
        edges: AccumulateGrad nodes of the weights that require gradients.
        looks: comparisons of sampled elements, which show writes past the version counters.
    """

    shadows: list[Tensor]
    aliases: list[Tensor]
    distinct: int
    device: torch.device | None
    versions: list[int]
    pointers: list[int]
    shapes: list[torch.Size]
    requires_grad: list[bool]
    edges: list[Any]
    looks: Sequence[Look] = ()

    @classmethod
    def of(cls, weights: Sequence[Tensor], entries: Sequence[Entry], looks: Sequence[Look] = ()) -> CachedRead:
        """Return the cached read of weights whose shadows are up to date."""
        devices = {weight.device for weight in weights}
        return cls(
            [entry.shadow for entry in entries],
            [entry.alias for entry in entries],
            len({*map(id, weights)}),
            devices.pop() if len(devices) == 1 else None,
            [entry.version for entry in entries],
            [*map(_pointer, weights)],
            [*map(_shape, weights)],
            [*map(_requires_grad, weights)],
            [entry.edge for entry in entries if entry.edge is not None],
            looks,
        )

    def holds(self, weights: Sequence[Tensor]) -> bool:
        """Return whether no weight shows a change. Addresses are compared first: samples are read at them."""
        return (
            [*map(_version, weights)] == self.versions
            and [*map(_pointer, weights)] == self.pointers
            and same(self.looks)
        )

    def changed(self, weights: Sequence[Tensor]) -> bool | None:
        """Return whether all versions changed (True) or none (False).

        None if only some did, or if a shadow no longer belongs to its weight's memory, shape or autograd node.
        """
        # Lists compared by C loops: a call of Python for each weight would take longer than its copy.
        if (
            [*map(_pointer, weights)] != self.pointers
            or [*map(_shape, weights)] != self.shapes
            or [*map(_requires_grad, weights)] != self.requires_grad
            # swap_tensors exchanges what is inside two tensors: the edge then leads to the other one.
            or not all(map(operator.is_, map(_variable, self.edges), compress(weights, self.requires_grad)))
        ):
            return None
        same = [*map(operator.eq, map(_version, weights), self.versions)]
        return None if any(same) and not all(same) else not any(same)

    def note_versions(self, weights: Sequence[Tensor]) -> list[int]:
        """Take the weights' current versions as those of the shadows; return them."""
        self.versions[:] = map(_version, weights)
        return self.versions


#: Python references to a weight that only its own shadow keeps alive, as ``_living`` counts them: its list, the call
#: of ``getrefcount``, and one more: the entry's; or, of a weight with an edge, that which torch keeps to the Python
#: object while C++ (here: AccumulateGrad) holds the tensor.
_HELD_BY_SHADOW_ONLY = 3

#: Most lists of weights whose comparison is cached: those of a step, of a forward, of each piece between graph breaks.
_MOST_LOOKS = 64


class ShadowStore:
    """Shadows of one converted model.

    Parameters and other plain FP32 leaves get a persistent shadow; anything else (DTensors and other subclasses,
    non-leaves such as parametrized weights, meta, sparse or inference tensors) and every weight under a functorch
    transform or a tracer is cast at each read. A weight that is already low is returned as it is.

    What the next read does depends on these:

    =====================  ==========================  ====================  ===========================================
    state                  set by                      cleared by            the next read
    =====================  ==========================  ====================  ===========================================
    ``_entered``           ``begin``                   a recording read      copies all but the written ones, if grad
                                                                             mode is on and a weight wants a gradient,
                                                                             unless ``_held``
    ``_stale``             ``mark_stale``, a step,     a copy of all         copies all but the written ones
                           ``begin`` if ``_unseen``
    ``_written`` (ids)     an optimizer of ours        a copy, a step,       leaves these out
                           (``note_written``)          ``mark_stale``, a
                                                       sample that differs
    ``_stepped`` (ids)     a step that changed them    a copy of all,        copies these as changed: onto the shadow
                                                       ``note_written``      itself, and not through its alias
    ``_unseen`` (ids)      a weight that may be        its end               (``begin`` marks all stale)
                           written without a sign
    ``_held``              the first recording read    the end of the        copies on a sign of change: a version,
                           within ``accumulating``     block                 an address, a sample, or ``_stale``
    =====================  ==========================  ====================  ===========================================

    They change under the lock, but for single assignments, and for ``_drop``, which weakref callbacks run at any time.

    Attributes:
        dtype: dtype of the shadows.
        debug: at each ``begin`` compare shadows with their weights, and raise on a stale one: under ``no_grad`` all of
            them; with gradients, where the others are copied, those that an optimizer wrote.
        looked: how often it went through weights one by one, because something changed or might have. Callers compare
            it, to look at dtypes only then.
        refreshes: multi-tensor copies so far (the first cast of a weight does not count).
        come_and_go: FSDP manages weights of the model, which come and go with its hooks.
    """

    def __init__(self, dtype: torch.dtype, debug: bool = False) -> None:
        self.dtype = dtype
        self.debug = debug
        self.refreshes = self.looked = 0
        self.come_and_go = False
        # Ids of the living FSDP modules at the last ``begin``.
        self._sharded: tuple[int, ...] = ()
        self._entries: dict[int, Entry] = {}
        self._cached_reads: dict[tuple[int, ...], CachedRead] = {}
        # See the table above.
        self._stepped: set[int] = set()
        self._written: set[int] = set()
        self._entered = False
        self._stale = False
        self._unseen: set[int] = set()  # ``Entry.unseen``
        self._low_gradients: set[int] = set()  # ids of the weights whose gradients stay low
        self._samples: dict[torch.device, Samples] = {}
        self._looks: dict[tuple[int, ...], tuple[list[Entry], list[Look]]] = {}  # by the entries' ids
        self._accumulating = 0  # blocks of ``accumulating`` that are entered
        self._held = False
        self._lock = threading.RLock()
        _stores().add(self)

    def __reduce__(self) -> tuple[type[ShadowStore], tuple[torch.dtype, bool]]:
        """Return an empty store for copies and pickles: shadows belong to the weights of this model in this process."""
        return ShadowStore, (self.dtype, self.debug)

    def begin(self, model: torch.nn.Module | None = None) -> None:
        """Note the start of a forward of the whole model, which names weights in errors."""
        came_and_went, sharded = self.come_and_go, sharded_modules()
        if (ids := tuple(map(id, sharded))) != self._sharded:
            self._sharded, self.come_and_go = ids, model is not None and _manages_part_of(model, sharded)
        if self.come_and_go and not came_and_went:
            # Made before the model was sharded: they would keep the whole weights alive.
            self.clear()
        self._entered = True
        if self._unseen and not self._held:
            self._stale = True
        if self._low_gradients:
            refuse_ddp()
        if self.debug:
            self._check(self._written if torch.is_grad_enabled() else self._entries, model)

    def read(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """Return the low copies of ``weights``, in order."""
        if self.come_and_go:
            return [weight.to(self.dtype) for weight in weights]
        # Mostly nobody looks on at all, which torch's own functions tell; a mode alone is no trace.
        if watcher(TRANSFORM, SCRIPT, ANY_MODE) is not None and is_traced():
            self.looked += 1
            return [weight.to(self.dtype) for weight in weights]
        ids = tuple(map(id, weights))
        cached = self._cached_reads.get(ids)
        if (
            cached is not None
            and not self._stale
            and not (self._entered and torch.is_grad_enabled())
            and cached.holds(weights)
        ):
            return cached.shadows.copy()
        self.looked += 1
        # Nothing may hold an old shadow while a new one is made: its memory, and an AccumulateGrad of the old shape.
        del cached
        return self._read_slowly(weights, ids)

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
        """Return a weight's shadow without its edge, for an optimizer to write the new value to, or None."""
        return self.shadows_of([weight])[0]

    def shadows_of(self, weights: Sequence[Tensor]) -> list[Tensor | None]:
        """Return ``shadow_of`` each weight."""
        entries = map(self._entries.get, map(id, weights))
        return [
            entry.plain if entry and entry.pointer == w.data_ptr() and entry.shadow.shape == w.shape else None
            for w, entry in zip(weights, entries, strict=True)
        ]

    def knows_any(self, keys: Set[int]) -> bool:
        """Return whether a weight with one of these ids has a shadow, even one that no longer fits."""
        return not self._entries.keys().isdisjoint(keys)

    def marks_of(self, weights: Iterable[Tensor]) -> list[object]:
        """Return for each weight an object that is its shadow's own, to tell by ``is`` whether that was made anew."""
        return [*map(self._entries.get, map(id, weights))]

    def made_on(self, stream: torch.cuda.Stream | None) -> bool:
        """Return whether every shadow was made on this CUDA stream.

        A CUDA graph that is captured on another lacks the backward of the shadows' edges, which runs on theirs.
        """
        return all(entry.stream == stream for entry in [*self._entries.values()])

    def note_stepping(self, weights: Iterable[Tensor]) -> None:
        """Note that these weights are about to change: their shadows are stale until ``note_written``."""
        with self._lock:
            keys = self._entries.keys() & {*map(id, weights)}
            self._written -= keys
            self._stepped |= keys
            self._stale = True

    def note_written(self, weights: Iterable[Tensor]) -> None:
        """Note that the shadows of these weights were just written: the next forwards need not copy them."""
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
        """Accumulate gradients without a step: after the first forward inside, copy only on a sign of change."""
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
        """Drop the shadows of weights whose memory moved, which would keep the old memory alive."""
        with self._lock:
            self._drop_unfit_and_divide(self._living(), everything=False)

    def clear(self) -> None:
        """Drop every shadow; the next reads make them again. Until then gradients are as wide as the weights."""
        with self._lock:
            narrow = [entry for key in [*self._low_gradients] if (entry := self._entries.get(key)) is not None]
            widen(weight for entry in narrow if (weight := entry.weight()) is not None)
            for ids in (self._low_gradients, self._unseen, self._stepped, self._written):
                ids.clear()
            for known in (self._entries, self._cached_reads, self._samples, self._looks):
                known.clear()
            self._stale = False

    def _read_slowly(self, weights: Sequence[Tensor], ids: tuple[int, ...]) -> list[Tensor]:
        """Read by the slow path: refresh what changed or might have, make missing shadows, and cache the list."""
        with self._lock:
            recording = self._entered and torch.is_grad_enabled()
            if recording and not self._accumulating and (cached := self._cached_reads.get(ids)) is not None:
                if self._refreshed_by(cached, weights, ids):
                    self._entered = False
                    return cached.shadows.copy()
                del cached  # see ``read``
            if recording or self._stale:
                # A forward that records gradients copies all: its weights are being trained. Not a later micro-batch,
                # nor where no weight wants a gradient: there only a sign tells of a change.
                everything = recording and not self._held and any(e.requires_grad for e in [*self._entries.values()])
                self._refresh_all(everything or self._stale)
            else:
                known = [weight for weight in weights if id(weight) in self._entries]
                self._copy_changed([(weight, self._entries[id(weight)]) for weight in known], everything=False)
            if recording:
                # Only now: a thread that comes in meanwhile has to wait for the copies.
                self._entered = False
                self._held = self._accumulating > 0
            entries = [*map(self._entries.get, ids)]
            if None in entries:
                # New weights often replace old ones: let those go before memory grows.
                self._living()
                before = {*self._entries}
                entries = [*map(self._entry, weights)]
                pairs = zip(weights, entries, strict=True)
                made = {entry.key: (weight, entry) for weight, entry in pairs if entry and entry.key not in before}
                note(self._looks_at([*made.values()]) or ())
            lasting = [entry for entry in entries if entry is not None]
            looks = None
            # The list is cached unless one is cast at each read (the id of a temporary may come back as that of another
            # weight), or no look can be made now, since a CUDA graph is being captured.
            if len(lasting) == len(entries):
                distinct = {entry.key: (weight, entry) for weight, entry in zip(weights, lasting, strict=True)}
                looks = self._looks_at([*distinct.values()])
            if looks is None:
                pairs = zip(weights, entries, strict=True)
                return [weight.to(self.dtype) if entry is None else entry.shadow for weight, entry in pairs]
            cached = self._cached_reads[ids] = CachedRead.of(weights, lasting, looks)
            return cached.shadows.copy()

    def _refreshed_by(self, cached: CachedRead, weights: Sequence[Tensor], ids: tuple[int, ...]) -> bool:
        """Refresh all shadows by one cached read of all weights, and return True; do nothing, and return False, unless

        - the read's shadows still belong to the weights, and either all of these changed or none;
        - an optimizer stepped on all of them or on none;
        - it wrote the shadows of all itself, or none of them.
        """
        known = len(self._entries)
        if cached.distinct != known or cached.device is None or not any(cached.requires_grad):
            return False
        changed, stepped, written = cached.changed(weights), len(self._stepped), len(self._written)
        if changed is None or stepped not in (0, known):
            return False
        # An optimizer of ours wrote all shadows, and nothing changed since: then there is nothing to copy.
        if written and not (written == known and not changed and not stepped):
            return False
        if changed and any(self._entries[key].version != then for key, then in zip(ids, cached.versions, strict=True)):
            # Another cached read has copied these versions already. To copy in place again would raise the shadow's
            # version, and break a backward that is pending.
            return False
        if written and not same(cached.looks):
            return False
        if not written:
            for look in cached.looks:
                look.note()
            self._copy([(cached.shadows if changed or stepped else cached.aliases, weights)])
        if changed:
            for key, version in zip(ids, cached.note_versions(weights), strict=True):
                self._entries[key].version = version
        self._stepped.clear()
        self._stale = False
        return True

    def _entry(self, weight: Tensor) -> Entry | None:
        """Return the entry of a weight, made on first sight; None if the weight is cast at each read."""
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
        self._copy_changed(self._living(), everything)
        self._stepped.clear()
        self._stale = False

    def _living(self) -> list[tuple[Tensor, Entry]]:
        """Drop the entries of dead weights; return the others with their weights.

        A frozen weight that is no parameter takes its entry along when it dies (`_forget`). Others are kept alive, by
        the edge of their shadow or by their entry: one that nobody else refers to is dead.
        """
        entries = [*self._entries.values()]
        weights = [entry.weight() for entry in entries]
        counts = [*map(sys.getrefcount, weights)]
        pairs: list[tuple[Tensor, Entry]] = []
        for entry, weight, count in zip(entries, weights, counts, strict=True):
            alone = count <= _HELD_BY_SHADOW_ONLY and not isinstance(entry.weight, weakref.ref)
            # Another id: swap_tensors moved the AccumulateGrad to another tensor.
            if weight is None or id(weight) != entry.key or alone:
                self._drop(entry.key)
            else:
                pairs.append((weight, entry))
        return pairs

    def _copy_changed(self, pairs: list[tuple[Tensor, Entry]], everything: bool) -> None:
        """Copy the changed weights, or ``everything``, to their shadows; drop the shadows that no longer fit."""
        to_copy, unchanged = self._drop_unfit_and_divide(pairs, everything)
        looks = self._looks_at(unchanged)
        if looks is None or not same(looks):
            # One was written past the version counters: others may be, too, without a change in their samples.
            self._written.clear()
            to_copy, _ = self._drop_unfit_and_divide(self._living(), everything=True)
        if not to_copy:
            return
        copies: dict[torch.device, tuple[list[Tensor], list[Tensor]]] = {}
        for weight, entry, changed in to_copy:
            entry.version = weight._version
            self._written.discard(entry.key)
            targets, sources = copies.get(entry.device) or copies.setdefault(entry.device, ([], []))
            targets.append(entry.shadow if changed else entry.alias)
            sources.append(weight)
        # Noted before the copy, so that a concurrent write by another thread shows at the next look.
        note(self._looks_at([(weight, entry) for weight, entry, _ in to_copy]) or ())
        self._copy(copies.values())

    def _drop_unfit_and_divide(
        self, pairs: list[tuple[Tensor, Entry]], everything: bool
    ) -> tuple[list[tuple[Tensor, Entry, bool]], list[tuple[Tensor, Entry]]]:
        """Return the weights to copy (and which of them show a change), and the others; drop what no longer fits."""
        to_copy: list[tuple[Tensor, Entry, bool]] = []
        unchanged: list[tuple[Tensor, Entry]] = []
        stepped = self._stepped
        for weight, entry in pairs:
            changed = weight._version != entry.version or entry.key in stepped
            if not entry.fits(weight) or (changed and weight.shape != entry.shadow.shape):
                if entry.key in self._low_gradients:
                    # It may have no shadow again: model.double().
                    widen([weight])
                self._drop(entry.key)
            elif changed or (everything and entry.key not in self._written):
                to_copy.append((weight, entry, changed))
            else:
                unchanged.append((weight, entry))
        return to_copy, unchanged

    def _looks_at(self, pairs: list[tuple[Tensor, Entry]]) -> list[Look] | None:
        """Return the comparisons of these weights, whose addresses are those of their entries.

        None if they must be made and a CUDA graph is being captured.
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

    def _copy(self, copies: Iterable[tuple[list[Tensor], Sequence[Tensor]]]) -> None:
        """Copy weights to their shadows: to the shadows themselves, whose version counters then report it to autograd
        as a change, or to the aliases. For each device the targets and the weights.
        """
        try:
            with torch.no_grad():
                for targets, weights in copies:
                    foreach_copy_(targets, [*weights])
        except BaseException:
            # Some shadows are copied, and nothing tells which.
            self.clear()
            raise
        self.refreshes += 1

    def _drop(self, key: int) -> None:
        """Drop an entry, without the lock, since weakref callbacks come at any time: by single dict operations only."""
        entry = self._entries.pop(key, None)
        if entry is not None and entry.row >= 0 and (rows := self._samples.get(entry.device)) is not None:
            rows.give_back(entry.row)
        self._looks.clear()
        # Not ``_stepped``: an entry keeps its weight alive until a read or refresh drops it, which clears that set too.
        for keys in (self._written, self._low_gradients, self._unseen):
            keys.discard(key)
        for ids in [*self._cached_reads]:
            if key in ids:
                self._cached_reads.pop(ids, None)

    def _note_step(self, optimizer: Optimizer) -> None:
        # Its weights with gradients changed (fused kernels do not bump `_version`), unless the optimizer told which
        # itself. Others may have changed: an EMA is updated after a step, a wrapper copies its masters back. These are
        # copied, but count as unchanged, so that a pending backward through them stays legal.
        with self._lock:
            if not (getattr(optimizer, "writes_shadows", False) or _was_skipped(optimizer)):
                groups = (group["params"] for group in optimizer.param_groups)
                changed = {id(weight) for weight in chain.from_iterable(groups) if weight.grad is not None}
                self._stepped |= self._entries.keys() & changed
            self._stale = True

    def _check(self, keys: Container[int], model: torch.nn.Module | None) -> None:
        """Raise if one of these shadows is stale, and neither will be copied by the next read nor shows it."""
        with self._lock:
            # If ``_stale``, the next read copies all but the written ones.
            pairs = [
                (weight, entry)
                for weight, entry in self._living()
                if entry.key in keys and not (self._stale and entry.key not in self._written) and entry.fits(weight)
            ]
            if not same(self._looks_at(pairs) or ()):
                # The samples show it, so the next read refreshes.
                return
            found = [(weight, entry) for weight, entry in pairs if entry.is_stale(weight)]
        if found:
            raise stale_error([weight for weight, _ in found], self.dtype, model)


def _manages_part_of(module: torch.nn.Module, sharded: list[torch.nn.Module]) -> bool:
    """Return whether an FSDP module is in the module or around it: FSDP manages the weights of submodules too."""
    ours = {*map(id, module.modules())}
    return any(id(part) in ours for each in sharded for part in each.modules())


def _was_skipped(optimizer: Optimizer) -> bool:
    """Return whether a scaler made a fused optimizer's step change nothing; only flags on a CPU are read."""
    found: Tensor | None = getattr(optimizer, "found_inf", None)
    if found is None or found.device.type != "cpu":
        return False
    try:
        return bool(found)
    except RuntimeError:  # a recorded step has no values to read: it counts as a step
        return False


def stores() -> list[ShadowStore]:
    """Return every live store of this process."""
    return [*_stores()]


@functools.cache
def _stores() -> weakref.WeakSet[ShadowStore]:
    """Return the set of live stores; on the first call register the hook that tells them of optimizer steps.

    One hook for each store would need no set, but would be removed when its store is collected, perhaps in the middle
    of torch's loop over the hooks, which that breaks.
    """
    stores: weakref.WeakSet[ShadowStore] = weakref.WeakSet()

    def stepped(optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        # By ``list``: in a compiled step dynamo before torch 2.13 cannot unpack a WeakSet.
        for store in list(stores):
            store._note_step(optimizer)

    register_optimizer_step_post_hook(stepped)
    return stores


def _forget(store: weakref.ref[ShadowStore], key: int, _dead: weakref.ref[Tensor]) -> None:
    if (alive := store()) is not None:
        alive._drop(key)
