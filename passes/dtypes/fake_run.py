"""Run a rewritten graph on fake tensors, and compare what comes out with what the passes wrote on its nodes.

This knows nothing of rules, ports or casts: torch itself says which dtype each call gives for the dtypes that arrive.
Layers are alike: of calls that differ in sizes only one is run. A call that cannot be run on fake tensors (of an op
without a row, of a body, of our own kernels, one that reads values, or one that has no fake) gives what its annotation
says, so that its readers are judged all the same.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch.fx import GraphModule, Node

from fxprec.kernels.torch_internals import FakeTensor
from fxprec.passes.dtypes.fake_results import call, quietly
from fxprec.passes.graph.annotations import CASTABLE, Annotations, Rule, annotated, notes
from fxprec.passes.graph.casts import CASTS, cast
from fxprec.passes.graph.subgraphs import attribute_of
from fxprec.passes.ops.table import OpRule, row_of
from fxprec.passes.torch_internals import FakeTensorMode, HigherOrderOperator, tree_leaves, tree_map

#: Casts that look at run time what arrives.
_LOOK: Final = CASTS - {cast}
_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)

#: The dtype of each value that a result is made of; None of one that is no tensor.
Dtypes: TypeAlias = "tuple[torch.dtype | None, ...]"


class Disagreement(NamedTuple):
    """A result whose dtype is not what the annotation says."""

    node: Node
    got: torch.dtype
    stated: torch.dtype | None


@dataclass(frozen=True, slots=True)
class _Value:
    """Value of a node in the fake run: fake tensors of the right sizes, and the dtypes that they have in this graph."""

    fakes: Any
    dtypes: Dtypes

    def is_plain(self) -> bool:
        leaves = _leaves(self.fakes)
        return self.fakes is not None and all(
            type(leaf) is FakeTensor or not isinstance(leaf, torch.Tensor) for leaf in leaves
        )

    def described(self) -> tuple[object, ...]:
        """Return all that the dtype of a result may follow from."""
        return tuple(
            (type(leaf), leaf) if dtype is None else (dtype, leaf.dim(), leaf.device)
            for leaf, dtype in zip(_leaves(self.fakes), self.dtypes, strict=True)
        )

    def in_its_dtypes(self, copy: bool = False) -> Any:
        if not copy and all(
            dtype in (None, leaf.dtype) for leaf, dtype in zip(_leaves(self.fakes), self.dtypes, strict=True)
        ):
            return self.fakes
        dtypes = iter(self.dtypes)
        return tree_map(lambda leaf: leaf if (to := next(dtypes)) is None else leaf.to(to, copy=copy), self.fakes)


def run_on_fakes(gm: GraphModule) -> Iterator[Disagreement]:
    """Yield every node whose result has another dtype than stated; none where no fake values were captured."""
    values = (node.meta.get("val") for node in gm.graph.nodes)
    mode = next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None)
    if mode is not None:
        with quietly(mode):
            yield from _run(gm, mode)


def find_disagreement(node: Node, value: Any) -> Disagreement | None:
    """Return the first tensor of a result whose dtype its node's annotations do not state; None: all agree.

    Not judged are

    - a result of several tensors that is taken apart: each is judged where it is taken out;
    - a part that nobody reads;
    - a cast that looks at run time, where no output is stated;
    - results that are FP32 in the kernel whatever arrives (``wide``), of which nobody reads one in a lowered op.
    """
    return _disagreement(node, notes(node), _dtypes(value), isinstance(value, torch.Tensor))


def _disagreement(node: Node, annotations: Annotations, dtypes: Dtypes, single: bool) -> Disagreement | None:
    precision, info = annotations.precision, annotations.dtype
    if not single and (_taken_apart(node) or precision.output is None):
        return None  # several results: each is stated where it is taken out
    if (node.target is operator.getitem and not node.users) or (node.target in _LOOK and precision.output is None):
        return None
    unused = annotations.wide if precision.rule is not Rule.KEEP else ()
    for port, dtype in enumerate(dtypes):
        if dtype is None or port in unused:
            continue
        stated = precision.output if dtype in CASTABLE else info if isinstance(info, torch.dtype) else dtype
        if dtype != stated:
            return Disagreement(node, dtype, stated)
    return None


def _taken_apart(node: Node) -> bool:
    """Return whether every reader takes one of the results."""
    return bool(node.users) and all(user.target is operator.getitem for user in node.users)


def _run(gm: GraphModule, mode: FakeTensorMode) -> Iterator[Disagreement]:
    values: dict[Node, _Value] = {}
    known: dict[object, Dtypes] = {}
    for node, noted in annotated(gm.graph):
        values[node] = _stated(node, noted.precision.output, mode)
        if not _runs(node, row_of(noted.op.name), values):
            continue
        in_place = noted.op.in_place
        key = None if in_place else _key(node, values)
        dtypes = known.get(key) if key is not None else None
        if dtypes is not None and len(dtypes) == len(values[node].dtypes):
            values[node] = _Value(values[node].fakes, dtypes)
        else:
            try:
                # It runs on copies, which later readers get: what was captured stays as it is.
                if in_place:
                    for source in node.all_input_nodes:
                        own = values[source].in_its_dtypes(copy=True)
                        values[source] = _Value(own, values[source].dtypes)
                with _autocast_of(node, noted):
                    result = call(node, lambda source: values[source].in_its_dtypes())
            except Exception:  # without a fake, or one that does not take these: what is stated is all there is
                continue
            values[node] = _Value(result, _dtypes(result))
            if key is not None:
                known[key] = values[node].dtypes
        found = _disagreement(node, noted, values[node].dtypes, isinstance(values[node].fakes, torch.Tensor))
        if found is not None:
            yield found


def _key(node: Node, values: dict[Node, _Value]) -> object:
    """Return what the dtypes of a result follow from, to look it up by; None where that cannot be compared."""

    def described(argument: Any) -> object:
        if isinstance(argument, Node):
            return values[argument].described()
        if isinstance(argument, tuple | list):
            return tuple(map(described, argument))
        if isinstance(argument, dict):
            return tuple((name, described(value)) for name, value in argument.items())
        if isinstance(argument, slice):
            return "slice", *map(described, (argument.start, argument.stop, argument.step))
        return type(argument), argument

    key = (node.target, described(node.args), described(node.kwargs))
    try:
        hash(key)
    except Exception:  # a symbolic size
        return None
    return key


def _runs(node: Node, row: OpRule | None, values: dict[Node, _Value]) -> bool:
    """Return whether this is a call of torch's whose tensors are all at hand as plain fake ones."""
    if node.op not in ("call_function", "call_method") or isinstance(node.target, HigherOrderOperator):
        return False
    if row is None or row.result == "none":
        return False
    if str(getattr(node.target, "__module__", "")).startswith("fxprec.") and node.target not in CASTS:
        return False
    return all(values[source].is_plain() for source in node.all_input_nodes)


