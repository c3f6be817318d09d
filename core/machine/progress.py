"""How work that takes long tells what it does."""

from __future__ import annotations

from collections.abc import Callable

# A sentence for people, and the fraction done (None where unknown).
Progress = Callable[[str, "float | None"], None]


def silent(sentence: str, fraction: float | None) -> None:
    """The progress of what nobody watches."""
