"""Random regions for tests: source of a function of up to 20 row operations, and the inputs it takes.

What is discontinuous (masks, relu, amax) is applied to inputs alone, whose values are exact in every precision;
computed values go through smooth functions that keep them near 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

from fxprec.kernels.launch.philox import keep_mask

P = 0.3
_SMOOTH = [
    "torch.tanh({0})", "torch.sigmoid({0})", "F.silu({0})", "F.gelu({0})", "torch.erf({0})", "F.softplus({0})",
    "torch.exp(-{0} * {0})", "torch.log1p({0} * {0})", "torch.sqrt({0} * {0} + 1)", "{0} * 0.5 + 0.25", "1 - {0}",
    "F.gelu({0}, approximate='tanh')", "torch.rsqrt({0} * {0} + 0.5)", "{0} / 1.5", "F.logsigmoid({0})",
    "torch.square(torch.tanh({0}))", "3 / ({0} * {0} + 2)", "torch.expm1(torch.tanh({0}))", "F.mish({0})",
]  # fmt: skip
_BINARY = [
    "{0} + {1}", "{0} - {1}", "torch.tanh({0}) * {1}", "{0} * torch.sigmoid({1})", "{0} / ({1} * {1} + 1)",
    "torch.add({0}, {1}, alpha=0.5)",
]  # fmt: skip
#: Operands of one dtype.
_ALIKE = ["torch.lerp({0}, {1}, 0.25)", "torch.addcmul({0}, {1}, {1}, value=0.125)", "torch.addcdiv({0}, {1}, {1} + 9)"]
_KINKED = [
    "F.relu({0})", "torch.abs({0})", "{0}.clamp(-0.5, 1.0)", "F.leaky_relu({0}, 0.1)", "F.hardswish({0})",
    "torch.maximum({0}, {1})", "torch.minimum({0}, {1})", "torch.floor({0})", "F.elu({0})", "torch.clamp({0}, {1})",
]  # fmt: skip
#: Operands of "or" are alike: the interpreter cannot broadcast the truth of a scalar.
_MASKS = ["({0} > {1})", "({0} <= 0.25)", "torch.logical_not({0} < {1})", "torch.logical_or({0} > 1, {0} < 0)"]
_MASKED = ["torch.where({2}, {0}, {1})", "{0}.masked_fill({2}, 0.5)", "torch.where({2}, {0}, 0.0) + {1}"]
_KEPT = [
    "{0}.sum(-1, keepdim=True) / {c}", "{0}.mean(-1, keepdim=True)", "torch.logsumexp({0}, -1, keepdim=True)",
    "torch.sqrt({0}.var(-1, keepdim=True, unbiased=False) + 0.5)", "torch.tanh({0}).pow(2).mean(-1, keepdim=True)",
]  # fmt: skip
_NORMS = [
    "F.softmax({0}, -1)", "F.log_softmax({0}, -1)", "F.layer_norm({0}, ({c},), eps=0.1)",
    "F.layer_norm({0}, ({c},), {w}, {w}, 0.1)", "F.rms_norm({0}, ({c},), {w}, 0.1)", "F.normalize({0} + 2, dim=-1)",
]  # fmt: skip
_DROPPED = ["{0}.sum(-1) / {c}", "{0}.mean(-1)", "torch.logsumexp({0}, -1)", "torch.tanh({0}.mean(-1)) * 2"]


@dataclass(frozen=True)
class Random:
    """One region: its source, what its inputs are like, and its dropouts."""

    source: str
    inputs: tuple[tuple[tuple[int, ...], str, str, bool], ...]  # shape, dtype, layout, requires_grad
    draws: int

    def function(self, drop: Callable[[Any, int], Any], low: torch.dtype = torch.float16) -> Callable[..., Any]:
        """The function, with dropout as given, ``drop(x, number)``, and casts to ``low``."""
        scope: dict[str, Any] = {"torch": torch, "F": F, "drop": drop, "cast": lambda x: _cast(x, low)}
        exec(self.source, scope)
        return scope["f"]

    def tensors(self, low: torch.dtype, device: str = "cpu") -> list[Tensor]:
        """Inputs of that kind; "low" ones in ``low``."""
        generator = torch.Generator().manual_seed(0)
        made = []
        for shape, kind, layout, wanted in self.inputs:
            x = torch.randn(shape, generator=generator)
            x = {"low": x.to(low), "single": x, "bool": x > 0, "integer": (x * 3).int()}[kind].to(device)
            made.append(_laid(x, layout).detach().requires_grad_(wanted and x.is_floating_point()))
        return made


def dropped(x: Any, number: int) -> Any:
    """A dropout that a region takes."""
    return F.dropout(x, P, True)


def with_masks(plan: Any, seeds: Tensor | None) -> Any:
    """Dropout by the masks that a plan's kernels draw."""

    def drop(x: Tensor, number: int) -> Tensor:
        assert seeds is not None
        mask = keep_mask(seeds[number], plan.layout.rows, plan.layout.columns, P)
        return x * plan.layout.torch_shaped(mask).to(x.dtype) / (1 - P)

    return drop