def _autocast_of(node: Node, annotations: Annotations) -> contextlib.AbstractContextManager[Any]:
    """Return the user's own autocast, where the node runs as it is written within it."""
    if not annotations.as_written or not isinstance(annotations.autocast, torch.dtype):
        return contextlib.nullcontext()
    value = next(
        (value for each in node.all_input_nodes if isinstance(value := each.meta.get("val"), torch.Tensor)), None
    )
    return contextlib.nullcontext() if value is None else torch.autocast(value.device.type, annotations.autocast)


def _stated(node: Node, stated: torch.dtype | None, mode: FakeTensorMode) -> _Value:
    """Return the captured fake value in the dtype that the annotation says."""
    if node.op == "call_module" or isinstance(node.target, HigherOrderOperator):
        return _Value(None, (None,))  # it may have several results, each of a dtype of its own
    value = node.meta.get("val")
    if value is None and node.op == "get_attr":
        value = attribute_of(node)
        value = mode.from_tensor(value, static_shapes=True) if type(value) in _PLAIN else None
    return _Value(value, tuple(stated if stated and dtype in CASTABLE else dtype for dtype in _dtypes(value)))


def _dtypes(value: Any) -> Dtypes:
    return tuple(leaf.dtype if isinstance(leaf, torch.Tensor) else None for leaf in _leaves(value))


def _leaves(value: Any) -> Iterable[Any]:
    return (value,) if isinstance(value, torch.Tensor) else tree_leaves(value)
