"""Encoders in eval mode: padding is as torch's fused inference path has it, and O0 is equal bit for bit."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fxprec

PADDINGS = {
    "none": None,
    "at the end": torch.tensor([[False] * 4, [False, False, True, True]]),
    "at the start": torch.tensor([[False] * 4, [True, True, False, False]]),
    "of nothing": torch.zeros(2, 4).bool(),
    "as floats": torch.zeros(2, 4).masked_fill(torch.arange(4) > 2, -torch.inf),
}


def layer(**options):
    return nn.TransformerEncoderLayer(8, 2, 16, **{"batch_first": True, "dropout": 0.0, **options})


class Wrapped(nn.Module):
    def __init__(self, encoder):
        super().__init__()
        self.encoder, self.out = encoder, nn.Linear(8, 8)

    def forward(self, src, src_key_padding_mask=None):
        return self.out(self.encoder(src, src_key_padding_mask=src_key_padding_mask))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, src, src_key_padding_mask=None):
        return self.attention(src, src, src, key_padding_mask=src_key_padding_mask, need_weights=False)[0]


MODELS = {
    "encoder": lambda: nn.TransformerEncoder(layer(), 2),
    "gelu": lambda: nn.TransformerEncoder(layer(activation="gelu"), 2),
    "norm": lambda: nn.TransformerEncoder(layer(), 2, norm=nn.LayerNorm(8)),
    "not nested": lambda: nn.TransformerEncoder(layer(), 2, enable_nested_tensor=False),
    "norm first": lambda: nn.TransformerEncoder(layer(norm_first=True), 2),
    "layer": layer,
    "wrapped": lambda: Wrapped(nn.TransformerEncoder(layer(), 2)),
    "attention": Attention,
}


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:enable_nested_tensor", "ignore:The PyTorch API of nested", "ignore::fxprec.ServiceWarning"
)
@pytest.mark.parametrize(
    ("level", "name"),
    [*(("O0", name) for name in MODELS), *(("O1", name) for name in ("encoder", "norm first", "wrapped", "attention"))],
)
def test_padding_is_as_in_eager_mode(name, level):
    original = MODELS[name]().eval()
    if name == "norm":
        nn.init.normal_(original.norm.bias)
    model, _ = fxprec.convert(copy.deepcopy(original), level=level, dtype=torch.bfloat16)
    for recording in (False, True):
        for text, padding in PADDINGS.items():
            src = torch.randn(2, 4, 8)
            with torch.set_grad_enabled(recording):
                expected, got = (each(src, src_key_padding_mask=padding) for each in (original, model))
            if level == "O0":
                assert torch.equal(got, expected), (text, recording)
            else:
                assert got.dtype == torch.float32
                torch.testing.assert_close(got, expected, atol=0.1, rtol=0.05, msg=f"{text}, {recording}")


def test_two_encoders_with_another_activation_are_both_captured():
    """dynamo makes a symbol of an integer that differs between two models of a class; torch's fused op wants a flag."""
    for activation in ("relu", "gelu"):
        model, _ = fxprec.convert(nn.TransformerEncoder(layer(activation=activation), 1).eval(), dtype=torch.bfloat16)
        with torch.no_grad():
            model(torch.randn(2, 4, 8), src_key_padding_mask=PADDINGS["at the end"])
        assert len(fxprec.graphs(model)) == 1
