"""The maths of exact speculative sampling: filter chain, acceptance, residual, draws. Pure functions.

A ``Distribution`` is float32 probabilities over a support of token ids. The same one that was
sampled from serves for the ratio and for the residual, so the three cannot disagree (docs/ENGINE.md, rule 1).
Temperature 0 needs no case of its own: its distribution is one id with probability 1, for which
acceptance *is* argmax equality.

Speculative sampling: Leviathan et al. 2023 (arXiv:2211.17192), algorithm 1; Chen et al. 2023
(arXiv:2302.01318). Knows no model, tokenizer, cache or record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from core.records import Fate, Settings, zero_if_tiny

TOP = 10  # how many of the most likely ids a record keeps
_NUCLEUS_GUESS = 256  # top-p looks at this many ids first: a full sort of a vocabulary costs milliseconds


class BadLogitsError(ArithmeticError):
    """A row of logits from which nothing can be drawn: NaN, +inf, or nothing but -inf."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """Probabilities (n,) float32 over token ids: ``ids`` (n,) int64 ascending, or None for 0..n-1.

    Never mutated. Ids outside the support have probability 0.
    """

    probabilities: torch.Tensor
    ids: torch.Tensor | None = None

    def at(self, token_id: int) -> float:
        """The probability of one id (float32 value as a Python float, that is in float64)."""
        if self.ids is None:
            inside = 0 <= token_id < len(self.probabilities)
            return self.probabilities[token_id].item() if inside else 0.0
        index = int(torch.searchsorted(self.ids, token_id)) if len(self.ids) > 1 else 0
        inside = index < len(self.ids) and int(self.ids[index]) == token_id
        return self.probabilities[index].item() if inside else 0.0

    def over(self, ids: torch.Tensor) -> torch.Tensor:
        """The probabilities of ``ids`` (m,), ascending, zeros outside the support; float32 (m,)."""
        size = len(self.probabilities)
        if self.ids is None:
            if not len(ids) or ids[-1] < size:  # ids are ascending
                return self.probabilities.index_select(0, ids)  # a third of the time of [ids]
            index, inside = ids.clamp(max=size - 1), ids < size
        else:
            index = torch.searchsorted(self.ids, ids).clamp_(max=size - 1)
            inside = self.ids[index] == ids
        return torch.where(inside, self.probabilities[index], 0.0)

    def id_of(self, index: int) -> int:
        """The token id of entry ``index``."""
        return index if self.ids is None else int(self.ids[index])

    def top(self, count: int = TOP) -> tuple[tuple[int, float], ...]:
        """Up to ``count`` (id, probability) pairs, most likely first; ids of probability 0 are left out."""
        values, index = self.probabilities.topk(min(count, len(self.probabilities)))
        ids = index if self.ids is None else self.ids[index]
        return tuple((i, v) for i, v in zip(ids.tolist(), values.tolist(), strict=True) if v > 0)

    def entropy(self) -> float:
        """Shannon entropy in nats."""
        p = self.probabilities
        # Clamped inside the logarithm alone: 0 log 0 is 0. Several times faster than torch.special.entr.
        return max(0.0, -torch.dot(p, p.clamp_min(1e-38).log_()).item())


def peak(logits: torch.Tensor) -> int:
    """The index of the largest of ``logits`` (n,), the first of equal ones; -inf on some ids is a mask.

    Raises BadLogitsError if nothing can be drawn from them.
    """
    values = logits.numpy()  # whose argmax takes a third of the time of torch's, and stops at a NaN
    index = int(values.argmax())
    largest = float(values[index])
    if not -float("inf") < largest < float("inf"):
        raise BadLogitsError(f"the largest logit is {largest}")
    return index


def distribution(
    logits: torch.Tensor,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    ids: torch.Tensor | None = None,
) -> Distribution:
    """The distribution a row of logits (n,) stands for: temperature, then top-k, top-p and min-p.

    The order is that of ``transformers``. ``top_k`` 0 is off and larger than n is n; top-p keeps the
    most likely ids up to and including the one that reaches ``top_p``, so at least one; min-p keeps
    the ids with at least ``min_p`` times the probability of the most likely one. Of equal ids, of which not
    all are kept, temperature 0, top-k and top-p keep the lowest. ``ids`` names the columns where they are not
    0..n-1. A temperature that float32 cannot divide by is 0 (``zero_if_tiny``). Raises BadLogitsError.
    """
    logits = logits.float()
    first = peak(logits)
    if zero_if_tiny(temperature) == 0 or top_k == 1:
        return Distribution(torch.ones(1), torch.tensor([first]) if ids is None else ids[first : first + 1])
    # Subtracting the maximum first keeps tiny temperatures finite; at 1 softmax does so itself.
    scaled = logits if temperature == 1 else (logits - logits[first]).div_(temperature)
    columns = None  # into `logits`, once a filter has chosen some
    if 0 < top_k < len(scaled):
        columns = _largest(scaled, top_k)
        scaled = scaled[columns]
    probabilities = scaled.softmax(0)
    if top_p < 1:
        kept = _nucleus(probabilities, top_p)
        columns = kept if columns is None else columns[kept]
        probabilities = probabilities[kept] / probabilities[kept].sum()
    if min_p > 0:
        kept = (probabilities >= min_p * probabilities.max()).nonzero()[:, 0]
        columns = kept if columns is None else columns[kept]
        probabilities = probabilities[kept] / probabilities[kept].sum()
    if columns is None:
        return Distribution(probabilities, ids)
    columns, order = columns.sort()
    return Distribution(probabilities[order], columns if ids is None else ids[columns])


def penalise(
    logits: torch.Tensor, prefix: Sequence[int], penalty: float, ids: torch.Tensor | None = None
) -> torch.Tensor:
    """A copy of logits (n,) in which every id that occurs in ``prefix`` is less likely.

    Positive logits are divided by ``penalty`` and negative ones multiplied (Keskar et al. 2019,
    arXiv:1909.05858, as in ``transformers``): once, however often an id occurs.
    """
    seen = torch.tensor(list(prefix), dtype=torch.int64)
    if ids is None:
        columns = seen[seen < len(logits)]
    else:
        columns = torch.searchsorted(ids, seen).clamp_(max=len(ids) - 1)
        columns = columns[ids[columns] == seen]
    logits = logits.float().clone()
    there = logits[columns]
    logits[columns] = torch.where(there < 0, there * penalty, there / penalty)
    return logits


def distributions(
    logits: torch.Tensor, settings: Settings, prefix: Sequence[int], ids: torch.Tensor | None = None
) -> tuple[Distribution, Distribution]:
    """What a row of logits after ``prefix`` stands for under ``settings``, and what the record shows of it.

    The one filter chain of draft and target, a pure function of the prefix (docs/ENGINE.md, rule 3):
    at a drafted position the prefix holds the drafts before it. The second is the first, or at
    temperature 0, where that is one id, the distribution at temperature 1. Raises BadLogitsError.
    """
    if settings.repetition_penalty != 1:
        logits = penalise(logits, prefix, settings.repetition_penalty, ids)
    chosen = distribution(logits, settings.temperature, settings.top_k, settings.top_p, settings.min_p, ids)
    return chosen, chosen if settings.temperature else Distribution(logits.float().softmax(0), ids)


def shows_raw(settings: Settings) -> bool:
    """Whether what the record shows of a row (``distributions``) is the softmax of its logits as they are."""
    filtered = settings.top_k or settings.top_p < 1 or settings.min_p
    plain = settings.temperature == 0 or (settings.temperature == 1 and not filtered)
    return plain and settings.repetition_penalty == 1


def _nucleus(probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    """Indices of the most likely entries whose predecessors sum to less than ``top_p``, ascending."""
    size = len(probabilities)
    values, index = probabilities.topk(min(_NUCLEUS_GUESS, size))
    if len(values) < size and values.sum() < top_p:
        values, index = probabilities.sort(descending=True)
    before = values.cumsum(0) - values
    count = max(1, int((before < top_p).sum()))
    return _lowest(probabilities, values, index, count)


def _largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the ``count`` largest of ``values`` (n,), fewer than n, ascending; of equal ones the
    lowest."""
    found, index = values.topk(count + 1)  # one more shows whether an equal one is left out
    return _lowest(values, found, index, count)


