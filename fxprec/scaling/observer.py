"""Who looks on as a scaler's iterations end."""

from __future__ import annotations

from typing import Protocol


class Observer(Protocol):
    """Told of each ``update`` of a scaler that is enabled."""

    def before_update(self) -> None:
        """Look at what was found in this iteration: the scales are about to move."""

    def after_update(self, fallen: bool) -> str:
        """Look at the moved scales. ``fallen``: what is known of overflows that took one to its floor."""
        ...
