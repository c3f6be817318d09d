"""The loop: draft, verify, commit. ``Engine.generate`` gives immutable ``Round``s as they happen.

    engine = Engine(pair)
    generation = engine.generate(prompt_ids, settings)
    for round in generation:
        ...
    generation.reply

Every reply is exact: its tokens are distributed as the target alone would draw them under the same
settings (``core.verify.sampling``; proved in ``tests/core/test_exactness.py``). The engine is one resource,
held by one reply at a time. It does not know who is watching: no page, store or metric.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

from core.drafters.base import Drafter
from core.engine.auto_k import AutoK
from core.engine.batched import Batched
from core.engine.generation import Underway
from core.engine.reuse import Kept, KeptCaches
from core.engine.rounds import Played, Stepwise, Uniform, Verdict, Way
from core.engine.transcript import Piece, Transcript
from core.models.errors import is_out_of_memory
from core.models.memory import release
from core.pairs.pair import Pair
from core.records import Fate, Round, Settings, Token
from core.text.detokenise import PromptError
from core.verify.sampling import BadLogitsError

log = logging.getLogger(__name__)
T = TypeVar("T")

_LOCK_POLL_SECONDS = 0.05  # how often a waiting reply looks whether it was cancelled
# Of kept caches beside the last one used; a thousand ids of the embedded pair take some 55 MB.
CACHE_BYTES = 512 << 20


def seeded(seed: int) -> Uniform:
    """Draws from [0, 1) in float64, of one reply alone: replies that overlap cannot disturb each other."""
    return random.Random(seed).random


class Engine:
    """Runs one pair. ``generate`` may be called from any thread; a second reply waits for the first.

    ``uniforms`` makes the draws of a reply from its seed; another source lets them be scripted.
    What was read of earlier prompts and replies is kept and read no second time where a new prompt begins
    alike (``core.engine.reuse``): of the last reply, and up to ``cache_bytes`` of those before it; 0 keeps
    nothing. ``batched`` says whether rounds are played on the models' own device with one wait each
    (``core.engine.batched``) or step by step on the CPU (``core.engine.rounds``); None leaves it to the
    pair's devices.
    """

    def __init__(
        self,
        pair: Pair,
        uniforms: Callable[[int], Uniform] = seeded,
        cache_bytes: int = CACHE_BYTES,
        batched: bool | None = None,
    ):
        self.pair = pair
        self.uniforms = uniforms
        self._batched = batched
        self._kept = KeptCaches(pair.target, cache_bytes)
        self._lock = threading.Lock()

    def make_room(self) -> None:
        """Gives up the kept caches, which the reply in hand is not among, and what nobody needs any more."""
        self._kept.drop()
        release()

    def with_room(self, step: Callable[[], T]) -> T:
        """Takes a step of a reply; where memory ends in it, makes room and takes it once more."""
        try:
            return step()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            log.warning("Memory ended; what is kept of other replies goes: %s", str(error))
        # Only now, when the exception that held on to half a step is gone.
        self.make_room()
        return step()

    @property
    def cache_bytes(self) -> int:
        """Memory held by kept caches now, in bytes."""
        return self._kept.nbytes

    @property
    def cache_limit(self) -> int:
        """The most memory that kept caches may hold beside the last one used, in bytes."""
        return self._kept.limit

    @property
    def batched(self) -> bool:
        """Whether rounds of the pair's own drafter are played on its device with one wait each."""
        return self.plays_batched(self.pair, Settings())

    def plays_batched(self, pair: Pair, settings: Settings) -> bool:
        if self._batched is not None:
            return self._batched
        return Batched.suits(pair, settings.verifier)

    @property
    def busy(self) -> bool:
        return self._lock.locked()

    @contextlib.contextmanager
    def idle(self) -> Iterator[bool]:
        """Whether no reply is being written; if so, those that come wait while the block is run."""
        free = self._lock.acquire(blocking=False)
        try:
            yield free
        finally:
            if free:
                self._lock.release()

    def generate(
        self,
        prompt_ids: Sequence[int],
        settings: Settings,
        *,
        cancel: threading.Event | None = None,
        domain: str = "auto",
        drafter: str | None = None,
    ) -> Generation:
        """A reply to ``prompt_ids``, as an iterator of rounds; nothing runs before the first ``next``.

        ``cancel`` ends the reply after the round in flight, or while it waits for its turn. ``drafter`` is
        one of ``Pair.drafters``; None is the pair's own.
        Raises PromptError for a prompt that is empty or leaves no room in the target's context
        (``core.text.chat.fit_chat`` makes one that fits), and for a drafter that is not offered; LoadError
        for one that cannot be made.
        """
        pair = self.pair.drafting(drafter)
        limit = self.pair.target.context_length
        if not prompt_ids:
            raise PromptError("The prompt is empty; please write something.")
        if len(prompt_ids) >= limit:
            raise PromptError(
                f"The prompt takes {len(prompt_ids):,} tokens and the model has room for {limit - 1:,};"
                " please shorten it."
            )
        return Generation(self, pair, list(prompt_ids), settings, cancel or threading.Event(), domain)


