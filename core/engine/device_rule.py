"""The rule of speculative sampling on rows of logits, without a look at any of their numbers.

The maths is that of ``core.verify.sampling``, over whole rows and for all positions at once, in the same
dtypes: one filter chain, q in float32, draws, ratios and residuals in float64. Pure functions of tensors,
whose shapes depend on those that came in alone: nothing here makes the host wait for a device
(``core.engine.batched`` says what would). Knows no model, cache or record.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from core.records import Settings


@dataclass(frozen=True, slots=True)
class Rows:
    """What rows of logits stand for: ``p`` and ``soft`` (n, width) float32 as
    ``core.verify.sampling.distributions`` has them, zeros where nothing can be drawn, which ``usable`` (n,)
    tells; ``largest`` (n,) logits."""

    p: torch.Tensor
    soft: torch.Tensor
    usable: torch.Tensor
    largest: torch.Tensor


def distributions(logits: torch.Tensor, settings: Settings, seen: torch.Tensor | None = None) -> Rows:
    """The filter chain of ``core.verify.sampling.distributions`` on rows of logits (n, width).

    ``seen`` (n, width) bool marks the ids before each row, for the repetition penalty.
    """
    logits = logits.float()
    if seen is not None and settings.repetition_penalty != 1:
        penalty = settings.repetition_penalty
        logits = torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)
    largest = logits.amax(-1, keepdim=True)
    usable = largest.isfinite()
    if settings.temperature == 0 or settings.top_k == 1:
        p = torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    else:
        p = _sampled((logits - largest) / settings.temperature, settings)
    soft = p if settings.temperature else (logits - largest).softmax(-1)
    unusable = ~usable
    p = p.masked_fill(unusable, 0.0)
    soft = soft.masked_fill(unusable, 0.0) if settings.temperature == 0 else p
    return Rows(p, soft, usable[:, 0], largest[:, 0])


def _sampled(scaled: torch.Tensor, settings: Settings) -> torch.Tensor:
    """Top-k, top-p and min-p on rows of logits after temperature (n, width): probabilities (n, width).

    Of equal ids, of which not all are kept, the lowest are, as in ``core.verify.sampling.distribution``:
    ``topk`` alone may choose any, and ``sort`` is asked to be stable.
    """
    width = scaled.shape[-1]
    columns = None  # of the entries in ``p`` where they are not all, in order
    if 0 < settings.top_k < width:
        columns = largest(scaled, settings.top_k)
        scaled = scaled.gather(-1, columns)
    p = scaled.softmax(-1)
    if settings.top_p < 1:
        p, order = p.sort(dim=-1, descending=True, stable=True)
        columns = order if columns is None else columns.gather(-1, order)
        dropped = p.cumsum(-1) - p >= settings.top_p
        dropped[:, :1] = False
        p = _normalised(p.masked_fill(dropped, 0.0))
    if settings.min_p > 0:
        p = _normalised(p.masked_fill(p < settings.min_p * p.amax(-1, keepdim=True), 0.0))
    if columns is None:
        return p
    return p.new_zeros(*p.shape[:-1], width).scatter_(-1, columns, p)


def largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """Where the ``count`` largest of each row of ``values`` (n, width) are, ascending; of equal ones the
    lowest: (n, count) int64."""
    least = values.topk(count).values[:, -1:]
    above, equal = values > least, values == least
    kept = above | (equal & (equal.cumsum(-1) <= count - above.sum(-1, keepdim=True)))
    # Each that is kept goes to its place among them, all others behind, where they are cut off.
    place = torch.where(kept, kept.cumsum(-1) - 1, count)
    columns = torch.arange(values.shape[-1], device=values.device).expand_as(place)
    return place.new_zeros(len(values), count + 1).scatter_(-1, place, columns)[:, :count]


def _normalised(p: torch.Tensor) -> torch.Tensor:
    return p / p.sum(-1, keepdim=True)


def draw(weights: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """``core.verify.sampling.draw`` for rows of weights (n, width) at u (n,) float64: indices (n,).

    A parallel sum of rounded numbers need not rise with every term, nor stand still where a weight is 0: so
    the sum is looked at only where there is weight, and is everywhere below its largest value once.
    """
    weights = weights.double()
    cumulative = weights.cumsum(-1).masked_fill_(weights <= 0, -1.0)
    total = cumulative.amax(-1)
    below = torch.minimum(u * total, torch.nextafter(total, torch.zeros_like(total)))
    return (cumulative > below[:, None]).to(torch.uint8).argmax(-1)  # the first of them


@dataclass(frozen=True, slots=True)
class Judged:
    """Of K drafts ``kept`` () stand; ``p``, ``q``, ``u``, ``h`` and ``overlap`` (K,) float64 are of each.

    ``own`` (1,) is the target's id behind those kept, ``own_p`` and ``own_q`` (1,) its probabilities.
    """

    kept: torch.Tensor
    p: torch.Tensor
    q: torch.Tensor
    u: torch.Tensor
    h: torch.Tensor
    overlap: torch.Tensor
    own: torch.Tensor
    own_p: torch.Tensor
    own_q: torch.Tensor


def judge(
    p: Rows,
    q: torch.Tensor,
    drafts: torch.Tensor,
    drafted: torch.Tensor,
    draws: torch.Tensor,
    verifier: str,
    certain: bool = False,
) -> Judged:
    """Verifies a block, token by token or as a whole, and draws the target's own token.

    ``p`` are K + 1 rows, ``q`` (K, width) float32 those the ``drafts`` (K,) were drawn from; of the drafts
    the first ``drafted`` () count. ``draws`` float64 are the round's, 2K + 1, the first of which went into
    the drafts that count, or K + 1 where drafts are ``certain`` and took none. Judged are drafts before the
    first row of p that is not usable.
    """
    k = len(drafts)
    places = torch.arange(k, device=drafts.device)
    judged = torch.minimum(drafted, p.usable[:k].long().cumprod(0).sum())
    inside = places < judged
    p_x = p.p[:k].gather(1, drafts[:, None])[:, 0].double()
    q_x = q.gather(1, drafts[:, None])[:, 0].double()
    taken = torch.zeros_like(drafted) if certain else drafted
    u = draws.gather(0, taken + places)
    one = draws.new_ones(1)
    if verifier == "block":
        weights, h = _block(p.p[:k], q, p_x, q_x, inside, judged)
        kept = F.pad((places + 1) * (inside & (u < h)), (1, 0)).amax()
        weight, used = torch.cat([one, weights]).gather(0, kept[None]), taken + judged
    else:
        h = torch.zeros_like(u)
        kept = (inside & (u * q_x < p_x)).long().cumprod(0).sum()
        weight, used = one, taken + torch.minimum(kept + 1, drafted)
    rejected = kept < judged
    row_p = p.p.index_select(0, kept[None]).double()
    row_q = F.pad(q, (0, 0, 0, 1)).index_select(0, kept[None]).double() * rejected
    left = (row_p * torch.where(rejected, weight, one) - row_q).clamp_min_(0)
    own = draw(torch.where(left.sum() > 0, left, row_p), draws.gather(0, used[None]))
    return Judged(
        kept=kept,
        p=p_x,
        q=q_x,
        u=u,
        h=h,
        overlap=torch.minimum(p.p[:k], q).sum(-1, dtype=torch.float64).clamp_max(1),
        own=own,
        own_p=row_p.gather(1, own[:, None])[0],
        own_q=row_q.gather(1, own[:, None])[0],
    )


def _block(
    p: torch.Tensor,
    q: torch.Tensor,
    p_x: torch.Tensor,
    q_x: torch.Tensor,
    inside: torch.Tensor,
    judged: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """w_1..w_K and h_1..h_K (K,) float64 of docs/ENGINE.md, rule 16; of use only ``inside`` the block.

    w_i = min(1, w_{i-1} r_i) unrolls to the least product of r over the places from any j up to i, the empty
    one included: in logarithms, the sum up to i less the largest sum before it, 0 at least.
    """
    sums = (p_x / q_x).masked_fill(~inside, 1.0).log().cumsum(0)
    weights = (sums - sums.cummax(0).values.clamp_min(0)).exp() if len(sums) else sums
    left = (weights[:-1, None] * p[1:].double() - q[1:].double()).clamp_min_(0).sum(-1)
    whole = left + 1 - weights[:-1]
    h = F.pad((left / whole).masked_fill(whole <= 0, 1.0), (0, min(1, len(sums))))
    last = torch.arange(len(sums), device=sums.device) == judged - 1
    return weights, torch.where(last, weights, h)