def _lowest(values: torch.Tensor, found: torch.Tensor, index: torch.Tensor, count: int) -> torch.Tensor:
    """The first ``count`` of ``index``, ascending, where the lowest are chosen of those equal to the last.

    ``found`` are the largest of ``values`` in order, and ``index`` where they are, of equal ones in any
    order.
    """
    if count == len(values) or (count < len(found) and found[count] < found[count - 1]):
        return index[:count].sort().values
    least = found[count - 1]
    above = (values > least).nonzero()[:, 0]
    equal = (values == least).nonzero()[: count - len(above), 0]
    return torch.cat([above, equal]).sort().values


def likeliest(p: Distribution, count: int) -> list[int]:
    """Up to ``count`` ids, most likely first, of equal ones the lowest; none of probability 0."""
    values = p.probabilities
    index = torch.arange(len(values)) if count >= len(values) else _largest(values, count)
    index = index[values[index].sort(descending=True, stable=True).indices]
    return [p.id_of(i) for i in index.tolist() if values[i] > 0]


def raw_probability(logits: torch.Tensor, token_id: int, total: torch.Tensor) -> float:
    """The probability of ``token_id`` at temperature 1 with no filter; ``logits`` (n,) float32, ``total``
    their ``logsumexp``."""
    return (logits[token_id] - total).exp().item()


