"""Writes the shadows of the parameters that an optimizer updates in its step, instead of at the next forward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from fxprec.shadows import ShadowStore, stores
from fxprec.torch_internals import foreach_copy_


class ShadowCopies:
    """Context of a step that writes shadows; empty if no converted model reads the parameters.

    After an error the parameters count as changed, and no shadow as written.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        known = stores()
        self._owners = [*parameters] if known else []
        ids = {*map(id, self._owners)}
        self._stores = [store for store in known if store.knows_any(ids)]
        self._by_store: list[tuple[ShadowStore, list[Tensor], list[Tensor]]] = []
        for store in self._stores:
            shadows = store.shadows_of(self._owners)
            owners, fitting = self._owners, [shadow for shadow in shadows if shadow is not None]
            if len(fitting) < len(owners):  # the others have no shadow, or one that no longer fits
                store.note_stepping(p for p, shadow in zip(owners, shadows, strict=True) if shadow is None)
                owners = [p for p, shadow in zip(owners, shadows, strict=True) if shadow is not None]
            if owners:
                self._by_store.append((store, owners, fitting))
        self._in_kernel: dict[int, Tensor] = {}

    def __enter__(self) -> ShadowCopies:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._finish()
        else:
            for store in self._stores:
                store.note_stepping(self._owners)

    def for_kernel(self, parameters: Sequence[Tensor]) -> list[Tensor | None]:
        """Return one shadow of each parameter for the kernel to write; those of other models are copied at the end."""
        if not self._by_store:
            return [None] * len(parameters)
        # A kernel writes one copy: that of the first model, as there is mostly one.
        _, owners, shadows = self._by_store[0]
        known = dict(zip(map(id, owners), shadows, strict=True))
        chosen = [known.get(id(p)) for p in parameters]
        self._in_kernel.update(
            (id(p), shadow) for p, shadow in zip(parameters, chosen, strict=True) if shadow is not None
        )
        return chosen

    def _finish(self) -> None:
        """Copy the shadows that no kernel wrote, and tell the stores."""
        for store, owners, shadows in self._by_store:
            written = [s for p, s in zip(owners, shadows, strict=True) if self._in_kernel.get(id(p)) is s]
            targets, sources = shadows, owners
            if written:
                copies = [(s, p) for p, s in zip(owners, shadows, strict=True) if self._in_kernel.get(id(p)) is not s]
                targets, sources = [s for s, _ in copies], [p for _, p in copies]
            if targets:
                foreach_copy_(targets, sources)
            if written:  # autograd reports a step between forward and backward by it, and a kernel bumps none
                torch.autograd.graph.increment_version(written)
            store.note_written(owners)
