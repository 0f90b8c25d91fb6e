"""Costs of devices that nobody has, made by hand."""

from __future__ import annotations

import torch

from fxprec.passes.costs.device_costs import Curve, DeviceCosts, Work


def always(microseconds: float) -> Curve:
    """So much, whatever the size."""
    return Curve(((1e-3, microseconds * 1e-6), (1e18, microseconds * 1e-6)))


def device(
    full: float | Curve,
    low: float | Curve,
    cast: float = 1e-3,
    dtype: torch.dtype = torch.bfloat16,
    **kinds: tuple[float, float],
) -> DeviceCosts:
    """Microseconds (or curves) of a product in FP32 and low, of a cast; all else takes no time to speak of,
    and a product of one row is like any other."""
    curves: dict[torch.dtype, dict[Work, Curve]] = {}
    for position, each in enumerate((torch.float32, dtype)):
        product = (full, low)[position]
        curves[each] = {work: always(1e-6) for work in Work if work is not Work.ROW}
        curves[each][Work.MATMUL] = product if isinstance(product, Curve) else always(product)
        curves[each][Work.CAST] = always(cast)
        for name, both in kinds.items():
            curves[each][Work[name.upper()]] = always(both[position])
    return DeviceCosts("cpu", "a machine", 2, "made by hand", curves)
