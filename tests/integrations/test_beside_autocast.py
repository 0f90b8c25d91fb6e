"""The table of docs/frameworks.md: each framework in FP32, with its own autocast, and with fxprec, four steps each.

Each run from the beginning leaves the framework's own checkpoint of its middle, from which another way goes on.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxprec

pytestmark = [pytest.mark.zoo, pytest.mark.filterwarnings("ignore")]

PAGE = (Path(__file__).parents[2] / "docs" / "frameworks.md").read_text(encoding="utf-8")
#: Beyond twice autocast's error, as rounding is by luck where a loss is hardly rounded at all.
LUCK = 1e-3
STEPS, HALF = 4, 2


@dataclass
class Run:
    """Losses of its steps; products by dtype where fxprec ran all of them; dtypes of the model's state by key."""

    losses: list[float]
    products: dict[str, int]
    kept: dict[str, torch.dtype]

    @classmethod
    def of(cls, losses: list[float], model: nn.Module, way: str) -> Run:
        told = way == "fxprec" and len(losses) == STEPS
        products = dict(fxprec.report(model).headline.products) if told else {}
        return cls(losses, products, {name: value.dtype for name, value in model.state_dict().items()})


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 3))


def batches() -> list[tuple[Tensor, Tensor]]:
    """Two batches in turns, one for each step."""
    draw = torch.Generator().manual_seed(1)
    two = [(torch.randn(8, 8, generator=draw), torch.randint(3, (8,), generator=draw)) for _ in range(2)]
    return [two[step % 2] for step in range(STEPS)]


def gpt2() -> Any:
    transformers = importlib.import_module("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=32, vocab_size=32, n_positions=16, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def tokens() -> Tensor:
    return torch.randint(0, 32, (4, 8), generator=torch.Generator().manual_seed(2))


def around(way: str) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16) if way == "autocast" else contextlib.nullcontext()


