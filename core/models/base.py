"""What the engine asks of a model: reads ids into a cache, gives logits, forgets by cropping.

``core.models.decoder.Decoder`` and ``core.models.transformers_decoder.TransformersDecoder`` are such
models. Knows no tokenizer, no sampling, no batch: a cache is one sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

# Rows a pass while reading a prompt, which bounds the memory of one pass; a card's are
# ``core.models.memory.prompt_rows``.
PREFILL_CHUNK = 256

Stop = Callable[[], bool]  # asked between the chunks of a long prompt; True ends the reading there


def chunks(
    ids: Sequence[int], stop: Stop | None = None, read: int = 0, rows: int = PREFILL_CHUNK
) -> Iterator[Sequence[int]]:
    """``ids`` in pieces that end where a multiple of ``rows`` is read, ``read`` of them before; ``stop`` is
    asked before each and ends them."""
    start = 0
    while start < len(ids):
        if stop is not None and stop():
            return
        end = start + rows - (read + start) % rows
        yield ids[start:end]
        start = end


class Cache(Protocol):
    """What a model has read of one sequence. ``length`` ids count; ``nbytes`` is the memory held now."""

    length: int
    nbytes: int

    def crop(self, length: int) -> None:
        """Forgets what was read beyond the first ``length`` ids; nothing where there is no more."""

    def fork(self, length: int) -> Cache:
        """A copy of its own of what was read of the first ``length`` ids."""


class Scorer(Protocol):
    """Holds ``context_length`` ids, reads ids below ``readable_ids``; its logits are ``vocabulary`` wide.

    A model that can be fed where it is has two members more, without which it runs as others do:
    ``device`` (a ``torch.device``) and ``device_logits(ids, cache)``, which appends ids (n,) int64 that are
    on the device, in one pass, and gives the logits after each, (n, vocabulary) float32, there. It makes
    the host wait for nothing (``core.engine.batched`` says what would) and gives the same numbers as
    ``logits``. One that scores trees (``tree_logits(ids, parents, cache)``, ``tree_room(cache)``) has
    ``device_tree_logits`` too, whose ``parents`` are known to the host.
    """

    context_length: int
    vocabulary: int
    readable_ids: int

    def new_cache(self) -> Cache:
        """An empty cache for one sequence."""

    def prefill(self, ids: Sequence[int], cache: Cache, stop: Stop | None = None) -> None:
        """Appends ``ids`` chunk by chunk, computing no logits; may be ended between chunks by ``stop``."""

    def logits(self, ids: Sequence[int], cache: Cache) -> torch.Tensor:
        """Appends ``ids`` and gives the logits after each: (len(ids), vocabulary) float32 on the CPU."""

    def next_logits(self, ids: Sequence[int], cache: Cache) -> torch.Tensor:
        """Appends ``ids`` and gives the logits after the last: (vocabulary,) float32 on the CPU."""
