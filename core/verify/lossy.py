"""Lossy acceptance rules, for teaching: what they keep, and how far they move the output away from p.

Each is in use somewhere, and none is exact (docs/ENGINE.md, rule 15): a draft is kept or refused without a
draw, and after a refusal the token is drawn from p. ``drift`` says what that does to one token: the total
variation between the rule's output distribution and p, computed over the whole vocabulary.

- ``greedy``: kept if it is the target's most likely id, whatever the temperature.
- ``threshold``: kept if p(x) is above the threshold.
- ``draft-ratio``: kept if q(x) >= threshold * p(x), as some tutorials write the rule.
- ``target-ratio``: kept if p(x) >= threshold * q(x).
- ``typical``: kept if p(x) > min(e, sqrt(e) * exp(-H(p))), e the threshold (Medusa, Cai et al. 2024,
  arXiv:2401.10774, section 2.3).

Knows distributions of chains; no model, no page. The limits of the thresholds are in ``core.settings``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch

from core.records import Fate
from core.settings import LOSSY
from core.verify.sampling import Distribution, Outcome, Proposal, Verify, overlap, sample

# (p at ids, q at ids, the whole of p, threshold) to which of the ids are kept, bool, all (n,) float64.
_Keeps = Callable[[torch.Tensor, torch.Tensor, Distribution, float | None], torch.Tensor]


def _greedy(p: torch.Tensor, q: torch.Tensor, whole: Distribution, threshold: float | None) -> torch.Tensor:
    return (p > 0) & (p >= whole.probabilities.max().double())


def _typical(p: torch.Tensor, q: torch.Tensor, whole: Distribution, threshold: float) -> torch.Tensor:
    return p > min(threshold, math.sqrt(threshold) * math.exp(-whole.entropy()))


_KEEPS: dict[str, _Keeps] = {
    "greedy": _greedy,
    "threshold": lambda p, q, whole, threshold: p > threshold,
    "draft-ratio": lambda p, q, whole, threshold: q >= threshold * p,
    "target-ratio": lambda p, q, whole, threshold: p >= threshold * q,
    "typical": _typical,
}


def kept_ids(rule: str, p: Distribution, q: Distribution, threshold: float | None) -> torch.Tensor:
    """Which entries of ``q``'s support the rule keeps: bool, as long as ``q.probabilities``."""
    return _KEEPS[rule](p.over(_ids(q)).double(), q.probabilities.double(), p, threshold)


def drift(rule: str, p: Distribution, q: Distribution, threshold: float | None) -> float:
    """Total variation (0 to 1) between p and the distribution of a token made by ``rule`` from q and p."""
    inside = p.over(_ids(q)).double()
    kept = torch.where(kept_ids(rule, p, q, threshold), q.probabilities.double(), 0.0)
    accepted = kept.sum().item()
    # What is kept, and p for the rest: outside q's support p alone, short of what was accepted.
    difference = (kept - accepted * inside).abs().sum().item()
    return min(1.0, max(0.0, (difference + accepted * (1 - inside.sum().item())) / 2))


def lossy(rule: str, threshold: float | None) -> Verify:
    """The rule as a verifier of chains (``core.verify.sampling.Verify``); None is its usual threshold."""
    if threshold is None and (limits := LOSSY[rule]):
        threshold = limits[0]

    def verify(
        target: Callable[[int], Distribution], proposals: Sequence[Proposal], uniform: Callable[[], float]
    ) -> Iterator[Outcome]:
        for position, proposal in enumerate(proposals):
            p, q, x = target(position), proposal.q, proposal.id
            entry = (_ids(q) == x).nonzero()[0, 0]
            kept = bool(kept_ids(rule, p, q, threshold)[entry])
            fate = Fate.ACCEPTED if kept else Fate.REJECTED
            moved = drift(rule, p, q, threshold)
            yield Outcome(x, fate, position, p.at(x), q.at(x), overlap=overlap(p, q), drift=moved)
            if not kept:
                token_id = sample(p, uniform())
                yield Outcome(token_id, Fate.RESAMPLED, position, p.at(token_id), q.at(token_id))
                return
        p = target(len(proposals))
        token_id = sample(p, uniform())
        fate = Fate.BONUS if proposals else Fate.PLAIN
        yield Outcome(token_id, fate, len(proposals), p.at(token_id))

    return verify


def _ids(q: Distribution) -> torch.Tensor:
    return torch.arange(len(q.probabilities)) if q.ids is None else q.ids
