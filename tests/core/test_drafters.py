"""Drafting with a model whose vocabulary is not as wide as the target's (SD-05)."""

from __future__ import annotations

import math

import pytest
import torch

from core.drafters.model import ModelDrafter
from core.engine.loop import Engine
from core.records import Fate, Settings
from tests.core.toys import ToyDecoder, table, toy_pair


class Padded(ToyDecoder):
    """A toy whose logits are padded to ``rows``, with a share of its mass on the last of them."""

    def __init__(self, logits_of, rows: int, share: float = 0.0):
        def padded(ids):
            logits = logits_of(ids).log_softmax(0) + math.log(1 - share)
            padding = torch.full((rows - len(logits),), -math.inf)
            if share:
                padding[-1] = math.log(share)
            return torch.cat([logits, padding])

        super().__init__(padded)
        self.vocabulary = self.readable_ids = rows

    def _read(self, ids, cache):
        assert all(id < self.readable_ids for id in ids), "an id beyond the embedding"
        return super()._read(ids, cache)


def known(logits_of):
    """Logits after the ids, those beyond the tokenizer's read as 0."""
    return lambda ids: logits_of(tuple(id if id < 6 else 0 for id in ids))


@pytest.mark.parametrize("draft_rows, target_rows", [(8, 10), (10, 8)])
def test_padding_of_either_width_is_exact_and_never_fails(draft_rows, target_rows):
    target = Padded(known(table(1, 6)), target_rows, share=0.05)
    draft = Padded(known(table(2, 6)), draft_rows, share=0.05)
    pair = toy_pair(table(1, 6), table(2, 6))
    pair.target, pair.drafter = target, ModelDrafter(draft, vocabulary=target_rows)
    settings = Settings(temperature=1.0, num_draft_tokens=3, max_new_tokens=12)
    tokens = []
    for seed in range(150):
        generation = Engine(pair).generate([0, 1], Settings(**vars_of(settings), seed=seed))
        rounds = list(generation)
        assert generation.reply.error is None
        assert len(generation.reply.token_ids) == 12
        tokens += [t for r in rounds for t in r.tokens]
    assert max(t.id for t in tokens) == target_rows - 1  # the target's own padding was drawn
    drafted = {t.id for t in tokens if t.drafted}
    assert max(drafted) == min(draft_rows, target_rows) - 1 or draft_rows > target_rows
    assert all(id < target_rows for id in drafted)
    assert all(t.q > 0 for t in tokens if t.fate is Fate.ACCEPTED)
    padding = sum(t.emitted and t.id == target_rows - 1 for t in tokens)
    emitted = sum(t.emitted for t in tokens)
    assert padding / emitted == pytest.approx(0.05, abs=4 * math.sqrt(0.05 * 0.95 / emitted))


def vars_of(settings: Settings) -> dict:
    return {
        "temperature": settings.temperature,
        "num_draft_tokens": settings.num_draft_tokens,
        "max_new_tokens": settings.max_new_tokens,
    }
