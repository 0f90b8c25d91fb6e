"""Which values are FP32 and which are low, so that the fewest bytes are cast: a minimum s-t cut. Pure graph theory.

S is FP32, T is low. A tensor v of cost c with users u is cast at most once to each dtype, however many users there are:
two auxiliary nodes charge each direction once::

    v --c--> a --inf--> u      v FP32 and some u low:  c
    u --inf--> b --c--> v      v low and some u FP32:  c

A closure x -> y (x in FP32 forces y) is an edge of infinite capacity, and a unary cost an edge to T (or from S).

Pins never become nodes: a tensor with a pinned end shrinks to a finite edge from S or to T. Closures are resolved before
the cut: what an FP32 pin forces becomes a pin itself, and a closure into a LOW pin is dropped, since no answer could
honour it whenever it mattered (the reader that is pinned low casts). So only finite edges touch S and T, every cut is
finite and networkx.NetworkXUnbounded cannot be raised, whatever contradictions come in. What is left falls apart at the
pins into components, which are solved one by one: one that no FP32 pin touches is low throughout, one of a single
variable is a comparison of two sums, and only the others are cut. Ties go to FP32 unless a unary cost says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Final, NamedTuple

__all__ = ["CutProblem", "Tensor", "cost_of", "solve"]

_S: Final = -1
_T: Final = -2
_FAN: Final = 8


@dataclass(frozen=True, slots=True)
class Tensor:
    """One value: the variable that makes it, those that read it, what a cast of it costs.

    ``promoters`` are the users whose kernel promotes mixed inputs itself: in FP32 they read a low value for nothing.
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


class _Edge(NamedTuple):
    tail: int
    head: int
    capacity: float


def solve(problem: CutProblem) -> list[bool]:
    """The cheapest assignment, True for FP32; the same one every time."""
    pins = dict(problem.pins)
    closures = _close(problem, pins)
    components = _Components(problem.variables)
    edges: dict[int, list[_Edge]] = {}
    auxiliary = problem.variables
    for tensor in problem.tensors:
        free = [v for v in {tensor.producer, *tensor.users} if v not in pins]
        if not free or tensor.cost <= 0:
            continue
        for other in free[1:]:
            components.union(free[0], other)
        edges.setdefault(free[0], []).extend(_tensor_edges(tensor, pins, auxiliary))
        auxiliary += 2
    for x, y in closures:
        components.union(x, y)
        edges.setdefault(x, []).append(_Edge(x, y, inf))
    for variable, cost in problem.unary.items():
        if variable not in pins and cost:
            edge = _Edge(variable, _T, cost) if cost > 0 else _Edge(_S, variable, -cost)
            edges.setdefault(variable, []).append(edge)

    grouped: dict[int, list[_Edge]] = {}
    for variable, own in edges.items():
        grouped.setdefault(components.find(variable), []).extend(own)
    full = {variable for variable, pin in pins.items() if pin}
    for component in grouped.values():
        if any(edge.tail == _S for edge in component):  # else nothing asks for FP32
            network = _Network(component)
            full |= network.reduce()
            for part in network.parts():
                full |= network.cut(part)
    return [variable in full for variable in range(problem.variables)]


def cost_of(problem: CutProblem, full: list[bool]) -> float:
    """What an assignment costs; closures that it breaks are not counted."""
    total = sum(
        (cost if full[variable] else 0) if cost > 0 else (0 if full[variable] else -cost)
        for variable, cost in problem.unary.items()
    )
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
        if pins.get(y) is None and pins.get(x) is not False:
            after.setdefault(x, []).append(y)
    reached = [variable for variable in after if pins.get(variable)]
    while reached:
        for y in after.get(reached.pop(), ()):
            if y not in pins:
                pins[y] = True
                reached.append(y)
    return [(x, y) for x, ys in after.items() if x not in pins for y in dict.fromkeys(ys) if y not in pins and y != x]


def _tensor_edges(tensor: Tensor, pins: Mapping[int, bool], auxiliary: int) -> list[_Edge]:
    producer, cost = tensor.producer, tensor.cost
    users = dict.fromkeys(user for user in tensor.users if user != producer)
    upward = [user for user in users if user not in tensor.promoters]
    edges: list[_Edge] = []
    if pins.get(producer) is not False:  # it may be FP32: does some user read low?
        tail = _S if producer in pins else producer
        readers = [user for user in users if user not in pins]
        if any(pins.get(user) is False for user in users):
            edges.append(_Edge(tail, _T, cost))
        elif len(readers) == 1:
            edges.append(_Edge(tail, readers[0], cost))
        elif readers:
            edges.append(_Edge(tail, auxiliary, cost))
            edges += [_Edge(auxiliary, user, inf) for user in readers]
    if not pins.get(producer):  # it may be low: does some user read FP32?
        head = _T if producer in pins else producer
        readers = [user for user in upward if user not in pins]
        if any(pins.get(user) for user in upward):
            edges.append(_Edge(_S, head, cost))
        elif len(readers) == 1:
            edges.append(_Edge(readers[0], head, cost))
        elif readers:
            edges.append(_Edge(auxiliary + 1, head, cost))
            edges += [_Edge(user, auxiliary + 1, inf) for user in readers]
    return [edge for edge in edges if (edge.tail, edge.head) != (_S, _T)]