def _sentence(exception: Exception) -> str:
    """Why a reply ended early."""
    if is_out_of_memory(exception):
        return (
            "The reply ended early, because there was too little memory: begin a new conversation, close "
            "what else uses the memory, or load a smaller pair."
        )
    return f"The reply ended early: {exception or type(exception).__name__}."


class Generation(Underway):
    """One reply of an engine under way. ``reused_tokens`` is None until the reply has its turn."""

    def __init__(
        self,
        engine: Engine,
        pair: Pair,
        prompt_ids: list[int],
        settings: Settings,
        cancel: threading.Event,
        domain: str,
    ):
        super().__init__(pair, settings, len(prompt_ids))
        self._engine = engine
        self._cancel = cancel
        self._transcript = Transcript(
            pair.tokenizer,
            prompt_ids,
            pair.end_ids,
            settings.stop,
            min(len(prompt_ids) + settings.max_new_tokens, pair.target.context_length),
            domain,
        )
        self._loop: _Loop | None = None

    def _run(self) -> Iterator[Round]:
        finish, error, full = "cancelled", None, False
        lock = self._engine._lock
        while not lock.acquire(timeout=_LOCK_POLL_SECONDS):
            if self._cancel.is_set():
                self._finish(finish, error)
                return
        kept = None
        try:
            if not self._cancel.is_set():
                kept = self._engine.with_room(lambda: self._engine._kept.take(self._transcript.ids))
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
            # As text, since whoever kept the exception would keep the caches.
            log.error("the reply ended with an error:\n%s", traceback.format_exc())
            finish, error, full = "error", _sentence(exception), is_out_of_memory(exception)
        finally:
            # Whoever keeps the reply does not keep the caches.
            loop, self._loop = self._loop, None
            failed = error is not None or (loop is not None and loop.error is not None)
            if kept is not None and not failed:
                # What the caches hold after a failure is not known, NaN perhaps: those are dropped.
                if loop is not None and loop.draft_failed:
                    kept.states.pop(self._pair.drafter.name, None)
                self._engine._kept.give_back(kept, self._transcript.ids)
            kept = loop = None
            if full:  # the next reply shall have what this one could not do with
                self._engine.make_room()
            lock.release()
            if self.reply is None:
                self._finish(finish, error)

    def _begin(self, kept: Kept) -> None:
        settings, pair = self.settings, self._pair
        self.reused_tokens = kept.cache.length
        uniform = self._engine.uniforms(settings.seed)
        way = (Batched if self._engine.plays_batched(pair, settings) else Stepwise)(pair, settings, uniform)
        self._loop = _Loop(pair, kept, self._transcript, settings, way, self._engine.with_room)
        start = time.perf_counter()
        if self._engine.with_room(lambda: self._loop.prefill(self._cancel)):
            self.prefill_seconds = time.perf_counter() - start

    def _visible_chars(self, text: str) -> int:
        return self._transcript.visible_chars(text)


