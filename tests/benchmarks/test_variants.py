"""The variants that ``python -m benchmarks step`` compares: from equal weights each trains as the others do."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

import fxprec
from benchmarks import step
from benchmarks.measure import training_step
from benchmarks.measure.training_step import Setup, tf32
from benchmarks.measure.variants import BASELINE, VARIANTS, variants
from benchmarks.reports.step import AGAINST
from benchmarks.workloads.training import workloads

CPU = torch.device("cpu")
MLP, GPT = workloads("tiny", ["mlp", "gpt"])


def losses(variant, workload=MLP, steps=5, **setup):
    try:
        made = VARIANTS[variant].build(workload, Setup(CPU, **setup))
    except fxprec.ConversionError as error:
        if fxprec.ConversionError not in VARIANTS[variant].refuses:
            raise
        pytest.skip(str(error))  # fuse=True, on a CPU where nothing that is compiled gains
    found = []
    for _ in range(steps):
        made()
        found.append(made.loss())
    return found


@functools.cache
def losses_in_fp32():
    """Those that the variants' are compared with."""
    return losses("fp32", GPT, lr=1e-2, clip=0.5)


#: Those that a CPU serves, without torch.compile.
_SERVED = [v.name for v in VARIANTS.values() if not v.unserved(Setup(CPU)) and not v.inductor]


@pytest.mark.slow
@pytest.mark.parametrize("name", _SERVED)
def test_every_variant_trains_alike(name):
    """From equal weights on equal data."""
    expected = losses_in_fp32()
    assert losses(name, GPT, lr=1e-2, clip=0.5) == pytest.approx(expected, rel=3e-3)
    assert len(set(expected)) == 5 and expected[4] < 0.97 * expected[0]  # the fifth step is on the first batch again


@pytest.mark.parametrize("name", _SERVED)
def test_every_variant_clips(name):
    """To less than AdamW's eps, so that the weights stay where they are."""
    found = losses(name, GPT, lr=1e-2, clip=1e-11)
    assert found[4] == pytest.approx(found[0], rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", [v.name for v in VARIANTS.values() if v.inductor and not v.unserved(Setup(CPU))])
def test_compiled_variants_train_alike(name):
    assert losses(name, lr=1e-2, clip=0.5) == pytest.approx(losses("fp32", lr=1e-2, clip=0.5), rel=3e-3)


def test_what_each_variant_is():
    setup = Setup(CPU, clip=0.5)
    made = {name: VARIANTS[name].build(MLP, setup) for name in ("fp32", "autocast-foreach", BASELINE, "bfloat16", "o1")}
    groups = {name: each.optimizer.param_groups[0] for name, each in made.items()}
    assert [groups[name]["fused"] for name in made] == [True, False, True, True, True]
    assert groups["autocast-foreach"]["foreach"]
    assert not any(each.scaler.is_enabled() for each in made.values())
    weights = {name: next(each.model.parameters()) for name, each in made.items()}
    assert [w.dtype for w in weights.values()] == [torch.float32] * 3 + [torch.bfloat16, torch.float32]
    assert torch.equal(weights["fp32"], weights["o1"]) and weights["fp32"] is not weights["o1"]
    own = VARIANTS["o1-own"].build(MLP, setup)
    assert isinstance(own.optimizer, fxprec.optim.AdamW)


def test_how_often_gradients_are_set_anew():
    made = VARIANTS[BASELINE].build(MLP, Setup(CPU, lr=0.0))
    for _ in range(4):
        made()
    first = next(made.model.parameters()).grad
    assert first is not None
    for _ in range(4):  # the same four batches
        made()
    torch.testing.assert_close(next(made.model.parameters()).grad, first)


def test_float16_on_a_cpu_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="float16 on a CPU is no speed to measure"):
        Setup(CPU, torch.float16)
    with pytest.raises(ValueError, match=r"the low dtype is bfloat16 or float16, not torch.float32"):
        Setup(CPU, torch.float32)
    with pytest.raises(SystemExit) as raised:
        step.main(["--dtype", "float16"])
    assert raised.value.code == 2 and "without float16 units" in capsys.readouterr().err


def test_who_is_not_served_on_a_device_in_float16():
    setup = Setup(torch.device("cuda"), torch.float16, clip=1.0)
    unserved = {name: why for name, variant in VARIANTS.items() if (why := variant.unserved(setup))}
    assert (
        unserved.keys() == {"bfloat16", "o1-compiled", "o1-fused", "o1-fused-low", "o1-fused-loss"}
        and "do not train" in unserved["bfloat16"]
    )
    assert not VARIANTS["fp32-tf32"].unserved(setup) and VARIANTS["fp32-tf32"].unserved(Setup(CPU))


def test_loss_wants_a_step():
    made = VARIANTS["fp32"].build(MLP, Setup(CPU))
    with pytest.raises(RuntimeError, match="call the step first"):
        made.loss()


def test_a_loop_unscales_before_it_clips():
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    before = model.weight.detach().clone()
    x = torch.randn(8, 4)
    training_step.loop(model, optimizer, scaler, lambda x: (100 * model(x)).square().mean(), 0.5)(x)
    moved = torch.linalg.vector_norm(model.weight.detach() - before)
    assert 0.1 < moved <= 0.5 and scaler.get_scale() == 1024.0


def test_tf32_is_as_before_afterwards():
    assert torch.get_float32_matmul_precision() == "highest"
    before = torch.backends.cudnn.allow_tf32
    with tf32(True):
        assert torch.get_float32_matmul_precision() == "high" and torch.backends.cudnn.allow_tf32
        with tf32(False):
            assert torch.get_float32_matmul_precision() == "highest" and not torch.backends.cudnn.allow_tf32
    assert torch.get_float32_matmul_precision() == "highest" and torch.backends.cudnn.allow_tf32 == before


def test_the_variant_with_tf32_switches_it_on_for_its_steps_alone():
    seen = []
    loss = replace(MLP, loss=lambda *args: seen.append(torch.get_float32_matmul_precision()) or MLP.loss(*args))
    made = VARIANTS["fp32-tf32"].build(loss, Setup(CPU))
    assert torch.get_float32_matmul_precision() == "highest"
    made()
    assert seen == ["high"] and torch.get_float32_matmul_precision() == "highest"


def test_steps_take_the_batches_in_turn():
    made = VARIANTS["fp32"].build(MLP, Setup(CPU, batches=3, lr=0.0))
    found = []
    for _ in range(6):
        made()
        found.append(made.loss())
    assert len(set(found[:3])) == 3 and found[3:] == found[:3] and made.done == 6


def test_names_of_variants():
    assert [v.name for v in variants()] == [*VARIANTS] and [v.name for v in variants(["o2"])] == [BASELINE, "o2"]
    with pytest.raises(ValueError, match=r"^no variant 'o1-onw'; did you mean o1-own\?$"):
        variants(["o1-onw"])
    assert set(AGAINST.values()) <= VARIANTS.keys() and set(step._QUICK_VARIANTS) <= VARIANTS.keys()
