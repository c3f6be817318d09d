"""Models: where their weights come from, and in which form they run."""

from collections.abc import Callable

# Called while something loads: a sentence for people, and the fraction done (None where unknown).
Progress = Callable[[str, "float | None"], None]


def silent(sentence: str, fraction: float | None) -> None:
    """The progress of what nobody watches."""
