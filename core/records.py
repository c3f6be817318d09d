"""What happened: tokens, rounds and replies, immutable.

These records are the only thing that crosses from the engine to the page, the store and the
metrics. Field names are the database's column names, the CSV's headers and the JSON keys of
``core.generate``. The module computes no figure beyond counting (``core.figures.metrics`` does) and
imports nothing of the project.

Words (Leviathan et al. 2023, arXiv:2211.17192; names as in vLLM): a *round* is one draft phase,
one target pass and one commit. ``p`` and ``q`` are the target's and the draft's probability of a
token after temperature and filters, ``u`` is the uniform draw that decides acceptance.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Fate(str, Enum):
    """What became of a token. ``DRAFTED`` and ``EMITTED`` sort them; an accepted one is both."""

    ACCEPTED = "accepted"  # drafted and kept
    REJECTED = "rejected"  # drafted, tested and not kept
    DISCARDED = "discarded"  # drafted and never tested
    RESAMPLED = "resampled"  # the target's correction after a rejection
    BONUS = "bonus"  # the target's free token after a fully accepted round
    PLAIN = "plain"  # decoded by the target alone

    def __str__(self) -> str:
        return self.value


DRAFTED = frozenset({Fate.ACCEPTED, Fate.REJECTED, Fate.DISCARDED})
EMITTED = frozenset({Fate.ACCEPTED, Fate.RESAMPLED, Fate.BONUS, Fate.PLAIN})

EXACT_VERIFIERS = ("token", "block")

DOMAINS = ("code", "prose", "maths", "structured", "other")


@dataclass(frozen=True, slots=True)
class Token:
    """One token of a round, drafted or made by the target.

    ``index`` numbers the tokens of a round in the order drafted, the target's own token last.
    ``parent`` is the ``index`` of the token this one was proposed after (None: the last committed
    token), so that a tree of drafts fits the same record as a chain.
    ``position`` is the 0-based position in the round's block; a resampled token has the position
    of the token it replaces. ``emitted_index`` counts the reply's emitted tokens from 0 and is
    None for rejected and discarded tokens.
    ``text`` is what this token adds to the text. A token that ends in the middle of a character
    adds nothing and the one that completes it adds the whole character, so the joined ``text`` of
    the emitted tokens plus ``Reply.tail`` is the reply's text. ``label`` names a token whose
    ``text`` is empty (hexadecimal bytes, or the name of a special token).
    Figures are None where they are undefined: ``u`` and ``overlap`` of a token that was not drafted
    and tested; ``q`` and ``entropy_q`` of one that no draft competed for (bonus and plain; a resampled
    token has them); everything of the target for a discarded token.
    ``h`` is what block verification held ``u`` against; None token by token, where u * q < p decides.
    In a tree ``p`` and ``overlap`` of a token are of what was left of the target's distribution once the
    siblings tried before it were refused. ``drift`` is the total variation between the distribution a lossy
    rule draws from at this position and the target's; None under an exact rule.
    ``overlap`` is the sum over the vocabulary of min(p, q). Entropies are in nats. ``p_raw`` is
    the target's probability at temperature 1 with no filter. ``top_p`` and ``top_q`` hold up to
    ten (id, probability) pairs, most likely first, of p and q; at temperature 0, where those are
    one id each, of both distributions at temperature 1.
    """

    index: int
    id: int
    text: str
    fate: Fate
    position: int
    label: str | None = None
    parent: int | None = None
    emitted_index: int | None = None
    p: float | None = None
    q: float | None = None
    u: float | None = None
    h: float | None = None
    overlap: float | None = None
    drift: float | None = None
    entropy_p: float | None = None
    entropy_q: float | None = None
    p_raw: float | None = None
    top_p: tuple[tuple[int, float], ...] = ()
    top_q: tuple[tuple[int, float], ...] = ()
    domain: str = "other"
    monospaced: bool = False  # stands inside a code fence or code span: how the page sets it

    @property
    def drafted(self) -> bool:
        return self.fate in DRAFTED

    @property
    def emitted(self) -> bool:
        return self.fate in EMITTED


@dataclass(frozen=True, slots=True)
class Round:
    """One draft phase, one target pass, one commit.

    ``num_draft_tokens`` is the K this round aimed at and ``num_draft_tokens_reason`` says why it
    is that number: ``fixed`` (the setting), ``plain`` (the setting is 0), ``length`` (fewer tokens
    are still allowed), ``context`` (the target's limit is near), ``draft_context`` (past the
    draft's limit), ``draft_failed`` (the draft gave no usable distribution), ``no_match``
    (the drafter found less to propose) or ``auto``. ``drafter`` names what proposed the drafts, None where
    nothing was proposed.
    ``text`` is what became safe to show after this round: it never holds half a character, and it
    holds back what may yet turn out to be the beginning of a stop string.
    ``context_tokens`` counts the ids the target has seen or will see next: prompt and emitted.
    Seconds are wall time: ``overhead_seconds`` is everything of the round outside model passes.
    """

    index: int
    num_draft_tokens: int
    num_draft_tokens_reason: str
    tokens: tuple[Token, ...]
    text: str
    context_tokens: int
    draft_seconds: float
    target_seconds: float
    overhead_seconds: float
    finish_reason: str | None = None
    drafter: str | None = None

    def count(self, fate: Fate) -> int:
        return sum(1 for token in self.tokens if token.fate is fate)

    @property
    def drafted(self) -> int:
        return sum(1 for token in self.tokens if token.drafted)

    @property
    def emitted(self) -> int:
        return sum(1 for token in self.tokens if token.emitted)

    @property
    def seconds(self) -> float:
        return self.draft_seconds + self.target_seconds + self.overhead_seconds


@dataclass(frozen=True, slots=True)
class PairInfo:
    """What produced a reply: names and fingerprints (SHA-256 of the weights, hexadecimal)."""

    pair: str
    target: str
    draft: str
    target_fingerprint: str
    draft_fingerprint: str
    quantization: str  # of the target as it runs: "int4", "int8", "nf4", "llm.int8" or "none"
    draft_quantization: str
    device: str
    drafter: str  # how drafts are made: one of ``core.drafters.names.DRAFTERS``
    context_length: int  # ids the target can hold
    draft_context_length: int  # 0 where there is no draft
    dtype: str = "float32"  # of the target's activations
    draft_dtype: str = "float32"
    exactness_note: str | None = None  # a sentence where kernels make exactness hold up to rounding only


_LEAST_DIVISOR = 2.0**-126  # of float32's normal numbers: the reciprocal of a smaller one may be infinite


def zero_if_tiny(temperature: float) -> float:
    """0 for a temperature that float32 cannot divide logits by, else the temperature itself."""
    return temperature if temperature >= _LEAST_DIVISOR else 0.0


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of one reply, already checked (``core.settings.parse_settings``)."""

    temperature: float = 0.7  # 0 to 2; 0, and what is 0 to float32, is argmax
    top_k: int = 0  # 0 is off
    top_p: float = 1.0  # 1 is off
    min_p: float = 0.0  # 0 is off; ids below this share of the most likely one's probability are dropped
    repetition_penalty: float = 1.0  # 1 is off; above 1 makes ids of the prompt and the reply less likely
    # K, 0 (plain) to 16. On a CPU a pass over four rows costs about what one row costs, a fifth row
    # costs more (docs/LOG.md).
    num_draft_tokens: int = 3
    auto_draft_tokens: bool = (
        False  # K is chosen before each round, num_draft_tokens at most (core.engine.auto_k)
    )
    max_new_tokens: int = 512
    stop: tuple[str, ...] = ()
    seed: int = 0  # 0 to 2**63 - 1
    verifier: str = "token"  # or "block", both exact, or a lossy rule (``core.settings.VERIFIERS``)
    acceptance_threshold: float | None = None  # a lossy rule's number; None is the rule's usual one
    tree_width: int = 1  # candidates a position, where the drafter can propose a tree; 1 is a chain

    def __post_init__(self) -> None:
        object.__setattr__(self, "temperature", zero_if_tiny(self.temperature))

    @property
    def exact(self) -> bool:
        """Whether the reply is distributed as the target alone would write it: also where it does."""
        return self.verifier in EXACT_VERIFIERS or not self.num_draft_tokens


def writes_exactly(settings: Settings, drafter: str) -> bool:
    """Whether a reply with these settings is exact: also where ``drafter`` is none and no rule was asked."""
    return settings.exact or drafter == "plain"


@dataclass(frozen=True, slots=True)
class Reply:
    """One reply, at its end.

    ``text`` is ``tokenizer.decode`` of all ids (special tokens skipped, no clean-up);
    ``finish_reason`` is ``eos_token``, ``stop_string``, ``length``, ``cancelled`` or ``error``.
    ``visible_chars`` says how much of it is to be shown (less than all of it after a stop string).
    ``tail`` is the part of ``text`` that no token's ``text`` holds: the replacement character of
    an unfinished character when a reply is cut there, otherwise empty.
    ``reused_tokens`` counts the leading ids of the prompt that a kept cache already held: prefill read
    the others, all but the last. None for a reply that never had its turn.
    ``ttft_seconds`` runs from the start of prefill to the end of the first round; None when
    nothing was emitted. ``seconds`` is prefill plus all rounds: time a reader of the stream took
    between rounds is not in it.
    """

    token_ids: tuple[int, ...]
    text: str
    visible_chars: int
    tail: str
    finish_reason: str
    error: str | None
    settings: Settings
    pair: PairInfo
    prompt_tokens: int
    prefill_seconds: float
    ttft_seconds: float | None
    seconds: float
    num_rounds: int
    reused_tokens: int | None = None

    @property
    def visible_text(self) -> str:
        return self.text[: self.visible_chars]
