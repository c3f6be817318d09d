"""A lean decoder for the Llama family: few operations a layer, static KV buffers, rollback by a counter.

``Decoder`` holds weights and no state; ``KVCache`` holds the keys and values of one sequence and the
number of ids they stand for. Rolling back is ``cache.length = n``: what lies behind is overwritten
by the next pass. Activations are float32; the matrix products take whatever form they were given
(``core.models.linear``).

Rotary embedding is one complex product: the rows of the query and key projections are reordered at
load so that the two halves Hugging Face rotates lie side by side (Su et al. 2021, arXiv:2104.09864;
attention scores do not change when queries and keys are reordered alike).

Knows one sequence at a time, no batch, no sampling, no tokenizer. Source of the architecture:
Touvron et al. 2023 (arXiv:2302.13971) and ``transformers``' ``LlamaForCausalLM``, against which
``tests/core/test_decoder.py`` compares it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from core.models.base import PREFILL_CHUNK, Stop
from core.models.linear import Linear

# Attention always runs over whole blocks of keys, the surplus masked: the sums over keys then have
# the same structure for a token whether it is scored alone or with others behind it, and come out
# bit-equal (measured: 64 and 128 are not enough, see docs/LOG.md).
KEY_BLOCK = 256
# The attention kernel takes the queries in blocks of 32, 64 or 256; a last block of one query goes another
# way through the matrix product and comes out with other bits.
QUERY_BLOCK = 32


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
        """From a Hugging Face ``config.json`` of a Llama model without RoPE scaling."""
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
    """Keys and values of one sequence: ``keys[layer]`` is (positions, kv_heads, head_size) float32.

    Buffers grow as the sequence does, doubling, so that a kept cache holds no more than about twice what
    it needs. They begin as zeros because a pass reads, masked, up to the end of a block of ``KEY_BLOCK``.
    """

    def __init__(self, shape: DecoderShape):
        self._shape = shape
        self.length = 0
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self._positions = 0
        self.reserve(1)

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in (*self.keys, *self.values))

    def crop(self, length: int) -> None:
        self.length = min(self.length, length)

    def fork(self, length: int) -> KVCache:
        copy, length = KVCache(self._shape), min(self.length, length)
        copy.reserve(length)
        for ours, theirs in zip((*self.keys, *self.values), (*copy.keys, *copy.values), strict=True):
            theirs[:length] = ours[:length]
        copy.length = length
        return copy

    def reserve(self, length: int) -> None:
        """Makes room for ``length`` ids; what was read stays."""
        if length <= self._positions:
            return
        shape, most = self._shape, -(-self._shape.context_length // KEY_BLOCK) * KEY_BLOCK
        self._positions = min(max(-(-length // KEY_BLOCK) * KEY_BLOCK, 2 * self._positions), most)
        size = (self._positions, shape.kv_heads, shape.head_size)
        old = (self.keys or [None] * shape.layers, self.values or [None] * shape.layers)
        self.keys, self.values = ([self._grown(buffer, size) for buffer in buffers] for buffers in old)

    def _grown(self, buffer: torch.Tensor | None, size: tuple[int, ...]) -> torch.Tensor:
        # By numpy, whose zeros take no memory before they are touched; torch.zeros writes every page.
        grown = torch.from_numpy(np.zeros(size, np.float32))
        if buffer is not None:
            grown[: self.length] = buffer[: self.length]
        return grown


@dataclass(frozen=True)
class Layer:
    input_norm: torch.Tensor
    qkv: Linear
    out: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


def _pair_halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorders a projection's rows head by head: 0, n, 1, n + 1, ... for heads of 2n rows."""
    rows, columns = weight.shape
    return weight.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)


