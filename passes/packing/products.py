"""What of a program can run on a packed weight: linears and convolutions, and what may join them.

``product_of`` reads one node, ``fold`` and ``activation_of`` one that follows it; nothing here changes a graph. A
``Product`` collects what ``pack`` decides of one, and a ``Packing`` is what makes its weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch.fx import Node

from fxprec.kernels.cpu.packed import FEW, Geometry
from fxprec.passes.graph.annotations import argument, notes
from fxprec.passes.insert_casts import actual_dtype
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
        same_bias: the bias that comes out has that dtype as well: the kernel that adds another operand takes no other.
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
        """The same of other names."""
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
        """Flag of a product that torch's own loop may run faster: a linear of few, or unknown, rows."""
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
