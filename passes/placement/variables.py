"""The variables, pins and costs that ``mincut`` collects on its walk, and the cut problem made of them.

A variable is a dtype to be found: FP32 or low. Values point to variables, so that a view of written memory, the parts
of a tuple and the placeholder of a called body have the variable of what they come from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import torch
from torch.fx import Node

from fxprec.passes.costs.op_costs import ByteCosts, OpCosts
from fxprec.passes.dtypes.promotion import is_zero_dim
from fxprec.passes.fusion.row_operations import is_row_operation
from fxprec.passes.graph.annotations import notes
from fxprec.passes.graph.subgraphs import attribute_of
from fxprec.passes.graph.text import dtype_name
from fxprec.passes.placement.sites import Site, assumed_original
from fxprec.passes.placement.solver import CutProblem, Tensor

#: The two variables that stand for the dtypes themselves (numbers, as all variables are).
FP32: Final = 0
LOW: Final = 1


class Variables:
    """Variables of one conversion; graphs and the bodies they call share them.

    Attributes:
        value: float value -> variable.
        arrives: values that the cut takes for low although they arrive wider (inputs at O2) -> their variable.
        does_not_widen: values that make nobody FP32: sources at O2.
        declined: 'node: reason' for every pin that another one overruled.
        absorbs: whether a cast beside a row operation is free, since a fused kernel makes it: so at O2, where values
            between kernels are wanted low, and where ops and casts have prices.
    """

    def __init__(self, low: torch.dtype, absorbs: bool = False, costs: OpCosts | None = None) -> None:
        """Start without variables. ``costs``: of casts and traffic; None: their bytes."""
        self.low = low
        self.absorbs = absorbs
        self._costs = costs
        self.value: dict[Node, int] = {}
        self.arrives: dict[Node, int] = {}
        self.does_not_widen: set[Node] = set()
        self.declined: list[str] = []
        self._dtypes: dict[int, torch.dtype] = {FP32: torch.float32, LOW: low}  # of what is pinned
        self._constants: dict[torch.dtype, int] = {torch.float32: FP32, low: LOW}
        self._count = 2
        self._makers: dict[int, Node] = {}
        self._prices: dict[int, float] = {}
        self._caller_value: dict[Node, Node] = {}
        # Value -> variable in whose dtype it is read -> whether each such reader widens it at no cost.
        self._users: dict[Node, dict[int, bool]] = {}
        self._node_of_weight: dict[int, Node] = {}
        self._casts_behind: list[tuple[Node, int, int]] = []
        self._closures: list[tuple[int, int]] = []

    def new(self, maker: Node | None = None) -> int:
        """Return a free variable; ``maker``: the node that writes its value, for its share of traffic."""
        self._count += 1
        if maker is not None:
            self._makers[self._count - 1] = maker
        return self._count - 1

    def priced(self, more: float) -> int:
        """Return the free variable of an op that costs this much more in FP32 than low (negative: less)."""
        variable = self.new()
        self._prices[variable] = more
        return variable

    def pin(self, dtype: torch.dtype) -> int:
        """Return the variable of a dtype; one that is neither FP32 nor low is on the FP32 side of the cut."""
        if dtype not in self._constants:
            variable = self._constants[dtype] = self.new()
            self._dtypes[variable] = dtype
        return self._constants[dtype]

    def dtype_of(self, variable: int) -> torch.dtype | None:
        """Return the dtype that a pinned variable stands for; None where the cut is to find it."""
        return self._dtypes.get(variable)

    def pin_shared(self, node: Node, variable: int, dtype: torch.dtype) -> None:
        """Pin a variable that several nodes share. FP32 beats low."""
        have = self._dtypes.get(variable)
        # The variables FP32 and LOW, and those of other dtypes, are everybody's, and never change. One of a value that
        # was pinned to low may still become FP32.
        if have is None or (have is self.low and variable != LOW):
            self._dtypes[variable] = dtype
        elif have is not dtype and dtype is not self.low:
            self.declined.append(f"{node.name}: wants {dtype_name(dtype)}, shares memory that is {dtype_name(have)}")

    def share_dtype(self, node: Node, source: Node) -> None:
        """Give a value the variable of another: the same memory, or no place for a cast between them."""
        if source not in self.value:
            return
        self.value[node] = self.value[source]
        if source in self.arrives:
            self.arrives[node] = self.arrives[source]
        if source in self.does_not_widen:
            self.does_not_widen.add(node)

    def share_with_operand(self, placeholder: Node, operand: Node) -> None:
        """Give a placeholder of a called body the caller's value, and what that costs: a weight has a shadow."""
        self.share_dtype(placeholder, operand)
        self._caller_value[placeholder] = self._caller_value.get(operand, operand)

    def arriving(self, node: Node) -> int:
        """Return the variable of the dtype that a value has when it arrives."""
        return self.arrives.get(node, self.value[node])

    def read(self, source: Node, variable: int, promotes: bool = False) -> None:
        """Note a reader: an op that wants ``source`` in the dtype of ``variable``.

        Args:
            promotes: its kernel widens a low value at no cost where the variable is FP32.
        """
        if source in self.value:
            # It reads at no cost only if each call that reads the value in this dtype does.
            known = self._users.setdefault(self.same(source), {})
            known[variable] = known.get(variable, True) and promotes

    def read_original(self, sources: Iterable[Node]) -> None:
        """Note a reader that wants each of these in its original dtype."""
        for source in sources:
            if source in self.value:
                self.read(source, self.pin(assumed_original(notes(source).dtype)))

    def read_data(self, site: Site, variable: int) -> None:
        """Note a call that reads its data in the dtype of ``variable``, and its other floats in their original ones."""
        # If one operand is known to be FP32 before the cut, a kernel that promotes widens the others as it reads them.
        wide = site.facts.native_promotion and any(
            self.value.get(source) == FP32 and self._widens(source) for source in site.data
        )
        free = wide or (self.absorbs and is_row_operation(site.node))
        for source in site.data:
            self.read(source, variable, free)
            if isinstance(notes(source).dtype, tuple) and source in self.value:  # nobody can cast a tuple
                self._closures += [(self.value[source], variable), (variable, self.value[source])]
        self.read_original(site.kept)

    def add_cast_behind(self, node: Node, producer: int, user: int) -> None:
        """Allow a cast right behind a node, before anyone reads it: from one variable's dtype to the other's."""
        self._casts_behind.append((node, producer, user))

    def widen_with(self, wide: Iterable[int], variable: int) -> None:
        """Constrain the variable to be FP32 where one of these is."""
        self._closures += [(each, variable) for each in wide]

    def promoting(self, site: Site) -> list[int]:
        """Return the inputs that make an op FP32: the dimensioned ones, or the 0-dim ones among themselves."""
        # As in torch's promotion: a 0-dim tensor does not widen one with dimensions.
        known = [source for source in site.data if source in self.value]
        scalars = all(self._is_scalar(source) for source in site.data)
        return [self.value[source] for source in known if scalars or self._widens(source)]

    def _widens(self, source: Node) -> bool:
        return source not in self.does_not_widen and not self._is_scalar(source)

    def _is_scalar(self, source: Node) -> bool:
        return is_zero_dim(self._caller_value.get(source, source))

    def is_read(self, source: Node, variable: int) -> bool:
        """Return whether anybody reads a value in the dtype of this variable."""
        return variable in self._users.get(self.same(source), {})

    def problem(self) -> CutProblem:
        # A body's placeholder costs what the caller's value costs (``_caller_value``): of a weight there is one shadow.
        costs = self._costs or ByteCosts(self._users, self.absorbs)
        tensors = [
            Tensor(
                self.value[node],
                tuple(users),
                self._cast(costs, node),
                frozenset([user for user, free in users.items() if free]),
            )
            for node, users in self._users.items()
        ]
        tensors += [Tensor(producer, (user,), self._cast(costs, node)) for node, producer, user in self._casts_behind]
        unary = {variable: costs.traffic(self._caller_value.get(node, node)) for variable, node in self._makers.items()}
        pins = {variable: dtype is not self.low for variable, dtype in self._dtypes.items()}
        return CutProblem(self._count, pins, tuple(tensors), tuple(self._closures), unary | self._prices)

    def casts_around(self, full: list[bool]) -> Callable[[Node, int, Iterable[Node]], tuple[float, float]]:
        """Return a function that tells, of (op, its variable, its sources), the cost of its own casts in FP32, and low.

        All others are as the cut has left them. A cast that another reader needs anyway costs the op nothing.
        """
        costs = self._costs or ByteCosts(self._users, self.absorbs)
        wide_readers = {node: sum(full[reader] for reader in users) for node, users in self._users.items()}

        def others(source: Node, own: int) -> tuple[int, int]:
            """Count the other readers of a value: those that are FP32, and those that are low."""
            users = self._users.get(source, {})
            wide = wide_readers.get(source, 0)
            low = len(users) - wide
            return (wide - (own in users and full[own]), low - (own in users and not full[own]))

        def casts(node: Node, own: int, sources: Iterable[Node]) -> tuple[float, float]:
            wide_others, low_others = others(node, own)
            wide = self._cast(costs, node) * (low_others > 0)
            low = self._cast(costs, node) * (wide_others > 0)
            for source in dict.fromkeys(source for source in sources if source in self.value):
                arrives_full = full[self.value[source]]
                if others(self.same(source), own)[arrives_full]:
                    continue  # somebody else pays for that cast
                if arrives_full:
                    low += self._cast(costs, source)
                else:
                    wide += self._cast(costs, source)
            return wide, low

        return casts

    def dtypes(self, full: list[bool]) -> dict[int | None, torch.dtype | None]:
        """Map each variable to its dtype, after the cut; None, which is no variable, to None."""
        found = {each: torch.float32 if is_full else self.low for each, is_full in enumerate(full)}
        return {None: None, **found, **self._dtypes}

    def _cast(self, costs: ByteCosts | OpCosts, node: Node) -> float:
        return costs.cast(self._caller_value.get(node, node))

    def same(self, source: Node) -> Node:
        """Return the node whose readers count as the value's: a weight has one shadow, whatever node fetches it."""
        fetched = self._caller_value.get(source, source)
        if self._costs is None or fetched.op != "get_attr" or notes(fetched).kind != "parameter":
            return source
        weight = attribute_of(fetched)
        return source if weight is None else self._node_of_weight.setdefault(id(weight), source)
