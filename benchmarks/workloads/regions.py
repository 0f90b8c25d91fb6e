"""The regions that ``convert(model, fuse=True)`` forms in models of transformers, as ``benchmarks.kernels`` times them.

A model of two layers at its real width runs twice; what went into each region is kept, and each region that differs
from those before becomes a problem. Beside it runs its own graph, op by op: what eager autocast would run, casts
included, but that a linear's bias is added by itself there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn

import fxprec
from benchmarks.workloads.problems import Problem, Setup, Source
from fxprec.kernels.launch.triton_support import can_launch
from fxprec.kernels.rows.program.region_graph import structure_of
from fxprec.kernels.rows.run.plan import bytes_moved
from fxprec.kernels.rows.run.region import FusedRegion

__all__ = ["MODELS", "QUICK_REGION", "REGIONS", "Call", "calls", "regions", "slug"]

#: A region, and what went into it.
Call: TypeAlias = tuple[FusedRegion, tuple[Tensor, ...]]

#: Small: logits are the business of cross-entropy's kernel.
_VOCABULARY: Final = 128
#: Regions that move less than this on a device are not timed.
_SMALLEST: Final = 4 << 20


def _ids(setup: Setup, batch: int, length: int) -> dict[str, Any]:
    shape = (setup.size(batch, 2), setup.size(length, 8))
    return {"input_ids": torch.randint(1, _VOCABULARY, shape, device=setup.device)}


def _gpt2(setup: Setup) -> tuple[nn.Module, dict[str, Any]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=setup.size(2, 1), n_embd=setup.size(768, 32), n_head=setup.size(12, 2), vocab_size=_VOCABULARY,
        bos_token_id=0, eos_token_id=0, use_cache=False,
    )  # fmt: skip
    return GPT2LMHeadModel(config), _ids(setup, 16, 1024)


def _sizes(setup: Setup, hidden: int, inner: int, heads: int) -> dict[str, Any]:
    return {
        "hidden_size": setup.size(hidden, 32), "intermediate_size": setup.size(inner, 64),
        "num_attention_heads": setup.size(heads, 2), "num_hidden_layers": setup.size(2, 1),
    }  # fmt: skip


def _bert(setup: Setup) -> tuple[nn.Module, dict[str, Any]]:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(vocab_size=_VOCABULARY, **_sizes(setup, 768, 3072, 12))
    return BertForMaskedLM(config), _ids(setup, 32, 512)


def _llama(setup: Setup) -> tuple[nn.Module, dict[str, Any]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=_VOCABULARY, use_cache=False, num_key_value_heads=setup.size(8, 1), **_sizes(setup, 2048, 8192, 32)
    )
    return LlamaForCausalLM(config), _ids(setup, 4, 2048)


def _vit(setup: Setup) -> tuple[nn.Module, dict[str, Any]]:
    from transformers import ViTConfig, ViTForImageClassification

    side = setup.size(224, 32)
    config = ViTConfig(image_size=side, **_sizes(setup, 768, 3072, 12))
    pixels = torch.randn(setup.size(256, 2), 3, side, side, device=setup.device)
    return ViTForImageClassification(config), {"pixel_values": pixels}


def calls(name: str, make: Callable[[Setup], tuple[nn.Module, dict[str, Any]]], setup: Setup) -> list[Call]:
    """What a forward of a model calls, each structure at each shapes once; the inputs want gradients as there."""
    with torch.device(setup.device):
        model, inputs = make(setup)
    fuse = True if can_launch(setup.device) else "aten"
    model, _ = fxprec.convert(model.train(), dtype=setup.low, fuse=fuse)
    model(**inputs)  # captures
    noted: dict[Any, Call] = {}

    def note(region: nn.Module, given: tuple[Tensor, ...]) -> None:
        assert isinstance(region, FusedRegion)
        alike = [(tuple(x.shape), x.stride(), x.dtype, x.requires_grad) for x in given]
        key = (structure_of(region.graph_module), *alike)
        noted.setdefault(key, (region, tuple(x.detach().requires_grad_(x.requires_grad) for x in given)))

    found = [region for gm in fxprec.graphs(model) for region in gm.modules() if isinstance(region, FusedRegion)]
    hooks = [region.register_forward_pre_hook(note) for region in found]
    model(**inputs)
    for hook in hooks:
        hook.remove()
    if not noted:
        raise RuntimeError(f"no fused region of {name} ran: there is nothing to time")
    del model
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return [*noted.values()]


def regions(
    name: str, make: Callable[[Setup], tuple[nn.Module, dict[str, Any]]], setup: Setup, quick: bool = False
) -> Iterator[Problem]:
    """The regions of a model as problems.

    :param quick: only the one that moves the most.
    """
    problems = [_problem(name, *call) for call in calls(name, make, setup)]
    problems = [p for p in problems if setup.tiny or p.moved[0] is None or p.moved[0] >= _SMALLEST]
    yield from sorted(problems, key=lambda p: -(p.moved[0] or 0))[: 1 if quick else None]


def _problem(model: str, region: FusedRegion, given: tuple[Tensor, ...]) -> Problem:
    count = len(region.graph_module.graph.find_nodes(op="placeholder"))
    inputs, seeds = given[:count], given[count:]

    def ours(*inputs: Tensor) -> Any:
        results = region(*inputs, *seeds)
        if inputs[0].is_cuda and region.path != "triton":
            raise RuntimeError(f"{region.name} of {model} ran op by op: {region.reason}")
        return results

    largest = max(inputs, key=Tensor.numel)
    return Problem(
        f"{model}: {region.name}", "x".join(map(str, largest.shape)), ours, region.graph_module, inputs,
        _moved(region, inputs, ours), autocast=False, compared=not region.draws,
    )  # fmt: skip


def _moved(region: FusedRegion, inputs: tuple[Tensor, ...], ours: Callable[..., Any]) -> tuple[int, int | None]:
    """What forward and backward must move: each tensor that they start from, and each result, once."""
    results = ours(*inputs)
    outputs = results if isinstance(results, tuple) else (results,)
    forward = sum(x.numel() * x.itemsize for x in (*inputs, *outputs))
    if not region.plans:
        return forward, None
    return forward, bytes_moved(region.plans[-1])[1] - forward


MODELS: Final = {"GPT-2 small": _gpt2, "BERT-base": _bert, "Llama 1B": _llama, "ViT-B/16": _vit}


def slug(model: str) -> str:
    """As options and files name a model: "vit-b-16"."""
    return re.sub(r"\W+", "-", model).lower()


#: A single region, in the place of them all.
QUICK_REGION: Final = Source(
    "largest region of GPT-2 small", lambda setup: regions("GPT-2 small", _gpt2, setup, quick=True), quick=True
)
REGIONS: Final = tuple(
    Source(f"regions of {name}", lambda setup, name=name, make=make: regions(name, make, setup))
    for name, make in MODELS.items()
)
