"""Attention of a chain's rows on a card, without a mask in memory, so that torch's fused kernels can run it.

Flash kernels take no mask at all; the memory-efficient ones take one, but read it from memory. Rows of a
chain need none: one row sees everything before it, a prompt that is read from nothing is causal, and rows
behind cached keys are causal from the lower right corner (``torch.nn.attention.bias.causal_lower_right``,
which calls the flash kernel, or else the memory-efficient one, and makes a mask only where neither can run).
Keys end where the rows do: a kernel reads no more of them than there are.

Where several query heads share a key head, the queries of a single row are rows of one product, as nothing
hides keys from them. Of more rows, the first query heads of all key heads are one item of a batch, the second
ones the next, and every item sees the same keys, which are not repeated in memory. Both forms are those of
ordinary attention: the memory-efficient kernels (all there is below compute capability 8.0, and in float32)
do not know torch's ``enable_gqa``.

Sums over keys come out otherwise than over whole blocks with a mask, so a processor, where rows are bit-equal
(docs/ENGINE.md, rule 13), does not come here. Knows no weights and no ids.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from core.models.kv_cache import DecoderShape, KVCache


def prefer_plain_kernels() -> None:
    """Keeps torch from cuDNN's attention, which it prefers on some cards: that makes a plan for every number
    of keys, and here each step has one more."""
    torch.backends.cuda.enable_cudnn_sdp(False)


class Attention:
    """Of ``rows`` behind ``start`` ids that a cache holds, in every layer of a pass in turn.

    ``asking`` (kv_heads, rows, group, size) takes a layer's queries, of ``group`` heads to a key head, in the
    dtype of the keys; ``keys`` and ``values`` are views a layer.
    """

    def __init__(self, shape: DecoderShape, rows: int, start: int, cache: KVCache):
        group, end = shape.heads // shape.kv_heads, start + rows
        place = dict(dtype=cache.dtype, device=cache.parts[0].device)
        self._flat = rows, shape.heads * shape.head_size
        self._alone = rows == 1
        self._causal = not self._alone and start == 0
        self._bias = None if self._alone or self._causal else causal_lower_right(rows, end)
        made = torch.empty(rows, group, shape.kv_heads, shape.head_size, **place)
        self.asking = made.permute(2, 0, 1, 3)
        self._query = made.transpose(1, 2) if self._alone else made.permute(1, 2, 0, 3)
        self.keys, self.values = cache.seen(end, 1 if self._alone else group)

    def attend(self, layer: int) -> torch.Tensor:
        """What ``asking`` holds over a layer's keys, (rows, heads * size): in a row the first query of each
        key head, then the second of each."""
        query, keys, values = self._query, self.keys[layer], self.values[layer]
        made = F.scaled_dot_product_attention(query, keys, values, self._bias, is_causal=self._causal)
        made = made.transpose(1, 2) if self._alone else made.permute(2, 0, 1, 3)
        return made.reshape(self._flat)
