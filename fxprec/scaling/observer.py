"""Who looks on as a scaler's iterations end."""

from __future__ import annotations

from typing import Protocol


class Observer(Protocol):
    """Told of each ``update`` of a scaler that is enabled."""

    def before_update(self) -> None:
        """It is about to move the scales: what was found in this iteration is still there."""

    def after_update(self, fallen: bool) -> str:
        """It has. ``fallen``: overflows took a scale to its floor; what is known of them, for the message."""
        ...