def by_hand(
    way: str, model: nn.Module, loss: Callable[[int], Tensor], start: object, keep: Callable[[], object]
) -> list[float]:
    """Steps of plain SGD, which has no state; ``keep`` writes the checkpoint."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for step in range(HALF if start else 0, STEPS):
        optimizer.zero_grad()
        with around(way):
            value = loss(step)
        value.backward()
        optimizer.step()
        losses.append(value.item())
        if step + 1 == HALF:
            keep()
    return losses


def lightning(way: str, path: Path, start: Path | None) -> Run:
    lightning = importlib.import_module("lightning")
    plugin = importlib.import_module("fxprec.integrations.lightning").MixedPrecision

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.losses = perceptron(), []

        def training_step(self, batch: Any, _: int) -> Tensor:
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
            self.losses.append(outputs["loss"].item())

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    how = {"fp32": {"precision": "32-true"}, "autocast": {"precision": "bf16-mixed"}, "fxprec": {"plugins": plugin()}}
    each_epoch = lightning.pytorch.callbacks.ModelCheckpoint(dirpath=str(path), filename="{epoch}", save_top_k=-1)
    trainer = lightning.Trainer(
        max_epochs=STEPS // HALF, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[each_epoch], default_root_dir=str(path), **how[way],
    )  # fmt: skip
    module = Module()
    loader = torch.utils.data.DataLoader(batches()[:HALF], batch_size=None)  # type: ignore[arg-type]
    trainer.fit(module, loader, ckpt_path=None if start is None else str(start / "epoch=0.ckpt"))
    return Run.of(module.losses, module, way)


def fresh_accelerator() -> None:
    """Accelerate keeps its precision for the process."""
    state = importlib.import_module("accelerate.state").AcceleratorState
    state._reset_state(reset_partial_state=True)


def trainer(way: str, path: Path, start: Path | None) -> Run:
    transformers = importlib.import_module("transformers")
    fresh_accelerator()
    model = gpt2()
    if way == "fxprec":
        fxprec.convert(model)
    arguments = transformers.TrainingArguments(
        output_dir=str(path), max_steps=STEPS, per_device_train_batch_size=2, learning_rate=1e-2, use_cpu=True,
        lr_scheduler_type="constant", report_to=[], disable_tqdm=True, logging_steps=1, save_strategy="steps",
        save_steps=HALF, bf16=way == "autocast",
    )  # fmt: skip
    found = transformers.Trainer(model, arguments, train_dataset=[{"input_ids": t, "labels": t} for t in tokens()])
    found.train(resume_from_checkpoint=None if start is None else str(start / f"checkpoint-{HALF}"))
    losses = [entry["loss"] for entry in found.state.log_history if "loss" in entry]
    fresh_accelerator()
    return Run.of(losses[HALF if start else 0 :], model, way)


def accelerate(way: str, path: Path, start: Path | None) -> Run:
    accelerate = importlib.import_module("accelerate")
    fresh_accelerator()
    plain = model = perceptron()
    if way == "fxprec":
        model, _ = fxprec.convert(model)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16" if way == "autocast" else "no")
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    if start is not None:
        accelerator.load_state(str(start))
    losses = []
    for step, (x, y) in [*enumerate(batches())][HALF if start else 0 :]:
        optimizer.zero_grad()
        with accelerator.autocast():
            loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        losses.append(loss.item())
        if step + 1 == HALF:
            accelerator.save_state(str(path))
    fresh_accelerator()
    return Run.of(losses, plain, way)


def timm(way: str, path: Path, start: Path | None) -> Run:
    timm = importlib.import_module("timm")
    utils = importlib.import_module("timm.utils")
    torch.manual_seed(0)
    small = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 32, "num_heads": 2, "num_classes": 3}
    model = timm.create_model("vit_tiny_patch16_224", **small)
    scaler: Any = None  # as timm's own script in bfloat16
    if way == "fxprec":
        model, own = fxprec.convert(model)
        scaler = importlib.import_module("fxprec.integrations.timm").NativeScaler(own)
    optimizer = timm.optim.create_optimizer_v2(model, opt="adamw", lr=1e-3)
    saver = utils.CheckpointSaver(model, optimizer, amp_scaler=scaler, checkpoint_dir=str(path), recovery_dir=str(path))
    if start is not None:
        helpers = importlib.import_module("timm.models")
        helpers.resume_checkpoint(model, str(start / "last.pth.tar"), optimizer, scaler, log_info=False)
    losses = []
    draw = torch.Generator().manual_seed(1)
    two = [(torch.randn(4, 3, 32, 32, generator=draw), torch.randint(3, (4,), generator=draw)) for _ in range(2)]
    for step in range(HALF if start else 0, STEPS):
        x, y = two[step % 2]
        with around(way):
            loss = F.cross_entropy(model(x).float(), y)
        optimizer.zero_grad()
        if scaler is None:
            loss.backward()
            utils.dispatch_clip_grad(model.parameters(), 1.0)
            optimizer.step()
        else:
            scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
        losses.append(loss.item())
        if step + 1 == HALF:
            saver.save_checkpoint(0)
    return Run.of(losses, model, way)


def peft(way: str, path: Path, start: Path | None) -> Run:
    peft = importlib.import_module("peft")
    config = peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
    if start is not None:
        model = peft.PeftModel.from_pretrained(gpt2(), str(start), is_trainable=True)
    else:
        base = gpt2()
        torch.manual_seed(3)
        model = peft.get_peft_model(base, config)
    if way == "fxprec":
        model, _ = fxprec.convert(model)
    ids = tokens()

    def loss(_: int) -> Tensor:
        return model(input_ids=ids, labels=ids).loss

    losses = by_hand(way, model, loss, start, lambda: model.save_pretrained(str(path)))
    return Run.of(losses, model, way)


def diffusers(way: str, path: Path, start: Path | None) -> Run:
    unet = importlib.import_module("diffusers").UNet2DModel
    if start is not None:
        model = unet.from_pretrained(str(start)).train()
    else:
        torch.manual_seed(0)
        model = unet(
            sample_size=8, in_channels=2, out_channels=2, layers_per_block=1, block_out_channels=(8, 16),
            down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            norm_num_groups=4, attention_head_dim=4,
        )  # fmt: skip
    if way == "fxprec":
        model, _ = fxprec.convert(model)
    noisy = torch.randn(2, 2, 8, 8, generator=torch.Generator().manual_seed(1))

    def loss(_: int) -> Tensor:
        return (model(noisy, torch.tensor([3, 7])).sample.float() - noisy).square().mean()

    losses = by_hand(way, model, loss, start, lambda: model.save_pretrained(str(path)))
    return Run.of(losses, model, way)


def compiled(way: str, path: Path, start: Path | None) -> Run:
    torch.compiler.reset()
    model, graphs = perceptron(), []
    if start is not None:
        model.load_state_dict(torch.load(start / "model.pt", weights_only=True))
    how: dict[str, Any] = {"backend": "eager"}
    if way == "fxprec":
        how = {"backend": "fxprec", "options": {"on_graph": graphs.append}}
    call = torch.compile(model, **how)
    data = batches()

    def loss(step: int) -> Tensor:
        return F.cross_entropy(call(data[step][0]), data[step][1])

    losses = by_hand(way, model, loss, start, lambda: torch.save(model.state_dict(), path / "model.pt"))
    found = Run.of(losses, model, "")
    found.products = {name: number for gm in graphs for name, number in fxprec.report(gm).headline.products.items()}
    return found


def on_two(tools: Any, rank: int, wrap: str, way: str, path: str, start: str) -> tuple[Any, ...]:
    """In both processes: DDP, or FSDP2 with a mixed precision of its own in autocast's place."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    plain = model = perceptron()
    if way == "fxprec":
        fxprec.convert(model)
    if wrap == "DDP":
        model = DistributedDataParallel(model)
    else:
        low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
        fully_shard(model, **({"mp_policy": low} if way == "autocast" else {}))
    if start:
        values = get_model_state_dict(plain)
        dcp.load(values, checkpoint_id=start)
        set_model_state_dict(plain, values)
    data = batches()

    def loss(step: int) -> Tensor:
        x, y = (each[rank * 4 : rank * 4 + 4] for each in data[step])
        return F.cross_entropy(model(x), y)

    def keep() -> None:
        dcp.save(get_model_state_dict(plain), checkpoint_id=path)

    losses = by_hand("fp32" if wrap == "FSDP2" else way, model, loss, start, keep)
    both = torch.tensor(losses)
    torch.distributed.all_reduce(both)
    found = Run.of((both / 2).tolist(), plain, way)
    return found.losses, found.products, found.kept


