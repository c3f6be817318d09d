"""The loop: draft, verify, commit. ``Engine.generate`` gives immutable ``Round``s as they happen.

    engine = Engine(pair)
    generation = engine.generate(prompt_ids, settings)
    for round in generation:
        ...
    generation.reply

Every reply is exact: its tokens are distributed as the target alone would draw them under the same
settings (``core.sampling``; proved in ``tests/core/test_exactness.py``). The engine is one resource,
held by one reply at a time. It does not know who is watching: no page, store or metric.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from core.drafters.base import Drafter
from core.models.pair import Pair
from core.records import Fate, Reply, Round, Settings, Token
from core.reuse import Kept, KeptCaches
from core.sampling import (
    BadLogitsError,
    Distribution,
    Outcome,
    Proposal,
    distributions,
    raw_probability,
    verify_tokenwise,
)
from core.text import PromptError, decode
from core.transcript import Piece, Transcript

log = logging.getLogger(__name__)

_LOCK_POLL_SECONDS = 0.05  # how often a waiting reply looks whether it was cancelled
# Of kept caches beside the last one used; a thousand ids of the embedded pair take some 55 MB.
CACHE_BYTES = 512 << 20

Uniform = Callable[[], float]


def seeded(seed: int) -> Uniform:
    """Draws from [0, 1) in float64, of one reply alone: replies that overlap cannot disturb each other."""
    return random.Random(seed).random


class Engine:
    """Runs one pair. ``generate`` may be called from any thread; a second reply waits for the first.

    ``uniforms`` makes the draws of a reply from its seed; another source lets them be scripted.
    What was read of earlier prompts and replies is kept and read no second time where a new prompt begins
    alike (``core.reuse``): of the last reply, and up to ``cache_bytes`` of those before it; 0 keeps nothing.
    """

    def __init__(
        self, pair: Pair, uniforms: Callable[[int], Uniform] = seeded, cache_bytes: int = CACHE_BYTES
    ):
        self.pair = pair
        self.uniforms = uniforms
        self._kept = KeptCaches(pair.target, pair.drafter, cache_bytes)
        self._lock = threading.Lock()

    @property
    def cache_bytes(self) -> int:
        """Memory held by kept caches now, in bytes."""
        return self._kept.nbytes

    @property
    def cache_limit(self) -> int:
        """The most memory that kept caches may hold beside the last one used, in bytes."""
        return self._kept.limit

    @property
    def busy(self) -> bool:
        return self._lock.locked()

    def generate(
        self,
        prompt_ids: Sequence[int],
        settings: Settings,
        *,
        cancel: threading.Event | None = None,
        domain: str = "auto",
    ) -> Generation:
        """A reply to ``prompt_ids``, as an iterator of rounds; nothing runs before the first ``next``.

        ``cancel`` ends the reply after the round in flight, or while it waits for its turn.
        Raises PromptError for a prompt that is empty or leaves no room in the target's context
        (``core.chat.fit_chat`` makes one that fits).
        """
        limit = self.pair.target.context_length
        if not prompt_ids:
            raise PromptError("The prompt is empty; please write something.")
        if len(prompt_ids) >= limit:
            raise PromptError(
                f"The prompt takes {len(prompt_ids):,} tokens and the model has room for {limit - 1:,};"
                " please shorten it."
            )
        return Generation(self, list(prompt_ids), settings, cancel or threading.Event(), domain)


class Generation:
    """One reply under way: an iterator of ``Round``; ``reply`` is set when it has ended, however it did.

    ``prompt_tokens`` counts the prompt; ``reused_tokens``, those of it that a kept cache already held, is
    None until the reply has its turn, and ``prefill_seconds`` until prefill is done. Successive ``next``
    calls may come from different threads.
    """

    def __init__(
        self, engine: Engine, prompt_ids: list[int], settings: Settings, cancel: threading.Event, domain: str
    ):
        self.settings = settings
        self.prompt_tokens = len(prompt_ids)
        self.reused_tokens: int | None = None
        self.prefill_seconds: float | None = None
        self.reply: Reply | None = None
        self._engine = engine
        self._pair = engine.pair
        self._cancel = cancel
        self._done: list[Round] = []
        self._transcript = Transcript(
            engine.pair.tokenizer,
            prompt_ids,
            engine.pair.end_ids,
            settings.stop,
            min(len(prompt_ids) + settings.max_new_tokens, engine.pair.target.context_length),
            domain,
        )
        self._loop: _Loop | None = None
        self._rounds = self._run()

    def __iter__(self) -> Iterator[Round]:
        return self

    def __next__(self) -> Round:
        return next(self._rounds)

    def close(self) -> None:
        """Ends the reply now and frees the engine; what was emitted stays."""
        self._rounds.close()
        if self.reply is None:  # never started
            self._finish("cancelled", None)

    def _run(self) -> Iterator[Round]:
        finish, error = "cancelled", None
        lock = self._engine._lock
        while not lock.acquire(timeout=_LOCK_POLL_SECONDS):
            if self._cancel.is_set():
                self._finish(finish, error)
                return
        kept = None
        try:
            if not self._cancel.is_set():
                kept = self._engine._kept.take(self._transcript.ids)
                self._begin(kept)
            while not self._cancel.is_set():
                round_ = self._loop.next_round()
                self._done.append(round_)
                if round_.finish_reason:
                    # Before the yield: a reader that stops at the last round still finds the reply.
                    self._finish(round_.finish_reason, self._loop.error)
                yield round_
                if round_.finish_reason:
                    return
        except Exception as exception:
            log.exception("the reply ended with an error")
            finish, error = "error", f"The reply ended early: {exception or type(exception).__name__}."
        finally:
            failed = error is not None or (self._loop is not None and self._loop.error is not None)
            if kept is not None and not failed:
                # What the caches hold after a failure is not known, NaN perhaps: those are dropped.
                self._engine._kept.give_back(kept, self._transcript.ids)
            lock.release()
            if self.reply is None:
                self._finish(finish, error)

    def _begin(self, kept: Kept) -> None:
        settings = self.settings
        self.reused_tokens = kept.cache.length
        self._loop = _Loop(self._pair, kept, self._transcript, settings, self._engine.uniforms(settings.seed))
        start = time.perf_counter()
        if self._loop.prefill(self._cancel):
            self.prefill_seconds = time.perf_counter() - start

    def _finish(self, finish_reason: str, error: str | None) -> None:
        self.reply = ended(self, self._pair, self._done, finish_reason, error, self._transcript.visible_chars)


def ended(
    generation: Generation,
    pair: Pair,
    rounds: Sequence[Round],
    finish_reason: str,
    error: str | None,
    visible_chars: Callable[[str], int] = len,
) -> Reply:
    """The reply of a generation that ended with ``rounds``; ``visible_chars`` of its text are to be shown.

    From the rounds given out: one that died half-way has committed tokens nobody saw.
    """
    emitted = [token for round_ in rounds for token in round_.tokens if token.emitted]
    text = decode(pair.tokenizer, [token.id for token in emitted])
    prefill = generation.prefill_seconds or 0.0
    return Reply(
        token_ids=tuple(token.id for token in emitted),
        text=text,
        visible_chars=visible_chars(text),
        tail=text[sum(len(token.text) for token in emitted) :],
        finish_reason=finish_reason,
        error=error,
        settings=generation.settings,
        pair=pair.info,
        prompt_tokens=generation.prompt_tokens,
        prefill_seconds=prefill,
        ttft_seconds=prefill + rounds[0].seconds if emitted else None,
        seconds=prefill + sum(round_.seconds for round_ in rounds),
        num_rounds=len(rounds),
        reused_tokens=generation.reused_tokens,
    )


class _Loop:
    """Draft, verify, commit, over one transcript; ``caches`` hold a beginning of it."""

    def __init__(
        self, pair: Pair, caches: Kept, transcript: Transcript, settings: Settings, uniform: Uniform
    ):
        self.error: str | None = None  # one sentence, once a round could not be finished
        self._pair = pair
        self._caches = caches
        self._transcript = transcript
        self._settings = settings
        self._uniform = uniform
        self._drafter: Drafter | None = pair.drafter if settings.num_draft_tokens else None
        self._rounds = 0

    @torch.inference_mode()
    def prefill(self, cancel: threading.Event) -> bool:
        """Reads all but the last id of the prompt, so that the first token, too, comes from a round.

        False when ``cancel`` was set before all was read: a long prompt takes seconds.
        """
        ids, caches = self._transcript.ids[:-1], self._caches
        self._pair.target.prefill(ids[caches.cache.length :], caches.cache, cancel.is_set)
        if self._drafter:
            self._drafter.prefill(ids, caches.state, cancel.is_set)
        return not cancel.is_set()

    @torch.inference_mode()
    def next_round(self) -> Round:
        transcript, caches = self._transcript, self._caches
        start = time.perf_counter()
        count, reason = self._room()
        proposals: list[Proposal] = []
        if count:
            proposals = self._drafter.draft(
                transcript.ids, count, self._settings, self._uniform, caches.state
            )
            if len(proposals) < count:
                reason = "draft_failed"
        drafted = time.perf_counter()
        rows = self._pair.target.logits([transcript.ids[-1], *(p.id for p in proposals)], caches.cache)
        scored = time.perf_counter()
        tokens = self._commit(rows, proposals)
        # Both models have read drafts that may not stand, and neither has read the last id.
        caches.crop(len(transcript.ids) - 1)
        text = transcript.newly_safe()
        self._rounds += 1
        return Round(
            index=self._rounds - 1,
            num_draft_tokens=count,
            num_draft_tokens_reason=reason,
            tokens=tuple(tokens),
            text=text,
            context_tokens=len(transcript.ids),
            draft_seconds=drafted - start,
            target_seconds=scored - drafted,
            overhead_seconds=time.perf_counter() - scored,
            finish_reason="error" if self.error else transcript.finish_reason,
        )

    def _room(self) -> tuple[int, str]:
        """How many tokens to draft now, and why that many: the target's own token needs room too."""
        if self._drafter is None:
            return 0, "plain"
        length = len(self._transcript.ids)
        limits = [
            (self._settings.num_draft_tokens, "fixed"),
            (self._settings.max_new_tokens - self._transcript.emitted - 1, "length"),
            (self._pair.target.context_length - length - 1, "context"),
            (max(0, self._drafter.context_length - length + 1), "draft_context"),
        ]
        return min(limits, key=lambda limit: limit[0])

    def _commit(self, rows: torch.Tensor, proposals: list[Proposal]) -> list[Token]:
        """Verifies and commits token by token until the round or the reply ends."""
        block = [*self._transcript.ids, *(proposal.id for proposal in proposals)]
        start = len(self._transcript.ids)
        targets: dict[int, tuple[Distribution, Distribution]] = {}

        def target(position: int) -> Distribution:
            if position not in targets:
                targets[position] = distributions(rows[position], self._settings, block[: start + position])
            return targets[position][0]

        tokens: list[Token] = []
        try:
            for outcome in verify_tokenwise(target, proposals, self._uniform):
                position = outcome.position
                figures = self._figures(
                    outcome,
                    *targets[position],
                    proposals[position] if outcome.q is not None else None,
                    rows[position],
                )
                if outcome.fate is Fate.REJECTED:
                    tokens += self._unkept(proposals[position:], position, figures)
                    continue
                tokens.append(self._kept(outcome, len(proposals), figures))
                if self._transcript.finish_reason:
                    break
        except BadLogitsError as bad:
            self.error = f"The reply ended here because the target gave unusable numbers ({bad})."
        recorded = sum(token.drafted for token in tokens)
        tokens += self._unkept(proposals[recorded:], recorded)
        return tokens

    def _kept(self, outcome: Outcome, num_proposals: int, figures: dict) -> Token:
        """Commits a token: an accepted draft, or the target's own, which comes after all drafts."""
        drafted = outcome.fate is Fate.ACCEPTED
        piece = self._transcript.push(outcome.id)
        return _token(
            piece,
            index=outcome.position if drafted else num_proposals,
            id=outcome.id,
            fate=outcome.fate,
            position=outcome.position,
            emitted_index=self._transcript.emitted - 1,
            **figures,
        )

    def _unkept(self, proposals: list[Proposal], start: int, first: dict | None = None) -> list[Token]:
        """Drafts from position ``start`` on that do not stand: the first rejected if it has figures, the
        others discarded, each read in the context it was proposed in."""
        pieces = self._transcript.peek([p.id for p in proposals])
        tokens = []
        for position, (proposal, piece) in enumerate(zip(proposals, pieces, strict=True), start):
            rejected = first is not None and position == start
            tokens.append(
                _token(
                    piece,
                    index=position,
                    id=proposal.id,
                    fate=Fate.REJECTED if rejected else Fate.DISCARDED,
                    position=position,
                    **(first if rejected else {"q": proposal.q.at(proposal.id)}),
                )
            )
        return tokens

    def _figures(
        self,
        outcome: Outcome,
        p: Distribution,
        soft: Distribution,
        proposal: Proposal | None,
        row: torch.Tensor,
    ) -> dict:
        """What the record keeps of a token whose position was tested (``core.records.Token``)."""
        figures = {
            "p": outcome.p,
            "q": outcome.q,
            "u": outcome.u,
            "overlap": outcome.overlap,
            "entropy_p": p.entropy(),
            "p_raw": raw_probability(row, outcome.id),
            "top_p": soft.top(),
        }
        if proposal:
            figures["entropy_q"] = proposal.q.entropy()
            figures["top_q"] = proposal.soft.top()
        return figures


def _token(piece: Piece, index: int, position: int, **fields) -> Token:
    """A token of a chain: each draft follows the one before, the target's own the last accepted."""
    return Token(
        index=index,
        position=position,
        parent=position - 1 if position else None,
        text=piece.text,
        label=piece.label,
        domain=piece.domain,
        monospaced=piece.monospaced,
        **fields,
    )