def _cast(x: Any, low: torch.dtype) -> Any:
    """To a low dtype and back; of a reference without rounding the gradient too."""
    if isinstance(x, Tensor) and x.dtype is torch.float64:
        return x + (x.to(low).double() - x).detach()
    return x.to(low).float()


def _laid(x: Tensor, layout: str) -> Tensor:
    if layout == "strided" and x.dim():
        return x.repeat_interleave(2, -1)[..., ::2]
    if layout == "rows swapped" and x.dim() >= 3:
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "channels last" and x.dim() == 4:
        return x.to(memory_format=torch.channels_last)
    if layout == "padded" and x.dim():
        return F.pad(x.to(torch.int32) if x.dtype is torch.bool else x, (1, 3))[..., 1:-3].to(x.dtype)
    return x


@st.composite
def regions(draw: st.DrawFn, casts: bool) -> Random:
    """Up to 20 operations. ``casts``: also to a low dtype and back, on operands of several dtypes."""
    rows = draw(st.sampled_from([(), (1,), (3,), (2, 3), (2, 1, 3), (1, 2), (5,), (130,)]))
    columns = draw(st.sampled_from([1, 2, 3, 7, 16, 33, 64]))
    shape = (*rows, columns)
    reduces = draw(st.booleans())
    layouts = ["dense", "dense", "padded"] + ([] if reduces else ["strided", "channels last"]) + ["rows swapped"]

    def some_rows() -> tuple[int, ...]:
        return tuple(size if draw(st.booleans()) else 1 for size in rows)

    inputs = [(shape, draw(st.sampled_from(["low", "single"])), draw(st.sampled_from(layouts)), True)]
    shapes = [shape, (columns,), (*rows, 1), (), (1,), (*(1,) * len(rows), columns)]
    for _ in range(draw(st.integers(1, 4))):
        own = draw(st.sampled_from([*shapes, (*some_rows(), columns), (*some_rows(), 1)]))
        kind = draw(st.sampled_from(["low", "single", "single", "bool", "integer"]))
        inputs.append((own, kind, draw(st.sampled_from(layouts)), draw(st.booleans())))
    if reduces:
        inputs.append(((columns,), "single", "dense", True))
    names = [f"x{i}" for i in range(len(inputs))]
    floats = [n for n, (_, kind, _, _) in zip(names, inputs, strict=True) if kind in ("low", "single")]
    numbers = [n for n, (_, kind, _, _) in zip(names, inputs, strict=True) if kind != "bool"]
    masks = [n for n, (_, kind, _, _) in zip(names, inputs, strict=True) if kind == "bool"]
    values, full, ends, lines, draws = [*floats], ["x0"], [], [], 0
    for number in range(draw(st.integers(1, 20))):
        name = f"v{number}"
        kinds = ["smooth", "binary", "binary", "kinked", "mask", "masked", "norm", "kept", "dropped", "drop", "cast"]
        kind = draw(st.sampled_from(kinds))
        pick = lambda pool: draw(st.sampled_from(pool))  # noqa: E731
        a, b = pick(values), pick(values)
        if kind in ("norm", "kept", "dropped") and not reduces:
            kind = "smooth"
        if kind in ("norm", "kept"):
            a = pick(full)
            text = pick(_NORMS if kind == "norm" else _KEPT).format(a, c=columns, w=names[-1])
        elif kind == "dropped":
            lines.append(f"{name} = " + pick(_DROPPED).format(pick(full), c=columns))
            ends.append(name)
            continue
        elif kind == "mask":
            lines.append(f"{name} = " + pick(_MASKS).format(pick(numbers), pick(numbers)))
            masks.append(name)
            continue
        elif kind == "masked" and masks:
            text = pick(_MASKED).format(a, b, pick(masks))
        elif kind == "kinked":
            text = pick(_KINKED).format(pick(floats), pick(floats))
        elif kind == "drop":
            a = pick(full)
            text, draws = f"drop({a}, {draws})", draws + 1
        elif kind == "cast" and casts:
            text = f"cast({a})"
        elif kind == "binary":
            text = pick(_BINARY if casts else _BINARY + _ALIKE).format(a, b)
        else:
            text = pick(_SMOOTH).format(a)
        lines.append(f"{name} = {text}")
        values.append(name)
        if kind in ("norm", "drop") or (a in full and kind not in ("kept", "kinked")):
            full.append(name)
    returned = [draw(st.sampled_from([name for name in full if name != "x0"] or ["x0 * 1.5"]))]
    returned += ends[-1:] + draw(st.lists(st.sampled_from(full), max_size=2))
    returned = [f"{name} + 0.5" if name == "x0" else name for name in dict.fromkeys(returned)]
    body = "\n".join(f"    {line}" for line in lines)
    source = f"def f({', '.join(names)}):\n{body}\n    return ({', '.join(returned)},)\n"
    return Random(source, tuple(inputs), draws)
