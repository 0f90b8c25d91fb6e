"""Runs products of a frozen model on weights that were packed once, with what follows them in the same kernel.

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
    %relu: bfloat16 = packed_conv_plus(%x, %packed_w1, %packed_w1_bias, %x, True)
    %in_format_of: bfloat16 = in_format_of(%relu, %x, %w1)
    %flatten: bfloat16 = flatten(%in_format_of, 1)
    %gelu: bfloat16 = packed_linear(%flatten, %packed_w2, %b2, gelu, [], none)

``graph_notes(gm).packings`` says of the new placeholders, in order, what makes them. An op joins a product where
nothing else reads the value between; what has to be equal at run time (two operands of one shape) is asked there.
Convolutions give channels_last: a value is put back before a reader that must not see that. A sum is written over the
operand that another convolution made (``packed_conv_plus(..., True, True)``) where it is the last that reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch.fx import Graph, GraphModule, Node

from fxprec.kernels.cpu.packed import (
    FEW,
    Geometry,
    can_pack,
    in_format_of,
    packed_conv,
    packed_conv_plus,
    packed_linear_of_many,
)
from fxprec.kernels.launch.graph_call import is_op_of_torch
from fxprec.kernels.torch_internals import linear_pointwise
from fxprec.passes.context import Context, PassResult
from fxprec.passes.graph.annotations import NON_TENSOR, Op, Precision, Rule, arg_nodes, argument, graph_notes, notes
from fxprec.passes.graph.casts import CASTS
from fxprec.passes.graph.grad_mode import ever_records
from fxprec.passes.insert_casts import actual_dtype
from fxprec.passes.ops.aliases import alias_roots, written_by
from fxprec.passes.ops.formats import first_lost_write, values_in_channels_last
from fxprec.passes.ops.rule import Epilogue
from fxprec.passes.ops.table import facts_at

#: An activation as oneDNN has it: its name, its numbers, its algorithm.
Act = tuple[str, tuple[float, ...], str]
NOTHING: Final[Act] = ("none", (), "")
RELU: Final[Act] = ("relu", (), "")
#: Dimensions of the images of a convolution that oneDNN packs.
_PACKED_DIMENSIONS: Final = (2, 3)


@dataclass(frozen=True, slots=True)
class Packing:
    """Recipe of one packed weight, and with ``norm`` of the bias that comes with it.

    Attributes:
        weight: the placeholder of the plain weight, or its path in the model.
        dtype: in which the product computes.
        conv: of a convolution; None: a linear.
        norm: likewise of the convolution's bias and of the batch norm's mean, variance, weight and bias, each None
            where there is none; None: no batch norm.
        eps: the batch norm's.
        same_bias: whether the bias that comes out is in ``dtype`` rather than FP32: the kernel that adds another
            operand (``packed_conv_plus``) takes no other.
    """

    weight: str
    dtype: torch.dtype
    conv: Geometry | None = None
    norm: tuple[str | None, ...] | None = None
    eps: float = 0.0
    same_bias: bool = False

    @property
    def sources(self) -> tuple[str, ...]:
        """Every placeholder that it is made from."""
        return (self.weight, *(name for name in self.norm or () if name is not None))

    def renamed(self, names: Mapping[str, str]) -> Packing:
        """Return the same recipe for placeholders of other names."""
        norm = None if self.norm is None else tuple(None if each is None else names[each] for each in self.norm)
        return replace(self, weight=names[self.weight], norm=norm)


@dataclass(slots=True)
class Product:
    """A linear or convolution on its way: what it will be called with."""

    node: Node
    x: Node
    weight: Node
    bias: Node | None
    dtype: torch.dtype
    conv: Geometry | None
    norm: tuple[Node | None, ...] | None = None
    eps: float = 0.0
    act: Act = NOTHING
    other: Node | None = None
    joined: list[str] = field(default_factory=list)

    @property
    def is_small(self) -> bool:
        """Flag of a product that torch's own loop may run faster: a linear of a small weight, or of unknown size."""
        if self.conv is not None:
            return False
        numel = notes(self.weight).numel
        return not isinstance(numel, int) or numel <= FEW

    @property
    def packing(self) -> Packing:
        """Recipe of the product's packed weight."""
        norm = None if self.norm is None else tuple(None if each is None else str(each.target) for each in self.norm)
        same_bias = norm is not None and self.other is not None
        return Packing(str(self.weight.target), self.dtype, self.conv, norm, self.eps, same_bias)


