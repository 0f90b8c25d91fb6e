"""Products of a frozen model run on weights that were packed once, with what follows them in the same kernel.

It takes a program: the graph whose weights are inputs (``fxprec/programs/program.py``). Before::

    %w1: bfloat16 = placeholder
    ...
    %conv: bfloat16 = conv2d(%x, %w1, None, (1, 1), (1, 1))
    %bn: bfloat16 = batch_norm(%conv, %mean, %var, %gamma, %beta, training=False)
    %add: bfloat16 = add(%bn, %x)
    %relu: bfloat16 = relu(%add)
    %flatten: bfloat16 = flatten(%relu, 1)
    %linear: bfloat16 = linear(%flatten, %w2, %b2)
    %gelu: bfloat16 = gelu(%linear)

After::

    %packed_w1: bfloat16 = placeholder          # of %w1, folded with the four of the norm
    %packed_w1_bias: float32 = placeholder
    %packed_w2: bfloat16 = placeholder
    ...
    %relu: bfloat16 = packed_conv_plus(%x, %packed_w1, %packed_w1_bias, (1, 1), (1, 1), (1, 1), 1, %x, True)
    %in_format_of: bfloat16 = in_format_of(%relu, %x, %w1)
    %flatten: bfloat16 = flatten(%in_format_of, 1)
    %gelu: bfloat16 = packed_linear(%flatten, %packed_w2, %b2, gelu, [], none)

``gm.meta["packings"]`` says of the new placeholders, in order, what makes them. An op joins a product where nothing
else reads the value between; what has to be equal at run time (two operands of one shape) is asked there. Convolutions
give channels_last: where a value goes that must not see that, it is put back first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch.fx import Graph, GraphModule, Node

from fxprec.kernels.cpu.packed import (
    FEW,
    can_pack,
    in_format_of,
    packed_conv,
    packed_conv_plus,
    packed_linear_of_many,
)
from fxprec.kernels.torch_internals import linear_pointwise
from fxprec.passes.context import Context, PassResult
from fxprec.passes.graph.annotations import NON_TENSOR, Op, Precision, Rule, arg_nodes, argument, notes
from fxprec.passes.graph.casts import CASTS
from fxprec.passes.graph.grad_mode import grad_mode_at_nodes
from fxprec.passes.insert_casts import actual_dtype
from fxprec.passes.ops.aliases import alias_roots, written_by
from fxprec.passes.ops.formats import taken_over, writes_across
from fxprec.passes.ops.rule import Epilogue
from fxprec.passes.ops.table import facts_at

#: An activation as oneDNN has it: its name, its numbers, its algorithm.
_Act = tuple[str, tuple[float, ...], str]
_NONE: Final[_Act] = ("none", (), "")
_RELU: Final[_Act] = ("relu", (), "")
#: Dimensions of the images of a convolution that oneDNN packs.
_PACKED_DIMENSIONS: Final = (2, 3)


@dataclass(frozen=True, slots=True)
class Packing:
    """What makes one packed weight, and with ``norm`` the bias that comes with it.

    Attributes:
        weight: the placeholder of the plain weight, or its path in the model.
        conv: stride, padding, dilation and groups of a convolution; None: a linear.
        norm: likewise of the convolution's bias and of the batch norm's mean, variance, weight and bias, each None
            where there is none; None: no batch norm.
        eps: the batch norm's.
        low_bias: the bias that comes out is low: the kernel that adds another operand takes no FP32 one.
    """

    weight: str
    conv: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int] | None = None
    norm: tuple[str | None, ...] | None = None
    eps: float = 0.0
    low_bias: bool = False

    @property
    def sources(self) -> tuple[str, ...]:
        """Every placeholder that it is made from."""
        return (self.weight, *(name for name in self.norm or () if name is not None))

    def renamed(self, names: Mapping[str, str]) -> Packing:
        """The same of other names."""
        norm = None if self.norm is None else tuple(None if each is None else names[each] for each in self.norm)
        return replace(self, weight=names[self.weight], norm=norm)


@dataclass(slots=True)
class _Product:
    """A linear or convolution on its way: what it will be called with."""

    node: Node
    x: Node
    weight: Node
    bias: Node | None
    conv: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int] | None
    norm: tuple[Node | None, ...] | None = None
    eps: float = 0.0
    act: _Act = _NONE
    other: Node | None = None
    joined: list[str] = field(default_factory=list)

    @property
    def is_small(self) -> bool:
        """Of a linear: of few rows torch's own loop may be faster, or nobody knows."""
        if self.conv is not None:
            return False
        numel = notes(self.weight).numel
        return not isinstance(numel, int) or numel <= FEW

    @property
    def packing(self) -> Packing:
        """Of its weight."""
        norm = None if self.norm is None else tuple(None if each is None else str(each.target) for each in self.norm)
        low_bias = norm is not None and self.other is not None
        return Packing(str(self.weight.target), self.conv, norm, self.eps, low_bias)


