"""Annotations that the passes write on a node, and of a graph: typed, each field with the pass that writes it.

``notes(node)`` reads and writes them; they lie in ``node.meta`` under their names (``node.meta["precision"]``), so that
they travel with every copy of the node that torch.fx makes. ``graph_notes(gm)`` does so with ``gm.meta``. A pass that
makes a node, or makes another one of it, writes all of that node's; of the others it writes its own fields only.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from itertools import chain
from types import MappingProxyType
from typing import Annotated, Any, Final, NamedTuple, TypeAlias

import torch
from torch.fx import Graph, GraphModule, Node

#: Dtypes that a policy may change. float64, integers, bool and complex are never touched.
CASTABLE: Final = frozenset({torch.float32, torch.float16, torch.bfloat16})
#: Layouts that have few kernels for low numbers, and none of autocast's.
SPARSE: Final = frozenset({torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc})


class Rule(StrEnum):
    """Rule of a policy for an op (the op table: ``passes/ops/rule.py``).

    LOW: computes in the low dtype. FULL: in FP32. FOLLOW: in the dtype of its input. PROMOTE: in the widest dtype of
    its inputs. KEEP: in the dtypes of the original program.
    """

    LOW = "low"
    FULL = "full"
    FOLLOW = "follow"
    PROMOTE = "promote"
    KEEP = "keep"


class Special(StrEnum):
    """Stand-ins for a dtype where a value has none, or none that can be known."""

    UNKNOWN = "unknown"
    NON_TENSOR = "-"


UNKNOWN: Final = Special.UNKNOWN
NON_TENSOR: Final = Special.NON_TENSOR

DTypeInfo: TypeAlias = "torch.dtype | Special | tuple[DTypeInfo, ...]"


class Op(NamedTuple):
    """Canonical op of a node: one name for all spellings. ``in_place``: the first argument is written."""

    name: str
    in_place: bool = False


#: Of a node that calls no op: a placeholder, get_attr, the output, a function that the op names do not know.
NO_OP: Final = Op("")


class Arrival(StrEnum):
    """Dtypes in which a node reads that asks for none of its own."""

    AS_IT_ARRIVES = "as it arrives"
    ORIGINAL = "its original dtype"


class Precision(NamedTuple):
    """Decision of ``decide`` for one node.

    Attributes:
        reads: the dtype that the node's float data ports take, cast where they have another (its other float arguments
            take their original dtype); ``ORIGINAL``: every float argument takes its original dtype; ``AS_IT_ARRIVES``:
            nothing is cast.
        compute: dtype the arithmetic runs in (FP32 inside a mixed kernel that reads low); None for non-float nodes.
        output: dtype of the float result(s); None where there is none.
        rule: the rule that applied.
        why: one clause for the report.
    """

    reads: torch.dtype | Arrival
    compute: torch.dtype | None
    output: torch.dtype | None
    rule: Rule
    why: str

    @classmethod
    def arriving(cls, compute: torch.dtype | None, output: torch.dtype | None, rule: Rule, why: str) -> Precision:
        """Make the decision for a node that takes everything as it arrives."""
        return cls(Arrival.AS_IT_ARRIVES, compute, output, rule, why)


#: Of a node that ``decide`` did not see.
UNDECIDED: Final = Precision.arriving(None, None, Rule.KEEP, "")


class Annotations:
    """The annotations of one node: a typed view of ``node.meta``, which torch.fx copies with the node.

    Its attributes *are* the entries of that dict. Each field names the pass that writes it (of ``fused`` one of many),
    and what it is where nobody did.
    """

    #: "parameter", "buffer" or "constant": what a get_attr node reads, or a weight that became an input.
    kind: Annotated[str, "capture"] = ""
    #: Path in the model of what a get_attr node reads, where a graph module cannot have that name.
    path: Annotated[str, "capture"] = ""
    #: Equal for inputs, parameters and buffers that share memory; None where nothing does.
    memory: Annotated[Any, "capture"] = None
    #: Whether an input is what another piece of the method computed, or may be: no input of the model.
    handed_over: Annotated[bool, "capture"] = False
    #: Of an input whose dtype nobody knew: something low is made of it that would be FP32 if it were an integer.
    taken_for_float: Annotated[bool, "decide"] = False
    #: The canonical op.
    op: Annotated[Op, "canonicalize", "make_functional"] = NO_OP
    #: Whether the graph writes to the memory of this input, parameter or buffer.
    written: Annotated[bool, "canonicalize"] = False
    #: False within ``autocast(enabled=False)``: the node keeps its original dtype. A dtype within the user's own
    #: autocast in it: the node's value has, in the original program, the dtype that capture saw.
    autocast: Annotated[bool | torch.dtype, "resolve_autocast_regions"] = True
    #: In the body of a region of the user's own autocast that runs as it is written: nothing is rewritten there.
    as_written: Annotated[bool, "resolve_autocast_regions"] = False
    #: Whether the low dtype that the call names was asked of a tensor (``x.to(h.dtype)``) that autocast had made low
    #: when dynamo traced, and that is FP32 in the original program.
    names_tensors_dtype: Annotated[bool, "capture"] = False
    #: What the program had instead of this call, in words.
    instead_of: Annotated[str, "take_logits"] = ""
    #: dtype of the value in the *original* FP32 program: a ``torch.dtype``, ``UNKNOWN`` (nobody can tell without
    #: inputs), ``NON_TENSOR``, or a tuple of these. Capture states those of inputs that it knows. Of a cast that a pass
    #: makes, which that program has not: the dtype that it casts to.
    dtype: Annotated[DTypeInfo, "propagate"] = NON_TENSOR
    #: Elements of the value where shapes are known, else None (a tuple: of its elements).
    numel: Annotated[Any, "propagate"] = None
    #: Of a parameter or buffer.
    sizes: Annotated[tuple[int, ...] | None, "propagate"] = None
    #: Positions of the results that are FP32 whatever arrives.
    wide: Annotated[frozenset[int], "propagate"] = frozenset()
    #: Whether the value is, or may be, a sparse tensor. Capture states it of inputs.
    sparse: Annotated[bool, "propagate"] = False
    #: Whether the value is known to be a 0-dim tensor; None: nobody asked yet. Of many values nobody knows: then this
    #: and ``has_dimensions`` are both False.
    is_zero_dim: Annotated[bool | None, "propagate"] = None
    #: Whether it is known to be a tensor with dimensions, which promotes.
    has_dimensions: Annotated[bool, "propagate"] = False
    #: What the node reads, computes and puts out, and why.
    precision: Annotated[Precision, "decide"] = UNDECIDED
    #: The dtype to cast the value to right behind its op: of memory that is written later, or of a lookup, where all
    #: who read and write it want another dtype than the kernel puts out.
    stored_dtype: Annotated[torch.dtype | None, "decide", "insert_casts"] = None
    #: Whether the call, which names the dtype of another tensor (``x.to(h.dtype)``), is to name FP32, as ``h`` is low
    #: now and the value needs its digits. ``insert_casts`` writes it so.
    names_fp32: Annotated[bool, "decide"] = False
    #: Whether the node is a cast that a pass made.
    inserted: Annotated[bool, "insert_casts"] = False
    #: Whether the node is a cast by which others read a value as it is returned.
    returns: Annotated[bool, "keep_returned"] = False
    #: Which kernel serves the node, in words.
    fused: Annotated[str, "accumulate_wide", "call_kernels", "fuse", "move_wide", "pack"] = ""
    #: The name of the region that the node is in.
    region: Annotated[str, "fuse"] = ""
    #: In a region: "stored" if the value leaves it, "kept" if not; "" outside.
    in_region: Annotated[str, "fuse"] = ""
    #: Of a region with several results: their dtypes.
    puts_out: Annotated[tuple[torch.dtype | None, ...], "fuse"] = ()
    #: A cast of a bias that is made where it is read, never in memory.
    in_registers: Annotated[bool, "fuse"] = False
    #: The product whose bias the node adds.
    bias_of: Annotated[Any, "fuse"] = None

    def state(self, field: str) -> bool:
        """Return whether somebody wrote that field."""
        return field in self.__dict__

    def discard(self, *fields: str) -> None:
        """Take back what somebody wrote to these fields, if anybody did.

        A ``__delattr__`` would do, and make each assignment, and with it each view, half as fast.
        """
        for field in fields:
            self.__dict__.pop(field, None)


def notes(node: Node) -> Annotations:
    """Return the annotations of a node; assigning to a field writes it.

    A misspelled field would be written without a word, but for pyright, which reports it. The view is made in
    the shortest way, without a call of ``__init__``: it is asked for a hundred times a node.
    """
    view = Annotations()
    view.__dict__ = node.meta
    return view


def annotated(graph: Graph) -> list[tuple[Node, Annotations]]:
    """Return each node of a graph with its annotations, in the order of the graph."""
    return [(node, notes(node)) for node in graph.nodes]


class GraphAnnotations:
    """The annotations of a graph as a whole: a typed view of ``graph_module.meta``.

    Each field names the pass that writes it, and what it is where nobody did. A graph and the bodies that it calls have
    their own.
    """

    #: "pass: node: reason" for every rewrite that a pass saw and did not make. Of the bodies too.
    declined: Annotated[Sequence[str], "runner"] = ()
    #: The costs by which ops that do not pay stayed FP32, in words; "": none.
    costs: Annotated[str, "decide"] = ""
    #: Whether those counted a backward pass.
    counts_backward: Annotated[bool, "decide"] = False
    #: Casts, the user's and ours, that others read no longer.
    folded: Annotated[int, "fold_casts"] = 0
    #: Of the graph of a fused region: its name.
    region: Annotated[str, "fuse"] = ""
    #: Of all the regions that were found, fused or not.
    region_names: Annotated[Sequence[str], "fuse"] = ()
    #: Elements of the largest region that is left to torch's ops because it has few.
    largest_left: Annotated[int | None, "fuse"] = None
    #: Whether regions were fused that would be left to torch's ops if it were known that they are small.
    wants_sizes: Annotated[bool, "fuse"] = False
    #: What makes the packed weights that the graph takes, in their order.
    packings: Annotated[Sequence[Any], "pack"] = ()
    #: Name of each node that runs on packed weights -> the ops that joined it.
    packed: Annotated[Mapping[str, Sequence[str]], "pack"] = MappingProxyType({})


def graph_notes(gm: GraphModule) -> GraphAnnotations:
    """Return what the passes wrote of a graph as a whole; assigning to a field writes it."""
    view = GraphAnnotations()
    view.__dict__ = gm.meta
    return view


def is_castable(info: DTypeInfo | None) -> bool:
    """Return whether a value of this original dtype is (or, when unknown, may be) a float that a policy can cast."""
    return info is UNKNOWN or (isinstance(info, torch.dtype) and info in CASTABLE)


def argument(node: Node, position: int, name: str, default: Any = None) -> Any:
    """Return an argument of a call, given by position or by keyword; the default where it is left out."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