def product_of(node: Node, low: torch.dtype) -> Product | str:
    """Match a product that can run on a packed weight; else return why not, "" where nobody would expect it.

    Low ones, and convolutions in FP32. A linear in FP32 is MKL's: a small one takes a third of oneDNN's time.
    """
    name = notes(node).op.name
    is_linear = name == "linear"
    facts = facts_at(node)
    if not is_linear and facts.cost not in _CONVOLUTIONS:
        return ""
    x, weight, bias = argument(node, 0, "input"), argument(node, 1, "weight"), argument(node, 2, "bias")
    dtype = actual_dtype(node)
    if not isinstance(x, Node) or not _is_weight(weight) or not dtype is actual_dtype(x) is actual_dtype(weight):
        return ""
    if dtype is None or not (dtype is low or (dtype is torch.float32 and not is_linear)):
        return ""
    if bias is not None and not _is_weight(bias):
        return "its bias is computed"
    if is_linear:
        return Product(node, x, weight, bias, dtype, None)
    if facts.bias not in _PACKED_DIMENSIONS:
        return "oneDNN packs weights of two and three dimensions of an image"
    geometry = _geometry(node, _CONVOLUTIONS[facts.cost], facts.bias)
    return geometry if isinstance(geometry, str) else Product(node, x, weight, bias, dtype, geometry)


#: By what it costs, the arguments of a convolution from the fourth on.
_CONVOLUTIONS: Final[Mapping[str | None, tuple[str, ...]]] = {
    "convolution": ("stride", "padding", "dilation", "groups"),
    "transposed convolution": ("stride", "padding", "output_padding", "groups", "dilation"),
}
_DEFAULTS: Final = {"stride": 1, "padding": 0, "output_padding": 0, "groups": 1, "dilation": 1}


def _geometry(node: Node, names: tuple[str, ...], dimensions: int) -> Geometry | str:
    """Return the geometry of a convolution, or why it has none."""
    given = {name: argument(node, 3 + i, name, _DEFAULTS[name]) for i, name in enumerate(names)}
    groups = given.pop("groups")
    numbers = {name: found for name, value in given.items() if (found := _numbers(value, dimensions)) is not None}
    if len(numbers) < len(given) or not isinstance(groups, int):
        return "its stride, padding or dilation is no number"
    found = Geometry(groups=groups, **numbers)
    if any(more >= step for more, step in zip(found.output_padding or (), found.stride, strict=False)):
        return "oneDNN has none whose output padding is as large as its stride"
    return found


def _numbers(value: Any, count: int) -> tuple[int, ...] | None:
    values = (value,) * count if isinstance(value, int) else value
    if not isinstance(values, tuple | list) or not all(isinstance(each, int) for each in values):
        return (0,) * count if value == "valid" else None
    return (*values,) * count if len(values) == 1 else (*values,)


def _is_weight(node: object) -> bool:
    return isinstance(node, Node) and node.op == "placeholder" and bool(notes(node).kind) and not notes(node).written


def activation_of(node: Node, epilogue: Epilogue) -> Act | None:
    """Return the activation in oneDNN's terms; None where an argument is no number."""
    if epilogue.binary or not node.args or not isinstance(node.args[0], Node):
        return None
    options = [argument(node, *option) for option in epilogue.options]
    algorithm = "" if epilogue.algorithm is None else argument(node, *epilogue.algorithm)
    if not all(isinstance(each, int | float) for each in options) or not isinstance(algorithm, str):
        return None
    return epilogue.name, (*epilogue.numbers, *map(float, options)), algorithm


def fold(product: Product, norm: Node) -> bool:
    """Fold a batch norm by running statistics into the weight; return whether it is one that the weight can take in."""
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


def pack(gm: GraphModule, context: Context) -> PassResult:
    """Take packed weights where oneDNN has kernels for them.

    ``graph_notes(gm).packings`` says which, ``packed`` which nodes run on them, and what joined each.
    """
    about = graph_notes(gm)
    about.packings, about.packed = (), {}
    if context.device != "cpu" or context.policy.level == "O0" or not can_pack(context.low):
        return PassResult(gm, False)
    if ever_records(gm.graph, False):
        return PassResult(gm, False, ("the graph: it turns gradients on, and packed products have none",))
    leaf = next((node for node in gm.graph.nodes if node.target in _MAKES_LEAVES), None)
    if leaf is not None:
        return PassResult(gm, False, (f"{leaf.name}: gradients of it may be asked for, and packed products have none",))
    packer = _Packer(gm.graph, context.low)
    packer.find()
    packer.join()
    about.packings = packer.write()
    about.packed = {product.node.name: tuple(product.joined) for product in packer.products}
    return PassResult(gm, bool(packer.products), tuple(packer.declined))


#: With gradients on, what these give wants one, whatever the graph was given.
_MAKES_LEAVES: Final = ("requires_grad_", torch.Tensor.requires_grad_)


