"""placement="mincut": turn a graph into a cut problem, solve it, and read every node's dtypes from the answer.

One variable an op that follows or promotes; one for the data port and the output of a norm whose kernel reads and
writes low; one for the input of a sum. LOW and FULL ops, sources, user casts and outputs are pins. ``decide`` says what
the levels pin; ``pins`` what safety and memory do.

An FP32 input makes an op FP32 (a closure of the cut). Two kinds of ops are excepted: one that only moves or drops
values and has none but low readers (the cast may then stand before it, where the tensor is smaller), and one whose FP32
operand is 0-dim, which does not promote in torch either.

``lower="pays"`` asks which LOW ops stay FP32, because on this device lowering them takes longer than it saves: the same
cut with time in place of bytes, and one free variable more for each LOW op of known sizes (what it takes longer in
FP32, or less long). Casts take their time, weights that of their shadows. So two products in a row may be lowered
together that alone would each lose::

    %linear    4 us in FP32, 2 us low
    %relu
    %linear_1  4 us in FP32, 2 us low       a cast takes 1.5 us: one of them lowered 2 + 2 * 1.5 > 4,
                                            both 2 * 2 + 2 * 1.5 < 2 * 4

Only the verdict on LOW ops is kept. Where all of them pay, the graph is that of ``lower="always"``. Safety stays as it
is. What an override of the user's lowers is lowered, whatever it costs, and so are ops of unknown size or cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node

from fxprec.kernels.launch.operands import LOW_DTYPES
from fxprec.passes.context import Context
from fxprec.passes.graph.annotations import NON_TENSOR, UNKNOWN, Rule, module_path, notes
from fxprec.passes.graph.text import dtype_name
from fxprec.passes.ops.aliases import written_by
from fxprec.passes.ops.names import cast_target, dtype_argument
from fxprec.passes.placement.contractions import ELEMENTWISE, is_elementwise
from fxprec.passes.placement.op_costs import OpCosts, Price, Verdict
from fxprec.passes.placement.origins import COUNTS, Origins
from fxprec.passes.placement.pins import (
    commutes_with_rounding,
    exp_chains,
    overflowing_square,
    rounded_to_integer,
    stalls,
    unsafe_number,
    written_classes,
)
from fxprec.passes.placement.saturation import saturating_chains, spared
from fxprec.passes.placement.sites import (
    Site,
    assumed_original,
    base_of,
    dtype_reference,
    names_dtype,
    precision_of,
)
from fxprec.passes.placement.solver import solve
from fxprec.passes.placement.variables import FP32, LOW, Variables
from fxprec.passes.placement.walk import GraphWalk
from fxprec.passes.torch_internals import is_higher_order


class _Decided(NamedTuple):
    """Facts of a node that are known before the cut: the variables of what it reads and puts out."""

    read: int | None
    out: int | None
    rule: Rule
    why: str
    site: Site | None = None


def place_by_cut(gm: GraphModule, context: Context, verdict: Verdict | None = None) -> list[str]:
    """Annotate ``meta["precision"]`` in the graph and the bodies it calls; 'node: reason' where a pin was overruled.

    ``verdict``: LOW ops that stay FP32 all the same.
    """
    walk = CutWalk(context, verdict)
    walk.run(gm)
    walk.widen_unless_read_low()
    _annotate(walk, walk.variables.dtypes(solve(walk.variables.problem())))
    return walk.variables.declined


class CutWalk(GraphWalk):
    """Collects the cut problem; ``variables`` holds it."""

    def __init__(self, context: Context, verdict: Verdict | None = None) -> None:
        super().__init__(context)
        self.verdict = verdict or Verdict()
        priced = self.verdict.costs is not None
        absorbs = context.casts_fuse if priced else context.regions == "triton" and context.policy.lowers_sources
        self.variables = Variables(context.low, absorbs, self.verdict.costs)
        self.decided: dict[Node, _Decided] = {}
        self.commuting: dict[Node, list[int]] = {}  # ops that commute with rounding -> their inputs
        self.roots: list[Node] = []  # ops behind which a cast may stand
        self.chains: set[Node] = set()
        self.squares: set[Node] = set()  # what low memory cannot hold
        self.origins = Origins()
        self.saturated: dict[Node, str] = {}
        self.near_poles: set[Node] = set()
        self.cast_as: dict[Node, set[Node | None]] = {}  # root of written memory -> whose dtype casts of it name
        self.digits: dict[Node, str] = {}  # calls that name another tensor's dtype, and give FP32 all the same -> why

    def enter(self, graph: Graph, returns: bool) -> None:
        self.classes |= written_classes(graph)
        for cast in (node for node in self.classes if notes(node).op.name == "to"):
            if cast_target(cast) is torch.float32 or dtype_reference(cast) is not None:
                self.cast_as.setdefault(self.classes[cast], set()).add(dtype_reference(cast))
        self.chains |= exp_chains(graph)
        self.origins.enter(graph, self.operands)
        lowers_poles = self.context.policy.lowers_parameters
        chains = saturating_chains(graph, returns and not lowers_poles, self.context.low)
        self.saturated |= {} if lowers_poles else chains
        self.near_poles |= chains.keys()

    def has(self, node: Node) -> bool:
        return node in self.variables.value

    def is_wide(self, node: Node) -> bool:
        return self.variables.value[node] == FP32

    def assign_dtype(self, node: Node, dtype: torch.dtype, source: bool = False) -> None:
        variables = self.variables
        base = base_of(node)
        if self.classes.get(node, node) is not node and self.has(base):  # a cast that gives the very tensor it takes
            variables.pin_shared(node, variables.value[base], dtype)
            variables.share_dtype(node, base)
            return
        variables.value[node] = variables.pin(dtype)
        if source and self.context.policy.lowers_sources:
            variables.does_not_widen.add(node)

    def assign_dtype_of(self, node: Node, reference: Node) -> None:
        self.variables.value[node] = self.variables.arriving(reference)

    def share_dtype(self, node: Node, whole: Node) -> None:
        self.variables.share_dtype(node, whole)
        self.commuting[node] = []

    def bind_operand(self, placeholder: Node, operand: Node) -> None:
        self.variables.share_with_operand(placeholder, operand)
        self.commuting[placeholder] = []

    def read_by_user_cast(self, node: Node, source: Node) -> None:
        self.variables.read(source, self.variables.arriving(node))

    def want_original(self, sources: Iterable[Node]) -> None:
        self.variables.read_original(sources)

    def input(self, node: Node) -> None:
        self.source(node, "an input")
        variables = self.variables
        if self.verdict.costs is not None:  # prices say whether it is worth its cast
            return
        if node in variables.does_not_widen and node not in self.classes:
            variables.arrives[node], variables.value[node] = variables.value[node], LOW

    def output(self, node: Node, returns: Rule) -> None:
        for source in node.all_input_nodes if returns is Rule.KEEP else ():
            if self.has(source) and isinstance(notes(source).dtype, tuple):  # nobody can cast a tuple on its way out
                self.variables.pin_shared(source, self.variables.value[source], assumed_original(notes(source).dtype))
        super().output(node, returns)

    def compute(self, site: Site, floats: bool) -> None:
        if self.classes.get(site.node, site.node) is not site.node and self.has(site.base):
            self.view_of_written(site, floats)
        elif self.classes and not set(site.data).isdisjoint(written_by(site.node)):
            self.keep(site, floats)
        else:
            site = spared(site, self.near_poles)
            square = overflowing_square(site, self.context)
            if square is not None:
                self.squares.add(site.node)
                site = site._replace(rule=Rule.FULL, why=square)
            elif site.rule is Rule.LOW and site.is_as_in_table:
                if self.origins.counts(site.node) and notes(site.node).dtype not in LOW_DTYPES:
                    site = site._replace(rule=Rule.FULL, why=COUNTS)
                elif is_elementwise(site.node):
                    site = site._replace(rule=Rule.PROMOTE, why=ELEMENTWISE)
            {Rule.KEEP: self.keep, Rule.LOW: self.low, Rule.FULL: self.full}.get(site.rule, self.follow)(site, floats)

    def write(self, site: Site, floats: bool) -> None:
        """Constrain an in-place op: the result has the dtype of what is written, and no operand widens it."""
        node, variables = site.node, self.variables
        variable = variables.value.get(site.base)
        others = [source for source in (*site.data, *site.kept) if source is not site.base]
        if variable is not None and floats:
            variables.share_dtype(node, site.base)
        if variable is None or (site.rule is Rule.KEEP and site.name != "copy"):
            if variable is not None:
                variables.pin_shared(node, variable, assumed_original(notes(site.base).dtype))
            variables.read_original(others)
            return self.decide(node, Rule.KEEP, site.why)
        square = overflowing_square(site, self.context)
        why = square or self.unsafe(site)
        if why or not self.squares.isdisjoint(others):
            variables.pin_shared(node, variable, torch.float32)
        if site.name == "copy":  # it converts
            return self.decide(node, Rule.FOLLOW, site.why)
        for source in () if site.facts.native_promotion else others:
            variables.read(source, variable)
        full = square is not None and variables.dtype_of(variable) is torch.float32
        self.decide(node, Rule.FULL if full else site.rule, why or site.why, variable)

    def view_of_written(self, site: Site, floats: bool) -> None:
        """Give a view of memory that is written to its base's variable: all views of one storage have one dtype."""
        node, variables = site.node, self.variables
        variable = variables.value[site.base]
        if site.rule is Rule.KEEP:  # of the bits as integers, and of complex numbers, the base tells
            variables.pin_shared(node, variable, assumed_original(notes(node if floats else site.base).dtype))
        elif site.rule in (Rule.LOW, Rule.FULL):
            of_rule = self.context.low if site.rule is Rule.LOW else torch.float32
            variables.pin_shared(node, variable, site.dtype or of_rule)
        if floats:
            variables.share_dtype(node, site.base)
        variables.read_original(site.kept)
        self.decide(node, Rule.FOLLOW, site.why, variable)

    def assign_named_dtype(self, site: Site, dtype: torch.dtype, source: bool = False) -> None:
        """Assign the dtype that a call names, or FP32 where somebody needs digits that the original program has."""
        node, reference = site.node, dtype_reference(site.node)
        why = COUNTS if self.origins.is_exact(node) else self.saturated.get(node)
        if why is None and self.cast_as.get(self.classes.get(node, node), {reference}) != {reference}:
            why = "a cast gives this very tensor, whose memory is written"
        is_source = self.classes.get(node, node) is not node  # x.type_as(y) is x itself where both are FP32
        if is_source:
            why = why or "it is the tensor that it casts, whose memory is written"
        named = notes(node).names_tensors_dtype or reference is not None
        if why is None or not named or notes(node).dtype is not torch.float32:
            if is_source and notes(node).dtype is UNKNOWN:
                return self.assign_dtype(node, torch.float32)  # of an input: the call itself finds out what it is
            return super().assign_named_dtype(site, dtype, source)
        self.digits[node] = why
        self.assign_dtype(node, torch.float32)
        if reference is None or not self.has(reference) or self.variables.arriving(reference) != FP32:
            self.variables.does_not_widen.add(node)  # it widens nobody whom that dtype would not

    def keep(self, site: Site, floats: bool) -> None:
        node, variables = site.node, self.variables
        sources = (*site.data, *site.kept)
        variables.read_original(sources)
        written = [target for target in written_by(node) if self.has(target)]
        for target in written:  # a custom op that says so in its schema: a cast of it would miss the write
            variables.pin_shared(node, variables.value[target], assumed_original(notes(target).dtype))
        if floats:
            source = all(each in variables.does_not_widen for each in sources)  # a lookup that rescales its weight
            source = source and bool(written or not sources)
            self.assign_named_dtype(site, assumed_original(notes(node).dtype), source)
        self.decide(node, Rule.KEEP, site.why)

    def low(self, site: Site, floats: bool) -> None:
        node, variables = site.node, self.variables
        if node in self.verdict.stays:
            return self.full(site._replace(why=self.verdict.stays[node]), floats)
        if node in self.verdict.unpriced:
            site = site._replace(why=f"{site.why}; pays: {self.verdict.unpriced[node]}")
        read = variables.pin(site.dtype or self.context.low)
        variables.read_data(site, read)
        if floats and (names_dtype(node) or site.facts.wide):
            self.assign_named_dtype(site, assumed_original(notes(node).dtype))  # O3: softmax(x, dtype=torch.float32)
            return self.decide(node, Rule.LOW, site.why, read)
        if floats:
            variables.value[node] = read
            if node in self.classes and not isinstance(notes(node).dtype, tuple):
                variables.value[node] = variables.new(node)
                variables.add_cast_behind(node, read, variables.value[node])
                self.roots.append(node)
        self.decide(node, Rule.LOW, site.why, read, out=read if floats else None)

    def full(self, site: Site, floats: bool) -> None:
        node, variables = site.node, self.variables
        read = out = FP32
        asked = dtype_argument(node)
        mixed = site.has_mixed_kernel(self.context) and asked is None
        if site.accumulates_wide(self.context, asked):
            read = variables.new()
            if mixed:  # what it makes of FP32 is FP32, what it makes of low values is free
                out = variables.new(node)
                variables.widen_with((read,), out)
        elif mixed:
            read = out = variables.new(node)
        variables.read_data(site, read)
        variables.widen_with(variables.promoting(site), read)
        if floats and names_dtype(node):
            self.assign_named_dtype(site, assumed_original(notes(node).dtype))
        elif floats:
            variables.value[node] = out
        self.decide(node, Rule.FULL, site.why, read if site.data else None)

    def follow(self, site: Site, floats: bool) -> None:
        node, variables, info = site.node, self.variables, notes(site.node).dtype
        if not site.data or names_dtype(node):
            variables.read_original(site.kept)
            if floats:  # made in the dtype that the call gives, or out of integers
                self.assign_named_dtype(site, assumed_original(info), source=True)
            return self.decide(node, Rule.FOLLOW, site.why)
        bound = floats or any(rounded_to_integer(site.facts, each, self.context.low) is not None for each in node.args)
        if not bound and (site.facts.native_promotion or len(site.data) == 1):
            return self.decide(node, Rule.FOLLOW, f"{site.why}; reads what arrives")
        unsafe = self.unsafe(site)
        if unsafe:
            variable = FP32
        elif floats and assumed_original(info) is self.context.low and not self.nears_pole(site):
            variable = LOW
            if node in self.classes and self.context.policy.lowers_parameters:  # unless what is written wants FP32
                variables.pin_shared(node, variable := variables.new(node), self.context.low)
        else:
            variable = variables.new(node)
        read = FP32 if floats and site.adds_up_low(self.context, self.learned) else variable
        variables.read_data(site, read)
        self.promote(site, variable)
        if floats:
            variables.value[node] = variable
            if read is not variable:
                variables.add_cast_behind(node, read, variable)
                self.roots.append(node)
            if unsafe is COUNTS and variables.does_not_widen.issuperset(site.data):
                variables.does_not_widen.add(node)
        self.decide(node, site.rule, unsafe or site.why, read, out=FP32 if read is not variable else None, site=site)

    def nears_pole(self, site: Site) -> bool:
        """Return whether at O3, where all that weights made counts as low, a value is as wide as what it is made of."""
        near = site.node in self.near_poles or not self.near_poles.isdisjoint(site.data)
        return near and self.context.policy.lowers_parameters

    def promote(self, site: Site, variable: int) -> None:
        """Let the op that follows be FP32 where an input is."""
        if commutes_with_rounding(site) and site.node not in self.classes:
            self.commuting[site.node] = self.variables.promoting(site)
        else:
            self.variables.widen_with(self.variables.promoting(site), variable)

    def unsafe(self, site: Site) -> str | None:
        """Return why an op cannot run low, or None. Where the program itself has a value low, its digits are gone."""
        node = site.node
        if node in self.chains:
            return "between an exponential and a reduction of it"
        was_low = notes(node).dtype in LOW_DTYPES
        if node in self.saturated and not was_low:
            return self.saturated[node]
        if not was_low and stalls(site, self.context.device):
            return "it adds many values to one place, whose sum would stay at a few hundred in low precision"
        number = unsafe_number(site, self.context.low)
        if number is None and not was_low and self.origins.counts(node) and not commutes_with_rounding(site):
            return COUNTS
        return number

    def decide(
        self,
        node: Node,
        rule: Rule,
        why: str,
        read: int | None = None,
        out: int | None = None,
        site: Site | None = None,
    ) -> None:
        value = self.variables.arriving(node) if node in self.variables.value else None
        self.decided[node] = _Decided(read, value if out is None else out, rule, self.digits.get(node, why), site)

    def widen_unless_read_low(self) -> None:
        """Let ops that commute with rounding be FP32 where an input is, unless all their readers are low."""
        low: set[Node] = set()
        for node, wide in reversed(self.commuting.items()):
            if all(self.reads_low(user, low) for user in node.users):
                low.add(node)
            else:
                self.variables.widen_with(wide, self.variables.value[node])

    def reads_low(self, user: Node, low: set[Node]) -> bool:
        decided = self.decided.get(user)
        if decided is None or user.op == "output" or is_higher_order(user.target):
            return False
        cast = decided.out == LOW and notes(user).op.name == "to"
        return user in low or decided.read == LOW or cast or notes(user).dtype is NON_TENSOR


