"""Lightning's plugin: the module's steps in graphs, scaled and clipped as Lightning does, its checkpoints both ways."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxprec

lightning = pytest.importorskip("lightning", reason="wants lightning: the [frameworks] extra")
from fxprec.integrations.lightning import MixedPrecision  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


class Module(lightning.LightningModule):
    def __init__(self, manual=False):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 3))
        self.register_buffer("mix", torch.eye(3) + 0.1)
        self.automatic_optimization = not manual
        self.losses, self.norms, self.dtypes = [], [], []

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, _):
        scores = self(batch[0]) @ self.mix
        loss = F.cross_entropy(scores, batch[1])
        self.log("loss", loss)
        self.note(scores, loss)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    @torch.compiler.disable
    def note(self, scores, loss):
        self.dtypes.append(scores.dtype)
        self.losses.append(loss.item())

    def validation_step(self, batch, _):
        self.log("val", F.cross_entropy(self(batch[0]), batch[1]))

    def on_before_optimizer_step(self, optimizer):
        self.norms.append(nn.utils.get_total_norm([p.grad for p in self.parameters()]).item())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader():
    torch.manual_seed(1)
    data = [(torch.randn(8), torch.randint(3, ())) for _ in range(32)]
    return torch.utils.data.DataLoader(data, batch_size=8)


def trained(module, path, epochs=1, **options):
    trainer = lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=str(path), enable_checkpointing=False, **options,
    )  # fmt: skip
    trainer.fit(module, loader())
    return trainer


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_losses_are_beside_autocasts_and_the_steps_are_lowered(dtype, tmp_path):
    plain, autocast, ours = Module(), Module(), Module()
    trained(plain, tmp_path)
    trained(autocast, tmp_path, precision="bf16-mixed")
    trained(ours, tmp_path, plugins=MixedPrecision(dtype))
    exact, theirs, own = (torch.tensor(each.losses) for each in (plain, autocast, ours))
    assert (own - exact).abs().max() <= max(2 * (theirs - exact).abs().max(), 2e-3)
    low = str(dtype).removeprefix("torch.")
    assert fxprec.report(ours).headline.products == {low: 5}  # two of forward, and again in the step, with its own
    assert ours.dtypes == [torch.float32] * 4  # what code outside of graphs sees has the dtype of the plain module


def test_float16_is_scaled_accumulated_and_clipped(tmp_path):
    plain, ours = Module(), Module()
    options = {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2}
    trained(plain, tmp_path, **options)
    plugin = MixedPrecision(torch.float16, scaler=fxprec.LossScaler("cpu", init_scale=1024.0))
    trainer = trained(ours, tmp_path, plugins=plugin, **options)
    assert trainer.precision_plugin.scaler is plugin.scaler and plugin.scaler.get_scale() == 1024.0
    assert ours.norms == pytest.approx(plain.norms, rel=0.05)  # unscaled before the hook and the clipping
    moved = [(p - q).norm() / p.norm() for p, q in zip(plain.parameters(), ours.parameters(), strict=True)]
    assert max(moved) < 0.01


def test_an_overflow_is_skipped(tmp_path):
    module = Module()
    before = copy.deepcopy(module.net.state_dict())
    plugin = MixedPrecision(torch.float16, scaler=fxprec.LossScaler("cpu", init_scale=2.0**40, min_scale=1.0))
    trained(module, tmp_path, plugins=plugin, limit_train_batches=1)
    assert plugin.scaler.get_scale() == 2.0**39
    assert all(torch.equal(value, before[name]) for name, value in module.net.state_dict().items())


@pytest.mark.slow
def test_manual_optimization(tmp_path):
    module = Module(manual=True)
    trained(module, tmp_path, plugins=MixedPrecision())
    assert fxprec.report(module).headline.products == {"bfloat16": 5}
    assert len(module.losses) == 4 and module.losses[-1] != module.losses[0]


def test_a_second_fit_and_a_validation_keep_the_conversion_and_the_scaler(tmp_path):
    module, plugin = Module(), MixedPrecision(torch.float16)
    trained(module, tmp_path, plugins=plugin)
    graphs = fxprec.report(module).headline.captures
    trainer = trained(module, tmp_path, plugins=MixedPrecision(torch.float16, scaler=plugin.scaler))
    trainer.validate(module, loader(), verbose=False)
    headline = fxprec.report(module).headline
    assert headline.captures <= graphs + 1 and {"training_step", "validation_step"} <= {*headline.methods}
    with pytest.raises(fxprec.ConversionError, match="converted before, in float16: give its scaler"):
        trained(module, tmp_path, plugins=MixedPrecision(torch.float16))


@pytest.mark.slow
def test_checkpoints_go_to_lightnings_plugin_and_back(tmp_path):
    from lightning.pytorch.plugins import MixedPrecision as Theirs

    def theirs():
        return Theirs("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=512.0))

    ours = MixedPrecision(torch.float16, scaler=fxprec.LossScaler("cpu", init_scale=256.0))
    trained(Module(), tmp_path, plugins=ours).save_checkpoint(tmp_path / "ours.ckpt")
    plugin, module = theirs(), Module()
    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False,
        plugins=plugin, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, loader(), ckpt_path=str(tmp_path / "ours.ckpt"))
    assert plugin.scaler.get_scale() == 256.0 and trainer.global_step == 8
    trainer.save_checkpoint(tmp_path / "theirs.ckpt")
    ours, module = MixedPrecision(torch.float16), Module()
    trainer = lightning.Trainer(
        max_epochs=3, accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False,
        plugins=ours, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, loader(), ckpt_path=str(tmp_path / "theirs.ckpt"))
    assert ours.scaler.get_scale() == 256.0 and trainer.global_step == 12


def test_lightnings_own_switch_around_a_converted_module_is_told(tmp_path):
    module = Module()
    fxprec.convert(module)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trained(module, tmp_path, precision="bf16-mixed")
    (told,) = [each for each in caught if each.category is fxprec.UnusedSettingWarning]
    assert "precision='32-true'" in str(told.message)
