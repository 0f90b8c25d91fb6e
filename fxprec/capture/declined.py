"""The signal that static capture cannot take a model."""

from __future__ import annotations


class CaptureDeclined(Exception):
    """Static capture cannot take this model or call; the model is as it was. ``reason``: one clause that says where."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
