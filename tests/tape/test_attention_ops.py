"""Attention in the reference: errors of all that it reads have their rows, in the output and in gradients."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fxprec
from fxprec.kernels.cpu import attention_products as module
from fxprec.kernels.cpu.attention_products import attention_by_products, recomputed_attention
from fxprec.kernels.cpu.compiled_attention import compiled_attention, why_not
from fxprec.numerics import audit
from fxprec.tape.adjoint import measured, terms
from fxprec.tape.exact_ops import EXACT
from fxprec.tape.recorder import OpRecorder
from fxprec.torch_internals import aten_flash_attention_for_cpu

#: N, H, G, T, S, E.
SHAPES = [(2, 4, 4, 12, 12, 8), (2, 4, 2, 9, 14, 8), (1, 6, 1, 140, 130, 4), (1, 2, 2, 130, 190, 4)]
KINDS = ["plain", "causal", "float"]


def torchs(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, mask, 0.0, causal, enable_gqa=True)


WAYS = {
    "torch": torchs, "products": attention_by_products, "recomputed": recomputed_attention,
    "compiled": compiled_attention,
}  # fmt: skip


def operands(shape: tuple[int, ...], kind: str) -> tuple[dict[str, Tensor], bool]:
    """In FP32: query, key, value, and a mask of floats, some of them -inf."""
    torch.manual_seed(sum(shape))
    batch, heads, groups, rows, keys, width = shape
    sizes = {"query": (batch, heads, rows, width), "key": (batch, groups, keys, width)}
    made = {name: torch.randn(size) * 1.5 for name, size in (sizes | {"value": sizes["key"]}).items()}
    if kind == "float":
        made["mask"] = torch.randn(heads, rows, keys).masked_fill(torch.rand(heads, rows, keys) < 0.2, -math.inf)
        made["mask"][..., 0] = 0.3
    return made, kind == "causal"


def gradients(attend: Any, given: dict[str, Tensor], causal: bool, upstream: Tensor) -> list[Tensor]:
    """The output, and the gradients of query, key and value."""
    mask = given.get("mask")
    inputs = [given[name].detach().requires_grad_() for name in ("query", "key", "value")]
    out = attend(*inputs, mask, causal)
    return [out.detach(), *torch.autograd.grad(out, inputs, upstream.to(out.dtype))]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_what_came_in_has_its_part_in_output_and_gradients(
    way: str, shape: tuple[int, ...], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "compiled" and (why := why_not()):
        pytest.skip(why)
    monkeypatch.setattr(module, "_AT_ONCE", 1 << 14)  # several chunks
    exact, causal = operands(shape, kind)
    upstream = torch.randn(exact["query"].shape)
    recorder = OpRecorder(torch.float64)
    with recorder:
        low = {name: each.to(torch.bfloat16) for name, each in exact.items()}
        found = gradients(WAYS[way], low, causal, upstream.bfloat16())
    weights = [torch.randn(each.shape, dtype=torch.float64) for each in found]
    places = {recorder.memory.place(each).storage: name for name, each in low.items()}
    targets = [(recorder.memory.place(each), weight) for each, weight in zip(found, weights, strict=True)]
    error = measured(recorder, targets)
    parts: dict[str, float] = defaultdict(float)
    for term in terms(recorder, targets):
        name = places.get(term.operation.outputs[0].storage, "own")
        parts[name] += term.rounding
        parts["bend"] += term.bend
    assert sum(parts.values()) == pytest.approx(error, rel=1e-6)

    def target(given: dict[str, Tensor]) -> float:
        wide = {name: each.double() for name, each in given.items()}
        pairs = zip(weights, gradients(torchs, wide, causal, upstream.bfloat16()), strict=True)
        return sum(float((weight * each).sum()) for weight, each in pairs)

    all_of_them = sum(abs(value) for value in parts.values())
    for name in exact:
        alone = target(exact | {name: low[name]}) - target(exact)
        assert parts[name] == pytest.approx(alone, abs=0.02 * all_of_them)
    assert abs(parts["bend"]) < 0.02 * all_of_them


def test_the_forms_are_what_torchs_kernel_computes_also_of_rows_that_attend_to_nothing() -> None:
    name, mask = "aten::_scaled_dot_product_flash_attention_for_cpu", torch.zeros(5, 7, dtype=torch.float64)
    mask[1] = -math.inf
    mask[3, 2:5] = -math.inf
    q, k, v = (torch.randn(2, heads, n, 4, dtype=torch.float64) for heads, n in ((4, 5), (2, 7), (2, 7)))
    grad = torch.randn_like(q)
    for settings in ({"attn_mask": mask}, {"attn_mask": mask, "scale": 0.3}, {}):
        out, norms = aten_flash_attention_for_cpu(q, k, v, 0.0, False, **settings)
        inputs = [each.clone().requires_grad_() for each in (q, k, v, mask)]
        given = settings | ({"attn_mask": inputs[3]} if settings else {})
        with torch.enable_grad():
            made = EXACT[name](*inputs[:3], 0.0, False, **given)
        torch.testing.assert_close([*made], [out, norms.nan_to_num(0.0, 0.0, 0.0)])
        assert made[1].requires_grad
        found = torch.autograd.grad(made[0], inputs[:3], grad)
        backward = EXACT[f"{name}_backward"](grad, q, k, v, out, norms, 0.0, False, **settings)
        torch.testing.assert_close([*backward], [*found])
        assert all(bool(each.isfinite().all()) for each in found)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("way", ["attention", "recomputed_attention", "compiled_attention"])
def test_the_forms_of_ours_have_derivatives_in_all_that_they_read(way: str, causal: bool) -> None:
    tensors = [torch.randn(1, heads, n, 3, dtype=torch.float64) for heads, n in ((4, 3), (2, 5), (2, 5))]
    mask = None if causal else torch.randn(1, 4, 3, 5, dtype=torch.float64)
    forward, backward = (EXACT[f"fxprec::{way}{end}"] for end in ("", "_backward"))
    keeps = way == "attention"
    last = (True,) if keeps else ()
    own = getattr(torch.ops.fxprec, way)
    reads = [each.requires_grad_() for each in (*tensors, *([] if mask is None else [mask]))]
    made, owns = forward(*tensors, mask, causal, 0.6, *last), own(*tensors, mask, causal, 0.6, *last)
    out, *kept = made if keeps else (made,)
    torch.testing.assert_close([out, *kept], [*owns] if keeps else [owns])

    def run(*given: Tensor) -> Any:
        return forward(*given[:3], *(given[3:] or (None,)), causal, 0.6, *last)

    def run_backward(grad: Tensor, *given: Tensor) -> Any:
        saved, given = given[: len(kept)], given[len(kept) :]
        return backward(grad, *given[:3], *(given[3:] or (None,)), *saved, causal, 0.6)

    saved, grad = [each.detach().requires_grad_() for each in kept], torch.randn_like(out).requires_grad_()
    assert torch.autograd.gradcheck(run, reads)
    assert torch.autograd.gradcheck(run_backward, (grad, *saved, *reads))
    (found, expected) = run_backward(grad, *saved, *reads), torch.autograd.grad(out, tensors, grad)
    torch.testing.assert_close([*found], [*expected])


class Attends(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.bias, self.last = torch.nn.Linear(64, 192), torch.nn.Linear(4, 4), torch.nn.Linear(64, 64)

    def forward(self, x: Tensor, distances: Tensor | None = None) -> Tensor:
        q, k, v = (part.unflatten(2, (4, 16)).transpose(1, 2) for part in self.first(x).chunk(3, -1))
        mask = None if distances is None else self.bias(distances).permute(2, 0, 1)
        return self.last(F.scaled_dot_product_attention(q * 2, k * 2, v, attn_mask=mask).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("biased", [False, True])
def test_rows_of_an_audit_are_those_without_fusion(biased: bool) -> None:
    """With a learned bias, in evaluation: in training torch gives the kernels none that wants a gradient."""
    ledgers = []
    for fuse in (False, True):
        torch.manual_seed(0)
        model = fxprec.convert(Attends(), dtype=torch.bfloat16, fuse=fuse).module
        inputs = (torch.randn(4, 128, 64) * 2, *([torch.randn(128, 128, 4) * 4] if biased else []))
        with torch.set_grad_enabled(not biased):
            batch = (*inputs, torch.randn(4, 128, 64))
            ledgers.append(audit(model, [batch], F.mse_loss, gradients=not biased))
    without, fused = ({(row.node, row.backward): row for row in ledger.rows} for ledger in ledgers)
    total = sum(abs(row.contribution) for row in without.values())
    for key, row in without.items():
        assert key in fused or abs(row.contribution) < 1e-3 * total, key
        if "attention" not in row.op and key in fused:
            assert fused[key].contribution == pytest.approx(row.contribution, abs=0.05 * total), key
    assert all(sum(abs(row.bend) for row in ledger.rows) < 0.01 * total for ledger in ledgers)