def _annotate(walk: CutWalk, dtype: Callable[[int | None], torch.dtype | None]) -> None:
    for node, (read, out, rule, why, site) in walk.decided.items():
        annotations = notes(node)
        reads = dtype(read)
        if site is not None and read is not None and not walk.variables.is_pinned(read):
            why = f"{why}; {_reason(walk, site, reads, dtype)}"
        annotations.precision = precision_of(node, rule, why, reads, dtype(out))
        annotations.discard("root_dtype")
        annotations.discard("names_fp32")
    for node in walk.digits:
        notes(node).names_fp32 = True
    for node in walk.roots:
        lives = dtype(walk.variables.value[node])
        if lives is not notes(node).precision.output:
            notes(node).root_dtype = lives


def _reason(walk: CutWalk, site: Site, reads: torch.dtype | None, dtype: Callable) -> str:
    for source in site.data:
        if walk.has(source) and dtype(walk.variables.arriving(source)) is reads:
            return f"%{source.name} is {dtype_name(reads)}"
    return "fewest bytes cast" if walk.verdict.costs is None else "least time"


def ops_kept_in_fp32(gm: GraphModule, context: Context) -> Verdict:
    """The LOW ops, of the graph and of the bodies it calls, that are faster left in FP32; annotates nothing.

    The verdict has a node and a reason for each, and by operator how many could not be weighed: of unknown sizes, or
    of a kind without a cost. What an override names is not weighed. Without costs in ``context`` the verdict is empty.
    """
    if context.costs is None:
        return Verdict()
    costs = OpCosts.of(context.costs, context)
    walk = PricedWalk(context, costs)
    walk.run(gm)
    walk.widen_unless_read_low()
    full = solve(walk.variables.problem())
    casts_around = walk.variables.casts_around(full)
    stays = {}
    for node, (site, price, variable) in walk.priced.items():
        if full[variable]:
            wide, low = casts_around(node, variable, site.data)
            stays[node] = costs.why(price, price.full + wide, price.low + low)
    return Verdict(stays, walk.unpriced, costs if stays else None)


