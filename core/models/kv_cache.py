"""Keys and values of one sequence as the lean decoder keeps them: static buffers, rolled back by a counter.

Knows the decoder's sizes and no weights; ``core.models.decoder`` fills it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

# Attention always runs over whole blocks of keys, the surplus masked: the sums over keys then have
# the same structure for a token whether it is scored alone or with others behind it, and come out
# bit-equal (measured: 64 and 128 are not enough, see docs/LOG.md). A pass whose rows end in two blocks is
# made in two, so that a row has the same number of keys as alone.
KEY_BLOCK = 256


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
    """Keys and values of one sequence in one ``buffer``: (layers, 2, positions, kv_heads, head_size).

    The buffer grows as the sequence does, doubling, so that a kept cache holds no more than about twice what
    it needs. It begins as zeros because a pass reads, masked, up to the end of a block of ``KEY_BLOCK``.
    ``features`` (positions, number of kinds, hidden) keeps hidden states for drafters that look at them, on a
    CPU in float32 whatever ``dtype`` keys and values have.
    """

    def __init__(
        self, shape: DecoderShape, device: torch.device | str, dtype: torch.dtype, kinds_of_features: int = 0
    ):
        self._shape, self._device, self._dtype = shape, torch.device(device), dtype
        self._kinds = kinds_of_features
        self.length = 0
        self.buffer, self.features = self._zeros(0)
        self.reserve(1)

    @property
    def nbytes(self) -> int:
        return self.buffer.nbytes + self.features.nbytes

    def crop(self, length: int) -> None:
        self.length = min(self.length, length)

    def fork(self, length: int) -> KVCache:
        copy = KVCache(self._shape, self._device, self._dtype, self._kinds)
        length = min(self.length, length)
        copy.reserve(length)
        copy.buffer[:, :, :length] = self.buffer[:, :, :length]
        copy.features[:length] = self.features[:length]
        copy.length = length
        return copy

    def keep(self, start: int, rows: Sequence[int]) -> None:
        """Of what was read from ``start`` on keeps these rows, ascending, as if they had been read alone."""
        places, end = [start + row for row in rows], start + len(rows)
        if places != list(range(start, end)):
            self.buffer[:, :, start:end] = self.buffer[:, :, places]
            self.features[start:end] = self.features[places]
        self.length = end

    def reserve(self, length: int) -> None:
        """Makes room for ``length`` ids; what was read stays."""
        held = self.buffer.shape[2]
        if length > held:
            most = -(-self._shape.context_length // KEY_BLOCK) * KEY_BLOCK
            grown, features = self._zeros(min(max(-(-length // KEY_BLOCK) * KEY_BLOCK, 2 * held), most))
            grown[:, :, : self.length] = self.buffer[:, :, : self.length]
            features[: self.length] = self.features[: self.length]
            self.buffer, self.features = grown, features

    def _zeros(self, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Room for keys and values and for features."""
        shape = self._shape
        sizes = (
            (shape.layers, 2, positions, shape.kv_heads, shape.head_size),
            (positions, self._kinds, shape.hidden),
        )
        dtypes = self._dtype, torch.float32 if self._device.type == "cpu" else self._dtype
        return tuple(_zeros(size, self._device, dtype) for size, dtype in zip(sizes, dtypes, strict=True))


def _zeros(size: Sequence[int], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(size, device=device, dtype=dtype)
    # By numpy, whose zeros take no memory before they are touched; torch.zeros writes every page.
    stand_in = {2: np.int16, 4: np.int32}[dtype.itemsize]
    return torch.from_numpy(np.zeros(size, stand_in)).view(dtype)
