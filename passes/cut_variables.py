"""The variables, pins and costs that ``placement_mincut`` collects on its walk, and the cut problem made of them.

A variable is a dtype to be found: FP32 or low. Values point to variables, so that a view of written memory, the parts
of a tuple and the placeholder of a called body have the variable of what they come from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import torch
from torch.fx import Node

from fxprec.passes.fusion.row_operations import is_row_operation
from fxprec.passes.ir import dtype_name, is_scalar
from fxprec.passes.mincut import CutProblem, Tensor
from fxprec.passes.sites import Site, original

__all__ = ["FP32", "LOW", "Variables"]

FP32: Final = 0
LOW: Final = 1
_CAST_BYTES: Final = 6  # read four and write two, or the reverse
_CAST_CALL: Final = 16384  # bytes that move in the time one more call takes: of equal bytes, fewer casts are cheaper
_FP32_TRAFFIC: Final = 1 / 64  # of a cast's bytes: it breaks ties
_FUSED_TRAFFIC: Final = 2 / 3  # where kernels cast for nothing, what FP32 costs is the bytes it is wider: two each way


class Variables:
    """Variables of one conversion; graphs and the bodies they call share them.

    Attributes:
        value: float value -> variable.
        arrives: values that the cut takes for low although they arrive wider (inputs at O2) -> their variable.
        unpromoting: values that make nobody FP32: sources at O2.
        declined: 'node: reason' for every pin that another one overruled.
        absorbs: fused kernels cast what they read for nothing, and the level wants low values between them (O2).
    """

    def __init__(self, low: torch.dtype, absorbs: bool = False) -> None:
        self.low = low
        self.absorbs = absorbs
        self.value: dict[Node, int] = {}
        self.arrives: dict[Node, int] = {}
        self.unpromoting: set[Node] = set()
        self.declined: list[str] = []
        self._pins: dict[int, bool] = {FP32: True, LOW: False}
        self._dtypes: dict[int, torch.dtype] = {FP32: torch.float32, LOW: low}
        self._constants: dict[torch.dtype, int] = {torch.float32: FP32, low: LOW}
        self._count = 2
        self._makers: dict[int, Node] = {}
        self._origin: dict[Node, Node] = {}
        self._users: dict[Node, dict[int, bool]] = {}
        self._steps: list[tuple[Node, int, int]] = []
        self._closures: list[tuple[int, int]] = []

    def new(self, maker: Node | None = None) -> int:
        """A free variable; ``maker``: the node that writes its value, for its share of traffic."""
        self._count += 1
        if maker is not None:
            self._makers[self._count - 1] = maker
        return self._count - 1

    def pin(self, dtype: torch.dtype) -> int:
        """The variable that stands for a dtype; one that is neither FP32 nor low is on the FP32 side of the cut."""
        if dtype not in self._constants:
            variable = self._constants[dtype] = self.new()
            self._pins[variable], self._dtypes[variable] = True, dtype
        return self._constants[dtype]

    def is_pinned(self, variable: int) -> bool:
        return variable in self._pins

    def hold(self, node: Node, variable: int, dtype: torch.dtype) -> None:
        """Pin a variable that several nodes share. FP32 beats low; what stands for a dtype keeps it."""
        have = self._dtypes.get(variable)
        if have is None or (have is self.low and variable != LOW):
            self._pins[variable], self._dtypes[variable] = dtype is not self.low, dtype
        elif have is not dtype and dtype is not self.low:
            self.declined.append(f"{node.name}: wants {dtype_name(dtype)}, shares memory that is {dtype_name(have)}")

    def tie(self, node: Node, source: Node) -> None:
        """Give a value the variable of another: the same memory, or no place for a cast between them."""
        if source not in self.value:
            return
        self.value[node] = self.value[source]
        if source in self.arrives:
            self.arrives[node] = self.arrives[source]
        if source in self.unpromoting:
            self.unpromoting.add(node)

    def tie_operand(self, placeholder: Node, operand: Node) -> None:
        """The placeholder of a called body is the caller's value."""
        self.tie(placeholder, operand)
        self._origin[placeholder] = operand

    def arriving(self, node: Node) -> int:
        """The variable of the dtype that a value has when it arrives."""
        return self.arrives.get(node, self.value[node])

    def use(self, source: Node, variable: int, promotes: bool = False) -> None:
        """``promotes``: the reader's kernel takes a low value for nothing where it is to be FP32."""
        if source in self.value:
            known = self._users.setdefault(source, {})
            known[variable] = known.get(variable, True) and promotes

    def use_original(self, sources: Iterable[Node]) -> None:
        for source in sources:
            if source in self.value:
                self.use(source, self.pin(original(source.meta["dtype"])))

    def use_data(self, site: Site, variable: int) -> None:
        """All float arguments of a site: data in the variable's dtype, the others in their original one."""
        wide = site.promotes and any(self.value.get(source) == FP32 and self._widens(source) for source in site.data)
        free = wide or (self.absorbs and is_row_operation(site.node))
        for source in site.data:
            self.use(source, variable, free)
            if isinstance(source.meta.get("dtype"), tuple) and source in self.value:  # nobody can cast a tuple
                self._closures += [(self.value[source], variable), (variable, self.value[source])]
        self.use_original(site.kept)

    def step(self, node: Node, producer: int, user: int) -> None:
        """A cast that may stand right behind a node, before anyone reads it."""
        self._steps.append((node, producer, user))

    def close(self, wide: Iterable[int], variable: int) -> None:
        """Where one of these is FP32, so is the variable."""
        self._closures += [(each, variable) for each in wide]

    def promoting(self, site: Site) -> list[int]:
        """The inputs that make an op FP32: the dimensioned ones, or the 0-dim ones among themselves."""
        known = [source for source in site.data if source in self.value]
        scalars = all(self._is_scalar(source) for source in site.data)
        return [self.value[source] for source in known if scalars or self._widens(source)]

    def _widens(self, source: Node) -> bool:
        return source not in self.unpromoting and not self._is_scalar(source)

    def _is_scalar(self, source: Node) -> bool:
        return is_scalar(self._origin.get(source, source))

    def problem(self) -> CutProblem:
        moved = self._bytes()

        def cost(node: Node) -> float:
            return _CAST_CALL + moved(node) if moved(node) else 0.0

        tensors = [
            Tensor(self.value[node], tuple(users), cost(node), frozenset(v for v, free in users.items() if free))
            for node, users in self._users.items()
        ]
        tensors += [Tensor(producer, (user,), cost(node)) for node, producer, user in self._steps]
        traffic = _FUSED_TRAFFIC if self.absorbs else _FP32_TRAFFIC
        unary = {variable: moved(node) * traffic for variable, node in self._makers.items()}
        return CutProblem(self._count, self._pins, tuple(tensors), tuple(self._closures), unary)

    def dtypes(self, full: list[bool]) -> Callable[[int | None], torch.dtype | None]:
        """Variable -> dtype, after the cut."""

        def dtype(variable: int | None) -> torch.dtype | None:
            if variable is None:
                return None
            return self._dtypes.get(variable) or (torch.float32 if full[variable] else self.low)

        return dtype

    def _bytes(self) -> Callable[[Node], float]:
        """Node -> bytes that a cast of its value moves. Parameters move none: their shadow is there already."""
        known = [count for node in self._users if (count := _elements(node)) is not None]
        typical = sum(known) / len(known) if known else 1.0

        def moved(node: Node) -> float:
            maker = self._origin.get(node, node)
            if maker.op == "get_attr" and maker.meta.get("kind") == "parameter":
                return 0.0
            count = _elements(node)
            return _CAST_BYTES * (typical if count is None else count)

        return moved


def _elements(node: Node) -> int | None:
    count = node.meta.get("numel")
    if isinstance(count, tuple):
        return sum(each for each in count if isinstance(each, int))
    return count if isinstance(count, int) else None
