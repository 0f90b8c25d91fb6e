"""Each cure that ``locate`` prints cures, applied as it is printed: changes of the conversion, and of the code."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxprec
from curable import NARROW, WIDE, Fault, batch, between
from fxprec.numerics import Finding, locate
from fxprec.passes.ops.table import OP_TABLE

SCALE = 1024.0
#: Those whose many layers are tried for seconds.
LONG = {
    "24 layers, low stream", "24 layers without norms", "layers, low stream, by dynamo", "encoder layers",
    "encoder layers, low stream", "attention's values", "attention's products in 2 layers",
    "attention's products in 3 layers, low stream",
}  # fmt: skip


def made(fault: Fault, call: Callable[..., Tensor] | None = None) -> tuple[nn.Module, dict[str, Any]]:
    """The model in FP32, and how to convert it."""
    torch.manual_seed(0)
    settings = dict(fault.settings)
    if "policy" in settings:
        settings["policy"] = fxprec.Policy.preset("O1").override(ops=settings["policy"])
    return fault.make(call or fault.call), settings


def found_in(model: nn.Module, scale: float = SCALE) -> Finding | None:
    return locate(model, batch(), F.cross_entropy, fxprec.LossScaler("cpu", init_scale=scale))


def is_sound(model: nn.Module, cure: str = "") -> bool:
    """At the loss scale that the cure names, or that a scaler comes to."""
    named = re.search(r"a loss scale of ([\d.e+]+)", cure)
    scale = float(named[1]) if named else SCALE
    found = found_in(model, scale)
    if found is not None and found.kind == "scale too large":
        scale = float(re.search(r"init_scale=([\d.e+]+)", found.cure)[1])  # type: ignore[index]
        found = found_in(model, scale)
    return found is None


def converted(model: nn.Module, settings: dict[str, Any]) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fxprec.convert(model, **settings)[0]


def by_code(fault: Fault, code: str) -> nn.Module:
    """With code of x and y in the place of the faulty expression."""
    code = code.partition("  # ")[0]
    function = eval(f"lambda x, y=None: {code}", {"torch": torch, "F": F})
    model, settings = made(fault, function)
    return converted(model, settings)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in LONG else ()) for name in NARROW]
)
def test_a_change_of_the_conversion_cures_as_it_is_printed(name: str) -> None:
    fault = NARROW[name]
    model, settings = made(fault)
    found = found_in(converted(model, settings))
    assert found is not None and not found.fails_in_fp32 and found.cure.startswith("fxprec.convert(model, ")
    cured, _ = made(fault)
    eval(found.cure, {"fxprec": fxprec, "torch": torch, "model": cured, "policy": settings.get("policy")})
    assert is_sound(cured, found.cure)
    assert bool(found.instead) == fault.clamped
    for each in found.instead:
        assert is_sound(by_code(fault, each))


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("name", WIDE)
def test_a_change_of_the_code_cures_as_it_is_printed(name: str) -> None:
    fault = WIDE[name]
    model, settings = made(fault)
    found = found_in(converted(model, settings))
    assert found is not None and found.fails_in_fp32
    assert is_sound(by_code(fault, found.cure))


def test_what_fp32_has_as_well_is_told_beside_what_low_precision_has() -> None:
    """Each of the two is cured by its own: neither alone makes the step finite."""

    def both(h: Tensor, call: Any) -> Tensor:
        h = F.linear(h * 0 + 3e4, torch.ones(8, 8)) * 1e-5
        return call(h * 0) * h

    fault = between(both, torch.sqrt)
    model, settings = made(fault)
    found = found_in(converted(model, settings))
    assert (
        found is not None and found.fails_in_fp32 and found.op == "linear" and "no precision cures that" in str(found)
    )
    policy, code = found.cure.split("  # and, as FP32 fails too: ")
    cured, _ = made(fault, eval(f"lambda x: {code}", {"torch": torch}))
    assert not is_sound(converted(cured, settings))
    fxprec.revert(cured)
    eval(policy, {"fxprec": fxprec, "torch": torch, "model": cured})
    assert is_sound(cured)


def test_a_weight_beyond_the_low_dtype_keeps_its_layer_in_fp32() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    with torch.no_grad():
        model[1].weight[0, 0] = 1e5  # type: ignore[index]
    found = locate(converted(model, {"dtype": torch.float16}), batch(), F.cross_entropy)
    assert found is not None and 'override(modules={"1": torch.float32' in found.cure
    fxprec.revert(model)
    eval(found.cure, {"fxprec": fxprec, "torch": torch, "model": model})
    assert locate(model, batch(), F.cross_entropy) is None


def test_gradients_that_no_scale_keeps_in_range_want_bfloat16() -> None:
    """What is lost would need a scale at which others overflow."""
    torch.manual_seed(0)
    model = converted(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), {"dtype": torch.float16})

    def loss(output: Tensor, _: Tensor) -> Tensor:
        return output[:, 0].sum() * 1e3 + output[:, 1:].sum() * 1e-12

    found = locate(model, batch(), loss)
    assert found is not None and found.kind == "underflow" and "dtype=torch.bfloat16" in found.cure
    assert found.cure.startswith("fxprec.convert(")
    fxprec.revert(model)
    eval(found.cure, {"fxprec": fxprec, "torch": torch, "model": model})
    assert locate(model, batch(), loss) is None


def test_a_model_that_cannot_be_copied_is_cured_in_fp32() -> None:
    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(8, 4)
            self.held = torch.ones(8, requires_grad=True) * 2  # no leaf: it has no deepcopy

        def forward(self, x: Tensor) -> Tensor:
            return self.last(F.linear(F.linear(x, torch.eye(8) * 300), torch.eye(8) * 300) * 1e-5)

    torch.manual_seed(0)
    model = converted(Held(), {"dtype": torch.float16})
    found = found_in(model)
    assert found is not None and "no copy of the model could be converted" in found.cure
    fxprec.revert(model)
    eval(found.cure, {"fxprec": fxprec, "torch": torch, "model": model})
    assert is_sound(model)


def test_a_cast_of_the_users_behind_which_the_original_cannot_run_is_cured_at_the_cast() -> None:
    """The last layer's weight is FP32 and its input float16: eager torch refuses that, and a conversion does not."""
    fault = between(lambda h, call: call(F.linear(h, torch.ones(8, 8)) * 1e6) * 1e-3, torch.Tensor.half)
    model, settings = made(fault)
    found = found_in(converted(model, settings))
    assert found is not None and not found.fails_in_fp32 and "the model itself casts to float16" in found.cure
    assert is_sound(by_code(fault, found.cure))


@pytest.mark.parametrize("mask", [-1e4, None])
def test_a_row_that_is_masked_as_a_whole(mask: float | None) -> None:
    hidden = torch.zeros(4, 8, dtype=torch.bool)
    hidden[2] = True

    def attend(h: Tensor, call: Any) -> Tensor:
        return h.masked_fill(hidden, -torch.inf if mask is None else mask).softmax(-1)

    model, settings = made(between(attend))
    found = found_in(converted(model, settings))
    assert (found is None) == (mask is not None)
    assert found is None or (found.masked and "such as -1e4" in found.cure)


def test_guards_are_python() -> None:
    rows = {name: row.guard for name, row in OP_TABLE.items() if row.guard}
    assert len(rows) > 50
    for name, guard in rows.items():
        code, mark, why = guard.partition("  # ")
        names = {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}
        assert mark and why and "x" in names and names <= {"x", "y", "torch", "F", "max"}, name
