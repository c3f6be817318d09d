"""Medusa: extra heads on the target's last hidden state (Cai et al. 2024, arXiv:2401.10774).

The state of the last position that the target has read foretells the token behind it, which is committed by
now, and head i = 0, 1, ... the one i + 1 further: that is draft i. Heads know nothing of each other's choice,
nor of the committed token where it is the target's correction; in return one product scores all drafts.

Drafts are a chain as long as there are heads, or with ``settings.tree_width`` above 1 a tree: that many
candidates at each position along the branch of those tried first, so at most K times the width. Weights and
the forward pass are described in ``core.pairs.draft_file``; the target is a lean decoder that keeps states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F

from core.drafters.base import NoState, Step
from core.models.base import Stop
from core.models.decoder import Decoder
from core.models.kv_cache import KVCache
from core.models.linear import Linear
from core.records import Settings
from core.verify.sampling import Proposal
from core.verify.tree import along_branch

Make = Callable[[torch.Tensor], Linear]


class MedusaDrafter:
    """``tensors`` are those of the draft's file; ``make`` and ``make_head`` turn matrices into products.

    ``feature_layers`` is the target's last layer, which must be among those whose features it keeps;
    ``head_ids`` (n,) int64 ascending are the ids that the heads score; ``rows`` (n, hidden) what they score
    them by: those rows of the target's head. It keeps nothing: all it looks at is the target's state of the
    last committed position that was read.
    """

    name = "medusa"

    def __init__(
        self,
        target: Decoder,
        tensors: Mapping[str, torch.Tensor],
        feature_layers: Sequence[int],
        head_ids: torch.Tensor,
        rows: torch.Tensor,
        make: Make,
        make_head: Make,
    ):
        self.head_ids = head_ids
        self.device_models = ()
        self.context_length = target.context_length
        self._eps = target.shape.rms_eps
        (layer,) = feature_layers
        self._column = target.feature_layers.index(layer)
        self.heads = len({name.split(".")[1] for name in tensors if name.startswith("heads.")})
        of = [f"heads.{index}." for index in range(self.heads)]
        # All heads' blocks are one product; so is the scoring of what they make of it.
        self._blocks = make(torch.cat([tensors[f"{head}block.weight"] for head in of]))
        self._bias = torch.cat([tensors[f"{head}block.bias"] for head in of]).to(target.device)
        self._projections = [make(tensors[f"{head}proj.weight"]) for head in of]
        self._score = make_head(rows)

    def new_state(self) -> NoState:
        return NoState()

    def proposer(self, state: NoState) -> str:
        return self.name

    def short(self, state: NoState) -> str:
        return "no_match"

    def prefill(self, ids: Sequence[int], state: NoState, cache: KVCache, stop: Stop | None = None) -> None:
        """Nothing: the target's pass left all there is to know."""

    def draft(
        self,
        ids: Sequence[int],
        count: int,
        settings: Settings,
        uniform: Callable[[], float],
        state: NoState,
        cache: KVCache,
    ) -> list[Proposal]:
        count = self.reach(ids, count)
        if not count:
            return []
        rows = self._logits(ids, count, cache).cpu()

        def logits(sequence: list[int]) -> torch.Tensor:
            return rows[len(sequence) - len(ids)]

        return along_branch(logits, ids, count, settings, uniform, self.head_ids, settings.tree_width)

    def observe(self, ids: Sequence[int], logits: torch.Tensor, state: NoState) -> None:
        """Nothing: what the target makes of tokens is in its cache."""

    def reach(self, ids: Sequence[int], count: int) -> int:
        return min(count, self.heads) if len(ids) > 1 else 0  # before that the target has read nothing

    def unread(self, ids: Sequence[int], state: NoState) -> Sequence[int]:
        return []

    @contextmanager
    def device_steps(self, ids: Sequence[int], count: int, state: NoState, cache: KVCache) -> Iterator[Step]:
        rows = iter(self._logits(ids, count, cache).split(1))
        yield lambda given: next(rows)

    def _logits(self, ids: Sequence[int], count: int, cache: KVCache) -> torch.Tensor:
        """The logits of the first ``count`` heads after the last of ``ids`` that the target has read,
        (count, n) float32."""
        feature = cache.features[len(ids) - 2, self._column]
        size = len(feature)
        hidden = F.rms_norm(feature[None], (size,), eps=self._eps)
        blocks = (self._blocks(hidden).float() + self._bias).view(self.heads, size)[:count]
        states = hidden + F.silu(blocks).to(hidden.dtype)
        projected = [project(state[None]) for project, state in zip(self._projections, states, strict=False)]
        return self._score(torch.cat(projected)).float()