class PricedWalk(CutWalk):
    """The cut problem with LOW ops that may stay FP32."""

    def __init__(self, context: Context, costs: OpCosts) -> None:
        super().__init__(context, Verdict(costs=costs))
        self._costs = costs
        self.priced: dict[Node, tuple[Site, Price, int]] = {}
        self.unpriced: dict[Node, str] = {}

    def enter(self, graph: Graph, returns: bool) -> None:
        self._costs.enter(graph)  # once: a second look at the graph would take it for a body
        super().enter(graph, returns)

    def low(self, site: Site, floats: bool) -> None:
        node, variables = site.node, self.variables
        price = self._price(site, floats)
        if isinstance(price, str):
            self.unpriced[node] = price
        if not isinstance(price, Price):
            return super().low(site, floats)
        variable = variables.value[node] = variables.priced(price.full - price.low)
        variables.read_data(site, variable)
        if node in self.classes:  # what is written in place later on may live in FP32 although the op is low
            variables.value[node] = variables.new(node)
            variables.add_cast_behind(node, variable, variables.value[node])
            variables.widen_with((variable,), variables.value[node])
        self.priced[node] = site, price, variable
        self.decide(node, site.rule, site.why, variable)

    def _price(self, site: Site, floats: bool) -> Price | str | None:
        """None: it is not ours to ask."""
        node = site.node
        if site.dtype is not None or not floats or self.is_overridden(site):
            return None
        dtype = notes(node).dtype
        if dtype is UNKNOWN:
            return "sizes unknown"
        if not isinstance(dtype, tuple) and (dtype is not torch.float32 or names_dtype(node)):
            return None
        return self._costs.price(site)

    def is_overridden(self, site: Site) -> bool:
        """Return whether the policy names it: then that stands, whatever it costs."""
        path = module_path(site.node)
        return any(each.match(site.name, site.node, path) for each in self.context.policy.overrides)
