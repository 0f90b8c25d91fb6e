"""What runs on real tensors while a forward is traced: it would be a constant of the graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from fxprec.torch_internals import OpMode, tree_leaves


class RealTensorOps(OpMode):
    """Lets constants be made (``torch.arange(n)``), and declines before a weight is read or written, or a number drawn.

    Attributes:
        made: the tensors made while tracing, by id.
    """

    def __init__(self, decline: Callable[[str], NoReturn]) -> None:
        super().__init__()
        self._decline = decline
        self.made: dict[int, Tensor] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._decline(f"draws random numbers while tracing ({func})")
        if func is not torch.ops.aten.lift_fresh.default:  # this one brings in a tensor made of Python numbers
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, Tensor) and id(leaf) not in self.made:
                    self._decline(f"computes with the values of a tensor while tracing ({func})")
        result = func(*args, **kwargs)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.made[id(leaf)] = leaf
        return result
