"""What the bench's measurements come to: speeds, ratios, acceptance, choices of K, and a verdict a domain.

Pure: knows the records and ``core.figures.metrics``, no model and no clock, so that every figure can be
tested on invented measurements.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from core.bench.measured import (
    AUTO,
    FLASHSPEC,
    LLAMA,
    PLAIN,
    TRANSFORMERS,
    Case,
    Parts,
    Sample,
    Samples,
    Spread,
    Way,
    ratio,
    shown,
    spread,
)
from core.figures.intervals import Interval, quotient_interval, ratio_interval
from core.figures.metrics import Figures, expected_tokens, predicted_speedup, summarize
from core.records import Round

# What a speed is divided by: the ways that go by such a name, and of several the fastest in the same case.
RIVALS = {
    PLAIN: PLAIN,
    TRANSFORMERS: TRANSFORMERS,
    "assisted": f"{TRANSFORMERS}, K = *",
    LLAMA: LLAMA,
    "lookup": f"{LLAMA}, lookup",
    FLASHSPEC: f"{FLASHSPEC}*",
}


# --- Speed -------------------------------------------------------------------------------------------------


def by_repeat(samples: Sequence[Sample]) -> list[list[Sample]]:
    """The samples of each repeat, in order."""
    repeats = sorted({sample.repeat for sample in samples})
    return [[sample for sample in samples if sample.repeat == repeat] for repeat in repeats]


def rates(samples: Sequence[Sample]) -> list[float | None]:
    """Decoded tokens per second, prompts together, of each repeat."""
    return [ratio(sum(s.tokens for s in r), sum(s.decode_seconds for s in r)) for r in by_repeat(samples)]


def speedups(samples: Sequence[Sample], base: Sequence[Sample]) -> Spread | None:
    """How many times faster than ``base``: the ratio of rates within each repeat."""
    return spread(ratio(rate, other) for rate, other in zip(rates(samples), rates(base), strict=True))


def all_rounds(samples: Iterable[Sample]) -> list[Round]:
    return [round_ for sample in samples for round_ in sample.rounds]


def outside_shares(samples: Sequence[Sample]) -> Spread | None:
    """The share of decoding spent outside model passes, of each repeat; None for a peer."""
    each = [summarize(all_rounds(repeat)) for repeat in by_repeat(samples)]
    return spread(ratio(f.overhead_seconds, f.decode_seconds) for f in each if f.rounds)


def parts(rounds: Sequence[Round], k: int) -> Parts | None:
    """The parts of a usual round that aimed at ``k`` drafts; None where there was none."""
    chosen = [round_ for round_ in rounds if round_.num_draft_tokens == k]
    if not chosen:
        return None
    return Parts(
        k,
        statistics.median(round_.draft_seconds for round_ in chosen),
        statistics.median(round_.target_seconds for round_ in chosen),
        statistics.median(round_.overhead_seconds for round_ in chosen),
    )


def usual_k(rounds: Sequence[Round]) -> int:
    """The K that most rounds aimed at, the larger of two as frequent; 0 where there is no round."""
    counts = Counter(round_.num_draft_tokens for round_ in rounds)
    return max(counts, key=lambda k: (counts[k], k), default=0)


def chosen_k(rounds: Iterable[Round]) -> dict[int, float]:
    """The share of each K among the rounds whose K was chosen automatically, by K."""
    counts = Counter(r.num_draft_tokens for r in rounds if r.num_draft_tokens_reason == AUTO)
    return {k: counts[k] / counts.total() for k in sorted(counts)}


@dataclass(frozen=True, slots=True)
class CaseFigures:
    """What the samples of one case come to. Speeds, times and shares are spreads over the repeats.

    ``times`` compares within a repeat with each rival of ``RIVALS`` that was measured; ``usual_round`` is a
    round of the K that most of them had. Undefined figures are None: of a peer all that needs rounds.
    """

    tokens_per_second: Spread | None
    times: dict[str, Spread | None]
    tokens_per_reply: float
    prefill_seconds: Spread | None
    ttft_seconds: Spread | None
    prompt_tokens: Spread | None
    usual_round: Parts | None
    outside_share: Spread | None


def case_figures(all_samples: Samples, case: Case) -> CaseFigures:
    samples = all_samples[case]
    rounds = all_rounds(samples)
    found = {name: rival(all_samples, case, name) for name in RIVALS}
    return CaseFigures(
        tokens_per_second=spread(rates(samples)),
        times={name: speedups(samples, theirs) for name, theirs in found.items() if theirs},
        tokens_per_reply=statistics.mean(s.tokens for s in samples),
        prefill_seconds=spread(s.prefill_seconds for s in samples),
        ttft_seconds=spread(s.ttft_seconds for s in samples),
        prompt_tokens=spread(s.prompt_tokens for s in samples),
        usual_round=parts(rounds, usual_k(rounds)),
        outside_share=outside_shares(samples),
    )


def rival(all_samples: Samples, case: Case, name: str) -> list[Sample] | None:
    """The rival's samples in this case, of its fastest way where it has several; None if not measured."""
    measured = [
        (spread(rates(samples)), samples)
        for other, samples in all_samples.items()
        if (other.domain, other.temperature) == (case.domain, case.temperature)
        and fnmatchcase(other.how, RIVALS[name])
    ]
    known = [(rate.median, samples) for rate, samples in measured if rate]
    return max(known, key=lambda one: one[0])[1] if known else None