class _Network:
    """One component as a flow network over its nodes; terminal edges are one signed number a node."""

    def __init__(self, edges: list[_Edge]) -> None:
        self.pull: dict[int, float] = {}  # capacity from S less capacity to T
        self.out: dict[int, dict[int, float]] = {}
        self.into: dict[int, dict[int, float]] = {}
        for tail, head, capacity in edges:
            for node in (tail, head):
                if node >= 0 and node not in self.pull:
                    self.pull[node], self.out[node], self.into[node] = 0.0, {}, {}
            if tail == _S:
                self.pull[head] += capacity
            elif head == _T:
                self.pull[tail] -= capacity
            else:
                self.out[tail][head] = self.into[head][tail] = self.out[tail].get(head, 0.0) + capacity

    def reduce(self) -> set[int]:
        """Settle every node whose own pull outweighs all its neighbours, and what that settles; the FP32 ones."""
        full: set[int] = set()
        waiting = dict.fromkeys(self.pull)
        while waiting:
            node, _ = waiting.popitem()
            pull = self.pull[node]
            if -pull >= sum(self.into[node].values()):
                low = True
            elif pull > sum(self.out[node].values()):
                low = False
                full.add(node)
            else:
                continue
            for other, capacity in self.into.pop(node).items():
                del self.out[other][node]
                waiting[other] = None
                if low:
                    self.pull[other] -= capacity
            for other, capacity in self.out.pop(node).items():
                del self.into[other][node]
                waiting[other] = None
                if not low:
                    self.pull[other] += capacity
            del self.pull[node]
        return full

    def parts(self) -> Iterator[list[int]]:
        """The connected parts of what is left."""
        seen: set[int] = set()
        for start in self.pull:
            if start in seen:
                continue
            seen.add(start)
            part = [start]
            for node in part:
                for other in (*self.out[node], *self.into[node]):
                    if other not in seen:
                        seen.add(other)
                        part.append(other)
            yield part

    def cut(self, part: list[int]) -> set[int]:
        """The FP32 side of a connected part."""
        import networkx as nx  # 0.15 s that only a conversion should pay
        from networkx.algorithms.flow import boykov_kolmogorov

        graph = nx.DiGraph()
        for node in part:
            for other, capacity in self.out[node].items():
                if capacity == inf:
                    graph.add_edge(node, other)
                else:
                    graph.add_edge(node, other, capacity=capacity)
        sources = {node: self.pull[node] for node in part if self.pull[node] > 0}
        sinks = {node: -self.pull[node] for node in part if self.pull[node] < 0}
        if not sources or not sinks:
            return set(part) if sources else set()
        _fan(graph, sources, lambda outer, node, **c: graph.add_edge(outer, node, **c), _S)
        _fan(graph, sinks, lambda outer, node, **c: graph.add_edge(node, outer, **c), _T)
        _, (full, _) = nx.minimum_cut(graph, _S, _T, flow_func=boykov_kolmogorov)
        return full


def _fan(graph, leaves: dict[int, float], link, terminal) -> None:
    """Join leaves and terminal by a tree of unlimited edges: networkx rescans a terminal's edges for every path."""
    level = {}
    for start, (node, capacity) in enumerate(leaves.items()):
        group = (terminal, 0, start // _FAN)
        link(group, node, capacity=capacity)
        level[group] = None
    depth = 0
    while len(level) > _FAN:
        depth += 1
        upper = {}
        for start, node in enumerate(level):
            group = (terminal, depth, start // _FAN)
            link(group, node)
            upper[group] = None
        level = upper
    for node in level:
        link(terminal, node)


class _Components:
    """Union-find over variables."""

    def __init__(self, size: int) -> None:
        self.parent = list(range(size))

    def find(self, x: int) -> int:
        while self.parent[x] != x:
            self.parent[x] = self.parent[self.parent[x]]
            x = self.parent[x]
        return x

    def union(self, x: int, y: int) -> None:
        x, y = self.find(x), self.find(y)
        if x != y:
            self.parent[max(x, y)] = min(x, y)
