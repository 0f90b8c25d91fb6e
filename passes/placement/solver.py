"""Find which values are FP32 and which are low, so that least is cast: a minimum s-t cut. Pure graph theory.

S is FP32, T is low. A tensor v of cost c with users u is cast at most once to each dtype, however many users there are:
two auxiliary nodes charge each direction once::

    v --c--> a --inf--> u      v FP32 and some u low:  c
    u --inf--> b --c--> v      v low and some u FP32:  c

A closure x -> y (x in FP32 forces y to be) is an edge of infinite capacity, and a unary cost an edge to T (or from S).

Pins never become nodes: a tensor with a pinned end shrinks to a finite edge from S or to T. Closures are resolved
before the cut: what an FP32 pin forces becomes a pin itself, and a closure x -> y into a low pin y is dropped: x may be
FP32 all the same, and y's op casts what it reads. So only finite edges touch S and T, every cut is
finite, and networkx.NetworkXUnbounded cannot be raised, whatever contradictions come in.

What is left is solved in three steps, of which the first two are linear and settle almost everything in real graphs:

1. a node whose own pull towards one side is at least what all its neighbours could pull it the other way is settled,
   and pulls at its neighbours in turn;
2. the rest falls apart into connected parts; one that nothing pulls towards FP32 is low;
3. the others are cut by networkx, one by one.

Ties are broken the same way every time, mostly to low; a unary cost decides them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Final, NamedTuple

_S: Final = -1
_T: Final = -2


class Tensor(NamedTuple):
    """Value of the cut problem: the variable that makes it, those that read it, what a cast of it costs.

    ``promoters`` are the users whose kernel promotes mixed inputs itself: in FP32 they read a low value at no cost.
    """

    producer: int
    users: tuple[int, ...]
    cost: float
    promoters: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class CutProblem:
    """Variables 0..n-1, each FP32 or low.

    Attributes:
        variables: how many there are.
        pins: variables that are decided: True is FP32.
        tensors: what casts would cost.
        closures: (x, y): where x is FP32, y is too.
        unary: cost of a variable in FP32; a negative one is the cost of being low.
    """

    variables: int
    pins: Mapping[int, bool]
    tensors: tuple[Tensor, ...]
    closures: tuple[tuple[int, int], ...] = ()
    unary: Mapping[int, float] = field(default_factory=dict)


def solve(problem: CutProblem) -> list[bool]:
    """Return the cheapest assignment, True for FP32; the same one every time."""
    pins = dict(problem.pins)
    # Closures first: what they pin shrinks tensors to edges of finite capacity, and the network with them.
    closures = _close(problem, pins)
    network = _Network()
    for position, tensor in enumerate(problem.tensors):
        if tensor.cost > 0 and any(variable not in pins for variable in (tensor.producer, *tensor.users)):
            _charge(network, tensor, pins, problem.variables + 2 * position)
    for x, y in closures:
        network.add(x, y, inf)
    # A cost of FP32 pulls towards low, and the other way round.
    for variable, cost in problem.unary.items():
        if variable not in pins:
            network.add(*((variable, _T, cost) if cost > 0 else (_S, variable, -cost)))
    full = {variable for variable, pin in pins.items() if pin} | network.reduce()
    for part in network.parts():
        full |= network.cut(part)
    return [variable in full for variable in range(problem.variables)]


def cost_of(problem: CutProblem, full: list[bool]) -> float:
    """Return the cost of an assignment; closures that it breaks are not counted."""
    total = sum(abs(cost) for variable, cost in problem.unary.items() if full[variable] is (cost > 0))
    for tensor in problem.tensors:
        if full[tensor.producer]:
            casts = any(not full[user] for user in tensor.users)
        else:
            casts = any(full[user] for user in tensor.users if user not in tensor.promoters)
        total += tensor.cost if casts else 0
    return total


def _close(problem: CutProblem, pins: dict[int, bool]) -> list[tuple[int, int]]:
    """Pin what FP32 pins force; hand back the closures that still bind, all between free variables."""
    after: dict[int, list[int]] = {}
    for x, y in problem.closures:
        after.setdefault(x, []).append(y)
    reached = [variable for variable in after if pins.get(variable)]
    while reached:
        for y in after.get(reached.pop(), ()):
            if y not in pins:
                pins[y] = True
                reached.append(y)
    return [(x, y) for x, ys in after.items() if x not in pins for y in dict.fromkeys(ys) if y not in pins and y != x]


def _charge(network: _Network, tensor: Tensor, pins: Mapping[int, bool], auxiliary: int) -> None:
    """Add the edges of one tensor; ``auxiliary`` and the next number are free for its two nodes."""
    producer, cost = tensor.producer, tensor.cost
    users = [user for user in dict.fromkeys(tensor.users) if user != producer]
    wide = [user for user in users if user not in tensor.promoters]
    for full, readers in ((True, users), (False, wide)):  # where it is FP32 and a user reads low; the other way around
        if pins.get(producer) is (not full):
            continue
        here, there = (_S, _T) if full else (_T, _S)
        end = here if producer in pins else producer
        free = [reader for reader in readers if reader not in pins]
        # A pinned reader wants the cast whatever the free ones are; a single free one needs no auxiliary node.
        if any(pins.get(reader) is (not full) for reader in readers):
            network.join(end, there, cost, full)
        elif len(free) == 1:
            network.join(end, free[0], cost, full)
        elif free:
            network.join(end, auxiliary + (not full), cost, full)
            for reader in free:
                network.join(auxiliary + (not full), reader, inf, full)


class _Network:
    """A flow network between S and T; the edges of a node from S and to T are one signed number, its pull to FP32."""

    def __init__(self) -> None:
        self.pull: dict[int, float] = {}
        self.out: dict[int, dict[int, float]] = {}
        self.into: dict[int, dict[int, float]] = {}

    def add(self, tail: int, head: int, capacity: float) -> None:
        for node in (tail, head):
            if node >= 0 and node not in self.pull:
                self.pull[node], self.out[node], self.into[node] = 0, {}, {}
        if tail >= 0 and head >= 0:
            self.out[tail][head] = self.into[head][tail] = self.out[tail].get(head, 0) + capacity
        elif head >= 0:
            self.pull[head] += capacity
        elif tail >= 0:
            self.pull[tail] -= capacity

    def join(self, here: int, there: int, capacity: float, forwards: bool) -> None:
        """Add an edge in one direction or the other."""
        self.add(*((here, there) if forwards else (there, here)), capacity)

    def reduce(self) -> set[int]:
        """Settle and remove nodes whose own pull outweighs all their neighbours; the FP32 ones."""
        full: set[int] = set()
        # A dict is a stack without duplicates: a neighbour of what was settled is looked at once more, soon.
        waiting = dict.fromkeys(self.pull)
        while waiting:
            node, _ = waiting.popitem()
            pull = self.pull[node]
            # What neighbours could pull it to FP32 by are the edges into it, to low those out of it.
            low = -pull >= sum(self.into[node].values())
            if not low and pull <= sum(self.out[node].values()):
                continue
            if not low:
                full.add(node)
            for other, capacity in self.into.pop(node).items():
                del self.out[other][node]
                self.pull[other] -= capacity if low else 0
                waiting[other] = None
            for other, capacity in self.out.pop(node).items():
                del self.into[other][node]
                self.pull[other] += 0 if low else capacity
                waiting[other] = None
            del self.pull[node]
        return full

    def parts(self) -> Iterator[list[int]]:
        """Return the connected parts of what is left."""
        seen: set[int] = set()
        for start in self.pull:
            if start in seen:
                continue
            seen.add(start)
            part = [start]
            for node in part:
                found = [other for other in (*self.out[node], *self.into[node]) if other not in seen]
                seen.update(found)
                part += dict.fromkeys(found)
            yield part

    def cut(self, part: list[int]) -> set[int]:
        """Return the FP32 side of a connected part."""
        sources = {node: self.pull[node] for node in part if self.pull[node] > 0}
        sinks = {node: -self.pull[node] for node in part if self.pull[node] < 0}
        if not sources:
            return set()
        if not sinks:
            return set(part)
        import networkx as nx  # 0.15 s that only a conversion should pay
        from networkx.algorithms.flow import boykov_kolmogorov

        graph = nx.DiGraph()
        for node in part:
            for other, capacity in self.out[node].items():
                graph.add_edge(node, other, capacity=capacity)
        graph.add_weighted_edges_from(((_S, node, pull) for node, pull in sources.items()), weight="capacity")
        graph.add_weighted_edges_from(((node, _T, pull) for node, pull in sinks.items()), weight="capacity")
        _, (full, _) = nx.minimum_cut(graph, _S, _T, flow_func=boykov_kolmogorov)
        return full