def pack(gm: GraphModule, context: Context) -> PassResult:
    """Take packed weights where oneDNN has kernels for them.

    ``gm.meta["packings"]`` says which, ``gm.meta["packed"]`` which nodes run on them, and what joined each.
    """
    gm.meta["packings"], gm.meta["packed"] = (), {}
    if context.device != "cpu" or not can_pack(context.low):
        return PassResult(gm, False)
    if any(grad_mode_at_nodes(gm.graph, False).values()):
        return PassResult(gm, False, ("the graph: it turns gradients on, and packed products have none",))
    packer = _Packer(gm.graph, context.low)
    packer.find()
    packer.join()
    gm.meta["packings"] = packer.write()
    gm.meta["packed"] = {product.node.name: tuple(product.joined) for product in packer.products}
    return PassResult(gm, bool(packer.products), tuple(packer.declined))


# -- deciding ---------------------------------------------------------------------------------------------------------


def _product(node: Node, low: torch.dtype) -> _Product | str:
    """What can run on a packed weight; else why not, "" where nobody would expect it."""
    name = notes(node).op.name
    is_linear = name == "linear"
    facts = facts_at(node)
    if not is_linear and facts.cost != "convolution":
        return ""
    x, weight, bias = argument(node, 0, "input"), argument(node, 1, "weight"), argument(node, 2, "bias")
    if not isinstance(x, Node) or not _is_weight(weight) or actual_dtype(x) is not low:
        return ""
    if actual_dtype(weight) is not low or actual_dtype(node) is not low:
        return ""
    if bias is not None and not _is_weight(bias):
        return "its bias is computed"
    if is_linear:
        return _Product(node, x, weight, bias, None)
    if facts.bias not in _PACKED_DIMENSIONS:
        return "oneDNN packs weights of two and three dimensions of an image"
    numbers = [_numbers(argument(node, 3 + i, *each), facts.bias) for i, each in enumerate(_CONVOLUTION)]
    groups = argument(node, 6, "groups", 1)
    if any(each is None for each in numbers) or not isinstance(groups, int):
        return "its stride, padding or dilation is no number"
    stride, padding, dilation = numbers
    return _Product(node, x, weight, bias, (stride or (), padding or (), dilation or (), groups))


#: Arguments of a convolution, from the fourth on.
_CONVOLUTION: Final = (("stride", 1), ("padding", 0), ("dilation", 1))


def _numbers(value: Any, count: int) -> tuple[int, ...] | None:
    values = (value,) * count if isinstance(value, int) else value
    if not isinstance(values, tuple | list) or not all(isinstance(each, int) for each in values):
        return (0,) * count if value == "valid" else None
    return tuple(values) * count if len(values) == 1 else tuple(values)


def _is_weight(node: object) -> bool:
    return isinstance(node, Node) and node.op == "placeholder" and bool(notes(node).kind) and not notes(node).written


def _asks_dimensions(user: Node) -> bool:
    return notes(user).op.name == "dim" and notes(user).dtype is NON_TENSOR


def _activation(node: Node, epilogue: Epilogue) -> _Act | None:
    """As oneDNN has it; None where an argument is no number."""
    if epilogue.binary or not node.args or not isinstance(node.args[0], Node):
        return None
    options = [argument(node, *option) for option in epilogue.options]
    algorithm = "" if epilogue.algorithm is None else argument(node, *epilogue.algorithm)
    if not all(isinstance(each, int | float) for each in options) or not isinstance(algorithm, str):
        return None
    return epilogue.name, (*epilogue.numbers, *map(float, options)), algorithm


