"""Trees of drafts, and chains, which are trees of one candidate a position: the loop by which models draft
along a branch, the candidates for a position, and exact verification, which tries them in turn.

A refused candidate leaves the target's distribution less the candidate's own, normalised, and the next one
is held against that; where all are refused the target's token is drawn from what is left (SpecInfer, Miao et
al. 2024, arXiv:2305.09781, algorithm 2). With one child a node this is
``core.verify.sampling.verify_tokenwise``, draw for draw.

Exact given that each child was drawn from its ``q`` whatever its elder siblings were: with replacement, or
without, ``q`` then being what the elder ones left. Candidates that were not drawn (the k most likely) are
one-hots tried in order. Knows proposals and distributions; no model, mask or cache.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import torch

from core.records import Fate, Settings
from core.verify.sampling import (
    BadLogitsError,
    Distribution,
    Outcome,
    Proposal,
    accepts,
    distributions,
    draw,
    likeliest,
    overlap,
    residual,
    sample,
)


def siblings(
    q: Distribution,
    soft: Distribution,
    count: int,
    uniform: Callable[[], float],
    parent: int | None = None,
) -> list[Proposal]:
    """Up to ``count`` different candidates for one position, in the order they are to be tried in.

    ``q`` and ``soft`` are those of ``core.verify.sampling.distributions``. Candidates are drawn from ``q``
    without replacement, with a draw each, also where it decides nothing: each one's own q is what its elder
    siblings left. At temperature 0, where ``q`` is one id, the most likely ids of ``soft`` follow it as
    one-hots.
    """
    found: list[Proposal] = []
    for _ in range(count):
        index = draw(q.probabilities, uniform())
        found.append(Proposal(q.id_of(index), q, soft, parent))
        if len(found) == count:
            return found
        left = q.probabilities.clone()
        left[index] = 0
        mass = left.sum()
        if mass <= 0:
            break
        q = soft = Distribution(left / mass, q.ids)
    # Nothing is left of q. Where ``soft`` is q it holds nothing else either.
    others = [token_id for token_id in likeliest(soft, count) if token_id != found[-1].id]
    return found + [
        Proposal(token_id, Distribution(torch.ones(1), torch.tensor([token_id])), soft, parent)
        for token_id in others[: count - len(found)]
    ]


def along_branch(
    logits: Callable[[list[int]], torch.Tensor],
    ids: Sequence[int],
    count: int,
    settings: Settings,
    uniform: Callable[[], float],
    head_ids: torch.Tensor | None = None,
    width: int = 1,
) -> list[Proposal]:
    """``width`` candidates at each of ``count`` positions, along the branch of the first ones; 1 is a chain.

    ``logits(sequence)`` are the draft's (n,) after ``ids`` and the candidates of that branch so far, of the
    columns ``head_ids``. Fewer positions where its numbers cannot be used.
    """
    proposals: list[Proposal] = []
    sequence, parent = list(ids), None
    for _ in range(count):
        row = logits(sequence)
        try:
            q, soft = distributions(row, settings, sequence, head_ids)
        except BadLogitsError:
            break
        found = siblings(q, soft, width, uniform, parent)
        parent = len(proposals)
        proposals += found
        sequence.append(found[0].id)
    return proposals


def verify_tree(
    target: Callable[[int], Distribution], proposals: Sequence[Proposal], uniform: Callable[[], float]
) -> Iterator[Outcome]:
    """As ``core.verify.sampling.verify_tokenwise``, for proposals that name their parents.

    ``target(row)`` is p after the committed ids (row 0) or after proposal ``row - 1``. Several proposals may
    be rejected at one position; ``p`` and ``overlap`` are of what their elder siblings left.
    """
    children: dict[int | None, list[int]] = defaultdict(list)
    for index, proposal in enumerate(proposals):
        children[proposal.parent].append(index)
    node: int | None = None
    for position in range(len(proposals) + 1):
        row = 0 if node is None else node + 1
        p = left = target(row)
        candidates, node = children[node], None
        for index in candidates:
            proposal, u = proposals[index], uniform()
            p_x, q_x = left.at(proposal.id), proposal.q.at(proposal.id)
            kept = accepts(u, p_x, q_x)
            fate = Fate.ACCEPTED if kept else Fate.REJECTED
            shared = overlap(left, proposal.q)
            yield Outcome(proposal.id, fate, position, p_x, q_x, u, shared, index=index, row=row)
            if kept:
                node = index
                break
            left = _without(left, proposal.q)
        if node is None:
            token_id = sample(left, uniform())
            if candidates:
                first = candidates[0]
                q = proposals[first].q.at(token_id)
                yield Outcome(token_id, Fate.RESAMPLED, position, p.at(token_id), q, index=first, row=row)
            else:
                fate = Fate.BONUS if position else Fate.PLAIN
                yield Outcome(token_id, fate, position, p.at(token_id), row=row)
            return


def _without(p: Distribution, q: Distribution) -> Distribution:
    """The normalised residual of p after a refusal, in float64; p itself where nothing is left."""
    left = residual(p, q)
    mass = left.sum()
    return Distribution(left / mass, p.ids) if mass > 0 else p
