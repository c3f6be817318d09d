"""Between token ids and text: a streaming detokeniser, labels, stop strings, end-of-text ids.

Knows a Hugging Face tokenizer and nothing of models or sampling; prompts are made in ``core.text.chat``.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping, Sequence

REPLACEMENT = "\ufffd"


class PromptError(ValueError):
    """A prompt that cannot be used; the message is one sentence that says what to do."""


def clean_text(text: str) -> str:
    """Text as it can be stored: UTF-8, and free of NUL, at which many tools cut a text off.

    The two halves of a surrogate pair become the character they mean; a lone surrogate and NUL become U+FFFD
    each.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text.replace("\0", REPLACEMENT)


def end_token_ids(tokenizer, *configs: Mapping | None) -> frozenset[int]:
    """The union of end-of-text ids named by the tokenizer and by model and generation configs (SD-02).

    What is no id in a config, a file that anybody may have written, is passed over.
    """
    ids: set[int] = set()
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    for config in configs:
        named = config.get("eos_token_id") if isinstance(config, Mapping) else None
        listed = named if isinstance(named, Sequence) else [named]
        ids.update(id_ for id_ in listed if type(id_) is int and id_ >= 0)
    return frozenset(ids)


def decode(tokenizer, ids: Sequence[int]) -> str:
    """The text of ``ids``: special tokens skipped, spaces as they are."""
    return tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)


class Detokenizer:
    """Turns ids into text one at a time, so that the pieces join to ``decode`` of all ids.

    A token that ends inside a character gives "", the one that completes the character gives all of
    it. What reads as U+FFFD is such an end, or that character itself, or bytes that no further one makes a
    character of: which of them, the bytes say. Only a few last ids are decoded at a time: ids from before
    the last complete character cannot change what follows, but the one before gives a tokenizer that drops
    leading spaces its context.
    """

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self._context: list[int] = []  # the ids whose text was given last
        self._context_text = ""
        self._pending: list[int] = []  # ids whose text is not complete yet

    def push(self, token_id: int) -> str:
        """The text that ``token_id`` completes."""
        self._pending.append(token_id)
        text = decode(self._tokenizer, self._context + self._pending)
        if len(text) <= len(self._context_text):
            return ""
        if text.endswith(REPLACEMENT) and not _at_border(self._tokenizer, self._pending):
            return ""
        new = text[len(self._context_text) :]
        self._context = self._pending
        self._context_text = decode(self._tokenizer, self._context)
        self._pending = []
        return new

    def peek(self, token_ids: Iterable[int]) -> list[str]:
        """What ``push`` would give for ``token_ids`` in turn, without taking them."""
        other = Detokenizer(self._tokenizer)
        other._context, other._context_text = self._context, self._context_text
        other._pending = list(self._pending)
        return [other.push(token_id) for token_id in token_ids]


def _byte_of_character() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte, reversed (Radford et al. 2019, ``bytes_to_unicode``)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    stand_ins = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    return stand_ins | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTES = _byte_of_character()


def _byte_of_fallback(piece: str) -> bytes | None:
    """The byte that a piece such as "<0xE2>" stands for."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes.fromhex(piece[3:5])
    return None


def _bytes_of_level(piece: str) -> bytes | None:
    """The bytes of a piece of GPT-2's kind; None for others."""
    known = all(character in _BYTES for character in piece)
    return bytes(_BYTES[character] for character in piece) if known else None


def _at_border(tokenizer, ids: Sequence[int]) -> bool:
    """Whether ``ids``, which read as a text that ends with U+FFFD, end between characters: no id that follows
    makes another character of their last bytes."""
    special = tokenizer.all_special_ids  # made anew each time it is asked for
    shown = [id_ for id_ in ids if id_ not in special]
    pieces = [piece for id_ in shown if (piece := tokenizer.convert_ids_to_tokens(id_)) is not None]
    if not pieces or REPLACEMENT in pieces[-1]:
        return bool(pieces)
    run = [_byte_of_fallback(piece) for piece in pieces]
    if run[-1] is not None:
        # A run of such bytes is read as a whole, each a U+FFFD unless all are characters.
        start = max((i + 1 for i, byte in enumerate(run) if byte is None), default=0)
        try:
            b"".join(run[start:]).decode()
        except UnicodeDecodeError:
            return False
        return True
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for piece in pieces:
        decoder.decode(_bytes_of_level(piece) or piece.encode())
    return not decoder.getstate()[0]


def label(tokenizer, token_id: int) -> str:
    """A name for a token that shows no text: a special token's own, or its bytes as ⟨F0 9F⟩."""
    piece = tokenizer.convert_ids_to_tokens(token_id)
    if piece is None:
        return f"⟨id {token_id}⟩"
    if token_id in tokenizer.all_special_ids:
        return piece
    known = _byte_of_fallback(piece) or _bytes_of_level(piece)
    return piece if known is None else f"⟨{known.hex(' ').upper()}⟩"


def shown_alone(tokenizer, token_id: int) -> str:
    """A token's text by itself; one that is no whole character by its bytes and id, since the texts of many
    such are alike."""
    text = tokenizer.decode([token_id])
    return f"{label(tokenizer, token_id)} id {token_id}" if REPLACEMENT in text else text


class StopStrings:
    """Watches a growing text for the first stop string, wherever token borders fall."""

    def __init__(self, stops: Sequence[str]):
        self._stops = [stop for stop in stops if stop]
        self._longest = max(map(len, self._stops), default=0)
        self._text = ""
        self.cut: int | None = None  # characters of the text before the stop string, once one was found

    def push(self, text: str) -> bool:
        """Adds ``text``; True when a stop string is now complete (the earliest one sets ``cut``)."""
        start = max(0, len(self._text) - self._longest + 1)
        self._text += text
        if (found := self._first(self._text, start)) is not None:
            self.cut = found
        return found is not None

    def _first(self, text: str, start: int) -> int | None:
        """Where the first stop string that begins at ``start`` or later stands in ``text``."""
        return min((at for stop in self._stops if (at := text.find(stop, start)) >= 0), default=None)

    def end_of(self, text: str) -> int:
        """How many characters of ``text``, what was pushed and what an unfinished character behind it reads
        as, come before the first stop string: all without one."""
        if self.cut is not None:
            return self.cut
        found = self._first(text, max(0, len(self._text) - self._longest + 1))
        return len(text) if found is None else found

    def safe_length(self) -> int:
        """How many characters may be shown: none that could be the beginning of a stop string."""
        if self.cut is not None:
            return self.cut
        end = len(self._text)
        for start in range(max(0, end - self._longest + 1), end):
            if any(stop.startswith(self._text[start:]) for stop in self._stops):
                return start
        return end
