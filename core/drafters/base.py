"""What the engine asks of a way to draft."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from core.records import Settings
from core.sampling import Proposal


class Drafter(Protocol):
    """Proposes a chain of tokens for the committed ids of one sequence.

    A drafter may keep state of the ids it has read, as a count of leading ids of the sequence.
    ``rollback`` is told how many leading ids are certain to stand; what was read beyond is forgotten.
    """

    name: str
    context_length: int

    def prefill(self, ids: Sequence[int]) -> None:
        """Forgets everything and reads ``ids``."""

    def draft(
        self, ids: Sequence[int], count: int, settings: Settings, uniform: Callable[[], float]
    ) -> list[Proposal]:
        """Up to ``count`` proposals to follow ``ids`` (all committed ids), each after the one before.

        Fewer come back where the drafter has nothing usable to say; the round goes on with those.
        """

    def rollback(self, length: int) -> None:
        """Keeps at most the first ``length`` ids read."""
