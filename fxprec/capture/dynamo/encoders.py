"""The fused inference path of ``nn.TransformerEncoder`` and ``nn.MultiheadAttention``, which dynamo does not take.

In eval mode, where no gradient is recorded, torch runs an encoder with ``src_key_padding_mask`` on nested tensors, and
what it returns at padded positions is zero. Compiled, it runs on padded tensors, and returns what the layers make of
the padding. Here the graph puts the zeros there:

::

    %output = norm(layers(%src, %mask))     ->      %output = norm(layers(%src, %mask))
                                                    %empty = norm(zeros_like(%output))
                                                    %where = where(%padded, %empty, %output)

The kernels of that path sum in another order as well. At O0, where a result must be equal bit for bit, the interpreter
runs such a model (``fused_path``).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

_FUSED = (nn.MultiheadAttention, nn.TransformerEncoder, nn.TransformerEncoderLayer)


def fused_path(module: nn.Module) -> str | None:
    """Return why a call of this module now may take torch's fused inference path, or None if it cannot."""
    if not torch.backends.mha.get_fastpath_enabled():
        return None
    for each in module.modules():
        if isinstance(each, _FUSED) and not each.training and not _records(each.parameters()):
            return f"{type(each).__name__} takes torch's fused path for inference, which no graph has bit for bit"
    return None


def encoder_forward(
    encoder: nn.TransformerEncoder,
    src: Tensor,
    mask: Tensor | None = None,
    src_key_padding_mask: Tensor | None = None,
    is_causal: bool | None = None,
) -> Any:
    """Run ``nn.TransformerEncoder.forward`` with zeros where the fused path has them. dynamo traces this in its place.

    torch takes the path only if all padding is at the end of its row, which the mask's values tell: that is computed in
    the graph. With ``mask_check=False`` it does not look, and takes the path when it is compiled, too: there is nothing
    to do.
    """
    output = nn.TransformerEncoder.forward(encoder, src, mask, src_key_padding_mask, is_causal)
    if not _drops_padding(encoder, src, mask, src_key_padding_mask):
        return output
    # The fused path packs what is valid into a nested tensor, and pads with zeros afterwards.
    valid = src_key_padding_mask.logical_not()  # type: ignore[union-attr]
    positions = torch.arange(valid.size(1), device=valid.device)
    at_the_end = (valid == (positions < valid.sum(1, keepdim=True))).all()
    empty = torch.zeros_like(output)
    # The fused path pads before the norm at the end.
    if encoder.norm is not None:
        empty = encoder.norm(empty)
    return torch.where((at_the_end & ~valid).unsqueeze(-1), empty, output)


def _drops_padding(encoder: Any, src: Tensor, mask: Tensor | None, padding: Tensor | None) -> bool:
    first = encoder.layers[0]
    return (
        padding is not None
        and mask is None
        and torch.backends.mha.get_fastpath_enabled()
        and encoder.use_nested_tensor
        and encoder.mask_check
        and not first.training
        and src.dim() == 3
        and not _records((src, *first.parameters()))
    )


def _records(tensors: Iterable[Tensor]) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
