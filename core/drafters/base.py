"""What the engine asks of a way to draft."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

from core.models.base import Cache, Scorer, Stop
from core.records import Settings
from core.verify.sampling import Proposal


class Drafter(Protocol):
    """Proposes tokens, a chain or a tree, to follow the committed ids of one sequence.

    What a drafter has read of a sequence is in a state of its own, which the engine keeps and crops with
    the target's cache: ``state.length`` leading ids of the sequence were read. ``cache`` is the target's, for
    drafters that look into it: it holds all committed ids but the last.

    What a drafter knows is a function of the committed ids of this conversation (docs/ENGINE.md, rule 7):
    after ``prefill`` a state that served other prompts, replies that were stopped or such that failed
    proposes what a new one does. Each drafter says in its docstring why.
    """

    name: str
    context_length: int

    def new_state(self) -> Cache:
        """The state of a sequence of which nothing was read."""

    def proposer(self, state: Cache) -> str:
        """Who proposed what came from the last ``draft`` with ``state``: the drafter's name, unless it asks
        others."""

    def short(self, state: Cache) -> str:
        """The reason a round records when fewer proposals came from the last ``draft`` than were asked for:
        ``no_match``, or ``draft_failed`` where numbers were of no use."""

    def prefill(self, ids: Sequence[int], state: Cache, cache: Cache, stop: Stop | None = None) -> None:
        """Reads ``ids``, the leading ids of the sequence, from where ``state`` has got to; each reply begins
        with it.

        The target has read them before. Nothing where they leave no room to draft in the drafter's context.
        """

    def draft(
        self,
        ids: Sequence[int],
        count: int,
        settings: Settings,
        uniform: Callable[[], float],
        state: Cache,
        cache: Cache,
    ) -> list[Proposal]:
        """Proposals up to ``count`` deep to follow ``ids`` (all committed ids), parents before children.

        A chain of at most ``count``, unless ``settings.tree_width`` is above 1 and the drafter makes trees.
        Fewer come back where the drafter has nothing usable to say; the round goes on with those. What is
        chosen may depend on the sequence and on q, never on the draws of verification (docs/ENGINE.md,
        rule 7).
        ``cache`` is left with the length it had.
        """

    def observe(self, ids: Sequence[int], logits: torch.Tensor, state: Cache) -> None:
        """Learns from a target's pass: ``logits`` (n, vocabulary) after each of ``ids``, drafts included."""


Step = Callable[[torch.Tensor], torch.Tensor]


class DeviceDrafter(Drafter, Protocol):
    """A drafter whose models can be fed where they are (``core.engine.batched``), without a wait for any of
    it.

    ``device_models`` are what it runs beside the target, all on one device with it; ``head_ids`` the ids of
    its columns, None where they are 0..n-1.
    """

    device_models: tuple[Scorer, ...]
    head_ids: torch.Tensor | None

    def reach(self, ids: Sequence[int], count: int) -> int:
        """For how many positions, ``count`` at most, it drafts after ``ids``."""

    def unread(self, ids: Sequence[int], state: Cache) -> Sequence[int]:
        """Of committed ``ids`` those that its first step reads."""

    def device_steps(
        self, ids: Sequence[int], count: int, state: Cache, cache: Cache
    ) -> AbstractContextManager[Step]:
        """A step takes ids (n,) int64 on the device, first what ``unread`` gave and then the draft before it,
        and gives its logits there for the next position, (1, columns) float32. There are ``count`` steps.
        ``state`` and ``cache``, the target's, are afterwards as ``draft`` leaves them."""


class NoState:
    """The state of a drafter that keeps nothing of a sequence."""

    length = nbytes = 0

    def crop(self, length: int) -> None:
        """Nothing to forget."""

    def fork(self, length: int) -> NoState:
        return self


@dataclass(frozen=True)
class Drafting:
    """A way to draft for a pair's target: the drafter, what ``PairInfo`` says of it, field by field, and the
    acceptance that automatic K begins by expecting."""

    drafter: Drafter
    about: Mapping[str, object]
    acceptance: float = 0.5
