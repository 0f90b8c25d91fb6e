"""calls/attention: what becomes a call, which way a call goes by its sizes, models that take it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import chain
from math import inf
from pathlib import Path
from typing import Any

import expecttest
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule, symbolic_trace

import fxprec
from benchmarks.workloads.models import GPT
from fxprec.costs.files import path_of, processor_name, write
from fxprec.kernels.calls.attention import cpu_attention
from fxprec.kernels.cpu import attention_products as products
from fxprec.kernels.cpu import compiled_attention as compiled
from fxprec.kernels.cpu.compiled_attention import why_not
from fxprec.passes.costs.device_costs import ATTENTION_WAYS, Curve, DeviceCosts, Work
from fxprec.passes.fusion.kernel_calls import call_kernels
from fxprec.passes.graph.text import format_graph

BF16 = torch.bfloat16
X = torch.randn(1, 2, 6, 4)


def attend(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, is_causal=True).relu()


def calls(gm: GraphModule) -> list[Any]:
    return gm.graph.find_nodes(op="call_function", target=cpu_attention)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Filled with True for each call that goes another way than torch's kernel."""
    found: list[bool] = []

    def noted(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def attend(*args: Any) -> Tensor:
            found.append(True)
            return original(*args)

        return attend

    for name in ("attention_by_products", "recomputed_attention"):
        monkeypatch.setattr(products, name, noted(getattr(products, name)))
    monkeypatch.setattr(compiled, "compiled_attention", noted(compiled.compiled_attention))
    return found


def test_the_graph_after(tools: Any) -> None:
    gm = tools.rewritten(tools.traced(attend, X), tools.context(attention=("products", 2e3, 3e2)), until="fuse")
    expecttest.assert_expected_inline(
        format_graph(gm),
        """\
%x: float32 = placeholder
%x_bf16: bfloat16 = to(%x, torch.bfloat16)
%scaled_dot_product_attention: bfloat16 = scaled_dot_product_attention(%x_bf16, %x_bf16, %x_bf16, is_causal=True, way='products', from_flop=(2000, 300))
%relu: bfloat16 = relu(%scaled_dot_product_attention)
%relu_f32: float32 = to(%relu, torch.float32)
return %relu_f32""",  # noqa: E501
    )
    (node,) = calls(gm)
    assert node.meta["precision"].why.endswith(
        "; plain products from 0.0003 MFLOP on, without a backward from 0.002 MFLOP"
    )
    again = call_kernels(gm, tools.context(attention=("products", 2e3, 3e2)))
    assert not again.changed


@pytest.mark.parametrize("settings", [{}, {"attention": ("products", 1.0, 1.0), "level": "O0"}], ids=["never", "O0"])
def test_it_stays_torchs(tools: Any, settings: dict[str, Any]) -> None:
    gm = tools.rewritten(tools.traced(attend, X), tools.context(**settings), until="fuse")
    assert not calls(gm)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_other_dtypes_are_torchs(dtype: torch.dtype, taken: list[bool]) -> None:
    q = torch.randn(1, 2, 4, 4, dtype=dtype)
    torch.testing.assert_close(
        cpu_attention(q, q, q, from_flop=(0, 0)), F.scaled_dot_product_attention(q, q, q), rtol=0, atol=0
    )
    assert not taken


@pytest.mark.parametrize(
    ("limits", "alone", "trained"),
    [((0, 0), True, True), ((513, 512), False, True), ((512, 513), True, False), ((None, 0), False, True),
     ((0, None), True, False)],
)  # fmt: skip
def test_sizes_decide(limits: tuple[Any, Any], alone: bool, trained: bool, taken: list[bool]) -> None:
    q = torch.randn(1, 2, 4, 4).to(BF16)  # 4 * 32 * 4 FLOP
    cpu_attention(q, q, q, from_flop=limits)
    assert bool(taken) is alone
    taken.clear()
    wanted = q.detach().requires_grad_()
    cpu_attention(wanted, q, q, from_flop=limits)
    assert bool(taken) is trained
    taken.clear()
    with torch.no_grad():
        cpu_attention(wanted, q, q, from_flop=limits)
    assert bool(taken) is alone


def test_a_causal_forward_alone_counts_a_quarter(taken: list[bool]) -> None:
    q = torch.randn(1, 2, 4, 4).to(BF16)
    cpu_attention(q, q, q, is_causal=True, from_flop=(129, 1))
    assert not taken
    cpu_attention(q, q, q, is_causal=True, from_flop=(128, 1))
    assert taken


FORMS: dict[str, Callable[..., Tensor]] = {
    "mask": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, torch.tensor([[True, False], [True, True]])),
    "scale": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=0.1),
    "positional": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, None, 0.0, True),
    "grouped": lambda q, k, v: F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], enable_gqa=True),
    "keywords": lambda q, k, v: F.scaled_dot_product_attention(query=q, key=k, value=v),
}