class Decoder:
    """Layers and final norm of a Llama-like model. Token embedding and head are given, as they may be shared.

    ``embedding`` is (vocabulary, hidden); ``head`` takes (rows, hidden) to (rows, logits), as many as
    the embedding has rows unless ``vocabulary`` says otherwise.
    """

    def __init__(
        self,
        shape: DecoderShape,
        embedding: torch.Tensor,
        layers: Sequence[Layer],
        norm: torch.Tensor,
        head: Callable[[torch.Tensor], torch.Tensor],
        vocabulary: int | None = None,
    ):
        self.shape = shape
        self.embedding = embedding
        self.layers = list(layers)
        self.norm = norm
        self.head = head
        self.context_length = shape.context_length
        self.vocabulary = len(embedding) if vocabulary is None else vocabulary
        self.readable_ids = len(embedding)
        frequencies = shape.rope_theta ** (-torch.arange(0, shape.head_size, 2).double() / shape.head_size)
        angles = torch.arange(shape.context_length).double()[:, None] * frequencies
        self.rotations = torch.polar(torch.ones_like(angles), angles).to(torch.complex64)[:, None, :]

    @classmethod
    def from_tensors(
        cls,
        shape: DecoderShape,
        tensors: Mapping[str, torch.Tensor],
        make: Callable[[torch.Tensor], Linear],
        embedding: torch.Tensor,
        head: Callable[[torch.Tensor], torch.Tensor],
        prefix: str = "model.",
        vocabulary: int | None = None,
    ) -> Decoder:
        """From tensors under Hugging Face's names; ``make`` turns a weight matrix into a product."""
        layers = []
        for index in range(shape.layers):
            name = f"{prefix}layers.{index}."
            attention, mlp = name + "self_attn.", name + "mlp."
            q = _pair_halves(tensors[attention + "q_proj.weight"], shape.heads)
            k = _pair_halves(tensors[attention + "k_proj.weight"], shape.kv_heads)
            layers.append(
                Layer(
                    tensors[name + "input_layernorm.weight"].float(),
                    make(torch.cat([q, k, tensors[attention + "v_proj.weight"]])),
                    make(tensors[attention + "o_proj.weight"]),
                    tensors[name + "post_attention_layernorm.weight"].float(),
                    make(torch.cat([tensors[mlp + "gate_proj.weight"], tensors[mlp + "up_proj.weight"]])),
                    make(tensors[mlp + "down_proj.weight"]),
                )
            )
        return cls(shape, embedding, layers, tensors[prefix + "norm.weight"].float(), head, vocabulary)

    def new_cache(self) -> KVCache:
        return KVCache(self.shape)

    def forward(self, ids: Sequence[int], cache: KVCache) -> torch.Tensor:
        """Appends ``ids`` to ``cache`` and gives their final hidden states, (len(ids), hidden) float32.

        The caller keeps ``cache.length + len(ids)`` within the shape's ``context_length``.
        """
        shape, rows, start = self.shape, len(ids), cache.length
        end = start + rows
        eps, group = shape.rms_eps, shape.heads // shape.kv_heads
        rotating = shape.heads + shape.kv_heads
        rotation = self.rotations[start:end]
        mask = self._mask(rows, start, group)
        seen = mask.shape[1]
        cache.reserve(end)
        x = F.embedding(torch.tensor(ids), self.embedding).float()
        for index, layer in enumerate(self.layers):
            keys, values = cache.keys[index], cache.values[index]
            qkv = layer.qkv(F.rms_norm(x, (shape.hidden,), layer.input_norm, eps))
            qkv = qkv.view(rows, rotating + shape.kv_heads, shape.head_size)
            turning = torch.view_as_complex(qkv[:, :rotating].unflatten(-1, (-1, 2)))
            turned = torch.view_as_real(turning * rotation).flatten(-2)
            keys[start:end] = turned[:, shape.heads :]
            values[start:end] = qkv[:, rotating:]
            # The query heads that share a key head become rows of one product.
            query = turned[:, : shape.heads].unflatten(1, (shape.kv_heads, group)).transpose(0, 1)
            query = query.reshape(1, shape.kv_heads, rows * group, shape.head_size)
            attended = F.scaled_dot_product_attention(
                F.pad(query, (0, 0, 0, mask.shape[0] - rows * group)),
                keys[:seen].transpose(0, 1)[None],
                values[:seen].transpose(0, 1)[None],
                attn_mask=mask,
            )
            attended = attended[0, :, : rows * group].reshape(shape.kv_heads, rows, group * shape.head_size)
            attended = attended.transpose(0, 1)
            x = x + layer.out(attended.reshape(rows, shape.heads * shape.head_size))
            gate, up = layer.gate_up(F.rms_norm(x, (shape.hidden,), layer.mlp_norm, eps)).chunk(2, 1)
            x = x + layer.down(F.silu(gate).mul_(up))
        cache.length = end
        return F.rms_norm(x, (shape.hidden,), self.norm, eps)

    def logits(self, ids: Sequence[int], cache: KVCache) -> torch.Tensor:
        """Appends ``ids`` and gives the logits after each, (len(ids), head rows) float32."""
        return self.head(self.forward(ids, cache))

    def next_logits(self, ids: Sequence[int], cache: KVCache) -> torch.Tensor:
        """Appends ``ids`` and gives the logits after the last one, (head rows,) float32."""
        last = max(0, len(ids) - PREFILL_CHUNK)
        self.prefill(ids[:last], cache)
        return self.head(self.forward(ids[last:], cache)[-1:])[0]

    def prefill(self, ids: Sequence[int], cache: KVCache, stop: Stop | None = None) -> None:
        """Appends ``ids`` chunk by chunk, computing no logits, until ``stop`` says so."""
        for start in range(0, len(ids), PREFILL_CHUNK):
            if stop is not None and stop():
                return
            self.forward(ids[start : start + PREFILL_CHUNK], cache)

    def _mask(self, rows: int, start: int, group: int) -> torch.Tensor:
        """Additive causal mask (queries, keys): row i, ``group`` queries, sees the cache and rows up to i.

        Queries that only fill a block see everything.
        """
        keys = -(-(start + rows) // KEY_BLOCK) * KEY_BLOCK
        queries = max(2, rows * group)
        if queries > QUERY_BLOCK:
            queries = -(-queries // QUERY_BLOCK) * QUERY_BLOCK
        mask = torch.zeros(queries, keys)
        unseen = torch.arange(keys) > torch.arange(start, start + rows).repeat_interleave(group)[:, None]
        mask[: rows * group].masked_fill_(unseen, float("-inf"))
        return mask
