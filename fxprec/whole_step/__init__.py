"""Capture a whole training step as one CUDA graph: ``fxprec.capture_step``."""

from fxprec.whole_step.captured_step import CapturedStep, capture_step

__all__ = ["CapturedStep", "capture_step"]
