"""docs/frameworks.md: each of its blocks runs on a small model, and does what the page says."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxprec

PAGE = (Path(__file__).parents[2] / "docs" / "frameworks.md").read_text(encoding="utf-8")
SECTIONS = {
    heading: re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    for heading, text in re.findall(r"^##? (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
}

pytestmark = [pytest.mark.zoo, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def _apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)


def run(heading: str, wants: str, **given: Any) -> dict[str, Any]:
    """Run the blocks of a section, with these names given; skip where the framework is not installed."""
    pytest.importorskip(wants, reason=f"wants {wants}: the [frameworks] extra")
    space = {"torch": torch, "F": F, "fxprec": fxprec, "nn": nn, **given}
    for block in SECTIONS[heading]:
        exec(compile(block, f"docs/frameworks.md, {heading}", "exec"), space)
    return space


def perceptron() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 3))


def batches(count: int = 3) -> list[Any]:
    return [(torch.randn(4, 8), torch.randint(3, (4,))) for _ in range(count)]


def gpt2() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=1, n_head=2, n_embd=16, vocab_size=32, n_positions=16, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def test_every_section_is_run_here():
    source = Path(__file__).read_text(encoding="utf-8")
    assert {heading for heading, blocks in SECTIONS.items() if blocks} == set(re.findall(r'run\(\s*"(.*?)"', source))


def test_low_weights_are_refused_with_the_line_to_change(tmp_path):
    transformers = pytest.importorskip("transformers")
    gpt2().to(torch.bfloat16).save_pretrained(tmp_path)
    with pytest.raises(fxprec.ConversionError, match=r"all weights of GPT2LMHeadModel.*dtype=torch.float32"):
        fxprec.convert(transformers.AutoModelForCausalLM.from_pretrained(tmp_path))
    space = run("Frameworks", "transformers", path=tmp_path, AutoModelForCausalLM=transformers.AutoModelForCausalLM)
    assert {parameter.dtype for parameter in space["model"].parameters()} == {torch.float32}
    assert space["model"](torch.zeros(1, 4, dtype=torch.int64)).logits.dtype is torch.float32
    assert fxprec.report(space["model"]).headline.low == "bfloat16"


def test_lightning():
    lightning = pytest.importorskip("lightning", reason="wants lightning: the [frameworks] extra")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = perceptron()

        def training_step(self, batch, _):
            loss = F.cross_entropy(self.net(batch[0]) @ torch.eye(3), batch[1])
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    loader = torch.utils.data.DataLoader([(x[0], y[0]) for x, y in batches()], batch_size=1)
    space = run("Lightning", "lightning", module=Module(), loader=loader)
    headline = fxprec.report(space["module"]).headline
    assert headline.products == {"bfloat16": 3} and "training_step" in headline.methods


def test_trainer(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate", reason="wants accelerate: the [frameworks] extra")
    tokens = [torch.randint(0, 32, (8,)) for _ in range(8)]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"), max_steps=2, per_device_train_batch_size=2, report_to=[], use_cpu=True,
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    space = run(
        "transformers' Trainer",
        "accelerate",
        model=gpt2(),
        arguments=arguments,
        dataset=[{"input_ids": each, "labels": each} for each in tokens],
        path=tmp_path / "saved",
        transformers=transformers,
    )
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "saved", dtype="auto")
    assert again.dtype is torch.float32 and type(again).__name__ == "GPT2LMHeadModel"
    ours = space["model"].state_dict()
    assert all(torch.equal(value, ours[name]) for name, value in again.state_dict().items())
    assert space["trainer"].accelerator.scaler is space["scaler"]
    assert space["model"].generate(tokens[0][None], max_new_tokens=2, pad_token_id=0).shape == (1, 10)


def test_accelerate(tmp_path):
    model = perceptron()
    before = model[0].weight.detach().clone()
    space = run(
        "Accelerate",
        "accelerate",
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loader=torch.utils.data.DataLoader([(x[0], y[0]) for x, y in batches()], batch_size=1),
        path=tmp_path / "state",
    )
    assert space["plain"] is model and not torch.equal(model[0].weight, before)
    assert (tmp_path / "state" / "scaler.pt").exists() and space["accelerator"].scaler is space["scaler"]


def test_timm():
    class Features(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = perceptron(), nn.Linear(3, 3)

        def forward_features(self, x):
            return self.body(x)

        def forward(self, x):
            return self.head(self.forward_features(x))

    model = Features()
    space = run("timm", "torch", model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loader=batches())
    assert space["features"].shape == (4, 3) and fxprec.report(model).headline.methods == ("forward_features",)


def test_peft():
    ids = torch.randint(0, 32, (2, 6))
    space = run("PEFT", "peft", model=gpt2(), ids=ids)
    with torch.no_grad():
        assert space["model"](input_ids=ids).logits.isfinite().all()
    assert not fxprec.report(space["model"]).headline.net


def test_diffusers():
    diffusers = pytest.importorskip("diffusers", reason="wants diffusers: the [zoo] extra")
    vae = diffusers.AutoencoderKL(
        block_out_channels=(8,), norm_num_groups=2, latent_channels=2,
        down_block_types=("DownEncoderBlock2D",), up_block_types=("UpDecoderBlock2D",),
    )  # fmt: skip
    images = torch.randn(1, 3, 8, 8)
    with torch.no_grad():
        plain = vae.decode(vae.encode(images).latent_dist.mode()).sample
    space = run("diffusers", "diffusers", vae=vae, images=images)
    assert (space["decoded"] - plain).abs().max() < 0.05 * plain.abs().max()
    assert fxprec.report(vae).headline.products.keys() == {"bfloat16"}


def test_torch_compile():
    torch.compiler.reset()
    ((x, y),) = batches(1)
    model = perceptron()
    space = run("torch.compile", "torch", model=model, x=x, y=y)
    (graph,) = space["graphs"]
    assert fxprec.report(graph).headline.computes == {"bfloat16": 3, "float32": 1}
    assert model[0].weight.grad.dtype is torch.float32


def test_onnx(tmp_path):
    for needed in ("onnx", "onnxscript"):
        pytest.importorskip(needed, reason=f"wants {needed}: the [frameworks] extra")
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)
    ).eval()
    x = torch.randn(2, 3, 8, 8)
    expected = model(x)
    space = run("ONNX", "onnxruntime", model=model, x=x, path=tmp_path / "model.onnx")
    assert (torch.from_numpy(space["output"]) - expected).abs().max() < 2e-3
    onnx = importlib.import_module("onnx")
    weights = {each.data_type for each in onnx.load(tmp_path / "model.onnx").graph.initializer if len(each.dims) > 1}
    assert weights == {onnx.TensorProto.FLOAT16}


def test_torchao():
    x = torch.randn(4, 64)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.LayerNorm(64), nn.Linear(64, 64)).eval()
    expected = model(x)
    space = run("torchao", "torchao", model=model, x=x)
    assert (space["output"] - expected).abs().max() < 0.03 * expected.abs().max()
    assert type(space["model"][0].weight).__module__.startswith("torchao")
    assert fxprec.report(space["model"]).headline.products.keys() == {"bfloat16"}
