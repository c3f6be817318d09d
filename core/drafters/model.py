"""Drafting with a small model that shares the target's tokenizer.

The draft reads, in one call, whatever was committed since it last read (docs/ENGINE.md, rule 8: two
tokens after a fully accepted round, more after rounds without drafts), then one token a step.
A head that covers only part of the vocabulary names its columns in ``head_ids``; other ids have
q = 0, which is exact all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from core.models.decoder import Decoder
from core.records import Settings
from core.sampling import BadLogitsError, Proposal, distribution, sample


class ModelDrafter:
    """``head_ids``: ids (n,) int64 ascending of the decoder's n logits; None when they are 0..n-1."""

    name = "model"

    def __init__(self, decoder: Decoder, head_ids: torch.Tensor | None = None):
        self.decoder = decoder
        self.head_ids = head_ids
        self.context_length = decoder.shape.context_length
        self.cache = decoder.new_cache()

    def prefill(self, ids: Sequence[int]) -> None:
        self.cache.length = 0
        self.decoder.prefill(ids[: self.context_length], self.cache)

    def draft(
        self, ids: Sequence[int], count: int, settings: Settings, uniform: Callable[[], float]
    ) -> list[Proposal]:
        proposals: list[Proposal] = []
        unread = list(ids[self.cache.length :])
        for _ in range(count):
            logits = self.decoder.next_logits(unread, self.cache)
            try:
                q = distribution(logits, settings.temperature, settings.top_k, settings.top_p, self.head_ids)
            except BadLogitsError:
                break
            soft = q if settings.temperature else distribution(logits, 1.0, ids=self.head_ids)
            proposals.append(Proposal(sample(q, uniform()), q, soft))
            unread = [proposals[-1].id]
        return proposals

    def rollback(self, length: int) -> None:
        self.cache.length = min(self.cache.length, length)
