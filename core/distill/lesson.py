"""What a step of training and a measurement take in: chats with the target's hidden states, in batches.

Scored are the positions from the last of the prompt on to the last but one of the reply: each predicts an
id of the reply. Knows the corpus and the hidden states, no draft.
"""

from __future__ import annotations

import copy
import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from core.distill.corpus import Corpus
from core.distill.target import Features, Target


@dataclass(frozen=True)
class Batch:
    """``ids`` and ``scored`` (chats, positions), ``features`` (chats, positions, kinds, hidden)."""

    ids: torch.Tensor
    features: torch.Tensor
    scored: torch.Tensor


class Lessons:
    """Chats of a corpus and the target's hidden states over it.

    ``lengths`` (chats,) are in ids, ``replies`` those of the replies.
    """

    def __init__(self, corpus: Corpus, features: Features):
        self._corpus, self._features = corpus, features
        self._begins = corpus.offsets[:-1]
        self._prompts = corpus.prompt_len
        self.lengths = np.diff(corpus.offsets)
        self.replies = self.lengths - np.maximum(self._prompts, 1)

    @property
    def fingerprint(self) -> str:
        """Of the ids, and of where chats and prompts end."""
        digest = hashlib.sha256()
        for array in (self._corpus.ids, self._corpus.offsets, self._corpus.prompt_len):
            digest.update(np.ascontiguousarray(array, np.int64).data)
        return digest.hexdigest()

    def only(self, chats: Sequence[int]) -> Lessons:
        """Some of the chats, in this order."""
        part, chats = copy.copy(self), list(chats)
        for name in ("_begins", "_prompts", "lengths", "replies"):
            setattr(part, name, getattr(self, name)[chats])
        return part

    def batch(self, chats: Sequence[int], target: Target) -> Batch:
        """These chats, padded behind to the longest, on the target's device and in its dtype."""
        longest = int(self.lengths[list(chats)].max())
        ids = torch.zeros(len(chats), longest, dtype=torch.long)
        features = torch.zeros(len(chats), longest, *self._features.shape[1:], dtype=torch.bfloat16)
        scored = torch.zeros(len(chats), longest, dtype=torch.bool)
        for row, chat in enumerate(chats):
            begin, length = int(self._begins[chat]), int(self.lengths[chat])
            ids[row, :length] = torch.from_numpy(self._corpus.ids[begin : begin + length].astype(np.int64))
            features[row, :length] = self._features[begin : begin + length]
            scored[row, max(0, int(self._prompts[chat]) - 1) : length - 1] = True
        device = target.device
        return Batch(ids.to(device), features.to(device, target.dtype), scored.to(device))

    def epoch(self, tokens: int, seed: Sequence[int]) -> list[list[int]]:
        """Every chat with a reply once, in batches of like length, about ``tokens`` ids each, shuffled."""
        draw = np.random.default_rng(seed)
        chats = np.flatnonzero(self.replies > 0)
        order = chats[np.argsort(self.lengths[chats] + draw.uniform(-20, 20, len(chats)), kind="stable")]
        batches, batch = [], []
        for chat in order:
            batch.append(int(chat))
            if len(batch) * self.lengths[chat] >= tokens:
                batches.append(batch)
                batch = []
        batches += [batch] if batch else []
        draw.shuffle(batches)
        return batches


def frequent_ids(corpus: Corpus, target: Target, count: int) -> torch.Tensor:
    """The ``count`` ids that replies hold most often, (count,) int64 ascending: what a draft's head scores.

    The lowest of equally frequent ids; all ids where the vocabulary has no more.
    """
    seen: Counter[int] = Counter()
    for chat in corpus:
        seen.update(chat.reply.tolist())
    often = np.array([seen[id] for id in range(len(target.head))])
    return torch.from_numpy(np.sort(np.argsort(-often, kind="stable")[:count]))
