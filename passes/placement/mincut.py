"""Place casts by a minimum cut (placement="mincut"): a graph becomes a cut problem, whose solution has all dtypes.

One variable an op that follows or promotes; one for the data port and the output of a norm whose kernel reads and
writes low; one for the input of a sum. LOW and FULL ops, sources, user casts and outputs are pins. ``decide`` says what
the levels pin; ``pins`` what safety and memory do.

An FP32 input makes an op FP32 (a closure of the cut). Two kinds of ops are excepted: one that only moves or drops
values and has none but low readers (the cast may then stand before it, where the tensor is smaller), and one whose FP32
operand is 0-dim, which does not promote in torch either. On a CPU, whose kernel of layer_norm reads and writes low::

                                 reads   puts out   closures that bind
    %h = linear(%x, %w)          LOW     LOW
    %n = layer_norm(%h)          a       a
    %e = exp(%n)                 FP32    FP32
    %s = add(%n, %e)             b       b          a -> b, FP32 -> b: an addition in FP32 if one operand is
    %t = transpose(%s, 0, 1)     c       c          b -> c, unless all readers of %t are low, as here
    %y = linear(%t, %v)          LOW     LOW

The first closure makes b FP32. The cut has a and c to choose, by the casts of %h, %n, %s and %t that either choice
needs: each value is cast where the variable that it is put out in differs from that of a reader.

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

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple, TypeAlias

import torch
from torch.fx import Node

from fxprec.kernels.launch.operands import LOW_DTYPES
from fxprec.passes.costs.op_costs import OpCosts, Price
from fxprec.passes.graph.annotations import NON_TENSOR, UNKNOWN, Rule, module_path, notes
from fxprec.passes.graph.text import dtype_name
from fxprec.passes.ops.aliases import written_by
from fxprec.passes.ops.names import cast_target, dtype_argument
from fxprec.passes.placement.origins import COUNTS, Origins
from fxprec.passes.placement.pins import (
    commutes_with_rounding,
    exp_chains,
    overflowing_square,
    promoting_near_poles,
    rounded_to_integer,
    saturating_chains,
    sums_low,
    unsafe_number,
)
from fxprec.passes.placement.products import ELEMENTWISE, is_elementwise
from fxprec.passes.placement.sites import (
    Site,
    annotate,
    assumed_original,
    base_of,
    dtype_reference,
    names_dtype,
)
from fxprec.passes.placement.solver import solve
from fxprec.passes.placement.variables import FP32, LOW, Variables
from fxprec.passes.placement.walk import Kind, Step, Walk
from fxprec.passes.torch_internals import HigherOrderOperator


@dataclass(frozen=True, slots=True)
class Verdict:
    """Verdict on LOW ops: which are left in FP32, told before casts are placed.

    Attributes:
        stays: op -> why it stays FP32.
        unpriced: op that is lowered unasked -> why nobody knows what it costs.
        costs: what casts are placed by; None: by their bytes, since all LOW ops are lowered.
    """

    stays: Mapping[Node, str] = field(default_factory=dict)
    unpriced: Mapping[Node, str] = field(default_factory=dict)
    costs: OpCosts | None = None


def place_by_cut(walk: Walk, verdict: Verdict) -> list[str]:
    """Annotate ``meta["precision"]`` in the graphs of a walk; 'node: reason' where a pin was overruled.

    ``verdict``: LOW ops that stay FP32 all the same.
    """
    constraints = Constraints(walk, verdict)
    constraints.widen_unless_read_low()
    _annotate(constraints, constraints.variables.dtypes(solve(constraints.variables.problem())))
    return constraints.variables.declined


def ops_kept_in_fp32(walk: Walk) -> Verdict:
    """Return the LOW ops of a walk that are faster left in FP32; annotate nothing.

    The verdict has the reason for each op that stays, and for each that could not be weighed why not: it is of unknown
    sizes, or of a kind without a cost. What an override names is not weighed. Without costs of the device the verdict
    is empty.
    """
    if walk.context.costs is None:
        return Verdict()
    costs = walk.op_costs()
    constraints = Constraints(walk, Verdict(costs=costs), Freedom.PRICED)
    constraints.widen_unless_read_low()
    full = solve(constraints.variables.problem())
    casts_around = constraints.variables.casts_around(full)
    stays = {}
    for node, (site, price, variable) in constraints.priced.items():
        if full[variable]:
            wide, low = casts_around(node, variable, site.data)
            stays[node] = costs.why(price, price.full + wide, price.low + low)
    return Verdict(stays, constraints.unpriced, costs if stays else None)


class Freedom(IntEnum):
    """Ops that may be FP32 or low, beside those that follow or promote."""

    #: None: LOW ops are low, and FULL ones FP32.
    NONE = 0
    #: LOW ops whose time is known.
    PRICED = 1
    #: These, and FULL ones; and an FP32 input makes nobody FP32, as that is weighed, too.
    ALL = 2


class _Decided(NamedTuple):
    """Facts of a node that are known before the cut: the variables of what it reads and puts out."""

    read: int | None
    out: int | None
    rule: Rule
    why: str
    site: Site | None = None


class _Safety:
    """Reasons why ops of a walk must not run low, and values of which the digits matter.

    Attributes:
        origins: which values are counts.
        saturated: values that are FP32 on the way from what saturates to a pole -> why.
        squares: in float16, results of ops that square: low memory cannot hold them. Added as steps are read.
    """

    def __init__(self, walk: Walk) -> None:
        self.context = walk.context
        self.origins = Origins()
        self.saturated: dict[Node, str] = {}
        self.squares: set[Node] = set()
        self._near_poles: set[Node] = set()
        self._exp_chains: set[Node] = set()
        # At O3 a sigmoid before a logarithm is not pinned to FP32, since its input is low anyway. It and what reads it
        # take the widest dtype of their operands instead (``promoting_near_poles``).
        self._weights_are_low = walk.context.policy.lowers_parameters
        for graph, hands_out, _ in walk.graphs:
            chains = saturating_chains(graph, hands_out and not self._weights_are_low, walk.context.low)
            self.saturated |= {} if self._weights_are_low else chains
            self._near_poles |= chains.keys()
            self._exp_chains |= exp_chains(graph)
            self.origins.enter(graph, walk.operands)

    def ruled(self, site: Site) -> Site:
        """Return the call with the rule that holds for it: what is known of this very call comes before the table."""
        node = site.node
        site = promoting_near_poles(site, self._near_poles)
        square = overflowing_square(site, self.context)
        if square is not None:
            self.squares.add(node)
            return site._replace(rule=Rule.FULL, why=square)
        if site.rule is Rule.LOW and site.is_as_in_table:
            if self.origins.counts(node) and notes(node).dtype not in LOW_DTYPES:
                return site._replace(rule=Rule.FULL, why=COUNTS)
            if is_elementwise(node):
                return site._replace(rule=Rule.PROMOTE, why=ELEMENTWISE)
        return site

    def why_not_low(self, site: Site) -> str | None:
        """Return why an op cannot run low, or None. Where the program itself has a value low, its digits are gone."""
        node = site.node
        if node in self._exp_chains:
            return "between an exponential and a reduction of it"
        was_low = notes(node).dtype in LOW_DTYPES
        if node in self.saturated and not was_low:
            return self.saturated[node]
        if not was_low and sums_low(site, self.context.device):
            return "it adds many values to one place, whose sum would stay at a few hundred in low precision"
        number = unsafe_number(site, self.context.low)
        if number is None and not was_low and self.origins.counts(node) and not commutes_with_rounding(site):
            return COUNTS
        return number

    def nears_pole(self, site: Site) -> bool:
        """Return whether a value at O3 must not be pinned low, since near a pole it takes the dtype of its operands."""
        near = site.node in self._near_poles or not self._near_poles.isdisjoint(site.data)
        return near and self._weights_are_low

    def allows_low(self, site: Site) -> bool:
        """Return whether a FULL op may be low: never in float16, where data may overflow that were not measured."""
        safe = self.context.low is torch.bfloat16 and site.facts.low_kernel and site.node not in self.squares
        return safe and not any(map(self.origins.counts, (site.node, *site.data)))


class Constraints:
    """The cut problem of a walk: what each step says of the variables that stand for the dtypes of values.

    A step says it in these words of ``Variables``:

    ==========================================  ========================================================================
    ``value[node]``, ``arriving(node)``         the variable that readers are charged against, and that of the dtype in
                                                which the value comes: at O2 an input counts as low, and is FP32
    ``read(source, v)``                         somebody reads ``source`` in the dtype of v: a cast, where it is put out
                                                in another
    ``read_data(site, v)``, ``read_original``   likewise of all data of a call; in the dtypes of the original program
    ``widen_with(inputs, v)``                   a closure: v is FP32 if one of the inputs is
    ``does_not_widen``                          values that such closures leave out
    ``pin_shared(node, v, dtype)``              v, which all of one memory shares, has this dtype
    ``share_dtype(node, source)``               one variable for both: there is no place for a cast between them
    ``add_cast_behind(node, v, w)``             a cast may stand right behind the node, from the dtype of v to that of w
    ==========================================  ========================================================================

    Args:
        verdict: LOW ops that stay FP32, and the costs of casts; without, their bytes.
        freedom: which ops are free besides.

    Attributes:
        variables: pins, closures and costs.
        decided: node -> what is known of it before the cut.
        priced: LOW op that is free -> its call, price and variable.
        unpriced: LOW op that stays low, as nobody knows what it costs -> why.
        free: op that may be either -> its variable.
        parts: value -> those that it is made of without a rounding.
        stored_apart: ops whose value may live in another dtype than they put out: a cast may stand right behind them.
        names_fp32: calls that name another tensor's dtype, and give FP32 all the same -> why.
        safety: what low precision cannot hold.
    """

    def __init__(self, walk: Walk, verdict: Verdict, freedom: Freedom = Freedom.NONE) -> None:
        self.walk, self.context, self.classes = walk, walk.context, walk.classes
        self.verdict, self.freedom = verdict, freedom
        fuses = self.context.regions == "triton" and self.context.policy.lowers_sources
        absorbs = fuses if verdict.costs is None else self.context.casts_fuse
        self.variables = Variables(self.context.low, absorbs, verdict.costs)
        self.decided: dict[Node, _Decided] = {}
        self.priced: dict[Node, tuple[Site, Price, int]] = {}
        self.unpriced: dict[Node, str] = {}
        self.free: dict[Node, int] = {}
        self.parts: dict[Node, tuple[Node, ...]] = {}
        self.stored_apart: list[Node] = []
        self.names_fp32: dict[Node, str] = {}
        self.safety = _Safety(walk)
        # Op that commutes with rounding -> the variables of its inputs. If all its readers are low, it may be low
        # whatever its inputs are; otherwise one FP32 input makes it FP32, by closures that ``widen_unless_read_low``
        # adds. For a part the list is empty: it shares its variable with what it is a part of.
        self._commuting: dict[Node, list[int]] = {}
        self._cast_as: dict[Node, set[Node | None]] = {}  # root of written memory -> whose dtype casts of it name
        for cast in (node for node in self.classes if notes(node).op.name == "to"):
            if cast_target(cast) is torch.float32 or dtype_reference(cast) is not None:
                self._cast_as.setdefault(self.classes[cast], set()).add(dtype_reference(cast))
        walk.read(
            {
                Kind.INPUT: self._source, Kind.SOURCE: self._source, Kind.SHARE: self._share, Kind.CAST: self._cast,
                Kind.LOOKUP: self._lookup, Kind.COMPUTE: self._compute, Kind.WRITE: self._write,
            }
        )  # fmt: skip

    def has(self, node: Node) -> bool:
        """Return whether the node's value is a float that was given a variable."""
        return node in self.variables.value

    def is_overridden(self, site: Site) -> bool:
        """Return whether the policy names it: then that stands, whatever it costs."""
        path = module_path(site.node)
        return any(each.match(site.name, site.node, path) for each in self.context.policy.overrides)

    # -- steps that compute nothing ------------------------------------------------------------------------------------

    def _source(self, step: Step) -> None:
        """Pin a value from outside to its original dtype, and what the outputs read to theirs."""
        node, variables = step.node, self.variables
        for source in node.all_input_nodes if node.op == "output" and step.reads_original else ():
            if self.has(source) and isinstance(notes(source).dtype, tuple):  # nobody can cast a tuple on its way out
                variables.pin_shared(source, variables.value[source], assumed_original(notes(source).dtype))
        if step.reads_original:
            variables.read_original(node.all_input_nodes)
        if step.floats:
            self._assign(node, assumed_original(notes(node).dtype), source=not notes(node).handed_over)
        self._decide(node, step.rule, step.why)
        # At O2 an input counts as low though it arrives wider: ``value`` is what its readers are charged against,
        # ``arrives`` what its annotation says. Not with prices: there the cut decides whether its cast pays.
        free = step.kind is Kind.INPUT and self.verdict.costs is None and node not in self.classes
        if free and node in variables.does_not_widen:
            variables.arrives[node], variables.value[node] = variables.value[node], LOW

    def _share(self, step: Step) -> None:
        """Give a part the variable of what it is a part of: there is no place for a cast between them."""
        if step.of is not None:
            if step.node in self.walk.operands:
                self.variables.share_with_operand(step.node, step.of)
            else:
                self.variables.share_dtype(step.node, step.of)
            self._commuting[step.node], self.parts[step.node] = [], (step.of,)
        self._decide(step.node, step.rule, step.why)

    def _cast(self, step: Step) -> None:
        """Give a cast of the user's the dtype that it names; what it casts may have any, at the cost of a cast."""
        if step.site is None:  # to a device
            self._share(step)
        elif step.floats:
            self._assign_named(step.site)
        if step.of is not None:
            self.variables.read(step.of, self.variables.arriving(step.node))
            self.parts[step.node] = (step.of,)
        self._decide(step.node, step.rule, step.why)

    # -- memory that is written ----------------------------------------------------------------------------------------

    def _write(self, step: Step) -> None:
        """Constrain an in-place op: the result has the dtype of what is written, and no operand widens it."""
        assert step.site is not None
        site, node, variables = step.site, step.node, self.variables
        variable = variables.value.get(site.base)
        others = [source for source in (*site.data, *site.kept) if source is not site.base]
        if step.floats:
            variables.share_dtype(node, site.base)
        if variable is None or (site.rule is Rule.KEEP and site.name != "copy"):
            if variable is not None:
                variables.pin_shared(node, variable, assumed_original(notes(site.base).dtype))
            variables.read_original(others)
            return self._decide(node, Rule.KEEP, site.why)
        # The op writes where other views read: what is unsafe here pins all of that memory.
        square = overflowing_square(site, self.context)
        why = square or self.safety.why_not_low(site)
        if why or not self.safety.squares.isdisjoint(others):
            variables.pin_shared(node, variable, torch.float32)
        if site.name == "copy":  # it converts
            return self._decide(node, Rule.FOLLOW, site.why)
        for source in () if site.facts.native_promotion else others:
            variables.read(source, variable)
        # Memory that another pin made low stays low; then the op is no FULL one, whatever it squares.
        full = square is not None and variables.dtype_of(variable) is torch.float32
        self._decide(node, Rule.FULL if full else site.rule, why or site.why, variable)

    def _view_of_written(self, site: Site, floats: bool) -> None:
        """Give a view of memory that is written to its base's variable: all views of one storage have one dtype."""
        node, variables = site.node, self.variables
        variable = variables.value[site.base]
        # A KEEP view keeps the memory in its original dtype. Where the view itself is no float (``view(torch.int32)``,
        # ``view_as_complex``), that dtype is read off the base.
        if site.rule is Rule.KEEP:
            variables.pin_shared(node, variable, assumed_original(notes(node if floats else site.base).dtype))
        elif site.rule in (Rule.LOW, Rule.FULL):
            of_rule = self.context.low if site.rule is Rule.LOW else torch.float32
            variables.pin_shared(node, variable, site.dtype or of_rule)
        if floats:
            variables.share_dtype(node, site.base)
        self.parts[node] = (site.base,)
        variables.read_original(site.kept)
        self._decide(node, Rule.FOLLOW, site.why, variable)

    # -- ops that compute ----------------------------------------------------------------------------------------------

    def _lookup(self, step: Step) -> None:
        """Take an index by tensors for a part or, if its backward would add up gradients in low, for an op."""
        assert step.site is not None
        wide = self.variables.value[step.site.base] == FP32
        (self._compute if not wide and self.walk.sums_low_backward(step.site) else self._share)(step)

    def _compute(self, step: Step) -> None:
        """Constrain an op by its rule, unless it gives or writes memory that has a variable already."""
        assert step.site is not None
        site, node, floats = step.site, step.node, step.floats
        if self.walk.shares_written(node) and step.of is not None:
            return self._view_of_written(site, floats)
        # A call that writes to its data must see them uncast: a cast would miss the write.
        if self.classes and not set(site.data).isdisjoint(written_by(node)):
            return self._keep(site, floats)
        site = self.safety.ruled(site)
        {Rule.KEEP: self._keep, Rule.LOW: self._low, Rule.FULL: self._full}.get(site.rule, self._follow)(site, floats)

    def _keep(self, site: Site, floats: bool) -> None:
        """Constrain a KEEP op: it reads and puts out what it does in the original program."""
        node, variables = site.node, self.variables
        sources = (*site.data, *site.kept)
        variables.read_original(sources)
        written = [target for target in written_by(node) if self.has(target)]
        for target in written:  # a custom op that says so in its schema: a cast of it would miss the write
            variables.pin_shared(node, variables.value[target], assumed_original(notes(target).dtype))
        if floats:
            # The result counts as a source, which widens no reader, if the op reads no floats at all, or if all that it
            # reads are sources, to which it writes (``embedding(max_norm=)``).
            source = all(each in variables.does_not_widen for each in sources) and bool(written or not sources)
            self._assign_named(site, source)
        self._decide(node, Rule.KEEP, site.why)

    def _low(self, site: Site, floats: bool) -> None:
        """Constrain a LOW op: a variable of its own if its time is weighed, else LOW, or FP32 by verdict."""
        node, variables = site.node, self.variables
        price = self._price(site, floats)
        if isinstance(price, Price):
            variable = variables.value[node] = variables.priced(price.full - price.low)
            variables.read_data(site, variable)
            if node in self.classes:  # what is written in place later on may live in FP32 although the op is low
                self._live_apart(node, variable)
                variables.widen_with((variable,), variables.value[node])
            self.priced[node], self.free[node] = (site, price, variable), variable
            return self._decide(node, site.rule, site.why, variable)
        if node in self.verdict.stays:
            return self._full(site._replace(why=self.verdict.stays[node]), floats)
        if node in self.verdict.unpriced:
            site = site._replace(why=f"{site.why}; pays: {self.verdict.unpriced[node]}")
        read = variables.pin(site.dtype or self.context.low)
        variables.read_data(site, read)
        if floats and (names_dtype(node) or site.facts.wide):
            self._assign_named(site)  # O3: softmax(x, dtype=torch.float32)
            return self._decide(node, Rule.LOW, site.why, read)
        if floats:
            variables.value[node] = read
            if node in self.classes and not isinstance(notes(node).dtype, tuple):
                self._live_apart(node, read)
                self.stored_apart.append(node)
        self._decide(node, Rule.LOW, site.why, read, out=read if floats else None)

    def _live_apart(self, node: Node, made: int) -> None:
        """Let what a kernel makes in the dtype of ``made`` live in another one: a cast may stand behind it."""
        self.variables.value[node] = self.variables.new(node)
        self.variables.add_cast_behind(node, made, self.variables.value[node])

    def _price(self, site: Site, floats: bool) -> Price | None:
        """Return the price of a LOW op that is free; None: it is not ours to ask, or nobody knows, which is noted."""
        node, dtype = site.node, notes(site.node).dtype
        if self.freedom is Freedom.NONE or site.dtype is not None or not floats or self.is_overridden(site):
            return None
        if dtype is not UNKNOWN and not isinstance(dtype, tuple) and (dtype is not torch.float32 or names_dtype(node)):
            return None
        assert self.verdict.costs is not None
        price = "sizes unknown" if dtype is UNKNOWN else self.verdict.costs.price(site.node)
        if isinstance(price, Price):
            return price
        self.unpriced[node] = price
        return None

    def _full(self, site: Site, floats: bool) -> None:
        """Constrain a FULL op.

        ==================================================================  =====  ========
        its kernel                                                          reads  puts out
        ==================================================================  =====  ========
        computes in what it reads                                           FP32   FP32
        may be low all the same (``Freedom.ALL``)                           a      a
        is mixed: FP32 inside, whatever it reads (layer_norm)               a      a
        takes ``dtype=`` to accumulate in (sum)                             a      FP32
        does both (mean)                                                    a      b, a -> b
        ==================================================================  =====  ========
        """
        node, variables = site.node, self.variables
        read = out = FP32
        asked = dtype_argument(node)
        mixed = site.has_mixed_kernel(self.context) and asked is None
        is_free = self.freedom is Freedom.ALL and floats and notes(node).dtype is torch.float32
        is_free = is_free and not self.is_overridden(site)
        accumulates = site.accumulates_wide(self.context, asked)
        may_be_low = dtype_reference(node) is None and node not in self.classes and self.safety.allows_low(site)
        if is_free and not mixed and not accumulates and asked is None and may_be_low:
            variable = self.free[node] = variables.value[node] = variables.new(node)
            variables.read_data(site, variable)
            return self._decide(node, site.rule, site.why, variable, site=site)
        if accumulates:
            read = variables.new()
            if mixed:
                out = variables.new(node)
                variables.widen_with((read,), out)
        elif mixed:
            read = out = variables.new(node)
        variables.read_data(site, read)
        variables.widen_with(variables.promoting(site), read)
        if floats and names_dtype(node):
            self._assign_named(site)
        elif floats:
            variables.value[node] = out
        if is_free and site.data:  # a norm's data may still be low, and the values of a sum
            self.free[node] = read
        self._decide(node, Rule.FULL, site.why, read if site.data else None)

    def _follow(self, site: Site, floats: bool) -> None:
        """Constrain an op that follows or promotes: a variable of its own, FP32 if a widening operand is."""
        node, variables, info = site.node, self.variables, notes(site.node).dtype
        if site.facts.exact or commutes_with_rounding(site):
            self.parts[node] = site.data
        if not site.data or names_dtype(node):
            variables.read_original(site.kept)
            if floats:  # made in the dtype that the call gives, or out of integers
                self._assign_named(site, source=True)
            return self._decide(node, Rule.FOLLOW, site.why)
        # A comparison or a flag takes what arrives, unless its kernel wants one dtype for several operands, or low
        # would round its bound to an integer (x < 0.9999999).
        low = self.context.low
        decides = floats or any(rounded_to_integer(site.facts, each, low) is not None for each in node.args)
        if not decides and (site.facts.native_promotion or len(site.data) == 1):
            return self._decide(node, Rule.FOLLOW, f"{site.why}; reads what arrives")
        unsafe = self.safety.why_not_low(site)
        if unsafe:
            variable = FP32
        elif floats and assumed_original(info) is low and not self.safety.nears_pole(site):
            variable = LOW
            # The program itself makes it low, so it is pinned; by a variable of its own where the memory is written at
            # O3, since another view of that memory may still want FP32 (``pin_shared``).
            if node in self.classes and self.context.policy.lowers_parameters:
                variables.pin_shared(node, variable := variables.new(node), low)
        else:
            variable = variables.new(node)
        # ``read`` is what the op reads and puts out, ``variable`` what its readers are given. The two differ if its
        # backward would sum in low: then it reads FP32, and a cast may stand right behind it.
        read = FP32 if floats and self.walk.sums_low_backward(site) else variable
        variables.read_data(site, read)
        # An FP32 input makes the op FP32: at once, or later on where its readers are known (``widen_unless_read_low``).
        # With ``Freedom.ALL`` it does not, but for memory that is written, which has one dtype.
        if commutes_with_rounding(site) and node not in self.classes and self.freedom is not Freedom.ALL:
            self._commuting[node] = variables.promoting(site)
        elif node in self.classes or self.freedom is not Freedom.ALL:
            variables.widen_with(variables.promoting(site), variable)
        if floats:
            variables.value[node] = variable
            if read is not variable:
                variables.add_cast_behind(node, read, variable)
                self.stored_apart.append(node)
            # A count made of sources alone (positions, timesteps) is FP32 for its digits, and widens no reader.
            if unsafe is COUNTS and variables.does_not_widen.issuperset(site.data):
                variables.does_not_widen.add(node)
            if info is torch.float32:
                self.free[node] = read
        self._decide(node, site.rule, unsafe or site.why, read, out=FP32 if read is not variable else None, site=site)

    # -- what all steps write ------------------------------------------------------------------------------------------

    def _assign(self, node: Node, dtype: torch.dtype, source: bool = False) -> None:
        """Pin a value to a dtype; ``source``: nothing of the graph flowed into it."""
        variables = self.variables
        base = base_of(node)
        if self.walk.shares_written(node) and self.has(base):  # a cast that gives the very tensor it takes
            variables.pin_shared(node, variables.value[base], dtype)
            return variables.share_dtype(node, base)
        variables.value[node] = variables.pin(dtype)
        if source and self.context.policy.lowers_sources:
            variables.does_not_widen.add(node)

    def _assign_named(self, site: Site, source: bool = False) -> None:
        """Assign the dtype that a call names, or FP32 where somebody needs digits that the original program has.

        The first row that fits says the dtype (``%h`` is the tensor whose dtype the call names, if it names one's):

        ================================================================  ==============================================
        the call                                                          its value is
        ================================================================  ==============================================
        names the dtype of ``%h``, gave FP32 in the original, and there   FP32, which a later pass writes into the call
        is a reason (``_why_fp32``)                                       (``names_fp32``)
        may give its very input (``%x.type_as(%h)`` where both have one   FP32: the call itself finds out what it is
        dtype), whose memory is written, and is of unknown dtype
        names the dtype of ``%h``, and looks at no bits                   as ``%h`` arrives
        names low because autocast had made ``%h`` low at capture         low
        any other                                                         as in the original program
        ================================================================  ==============================================

        In the first row, where ``%h`` is low here, the value is FP32 for that reason only, and makes no reader FP32.
        """
        node, info = site.node, notes(site.node).dtype
        reference, reads_low = dtype_reference(node), notes(node).names_tensors_dtype
        why = self._why_fp32(node, reference)
        arriving = self.variables.arriving(reference) if reference is not None and self.has(reference) else None
        if why is not None and (reads_low or reference is not None) and info is torch.float32:
            self.names_fp32[node] = why
            self._assign(node, torch.float32)
            if arriving != FP32:
                self.variables.does_not_widen.add(node)
        elif self.walk.shares_written(node) and info is UNKNOWN:
            self._assign(node, torch.float32)
        elif arriving is not None and not site.facts.bits:
            self.variables.value[node] = arriving
        else:
            self._assign(node, self.context.low if reads_low else assumed_original(info), source)

    def _why_fp32(self, node: Node, reference: Node | None) -> str | None:
        """Return why a call that names a tensor's dtype must give FP32, if that is low here; None where it need not."""
        if self.safety.origins.needs_digits(node):
            return COUNTS
        if node in self.safety.saturated:
            return self.safety.saturated[node]
        # Another cast of this memory names another dtype. Where all were FP32, the two gave one tensor.
        if self._cast_as.get(self.classes.get(node, node), {reference}) != {reference}:
            return "a cast gives this very tensor, whose memory is written"
        # x.type_as(y) is x itself where both are FP32.
        return "it is the tensor that it casts, whose memory is written" if self.walk.shares_written(node) else None

    def _decide(
        self,
        node: Node,
        rule: Rule,
        why: str,
        read: int | None = None,
        out: int | None = None,
        site: Site | None = None,
    ) -> None:
        """Note what is known of a node. ``out``: what it puts out, where that is not the variable of its value."""
        # An input that counts as low is annotated as it arrives: its readers ask for the cast.
        value = self.variables.arriving(node) if self.has(node) else None
        self.decided[node] = _Decided(read, value if out is None else out, rule, self.names_fp32.get(node, why), site)

    def widen_unless_read_low(self) -> None:
        """Let ops that commute with rounding be FP32 where an input is, unless all their readers are low."""
        # Backwards, so that a chain of views in front of low readers is low from its end to its beginning.
        low: set[Node] = set()
        for node, wide in reversed(self._commuting.items()):
            if all(self._reads_low(user, low) for user in node.users):
                low.add(node)
            else:
                self.variables.widen_with(wide, self.variables.value[node])

    def _reads_low(self, user: Node, low: set[Node]) -> bool:
        decided = self.decided.get(user)
        if decided is None or user.op == "output" or isinstance(user.target, HigherOrderOperator):
            return False
        cast = decided.out == LOW and notes(user).op.name == "to"
        return user in low or decided.read == LOW or cast or notes(user).dtype is NON_TENSOR


#: Variable -> its dtype after the cut.
_Dtypes: TypeAlias = Mapping[int | None, torch.dtype | None]


def _annotate(constraints: Constraints, dtypes: _Dtypes) -> None:
    for node, (read, out, rule, why, site) in constraints.decided.items():
        reads = dtypes[read]
        if site is not None and read is not None and constraints.variables.dtype_of(read) is None:
            why = f"{why}; {_reason(constraints, site, reads, dtypes)}"
        annotate(node, rule, why, reads, dtypes[out])
    for node in constraints.names_fp32:
        notes(node).names_fp32 = True
    for node in constraints.stored_apart:
        lives = dtypes[constraints.variables.value[node]]
        if lives is not notes(node).precision.output:
            notes(node).stored_dtype = lives


def _reason(constraints: Constraints, site: Site, reads: torch.dtype | None, dtypes: _Dtypes) -> str:
    for source in site.data:
        if constraints.has(source) and dtypes[constraints.variables.arriving(source)] is reads:
            return f"%{source.name} is {dtype_name(reads)}"
    return "fewest bytes cast" if constraints.verdict.costs is None else "least time"
