"""Tiny models and a tokenizer, exact enough to enumerate: the engine runs them as it runs real ones.

A toy decoder's logits come from a function of the ids its *cache* holds, so that a cache that is off
by one gives other numbers.
"""

from __future__ import annotations

import dataclasses
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from core.drafters.model import ModelDrafter
from core.models.base import Stop, chunks
from core.pairs.pair import Pair
from tests.core.builders import PAIR

INFO = dataclasses.replace(PAIR, context_length=64, draft_context_length=64)

LogitsOf = Callable[[tuple[int, ...]], torch.Tensor]


class ToyTokenizer:
    """Ids 0..25 are a..z; ids above are special tokens, hidden in text."""

    eos_token_id: int | None = None

    def __init__(self, eos_token_id: int | None = None):
        self.eos_token_id = eos_token_id
        self.all_special_ids = [] if eos_token_id is None else [eos_token_id]

    def decode(self, ids: Sequence[int], skip_special_tokens=True, clean_up_tokenization_spaces=False) -> str:
        return "".join(string.ascii_lowercase[i] for i in ids if i not in self.all_special_ids)

    def convert_ids_to_tokens(self, token_id: int) -> str:
        return f"<{token_id}>"


@dataclass
class ToyCache:
    """``ids`` are what was read, stale ones behind ``length`` included."""

    ids: list[int] = field(default_factory=list)
    length: int = 0

    @property
    def nbytes(self) -> int:
        return len(self.ids)

    def crop(self, length: int) -> None:
        self.length = min(self.length, length)

    def keep(self, start: int, rows: Sequence[int]) -> None:
        self.ids[start : start + len(rows)] = [self.ids[start + row] for row in rows]
        self.length = start + len(rows)

    def fork(self, length: int) -> ToyCache:
        return ToyCache(self.ids[:length], min(self.length, length))


class ToyDecoder:
    """``logits_of(ids)`` gives the logits (vocabulary,) after the ids read so far."""

    device = torch.device("cpu")

    def __init__(self, logits_of: LogitsOf, context_length: int = 64):
        self.logits_of = logits_of
        self.context_length = context_length
        self.vocabulary = self.readable_ids = 26
        self.reads: list[tuple[int, int]] = []  # (first position, rows) of each pass

    def new_cache(self) -> ToyCache:
        return ToyCache()

    def _read(self, ids: Sequence[int], cache: ToyCache) -> int:
        start = cache.length
        assert start <= len(cache.ids), "positions were skipped"
        assert start + len(ids) <= self.context_length, "read past the context"
        self.reads.append((start, len(ids)))
        cache.ids[start:] = ids
        cache.length += len(ids)
        return start

    def prefill(self, ids: Sequence[int], cache: ToyCache, stop: Stop | None = None) -> None:
        for chunk in chunks(ids, stop):
            self._read(chunk, cache)

    def logits(self, ids: Sequence[int], cache: ToyCache) -> torch.Tensor:
        start = self._read(ids, cache)
        return torch.stack([self.logits_of(tuple(cache.ids[: start + n + 1])) for n in range(len(ids))])

    def tree_room(self, cache: ToyCache) -> int:
        return self.context_length - cache.length

    def tree_logits(self, ids: Sequence[int], parents: Sequence[int], cache: ToyCache) -> torch.Tensor:
        start = self._read(ids, cache)
        paths: list[tuple[int, ...]] = []
        for id, parent in zip(ids, parents, strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), id))
        return torch.stack([self.logits_of((*cache.ids[:start], *path)) for path in paths])

    def device_logits(self, ids: torch.Tensor, cache: ToyCache) -> torch.Tensor:
        return self.logits(ids.tolist(), cache)

    def device_tree_logits(self, ids: torch.Tensor, parents: Sequence[int], cache: ToyCache) -> torch.Tensor:
        return self.tree_logits(ids.tolist(), parents, cache)

    def next_logits(self, ids: Sequence[int], cache: ToyCache) -> torch.Tensor:
        return self.logits(ids, cache)[-1]


def toy_pair(
    target: LogitsOf,
    draft: LogitsOf,
    *,
    eos: int | None = None,
    context_length: int = 64,
    draft_context_length: int = 64,
    head_ids: Sequence[int] | None = None,
    extra_end_ids: Sequence[int] = (),
) -> Pair:
    """A pair of toys behind the real drafter."""
    decoder = ToyDecoder(target, context_length)
    ids = None if head_ids is None else torch.tensor(head_ids)
    return Pair(
        info=INFO,
        tokenizer=ToyTokenizer(eos),
        target=decoder,
        drafter=ModelDrafter(ToyDecoder(draft, draft_context_length), ids),
        end_ids=frozenset({eos, *extra_end_ids} - {None}),
    )


def table(seed: int, vocabulary: int, sharpness: float = 1.0) -> LogitsOf:
    """Fixed random logits for each of the last two ids (so a wrong cache shows)."""
    generator = torch.Generator().manual_seed(seed)
    logits = sharpness * torch.randn(vocabulary, vocabulary, vocabulary, generator=generator)
    rows = [list(of_previous) for of_previous in logits]  # an index of a list takes no time, of a tensor some
    return lambda ids: rows[ids[-2] if len(ids) > 1 else 0][ids[-1]]


def path(ids: Sequence[int], vocabulary: int, prompt_length: int) -> LogitsOf:
    """Logits that make ``ids`` the greedy reply, by position after a prompt of ``prompt_length`` ids."""

    def logits_of(seen: tuple[int, ...]) -> torch.Tensor:
        logits = torch.zeros(vocabulary)
        logits[ids[min(len(seen) - prompt_length, len(ids) - 1)]] = 9.0
        return logits

    return logits_of
