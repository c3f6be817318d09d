"""What the bench measured: options, ways, samples of replies, passes, memory. Plain records and numbers.

Filled by ``core.bench.run``, read by ``core.bench.figures`` and ``core.bench.report``.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from core.records import Round, Settings
from core.settings import parse_settings

DOMAINS = ("code", "prose")
AUTO = "auto"
AUTO_MOST = 8  # the most drafts that automatic K may choose here
PLAIN, TRANSFORMERS, LLAMA, FLASHSPEC = "plain", "transformers", "llama.cpp", "flashspec"
PEERS = (TRANSFORMERS, LLAMA, FLASHSPEC)


# --- Numbers -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and range of some measurements."""

    median: float
    low: float
    high: float


def spread(values: Iterable[float | None]) -> Spread | None:
    """Median, smallest and largest of the values that are known; None where none is."""
    known = [value for value in values if value is not None]
    return Spread(statistics.median(known), min(known), max(known)) if known else None


def ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def shown(value: Spread | float | None, form: str = ".1f", scale: float = 1) -> str:
    """A figure for people, times ``scale``, with its range in brackets if it has one; "–" where undefined."""
    if value is None:
        return "–"
    if not isinstance(value, Spread):
        return format(scale * value, form)
    median, low, high = (format(scale * x, form) for x in (value.median, value.low, value.high))
    return median if value.low == value.high else f"{median} ({low}..{high})"


# --- What was measured -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Way:
    """One way Redline decodes: ``k`` drafts a round (0: plain), or automatically at most ``k``."""

    k: int
    auto: bool = False
    verifier: str = Settings().verifier

    @property
    def name(self) -> str:
        if not self.k:
            return PLAIN
        said = f"K {AUTO}" if self.auto else f"K = {self.k}"
        return said if self.verifier == "token" else f"{said}, {self.verifier}"

    def settings(self, **others: object) -> Settings:
        """Checked settings of a reply decoded so; ``others`` as ``parse_settings`` takes them."""
        return parse_settings(
            num_draft_tokens=self.k, auto_draft_tokens=self.auto, verifier=self.verifier, **others
        )


@dataclass(frozen=True, slots=True)
class Options:
    """What to measure, checked. ``prompts`` counts those of each domain; ``k`` holds numbers and "auto"."""

    k: tuple[int | str, ...]
    prompts: int
    max_new_tokens: int
    repeats: int
    temperatures: tuple[float, ...]
    verifiers: tuple[str, ...] = (Settings().verifier,)
    against: tuple[str, ...] = ()
    conversation: int = 0  # tokens before a follow-up; 0: none is timed
    session: int = 0  # replies of a long session; 0: none is held

    @property
    def ways(self) -> list[Way]:
        """Plain decoding is none of them: it is always measured."""
        return [
            Way(AUTO_MOST, True, verifier) if k == AUTO else Way(k, False, verifier)
            for verifier in self.verifiers
            for k in self.k
        ]


@dataclass(frozen=True, slots=True)
class Case:
    """What is compared: ``how`` is a ``Way``'s name or a peer's, as "llama.cpp" or "transformers, K = 4"."""

    domain: str
    temperature: float
    how: str


@dataclass(frozen=True, slots=True)
class Sample:
    """One reply, measured. ``tokens`` were decoded in ``decode_seconds``, after the prompt was read.

    ``rounds`` is empty, and ``prefill_seconds`` None, for a peer that has none to show.
    """

    repeat: int
    prompt: str
    prompt_tokens: int
    tokens: int
    decode_seconds: float
    prefill_seconds: float | None
    ttft_seconds: float
    seconds: float
    rounds: tuple[Round, ...] = ()


Samples = dict[Case, list[Sample]]


@dataclass(frozen=True, slots=True)
class Passes:
    """Seconds of single passes behind ``context_tokens`` ids: quartiles as low and high.

    ``target`` by number of rows from 1; ``draft`` is the draft model's pass over one id, and
    ``draft_step`` such a pass with the draw that follows it, both None without a draft.
    """

    context_tokens: int
    target: tuple[Spread, ...]
    draft: Spread | None
    draft_step: Spread | None


@dataclass(frozen=True, slots=True)
class Parts:
    """Medians over rounds with ``k`` drafts, in seconds: drafting, the target's pass, and the rest."""

    k: int
    draft: float
    target: float
    outside: float


@dataclass(frozen=True, slots=True)
class Limit:
    """What a pass must read, and how fast this machine reads: bytes, and bytes per second.

    ``memory``: from a buffer of ``memory_bytes``, far beyond the caches. ``resident``: the same bytes over
    and over, as many as the target's weights; where those fit into a cache, that is the limit instead.
    The keys and values that a pass reads, too, are left out: behind a short prompt they are few.
    """

    target_bytes: int
    draft_bytes: int | None
    memory_bytes: int
    memory: float
    resident: float

    def target_share(self, seconds: float) -> float:
        """How much of a target pass the reading of its weights from memory must take."""
        return self.target_bytes / self.memory / seconds

    def draft_share(self, seconds: float) -> float | None:
        return ratio(self.draft_bytes, self.memory * seconds)

    def round_share(self, parts: Parts) -> float | None:
        """The same of a whole round, drafting, and everything outside passes, included."""
        if parts.k and self.draft_bytes is None:
            return None
        read = self.target_bytes + parts.k * (self.draft_bytes or 0)
        return ratio(read / self.memory, parts.draft + parts.target + parts.outside)


@dataclass(frozen=True, slots=True)
class FollowUp:
    """Seconds to the first token of a follow-up, of whose ``prompt_tokens`` a warm reply read ``new_tokens``.

    ``share`` is warm over cold within a repeat.
    """

    prompt_tokens: int
    new_tokens: int
    cold_seconds: Spread
    warm_seconds: Spread
    share: Spread


@dataclass(frozen=True, slots=True)
class Session:
    """Resident memory, in bytes, before and after ``replies`` replies of one engine, and the most between.

    It was first looked at after ``settling`` replies, when caches and allocators had filled.
    """

    replies: int
    settling: int
    before: int
    after: int
    most: int

    @property
    def growth(self) -> float:
        return self.after / self.before - 1
