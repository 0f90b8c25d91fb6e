"""Count the magnitudes of all values that a run makes: of nodes, of their backward, of what runs between the graphs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fxprec.numerics.magnitudes import Tally, all_finite, as_floats, can_count
from fxprec.scaling.gradients import local
from fxprec.tape.attribution import Attribution, NodeOf, written_by
from fxprec.tape.operation import OpOrigin
from fxprec.torch_internals import aten_foreach_copy_, aten_to_copy, current_autograd_node, storage_key, tree_leaves


@dataclass(slots=True)
class _Node:
    """State of a node while it runs.

    Attributes:
        made: storages that its ops made or wrote to.
        inputs: of each tensor that came in, whether it is finite.
        infinite: one of the numbers in its arguments is not.
    """

    made: set[int] = field(default_factory=set)
    inputs: list[Tensor] = field(default_factory=list)
    infinite: bool = False

    @property
    def sound(self) -> Tensor | None:
        """Flag on the device, true if all that came in is finite; None with an inf among arguments, or no input."""
        if self.infinite or not self.inputs:
            return None
        # Flags of several devices meet on an accelerator: moving them to the CPU would wait for it.
        device = next((each.device for each in self.inputs if each.device.type != "cpu"), self.inputs[0].device)
        return torch.stack([each.to(device) for each in self.inputs]).all()


class Counting(Attribution):
    """Dispatch mode that counts magnitudes of values, by the op or weight they belong to and by dtype.

    A node's value is counted as the node gives it. A view of what is there already has none of its own, nor has memory
    that was made and not written. In the backward, and outside of the graphs, every op's result is counted.

    Args:
        model: the one that runs, whose weights get names.

    Attributes:
        tallies: of weights, forward: their low copies; backward: their gradients.
        skipped: names of ops with results that cannot be counted: sparse ones, packed ones.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._paths = {storage_key(parameter): path for path, parameter in model.named_parameters()}
        self.tallies: dict[tuple[OpOrigin, torch.dtype], Tally] = {}
        self.skipped: set[str] = set()
        self._running: list[_Node] = []
        self._own = False
        self._weights: set[str] = set()

    def merge(self, other: Counting) -> None:
        """Add what another one counted."""
        for key, tally in other.tallies.items():
            if key in self.tallies:
                self.tallies[key].merge(tally)
            else:
                self.tallies[key] = tally
        self.skipped |= other.skipped

    def count(self, origin: OpOrigin, values: Tensor, sound: Tensor | None = None) -> None:
        """Count values that belong to somebody; ``sound``: as of ``Tally.add``."""
        values = as_floats(values.detach())
        if values.numel() == 0:
            return
        # Counting runs ops itself: they are not counted.
        self._own = True
        try:
            with torch.no_grad():
                key = origin, values.dtype
                if key not in self.tallies:
                    self.tallies[key] = Tally(values.dtype, values.device)
                self.tallies[key].add(values, sound)
        finally:
            self._own = False

    def gradient(self, path: str, gradient: Tensor) -> None:
        """Count what a parameter's gradient is when the backward is done; of a distributed one what this rank holds."""
        gradient = local(gradient)
        if gradient.layout is torch.sparse_coo:
            gradient = gradient.coalesce().values()
        if can_count(gradient):
            self.count(OpOrigin("weight", path, backward=True), gradient)
        else:
            self.skipped.add(f"the gradient of {path}")

    def begin(self, shadows: Mapping[str, Tensor]) -> None:
        """Count the low copies of weights, each once."""
        for path, shadow in shadows.items():
            self._weight(path, shadow)

    def look(self, node: NodeOf, run: Callable[[], Any]) -> Any:
        """Run a node and count what it gives, except where a checkpoint computes it a second time."""
        self._running.append(_Node())
        try:
            result = super().look(node, run)
        finally:
            own = self._running.pop()
        # With gradients on within a backward, a checkpoint recomputes its forward: those values were counted already.
        inside = current_autograd_node()
        if inside is not None and torch.is_grad_enabled():
            return result
        origin = OpOrigin("node", node.name, node.graph, backward=inside is not None, node=node.node)
        made = [each for each in tree_leaves(result) if can_count(each) and storage_key(each) in own.made]
        sound = own.sound if made else None
        for each in made:
            self.count(origin, each, sound)
        return result

    def _weight(self, path: str, low: Tensor) -> None:
        if path not in self._weights and can_count(low):
            self._weights.add(path)
            self.count(OpOrigin("weight", path), low)

    def op(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], origin: OpOrigin) -> Any:
        """Run an op, and count or note what it makes."""
        if self._own or function is aten_foreach_copy_:  # shadows that are written again: ``begin`` counts those read
            return function(*args, **kwargs)
        leaves = tree_leaves((args, kwargs))
        written = written_by(function, args, kwargs)
        before = {storage_key(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.layout is torch.strided}
        node = self._running[-1] if self._running else _Node()
        node.infinite |= any(isinstance(leaf, float) and math.isinf(leaf) for leaf in leaves)
        node.inputs += [
            all_finite(leaf)
            for leaf in leaves
            if can_count(leaf) and leaf.numel() and storage_key(leaf) not in node.made
        ]
        output = function(*args, **kwargs)
        results = [each for each in tree_leaves(output) if isinstance(each, Tensor)]
        if any(each.is_floating_point() and not can_count(each) for each in results):
            self.skipped.add(function.name())
        # Views share their input's storage: their values were counted when they were made.
        fresh = [each for each in results if can_count(each) and storage_key(each) not in before]
        if "empty" in function.name():  # nobody's values stand there yet
            fresh = []
        made = [*fresh, *(leaf for leaf in leaves if can_count(leaf) and id(leaf) in written)]
        # Within a node only its result counts, as users see it; the node's own ``look`` counts it.
        if self._running:
            node.made |= {storage_key(each) for each in made}
            return output
        path = self._paths.get(storage_key(args[0])) if function is aten_to_copy and not origin.backward else None
        for each in made:
            if path is not None:
                self._weight(path, each)
            else:
                self.count(origin, each, node.sound)
        return output
