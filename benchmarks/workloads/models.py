"""Models for the benchmarks and the tests, written here: no download, sizes by argument.

Those of sequences are below, those of images in ``benchmarks.workloads.convnets``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.workloads.convnets import CNN, ResNet, UNet

__all__ = ["BERT", "CNN", "GPT", "MLP", "Block", "Decoder", "Llama", "ResNet", "UNet", "ViT"]

#: Standard deviation of the weights of embeddings that are also those of the head; nn.Embedding's own is 1.
_TIED_STD = 0.02


class MLP(nn.Module):
    """Linear layers of one width with ReLU between them: (N, width) -> the same."""

    def __init__(self, width: int, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        for layer in list(self.layers)[1:]:
            x = layer(F.relu(x))
        return x


class Attention(nn.Module):
    """Self-attention with fused qkv: (batch, time, dim) -> the same; ``mask``: (batch, time), True at what is read."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        batch, time, dim = x.shape
        qkv = self.qkv(x).view(batch, time, 3, self.heads, dim // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
        return self.proj(attended.transpose(1, 2).reshape(batch, time, dim))


class Block(nn.Module):
    """Pre-LN transformer block with fused qkv. (batch, time, dim) -> the same."""

    def __init__(self, dim: int, heads: int, dropout: float, causal: bool = True) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.norm1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, dim = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, dim // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.dropout(self.proj(attended.transpose(1, 2).reshape(batch, time, dim)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class Decoder(nn.Module):
    """A GPT with pre-LN blocks: (batch, time) codes -> (batch, time, vocabulary) logits.

    Args:
        layers, dim, heads, vocabulary, context, dropout: sizes; 12, 768, 12, 50257 and 1024 are GPT-2 small's.
        tied: the head has the embeddings' weight, as GPT-2's.
    """

    def __init__(
        self,
        layers: int = 12,
        dim: int = 64,
        heads: int = 4,
        vocabulary: int = 256,
        context: int = 64,
        dropout: float = 0.0,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, dim)
        self.positions = nn.Embedding(context, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
            nn.init.normal_(self.tokens.weight, std=_TIED_STD)

    def logits(self, codes: Tensor) -> Tensor:
        x = self.tokens(codes) + self.positions(torch.arange(codes.shape[1], device=codes.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def forward(self, codes: Tensor) -> Tensor:
        return self.logits(codes)


class GPT(Decoder):
    """The same with the loss inside: (batch, time) codes and targets -> the mean cross-entropy."""

    def forward(self, codes: Tensor, targets: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return F.cross_entropy(self.logits(codes).flatten(0, 1), targets.flatten())


class LlamaBlock(nn.Module):
    """RMSNorm, attention with rotary embedding, RMSNorm, SwiGLU; no biases. (batch, time, dim) -> the same."""

    def __init__(self, dim: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.RMSNorm(dim, eps=1e-5)
        self.q, self.k, self.v, self.proj = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.norm2 = nn.RMSNorm(dim, eps=1e-5)
        self.gate, self.up = (nn.Linear(dim, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, time, dim = x.shape
        h = self.norm1(x)
        heads = (batch, time, self.heads, dim // self.heads)
        q, k, v = (each(h).view(heads).transpose(1, 2) for each in (self.q, self.k, self.v))
        q, k = q * cos + _rotated(q) * sin, k * cos + _rotated(k) * sin
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(batch, time, dim))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def _rotated(x: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return torch.cat((-right, left), dim=-1)


class Llama(nn.Module):
    """A Llama-style stack: (batch, time) codes -> (batch, time, vocabulary) logits.

    Sources: Touvron et al., "LLaMA", 2023; Su et al., "RoFormer", 2021; Shazeer, "GLU Variants Improve Transformer",
    2020; Zhang and Sennrich, "Root Mean Square Layer Normalization", NeurIPS 2019.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, layers: int, dim: int, heads: int, inner: int, vocabulary: int, context: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(LlamaBlock(dim, heads, inner) for _ in range(layers))
        self.norm = nn.RMSNorm(dim, eps=1e-5)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        width = dim // heads
        frequencies = 10000.0 ** (-torch.arange(0, width, 2) / width)
        angles = torch.outer(torch.arange(context), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, codes: Tensor) -> Tensor:
        time = codes.shape[1]
        x = self.tokens(codes)
        for block in self.blocks:
            x = block(x, self.cos[:time], self.sin[:time])
        return self.head(self.norm(x))


class BERTBlock(nn.Module):
    """Post-LN block: (batch, time, dim) and the padding mask -> (batch, time, dim)."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.attention = Attention(dim, heads)
        self.norm1 = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)
        self.norm2 = nn.LayerNorm(dim)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.norm1(x + self.attention(x, mask))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class BERT(nn.Module):
    """BERT with the head for masked tokens: (batch, time) codes and mask -> (batch, time, vocabulary) logits.

    The mask is bool, True at tokens and False at padding, which no token attends to. Every token is of segment 0.

    Source: Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers", NAACL 2019.
    """

    def __init__(
        self, layers: int = 12, dim: int = 768, heads: int = 12, vocabulary: int = 30522, context: int = 512
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, dim)
        self.positions = nn.Embedding(context, dim)
        self.segments = nn.Embedding(2, dim)
        self.norm = nn.LayerNorm(dim)
        self.blocks = nn.ModuleList(BERTBlock(dim, heads) for _ in range(layers))
        self.transform = nn.Linear(dim, dim)
        self.head_norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocabulary)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=_TIED_STD)

    def forward(self, codes: Tensor, mask: Tensor) -> Tensor:
        positions = torch.arange(codes.shape[1], device=codes.device)
        x = self.norm(self.tokens(codes) + self.positions(positions) + self.segments.weight[0])
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.head_norm(F.gelu(self.transform(x))))


class ViT(nn.Module):
    """A vision transformer with a class token: (N, 3, side, side) images -> (N, classes) logits.

    Source: Dosovitskiy et al., "An Image is Worth 16x16 Words", ICLR 2021; the defaults are ViT-B/16.
    """

    def __init__(
        self,
        layers: int = 12,
        dim: int = 768,
        heads: int = 12,
        side: int = 224,
        patch: int = 16,
        classes: int = 1000,
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, dim, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, dim))
        self.positions = nn.Parameter(_TIED_STD * torch.randn(1, (side // patch) ** 2 + 1, dim))
        self.blocks = nn.ModuleList(Block(dim, heads, 0.0, causal=False) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])
