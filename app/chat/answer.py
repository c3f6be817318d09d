"""One reply, while it is written and afterwards: its text, its figures, and how the redline view draws it.

Filled by ``app.chat.writing``'s thread and looked at by any number of others. Knows the records and
the token view's encoding; no engine, no page.
"""

from __future__ import annotations

import threading
from typing import Any

from app.chat.token_view import encode_reply_end, encode_reply_start, encode_round
from core.figures.costs import Costs
from core.figures.metrics import Figures, Tally
from core.record.store import StoredReply
from core.records import PairInfo, Reply, Round, Settings, writes_exactly
from core.text.template import Prompt


class Answer:
    """One reply to one question, while it is written and afterwards.

    ``key`` names it in the token view; it is random, so that only who was shown it can ask for its
    tokens' details. ``info`` says what writes it, and ``tokenizer`` is that pair's own, for another pair
    may be loaded since; so are ``costs``, what that pair's passes take here, where that was measured.
    ``prompt``, ``tokenizer`` and ``costs`` are None for a reply that came back from the record.
    ``reply`` is None until it has ended; ``error`` is a sentence if it could not be written.
    """

    def __init__(
        self,
        key: str,
        kind: str,
        settings: Settings,
        domain: str,
        info: PairInfo,
        prompt: Prompt | None = None,
        tokenizer: Any = None,
        costs: Costs | None = None,
    ):
        self.key, self.kind, self.settings, self.domain = key, kind, settings, domain
        self.info, self.prompt, self.tokenizer, self.costs = info, prompt, tokenizer, costs
        self.opening = prompt.opening if prompt else ""
        self.rounds: list[Round] = []
        self.reply: Reply | StoredReply | None = None
        self.error: str | None = None
        self.had_to_wait = False
        self.measuring = False  # while it is timed what passes with its drafter cost
        self.generation: Any = None  # while it is written
        self.cancel = threading.Event()
        self.done = threading.Event()
        self._tally, self._tallied = Tally(), 0
        self._lock = threading.Lock()  # the page asks from several threads
        self._note, self._drawn, self._drawn_rounds, self._drawn_end = "", "", 0, False

    @property
    def text(self) -> str:
        """What the reply says so far, exactly."""
        return self.reply.visible_text if self.reply else "".join(round.text for round in self.rounds)

    @property
    def finish_reason(self) -> str | None:
        if self.reply:
            return self.reply.finish_reason
        return "error" if self.error else None

    @property
    def prompt_tokens(self) -> int | None:
        if self.reply:
            return self.reply.prompt_tokens
        return len(self.prompt.ids) if self.prompt else None

    @property
    def reused_tokens(self) -> int | None:
        """Leading tokens of the prompt that were read already; None until the prompt's turn comes."""
        return self.reply.reused_tokens if self.reply else getattr(self.generation, "reused_tokens", None)

    @property
    def prefill_seconds(self) -> float | None:
        """None while the prompt is read, or while another reply is waited for."""
        return self.reply.prefill_seconds if self.reply else getattr(self.generation, "prefill_seconds", None)

    @property
    def ttft_seconds(self) -> float | None:
        if self.reply:
            return self.reply.ttft_seconds
        prefill = self.prefill_seconds
        return prefill + self.rounds[0].seconds if prefill is not None and self.rounds else None

    @property
    def prefill_share(self) -> float | None:
        """The prompt's part of the reply's time so far, 0 to 1; None before the first round."""
        prefill = self.prefill_seconds
        if prefill is None or not self.rounds:
            return None
        return prefill / (prefill + self.figures().decode_seconds)

    @property
    def drafted(self) -> bool:
        """Whether drafts are made in it: the target does not write alone."""
        return self.settings.num_draft_tokens > 0 and self.info.drafter != "plain"

    @property
    def exact(self) -> bool:
        """Whether it is distributed as the target alone would write it: also where it does."""
        return writes_exactly(self.settings, self.info.drafter)

    @property
    def not_exact(self) -> str:
        """What to write over a reply whose rule is not exact; "" where it is as the target alone writes."""
        if self.exact:
            return ""
        threshold = self.settings.acceptance_threshold
        return f"not exact: {self.settings.verifier}" + ("" if threshold is None else f" {threshold:g}")

    @property
    def chooses_k(self) -> bool:
        """Whether K is chosen before each round. Without measured costs it is as set, whatever was asked."""
        as_set = any(round.num_draft_tokens_reason == "fixed" for round in self.rounds[:1])
        return self.drafted and self.settings.auto_draft_tokens and not as_set

    @property
    def predicted_speedup(self) -> float | None:
        """What costs and conditional acceptance promise over plain decoding; None where either is unknown."""
        if self.costs is None:
            return None
        ks = [round.num_draft_tokens for round in self.rounds]
        return self.costs.speedup(self.figures().conditional_acceptance, ks)

    @property
    def measured_speedup(self) -> float | None:
        """Its tokens per second over those of plain rounds as they were timed with ``costs``; None where
        either is unknown. ``Turn.speedup`` has the one over a plain repetition."""
        speed = self.figures().tokens_per_second
        if self.costs is None or speed is None or not self.drafted:
            return None
        return speed * self.costs.round_seconds(0)

    @property
    def context_tokens(self) -> int | None:
        return self.rounds[-1].context_tokens if self.rounds else self.prompt_tokens

    def figures(self) -> Figures:
        """The figures of the rounds so far; each round is counted once, however often this is asked."""
        with self._lock:
            while self._tallied < len(self.rounds):
                self._tally.add(self.rounds[self._tallied])
                self._tallied += 1
            return self._tally.figures()

    def drawn(self, note: str = "") -> str:
        """The reply so far in the token view's form, under ``note``; grows only, unless the note changes."""
        with self._lock:
            if not self._drawn or note != self._note:
                self._note, self._drawn_rounds, self._drawn_end = note, 0, False
                self._drawn = encode_reply_start(self.key, self.settings.temperature, note)
            ended = self.done.is_set()  # asked first: no round comes after it
            while self._drawn_rounds < len(self.rounds):
                self._drawn += encode_round(self.rounds[self._drawn_rounds])
                self._drawn_rounds += 1
            if ended and not self._drawn_end:
                self._drawn += self._end()
                self._drawn_end = True
            return self._drawn

    def _end(self) -> str:
        reply = self.reply
        if reply is None:
            return encode_reply_end(finish_reason="error", error=self.error)
        return encode_reply_end(reply.visible_chars, reply.finish_reason, reply.tail, reply.error)
