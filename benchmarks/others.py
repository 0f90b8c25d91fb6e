"""Training steps of models that nobody tuned for, as transformers has them, beside autocast, on a CPU in bfloat16.

    python -m benchmarks others [--only convnext t5]

Models of other people's code, with random weights at sizes that a CPU trains, on random data. A step is ``zero_grad``,
forward, loss, backward, AdamW. The fastest of several in turns, by the host's clock, in one process, over eager
autocast with torch's fused AdamW; "noise": autocast built a second time over the first.

    O1               ``convert(model)``, torch's fused AdamW
    fuse=True, low   ``convert(model, fuse=True)``, ``fxprec.optim.AdamW(compiled=True, low_gradients=True)``

"losses off by": the largest distance of a loss after four steps from autocast's, over it; norms by batch statistics of
eight images make much of a rounding. Wants the extra "frameworks". The status is 1 where a model failed. Nothing is
written.
"""

from __future__ import annotations

import argparse
import copy
import sys
import warnings
from collections.abc import Callable
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import fxprec
from benchmarks.measure.interleaved import fastest

__all__ = ["MODELS", "main", "times"]

LOW: Final = torch.bfloat16
#: Seconds for a step of each way.
_SECONDS: Final = 4.0
Batch = dict[str, Tensor]
#: A model and its batch; ``tiny``: as small as it gets.
Make = Callable[[bool], tuple[nn.Module, Batch]]


def _of_images(model: str, config: str, count: int, side: int, **options: Any) -> Make:
    """Of so many images of so many rows and columns."""

    def make(tiny: bool) -> tuple[nn.Module, Batch]:
        import transformers

        made = getattr(transformers, model)(getattr(transformers, config)(num_labels=100, **options))
        images = torch.randn(2 if tiny else count, 3, side, side)
        return made, {"pixel_values": images, "labels": torch.randint(0, 100, (len(images),))}

    return make


def _of_text(model: str, config: str, text: tuple[int, int], **options: Any) -> Make:
    """Of so many rows of so many tokens each."""

    def make(tiny: bool) -> tuple[nn.Module, Batch]:
        import transformers

        made = getattr(transformers, model)(getattr(transformers, config)(vocab_size=2000, **options))
        codes = torch.randint(3, 2000, (2, 8) if tiny else text)
        return made, {"input_ids": codes, "labels": codes.clone()}

    return make


_LAYERS: Final[dict[str, Any]] = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
MODELS: Final[dict[str, Make]] = {
    "convnext": _of_images(
        "ConvNextForImageClassification", "ConvNextConfig", 8, 96, hidden_sizes=[40, 80, 160, 320], depths=[2, 2, 6, 2]
    ),
    "regnet": _of_images(
        "RegNetForImageClassification", "RegNetConfig", 8, 96, embedding_size=32, hidden_sizes=[32, 64, 160, 400],
        depths=[1, 2, 7, 6], groups_width=16,
    ),
    "mobilenet": _of_images("MobileNetV2ForImageClassification", "MobileNetV2Config", 8, 96, image_size=96),
    "swin": _of_images(
        "SwinForImageClassification", "SwinConfig", 2, 224, image_size=224, embed_dim=48, depths=[2, 2, 4, 2],
        num_heads=[2, 4, 8, 16], drop_path_rate=0.0,
    ),
    "distilbert": _of_text(
        "DistilBertForMaskedLM", "DistilBertConfig", (8, 128), dim=256, n_layers=4, n_heads=4, hidden_dim=1024,
        dropout=0.0, attention_dropout=0.0,
    ),
    "neox": _of_text("GPTNeoXForCausalLM", "GPTNeoXConfig", (4, 256), intermediate_size=1024, **_LAYERS),
    "opt": _of_text(
        "OPTForCausalLM", "OPTConfig", (4, 256), ffn_dim=1024, word_embed_proj_dim=256, dropout=0.0, **_LAYERS
    ),
    "qwen": _of_text(
        "Qwen2ForCausalLM", "Qwen2Config", (4, 256), intermediate_size=688, num_key_value_heads=2, **_LAYERS
    ),
    "t5": _of_text(
        "T5ForConditionalGeneration", "T5Config", (8, 128), d_model=256, d_kv=64, d_ff=1024, num_layers=3, num_heads=4,
        dropout_rate=0.0, decoder_start_token_id=0,
    ),
}  # fmt: skip


def _step(model: nn.Module, batch: Batch, optimizer: Any, autocast: bool) -> Callable[[], Tensor]:
    def step() -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", LOW, enabled=autocast):
            output = model(**batch)
        loss = output if isinstance(output, Tensor) else output.loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def times(make: Make, tiny: bool) -> tuple[list[float], list[float]]:
    """Seconds of a step by autocast, autocast again, O1, and with fuse=True and low gradients; the losses."""
    torch.manual_seed(0)
    model, batch = make(tiny)
    model.train()
    plain = [copy.deepcopy(model) for _ in range(2)]
    steps = [_step(each, batch, torch.optim.AdamW(each.parameters(), 1e-4, fused=True), True) for each in plain]
    default = fxprec.convert(copy.deepcopy(model), dtype=LOW).module
    steps.append(_step(default, batch, torch.optim.AdamW(default.parameters(), 1e-4, fused=True), False))
    fused = fxprec.convert(copy.deepcopy(model), dtype=LOW, fuse=True).module
    own = fxprec.optim.AdamW(fused.parameters(), 1e-4, compiled=True, low_gradients=True)
    steps.append(_step(fused, batch, own, False))
    losses = [[float(step()) for _ in range(1 if tiny else 4)][-1] for step in steps]
    return fastest(steps, 0.0 if tiny else _SECONDS), losses


def main(arguments: list[str] | None = None) -> int:
    """Run what the options say; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks others", description="Time steps of other models")
    parser.add_argument("--only", nargs="+", choices=[*MODELS], default=[*MODELS], metavar="MODEL")
    parser.add_argument("--check", action="store_true", help="each as small as it gets, a few steps")
    options = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 160)
    table, failed = Table("model", title="bfloat16, over eager autocast"), 0
    for heading in ("autocast, ms", "noise", "O1", "fuse=True, low", "losses off by"):
        table.add_column(heading, justify="right")
    for name in options.only:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the packages
                (base, again, *ours), (right, *losses) = times(MODELS[name], options.check)
        except Exception as error:  # one model that fails is no reason to lose the others
            failed += 1
            table.add_row(name, f"failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:90]}")
            continue
        off = max(abs(loss - right) / abs(right) for loss in losses[1:])
        table.add_row(name, f"{1e3 * base:.1f}", *(f"{base / each:.2f}" for each in (again, *ours)), f"{off:.0e}")
    console.print(table)
    return int(failed > 0)


if __name__ == "__main__":
    fxprec.keep_memory()
    sys.exit(main())