#: What holds arguments of a call.
_CONTAINERS: Final = (tuple, list, dict, slice)
_CONTAINERS_AND_RANGE: Final = (*_CONTAINERS, range)


def leaves(argument: Any) -> list[Any]:
    """Return the leaves of nested arguments."""
    if not isinstance(argument, _CONTAINERS_AND_RANGE):
        return [argument]
    if isinstance(argument, slice):
        argument = (argument.start, argument.stop, argument.step)
    elif isinstance(argument, dict):
        argument = argument.values()
    elif isinstance(argument, range):
        argument = tuple(argument[:1])  # one integer stands for all: who asks for leaves asks of what kind they are
    return [*chain.from_iterable(map(leaves, argument))]


def nested(value: Any, of_leaf: Callable[[Any], Any]) -> Any:
    """Something of each leaf of a value, in tuples that are nested as the value is."""
    return tuple(nested(each, of_leaf) for each in value) if isinstance(value, tuple | list) else of_leaf(value)


def arg_nodes(node: Node) -> list[tuple[int | str, Node]]:
    """Return (port, node) for every node among the arguments, nested ones under the port of their container."""
    found: list[tuple[int | str, Node]] = []
    for port, argument in chain(enumerate(node.args), node.kwargs.items()):
        if isinstance(argument, Node):
            found.append((port, argument))
        elif isinstance(argument, _CONTAINERS):
            found += [(port, leaf) for leaf in leaves(argument) if isinstance(leaf, Node)]
    return found


