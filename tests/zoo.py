"""Real architectures in small sizes with random weights: what people train, from their own packages, no download."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["ZOO", "Case"]

SIZE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}


@dataclass(frozen=True)
class Case:
    """A model, its keyword inputs, and the scalar to train on."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Any]]
    loss: Callable[[Any], Tensor] = lambda output: output.loss


def _ids(batch: int = 2, time: int = 16, vocabulary: int = 200) -> Tensor:
    return torch.randint(1, vocabulary, (batch, time))


def _text(**extra: Any) -> dict[str, Any]:
    ids = _ids()
    mask = torch.ones_like(ids)
    mask[0, -4:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.clone(), **extra}


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(vocab_size=200, max_position_embeddings=32, **SIZE))


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=200, n_positions=32, n_embd=64, n_layer=2, n_head=4))


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(vocab_size=200, num_key_value_heads=2, **SIZE))


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=200, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    return T5ForConditionalGeneration(config)


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(image_size=32, patch_size=8, num_labels=10, **SIZE))


def _whisper() -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=200, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128, max_source_positions=16,
        max_target_positions=32, num_mel_bins=8, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    return WhisperForConditionalGeneration(config)


def _mamba() -> nn.Module:
    from transformers import MambaConfig, MambaForCausalLM

    return MambaForCausalLM(MambaConfig(vocab_size=200, hidden_size=64, num_hidden_layers=2, state_size=8))


def _mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(vocab_size=200, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, **SIZE)
    )


def _unet() -> nn.Module:
    from diffusers import UNet2DModel

    return UNet2DModel(
        sample_size=16, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
    )  # fmt: skip


#: name -> case; sizes for a second or so on two cores
ZOO: dict[str, Case] = {
    "bert": Case(_bert, _text),
    "gpt2": Case(_gpt2, _text),
    "llama": Case(_llama, _text),
    "t5": Case(_t5, lambda: {"input_ids": _ids(), "labels": _ids()}),
    "vit": Case(_vit, lambda: {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([1, 2])}),
    "whisper": Case(_whisper, lambda: {"input_features": torch.randn(2, 8, 32), "labels": _ids()}),
    "mamba": Case(_mamba, lambda: {"input_ids": (ids := _ids()), "labels": ids}),
    "mixtral": Case(_mixtral, _text),
    "unet": Case(
        _unet,
        lambda: {"sample": torch.randn(2, 3, 16, 16), "timestep": torch.tensor([3, 7])},
        lambda output: output.sample.square().mean(),
    ),
}
