"""What the engine asks of a way to draft."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from core.models.base import Cache, Stop
from core.records import Settings
from core.sampling import Proposal


class Drafter(Protocol):
    """Proposes a chain of tokens for the committed ids of one sequence.

    What a drafter has read of a sequence is in a state of its own, which the engine keeps and crops with
    the target's cache: ``state.length`` leading ids of the sequence were read.
    """

    name: str
    context_length: int

    def new_state(self) -> Cache:
        """The state of a sequence of which nothing was read."""

    def prefill(self, ids: Sequence[int], state: Cache, stop: Stop | None = None) -> None:
        """Reads ``ids``, the leading ids of the sequence, from where ``state`` has got to.

        Nothing where they leave no room to draft in the drafter's context.
        """

    def draft(
        self,
        ids: Sequence[int],
        count: int,
        settings: Settings,
        uniform: Callable[[], float],
        state: Cache,
    ) -> list[Proposal]:
        """Up to ``count`` proposals to follow ``ids`` (all committed ids), each after the one before.

        Fewer come back where the drafter has nothing usable to say; the round goes on with those.
        """
