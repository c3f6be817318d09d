"""The ways to draft that need no training, for any target: made when one is first asked for."""

from __future__ import annotations

from collections.abc import Callable

from core.drafters.auto import AutoDrafter
from core.drafters.base import Drafter, Drafting
from core.drafters.early_exit import EarlyExitDrafter
from core.drafters.ngram import NgramDrafter
from core.drafters.recycling import RecyclingDrafter
from core.models.base import Scorer
from core.models.decoder import Decoder
from core.records import PairInfo

# What automatic K begins by expecting: the share of tested drafts that stood, on the embedded target.
EXPECTED = {"ngram": 0.6, "recycling": 0.3, "early-exit": 0.05}


def makers(target: Scorer, info: PairInfo, own: Drafting | None) -> dict[str, Callable[[], Drafting]]:
    """By name. ``info`` is the target's as it runs; ``own`` the pair's own way to draft, None without one."""

    def drafting(drafter: Drafter, draft: str, weights: bool = False) -> Drafting:
        """``weights``: the target's own are run."""
        about = dict(
            draft=draft,
            draft_fingerprint=info.target_fingerprint if weights else "",
            draft_quantization=info.quantization if weights else "none",
            draft_dtype=info.dtype if weights else "",
            draft_context_length=drafter.context_length,
            drafter=drafter.name,
        )
        return Drafting(drafter, about, EXPECTED[drafter.name])

    def ngram() -> Drafting:
        return drafting(NgramDrafter(target.context_length), "n-gram lookup")

    def recycling() -> Drafting:
        drafter = RecyclingDrafter(target.context_length)
        return drafting(drafter, "token recycling")

    def early_exit() -> Drafting:
        drafter = EarlyExitDrafter(target)
        return drafting(drafter, f"the target's first {drafter.layers} layers", weights=True)

    def auto() -> Drafting:
        other = own or recycling()
        drafter = AutoDrafter(other.drafter, target.context_length)
        changed = dict(
            draft=f"n-gram lookup, else {other.about['draft']}",
            draft_context_length=drafter.context_length,
            drafter=drafter.name,
        )
        return Drafting(drafter, {**other.about, **changed}, other.acceptance)

    found = {"ngram": ngram, "recycling": recycling, "auto": auto}
    if isinstance(target, Decoder):
        found["early-exit"] = early_exit
    return found
