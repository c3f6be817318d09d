"""EAGLE: one decoder layer drafts from the target's features (Li et al. 2024, arXiv:2401.15077; features of
several of the target's layers as in EAGLE-3, arXiv:2503.01840).

At a position the layer reads the token there and what the target made of the position before. Where it runs
ahead of the target it takes its own output for that. What was read so is forgotten after drafting, and
positions that were committed are read again with the target's features, in one call.

Drafts are a chain, or with ``settings.tree_width`` above 1 a tree: that many candidates at each position
along the branch of those tried first, so at most K times the width. Weights and the forward pass are
described in ``core.pairs.draft_file``; the target is a lean decoder that keeps the features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.nn.functional as F

from core.drafters.base import Step
from core.models.base import PREFILL_CHUNK, Stop
from core.models.decoder import Decoder
from core.models.kv_cache import KVCache
from core.models.linear import Linear
from core.records import Settings
from core.verify.sampling import Proposal
from core.verify.tree import along_branch

FEW = 16  # rows up to which products are taken one by one, not as those of a prompt

Make = Callable[[torch.Tensor], Linear]


class EagleDrafter:
    """``tensors`` are those of the draft's file; ``make`` and ``make_head`` turn matrices into products.

    ``feature_layers`` are the target's layers whose features the draft reads, all among the target's own;
    ``head_ids`` (n,) int64 ascending the ids that the head scores; ``rows`` (n, hidden) what it scores them
    by: those rows of the target's head. What it knows are its keys of committed positions, each made of a
    committed id and of the target's features before it: what it read of its own drafts is cropped.
    """

    name = "eagle"

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
        self.context_length = target.context_length
        self._columns = [target.feature_layers.index(layer) for layer in feature_layers]
        self._features = make(tensors["features.weight"])
        self._joined = make(torch.cat([tensors["token.weight"], tensors["state.weight"]], 1))
        layers = 1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("layers."))
        # What the next step reads is the output normed without weights: those go into the head.
        scored = tensors["proj.weight"] * tensors["norm.weight"]
        self._model = Decoder.from_tensors(
            replace(target.shape, layers=layers),
            {**tensors, "norm.weight": torch.ones(target.shape.hidden, device=target.device)},
            make,
            target.embedding,
            make_head(rows.float() @ scored),
            "",
            len(head_ids),
        )
        self._model.rotations = target.rotations  # which need not be the shape's plain ones

    @property
    def device_models(self) -> tuple[Decoder, ...]:
        return (self._model,)

    @property
    def step_weights(self) -> list[object]:
        """What a step reads, but for a row of the embedding; a round's first one also joins features."""
        return [self._joined, self._model.layers, self._model.head]

    def new_state(self) -> KVCache:
        return self._model.new_cache()

    def proposer(self, state: KVCache) -> str:
        return self.name

    def short(self, state: KVCache) -> str:
        return "draft_failed"

    def prefill(self, ids: Sequence[int], state: KVCache, cache: KVCache, stop: Stop | None = None) -> None:
        if len(ids) < self.context_length:  # beyond it nothing will be drafted
            self._read(ids[state.length :], state, cache, stop, many=True)

    def draft(
        self,
        ids: Sequence[int],
        count: int,
        settings: Settings,
        uniform: Callable[[], float],
        state: KVCache,
        cache: KVCache,
    ) -> list[Proposal]:
        made = self._read(ids[state.length :], state, cache)

        def logits(sequence: list[int]) -> torch.Tensor:
            nonlocal made
            if len(sequence) > len(ids):
                made = self._run(sequence[-1:], made, state)
            return self._model.head(made)[0].float().cpu()

        proposals = along_branch(logits, ids, count, settings, uniform, self.head_ids, settings.tree_width)
        state.crop(len(ids))
        return proposals

    def reach(self, ids: Sequence[int], count: int) -> int:
        return count

    def unread(self, ids: Sequence[int], state: KVCache) -> Sequence[int]:
        return ids[state.length :]

    @contextmanager
    def device_steps(self, ids: Sequence[int], count: int, state: KVCache, cache: KVCache) -> Iterator[Step]:
        made = None

        def step(given: torch.Tensor) -> torch.Tensor:
            nonlocal made
            made = self._read(given, state, cache) if made is None else self._run(given, made, state)
            return self._model.head(made).float()

        try:
            yield step
        finally:
            state.crop(len(ids))

    def observe(self, ids: Sequence[int], logits: torch.Tensor, state: KVCache) -> None:
        """Nothing: what the target makes of tokens is in its cache."""

    def _read(
        self,
        unread: Sequence[int] | torch.Tensor,
        state: KVCache,
        cache: KVCache,
        stop: Stop | None = None,
        many: bool = False,
    ) -> torch.Tensor | None:
        """Appends the ``unread`` ids to ``state``; ``cache`` holds features of all before the last.

        ``many`` takes the products of a prompt however little is left to read of it, so that its keys are the
        same wherever an earlier prompt parted from it.

        Gives what was made of the last one, (1, hidden); None where ``stop`` said so between chunks or
        nothing was to be read.
        """
        made = None
        for start in range(0, len(unread), PREFILL_CHUNK):
            if stop is not None and stop():
                return None
            ids, at = unread[start : start + PREFILL_CHUNK], state.length
            read = cache.features[max(0, at - 1) : at + len(ids) - 1]
            features = torch.stack([read[:, column] for column in self._columns], 1)
            features = self._normed(features).flatten(1)
            before = self._normed(_product(self._features, features, many).to(features.dtype))
            if not at:
                before = F.pad(before, (0, 0, 1, 0))  # nothing comes before the first
            made = self._run(ids, before, state, many)[-1:]
        return made

    def _run(
        self, ids: Sequence[int] | torch.Tensor, before: torch.Tensor, state: KVCache, many: bool = False
    ) -> torch.Tensor:
        """Appends ``ids`` and gives what the layer makes of them, normed, (len(ids), hidden).

        ``before`` (len(ids), hidden), normed, is what stands for the position before each.
        """
        model = self._model
        tokens = F.embedding(torch.as_tensor(ids, device=model.device), model.embedding).to(before.dtype)
        joined = _product(self._joined, torch.cat([tokens, before], 1), many)
        return model.forward(ids, state, many=many or len(ids) > FEW, inputs=joined)

    def _normed(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], eps=self._model.shape.rms_eps)


def _product(linear: Linear, x: torch.Tensor, many: bool) -> torch.Tensor:
    return linear.many(x) if many or len(x) > FEW else linear(x)
