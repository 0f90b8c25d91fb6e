"""A row of the op table, and the short form in which the tables write many rows at once.

To see the whole row of an op, whose facts stand in several lines of ``passes/ops/rows``, print it:
``python -c "from fxprec.passes.ops.table import OP_TABLE; print(OP_TABLE['div'])"``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias

from fxprec.passes.graph.annotations import Rule

Squares: TypeAlias = Literal["always", "factors", "vectors", "dimensions", "subscripts", "power"]
Numbers: TypeAlias = Literal["added", "factors", "compared", "fill", "aside"]
Layout: TypeAlias = Literal["dense", "sparse", "mixed"]
Rank: TypeAlias = Literal["reduced", "kept", "some"]
Depth: TypeAlias = Literal["last", "subscripts", "chain"]
Cost: TypeAlias = Literal["product", "convolution", "transposed convolution", "attention", "pointwise"]


class Epilogue(NamedTuple):
    """An op as oneDNN has it behind a product: its name there, and the numbers that it wants.

    ``options``: (position, name, default) of the arguments that give them; ``numbers``: those that are always the same;
    ``algorithm``: (position, name, default) of the one that says how it is computed; ``binary``: it has two operands.
    """

    name: str
    options: tuple[tuple[int, str, float], ...] = ()
    numbers: tuple[float, ...] = ()
    algorithm: tuple[int, str, str] | None = None
    binary: bool = False


class Writes(NamedTuple):
    """Ports that are written to unless a flag (its position, its name, what it is where it is left out) says no."""

    ports: tuple[int | str, ...]
    flag: tuple[int, str, bool]


class LowSums(NamedTuple):
    """Values of an option (its position, its name) with which a kernel adds up, or multiplies, in its data's dtype.

    By device type; of an op without such an option the value is None.
    """

    cpu: tuple[object, ...] = ()
    cuda: tuple[object, ...] = ()
    option: tuple[int, str] | None = None


@dataclass(frozen=True, slots=True)
class OpRule:
    """Row of the op table: facts of one canonical op. A port is an argument's position or keyword name.

    What a policy says of it:

    Attributes:
        rule: LOW, FULL, FOLLOW, PROMOTE or KEEP.
        why: one clause, shown in the report and in docs/precision.md.
        autocast: what torch.autocast's CUDA lists say, for placement="autocast". Given where that differs from ``rule``
            (copies that autocast widens for nothing), and for every FULL op that the lists name. None: as ``rule``; for
            a FULL op: the lists do not name it.
        form_of: the op of which its arguments make this one (an einsum that sums nothing); an override of that op holds
            for this one as well.

    What its kernels take:

        ports: the ports that carry the rule's dtype; None: every float tensor argument (nested lists included). The
            other float arguments keep their original dtype (a norm's weight, running statistics).
        fp32_ports: those other arguments must be FP32, also at O3, where the original dtype of a parameter is low
            (batch_norm, whose running statistics are FP32).
        masks: ports of additive masks: their numbers saturate where the low dtype cannot hold them.
        indices: ports that take integers only.
        places: ports that say where values are read or written, not which (the index of scatter).
        arrives: it takes whatever arrives, whatever the rule: a part (getitem), a cast of the user's (to), a copy that
            converts (copy).
        native_promotion: the eager kernel takes mixed low/FP32 inputs and promotes inside: no cast is needed to
            compute in FP32.
        mixed: device types on which the eager kernel reads low data, computes in FP32 inside, and writes low, while the
            arguments on the other ports stay FP32: {"cpu"} for layer_norm. There its data and its result may be either.
        dtype_keyword: the op takes ``dtype=`` and accumulates in it while reading low natively (sum, mean).
        backward_sums: device types on which its *backward* sums gradients in the dtype of its data. In low such a sum
            stops growing (of a weight that is read often), or gradients go to wrong places (of a maximum of rounded
            values): there the op reads FP32, and its result is cast back.
        sums_low: when its *forward* sums many values in the dtype of its data, so that in low a sum stays at a few
            hundred (index_add): it is FP32 then.
        lookup: its first data are a table (embedding), whatever made it: ``backward_sums`` holds for it in any case.
        pads: it pads, and its ``mode`` says whether it repeats values: only then does its backward add up.
        low_kernel: whether there is a kernel for low inputs at all, forward and backward: without one a FULL op stays
            FULL even where a level or a placement would have it run low.
        boolean: of bool operands it gives the same as of their zeros and ones in FP32.

    What comes out:

        result: how the dtype of the result follows from the inputs in the original program. A ``torch.dtype`` among
            the arguments of the call (``dtype=torch.float32``) always wins; else:

            ==============  ====================================================================================
            "promote"       torch's type promotion over the tensor arguments and numbers
            "tensors"       the same over the tensor arguments only: numbers are dimensions, factors of a product, ...
            "first"         the first tensor argument's
            "float"         as "promote", but integers and bool become the default float
            "accumulate"    the first's, but integers and bool become int64 (sum, prod)
            "real"          the first's, but complex becomes its real part's (abs, norms)
            "float_real"    as "float", but complex becomes its real part's (distances)
            "complex"       as "float", but real becomes complex
            "wide"          the first's, but at least FP32 (the logsumexp of an attention kernel)
            "float64"       float64, of complex complex128
            "default"       torch.get_default_dtype()
            "bool", "int64", "float32", ...   the dtype of that name
            "none"          no tensor: sizes, numbers, None
            "unknown"       ask FakeTensor
            "first*"        a list of unknown length, each as the first (any of the above can have the star)
            a tuple         several results
            ==============  ====================================================================================
        special: the function of ``dtypes.special_results`` that is asked first: the call's arguments decide.
        return_indices: position of the flag of that name: with it positions come out too.
        layout: whether the result is a sparse tensor: "dense": never; "sparse": always; "mixed": where all tensor
            arguments are; None: where one is.
        rank: when the result is 0-dim. "reduced": where the call names no dimension (sum); "kept": where all tensor
            arguments are (add); "some": never, and a float first argument is not either (linear, cat).
        float_number: of numbers it gives a Python float.
        wide: a LOW op whose kernel puts out FP32, whatever it reads (linear_cross_entropy). The result kind of that
            name, and ``wide`` among the annotations of a node, say so of single results.
        wide_state: a wide op that carries a state (gru, gru_cell, lstm_cell): its products read low, its state stays
            FP32 where the kernel allows (``graph.wide_state`` has its call).
        view, whole, repeats, same, itself, exact: how the result's values and memory come from the first argument:

            ========  =====================================================  =========================================
            field     the result ...                                         of these ops, for example
            ========  =====================================================  =========================================
            view      may share its memory                                   detach, getitem, transpose, expand, to
            whole     (a view) shows all of its elements                     reshape, transpose, expand
            repeats   (a view) may show an element several times, so that    expand
                      a copy of it is laid out otherwise
            same      holds its values, each in its place                    detach, clone, to, contiguous
            itself    is the very tensor where there is nothing to do        contiguous, to, dropout
            exact     (views apart) is the same whether the input is         gather, cat, relu, neg
                      rounded before or the result after: it only moves,
                      selects, drops or negates values. Sums do not:
                      (x - mean) of a rounded x has lost its digits
            ========  =====================================================  =========================================
        overwritable: its backward does not read its first argument (that of exp reads the result): the memory may be
            overwritten before the backward runs.
        strides: it reads memory by strides that it is given (as_strided), so it must get the very tensor: a copy may be
            laid out otherwise. Passes treat it as a write, which wants the very tensor, too.
        bits: given a dtype in the place of a shape, it reads the bits of its first argument as numbers of that dtype
            (``x.view(torch.int32)``): the argument has its original dtype then, whatever else it is.
        reads_values: of an op without a tensor result: it reads the values all the same, or tells how many bytes one
            has, and not only sizes and flags.
        gradient: whether gradients flow through it.

    What it does besides:

        inplace: position of its ``inplace`` argument.
        writes: what a call writes to although its name does not say so, and when.
        random: it draws random numbers, or may.

    What it does to the range of its values:

        squares: whether the op multiplies a value by itself, which leaves float16's range from 256 on: there such a
            call is FULL. ``placement.products`` asks:

            ==============  ====================================================================================
            "always"        it does
            "factors"       where its last two tensors are one value
            "vectors"       likewise, and it is a vector: else the result is a Gram matrix
            "dimensions"    likewise, and ``dims`` names all its dimensions
            "subscripts"    where two operands with equal subscripts are one value
            "power"         where the exponent is above 1 (FULL as it is, but its result may be written elsewhere)
            ==============  ====================================================================================
        numbers: what Python numbers among its arguments are: "added" to the data, its "factors", "compared" with it
            (bounds, or what stands in its place), or "fill": they become values of the result; "aside": probabilities
            and factors that never meet the data; None: floats are operands, and integers are dimensions and the like.
        singular: position of the argument at whose zero it has a pole, or an endless slope: an eps guards it.
        exponential: it raises to the power of its argument.
        saturates: its results come so close to 1 (or -1) that low precision makes them that number.
        poles: ports at which such a number, or 1 minus it, meets a pole or an endless slope.
        reduces: its result is the sum, mean or product of many values, and nothing else.
        example: its first argument is an example of a shape and a dtype, whose values it does not read.
        counts: of constants it makes values that count: positions, running totals.
        periodic: its argument is an angle: bounded, and other where the argument is rounded.
        contains_sum: it sums many values, whatever else it does (a norm, a softmax).
        guard: the call as one would write it where its arguments x (and y) are at a pole or out of range, in Python,
            and why in a comment. ``fxprec.numerics.locate`` gives it where no precision cures.

    What it costs:

        cost: how its time is told from its shapes; None: by the bytes it moves, or nobody knows.
        factors: positions of the two operands of a product.
        depth: where a product has the size that it sums over: "last", the last dimension of its left operand;
            "subscripts", in its equation; "chain", the last dimension of each operand but the last one.
        bias: how many dimensions the result has behind the one along which a bias is added: 0 of linear, 2 of conv2d;
            None: it takes no bias.

    What a product that it follows can do for it, and where its values lie:

        epilogue: how a product's kernel is asked to apply it to its result (see ``passes.pack``).
        any_format: it computes the same however its arguments lie in memory (contiguous, channels_last), and its
            result, as far as it is a tensor of theirs, lies as they do.
    """

    rule: Rule
    why: str
    ports: tuple[int | str, ...] | None = None
    result: str | tuple[str, ...] = "promote"
    native_promotion: bool = False
    mixed: frozenset[str] = frozenset()
    dtype_keyword: bool = False
    backward_sums: frozenset[str] = frozenset()
    sums_low: LowSums | None = None
    lookup: bool = False
    pads: bool = False
    view: bool = False
    whole: bool = False
    repeats: bool = False
    overwritable: bool = False
    strides: bool = False
    low_kernel: bool = True
    autocast: Rule | None = None
    form_of: str | None = None
    writes: Writes | None = None
    wide: bool = False
    wide_state: bool = False
    bits: bool = False
    same: bool = False
    itself: bool = False
    squares: Squares | None = None
    fp32_ports: bool = False
    masks: tuple[int | str, ...] = ()
    indices: tuple[int | str, ...] = ()
    places: tuple[int | str, ...] = ()
    arrives: bool = False
    boolean: bool = False
    special: str | None = None
    return_indices: int | None = None
    layout: Layout | None = None
    rank: Rank | None = None
    float_number: bool = False
    exact: bool = False
    reads_values: bool = False
    gradient: bool = True
    inplace: int | None = None
    random: bool = False
    numbers: Numbers | None = None
    singular: int | None = None
    exponential: bool = False
    saturates: bool = False
    poles: tuple[int | str, ...] = ()
    reduces: bool = False
    example: bool = False
    counts: bool = False
    periodic: bool = False
    contains_sum: bool = False
    guard: str = ""
    cost: Cost | None = None
    factors: tuple[int, int] = (0, 1)
    depth: Depth | None = None
    bias: int | None = None
    epilogue: Epilogue | None = None
    any_format: bool = False


class Further(NamedTuple):
    """Further facts on some rows of a group: fields of ``OpRule``."""

    names: frozenset[str]
    fields: Mapping[str, Any]


def facts(names: str, **fields: Any) -> Further:
    """Facts that the blank-separated names share, for ``table``."""
    return Further(frozenset(names.split()), fields)


def rows(rule: Rule, why: str, names: str, **options: Any) -> dict[str, OpRule]:
    """Make one row for each of the blank-separated names, all alike."""
    row = OpRule(rule, why, **options)
    return dict.fromkeys(names.split(), row)


def table(*parts: Mapping[str, OpRule] | Further) -> Mapping[str, OpRule]:
    """Rows, and further facts on rows that stand before them, in one read-only table.

    Raises:
        ValueError: a name in two places; facts on an op that has no row here.
    """
    merged: dict[str, OpRule] = {}
    for part in parts:
        if isinstance(part, Further):
            if unknown := part.names - merged.keys():
                raise ValueError(f"op table: facts on {', '.join(sorted(unknown))}, which have no row in this group")
            merged |= {name: replace(merged[name], **part.fields) for name in part.names}
        elif twice := merged.keys() & part.keys():
            raise ValueError(f"op table: {', '.join(sorted(twice))} in two places; keep one row for each op")
        else:
            merged |= part
    return MappingProxyType(merged)
