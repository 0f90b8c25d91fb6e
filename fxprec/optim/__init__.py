"""Optimizers that unscale, check, clip, update and write the shadows in one pass: torch's, with less traffic."""

from fxprec.optim.adam import Adam, AdamW
from fxprec.optim.sgd import SGD

__all__ = ["SGD", "Adam", "AdamW"]
