"""What a reply does when a card's memory ends in it, and whether the engine is of use afterwards.

A card's memory is really filled. A processor's is not, for that would hurt the machine: there a pass raises
what a full card raises, and the result says so. Serves ``core.bench.synthetic``.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from unittest import mock

import torch

from core.engine.loop import Engine
from core.models.memory import release
from core.pairs.pair import Pair
from core.records import Reply, Settings

LEAST = 1 << 20  # bytes: of the last block that is taken


@dataclasses.dataclass(frozen=True)
class Full:
    """``sentence``: how the reply ended whose memory was out, None where it ended as any; ``usable``: whether
    the engine wrote another afterwards; ``played``: no memory was filled."""

    sentence: str | None
    usable: bool
    played: bool


def full_memory(pair: Pair, ids: Sequence[int], tokens: int = 8) -> Full:
    """A reply to ``ids`` while there is no memory, and one when there is again."""
    on_card = pair.info.device == "cuda"
    target = pair.target if on_card else _NoRoom(pair.target)
    engine = Engine(dataclasses.replace(pair, target=target), batched=True)
    held = _filled() if on_card else []
    if not on_card:
        target.full = True
    # What was raised would go to the log; the sentence is all that a person is to see.
    with mock.patch.object(logging.getLogger("core.engine.loop"), "disabled", True):
        sentence = _reply(engine, ids, tokens).error
    if on_card:
        held.clear()
        release()
    else:
        target.full = False
    after = _reply(engine, ids, tokens)
    return Full(sentence, after.error is None and len(after.token_ids) == tokens, not on_card)


def _reply(engine: Engine, ids: Sequence[int], tokens: int) -> Reply:
    settings = Settings(temperature=1.0, num_draft_tokens=2, max_new_tokens=tokens)
    generation = engine.generate(ids, settings)
    for _ in generation:
        pass
    return generation.reply


def _filled() -> list[torch.Tensor]:
    """Takes what is left of the card's memory."""
    release()
    held: list[torch.Tensor] = []
    size = 1 << 30
    while size >= LEAST:
        try:
            held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            size //= 2
    return held


class _NoRoom:
    """A scorer whose passes find no memory while ``full``."""

    def __init__(self, scorer):
        self._scorer, self.full = scorer, False

    def __getattr__(self, name: str):
        return getattr(self._scorer, name)

    def device_logits(self, ids: torch.Tensor, cache) -> torch.Tensor:
        if self.full:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        return self._scorer.device_logits(ids, cache)
