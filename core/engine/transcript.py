"""The committed sequence and all that is cut at the same token: ids, text, domains, the end.

One ``push`` commits one token, so that whatever ends a reply (end of text, then a stop string, then
the length limit) ends ids, text, domains and counters together (docs/ENGINE.md, rule 10).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from core.text.detokenise import Detokenizer, StopStrings, decode, label
from core.text.domains import DomainTracker


@dataclass(frozen=True, slots=True)
class Piece:
    """How one token reads in its place: ``core.records.Token`` explains the fields."""

    text: str
    label: str | None
    domain: str
    monospaced: bool


class Transcript:
    """``ids`` are all committed ids, prompt first; the token that ends the reply sets ``finish_reason``."""

    def __init__(
        self,
        tokenizer,
        prompt_ids: Sequence[int],
        end_ids: frozenset[int],
        stops: Sequence[str],
        max_length: int,
        domain: str,
    ):
        self.ids = list(prompt_ids)
        self.finish_reason: str | None = None
        self._tokenizer = tokenizer
        self._prompt_tokens = len(prompt_ids)
        self._end_ids = end_ids
        self._max_length = max_length
        self._stops = StopStrings(stops)
        self._detokenizer = Detokenizer(tokenizer)
        self._domains = DomainTracker(domain)
        self._text = ""  # what the tokens completed
        self._shown = 0

    @property
    def emitted(self) -> int:
        return len(self.ids) - self._prompt_tokens

    @property
    def domain(self) -> str:
        """Which kind of text the next token begins in."""
        ((domain, _),) = self._domains.peek([""])
        return domain

    def push(self, token_id: int) -> Piece:
        """Commits ``token_id``."""
        self.ids.append(token_id)
        text = self._detokenizer.push(token_id)
        stopped = self._stops.push(text)
        self._text += text
        if token_id in self._end_ids:
            self.finish_reason = "eos_token"
        elif stopped:
            self.finish_reason = "stop_string"
        elif len(self.ids) >= self._max_length:
            whole = decode(self._tokenizer, self.ids[self._prompt_tokens :])
            self.finish_reason = "length" if self._stops.end_of(whole) == len(whole) else "stop_string"
        return Piece(text, self._label(token_id, text), *self._domains.push(text))

    def peek(self, token_ids: Sequence[int]) -> list[Piece]:
        """How ``token_ids`` would read after what is committed, without committing them."""
        texts = self._detokenizer.peek(token_ids)
        domains = self._domains.peek(texts)
        return [
            Piece(text, self._label(token_id, text), *domain)
            for token_id, text, domain in zip(token_ids, texts, domains, strict=True)
        ]

    def newly_safe(self) -> str:
        """The text that became safe to show since the last call: all of it once the reply has ended."""
        if self.finish_reason:
            # With what an unfinished character at the end reads as.
            text = decode(self._tokenizer, self.ids[self._prompt_tokens :])
            end = self.visible_chars(text)
        else:
            text, end = self._text, self._stops.safe_length()
        new = text[self._shown : end]
        self._shown = max(self._shown, end)
        return new

    def visible_chars(self, text: str) -> int:
        """How many characters of ``text`` come before the stop string (all without one)."""
        return self._stops.end_of(text)

    def _label(self, token_id: int, text: str) -> str | None:
        return None if text else label(self._tokenizer, token_id)
