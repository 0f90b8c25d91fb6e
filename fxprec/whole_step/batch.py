"""Check one batch: which of its parts are tensors, which graph serves it, and how it is cut into micro-batches."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxprec.torch_internals import tree_leaves


@dataclass(frozen=True, slots=True)
class Batch:
    """Positional and keyword arguments of one step, checked.

    Attributes:
        names: of the keyword arguments, which are the last of ``values``.
        values: tensors; anything else is a constant of the graph.
    """

    names: tuple[str, ...]
    values: tuple[Any, ...]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any], parts: int) -> Batch:
        """Check the arguments of a call. A dict that is the only one is a batch of keyword arguments.

        Raises:
            TypeError: no tensor; a tensor that is not plain and strided; a constant that is not hashable.
            ValueError: a tensor that wants a gradient; a first dimension that ``parts`` does not divide, or that is
                not the same for all tensors.
        """
        # ``step(batch)`` with the dict of a data loader means the same as ``step(**batch)``.
        if len(args) == 1 and not kwargs and isinstance(args[0], Mapping):
            args, kwargs = (), args[0]
        names = tuple(sorted(kwargs))  # one graph, however they are ordered
        batch = cls(names, (*args, *map(kwargs.__getitem__, names)))
        if not any(isinstance(value, Tensor) for value in batch.values):
            raise TypeError("a step takes the tensors of one batch, step(x, y), and got none")
        for where, value in batch._named():
            _check(where, value)
        if parts > 1:
            batch._check_parts(parts)
        return batch

    def key(self) -> Hashable:
        """Return a key that is equal for the batches that one graph serves."""
        # A graph is bound to strides as well: kernels were chosen by them.
        return self.names, tuple(
            (value.shape, value.stride(), value.dtype) if isinstance(value, Tensor) else (type(value), value)
            for value in self.values
        )

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and keyword arguments as they were given."""
        count = len(self.values) - len(self.names)
        return self.values[:count], dict(zip(self.names, self.values[count:], strict=True))

    def parts(self, count: int) -> list[Batch]:
        """Return ``count`` micro-batches: views, cut along dimension 0."""
        if count == 1:
            return [self]
        cut = [v.chunk(count) if isinstance(v, Tensor) else (v,) * count for v in self.values]
        return [Batch(self.names, values) for values in zip(*cut, strict=True)]

    def static(self, device: torch.device) -> Batch:
        """Copy the batch to memory of its own on ``device``, which a graph reads at every replay."""
        return Batch(self.names, tuple(_copy(v, device) if isinstance(v, Tensor) else v for v in self.values))

    def copy(self) -> Batch:
        """Copy the batch to memory of its own, where it is."""
        return Batch(self.names, tuple(_copy(v, v.device) if isinstance(v, Tensor) else v for v in self.values))

    def fill(self, other: Batch) -> None:
        """Take the values of another batch of the same key. From pinned memory nothing waits for the copies."""
        with torch.no_grad():
            for mine, given in zip(self.values, other.values, strict=True):
                if isinstance(mine, Tensor):
                    mine.copy_(given, non_blocking=True)

    def described(self) -> str:
        """Write shapes and dtypes, for messages."""
        found = [
            f"{str(v.dtype).removeprefix('torch.')}{[*v.shape]}" if isinstance(v, Tensor) else repr(v)
            for v in self.values
        ]
        first = len(found) - len(self.names)
        return ", ".join([*found[:first], *map("=".join, zip(self.names, found[first:], strict=True))])

    def _named(self) -> list[tuple[str, Any]]:
        first = len(self.values) - len(self.names)
        return [*zip((*map(str, range(first)), *self.names), self.values, strict=True)]

    def _check_parts(self, parts: int) -> None:
        sizes: dict[str, int] = {}
        for where, value in self._named():
            if isinstance(value, Tensor):
                if not value.dim():
                    raise ValueError(f"accumulate={parts}: argument {where} has no dimension to cut micro-batches from")
                sizes[where] = value.shape[0]
        # A mean over unequal parts would be no mean of the batch.
        if len({*sizes.values()}) > 1 or next(iter(sizes.values())) % parts:
            raise ValueError(
                f"accumulate={parts} cuts a batch into {parts} equal parts along dimension 0, and the sizes there are "
                f"{', '.join(f'{size} (argument {where})' for where, size in sizes.items())}"
            )


def _check(where: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        try:
            hash(value)
        except TypeError:
            constant = False
        else:  # a tuple of tensors has a hash too, another for each batch
            constant = not any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))
        if not constant:
            raise TypeError(
                f"argument {where} is a {type(value).__name__}: a step takes tensors, and hashable constants such as "
                "numbers; give the tensors within it one by one"
            )
    elif type(value) not in (Tensor, torch.nn.Parameter) or value.layout is not torch.strided:
        raise TypeError(f"argument {where} is a {type(value).__name__} of layout {value.layout}: give a strided tensor")
    elif value.requires_grad:
        raise ValueError(f"argument {where} requires a gradient, which a step has no place for: detach() it")


def _copy(value: Tensor, device: torch.device) -> Tensor:
    return torch.empty_like(value, device=device).copy_(value)
