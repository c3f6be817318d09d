"""Whether a target and a draft mean the same by every id (docs/ENGINE.md, rule 11).

Compares contents, id by id over both tokenizers, never sizes: models of one family pad their vocabularies
differently, and two of the same width may differ inside. Knows tokenizers only by ``get_vocab`` and their
special ids, and nothing of models but how many rows they score.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from core.models.errors import LoadError

SPECIAL = {"bos": "begin of text", "eos": "end of text", "pad": "padding", "unk": "unknown"}


class Tokenizer(Protocol):
    """What is asked of a tokenizer; each of transformers' has it."""

    def get_vocab(self) -> Mapping[str, int]: ...  # added tokens included


def compare(
    target_tokenizer: Tokenizer, draft_tokenizer: Tokenizer, target_rows: int, draft_rows: int
) -> tuple[str, ...]:
    """Notes for people about what differs and does no harm; ``*_rows`` are the widths of the models' logits.

    Ids that only one model has are no reason to refuse: the other never proposes them, or is never asked to
    keep them. Raises LoadError where an id stands for two strings, naming the first such id and both, or
    where a string has two ids.
    """
    target, draft = _named(target_tokenizer), _named(draft_tokenizer)
    notes = []
    if target != draft:
        notes += _checked(target, draft)
    if target_rows != draft_rows:
        notes.append(_rows_note(target, draft, target_rows, draft_rows))
    notes += _special_note(target_tokenizer, draft_tokenizer)
    return tuple(notes)


def _named(tokenizer: Tokenizer) -> Mapping[str, int]:
    """The vocabulary without the "[PAD151665]" that llama.cpp writes into GGUF files for rows of padding."""
    words = tokenizer.get_vocab()
    padding = {token for token, id_ in words.items() if token[:4] == "[PAD" and token == f"[PAD{id_}]"}
    return {token: id_ for token, id_ in words.items() if token not in padding} if padding else words


def _checked(target: Mapping[str, int], draft: Mapping[str, int]) -> list[str]:
    """The note on ids that one tokenizer has alone, where the rest agrees."""
    named, drafted = ({id_: token for token, id_ in words.items()} for words in (target, draft))
    differing = [id_ for id_, token in named.items() if id_ in drafted and drafted[id_] != token]
    if differing:
        id_ = min(differing)
        raise LoadError(
            f"This pair is refused, because its vocabularies differ: id {id_:,} is {named[id_]!r} for the "
            f"target and {drafted[id_]!r} for the draft ({len(differing):,} ids differ); choose two models "
            "that share a tokenizer."
        )
    moved = [token for token, id_ in target.items() if token in draft and draft[token] != id_]
    if moved:
        token = min(moved, key=target.__getitem__)
        raise LoadError(
            f"This pair is refused, because its vocabularies differ: {token!r} is id {target[token]:,} for "
            f"the target and id {draft[token]:,} for the draft; choose two models that share a tokenizer."
        )
    notes = []
    for owner, mine, other in (("target", named, drafted), ("draft", drafted, named)):
        alone = sorted(mine.keys() - other.keys())
        if alone:
            some = ", ".join(repr(mine[id_]) for id_ in alone[:3]) + (", …" if len(alone) > 3 else "")
            count = "1 token is" if len(alone) == 1 else f"{len(alone):,} tokens are"
            notes.append(f"{count} only in the {owner}'s vocabulary ({some}, from id {alone[0]:,}).")
    return notes


def _rows_note(target: Mapping[str, int], draft: Mapping[str, int], target_rows: int, draft_rows: int) -> str:
    """Whether ids that one model alone scores stand for anything."""
    shared = min(target_rows, draft_rows)
    beyond = sum(1 for id_ in {*target.values(), *draft.values()} if id_ >= shared)
    rows = f"{target_rows:,} against {draft_rows:,} rows"
    if not beyond:
        return f"The vocabularies have {rows}: padding only."
    tokens = "1 token is" if beyond == 1 else f"{beyond:,} tokens are"
    return f"The vocabularies have {rows}: {tokens} scored by one model alone."


def _special_note(target: Tokenizer, draft: Tokenizer) -> list[str]:
    differences = []
    for name, words in SPECIAL.items():
        ids = [getattr(tokenizer, f"{name}_token_id", None) for tokenizer in (target, draft)]
        if ids[0] != ids[1]:
            mine, other = ("none" if id_ is None else f"{id_:,}" for id_ in ids)
            differences.append(f"{words} is {mine} and {other}")
    if not differences:
        return []
    differing = "; ".join(differences)
    return [f"Special ids differ between target and draft ({differing}): the target's ends a reply."]
