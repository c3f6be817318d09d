"""The one error that loading a model raises."""

from __future__ import annotations


class LoadError(RuntimeError):
    """A model cannot be loaded; the message is one sentence that says why and what to do."""
