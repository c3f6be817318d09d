"""Drafting from repeats: what followed the last time the text ended like this (prompt lookup).

The longest ending of prompt, reply and earlier turns that occurred before is found by a suffix automaton
(``core.drafters.suffix``); what stood behind its latest known occurrence is proposed. Each proposal is
certain (q is 1), which the verifier handles exactly at any temperature. Knows ids alone: no model, no text.

Prompt lookup: Saxena 2023; with an automaton: SAM-Decoding, Hu et al. 2024 (arXiv:2411.10666).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from core.drafters.suffix import SuffixAutomaton
from core.models.base import Cache, Stop
from core.records import Settings
from core.verify.sampling import Distribution, Proposal

LEAST_MATCH = 2  # ids an ending must have in common with an earlier place
_BYTES_PER_ID = 800  # of an automaton, measured with tracemalloc on chats


def certain(id: int) -> Distribution:
    """The distribution of a candidate that was not drawn."""
    return Distribution(torch.ones(1), torch.tensor([id]))


def chain_of(ids: Sequence[int]) -> list[Proposal]:
    """Certain proposals, each after the one before."""
    chain = []
    for index, id in enumerate(ids):
        q = certain(id)
        chain.append(Proposal(id, q, q, index - 1 if index else None))
    return chain


class Lookup:
    """What was read of a sequence. Built anew where it is cropped: an automaton cannot forget its end."""

    def __init__(self, ids: Sequence[int] = ()):
        self.automaton = SuffixAutomaton(ids)

    @property
    def length(self) -> int:
        return len(self.automaton.ids)

    @property
    def nbytes(self) -> int:
        return _BYTES_PER_ID * self.length

    def crop(self, length: int) -> None:
        if length < self.length:
            self.automaton = SuffixAutomaton(self.automaton.ids[:length])

    def fork(self, length: int) -> Lookup:
        return Lookup(self.automaton.ids[:length])

    def read(self, ids: Sequence[int]) -> None:
        """Goes on to the end of ``ids``, of which a beginning was read."""
        self.automaton.extend(ids[self.length :])

    def continuation(self, count: int) -> list[int]:
        """Up to ``count`` ids that followed the longest earlier match; where the text ends they go on into
        themselves, as a repetition does."""
        matched, end = self.automaton.match
        if matched < LEAST_MATCH:
            return []
        ids = self.automaton.ids
        found = ids[end : end + count]
        while len(found) < count:
            found.append(found[len(found) - (len(ids) - end)])
        return found


class NgramDrafter:
    """``context_length`` is the target's: a lookup has no limit of its own. What it knows is the automaton of
    the committed ids, which is built anew where some are taken back."""

    name = "ngram"

    def __init__(self, context_length: int):
        self.context_length = context_length

    def new_state(self) -> Lookup:
        return Lookup()

    def proposer(self, state: Lookup) -> str:
        return self.name

    def short(self, state: Lookup) -> str:
        return "no_match"

    def prefill(self, ids: Sequence[int], state: Lookup, cache: Cache, stop: Stop | None = None) -> None:
        state.read(ids)

    def draft(
        self,
        ids: Sequence[int],
        count: int,
        settings: Settings,
        uniform: Callable[[], float],
        state: Lookup,
        cache: Cache,
    ) -> list[Proposal]:
        return chain_of(self.chain(ids, count, state))

    def chain(self, ids: Sequence[int], count: int, state: Lookup) -> list[int]:
        """The ids that ``draft`` proposes, each certain: known before anything runs."""
        state.read(ids)
        return state.continuation(count)

    def observe(self, ids: Sequence[int], logits: torch.Tensor, state: Lookup) -> None:
        """Nothing: what is committed is read with the next draft."""