class _Loop:
    """Draft, verify, commit, over one transcript; ``caches`` hold a beginning of it."""

    def __init__(
        self,
        pair: Pair,
        caches: Kept,
        transcript: Transcript,
        settings: Settings,
        way: Way,
        with_room: Callable[[Callable[[], T]], T],
    ):
        self.error: str | None = None  # one sentence, once a round could not be finished
        self.draft_failed = False  # in some round the draft's numbers were of no use
        self._pair = pair
        self._caches = caches
        self._transcript = transcript
        self._settings = settings
        self._way = way
        self._with_room = with_room
        self._drafter: Drafter | None = pair.drafter if settings.num_draft_tokens else None
        self._rounds = 0
        self._auto: AutoK | None = None
        if settings.auto_draft_tokens and self._drafter and pair.costs:
            self._auto = AutoK(pair.costs, pair.acceptance)

    @torch.inference_mode()
    def prefill(self, cancel: threading.Event) -> bool:
        """Reads all but the last id of the prompt, so that the first token, too, comes from a round.

        False when ``cancel`` was set before all was read: a long prompt takes seconds. Where an error ended
        it, another call reads on from there.
        """
        ids, caches = self._transcript.ids[:-1], self._caches
        self._pair.target.prefill(ids[caches.cache.length :], caches.cache, cancel.is_set)
        if self._drafter:
            self._drafter.prefill(ids, caches.state(self._drafter), caches.cache, cancel.is_set)
        return not cancel.is_set()

    @torch.inference_mode()
    def next_round(self) -> Round:
        transcript, caches = self._transcript, self._caches
        start = time.perf_counter()
        before = caches.cache.length
        count, reason = self._room()
        played = self._with_room(lambda: self._play(count))
        if 1 + max(played.positions, default=-1) < count:
            reason = self._drafter.short(caches.state(self._drafter))
            self.draft_failed |= reason == "draft_failed"
        tokens = self._commit(played)
        if played.rows is not None:
            # Of a tree's rows the accepted ones are brought together, behind that of the last committed id.
            path = [played.rows[token.index] for token in tokens if token.fate is Fate.ACCEPTED]
            self._with_room(lambda: caches.cache.keep(before, [0, *path]))
        # Both models have read drafts that may not stand, and neither has read the last id.
        caches.crop(len(transcript.ids) - 1)
        if self._auto:
            self._auto.observe(tokens)
        text = transcript.newly_safe()
        self._rounds += 1
        return Round(
            index=self._rounds - 1,
            num_draft_tokens=count,
            num_draft_tokens_reason=reason,
            tokens=tuple(tokens),
            text=text,
            context_tokens=len(transcript.ids),
            draft_seconds=played.draft_seconds,
            target_seconds=played.target_seconds,
            overhead_seconds=time.perf_counter() - start - played.draft_seconds - played.target_seconds,
            finish_reason="error" if self.error else transcript.finish_reason,
            drafter=self._drafter.proposer(caches.state(self._drafter)) if played.drafts else None,
        )

    def _play(self, count: int) -> Played:
        self._caches.crop(len(self._transcript.ids) - 1)  # memory may have ended in this round before
        return self._way.play(self._transcript.ids, count, self._caches)

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
        count, reason = min(limits, key=lambda limit: limit[0])
        if self._auto and count:
            chosen = self._auto.choose(self._transcript.domain, count)
            if reason == "fixed" or chosen < count:
                return chosen, "auto"
        return count, reason

    def _commit(self, played: Played) -> list[Token]:
        """Commits what was judged, token by token, until the round or the reply ends; sorted by index."""
        drafts = played.drafts
        tokens: dict[int, Token] = {}  # by index
        last: int | None = None  # the draft accepted last
        try:
            for verdict in played.verdicts:
                outcome = verdict.outcome
                index = outcome.position if outcome.index is None else outcome.index
                if outcome.fate is Fate.REJECTED:
                    tokens |= self._unkept(played, index, verdict.figures)
                    continue
                if outcome.fate is Fate.ACCEPTED:
                    for sibling, draft in enumerate(drafts):
                        if draft.parent == last and sibling != index and sibling not in tokens:
                            tokens |= self._unkept(played, sibling)
                    tokens[index] = self._kept(verdict, index, last)
                    last = index
                else:
                    tokens[len(drafts)] = self._kept(verdict, len(drafts), last)
                if self._transcript.finish_reason:
                    break
        except BadLogitsError as bad:
            self.error = f"The reply ended here because the target gave unusable numbers ({bad})."
        for index in range(len(drafts)):
            if index not in tokens:
                tokens |= self._unkept(played, index)
        return [tokens[index] for index in sorted(tokens)]

    def _kept(self, verdict: Verdict, index: int, parent: int | None) -> Token:
        """Commits a token: an accepted draft, or the target's own, which comes after all drafts."""
        outcome = verdict.outcome
        piece = self._transcript.push(outcome.id)
        return _token(
            piece,
            index=index,
            id=outcome.id,
            fate=outcome.fate,
            position=outcome.position,
            parent=parent,
            emitted_index=self._transcript.emitted - 1,
            **verdict.figures,
        )

    def _unkept(self, played: Played, first: int, figures: dict | None = None) -> dict[int, Token]:
        """Draft ``first`` and all that follow it, which do not stand: the first rejected if it has figures,
        the others discarded, each read in the context it was proposed in."""
        drafts, branches = played.drafts, {first: [first]}
        for index in range(first + 1, len(drafts)):
            if drafts[index].parent in branches:
                branches[index] = [*branches[drafts[index].parent], index]
        tokens: dict[int, Token] = {}
        for index in sorted(branches, reverse=True):  # leaves first: a branch is read once, whole
            if index in tokens:
                continue
            branch = branches[index]
            pieces = self._transcript.peek([drafts[i].id for i in branch])
            for i, piece in zip(branch, pieces, strict=True):
                rejected = figures is not None and i == first
                tokens[i] = _token(
                    piece,
                    index=i,
                    id=drafts[i].id,
                    fate=Fate.REJECTED if rejected else Fate.DISCARDED,
                    position=played.positions[i],
                    parent=drafts[i].parent,
                    **(figures if rejected else {"q": drafts[i].q}),
                )
        return tokens


def _token(piece: Piece, **fields) -> Token:
    return Token(
        text=piece.text,
        label=piece.label,
        domain=piece.domain,
        monospaced=piece.monospaced,
        **fields,
    )
