"""CUDA's autocast and its attention, for tensors that are on no such device: the same casts, op by op.

``with Autocast(torch.bfloat16): loss = f(model(x))`` calls what a GPU would call. Of torch.autocast's lists those are
here that the benchmarks' models call.
"""

from __future__ import annotations

import math
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

__all__ = ["Autocast"]

#: "CUDA Ops that can autocast to float16" and "to float32", of torch's page of torch.amp.
_LOW: Final = frozenset(
    (
        F.linear, F.conv2d, torch.conv2d, F.conv_transpose2d, torch.conv_transpose2d, torch.matmul, Tensor.matmul,
        Tensor.__matmul__, torch.bmm, torch.mm, torch.addmm, torch.baddbmm,
    )
)  # fmt: skip
_WIDE: Final = frozenset(
    (
        F.layer_norm, F.group_norm, F.softmax, torch.softmax, Tensor.softmax, F.log_softmax, F.cross_entropy,
        F.nll_loss, F.mse_loss, torch.pow, Tensor.pow, Tensor.__pow__, torch.rsqrt, Tensor.rsqrt, torch.sum,
        Tensor.sum, torch.exp, Tensor.exp, torch.log, Tensor.log, torch.prod, torch.cumsum, Tensor.cumsum,
    )
)  # fmt: skip


class Autocast(TorchFunctionMode):
    """As torch.autocast("cuda", dtype) is, with weights cast at each call: a compiler casts them once."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        to = self._dtype if func in _LOW else torch.float32 if func in _WIDE else None
        if to is not None:
            args, kwargs = pytree.tree_map_only(
                Tensor, lambda x: x.to(to) if x.is_floating_point() else x, (args, kwargs)
            )
        return func(*args, **kwargs)

    def _attention(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None,
    ) -> Tensor:  # fmt: skip
        """Flash attention without a mask, the memory-efficient one with it."""
        query, key, value = (x.to(self._dtype) for x in (query, key, value))
        if attn_mask is None:
            flash = torch.ops.aten._scaled_dot_product_flash_attention
            return flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
        if attn_mask.dtype == torch.bool:
            zero = torch.zeros((), dtype=self._dtype, device=query.device)
            attn_mask = torch.where(attn_mask, zero, -math.inf)
        bias = attn_mask.to(self._dtype).expand(*query.shape[:3], key.shape[2])
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        return efficient(query, key, value, bias, True, dropout_p, is_causal, scale=scale)[0]
