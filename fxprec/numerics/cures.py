"""Find what cures a fault: a change of the conversion that was tried on a copy of the model, or one of the code.

Changes of the conversion are tried from the narrowest to the widest::

    the nodes of the faults, one fault after another     nodes={"matmul": torch.float32}
    their ops, where these follow what they read         ops={"add": torch.float32}
    their modules, equal layers together, then parents   modules={"blocks.*.attn": torch.float32}
    level O1, whose residual stream is FP32              policy=fxprec.Policy.preset("O1")
    another dtype, then none                             dtype=torch.bfloat16, fxprec.Policy.preset("O0")

Each is tried by converting a copy with it and running the step again. The first with which the step is finite is the
cure. A fault that FP32 has as well is cured by the code alone: the op's row in the op table has how to write it
(``OpRule.guard``).
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from fxprec.errors import FxprecError
from fxprec.inspection.nodes import NamedNode, is_own_code, op_name, source_line
from fxprec.inspection.text import fold
from fxprec.kernels.launch.operands import LOW_DTYPES
from fxprec.model.conversion import conversion_of
from fxprec.numerics.births import Birth, Source
from fxprec.numerics.overrides import Words, is_view, near_by, overridden, readers
from fxprec.numerics.problem import converted_anew
from fxprec.numerics.step import Births, TrainingStep
from fxprec.passes.costs.device_costs import DeviceCosts
from fxprec.passes.graph.annotations import Rule, module_path, notes
from fxprec.passes.graph.casts import CASTS
from fxprec.passes.ops.table import facts_at, facts_of
from fxprec.passes.policy.policy import Policy
from fxprec.settings import Settings
from fxprec.tape.recorder import line_of
from fxprec.torch_internals import tree_map_only

#: Copies of a model that are converted and run in search of a cure.
_MOST_TRIES: Final = 16
#: Faults of equal layers that are cured one by one, before their layers are taken together.
_MOST_ALIKE: Final = 4
#: How often a module's parent is taken in its place.
_MOST_UP: Final = 3
#: Lines of the user's code whose results are clamped.
_MOST_LINES: Final = 4
#: Bits that an advised loss scale leaves to the largest gradient.
_HEADROOM: Final = 2
#: Arguments of ``fxprec.convert`` besides dtype and policy that are repeated where they are not the default.
_REPEATED: Final = ("placement", "lower", "fuse", "capture", "executor", "keep_output_dtype", "methods")
_ALL_FP32: Final = (
    'fxprec.convert(model, policy=fxprec.Policy.preset("O0"))  '
    "# the original's step is finite; no copy of the model could be converted to try less"
)
_LIMIT: Final = torch.finfo(torch.float16).max

#: Overrides: what is to be in FP32.
Chosen = dict[Words, None]
#: A fault that is left, and the loss scale at which none is.
Left = tuple[Birth | None, float | None]
#: What a fault wants in FP32.
Width = Callable[[Birth], list[Words]]


class Cure(NamedTuple):
    """Cure of a fault, as text.

    Attributes:
        text: code that can be pasted, where there is such.
        instead: further cures, each by itself.
    """

    text: str
    instead: tuple[str, ...] = ()


class Tried(NamedTuple):
    """A change of the conversion with which the step is finite.

    Attributes:
        changed: of the settings, but for overrides.
        chosen: the overrides that it adds; None: there are none.
        scale: the loss scale at which the step is finite.
    """

    changed: Mapping[str, Any]
    chosen: Chosen | None
    scale: float


def policy_cure(step: TrainingStep, birth: Birth, fails_in_fp32: bool) -> Cure | None:
    """Return the narrowest change of the conversion that cures a fault of low precision; None: no precision does.

    Where the model fails in FP32 as well, at another op, the change leaves that fault alone, and the cure names both.
    """
    # With a fault in FP32 as well, only what precision adds to it can be cured by a policy: a fault at another op.
    wide = fault_in_fp32(step) if fails_in_fp32 else None
    if fails_in_fp32 and (wide is None or wide.origin.name == birth.origin.name or birth.dtype not in LOW_DTYPES):
        return None
    tried = Search(step, wide).cure(birth)
    if tried is None:
        return None if fails_in_fp32 or _is_users_cast(birth) else Cure(_ALL_FP32)
    # The cure is a call to paste: what else the user had set is repeated in it.
    settings = conversion_of(step.model).settings
    comments = []
    if tried.scale != step.scale:
        comments.append(f"and a loss scale of {tried.scale:g}: at {step.scale:g} gradients overflow")
    if settings.policy.lowers_parameters:
        comments.append("of the model with its FP32 weights, which O3 replaced")
    if wide is not None:
        comments.append(f"and, as FP32 fails too: {code_cure(step, wide)}")
    text = shown(settings, tried) + ("  # " + "; ".join(comments) if comments else "")
    clamps = clamped_lines(step.at(tried.scale), birth) if wide is None and birth.dtype is torch.float16 else ""
    return Cure(text, (clamps,) if clamps else ())


def code_cure(step: TrainingStep, birth: Birth) -> str:
    """Return how to write the op at which a value came to be that FP32 has not either: code, and why in a comment."""
    op = _canonical(birth)
    row = facts_of(op)
    source = line_of(birth.origin)
    at = f"in place of {op}" + (f" ({source})" if source else "")
    if birth.kind == "overflow" and not (row.guard and row.exponential) and not _is_users_cast(birth):
        clamps = clamped_lines(step, birth)
        if clamps:
            return clamps
        if not row.guard:
            return f"smaller values, {at}: its result leaves the range of FP32; a norm before it, say, or a clamp"
    if row.guard:
        code, _, why = row.guard.partition("  # ")
        return f"{code}  # {at} of x: {why}"
    return "mend the model: an eps in the divisor, a clamp before the logarithm or the exponent, a smaller step"


def fault_in_fp32(step: TrainingStep) -> Birth | None:
    """Return where the model fails with all of it in FP32, unscaled; None: it does not, or cannot be run so."""
    # Rows for the user's own ops stay: without them O0 could not run those.
    rules = conversion_of(step.model).settings.policy.rules
    try:
        wide = step.at(1.0).on(converted_anew(step.model, policy=Policy("O0", (), rules), lower="always"))
        fault = wide.watched(flushed=False).fault
    except (FxprecError, RuntimeError):  # dtypes that the original mixes
        return None
    return None if fault is None else fault[0]


@dataclass
class Search:
    """Tries changes of a conversion until a step is finite.

    Attributes:
        step: that has a fault.
        beyond: a fault that is none of the precision's, and may stay.
    """

    step: TrainingStep
    beyond: Birth | None = None
    _tried: int = field(default=0, init=False)
    _repeated: bool = field(default=False, init=False)
    _known: dict[frozenset[Words], Left] = field(default_factory=dict, init=False)

    def cure(self, birth: Birth) -> Tried | None:
        """Return the first change that cures; None: none does, or there are too many to try."""
        for one_by_one, width in _widths():
            found = None if one_by_one and self._repeated else self._grown(birth, width)
            if found is not None:
                return self._narrowed(found)
        for changed in _whole(conversion_of(self.step.model).settings):
            scale = self._left(changed)[1]
            if scale is not None:
                return Tried(changed, None, scale)
        return None

    def nodes(self, birth: Birth) -> Tried | None:
        """Return the nodes that are to be in FP32 for the step to be finite; None: that cures nothing."""
        found = self._grown(birth, _by_node)
        return None if found is None else self._narrowed(found)

    def _grown(self, birth: Birth, width: Width) -> Tried | None:
        """Choose what one fault after another wants in FP32; by nodes where a fault has nothing of this width."""
        chosen: Chosen = {}
        # A fault is cured by what it wants in FP32, and the next run shows the next fault; until none is left.
        alike: dict[tuple[str, str], int] = {}
        left: Birth | None = birth
        # What was flushed to 0 before may be the cause of the inf after it: both are widened.
        while left is not None and self._tried < _MOST_TRIES:
            births = [each for each in (left.flushed, left) if each is not None]
            more = chosen | {key: None for each in births for key in (width(each) or _by_node(each))}
            if len(more) == len(chosen):  # a policy that names each node keeps a view low
                more = chosen | {key: None for each in births for key in _by_view(each)}
            alike_to = _canonical(left), fold(_module_of(left))
            alike[alike_to] = alike.get(alike_to, 0) + 1
            self._repeated |= alike[alike_to] > _MOST_ALIKE
            if len(more) == len(chosen) or alike[alike_to] > _MOST_ALIKE:
                return None
            chosen = more
            left, scale = self._in_fp32(chosen)
            if scale is not None:
                return Tried({}, chosen, scale)
        return None

    def _narrowed(self, found: Tried) -> Tried:
        """Leave out choices without which the step is finite as well."""
        # Each choice is left out once: curing one fault often cures those that were found before it.
        for key in found.chosen if found.chosen is not None and len(found.chosen) > 1 else ():
            assert found.chosen is not None
            fewer = {other: None for other in found.chosen if other != key}
            if fewer and self._tried < _MOST_TRIES and self._in_fp32(fewer)[1] == found.scale:
                found = Tried({}, fewer, found.scale)
        return found

    def _in_fp32(self, chosen: Chosen) -> Left:
        """Return what is left with that in FP32; no set is tried twice."""
        key = frozenset(chosen)
        if key not in self._known:
            policy = overridden(conversion_of(self.step.model).settings.policy, dict.fromkeys(chosen, torch.float32))
            self._known[key] = self._left({"policy": policy})
        return self._known[key]

    def _left(self, changed: Mapping[str, Any]) -> Left:
        """Return the fault that a changed copy has; and a loss scale at which it has none, or none but ``beyond``."""
        self._tried += 1
        try:
            trial = self.step.on(converted_anew(self.step.model, **changed))
            fault = trial.watched(flushed=False).fault
        except (
            FxprecError,
            RuntimeError,
        ):  # a name that matches nothing there, as of a node that writes in place; dtypes
            return None, None  # that the model's own code does not mix
        if fault is None or (self.beyond is not None and fault[0].origin.name == self.beyond.origin.name):
            return None, self.step.scale
        return fault[0], smaller_scale(trial, fault[0])


def _widths() -> Iterator[tuple[bool, Width]]:
    """Yield what to choose for a fault, wider and wider, and whether it takes equal layers one by one."""
    yield True, _by_node
    yield False, _by_op
    for up in range(_MOST_UP):
        yield True, functools.partial(_by_module, up=up, folded=False)
        yield False, functools.partial(_by_module, up=up, folded=True)


def _by_node(birth: Birth) -> list[Words]:
    return [("nodes", node.name) for node in computing(birth)]


def _by_view(birth: Birth) -> list[Words]:
    node = birth.origin.node
    readers = node.users if node is not None and node.target in CASTS else ()
    return [("nodes", user.name) for user in readers if facts_at(user).view]


def _by_op(birth: Birth) -> list[Words]:
    found = [node for node in computing(birth) if facts_at(node).rule in (Rule.FOLLOW, Rule.PROMOTE)]
    return [("ops", notes(node).op.name) for node in found]


def _by_module(birth: Birth, up: int, folded: bool) -> list[Words]:
    paths = dict.fromkeys([*map(module_path, computing(birth)), _module_of(birth)])
    parents = (".".join(path.split(".")[: path.count(".") + 1 - up]) for path in paths)
    return [("modules", fold(path) if folded else path) for path in parents if path]


def _module_of(birth: Birth) -> str:
    origin = birth.origin
    if origin.node is not None:
        return module_path(origin.node)
    return origin.name.rpartition(".")[0] if origin.kind == "weight" else ""


def _whole(settings: Settings) -> Iterator[Mapping[str, Any]]:
    """Yield changes of all that there is."""
    policy = settings.policy
    if policy.lowers_sources:
        yield {"policy": replace(policy, level="O1")}
    if settings.dtype is torch.float16:
        yield {"dtype": torch.bfloat16}
    yield {"policy": Policy("O0", (), policy.rules)}


def shown(settings: Settings, tried: Tried) -> str:
    """Return the call of ``fxprec.convert`` that makes the change, in Python."""
    own = settings.policy
    policy = f'fxprec.Policy.preset("{own.level}")' if own == Policy.preset(own.level) else "policy"
    if tried.chosen is not None:
        groups: dict[str, list[str]] = {}
        for kind, name in tried.chosen:
            groups.setdefault(kind, []).append(f'"{name}": torch.float32')
        texts = (kind + "={" + ", ".join(names) + "}" for kind, names in groups.items())
        policy += f".override({', '.join(texts)})"
    elif "policy" in tried.changed:
        level = tried.changed["policy"].level
        policy = f'fxprec.Policy.preset("{level}")'
        if level != "O0" and (own.overrides or own.rules):
            policy = f'fxprec.Policy("{level}", policy.overrides, policy.rules)'
    dtype = tried.changed.get("dtype", settings.dtype)
    return f"fxprec.convert(model, dtype={dtype}, policy={policy}{further_arguments(settings)})"


def further_arguments(settings: Settings) -> str:
    """Write the arguments of ``fxprec.convert`` besides dtype and policy that are not the default, in Python."""
    defaults = {each.name: each.default for each in fields(settings)}
    others = {name: getattr(settings, name) for name in _REPEATED if getattr(settings, name) != defaults[name]}
    # Costs have no short form: they are to be had under a name.
    texts = {name: "costs" if isinstance(value, DeviceCosts) else repr(value) for name, value in others.items()}
    return "".join(f", {name}={text}" for name, text in texts.items()).replace("'", '"')


def in_bfloat16(step: TrainingStep) -> str:
    """Return the call of ``fxprec.convert`` with bfloat16, where no loss scale keeps gradients in range."""
    return shown(conversion_of(step.model).settings, Tried({"dtype": torch.bfloat16}, None, 1.0))


def smaller_scale(step: TrainingStep, birth: Birth) -> float | None:
    """Return a loss scale at which gradients that overflow are finite; None where no scale helps."""
    overflows = birth.origin.backward and birth.kind in ("overflow", "meant")
    if not overflows or step.scale <= 1.0 or not math.isfinite(birth.magnitude):
        return None
    limit = torch.finfo(birth.dtype).max
    # Headroom is left below the limit; an op deeper in the backward may overflow still, so that the scale is tried.
    scale = 2.0 ** math.floor(math.log2(step.scale * limit / max(birth.magnitude, limit)) - _HEADROOM)
    while step.at(scale := max(scale, 1.0)).watched(flushed=False).is_scaled_too_far:
        if scale == 1.0:
            return None
        scale /= 16
    return scale


def computing(birth: Birth) -> list[Node]:
    """Return the nodes whose dtype decides over a birth.

    For a cast these are its readers; for the cast of a gradient, the nodes whose results the gradient belongs to. Views
    have no say: those that read, or make, what they show stand in their place.
    """
    node = birth.origin.node
    if node is None:
        return []
    if birth.origin.backward and birth.op == "aten::_to_copy":
        return near_by(node, lambda each: each.all_input_nodes)
    return readers(node) if node.target in CASTS else [node]


def _is_users_cast(birth: Birth) -> bool:
    row = facts_of(_canonical(birth))
    return row.same and bool(row.guard)


def _canonical(birth: Birth) -> str:
    """Return the canonical op of a birth; outside of the graphs it is told by torch's own name for it."""
    node = birth.origin.node
    if node is not None:
        return op_name(node).rstrip("_")
    if birth.origin.backward:
        # Autograd's names are those of ops in camel case: MulBackward0 is mul.
        camel = re.sub(r"(Backward)?\d*$", "", birth.origin.name)
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", camel).lower()
    return birth.op.partition("::")[2].strip("_").removesuffix("_forward")


