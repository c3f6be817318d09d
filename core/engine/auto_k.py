"""Auto K: before each round, the number of drafts that promises the most tokens per second.

Costs were measured once on this machine (``core.engine.calibration``); acceptance is that of the reply so
far, begun from a stored prior, so that the same seed gives the same reply. It is told by the overlap of the
tested positions, which has much less noise than counting what was accepted. K = 0 where drafting does not
pay: then a single draft is tried now and then, lest a change of the text go unnoticed.

Exact: K is chosen before a round from what earlier rounds showed, and given all that any K is exact
(docs/ENGINE.md, rule 7). Knows records and numbers; no model and no clock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from core.figures.costs import Costs
from core.figures.metrics import expected_tokens
from core.records import Settings, Token

MOST = 8  # the largest K whose costs are measured
PRIOR_WEIGHT = 6.0  # tested positions that the prior counts for
POSITION_WEIGHT = 12.0  # tested positions that a domain's mean counts for, at each position of a block
MEMORY = 0.97  # what a tested position counts for after another one was: the last thirty matter
PROBE_AFTER = 24  # rounds without drafts


def usual_k(
    device: str, costs: Costs | None, k: int | None = None, auto: bool | None = None
) -> tuple[int, bool]:
    """K and whether it is chosen automatically; ``k`` and ``auto`` are what a person said, None is nothing.

    On a card K is chosen automatically unless somebody named one: what pays off there depends on launches and
    bandwidth more than on the draft. That takes ``costs``; without them, and on a processor, K is fixed.
    """
    on_card = device == "cuda" and costs is not None
    if auto is None:
        auto = on_card and k is None
    if k is None:
        k = MOST if on_card and auto else Settings().num_draft_tokens
    return k, auto


class _Mean:
    """A mean that forgets; begun as ``value`` with ``weight`` observations."""

    def __init__(self) -> None:
        self.sum = self.weight = 0.0

    def add(self, value: float) -> None:
        self.sum = MEMORY * self.sum + value
        self.weight = MEMORY * self.weight + 1

    def towards(self, prior: float, weight: float) -> float:
        return (self.sum + prior * weight) / (self.weight + weight)


class AutoK:
    """Chooses K for the rounds of one reply. ``prior``: the acceptance to begin with, 0 to 1."""

    def __init__(self, costs: Costs, prior: float):
        self._costs, self._prior = costs, prior
        self._domains: defaultdict[str, _Mean] = defaultdict(_Mean)
        self._positions: defaultdict[tuple[str, int], _Mean] = defaultdict(_Mean)
        self._plain_rounds = 0

    def acceptance(self, domain: str, most: int) -> list[float]:
        """The estimated conditional acceptance at positions 0 to ``most - 1`` in text of ``domain``."""
        mean = self._domains[domain].towards(self._prior, PRIOR_WEIGHT)
        return [self._positions[domain, i].towards(mean, POSITION_WEIGHT) for i in range(most)]

    def choose(self, domain: str, most: int) -> int:
        """K from 0 to ``most`` for a round that begins in text of ``domain``."""
        most = min(most, len(self._costs.verify) - 1)
        acceptance = self.acceptance(domain, most)
        k = max(range(most + 1), key=lambda k: self.rate(acceptance, k))
        if k == 0 and most and self._plain_rounds >= PROBE_AFTER:
            return 1
        return k

    def rate(self, acceptance: Sequence[float], k: int) -> float:
        """Expected tokens per second of a round with ``k`` drafts."""
        return expected_tokens(acceptance, k) / self._costs.round_seconds(k)

    def observe(self, tokens: Sequence[Token]) -> None:
        """Learns from a round's tokens."""
        drafted = False
        for token in tokens:
            drafted = drafted or token.drafted
            if token.overlap is not None:
                self._domains[token.domain].add(token.overlap)
                self._positions[token.domain, token.position].add(token.overlap)
        self._plain_rounds = 0 if drafted else self._plain_rounds + 1