def _fold(product: _Product, norm: Node) -> bool:
    """Whether it is a batch norm by running statistics, which the weight can take in."""
    if notes(norm).op.name != "batch_norm" or norm.args[:1] != (product.node,):
        return False
    names = ("running_mean", "running_var", "weight", "bias")
    given = [argument(norm, 1 + i, name) for i, name in enumerate(names)]
    training, eps = argument(norm, 5, "training", False), argument(norm, 7, "eps", 1e-5)
    if training is not False or not isinstance(eps, float) or given[0] is None or given[1] is None:
        return False
    if any(each is not None and not _is_weight(each) for each in given):
        return False
    product.norm, product.eps = (product.bias, *given), eps
    return True


class _Packer:
    """The products of one graph: found, joined with what follows them, written."""

    def __init__(self, graph: Graph, low: torch.dtype) -> None:
        self.products: list[_Product] = []
        self.declined: list[str] = []
        self._graph, self._low = graph, low
        self._roots = alias_roots(graph)
        self._now: dict[Node, Node] = {}  # what an erased node became
        self._taken: set[Node] = set()

    def find(self) -> None:
        """The products that can run on packed weights."""
        for node in self._graph.nodes:
            found = _product(node, self._low)
            if isinstance(found, _Product):
                self.products.append(found)
                self._taken.add(node)
            elif found:
                self.declined.append(f"{node.name}: {found}")
        convolutions = {product.node for product in self.products if product.conv is not None}
        writer = (
            writes_across(self._graph, taken_over(self._graph, convolutions, through_views=True))
            if convolutions
            else None
        )
        if writer is not None:  # linears leave everything as it lies
            self.declined.append(f"{writer.name}: writes to what would be a copy with packed convolutions")
            self.products = [product for product in self.products if product.conv is None]
            self._taken -= convolutions

    def join(self) -> None:
        """Take in what follows each: a batch norm, then another operand or an activation; behind a sum a relu."""
        for product in self.products:
            if product.conv is not None and (norm := self._next(product)) is not None and _fold(product, norm):
                self._absorb(product, norm)
            if product.is_small:
                continue  # where torch's own loop serves, there is nothing to join
            if (user := self._next(product)) is None or (epilogue := facts_at(user).epilogue) is None:
                continue
            if (act := _activation(user, epilogue)) is not None:
                product.act = act
                self._absorb(product, user)
            elif epilogue.binary and (other := self._other_operand(product, user, epilogue.name)) is not None:
                self._move(product, user, other)
                after = self._next(product)
                epilogue = facts_at(after).epilogue if after is not None else None
                if after is not None and epilogue is not None and _activation(after, epilogue) == _RELU:
                    product.act = _RELU
                    self._absorb(product, after)

    def _next(self, product: _Product) -> Node | None:
        """The one op that reads its result, as its first argument or one of two, and gives that dtype."""
        node = product.node
        readers = [user for user in node.users if not _asks_dimensions(user)]
        if len(readers) != 1 or readers[0] in self._taken or actual_dtype(readers[0]) is not self._low:
            return None
        return readers[0] if [*arg_nodes(readers[0])].count((0, node)) == 1 or node in readers[0].args else None

    def _other_operand(self, product: _Product, user: Node, how: str) -> Node | None:
        """Where the two can be one kernel, which runs when both are there.

        A convolution's sum, where its channels are not in groups. Linears gain nothing: oneDNN's kernel reads the other
        operand as slowly as another pass over memory does (0.92 to 1.07 times as fast).
        """
        if len(user.args) != 2 or user.kwargs or user.args[0] is user.args[1]:
            return None
        if product.conv is None or (how, product.conv[3]) != ("add", 1):
            return None
        own, other = user.args if user.args[0] is product.node else reversed(user.args)
        if not isinstance(other, Node) or actual_dtype(other) is not self._low:
            return None
        if notes(user).op.in_place and user.args[0] is not own:
            return None
        # It runs later than it did: nobody may write to what it reads in between.
        node, reads = product.node.next, self._roots[product.x]
        while node is not user:
            if any(self._roots.get(written) is reads for written in written_by(node)):
                return None
            node = node.next
        return other

    def _absorb(self, product: _Product, node: Node) -> None:
        """``node`` is part of the product's kernel."""
        product.joined.append(notes(node).op.name)
        node.replace_all_uses_with(product.node)
        self._graph.erase_node(node)
        self._now[node] = product.node

    def _move(self, product: _Product, user: Node, other: Node) -> None:
        """The product runs where its user did, and in its place."""
        before = product.node
        product.joined.append(notes(user).op.name)
        product.node, product.other = user, other
        self._taken.add(user)
        user.args = (other,)
        for asks in [*before.users]:  # an input has as many dimensions
            asks.replace_input_with(before, self._as_it_is(product.x))
        self._graph.erase_node(before)
        self._now[before] = user

    def _as_it_is(self, node: Node) -> Node:
        while node in self._now:
            node = self._now[node]
        return node

    # -- rewriting ----------------------------------------------------------------------------------------------------

    def write(self) -> tuple[Packing, ...]:
        """Make the calls; returns what makes the new placeholders, in their order."""
        first = next(iter(self._graph.nodes))
        made: dict[Packing, tuple[Node, Node | None]] = {}
        for product in self.products:
            packing = product.packing
            if packing not in made:
                with self._graph.inserting_before(first):
                    made[packing] = self._placeholders(product)
            self._call(product, *made[packing])
        self._put_formats_back()
        return tuple(made)

    def _placeholders(self, product: _Product) -> tuple[Node, Node | None]:
        name = f"packed_{product.weight.target}"
        weight = self._graph.placeholder(name)
        weight.meta.update(dtype=notes(product.weight).dtype, precision=notes(product.weight).precision)
        if product.norm is None:
            return weight, None
        bias = self._graph.placeholder(f"{name}_bias")
        output = self._low if product.other is not None else torch.float32
        precision = Precision.arriving(None, output, Rule.KEEP, "of a folded batch norm")
        bias.meta.update(dtype=torch.float32, precision=precision)
        return weight, bias

    def _call(self, product: _Product, packed: Node, folded: Node | None) -> None:
        node, bias = product.node, product.bias if folded is None else folded
        x, other = self._as_it_is(product.x), None if product.other is None else self._as_it_is(product.other)
        name, numbers, algorithm = product.act
        if product.conv is None and product.is_small:
            node.target, node.args = packed_linear_of_many, (x, product.weight, packed, bias)
        elif product.conv is None:
            node.target, node.args = linear_pointwise, (x, packed, bias, name, [*numbers], algorithm)
        elif other is not None:
            relu = product.act == _RELU
            node.target, node.args = packed_conv_plus, (x, packed, bias, *product.conv, other, relu)
        else:
            node.target = packed_conv
            node.args = (x, packed, bias, *product.conv, *((name, numbers, algorithm) if product.act != _NONE else ()))
        node.op, node.kwargs = "call_function", {}
        notes(node).op = Op("packed_linear" if node.target is linear_pointwise else node.target.__name__)  # type: ignore[union-attr]
        joined = f", with {', '.join(product.joined)}" if product.joined else ""
        notes(node).fused = f"oneDNN, on a weight packed once{joined}"

    def _put_formats_back(self) -> None:
        """What convolutions leave in channels_last goes so to whom it does not matter to."""
        origins: dict[Node, tuple[Node, ...]] = {}
        weights = {product.node: product.weight for product in self.products if product.conv is not None}
        restored: dict[Node, Node] = {}
        for node in [*self._graph.nodes]:
            sources = [source for source in node.all_input_nodes if source in origins]
            if node in weights:
                x = node.args[0]
                assert isinstance(x, Node)
                origins[node] = (*origins.get(x, (x, x))[:1], weights[node])
                continue
            facts = facts_at(node)
            takes_any = facts.any_format or facts.cost == "product" or node.target in CASTS or node.target in _LINEARS
            if sources and not takes_any:
                for source in sources:
                    if source not in restored:
                        restored[source] = self._put_back(source, origins[source])
                    node.replace_input_with(source, restored[source])
            elif sources and (facts.any_format or node.target in CASTS) and notes(node).dtype is not NON_TENSOR:
                origins[node] = origins[sources[0]]

    def _put_back(self, value: Node, origins: tuple[Node, ...]) -> Node:
        with self._graph.inserting_after(value):
            node = self._graph.call_function(in_format_of, (value, *origins))
        node.meta.update({key: value.meta[key] for key in ("dtype", "precision", "val", "numel") if key in value.meta})
        notes(node).op = Op("in_format_of")
        return node


_LINEARS: Final = (linear_pointwise, packed_linear_of_many)