def _asks_dimensions(user: Node) -> bool:
    return notes(user).op.name == "dim" and notes(user).dtype is NON_TENSOR


class _Packer:
    """Products of one graph: finds them, joins them with what follows, and writes their calls."""

    def __init__(self, graph: Graph, low: torch.dtype) -> None:
        self.products: list[Product] = []
        self.declined: list[str] = []
        self._graph, self._low = graph, low
        self._roots = alias_roots(graph)
        self._now: dict[Node, Node] = {}  # what an erased node became
        self._taken: set[Node] = set()

    def find(self) -> None:
        """Find the products that can run on packed weights."""
        for node in self._graph.nodes:
            found = product_of(node, self._low)
            if isinstance(found, Product):
                self.products.append(found)
                self._taken.add(node)
            elif found:
                self.declined.append(f"{node.name}: {found}")
        convolutions = {product.node for product in self.products if product.conv is not None}
        # Packed convolutions give channels last, which a reader gets as a copy: a write to that would be lost.
        writer = first_lost_write(self._graph, values_in_channels_last(self._graph, convolutions, through_views=True))
        # Linears leave everything as it lies.
        if writer is not None:
            self.declined.append(f"{writer.name}: writes to what would be a copy with packed convolutions")
            self.products = [product for product in self.products if product.conv is None]
            self._taken -= convolutions

    def join(self) -> None:
        """Take in what follows each: a batch norm, then another operand or an activation; behind a sum a relu."""
        for product in self.products:
            if product.conv is not None and (norm := self._next(product)) is not None and fold(product, norm):
                self._absorb(product, norm)
            # Where torch's own loop serves, there is nothing to join.
            if product.is_small:
                continue
            if (user := self._next(product)) is None or (epilogue := facts_at(user).epilogue) is None:
                continue
            if (act := activation_of(user, epilogue)) is not None:
                product.act = act
                self._absorb(product, user)
            elif epilogue.binary and (other := self._other_operand(product, user, epilogue.name)) is not None:
                self._move(product, user, other)
                after = self._next(product)
                epilogue = facts_at(after).epilogue if after is not None else None
                if after is not None and epilogue is not None and activation_of(after, epilogue) == RELU:
                    product.act = RELU
                    self._absorb(product, after)

    def _next(self, product: Product) -> Node | None:
        """Return the one op that reads its result, as its first argument or one of two, and gives that dtype."""
        node = product.node
        readers = [user for user in node.users if not _asks_dimensions(user)]
        if len(readers) != 1 or readers[0] in self._taken or actual_dtype(readers[0]) is not product.dtype:
            return None
        # A graph call may hold more than the op of its name, such as the relu behind a norm.
        if not is_op_of_torch(readers[0].target):
            return None
        # As an argument by itself, or once in a list that comes first.
        return readers[0] if [*arg_nodes(readers[0])].count((0, node)) == 1 or node in readers[0].args else None

    def _other_operand(self, product: Product, user: Node, how: str) -> Node | None:
        """Return the operand that may join a product in one kernel, which runs when both are there.

        A convolution's sum, where its channels are not in groups; oneDNN has none for transposed ones. Linears gain
        nothing: oneDNN's kernel reads the other operand as slowly as another pass over memory does (0.92 to 1.07 times
        as fast).
        """
        if len(user.args) != 2 or user.kwargs or user.args[0] is user.args[1]:
            return None
        conv = product.conv
        if conv is None or how != "add" or conv.groups != 1 or conv.output_padding is not None:
            return None
        own, other = user.args if user.args[0] is product.node else reversed(user.args)
        if not isinstance(other, Node) or actual_dtype(other) is not product.dtype:
            return None
        if notes(user).op.in_place and user.args[0] is not own:
            return None
        # The product runs later than it did: nobody may write to what it reads in between.
        node, reads = product.node.next, self._roots[product.x]
        while node is not user:
            if any(self._roots.get(written) is reads for written in written_by(node)):
                return None
            node = node.next
        return other

    def _absorb(self, product: Product, node: Node) -> None:
        """Make ``node`` a part of the product's kernel."""
        product.joined.append(notes(node).op.name)
        node.replace_all_uses_with(product.node)
        self._graph.erase_node(node)
        self._now[node] = product.node

    def _move(self, product: Product, user: Node, other: Node) -> None:
        """Run the product where its user did, and in its place."""
        before = product.node
        product.joined.append(notes(user).op.name)
        product.node, product.other = user, other
        self._taken.add(user)
        # For now: ``_call`` writes all of its arguments. It must read nothing of the node that is erased below.
        user.args = (other,)
        # Who asked the product how many dimensions it has, asks its input, which has as many.
        for asks in [*before.users]:
            asks.replace_input_with(before, self._as_it_is(product.x))
        self._graph.erase_node(before)
        self._now[before] = user

    def _as_it_is(self, node: Node) -> Node:
        while node in self._now:
            node = self._now[node]
        return node

    # -- rewriting ----------------------------------------------------------------------------------------------------

    def write(self) -> tuple[Packing, ...]:
        """Make the calls, and return what makes the new placeholders, in their order."""
        first = next(iter(self._graph.nodes))
        made: dict[Packing, tuple[Node, Node | None]] = {}
        for product in self.products:
            # One weight that several products read is packed once for all that pack it alike.
            packing = product.packing
            if packing not in made:
                with self._graph.inserting_before(first):
                    made[packing] = self._placeholders(product)
            self._call(product, *made[packing])
        self._put_formats_back()
        self._write_over()
        return tuple(made)

    def _placeholders(self, product: Product) -> tuple[Node, Node | None]:
        weight = self._placeholder(f"packed_{product.weight.target}")
        weight.meta.update(dtype=notes(product.weight).dtype, precision=notes(product.weight).precision)
        if product.norm is None:
            return weight, None
        bias = self._placeholder(f"{weight.name}_bias")
        output = product.dtype if product.other is not None else torch.float32
        precision = Precision.arriving(None, output, Rule.KEEP, "of a folded batch norm")
        bias.meta.update(dtype=torch.float32, precision=precision)
        return weight, bias

    def _placeholder(self, name: str) -> Node:
        """Make a placeholder with a target of its own: a program finds its arguments by these."""
        node = self._graph.placeholder(name)
        node.target = node.name
        return node

    def _call(self, product: Product, packed: Node, folded: Node | None) -> None:
        node, bias = product.node, product.bias if folded is None else folded
        x, other = self._as_it_is(product.x), None if product.other is None else self._as_it_is(product.other)
        name, numbers, algorithm = product.act
        if product.conv is None and product.is_small:
            node.target, node.args = packed_linear_of_many, (x, product.weight, packed, bias)
        elif product.conv is None:
            node.target, node.args = linear_pointwise, (x, packed, bias, name, [*numbers], algorithm)
        elif other is not None:
            relu = product.act == RELU
            node.target, node.args = packed_conv_plus, (x, packed, bias, other, relu)
        else:
            act = product.act if product.act != NOTHING else ()
            node.target, node.args = packed_conv, (x, packed, bias, *act)
        node.op, node.kwargs = "call_function", {}
        notes(node).op = Op("packed_linear" if node.target is linear_pointwise else node.target.__name__)  # type: ignore[union-attr]
        joined = f", with {', '.join(product.joined)}" if product.joined else ""
        notes(node).fused = f"oneDNN, on a weight packed once{joined}"

    def _put_formats_back(self) -> None:
        """Copy what convolutions leave in channels_last for readers to whom the order matters."""
        # Value -> the input and the weight of the convolution whose layout it has: they tell torch's own layout.
        origins: dict[Node, tuple[Node, ...]] = {}
        weights = {product.node: product.weight for product in self.products if product.conv is not None}
        restored: dict[Node, Node] = {}
        for node in [*self._graph.nodes]:
            sources = [source for source in node.all_input_nodes if source in origins]
            if node in weights:
                x = node.args[0]
                assert isinstance(x, Node)
                # In a chain of convolutions the input of the first, and the weight of the last.
                first = origins[x][0] if x in origins else x
                origins[node] = (first, weights[node])
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

    def _write_over(self) -> None:
        """Let a sum overwrite its other operand, where that has no use any more.

        A packed convolution made it, and only packed convolutions read it, none of which comes later than this one.
        """
        convolutions = (packed_conv, packed_conv_plus)
        # What has run by the time that a node runs.
        gone: set[Node] = set()
        for node in self._graph.nodes:
            gone.add(node)
            if node.target is packed_conv_plus:
                x, _, _, other, relu = node.args
                assert isinstance(other, Node)
                readers = [user for user in other.users if not _asks_dimensions(user)]
                read_before = all(user.target in convolutions and user in gone for user in readers)
                if other is not x and other.target in convolutions and read_before:
                    node.args = (*node.args[:4], relu, True)

    def _put_back(self, value: Node, origins: tuple[Node, ...]) -> Node:
        with self._graph.inserting_after(value):
            node = self._graph.call_function(in_format_of, (value, *origins))
        node.meta.update({key: value.meta[key] for key in ("dtype", "precision", "val", "numel") if key in value.meta})
        notes(node).op = Op("in_format_of")
        return node


_LINEARS: Final = (linear_pointwise, packed_linear_of_many)