@dataclass(frozen=True)
class Framework:
    """``wants``: the package; ``run``: all steps, and a checkpoint of their middle, or the steps after such a one."""

    wants: str
    run: Callable[[str, Path, Path | None], Run]


FRAMEWORKS = {
    "Lightning": Framework("lightning", lightning),
    "transformers' Trainer": Framework("accelerate", trainer),
    "Accelerate": Framework("accelerate", accelerate),
    "timm": Framework("timm", timm),
    "PEFT": Framework("peft", peft),
    "diffusers": Framework("diffusers", diffusers),
    "torch.compile": Framework("torch", compiled),
}
TWO = ("DDP", "FSDP2")
ROWS = dict(re.findall(r"^\| ([\w' .]+?) +\|(.*\d\.\d.*)\|$", PAGE, re.MULTILINE))


def check(name: str, run: Callable[[str, Path, Path | None], Run], tmp_path: Path) -> None:
    """A framework's row: its losses, which fxprec's are beside, what is lowered, and that checkpoints change hands."""

    for folder in ("fp32", "autocast", "fxprec", "on"):
        (tmp_path / folder).mkdir()
    exact, theirs, ours = (run(way, tmp_path / way, None) for way in ("fp32", "autocast", "fxprec"))
    reach = max(2 * error(theirs.losses, exact.losses), LUCK)
    print(f"| {name} | {exact.losses[-1]:.4f} | {theirs.losses[-1]:.4f} | {ours.losses[-1]:.4f} | {ours.products} |")
    assert ours.losses != exact.losses and error(ours.losses, exact.losses) <= reach
    assert ours.kept == exact.kept and ours.products.keys() == {"bfloat16"}
    for first, second, straight in (("autocast", "fxprec", ours), ("fxprec", "autocast", theirs)):
        rest = run(second, tmp_path / "on", tmp_path / first)
        assert len(rest.losses) == STEPS - HALF and error(rest.losses, straight.losses[HALF:]) <= reach
    *losses, lowered, _, _ = (cell.strip() for cell in ROWS[name].split("|"))
    assert [*map(float, losses)] == pytest.approx([each.losses[-1] for each in (exact, theirs, ours)], rel=2e-3)
    assert int(lowered) == ours.products["bfloat16"]


def error(losses: list[float], exact: list[float]) -> float:
    """The largest difference of a step's."""
    return max(abs(a - b) for a, b in zip(losses, exact, strict=True))


@pytest.mark.parametrize("name", [name for name in FRAMEWORKS if name != "timm"])  # test_timm.py has it
def test_losses_are_beside_autocasts_and_checkpoints_change_hands(name: str, tmp_path: Path) -> None:
    framework = FRAMEWORKS[name]
    if importlib.util.find_spec(framework.wants) is None:
        pytest.skip(f"wants {framework.wants}: the [frameworks] extra")
    check(name, framework.run, tmp_path)


@pytest.mark.parametrize("name", TWO)
def test_so_they_are_of_two_processes(name: str, ask_two: Any, tmp_path: Path) -> None:
    def run(way: str, path: Path, start: Path | None) -> Run:
        found, _ = ask_two(on_two, name, way, str(path), str(start or ""))
        return Run(*found)

    check(name, run, tmp_path)


#: What a line has that is there for fxprec's sake.
OURS = re.compile(r"fxprec\.convert\(|MixedPrecision\(|use_scaler\(|NativeScaler\(|scaler=|backend=\"fxprec\"")


def test_the_table_has_all_of_them_and_counts_the_lines_of_the_examples() -> None:
    assert ROWS.keys() == {*FRAMEWORKS, *TWO}
    sections = (section.partition("\n") for section in PAGE.split("\n## "))
    blocks = [(name, text.partition("```python\n")[2].partition("```")[0]) for name, _, text in sections]
    for name, block in blocks:
        if name in FRAMEWORKS:
            lines = block.partition("merge_and_unload")[0].splitlines()
            wanted = sum(bool(OURS.search(line)) for line in lines if not line.startswith("from "))
            assert ROWS[name].rpartition("|")[2].strip() == str(wanted), name
    assert {name for name, _ in blocks} >= FRAMEWORKS.keys()
