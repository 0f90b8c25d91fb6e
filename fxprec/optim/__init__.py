"""Optimizers with torch's interface that unscale, check, clip, update and write the shadows in one pass."""

from fxprec.optim.adam import Adam, AdamW
from fxprec.optim.sgd import SGD

__all__ = ["SGD", "Adam", "AdamW"]
