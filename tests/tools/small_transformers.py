"""transformers' own models, small: what their fused regions are made from."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

VOCABULARY = 128


def _ids(rows: int = 2, columns: int = 64) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (rows, columns))


def gpt2() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=1, vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, use_cache=False)
    return GPT2LMHeadModel(config), {"input_ids": _ids()}


def bert() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(num_hidden_layers=1, vocab_size=VOCABULARY)), {"input_ids": _ids()}


def llama() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=2048, intermediate_size=5632, num_hidden_layers=1, num_attention_heads=16, num_key_value_heads=4,
        vocab_size=VOCABULARY, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config), {"input_ids": _ids(columns=8)}  # wide products: slow on some CPUs


def t5() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(num_layers=1, vocab_size=VOCABULARY, decoder_start_token_id=0, use_cache=False)
    return T5ForConditionalGeneration(config), {"input_ids": _ids(), "decoder_input_ids": _ids()}


def vit() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(num_hidden_layers=1)), {"pixel_values": torch.randn(1, 3, 224, 224)}


MODELS = {"gpt2": gpt2, "bert": bert, "llama": llama, "t5": t5, "vit": vit}