def draw(weights: torch.Tensor, u: float) -> int:
    """An index of ``weights`` (n,), non-negative and of any sum, by inverse CDF in float64 at u in [0, 1).

    Never an index of weight 0: the first cumulative sum *above* u * total is chosen.
    """
    if len(weights) == 1:
        return 0
    cumulative = weights.double().cumsum(0)
    index = int(torch.searchsorted(cumulative, u * cumulative[-1].item(), right=True))
    if index == len(weights):  # u * total was rounded up to total
        index = int(weights.nonzero()[-1])
    return index


def sample(p: Distribution, u: float) -> int:
    """A token id drawn from ``p`` by inverse CDF."""
    return p.id_of(draw(p.probabilities, u))


def accepts(u: float, p: float, q: float) -> bool:
    """Whether a drafted token is kept: u * q < p, strictly, so that u = 0 keeps nothing impossible."""
    return u * q < p


def overlap(p: Distribution, q: Distribution) -> float:
    """Σ min(p, q): the probability that a token drawn from q is accepted (Leviathan et al., eq. 1)."""
    if len(q.probabilities) == 1:
        return min(1.0, p.at(q.id_of(0)), q.probabilities.item())
    if q.ids is None:
        p, q = q, p
    ids = torch.arange(len(q.probabilities)) if q.ids is None else q.ids
    shared = torch.minimum(p.over(ids), q.probabilities)
    return min(1.0, shared.sum(dtype=torch.float64).item())


def residual(p: Distribution, q: Distribution, weight: float = 1.0) -> torch.Tensor:
    """max(0, weight * p - q) over p's support, float64 (n,), not normalised; its sum may be 0."""
    if p.ids is None:
        left = p.probabilities.double() * weight
        if q.ids is None:
            size = min(len(left), len(q.probabilities))
            left[:size] -= q.probabilities[:size].double()
        else:
            ids, taken = q.ids, q.probabilities
            if len(ids) and ids[-1] >= len(left):  # ids are ascending
                inside = ids < len(left)
                ids, taken = ids[inside], taken[inside]
            # A quarter of index_add_'s time.
            left.scatter_add_(0, ids, -taken.double())
    else:
        left = p.probabilities.double() * weight - q.over(p.ids).double()
    return left.clamp_min_(0)


def correction(p: Distribution, q: Distribution, u: float, weight: float = 1.0) -> int:
    """The target's token after a rejection, drawn from the residual, or from p where that has no mass."""
    left = residual(p, q, weight)
    return p.id_of(draw(left if left.sum() > 0 else p.probabilities, u))


