"""The locator: injected faults are found at the right node and with the right kind, sound runs have no finding."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxprec
from as_it_was import unchanged
from faults import FAULTS, NARROW, PLACES, BadBackward, Function, Net, batch, blamed, made
from fxprec.numerics import Finding, audit, locate
from fxprec.numerics.cures import Cure
from fxprec.numerics.locate import _against

F16, BF16 = torch.float16, torch.bfloat16


@dataclass(frozen=True)
class Case:
    fault: str
    place: str
    dtype: torch.dtype
    settings: tuple[tuple[str, str], ...] = ()

    @property
    def id(self) -> str:
        settings = "-".join(value for _, value in self.settings)
        return f"{self.fault}-{self.place}-{self.dtype}-{settings}".replace("torch.", "").removesuffix("-")


#: As it comes, within fused regions, and on a low stream.
SETTINGS: Any = ((), (("fuse", "aten"),), (("level", "O2"),))
#: Each fault at each place; of the settings each with each fault, and with each place.
CASES = [
    Case(fault, place, BF16, SETTINGS[(i + j) % len(SETTINGS)])
    for i, fault in enumerate(FAULTS)
    for j, place in enumerate(PLACES)
]
CASES += [Case(fault, place, F16) for fault in NARROW for place in PLACES if (fault, place) != ("a cube", "masked")]
#: In the other dtype each fault is at one place, the next at the next.
CASES += [Case(fault, place, F16) for fault, place in zip(FAULTS, cycle(PLACES), strict=False)]
CASES += [
    Case(fault, place, F16, settings)
    for settings, places in zip(SETTINGS[1:], (("plain", "residual", "looped"), ("looped", "plain")), strict=True)
    for fault, place in zip(NARROW, cycle(places), strict=False)
]


def located(model: nn.Module, *args: Any, **kwargs: Any) -> Finding:
    """And nothing of the model changes."""
    with unchanged(model):
        found = locate(model, *args, **kwargs)
    assert found is not None
    text = str(found)
    assert found.node in text and "\n  cure: " in text and found.to_dict()["kind"] == found.kind
    return found


def _in_graphs(model: nn.Module, fault: str) -> bool:
    """Before torch 2.13 dynamo leaves a stored Function.apply out."""
    return fault != "a function's own backward" or not fxprec.report(model).headline.net


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_injected_faults(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    # Cures are tried on copies, which takes half of the time: of each fault once.
    if case.place != "plain":
        monkeypatch.setattr(sys.modules[locate.__module__], "_cure", lambda *_: Cure("is not looked for"))
    function, kind, backward, _ = (FAULTS | NARROW)[case.fault]
    model = made(function, case.place, case.dtype, **dict(case.settings))
    found = located(model, batch(), F.cross_entropy)
    assert (found.kind, found.phase) == (kind, "backward" if backward else "forward")
    if not _in_graphs(model, case.fault):
        assert found.op == "div" and found.module == ""
        return
    assert found.node == blamed(case.fault, case.place, dict(case.settings).get("level", "O1"))
    assert found.module == "fault" or (kind == "overflow" and found.op == "cast")
    assert re.search(r"faults\.py:\d+$", found.source) or found.module == "fault"
    assert found.fails_in_fp32 == (case.fault in FAULTS)


def test_there_are_enough_of_them() -> None:
    """At least 130 injected faults, in pairs of fault, place and settings; and 300 sound runs."""
    assert len(set(CASES)) == len(CASES) >= 130
    assert len(SOUND) * len(SOUND_PLACES) * 4 >= 300


@pytest.mark.parametrize("fault", NARROW)
@pytest.mark.parametrize("place", ["plain", "residual"])
def test_the_cure_can_be_pasted(fault: str, place: str) -> None:
    model = made(NARROW[fault].function, place, F16)
    cured: list[str] = []
    for _ in range(3):
        found = locate(model, batch(), F.cross_entropy)
        if found is None:
            break
        cured.append(found.cure)
        model = fxprec.revert(model)
        eval(found.cure, {"fxprec": fxprec, "torch": torch, "model": model})
    assert len(cured) == 1


@pytest.mark.slow
def test_where_a_node_cannot_be_named_others_cure() -> None:
    """``mul_`` behind the scores overflows next, and has another name where it has a dtype of its own."""
    model = made(NARROW["attention scores"].function, "written", F16, level="O2")
    found = located(model, batch(), F.cross_entropy)
    assert found.node == "matmul"
    model = fxprec.revert(model)
    eval(found.cure, {"fxprec": fxprec, "torch": torch, "model": model})
    assert locate(model, batch(), F.cross_entropy) is None


def test_a_cure_is_no_wider_than_need_be() -> None:
    """Where gradients overflow behind a fault of the forward, a smaller loss scale is their cure, and no node."""
    model = made(NARROW["attention scores"][0], "plain", F16)
    scaler = fxprec.LossScaler("cpu", init_scale=2.0**40)
    found, unscaled = located(model, batch(), F.cross_entropy, scaler), located(model, batch(), F.cross_entropy)
    code, _, comment = found.cure.partition("  # and a loss scale of ")
    assert code == unscaled.cure and comment.endswith(f": at {2.0**40:g} gradients overflow")
    model = fxprec.revert(model)
    eval(found.cure, {"fxprec": fxprec, "torch": torch, "model": model})
    scale = float(comment.partition(":")[0])
    for more, kind in ((1.0, None), (2.0**12, "scale too large")):
        again = locate(model, batch(), F.cross_entropy, fxprec.LossScaler("cpu", init_scale=more * scale))
        assert (again and again.kind) == kind


#: Of sound models: what looks bad on the way, and is none.
SOUND: dict[str, Function] = {
    "relu": torch.relu,
    "gelu": F.gelu,
    "softmax": lambda h: h.softmax(-1),
    "causal mask": lambda h: (h @ h.T + torch.full((4, 4), -torch.inf).triu(1)).softmax(-1) @ h,
    "lowest": lambda h: h.masked_fill(h > 0.5, torch.finfo(torch.float32).min).softmax(-1),
    "guarded log": lambda h: torch.where(h > 0, h.clamp(min=1e-3).log(), h),
    "log dropped": lambda h: torch.where(h > 0, h.abs().sqrt(), torch.full_like(h, -torch.inf)).clamp(min=-1),
    "distance": lambda h: h / (h.norm(dim=-1, keepdim=True) + 1e-3),
    "dropout": lambda h: F.dropout(h, 0.4),
    "dead": lambda h: (h - 100).relu() + h,
    "random": lambda h: h + torch.randn_like(h),
    "top": lambda h: h.topk(8, -1).values,
    "attention": lambda h: F.scaled_dot_product_attention(*[h.view(1, 2, 4, 4)] * 3, is_causal=True).view(4, 8),
    "detached": lambda h: h + (h.detach() * 0).log().isinf(),
    "empty": lambda h: torch.cat([h, h[:0]]),
    "sorted": lambda h: h.sort(-1).values,
}


SOUND_PLACES = [place for place in PLACES if place != "looped"]


@pytest.mark.parametrize("name", SOUND)
@pytest.mark.parametrize("place", SOUND_PLACES)
def test_sound_runs_have_no_finding(name: str, place: str) -> None:
    for seed, dtype in enumerate((BF16, F16)):
        model = made(SOUND[name], place, dtype, seed)
        scaler = fxprec.LossScaler("cpu", init_scale=1024.0) if dtype is F16 else None
        with unchanged(model):
            for each in (seed, seed + 10):
                assert locate(model, batch(each), F.cross_entropy, scaler) is None


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("what", ["input", "weight", "norm"])
def test_what_came_in(what: str, value: float) -> None:
    model, (x, y) = made(torch.relu, "plain", BF16), batch()
    assert isinstance(model.first.weight, Tensor) and isinstance(model.norm.bias, Tensor)
    place = {"input": x, "weight": model.first.weight, "norm": model.norm.bias}[what]
    assert isinstance(place, Tensor)
    place.detach().view(-1)[3] = value
    found = located(model, (x, y), F.cross_entropy)
    name = {"weight": "first.weight", "norm": "norm.bias"}.get(what, "batch[0]")
    assert (found.kind, found.phase, found.node) == ("came in", "input" if what == "input" else "weight", name)
    assert found.share == pytest.approx(1 / place.numel()) and found.fails_in_fp32 == bool(found.reached)
    assert found.index == tuple(int(each) for each in (~place.detach().isfinite()).nonzero()[0])
    assert f"at [{', '.join(map(str, found.index))}]" in str(found)


def test_a_buffer_that_is_nan() -> None:
    model = made(torch.relu, "plain", BF16)
    assert isinstance(model.mean, Tensor)
    assert locate(model, batch(), F.cross_entropy) is None
    model.mean[5] = torch.inf  # of what is subtracted relu leaves 0
    assert locate(model, batch(), F.cross_entropy) is None
    model.mean[5] = torch.nan
    found = located(model, batch(), F.cross_entropy)
    assert (found.kind, found.phase, found.node, found.share) == ("came in", "buffer", "mean", 1 / 8)


def test_inputs_by_name_and_nested() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, pair: dict[str, Tensor], labels: Tensor) -> dict[str, Tensor]:
            return {"loss": F.mse_loss(self.layer(pair["a"] + pair["b"]), labels)}

    model = fxprec.convert(Named())[0]
    named = {"pair": {"a": torch.zeros(2, 4), "b": torch.zeros(2, 4)}, "labels": torch.zeros(2, 1)}
    assert locate(model, named) is None
    named["pair"]["b"][1, 1] = torch.nan
    assert located(model, named).node == "batch['pair']"


def test_a_weight_beyond_the_low_dtype() -> None:
    model = made(torch.relu, "plain", F16)
    assert isinstance(model.last.weight, Tensor)
    model.last.weight.detach()[0, 0] = 1e5
    found = located(model, batch(), F.cross_entropy)
    assert (found.kind, found.phase, found.node, found.module) == ("overflow", "weight", "last.weight", "last")
    assert found.magnitude == 1e5 and found.limit == 65504 and not found.fails_in_fp32


@pytest.mark.parametrize("exponent", [24, 30, 40, 60])
def test_a_loss_scale_that_is_too_large(exponent: int) -> None:
    model = made(torch.relu, "plain", F16)
    scaler = fxprec.LossScaler("cpu", init_scale=2.0**exponent)
    found = located(model, batch(), F.cross_entropy, scaler)
    assert (found.kind, found.phase, found.scale) == ("scale too large", "backward", 2.0**exponent)
    advised = re.search(r"new_scale=([\d.e+]+)", found.cure)
    assert advised is not None
    for scale, finding in ((float(advised[1]), None), (2.0**exponent, "scale too large")):
        again = locate(model, batch(), F.cross_entropy, fxprec.LossScaler("cpu", init_scale=scale))
        assert (again and again.kind) == finding
    assert scaler.get_scale() == 2.0**exponent


@pytest.mark.parametrize("factor", [1e-8, 1e-9, 1e-12])
@pytest.mark.parametrize("place", ["plain", "residual", "checkpoint"])
def test_gradients_that_are_flushed(factor: float, place: str) -> None:
    model = made(torch.relu, place, F16)
    loss = lambda out, y: F.cross_entropy(out, y) * factor  # noqa: E731
    found = located(model, batch(), loss)
    assert (found.kind, found.phase, found.fails_in_fp32) == ("underflow", "backward", False)
    assert found.magnitude < found.limit == 2.0**-24 and found.op == "cast" and found.module == "last"
    advised = re.search(r"init_scale=([\d.e+]+)", found.cure)
    assert advised is not None
    scaler = fxprec.LossScaler("cpu", init_scale=float(advised[1]))
    assert locate(model, batch(), loss, scaler) is None


def test_what_became_0_before() -> None:
    policy = fxprec.Policy.preset("O1").override(ops={"mul": F16})
    model = Net(lambda h: (F.linear(h.abs() + 1, torch.eye(8)) * 1e-4 * 1e-4).log(), "plain")
    model = fxprec.convert(model, dtype=F16, policy=policy)[0]
    found = located(model, batch(), F.cross_entropy)
    assert (found.kind, found.op, found.example) == ("invalid", "log", "log(0) = -inf") and not found.fails_in_fp32
    (remark,) = found.remarks
    assert remark.startswith("mul_1 gave 0 before, for values up to ") and "mul(" in remark
    model = fxprec.revert(model)
    eval(found.cure, {"fxprec": fxprec, "torch": torch, "model": model, "policy": policy})
    assert locate(model, batch(), F.cross_entropy) is None


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["log of negatives", "an exponent", "sqrt's gradient at 0"])
def test_behind_a_graph_break(fault: str) -> None:
    function, kind, backward, _ = FAULTS[fault]
    found = located(made(function, "broken", BF16), batch(), F.cross_entropy)
    assert (found.kind, found.phase, found.module) == (kind, "backward" if backward else "forward", "fault")


def test_outside_of_the_graphs() -> None:
    found = located(made(torch.relu, "plain", BF16), batch(), lambda out, y: (out - out).mean().log())
    assert (found.node, found.kind, found.phase, found.module) == ("log", "invalid", "forward", "")
    assert "test_locate.py:" in found.source


def test_the_backward_of_a_function_outside_of_the_graphs_is_told_by_its_own_line() -> None:
    found = located(made(torch.relu, "plain", BF16), batch(), lambda out, y: BadBackward.apply(out).mean())
    assert (found.op, found.kind, found.phase, found.module) == ("div", "invalid", "backward", "")
    lines, first = inspect.getsourcelines(BadBackward.backward)
    assert re.search(r"faults\.py:(\d+)$", found.source)[1] == str(first + len(lines) - 1)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda m: locate(nn.Linear(2, 2), batch()), fxprec.ConversionError, "not converted"),
        (lambda m: locate(fxprec.freeze(m), batch()), fxprec.ConversionError, "frozen"),
        (lambda m: locate(m, batch(), 3), TypeError, "loss must be a function"),
        (lambda m: locate(m, batch(), F.cross_entropy, 2.0), TypeError, "scaler must be"),
        (lambda m: locate(m, torch.zeros(2)), TypeError, "a batch must be a tuple"),
        (lambda m: locate(m, batch()[:1], F.cross_entropy), ValueError, "a batch of 1 part is not"),
        (lambda m: locate(m, batch(), lambda out, y: out), ValueError, "must be a scalar"),
    ],
)
def test_errors(call: Callable[[nn.Module], Any], error: type[Exception], text: str) -> None:
    model = made(torch.relu, "plain", BF16)
    model(batch()[0])
    with pytest.raises(error, match=text):
        call(model.eval())


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 12)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return (self.first(x) + mask).softmax(-1)


def test_a_row_that_is_masked_as_a_whole_is_told_as_such() -> None:
    model = fxprec.convert(Masked(), dtype=BF16)[0]
    x, mask = torch.randn(4, 12), torch.zeros(4, 12)
    mask[:, 3:] = -torch.inf
    assert locate(model, (x, mask, x), lambda output, _: output.square().mean()) is None
    mask[2] = -torch.inf
    found = located(model, (x, mask, x), lambda output, _: output.square().mean())
    assert found.masked and (found.op, found.kind, found.index) == ("softmax", "invalid", (2, 0))
    assert "gives nan for rows that are masked as a whole" in str(found) and "-1" not in found.headline
    assert "leave a key of each row unmasked" in found.cure


@pytest.mark.parametrize(
    ("batch", "loss", "words"),
    [
        (
            (0, 0, 0),
            None,
            r"too many .*Masked.forward\(x.*; a batch is the inputs alone where no loss is given",
        ),
        ((0, 0), F.mse_loss, r"missing .*'mask'.*Masked.forward\(x.*; a batch is \(\*inputs, target\)"),
        ({"x": 0, "masks": 0}, F.mse_loss, r"Masked.forward\(x.*.* or a dict of arguments"),
    ],
)
def test_batches_of_other_arguments_are_refused_with_what_the_model_takes(batch: Any, loss: Any, words: str) -> None:
    model = fxprec.convert(Masked(), dtype=BF16)[0]
    x = torch.zeros(4, 12)
    given = {name: x for name in batch} if isinstance(batch, dict) else tuple(x for _ in batch)
    for asks in (lambda: locate(model, given, loss), lambda: audit(model, [given], loss)):
        with pytest.raises(TypeError, match=words):
            asks()


HIDDEN = torch.zeros(4, 12, dtype=torch.bool)
HIDDEN[2], HIDDEN[1, 3] = True, True


def by_hand(scores: Tensor) -> Tensor:
    shifted = (scores - scores.max(-1, keepdim=True).values).exp()
    return shifted / shifted.sum(-1, keepdim=True)


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize(
    "mask",
    [
        lambda h: h.masked_fill(HIDDEN, -torch.inf).softmax(-1),
        lambda h: h.masked_fill(HIDDEN, float("-inf")).log_softmax(-1),
        lambda h: h.clone().masked_fill_(HIDDEN, -torch.inf).softmax(-1),
        lambda h: torch.where(HIDDEN, -torch.inf, h).softmax(-1),
        lambda h: (h + torch.zeros(4, 12).masked_fill(HIDDEN, -torch.inf)).softmax(-1),
        lambda h: (h.masked_fill(HIDDEN, -torch.inf) * 0.5).view(2, 2, 12).softmax(-1),
        lambda h: by_hand(h.masked_fill(HIDDEN, -torch.inf)),
        lambda h: F.cross_entropy(h.masked_fill(HIDDEN, -torch.inf), torch.arange(4)),
    ],
)
def test_a_row_that_the_model_itself_masks_wants_a_key_and_no_eps(mask: Callable[[Tensor], Tensor], dtype: Any) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(12, 12)

        def forward(self, x: Tensor) -> Tensor:
            return mask(self.first(x))

    found = located(fxprec.convert(Net(), dtype=dtype)[0], (torch.randn(4, 12),), None)
    assert found.masked and "leave a key of each row unmasked" in found.cure and "eps" not in found.cure
    assert "gives nan for rows that are masked as a whole" in str(found)


def test_what_is_no_mask_is_told_as_before() -> None:
    class Poles(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(12, 12)

        def forward(self, x: Tensor) -> Tensor:
            logs = (self.first(x) * 0).log()
            return logs - logs.max(-1, keepdim=True).values

    found = located(fxprec.convert(Poles(), dtype=BF16)[0], (torch.randn(4, 12),), None)
    assert not found.masked and found.op == "log" and "eps" in found.cure


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (65520.0, "6.552e+04 against 6.55e+04"),
        (7.94e4, "7.94e+04 against 6.55e+04"),
        (65504.01, "65504.01 against 65504"),
    ],
)
def test_a_value_near_the_limit_is_told_apart_from_it(value: float, words: str) -> None:
    assert _against(value, 65504.0) == words


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def decode(self, x: Tensor, *, shift: float = 0.0) -> Tensor:
        return F.linear((self.layer(x).abs() + 1 + shift) * 3e4, torch.ones(8, 8)).log()

    def describe(self) -> str:
        return "no tensor"


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.vae = nn.Linear(6, 6), Decoder()

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x)


METHODS = ("vae.decode", "vae", "vae.describe")


@pytest.fixture
def autoencoder() -> nn.Module:
    torch.manual_seed(0)
    return fxprec.convert(Autoencoder(), dtype=F16, methods=METHODS)[0]


@pytest.mark.slow
def test_another_method_runs_in_place_of_forward(autoencoder: nn.Module) -> None:
    x = torch.randn(4, 6)
    assert locate(autoencoder, (x,)) is None and locate(autoencoder, (x,), method="vae") is None
    found = located(autoencoder, (x,), method="vae.decode")
    assert (found.kind, found.phase, found.reached) == ("overflow", "forward", "outputs")
    assert found.node == "mul" and not found.fails_in_fp32
    assert located(autoencoder, {"x": x, "shift": 1.0}, method="vae.decode").node == "mul"
    rows = {row.node: row for row in audit(autoencoder, [(x,)], method="vae").rows}
    assert "vae.layer.weight" in rows and "encoder.weight" not in rows
    with pytest.raises(ValueError, match="the error is"):
        audit(autoencoder, [(x,)], method="vae.decode")


def test_the_cure_of_another_method_is_tried_on_it(autoencoder: nn.Module) -> None:
    found = located(autoencoder, (torch.randn(4, 6),), method="vae.decode")
    assert "there is more behind it" not in found.cure
    model = fxprec.revert(autoencoder)
    assert "methods=" in found.cure
    eval(found.cure, {"fxprec": fxprec, "torch": torch, "model": model})
    assert locate(model, (torch.randn(4, 6),), method="vae.decode") is None


@pytest.mark.parametrize(
    ("method", "error", "words"),
    [
        ("vae.decod", ValueError, r"Autoencoder.vae has no method 'decod' .did you mean 'decode'"),
        ("va.decode", ValueError, r"Autoencoder has no submodule 'va' .did you mean 'vae'"),
        ("encoder", ValueError, r"was converted with forward, vae.decode.*convert\(model, methods=\('encoder',\)\)"),
        (None, TypeError, "method must be a name, such as 'vae.decode', not NoneType"),
        ("vae.describe", TypeError, r"Autoencoder.vae.describe\(\)"),
    ],
)
def test_a_method_that_cannot_be_run_is_refused(
    autoencoder: nn.Module, method: Any, error: type[Exception], words: str
) -> None:
    given = batch()[:1]
    for asks in (lambda: locate(autoencoder, given, method=method), lambda: audit(autoencoder, [given], method=method)):
        with pytest.raises(error, match=words):
            asks()