def clamped_lines(step: TrainingStep, birth: Birth) -> str:
    """Return where to clamp values to float16's range for the step to be finite, as code; "": that does not help."""
    lines: dict[tuple[str, str], None] = {}
    left: Birth | None = birth
    while left is not None and len(lines) < _MOST_LINES:
        line = _line_of(left)
        if line is None or line in lines:
            return ""
        lines[line] = None
        fault = step.watched(flushed=False, watching=functools.partial(_Clamping, lines=frozenset(lines))).fault
        left = None if fault is None else fault[0]
    if left is not None:
        return ""
    places = " and of ".join(f"{op} ({source})" for source, op in lines)
    return f"x.clamp(-{_LIMIT:g}, {_LIMIT:g})  # in place of x, the result of {places}: what is larger saturates"


def _line_of(birth: Birth) -> tuple[str, str] | None:
    """Return the line of the user's, and the op there, that computes a value which is too large.

    Of casts and views it is that of what they read.
    """
    node = birth.origin.node
    while node is not None and (node.target in CASTS or (is_view(node) and node.all_input_nodes)):
        node = next(iter(node.all_input_nodes), None)
    if node is None or birth.origin.backward or not is_own_code(node):
        return None
    return source_line(node), op_name(node)


class _Clamping(Births):
    """Births of a run in which results of some lines are clamped to float16's range, as if the code did so."""

    def __init__(
        self, sources: Iterable[tuple[Tensor, Source]], weights: Mapping[str, Tensor], flushed: bool = False,
        lines: frozenset[tuple[str, str]] = frozenset(),
    ) -> None:  # fmt: skip
        super().__init__(sources, weights, flushed)
        self._lines = lines
        self._clamps: dict[Node, bool] = {}

    def look(self, node: NamedNode, run: Any) -> Any:
        """Run a node, and clamp its result where its line is one of those."""
        result = super().look(node, run)
        if node.node not in self._clamps:
            self._clamps[node.node] = (source_line(node.node), op_name(node.node)) in self._lines
        if not self._clamps[node.node]:
            return result
        return tree_map_only(Tensor, lambda x: x.clamp(-_LIMIT, _LIMIT) if x.is_floating_point() else x, result)
