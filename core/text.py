"""Between token ids and text: a streaming detokeniser, labels, stop strings, end-of-text ids.

Knows a Hugging Face tokenizer and nothing of models or sampling; prompts are made in ``core.chat``.
"""

from __future__ import annotations

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
    it. Only a few last ids are decoded at a time: ids from before the last complete character cannot
    change what follows, but the one before gives a tokenizer that drops leading spaces its context.
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
        if text.endswith(REPLACEMENT) or len(text) <= len(self._context_text):
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


def label(tokenizer, token_id: int) -> str:
    """A name for a token that shows no text: a special token's own, or its bytes as ⟨F0 9F⟩."""
    piece = tokenizer.convert_ids_to_tokens(token_id)
    if piece is None:
        return f"⟨id {token_id}⟩"
    if token_id in tokenizer.all_special_ids:
        return piece
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return f"⟨{piece[3:5]}⟩"
    if all(character in _BYTES for character in piece):
        return "⟨" + " ".join(f"{_BYTES[character]:02X}" for character in piece) + "⟩"
    return piece


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
        found = [at for stop in self._stops if (at := self._text.find(stop, start)) >= 0]
        if found:
            self.cut = min(found)
        return bool(found)

    def safe_length(self) -> int:
        """How many characters may be shown: none that could be the beginning of a stop string."""
        if self.cut is not None:
            return self.cut
        end = len(self._text)
        for start in range(max(0, end - self._longest + 1), end):
            if any(stop.startswith(self._text[start:]) for stop in self._stops):
                return start
        return end
