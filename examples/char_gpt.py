"""Train a character GPT on the source text of Python's own standard library, converted to bfloat16.

    python examples/char_gpt.py [--steps 500] [--layers 3] [--dim 128] [--fp32]

Shows what real training loops do: activation checkpointing inside the model, gradient accumulation
(``with fxprec.accumulate(model)``), clipping of unscaled gradients, a learning rate schedule, evaluation, and sampling.
The default run takes about a minute on two cores. It starts at a test loss of log(96) = 4.6 nats a character, passes
what the frequencies of characters (3.2) and of pairs of them (2.5) give, and ends near 1.6, converted as in FP32
(``--fp32``), with a sample that looks like Python.
"""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import sysconfig
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxprec

MODULES = ("argparse", "ast", "asyncio/tasks", "collections/__init__", "dataclasses", "inspect", "pathlib", "typing")


@dataclass(frozen=True)
class Shape:
    """Size of the model: vocabulary, context length, layers, heads, width."""

    vocabulary: int
    context: int = 64
    layers: int = 3
    heads: int = 4
    dim: int = 128


class Block(nn.Module):
    """Pre-LN transformer block. (batch, time, dim) -> the same."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm1 = nn.LayerNorm(shape.dim)
        self.qkv = nn.Linear(shape.dim, 3 * shape.dim)
        self.proj = nn.Linear(shape.dim, shape.dim)
        self.norm2 = nn.LayerNorm(shape.dim)
        self.mlp = nn.Sequential(nn.Linear(shape.dim, 4 * shape.dim), nn.GELU(), nn.Linear(4 * shape.dim, shape.dim))

    def forward(self, x: Tensor) -> Tensor:
        batch, time, dim = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, dim // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(batch, time, dim))
        return x + self.mlp(self.norm2(x))


class CharGPT(nn.Module):
    """(batch, time) character codes -> (batch, time, vocabulary) logits; embedding and output weights are tied."""

    def __init__(self, shape: Shape, checkpointing: bool = True) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.characters = nn.Embedding(shape.vocabulary, shape.dim)
        self.positions = nn.Embedding(shape.context, shape.dim)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.dim)
        self.head = nn.Linear(shape.dim, shape.vocabulary, bias=False)
        self.apply(self._init)
        self.head.weight = self.characters.weight

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, codes: Tensor) -> Tensor:
        x = self.characters(codes) + self.positions(torch.arange(codes.shape[1], device=codes.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing and self.training else block(x)
        return self.head(self.norm(x))


@dataclass(frozen=True)
class Corpus:
    """Text as character codes, nine tenths for training."""

    characters: str
    train: Tensor
    test: Tensor

    def batch(self, split: str, size: int, context: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        data = self.train if split == "train" else self.test
        starts = torch.randint(len(data) - context - 1, (size,), generator=generator)
        window = torch.stack([data[start : start + context + 1] for start in starts.tolist()])
        return window[:, :-1], window[:, 1:]


def load() -> Corpus:
    """The text of a few modules of the standard library."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    text = "\n".join((root / f"{name}.py").read_text(encoding="utf-8") for name in MODULES)
    characters = "".join(sorted(set(text)))
    place = {character: code for code, character in enumerate(characters)}
    codes = torch.tensor([place[character] for character in text])
    cut = len(codes) * 9 // 10
    return Corpus(characters, codes[:cut], codes[cut:])


def loss_of(model: nn.Module, codes: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(codes).flatten(0, 1), targets.flatten())


@torch.inference_mode()
def evaluate(model: nn.Module, corpus: Corpus, context: int) -> float:
    model.eval()
    generator = torch.Generator().manual_seed(2)
    losses = [loss_of(model, *corpus.batch("test", 16, context, generator)).item() for _ in range(4)]
    model.train()
    return sum(losses) / len(losses)


@torch.inference_mode()
def sample(model: nn.Module, corpus: Corpus, prompt: str, length: int, context: int) -> str:
    model.eval()
    codes = torch.tensor([[corpus.characters.index(character) for character in prompt]])
    generator = torch.Generator().manual_seed(3)
    for _ in range(length):
        logits = model(codes[:, -context:])[:, -1] / 0.8
        codes = torch.cat([codes, torch.multinomial(logits.softmax(-1), 1, generator=generator)], dim=1)
    return "".join(corpus.characters[code] for code in codes[0].tolist())


@dataclass(frozen=True)
class Result:
    """Test loss in nats a character, before and after training, and a sample of what the model writes."""

    before: float
    after: float
    text: str


def main(arguments: list[str] | None = None) -> Result:
    parser = argparse.ArgumentParser(description="Train a character GPT on the standard library's source text")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--micro", type=int, default=2, help="micro-batches a step")
    parser.add_argument("--lr", type=float, default=4e-3, help="reached after a tenth of the steps, then decays")
    parser.add_argument("--fp32", action="store_true", help="train without fxprec, for comparison")
    options = parser.parse_args(arguments)

    corpus = load()
    shape = Shape(len(corpus.characters), layers=options.layers, dim=options.dim)
    torch.manual_seed(0)
    model: nn.Module = CharGPT(shape)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    if not options.fp32:
        model, scaler = fxprec.convert(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    rise = max(1, options.steps // 10)
    fall = max(1, options.steps - rise)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / rise, 1 - 0.9 * max(0, step - rise) / fall)
    )
    generator = torch.Generator().manual_seed(1)
    console = Console()
    before = evaluate(model, corpus, shape.context)
    started = time.perf_counter()
    with Progress(console=console) as progress:
        task = progress.add_task("training", total=options.steps)
        for step in range(options.steps):
            optimizer.zero_grad()
            total = 0.0
            with contextlib.nullcontext() if options.fp32 else fxprec.accumulate(model):
                for _ in range(options.micro):
                    loss = loss_of(model, *corpus.batch("train", 16, shape.context, generator)) / options.micro
                    scaler.scale(loss).backward()
                    total += loss.item()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            progress.update(task, advance=1, description=f"step {step + 1} loss {total:.3f}")
    seconds = time.perf_counter() - started
    after = evaluate(model, corpus, shape.context)
    console.print(f"{options.steps} steps in {seconds:.0f} s: test loss {before:.3f} -> {after:.3f} nats a character\n")
    text = sample(model, corpus, "def ", 300, shape.context)
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    if not options.fp32:
        console.print("\n", fxprec.report(model).headline, sep="")
    return Result(before, after, text)


if __name__ == "__main__":
    main()