@dataclass(frozen=True, slots=True)
class Proposal:
    """A drafted token and the very distribution it was drawn from.

    ``soft`` is what the record shows of the draft's mind: ``q``, or at temperature 0, where ``q`` is
    one id, the draft's distribution at temperature 1. ``parent`` is the index of the proposal this one
    follows, None where it follows the committed ids; parents come before their children.
    """

    id: int
    q: Distribution
    soft: Distribution
    parent: int | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What verification says of one token: its fate, and the figures of its position.

    ``h`` is block verification's threshold for ``u``; None token by token, where u * q < p decides.
    ``drift`` is a lossy rule's (``core.records.Token``). In a tree ``index`` is that of the proposal (of
    a resampled token, of the first it replaces) and ``row`` the row of the target it was held against; both
    are None in a chain, where they are the position.
    """

    id: int
    fate: Fate
    position: int
    p: float
    q: float | None = None
    u: float | None = None
    overlap: float | None = None
    h: float | None = None
    drift: float | None = None
    index: int | None = None
    row: int | None = None


Verify = Callable[[Callable[[int], Distribution], Sequence[Proposal], Callable[[], float]], Iterator[Outcome]]


def verify_tokenwise(
    target: Callable[[int], Distribution], proposals: Sequence[Proposal], uniform: Callable[[], float]
) -> Iterator[Outcome]:
    """Leviathan et al.'s algorithm 1, one outcome at a time.

    ``target(i)`` is p at position i (0..K) and is asked only for positions that are reached;
    ``uniform()`` gives independent draws from [0, 1). Accepted tokens come first; then either a
    rejected one and the resampled one that replaces it, or the bonus (``plain`` where nothing was
    proposed). A caller that meets a terminal token stops iterating: no further draw is made.
    """
    for position, proposal in enumerate(proposals):
        p = target(position)
        u = uniform()
        p_x, q_x = p.at(proposal.id), proposal.q.at(proposal.id)
        shared = overlap(p, proposal.q)
        kept = accepts(u, p_x, q_x)
        yield Outcome(proposal.id, Fate.ACCEPTED if kept else Fate.REJECTED, position, p_x, q_x, u, shared)
        if not kept:
            yield _resampled(p, proposal.q, position, uniform())
            return
    yield _own(target(len(proposals)), len(proposals), uniform())


def verify_blockwise(
    target: Callable[[int], Distribution], proposals: Sequence[Proposal], uniform: Callable[[], float]
) -> Iterator[Outcome]:
    """Block verification (Sun et al. 2024, arXiv:2403.10444), with the outcomes of ``verify_tokenwise``.

    Drafts are judged together: kept is the longest beginning whose draw lies below its threshold, so a
    draft whose own draw failed is kept when a later one succeeds. Exact as the token-wise rule is, and
    keeps no fewer drafts on average. A bad row ends the block before it: what lies behind is not judged.
    """
    ps: list[Distribution] = []
    bad = None
    try:
        ps.extend(map(target, range(len(proposals))))
    except BadLogitsError as error:
        bad = error
    block = list(zip(ps, proposals, strict=False))
    weights, thresholds = block_thresholds(block)
    draws = [uniform() for _ in block]
    kept = max((i for i, (u, h) in enumerate(zip(draws, thresholds, strict=True), 1) if u < h), default=0)
    for position in range(min(kept + 1, len(block))):
        p, proposal = block[position]
        yield Outcome(
            proposal.id,
            Fate.ACCEPTED if position < kept else Fate.REJECTED,
            position,
            p.at(proposal.id),
            proposal.q.at(proposal.id),
            draws[position],
            overlap(p, proposal.q),
            thresholds[position],
        )
    if kept < len(block):
        p, proposal = block[kept]
        yield _resampled(p, proposal.q, kept, uniform(), weights[kept])
    elif bad:
        raise bad
    else:
        yield _own(target(len(proposals)), len(proposals), uniform())


def block_thresholds(block: Sequence[tuple[Distribution, Proposal]]) -> tuple[list[float], list[float]]:
    """w_0..w_K and h_1..h_K of docs/ENGINE.md, rule 16, for a block of (p, proposal) in order; float64."""
    weights = [1.0]
    for p, proposal in block:
        ratio = p.at(proposal.id) / proposal.q.at(proposal.id)
        weights.append(min(1.0, weights[-1] * ratio))
    thresholds = []
    for weight, (p, proposal) in zip(weights[1:], block[1:], strict=False):
        left = residual(p, proposal.q, weight).sum().item()
        whole = left + 1 - weight
        thresholds.append(left / whole if whole > 0 else 1.0)
    return weights, thresholds + weights[1:][-1:]


def _resampled(p: Distribution, q: Distribution, position: int, u: float, weight: float = 1.0) -> Outcome:
    token_id = correction(p, q, u, weight)
    return Outcome(token_id, Fate.RESAMPLED, position, p.at(token_id), q.at(token_id))


def _own(p: Distribution, position: int, u: float) -> Outcome:
    """The target's own token: the bonus, or plain where nothing was proposed."""
    token_id = sample(p, u)
    return Outcome(token_id, Fate.BONUS if position else Fate.PLAIN, position, p.at(token_id))


VERIFIERS: dict[str, Verify] = {"token": verify_tokenwise, "block": verify_blockwise}
