"""Low-precision copies (shadows) of FP32 weights: a store of them for each converted model."""

from fxprec.shadows.store import ShadowStore, stores

__all__ = ["ShadowStore", "stores"]
