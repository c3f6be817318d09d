"""Keys and values of one sequence as the lean decoder keeps them: static buffers, rolled back by a counter.

Knows the decoder's sizes and no weights; ``core.models.decoder`` fills it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
import torch

from core.models.key_blocks import PARTS, held_positions
from core.models.memory import free_bytes

ASK = 16 << 20  # bytes from which on the system is asked whether it has them: that takes a fraction of a ms


@dataclass(frozen=True)
class DecoderShape:
    """Sizes of a Llama-like decoder (rows and heads are counted, sizes are in elements)."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    rope_theta: float
    rms_eps: float
    context_length: int

    @classmethod
    def from_config(cls, config: Mapping) -> DecoderShape:
        """From a Hugging Face ``config.json``; a rotary embedding that is scaled is not looked at."""
        rope = config.get("rope_parameters") or {}
        heads = config["num_attention_heads"]
        return cls(
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_size=config.get("head_dim") or config["hidden_size"] // heads,
            rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
            rms_eps=config["rms_norm_eps"],
            context_length=config["max_position_embeddings"],
        )


class KVCache:
    """Keys and values of one sequence in ``parts``: (layers, 2, positions, kv_heads, head_size) each, of some
    layers in a row.

    The parts grow as the sequence does, in steps (``held_positions``) and one after the other, so that while
    one grows the old and the new of that one alone are held. They begin as zeros because a pass reads,
    masked, up to the end of a block of ``KEY_BLOCK``.
    ``features`` (positions, number of kinds, hidden) keeps hidden states for drafters that look at them, on a
    CPU in float32 whatever ``dtype`` keys and values have.
    """

    def __init__(
        self, shape: DecoderShape, device: torch.device | str, dtype: torch.dtype, kinds_of_features: int = 0
    ):
        self._shape, self._device, self.dtype = shape, torch.device(device), dtype
        self._kinds = kinds_of_features
        self.length = 0
        self.parts = [self._room(layers, 0) for layers in _parted(shape.layers)]
        self.features = self._room_for_features(0)
        self.reserve(1)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts) + self.features.nbytes

    def of_layers(self, start: int, end: int) -> list[torch.Tensor]:
        """Views of the positions from ``start`` to ``end``, (2, positions, kv_heads, head_size) a layer."""
        return [layer for part in self.parts for layer in part[:, :, start:end].unbind()]

    def seen(self, end: int, times: int = 1) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Views of the keys and of the values before ``end`` as attention takes them, (times, kv_heads, end,
        head_size) a layer: the same ones for each item of a batch."""
        parts = [part[:, :, None, :end].transpose(3, 4) for part in self.parts]
        if times > 1:
            parts = [part.expand(-1, -1, times, -1, -1, -1) for part in parts]
        return tuple([layer for part in parts for layer in part[:, kind].unbind()] for kind in (0, 1))

    def crop(self, length: int) -> None:
        self.length = min(self.length, length)

    def fork(self, length: int) -> KVCache:
        copy = KVCache(self._shape, self._device, self.dtype, self._kinds)
        length = min(self.length, length)
        copy.reserve(length)
        for mine, theirs in zip(copy.parts, self.parts, strict=True):
            mine[:, :, :length] = theirs[:, :, :length]
        copy.features[:length] = self.features[:length]
        copy.length = length
        return copy

    def keep(self, start: int, rows: Sequence[int]) -> None:
        """Of what was read from ``start`` on keeps these rows, ascending, as if they had been read alone.

        Waits for nothing on a card, which gets no indices: rows at equal distances are one view. Where memory
        ends in it everything stands as it did.
        """
        end = start + len(rows)
        still = sum(1 for _ in takewhile(lambda at: at[0] == at[1], enumerate(rows)))  # where they are to be
        if still < len(rows):
            found, goal = _slices([start + row for row in rows[still:]]), slice(start + still, end)
            # All, before any is written over.
            kept = [torch.cat([part[:, :, places] for places in found], 2) for part in self.parts]
            features = torch.cat([self.features[places] for places in found])
            for part, its in zip(self.parts, kept, strict=True):
                part[:, :, goal] = its
            self.features[goal] = features
        self.length = end

    def reserve(self, length: int) -> None:
        """Makes room for ``length`` ids; what was read stays.

        Raises MemoryError, or what torch raises, where there is none; what has room already keeps it, and
        everything that was read is there.
        """
        positions = held_positions(length, self._shape.context_length)
        read = self.length
        for index in range(len(self.parts)):  # no name for the old part: it goes before the next one grows
            if self.parts[index].shape[2] < positions:
                grown = self._room(len(self.parts[index]), positions)
                grown[:, :, :read] = self.parts[index][:, :, :read]
                self.parts[index] = grown
        if len(self.features) < positions:
            features = self._room_for_features(positions)
            features[:read] = self.features[:read]
            self.features = features

    def _room(self, layers: int, positions: int) -> torch.Tensor:
        shape = self._shape
        return _zeros((layers, 2, positions, shape.kv_heads, shape.head_size), self._device, self.dtype)

    def _room_for_features(self, positions: int) -> torch.Tensor:
        dtype = torch.float32 if self._device.type == "cpu" else self.dtype
        return _zeros((positions, self._kinds, self._shape.hidden), self._device, dtype)


def _slices(places: Sequence[int]) -> list[slice]:
    """Ascending ``places`` as slices, each as long as they go on at equal distances."""
    found, first = [], 0
    while first < len(places):
        step, end = 1, first + 1
        if end < len(places):
            step = places[end] - places[first]
        while end < len(places) and places[end] - places[end - 1] == step:
            end += 1
        found.append(slice(places[first], places[end - 1] + 1, step))
        first = end
    return found


def _parted(layers: int) -> list[int]:
    """How many layers each of the parts has."""
    size = -(-layers // PARTS)
    return [min(size, layers - start) for start in range(0, layers, size)]


def _zeros(size: Sequence[int], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(size, device=device, dtype=dtype)
    count = math.prod(size) * dtype.itemsize
    # Some systems promise memory that they have not, and end the process that then uses it.
    if count > ASK and (free := free_bytes("cpu")) is not None and count > free:
        raise MemoryError(f"not enough memory for {count:,} bytes of keys and values")
    # By numpy, whose zeros take no memory before they are touched; torch.zeros writes every page.
    stand_in = {2: np.int16, 4: np.int32}[dtype.itemsize]
    return torch.from_numpy(np.zeros(size, stand_in)).view(dtype)