@pytest.mark.parametrize("form", [*FORMS])
def test_forms_of_the_call(tools: Any, form: str, taken: list[bool]) -> None:
    inputs = [torch.randn(1, 2, 2, 4) for _ in range(3)]
    gm = tools.rewritten(tools.traced(FORMS[form], *inputs), tools.context(attention=("products", 0.0, 0.0)))
    ours, exact = gm(*inputs), FORMS[form](*inputs)
    assert taken
    torch.testing.assert_close(ours, exact, rtol=0.03, atol=0.03)


def test_dropout_is_torchs_draw_for_draw(tools: Any, taken: list[bool]) -> None:
    q = torch.randn(1, 2, 8, 4).to(BF16)
    outputs = []
    for function in (cpu_attention, F.scaled_dot_product_attention):
        torch.manual_seed(1)
        options = {"from_flop": (0, 0)} if function is cpu_attention else {}
        outputs.append(function(q, q, q, dropout_p=0.5, **options))
    assert torch.equal(*outputs) and not taken


def test_what_torch_refuses_torch_refuses() -> None:
    q = torch.randn(1, 2, 4, 4).to(BF16)
    with pytest.raises(RuntimeError):
        cpu_attention(q, q[..., :1], q, from_flop=(0, 0))


def test_whoever_traces_the_graph_again_finds_the_call(tools: Any) -> None:
    gm = tools.rewritten(tools.traced(attend, X), tools.context(attention=("products", 0.0, 0.0)))
    for other in (symbolic_trace(gm), copy.deepcopy(gm)):
        (node,) = calls(other)
        assert node.kwargs["from_flop"] == (0, 0)
        torch.testing.assert_close(other(X), gm(X), rtol=0, atol=0)


# -- which costs lead there --------------------------------------------------------------------------------------------


def costs(
    seconds: float, dtype: torch.dtype = BF16, fused: tuple[tuple[float, float], ...] = ((1e3, 1e-3), (1e9, 1.0)),
    without: frozenset[Work] = frozenset(),
) -> DeviceCosts:  # fmt: skip
    """Costs of this machine: torch's attention takes a millisecond and more, and other ways so many seconds."""
    curves = {work: Curve(((1.0, 1e-6),)) for work in Work}
    curves |= dict.fromkeys((Work.ATTENTION, Work.ATTENTION_BACKWARD), Curve(fused))
    low = curves | dict.fromkeys(chain(*ATTENTION_WAYS.values()), Curve(((1e3, seconds), (1e9, seconds))))
    low = {work: curve for work, curve in low.items() if work not in without}
    name, threads = processor_name("cpu"), torch.get_num_threads()
    return DeviceCosts("cpu", name, threads, "made by hand", {torch.float32: curves, dtype: low})


def test_a_way_is_taken_from_where_the_curves_cross() -> None:
    alone, trained = costs(1e-2).attention_from(BF16, "products")
    assert alone == trained == pytest.approx(1e5, rel=0.3), "where torch's takes as long"
    assert costs(1e-9).attention_from(BF16, "products") == (1e3, 1e3)
    assert costs(1e9).attention_from(BF16, "products") == (inf, inf)
    assert costs(1e-9).attention_from(torch.float16, "products") == (inf, inf)
    known = costs(1e-9).curves[BF16]
    without = {work: curve for work, curve in known.items() if work not in ATTENTION_WAYS["products"]}
    older = DeviceCosts("cpu", "a CPU", 2, "older", {torch.float32: without, BF16: without})
    assert older.attention_from(BF16, "products") == (inf, inf)
    assert older.attention_from(BF16, "compiled") == (1e3, 1e3)
    assert older.attention(BF16, 1e3, 1.0, "products") == pytest.approx(2e-3)
    assert costs(1e-4).attention(BF16, 1e3, 1.0, "products") == pytest.approx(2e-4)
    assert costs(1e-4).attention(BF16, 1e3, 1.0) == pytest.approx(2e-3)


