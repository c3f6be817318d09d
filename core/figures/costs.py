"""What passes cost on a machine, and the speed-up that follows from an acceptance.

Numbers alone: ``core.engine.calibration`` measures them. Knows no model and no clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from core.figures.metrics import expected_tokens, predicted_speedup


@dataclass(frozen=True)
class Costs:
    """Seconds on this machine. ``verify[k]``: the target's pass over k + 1 rows; ``draft``: one draft step;
    ``overhead``: the rest of a round. K is at most ``len(verify) - 1``."""

    draft: float
    verify: tuple[float, ...]
    overhead: float = 0.0

    def round_seconds(self, k: int) -> float:
        return k * self.draft + self.verify[k] + self.overhead

    def speedup(self, acceptance: float | Sequence[float | None] | None, ks: Iterable[int]) -> float | None:
        """The predicted speed-up over plain decoding of rounds with these numbers of drafts.

        ``acceptance`` is that of ``core.figures.metrics.expected_tokens``. None without rounds, where a
        position that matters was never tested, and for a K that was not measured.
        """
        rounds = Counter(ks)
        if not rounds or max(rounds) >= len(self.verify):
            return None
        expected = {k: expected_tokens(acceptance, k) for k in rounds}
        if None in expected.values():
            return None
        return predicted_speedup(
            sum(count * expected[k] for k, count in rounds.items()),
            plain_seconds=self.round_seconds(0),
            draft_seconds=sum(count * k * self.draft for k, count in rounds.items()),
            target_seconds=sum(count * self.verify[k] for k, count in rounds.items()),
            overhead_seconds=rounds.total() * self.overhead,
        )
