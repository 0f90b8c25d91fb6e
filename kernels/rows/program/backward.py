"""Derives the backward row program of a region: its loads, its stores, and the tensors that the forward saves.

First come the derivatives of the primitives, in the primitives themselves (``gradients``). Every rule is linear in the
gradient: so the sum over rows, which the gradient of a bias or of a norm's weight needs, can wait until the very end,
where it becomes a column partial; only sums over columns happen on the way.

``backward`` makes the program in three steps::

    _stores     which gradients are written, and which inputs share one
    _sources    from which inputs and outputs they are computed: those that make the fewest bytes
    _statistics the reductions of the forward in between, which it saves: each would take another pass over a row
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import torch

from fxprec.kernels.rows.program.row_program import Backward, Forward, Port, RowProgram, Store
from fxprec.kernels.rows.program.values import REDUCTIONS, Builder, Operand, Value, walk

Rule = Callable[[Builder, Value, Operand], tuple[Operand | None, ...]]


def gradients(
    b: Builder, outputs: Sequence[Operand], cotangents: Sequence[Operand | None], wanted: Sequence[Value]
) -> list[Operand | None]:
    """Return the gradients of the outputs with respect to the wanted values (loads); None where nothing depends on one.

    A gradient varies along the columns only if its value does. Along rows it may vary although its value does not: the
    sum over rows comes at the end, when it is stored.
    """
    roots = [output for output in outputs if isinstance(output, Value)]
    needed = _leading_to(roots, wanted)
    found: dict[Value, Operand] = {}

    def add(value: Operand, gradient: Operand | None, per_column: bool) -> None:
        """Add to the gradient of a value.

        ``per_column``: there is one gradient for each column, even if it is the same number in all of them.
        """
        if gradient is None or not isinstance(value, Value) or value not in needed:
            return
        # A value without columns was read in each of them, and gets the sum of their gradients.
        if per_column and not value.columns:
            gradient = b.reduce("sum", gradient)
        found[value] = b("add", found[value], gradient) if value in found else gradient

    for output, cotangent in zip(outputs, cotangents, strict=True):
        add(output, cotangent, isinstance(cotangent, Value) and cotangent.columns)
    # In reverse order of construction: all uses of a value have added to its gradient before it is passed on.
    for value in reversed(walk(roots)):
        if value in found and value.op in _RULES:
            for argument, gradient in zip(value.args, _RULES[value.op](b, value, found[value]), strict=True):
                add(argument, gradient, value.columns)
    return [found.get(value) for value in wanted]


def _leading_to(roots: list[Value], wanted: Sequence[Value]) -> set[Value]:
    """Return the values that gradients pass on their way from the roots to the wanted values."""
    leading = set(wanted)
    for value in walk(roots):
        if value.op in _RULES and any(argument in leading for argument in value.args if isinstance(argument, Value)):
            leading.add(value)
    return leading


def _ties(b: Builder, v: Value, g: Operand) -> tuple[Operand, Operand]:
    """Return the gradients of the operands of a maximum or minimum.

    As torch has it, equal operands take half each, and where one is NaN both take all: no comparison holds.
    """
    x, y = v.args
    loses = "lt" if v.op == "maximum" else "gt"
    shared = b("where", b("eq", x, y), b("mul", g, 0.5), g)
    return b("where", b(loses, x, y), 0.0, shared), b("where", b(loses, y, x), 0.0, shared)


def _row_extreme(b: Builder, v: Value, g: Operand) -> tuple[Operand]:
    """Return the gradient of a row's maximum or minimum, shared, as in torch's amax, by all columns that equal it."""
    hit = b("eq", v.args[0], v)
    return (b("where", hit, b("div", g, b.reduce("sum", b("float", hit))), 0.0),)


#: Op -> its gradients, one for each argument, from (builder, value, gradient of the value). An op that is not here
#: passes no gradient: it is constant between its steps (comparisons, sign, floor), or a constant (stop, keep).
_RULES: Final[Mapping[str, Rule]] = MappingProxyType(
    {
        "add": lambda b, v, g: (g, g),
        "sub": lambda b, v, g: (g, b("neg", g)),
        "mul": lambda b, v, g: (b("mul", g, v.args[1]), b("mul", g, v.args[0])),
        "div": lambda b, v, g: (b("div", g, v.args[1]), b("neg", b("div", b("mul", g, v), v.args[1]))),
        "neg": lambda b, v, g: (b("neg", g),),
        "abs": lambda b, v, g: (b("mul", g, b("sign", v.args[0])),),
        "exp": lambda b, v, g: (b("mul", g, v),),
        "exp2": lambda b, v, g: (b("mul", g, b("mul", v, math.log(2.0))),),
        "expm1": lambda b, v, g: (b("mul", g, b("add", v, 1.0)),),
        "log": lambda b, v, g: (b("div", g, v.args[0]),),
        "log2": lambda b, v, g: (b("div", g, b("mul", v.args[0], math.log(2.0))),),
        "log1p": lambda b, v, g: (b("div", g, b("add", v.args[0], 1.0)),),
        "sqrt": lambda b, v, g: (b("div", g, b("mul", v, 2.0)),),
        "rsqrt": lambda b, v, g: (b("mul", g, b("mul", b("mul", v, b("mul", v, v)), -0.5)),),
        "erf": lambda b, v, g: (
            b("mul", g, b("mul", b("exp", b("neg", b("mul", v.args[0], v.args[0]))), 2.0 / math.sqrt(math.pi))),
        ),
        "tanh": lambda b, v, g: (b("mul", g, b("sub", 1.0, b("mul", v, v))),),
        "sigmoid": lambda b, v, g: (b("mul", g, b("mul", v, b("sub", 1.0, v))),),
        "maximum": _ties,
        "minimum": _ties,
        "where": lambda b, v, g: (None, b("where", v.args[0], g, 0.0), b("where", v.args[0], 0.0, g)),
        "round": lambda b, v, g: (g,),
        "sum": lambda b, v, g: (g,),
        "max": _row_extreme,
        "min": _row_extreme,
    }
)


#: Outputs whose subsets (2 ** n) are compared by the bytes that they make. Of more outputs all are taken.
_COMPARED_OUTPUTS: Final = 6


def backward(
    fw: Forward, wanted: Sequence[int], cotangents: Sequence[int], rows: int, alike: Sequence[object]
) -> Backward:
    """Return the backward program for some inputs and some outputs.

    Args:
        wanted: numbers of the inputs whose gradients are asked for.
        cotangents: numbers of the outputs that have a gradient.
        rows: about how many rows there are, to weigh bytes by: the program serves any number.
        alike: a key for each input; inputs with equal keys have equal shapes and strides.
    """
    b = fw.builder
    first = len(fw.inputs)  # operands are numbered: inputs, then the gradients of outputs
    given = [b.load(first + n, fw.outputs[n].dtype, fw.outputs[n].rows, fw.outputs[n].columns) for n in cotangents]
    found = gradients(b, [fw.outputs[n].value for n in cotangents], given, [fw.inputs[n] for n in wanted])
    stores, owners, stored_in = _stores(fw, wanted, found, alike)
    roots = [store.value for store in stores if isinstance(store.value, Value)]
    sources = _sources(fw, roots, set(given), rows)
    # A statistic that was saved cuts the walk short: what lies behind it is not read.
    statistics = {v: n for n, v in enumerate(_statistics(fw, roots, sources.keys() | {*given}))}
    used = {*walk(roots, lambda v: v in sources or v in statistics or v in given)}
    read = [value for value in sources if value in used]
    # A double backward computes the statistics again, so sources that only they need are saved, too, but not loaded.
    used_again = {*walk(roots, lambda v: v in sources or v in given)}
    only_again = [value for value in sources if value in used_again and value not in used]
    saved = [*(sources[value] for value in read), *(("statistic", n) for n in statistics.values())]
    loads = [(value, _port_of(fw, sources[value])) for value in read]
    loads += [(value, Port(torch.float32, value.rows, False)) for value in statistics]
    loads += [(value, fw.outputs[n].port) for value, n in zip(given, cotangents, strict=True)]
    program = RowProgram(tuple(loads), tuple(stores), fw.program.seeds, fw.program.columns)
    return Backward(
        program, tuple(saved), tuple((value, sources[value]) for value in only_again), tuple(statistics),
        tuple(cotangents), tuple(wanted), tuple(stored_in), tuple(owners),
    )  # fmt: skip


def _stores(
    fw: Forward, wanted: Sequence[int], found: Sequence[Operand | None], alike: Sequence[object]
) -> tuple[list[Store], list[int], list[int]]:
    """Return the stores of gradients, the input that each was made for, and the number of each input's store.

    ==========================  ===================================================  ================================
    the input varies along      its gradient is stored                               and shared with inputs that have
    ==========================  ===================================================  ================================
    all the rows                as the input: in its dtype, shape and strides        the same gradient, dtype, and
                                                                                     shape and strides (``alike``)
    some of the row dimensions  in FP32, for all rows, in the layout's order; it is  the same gradient, in FP32
                                summed over the others later, and would be rounded
                                before that in a low dtype
    no rows                     as a column partial, in FP32                         (none)
    ==========================  ===================================================  ================================

    So both operands of a sum, whose gradients are one value, share a store.
    """
    stores: list[Store] = []
    owners: list[int] = []
    slots: dict[int, int] = {}  # input -> its store
    as_input: dict[object, int] = {}  # stores of inputs that vary along all the rows
    full: dict[object, int] = {}  # stores in FP32 for all the rows: any order serves, since each is summed afterwards
    # Inputs of some of the rows come last, so that they find a store in FP32 that an input of all the rows has.
    for n, gradient in sorted(zip(wanted, found, strict=True), key=lambda each: fw.input_ports[each[0]].some_rows):
        port = fw.input_ports[n]
        value = 0.0 if gradient is None else gradient
        same = id(value) if isinstance(value, Value) else value
        known, key = (full, (same, port.columns)) if port.some_rows else (as_input, (same, port.dtype, alike[n]))
        if port.rows and key in known:
            slots[n] = known[key]
            continue
        slots[n] = len(stores)
        dtype = port.dtype if port.rows and not port.some_rows else torch.float32
        if port.rows:
            known[key] = len(stores)
            if dtype is torch.float32:
                full.setdefault((same, port.columns), len(stores))
        stores.append(Store(value, dtype, port.rows, port.columns, partial=not port.rows))
        owners.append(n)
    return stores, owners, [slots[n] for n in wanted]


def _statistics(fw: Forward, roots: list[Value], sources: Collection[Value]) -> list[Value]:
    """Return the forward's reductions between the roots and the sources, nearest to the roots."""
    # Filled while the walk goes on: it ends at each reduction that it finds.
    found: dict[Value, None] = {}

    def stop(value: Value) -> bool:
        # Values from ``made`` on are the backward's own: its reductions are not the forward's to save.
        if value not in sources and value.op in REDUCTIONS and value.number < fw.made:
            found[value] = None
        return value in sources or value in found

    walk(roots, stop)
    return sorted(found, key=lambda value: value.number)