def test_the_first_way_is_taken_unless_another_one_takes_clearly_less() -> None:
    ways: tuple[Any, ...] = ("recomputed", "products")
    full, known = {torch.float32: costs(1e-4).curves[torch.float32]}, dict(costs(1e-4).curves[BF16])

    def best(low: dict[Work, Curve]) -> str:
        return DeviceCosts("cpu", "a CPU", 2, "", full | {BF16: low}).best_attention(BF16, ways)

    forward, backward = ATTENTION_WAYS["products"]
    assert best(known) == "recomputed", "both take 2e-4"
    for seconds, way in ((1.42e-4, "recomputed"), (1.38e-4, "products")):
        faster = {forward: Curve(((1e3, 5e-5), (1e9, 5e-5))), backward: Curve(((1e3, seconds), (1e9, seconds)))}
        assert best(known | faster) == way
    without = {work: curve for work, curve in known.items() if work not in ATTENTION_WAYS["recomputed"]}
    assert best(without) == "products", "older costs"
    assert DeviceCosts("cpu", "a CPU", 2, "", full).best_attention(BF16, ways) == "products"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Makes this machine one whose attention takes, but for torch's, so many seconds; of some work it knows nothing."""
    monkeypatch.setenv("FXPREC_CACHE_DIR", str(tmp_path))
    return lambda seconds, *without: write(costs(seconds, without=frozenset(without)), path_of("cpu"))


def trained(model: nn.Module, codes: Tensor) -> tuple[Tensor, list[Tensor]]:
    loss = model(codes, codes.roll(-1, 1))
    loss.backward()
    return loss.detach(), [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("capture", ["symbolic", "dynamo"])
@pytest.mark.parametrize(
    "way", ["plain products", "torch's forward and a backward of plain products", "a compiled loop"]
)
def test_a_model_trains_another_way(machine: Callable[..., None], taken: list[bool], capture: Any, way: str) -> None:
    fuse: Any = True if way == "a compiled loop" else "auto"
    if fuse is True and (why := why_not()):
        pytest.skip(why)
    machine(1e-9, *(ATTENTION_WAYS["recomputed"] if way == "plain products" else ()))
    torch.manual_seed(0)
    codes = torch.randint(0, 64, (2, 16))
    model = GPT(layers=2, dim=16, heads=2, vocabulary=64, context=16)
    full = trained(model, codes)
    model.zero_grad()
    model, _ = fxprec.convert(model, (codes, codes), capture=capture, fuse=fuse)
    low = trained(model, codes)
    assert len(taken) >= 2
    torch.testing.assert_close(low[0], full[0], rtol=0.01, atol=0.01)
    for got, exact in zip(low[1], full[1], strict=True):
        assert (got - exact).norm() <= 0.05 * exact.norm() + 1e-3
    assert f"{way} from 0.001 MFLOP on" in str(fxprec.report(model).nodes)


@pytest.mark.parametrize("options", [{"fuse": False}, {"dtype": torch.float16}, {"level": "O0"}], ids=str)
def test_a_conversion_that_leaves_attention_to_torch(machine: Callable[[float], None], options: Any) -> None:
    machine(1e-9)
    codes = torch.randint(0, 64, (1, 4))
    model, _ = fxprec.convert(GPT(layers=1, dim=4, heads=1, vocabulary=64, context=4), (codes, codes), **options)
    assert not calls(fxprec.graph_module(model))


@pytest.mark.parametrize("way", ATTENTION_WAYS)
@pytest.mark.parametrize("gradients", [False, True])
def test_the_ledger_adds_up(machine: Callable[..., None], taken: list[bool], way: str, gradients: bool) -> None:
    fuse: Any = True if way == "compiled" else "auto"
    if fuse is True and (why := why_not()):
        pytest.skip(why)
    machine(1e-9, *(ATTENTION_WAYS["recomputed"] if way == "products" else ()))
    torch.manual_seed(0)
    codes = torch.randint(0, 64, (2, 8))
    model, _ = fxprec.convert(GPT(layers=1, dim=16, heads=2, vocabulary=64, context=8), (codes, codes), fuse=fuse)
    ledger = fxprec.numerics.audit(model, [(codes, codes)], gradients=gradients)
    assert taken
    assert ledger.explained == pytest.approx(ledger.measured, rel=1e-6, abs=1e-10)
    assert any("attention" in row.node for row in ledger.rows)