# --- Speculation -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Speculation:
    """How drafting did against plain decoding. ``expected`` is E(K) of the measured a_i, tokens a round;
    ``expected_alpha`` that of alpha for all positions; ``predicted`` the speed-up E(K) stands for: all three
    None where K is automatic, of which ``chosen`` gives the share of each K."""

    case: Case
    way: Way
    figures: Figures
    expected: float | None
    expected_alpha: float | None
    predicted: float | None
    measured: Spread | None
    chosen: dict[int, float] = dataclasses.field(default_factory=dict)


def speculation(samples: Samples, case: Case, way: Way) -> Speculation:
    plain_samples = samples[dataclasses.replace(case, how=PLAIN)]
    rounds = all_rounds(samples[case])
    figures = summarize(rounds)
    measured = speedups(samples[case], plain_samples)
    if way.auto:
        return Speculation(case, way, figures, None, None, None, measured, chosen_k(rounds))
    expected = expected_tokens(figures.conditional_acceptance, way.k)
    plain, drafting = parts(all_rounds(plain_samples), 0), parts(rounds, way.k)
    return Speculation(
        case=case,
        way=way,
        figures=figures,
        expected=expected,
        expected_alpha=expected_tokens(figures.alpha, way.k),
        predicted=predicted_speedup(
            expected,
            plain_seconds=plain and plain.target + plain.outside,
            draft_seconds=drafting and drafting.draft,
            target_seconds=drafting and drafting.target,
            overhead_seconds=drafting and drafting.outside,
        ),
        measured=measured,
    )


@dataclass(frozen=True, slots=True)
class Accepted:
    """Drafts accepted in a round that drafted, over ``replies`` replies, with its 95% interval."""

    mean: float | None
    interval: Interval | None
    replies: int


@dataclass(frozen=True, slots=True)
class Verification:
    """Accepted length token by token and by block, on the same prompts and seeds, and block over token.

    Whole replies are drawn for the intervals (``core.figures.intervals``). At temperature 0 every repeat of a
    prompt gives the same reply, so only the first counts.
    """

    case: Case
    token: Accepted
    block: Accepted
    quotient: float | None
    quotient_interval: Interval | None


def verification(samples: Samples, case: Case, token: Way, block: Way) -> Verification:
    """Of the case of the ``token`` way and the one that differs by its verifier alone."""
    counts = [
        _accepted(samples[dataclasses.replace(case, how=way.name)], case, way) for way in (token, block)
    ]
    one, other = (
        Accepted(ratio(sum(above), sum(below)), ratio_interval(above, below), len(below))
        for above, below in counts
    )
    return Verification(
        case, one, other, ratio(other.mean, one.mean), quotient_interval(counts[1], counts[0])
    )


def _accepted(samples: Sequence[Sample], case: Case, way: Way) -> tuple[list[int], list[int]]:
    """Accepted drafts, and rounds that drafted as many as they were to, of each reply."""
    replies = by_repeat(samples)[0] if case.temperature == 0 else samples
    chosen = [
        [r for r in reply.rounds if r.num_draft_tokens and (way.auto or r.num_draft_tokens == way.k)]
        for reply in replies
    ]
    return [summarize(rounds).accepted for rounds in chosen], [len(rounds) for rounds in chosen]


def verdict(domain: str, found: Sequence[Speculation]) -> str:
    """One sentence: whether speculation pays off on a domain, by temperature, with the best way of each."""
    clauses = []
    for temperature in dict.fromkeys(s.case.temperature for s in found):
        known = [s for s in found if s.case.temperature == temperature and s.measured]
        if not known:
            clauses.append(f"is not known at temperature {temperature:g}")
            continue
        best = max(known, key=lambda s: s.measured.median)
        if best.measured.low > 1:
            says = "pays off"
        elif best.measured.high < 1:
            says = "does not pay off"
        else:
            says = "makes no sure difference"
        clauses.append(
            f"{says} at temperature {temperature:g}"
            f" (times plain at {best.way.name}: {shown(best.measured, '.2f')})"
        )
    return f"On {domain}, speculation " + ", and ".join(clauses) + "."