def _sources(fw: Forward, roots: list[Value], given: set[Value], rows: int) -> dict[Value, tuple[str, int]]:
    """Return what the backward may load, as value -> (kind, number): all inputs, and those outputs that save bytes.

    A walk that ends at an output does not reach the inputs behind it. What is not reached is not loaded::

        outputs s = a + b, y = gelu(s):   from a and b, or s: half the bytes, so from s
        outputs y = exp(x), z = y * w:    from x and w, or y and w: as many bytes, so from y, without an exp, in FP32;
                                          a low y is exp(x) rounded, and exp's gradient takes the unrounded value
    """
    inputs = {value: ("input", n) for n, value in enumerate(fw.inputs)}
    reachable = walk(roots, lambda v: v in inputs or v in given)
    candidates = {
        store.value: ("output", n)
        for n, store in enumerate(fw.outputs)
        if isinstance(store.value, Value) and store.value in reachable and store.value not in inputs and store.exact
    }
    sizes = {
        value: _port_of(fw, source).size(rows, fw.program.columns) for value, source in (inputs | candidates).items()
    }

    def cost(chosen: tuple[Value, ...]) -> float:
        stop = inputs.keys() | given | {*chosen}
        return sum(sizes[value] for value in walk(roots, stop.__contains__) if value in sizes and value in stop)

    best: tuple[Value, ...] = tuple(candidates)
    if len(candidates) <= _COMPARED_OUTPUTS:
        lengths = range(len(candidates) + 1)
        subsets = itertools.chain.from_iterable(itertools.combinations(candidates, n) for n in lengths)
        # At equal bytes the most outputs: each spares what is computed between the inputs and it.
        best = min(subsets, key=lambda chosen: (cost(chosen), -len(chosen)))
    return inputs | {value: candidates[value] for value in best}


def _port_of(fw: Forward, source: tuple[str, int]) -> Port:
    kind, n = source
    return fw.input_ports[n] if kind == "input" else fw.outputs[n].port
