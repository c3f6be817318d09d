"""How much of the target's probability a draft covers: alpha = mean Σ min(p, q), over every reply position.

p is the target's over its whole vocabulary, q the draft's over the ids its head scores (0 elsewhere), both
at temperature 1 without filters; the sum is the probability that exact verification keeps a token drafted
there. By depth: how far from the target's last features a draft has got by feeding on itself, or which head
of a Medusa draft it was. The interval is a bootstrap over replies (``core.figures.intervals``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from core.distill.kinds import Draft
from core.distill.lesson import Batch, Lessons
from core.distill.target import Target
from core.figures.intervals import Interval, ratio_interval

AT_ONCE = 4  # chats in a batch
ROWS = 64  # positions scored together: what the processor's caches hold


@dataclass(frozen=True)
class Alpha:
    """``by_depth`` from the first drafted token on; ``interval`` of the first, None for a single reply."""

    by_depth: tuple[float, ...]
    interval: Interval | None
    tokens: int
    replies: int

    def __str__(self) -> str:
        spread = f" ({self.interval[0]:.3f} to {self.interval[1]:.3f})" if self.interval else ""
        return f"{self.by_depth[0]:.4f}{spread} on {self.tokens:,} tokens of {self.replies} replies"


def guesses(draft: Draft, batch: Batch, depth: int | None = None) -> list[tuple[torch.Tensor, float]]:
    """For each depth the guess at every scored position, (positions, hidden), and its share of the loss.

    Of all depths a row is about the same id: what was guessed further ahead has been moved there. The first
    positions of a reply are guessed from within the prompt.
    """
    outputs = draft.outputs(batch.ids, batch.features, depth)
    length = batch.ids.shape[1]
    return [
        (F.pad(output.hidden, (0, 0, output.ahead, 0))[:, :length][batch.scored], output.weight)
        for output in outputs
    ]


@torch.no_grad()
def alpha(
    draft: Draft, target: Target, head_ids: torch.Tensor, lessons: Lessons, domains: Sequence[str]
) -> dict[str, Alpha]:
    """Alpha by domain, over ``lessons`` whose chats' domains are ``domains``."""
    head = target.head[head_ids]
    chats = [chat for chat in np.argsort(lessons.lengths, kind="stable") if lessons.replies[chat] > 0]
    sums: dict[int, np.ndarray] = {}
    for start in range(0, len(chats), AT_ONCE):
        some = chats[start : start + AT_ONCE]
        batch = lessons.batch(some, target)
        with target.autocast():
            made = [guess for guess, _ in guesses(draft, batch, draft.depths)]
        last = batch.features[:, :, -1][batch.scored]
        covered = []
        for rows in torch.arange(len(last), device=last.device).split(ROWS):
            p = (last[rows] @ target.head.T).float().softmax(-1)[:, head_ids]
            q = [(guess[rows].to(target.dtype) @ head.T).float().softmax(-1) for guess in made]
            covered.append(torch.stack([torch.minimum(p, x).sum(-1) for x in q], 1).cpu())
        parts = torch.cat(covered).split([int(lessons.replies[chat]) for chat in some])
        sums |= {int(chat): part.sum(0).double().numpy() for chat, part in zip(some, parts, strict=True)}
    return _by_domain(sums, lessons, domains)


def _by_domain(sums: Mapping[int, np.ndarray], lessons: Lessons, domains: Sequence[str]) -> dict[str, Alpha]:
    found = {}
    for domain in sorted(set(domains)):
        own = [chat for chat in sorted(sums) if domains[chat] == domain]
        if own:
            covered, tokens = np.stack([sums[chat] for chat in own]), lessons.replies[own]
            total = int(tokens.sum())
            by_depth = tuple(float(value) for value in covered.sum(0) / total)
            found[domain] = Alpha(by_depth, ratio_interval(covered[:, 0], tokens), total, len(own))
    return found
