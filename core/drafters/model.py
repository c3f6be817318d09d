"""Drafting with a small model that shares the target's tokenizer.

The draft reads, in one call, whatever was committed since it last read (docs/ENGINE.md, rule 8: two
tokens after a fully accepted round, more after rounds without drafts), then one token a step.
A head that covers only part of the vocabulary names its columns in ``head_ids``; other ids have
q = 0, which is exact all the same.

Vocabularies may be padded to different widths (docs/ENGINE.md, rule 11; SD-05). Columns beyond the
target's are cut off before q is normalised, since the target could neither emit nor read such an id;
an id beyond the draft's own embedding is read as id 0, which costs acceptance there and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from core.drafters.base import Step
from core.models.base import Cache, Scorer, Stop
from core.records import Settings
from core.verify.sampling import Proposal
from core.verify.tree import along_branch


class ModelDrafter:
    """``head_ids``: ids (n,) int64 ascending of the model's n logits; None when they are 0..n-1.

    ``vocabulary``: width of the target's logits; None when the draft's is no wider. Columns of a row of the
    draft from ``width`` on are of no use then. What it knows are the model's keys of committed ids; those of
    drafts that did not stand are cropped.
    """

    name = "model"

    def __init__(self, model: Scorer, head_ids: torch.Tensor | None = None, vocabulary: int | None = None):
        self.model = model
        self.head_ids = head_ids
        self.context_length = model.context_length
        self.device_models = (model,)
        self.width = None if vocabulary is None or vocabulary >= model.vocabulary else vocabulary

    def new_state(self) -> Cache:
        return self.model.new_cache()

    def proposer(self, state: Cache) -> str:
        return self.name

    def short(self, state: Cache) -> str:
        return "draft_failed"

    def prefill(self, ids: Sequence[int], state: Cache, cache: Cache, stop: Stop | None = None) -> None:
        if len(ids) < self.context_length:  # beyond it nothing will be drafted
            self.model.prefill(self._readable(ids[state.length :]), state, stop)

    def draft(
        self,
        ids: Sequence[int],
        count: int,
        settings: Settings,
        uniform: Callable[[], float],
        state: Cache,
        cache: Cache,
    ) -> list[Proposal]:
        def logits(sequence: list[int]) -> torch.Tensor:
            return self.model.next_logits(self._readable(sequence[state.length :]), state)[: self.width]

        return along_branch(logits, ids, count, settings, uniform, self.head_ids)

    def reach(self, ids: Sequence[int], count: int) -> int:
        return count

    def unread(self, ids: Sequence[int], state: Cache) -> Sequence[int]:
        return ids[state.length :]

    @contextmanager
    def device_steps(self, ids: Sequence[int], count: int, state: Cache, cache: Cache) -> Iterator[Step]:
        def step(given: torch.Tensor) -> torch.Tensor:
            readable = given.masked_fill(given >= self.model.readable_ids, 0)
            return self.model.device_logits(readable, state)[-1:, : self.width]

        yield step

    def observe(self, ids: Sequence[int], logits: torch.Tensor, state: Cache) -> None:
        """Nothing: the model reads what was committed when it drafts next."""

    def _readable(self, ids: Sequence[int]) -> list[int]:
        limit = self.model.readable_ids
        return [id if id < limit else 0 for id in ids]