def tensors_of(node: Node) -> list[Node]:
    """Return the nodes among the arguments that are, or may be, tensors: no sizes, dtypes or devices."""
    return [each for each in node.all_input_nodes if notes(each).dtype is not NON_TENSOR]


def module_path(node: Node) -> str:
    """Dotted path of the module whose forward made the node; '' at the root or where nobody recorded it."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = next(reversed(stack.values()))
    name = path[0] if isinstance(path, tuple) else next(reversed(stack))
    return clean_path(str(name))


def weight_path(node: Node) -> str:
    """Path in the model of the tensor that a get_attr node reads: a graph module cannot have every name."""
    return notes(node).path or str(node.target)


#: What a path of dynamo holds besides names that the user gave: where modules and weights lie in an ``nn.Module``.
_INTERNAL: Final = frozenset({"_modules", "_parameters", "_buffers", "__dict__", ""})
#: What ``torch.export`` names where it knows of no module.
_NOWHERE: Final = "_empty_nn_module_stack_from_metadata_hook"


@functools.lru_cache(maxsize=1 << 12)  # of every node of a module it is asked several times
def clean_path(name: str) -> str:
    """Return a path as the user knows it, from any way in which a capture writes it.

    dynamo writes ``L['self']._modules['fc']``, ``L['self'].fc`` or, where a class has a ``__getattr__`` of its own,
    ``L['self'].__dict__['_modules']['fc']``: all are ``fc``. What a call, a closure or a bound method gave is a root as
    ``self`` is: ``L['self']._module()._modules['fc']``. A global ``G['model'].fc`` is ``model.fc``.
    """
    name = re.sub(r"^.*(?:\(\)|\.cell_contents|\.__self__)|^L\[['\"]\w+['\"]\]|^G(?=\[)|^self\b", "", name)
    dotted = re.sub(r"\[(['\"]?)(.*?)\1\]", r".\2", name)
    return ".".join(part for part in dotted.split(".") if part not in _INTERNAL and part != _NOWHERE)
