"""What tests of whole replies share."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from core.engine import rounds
from core.records import Settings
from core.verify import sampling, tree

SMALL = 64  # ids of a toy's vocabulary, at most: what is larger comes twice too seldom


@pytest.fixture
def remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine makes the distribution of a row after a prefix once and meets it again in the next reply.

    Thousands of replies of a toy hold a hundred different ones, and making them is half of the work. Each is
    made by the code under test from all that it may depend on, which is all that it is remembered by.
    """
    made: dict[tuple, tuple] = {}
    make = sampling.distributions

    def distributions(
        logits: torch.Tensor, settings: Settings, prefix: Sequence[int], ids: torch.Tensor | None = None
    ) -> tuple:
        if logits.numel() > SMALL:
            return make(logits, settings, prefix, ids)
        filters = (settings.temperature, settings.top_k, settings.top_p, settings.min_p)
        columns = None if ids is None else tuple(ids.tolist())
        key = (tuple(logits.tolist()), filters, settings.repetition_penalty, tuple(prefix), columns)
        if key not in made:
            made[key] = make(logits, settings, prefix, ids)
        return made[key]

    for user in (rounds, tree):
        monkeypatch.setattr(user, "distributions", distributions)
