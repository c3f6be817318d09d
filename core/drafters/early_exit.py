"""Early exit: the target's own first layers, final norm and head propose, and share its keys and values.

The first layers of a pass over a draft are the beginning of what the target computes for it anyway, so no
second cache is kept: the drafter runs on the target's, behind what is committed, and takes its length back;
the target's pass then writes the same places anew (Zhang et al. 2024, *Draft & Verify*, arXiv:2309.08168;
LayerSkip, Elhoushi et al. 2024, arXiv:2404.16710). A target that was not trained for it says little after a
few layers, which costs acceptance, not exactness. Lean decoders only (``core.models.decoder``). Chains only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from core.drafters.base import NoState, Step
from core.models.base import Stop
from core.models.decoder import Decoder
from core.models.kv_cache import KVCache
from core.records import Settings
from core.verify.sampling import Proposal
from core.verify.tree import along_branch

SHARE = 3  # one layer in so many is run


class EarlyExitDrafter:
    """``layers`` of the target's are run; a third of them, at least one, unless said otherwise. It keeps
    nothing: all it looks at are the target's keys of committed positions."""

    name = "early-exit"

    def __init__(self, target: Decoder, layers: int | None = None):
        self._target = target
        self.device_models, self.head_ids = (target,), None
        self.layers = max(1, target.shape.layers // SHARE) if layers is None else layers
        self.context_length = target.context_length

    def new_state(self) -> NoState:
        return NoState()

    def proposer(self, state: NoState) -> str:
        return self.name

    def short(self, state: NoState) -> str:
        return "draft_failed"

    def prefill(self, ids: Sequence[int], state: NoState, cache: KVCache, stop: Stop | None = None) -> None:
        """Nothing: the target has read it."""

    def draft(
        self,
        ids: Sequence[int],
        count: int,
        settings: Settings,
        uniform: Callable[[], float],
        state: NoState,
        cache: KVCache,
    ) -> list[Proposal]:
        target, committed = self._target, cache.length

        def logits(sequence: list[int]) -> torch.Tensor:
            hidden = target.forward(sequence[cache.length :], cache, layers=self.layers)
            return target.head(hidden[-1:])[0].float().cpu()

        proposals = along_branch(logits, ids, count, settings, uniform)
        cache.crop(committed)
        return proposals

    def reach(self, ids: Sequence[int], count: int) -> int:
        return count

    def unread(self, ids: Sequence[int], state: NoState) -> Sequence[int]:
        return ids[-1:]  # what the target has not read

    @contextmanager
    def device_steps(self, ids: Sequence[int], count: int, state: NoState, cache: KVCache) -> Iterator[Step]:
        target, committed = self._target, cache.length
        try:
            yield lambda given: target.head(target.forward(given, cache, layers=self.layers)).float()
        finally:
            cache.crop(committed)

    def observe(self, ids: Sequence[int], logits: torch.Tensor, state: NoState) -> None:
        """Nothing is kept."""
