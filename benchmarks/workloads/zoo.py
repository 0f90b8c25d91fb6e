"""Real architectures in small sizes with random weights: what people train, from their own packages, no download."""

# Configurations of transformers take names that their signatures do not show; diffusers exports lazily.
# pyright: reportCallIssue=false, reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

__all__ = ["ZOO", "Case", "gpt2", "resnet"]

SIZE: Final[dict[str, Any]] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
}


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


def gpt2(layers: int = SIZE["num_hidden_layers"]) -> nn.Module:
    """GPT-2 of so many layers; GPT-2 small has 12."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=200, n_positions=32, n_embd=64, n_layer=layers, n_head=4))


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

    layers = SIZE["num_hidden_layers"]
    config = WhisperConfig(
        vocab_size=200, d_model=64, encoder_layers=layers, decoder_layers=layers, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128, max_source_positions=16,
        max_target_positions=32, num_mel_bins=8, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    return WhisperForConditionalGeneration(config)


def _mamba() -> nn.Module:
    from transformers import MambaConfig, MambaForCausalLM

    layers = SIZE["num_hidden_layers"]
    return MambaForCausalLM(MambaConfig(vocab_size=200, hidden_size=64, num_hidden_layers=layers, state_size=8))


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


def _deberta() -> nn.Module:
    from transformers import DebertaV2Config, DebertaV2ForMaskedLM

    config = DebertaV2Config(
        vocab_size=200, relative_attention=True, pos_att_type=["p2c", "c2p"], max_relative_positions=16, **SIZE
    )
    return DebertaV2ForMaskedLM(config)


def _deepseek() -> nn.Module:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        vocab_size=200, n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1, moe_intermediate_size=32,
        q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, v_head_dim=16, qk_nope_head_dim=8,
        first_k_dense_replace=1, **SIZE,
    )  # fmt: skip
    return DeepseekV3ForCausalLM(config)


def _clip() -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    text = {"vocab_size": 200, "max_position_embeddings": 32, "projection_dim": 32, "eos_token_id": 2, **SIZE}
    vision = {"image_size": 32, "patch_size": 8, "projection_dim": 32, **SIZE}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=32))


def _swin() -> nn.Module:
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(
        image_size=32, patch_size=4, embed_dim=16, depths=[1, 1], num_heads=[2, 2], window_size=4, num_labels=10
    )
    return SwinForImageClassification(config)


def _wav2vec2() -> nn.Module:
    """Its forward breaks dynamo's graph in six places."""
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    config = Wav2Vec2Config(
        vocab_size=32, conv_dim=(32, 32), conv_stride=(5, 4), conv_kernel=(10, 8), num_feat_extract_layers=2,
        num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=2, mask_time_prob=0.0, **SIZE,
    )  # fmt: skip
    return Wav2Vec2ForCTC(config)


class _GAN(nn.Module):
    """A generator and a discriminator with spectral norm: weights that are computed from others at each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.ConvTranspose2d(8, 16, 4), nn.BatchNorm2d(16), nn.ReLU(), nn.ConvTranspose2d(16, 3, 4, 2, 1), nn.Tanh()
        )
        self.discriminator = nn.Sequential(
            spectral_norm(nn.Conv2d(3, 16, 4, 2, 1)), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(256, 1)
        )

    def forward(self, z: Tensor) -> Tensor:
        return F.softplus(-self.discriminator(self.generator(z))).mean()


#: name -> case; sizes for a second or so on two cores
ZOO: dict[str, Case] = {
    "bert": Case(_bert, _text),
    "gpt2": Case(gpt2, _text),
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
    "deberta": Case(_deberta, _text),
    "deepseek": Case(_deepseek, _text),
    "clip": Case(_clip, lambda: {"input_ids": _ids(), "pixel_values": torch.randn(2, 3, 32, 32), "return_loss": True}),
    "swin": Case(_swin, lambda: {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([1, 2])}),
    "wav2vec2": Case(_wav2vec2, lambda: {"input_values": torch.randn(2, 800), "labels": torch.randint(1, 30, (2, 5))}),
    "gan": Case(_GAN, lambda: {"z": torch.randn(2, 8, 1, 1)}, lambda loss: loss),
}


class _Bottleneck(nn.Module):
    """Of ResNet: 1x1, 3x3 with the stride, 1x1 to four times the width, each with batch norm; then the sum."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.shortcut = nn.Sequential()
        if stride > 1 or channels != 4 * width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + self.shortcut(x))


def resnet(blocks: tuple[int, ...] = (3, 4, 6, 3), width: int = 64, classes: int = 10) -> nn.Module:
    """ResNet-50 (He et al., 2016) with the stride in the 3x3 convolution; fewer blocks and less width for tests.

    With n blocks, s of them with a convolution in the shortcut, it has 3 n + s + 1 batch norms, of which 3 n + 1 have a
    relu behind them.
    """
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
    ]  # fmt: skip
    channels = width
    for stage, count in enumerate(blocks):
        for block in range(count):
            layers.append(_Bottleneck(channels, width << stage, 2 if stage and not block else 1))
            channels = 4 * width << stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))
