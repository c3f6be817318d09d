"""The one error that loading a model raises, and others in words."""

from __future__ import annotations


class LoadError(RuntimeError):
    """A model cannot be loaded; the message is one sentence that says why and what to do."""


def is_out_of_memory(error: Exception) -> bool:
    """Of Python, of a card, or of torch on a processor."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "can't allocate memory" in str(error)
    )


def first_line(error: Exception) -> str:
    """What an error says, to stand within a sentence."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].strip().rstrip(".:")
