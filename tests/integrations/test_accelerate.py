"""Accelerate and transformers' Trainer with our scaler: as theirs with FP32, and nothing done in silence."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxprec

accelerate = pytest.importorskip("accelerate", reason="wants accelerate: the [frameworks] extra")
transformers = pytest.importorskip("transformers", reason="wants transformers: the [zoo] extra")
from accelerate.state import AcceleratorState  # noqa: E402

from fxprec.integrations.accelerate import use_scaler  # noqa: E402
from fxprec.integrations.transformers import ScalerMixin, Trainer  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _no_accelerator_is_left():
    """Accelerate keeps its precision for the process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def perceptron():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 3))


def batches(count=4):
    torch.manual_seed(1)
    return [(torch.randn(4, 8), torch.randint(3, (4,))) for _ in range(count)]


def trained(model, scaler=None):
    """Two accumulated, clipped steps by Accelerate; the norms before clipping, and the Accelerator."""
    accelerator = accelerate.Accelerator(gradient_accumulation_steps=2)
    if scaler is not None:
        use_scaler(accelerator, scaler)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    norms = []
    for x, y in batches():
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(x), y))
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.05).item())
            optimizer.step()
            optimizer.zero_grad()
    return norms, accelerator, optimizer


def test_float16_as_fp32_to_a_hundredth():
    plain, ours = perceptron(), perceptron()
    norms, _, _ = trained(plain)
    ours, scaler = fxprec.convert(ours, dtype=torch.float16, scaler=fxprec.LossScaler("cpu", init_scale=1024.0))
    own, accelerator, _ = trained(ours, scaler)
    assert own == pytest.approx(norms, rel=0.02)
    assert accelerator.scaler is scaler and scaler.get_scale() == 1024.0
    for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=0.01, atol=1e-3)
    assert accelerator.unwrap_model(ours) is ours


def test_an_overflow_is_skipped_and_accelerate_knows():
    model, scaler = fxprec.convert(perceptron(), dtype=torch.float16)
    before = copy.deepcopy(model.state_dict())
    accelerator = accelerate.Accelerator()
    use_scaler(accelerator, scaler)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    ((x, y),) = batches(1)
    accelerator.backward(F.cross_entropy(model(x), y) * float("inf"))
    optimizer.step()
    assert accelerator.optimizer_step_was_skipped and scaler.get_scale() == 32768.0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_states_are_saved_and_loaded(tmp_path):
    model, scaler = fxprec.convert(perceptron(), dtype=torch.float16)
    _, accelerator, _ = trained(model, scaler)
    scaler.update(16.0)
    accelerator.save_state(str(tmp_path))
    kept = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        model[0].weight.zero_()
    scaler.update(2.0)
    accelerator.load_state(str(tmp_path))
    assert scaler.get_scale() == 16.0 and torch.equal(model[0].weight, kept["0.weight"])


def test_a_disabled_scaler_changes_nothing():
    model, scaler = fxprec.convert(perceptron())
    _, accelerator, _ = trained(model, scaler)
    assert accelerator.scaler is None and "unscale_gradients" not in vars(accelerator)


def test_what_is_refused():
    model, scaler = fxprec.convert(perceptron(), dtype=torch.float16)
    accelerator = accelerate.Accelerator()
    with pytest.raises(TypeError, match=r"give the LossScaler that fxprec\.convert returned"):
        use_scaler(accelerator, torch.amp.GradScaler("cpu"))
    accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(fxprec.ConversionError, match="call use_scaler before prepare"):
        use_scaler(accelerator, scaler)
    assert accelerator.scaler is None
    AcceleratorState._reset_state(reset_partial_state=True)
    with pytest.raises(fxprec.ConversionError, match="mixed_precision='no'"):
        use_scaler(accelerate.Accelerator(mixed_precision="bf16"), scaler)


def test_accelerates_own_switch_around_a_converted_model_is_told():
    model, _ = fxprec.convert(perceptron())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = accelerate.Accelerator(mixed_precision="bf16").prepare(model)
    (told,) = [each for each in caught if each.category is fxprec.UnusedSettingWarning]
    assert "mixed_precision='no'" in str(told.message)
    x, _ = batches(1)[0]
    plain = perceptron()
    fxprec.convert(plain)
    torch.testing.assert_close(model(x), plain(x), rtol=0, atol=0.02)


def gpt2():
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=1, n_head=2, n_embd=16, vocab_size=32, n_positions=16, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def arguments(path, **options):
    return transformers.TrainingArguments(
        output_dir=str(path), max_steps=4, per_device_train_batch_size=2, learning_rate=1e-2, report_to=[],
        use_cpu=True, disable_tqdm=True, logging_steps=1, max_grad_norm=0.5, gradient_accumulation_steps=2,
        **{"save_strategy": "no", **options},
    )  # fmt: skip


def dataset():
    torch.manual_seed(2)
    return [{"input_ids": each, "labels": each} for each in torch.randint(0, 32, (16, 8))]


def logged(trainer, what):
    return [entry[what] for entry in trainer.state.log_history if what in entry]


@pytest.mark.slow
def test_a_trainer_in_float16_as_in_fp32(tmp_path):
    plain = transformers.Trainer(gpt2(), arguments(tmp_path / "plain"), train_dataset=dataset())
    plain.train()
    model, scaler = fxprec.convert(gpt2(), dtype=torch.float16)
    ours = Trainer(
        model, arguments(tmp_path / "ours", save_strategy="steps", save_steps=2), scaler=scaler, train_dataset=dataset()
    )
    ours.train()
    assert logged(ours, "loss") == pytest.approx(logged(plain, "loss"), rel=5e-3)
    assert logged(ours, "grad_norm") == pytest.approx(logged(plain, "grad_norm"), rel=0.02)  # unscaled
    assert fxprec.report(model).headline.products.keys() == {"float16"}
    kept = torch.load(tmp_path / "ours" / "checkpoint-2" / "scaler.pt", weights_only=True)
    assert kept["scale"] == 65536.0
    again, other = fxprec.convert(gpt2(), dtype=torch.float16, scaler=fxprec.LossScaler("cpu", init_scale=4.0))
    resumed = Trainer(again, arguments(tmp_path / "ours"), scaler=other, train_dataset=dataset())
    resumed.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-2"))
    assert other.get_scale() == 65536.0
    for name, value in again.state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-3, atol=1e-4)


def test_what_a_trainer_refuses(tmp_path):
    model, scaler = fxprec.convert(gpt2(), dtype=torch.float16)
    with pytest.raises(fxprec.ConversionError, match="is not converted: model, scaler"):
        Trainer(gpt2(), arguments(tmp_path), scaler=scaler, train_dataset=dataset())
    AcceleratorState._reset_state(reset_partial_state=True)
    with pytest.raises(fxprec.ConversionError, match="bf16=False"):
        Trainer(model, arguments(tmp_path, bf16=True), scaler=scaler, train_dataset=dataset())


def test_the_mixin_serves_other_trainers(tmp_path):
    class Mine(ScalerMixin, transformers.Seq2SeqTrainer):
        pass

    model, scaler = fxprec.convert(gpt2(), dtype=torch.float16)
    trainer = Mine(
        model,
        transformers.Seq2SeqTrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True),
        scaler=scaler,
        train_dataset=dataset(),
    )
    assert trainer.accelerator.scaler is scaler
