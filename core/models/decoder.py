"""A lean decoder for the Llama family: few operations a layer, static KV buffers, rollback by a counter.

``Decoder`` holds weights and no state; ``KVCache`` holds the keys and values of one sequence and the
number of ids they stand for. Rolling back is ``cache.crop(n)``: what lies behind is overwritten
by the next pass. Everything is on the device of the embedding. Activations are float32 on a CPU and of the
embedding's dtype elsewhere; the matrix products take whatever form they were given (``core.models.linear``).
Keys and values, and so attention, are in the activations' dtype unless another was asked for.

Runs Llama (SmolLM2 is one), Mistral, Qwen2 and Qwen3; ``lean_reason`` says of a config what is in the way.

Rotary embedding is one complex product: the rows of the query and key projections are reordered at
load so that the two halves Hugging Face rotates lie side by side (Su et al. 2021, arXiv:2104.09864;
attention scores do not change when queries and keys are reordered alike). It is computed in float32.
With a ``Rotation`` (``core.models.rotation``) the residual stream runs rotated; nothing outside sees that.

Knows one sequence at a time, no batch, no sampling, no tokenizer. Source of the architecture:
Touvron et al. 2023 (arXiv:2302.13971) and the classes of ``transformers`` for these families, against which
``tests/core/test_decoder.py`` compares it. On a CPU, small operations are a good part of a pass, so their
number matters: docs/LOG.md says what was measured.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from core.models.base import PREFILL_CHUNK, Stop, chunks
from core.models.card_attention import Attention, prefer_plain_kernels
from core.models.key_blocks import KEY_BLOCK
from core.models.kv_cache import DecoderShape, KVCache
from core.models.linear import Linear, Scaled
from core.models.memory import prompt_rows, row_bytes
from core.models.rotation import Rotation
from core.models.tree_walk import Walk, depths, families, show_ancestors

# Attention runs over whole blocks of queries, as of keys (``KEY_BLOCK``), where a product with few rows would
# be left to another kernel (measured for head sizes of 16 to 128 with 1 to 8 query heads a key head, see
# docs/LOG.md).
QUERY_BLOCK = 8
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")  # model types of Hugging Face configs
FIXED_ROPES = ("default", "linear", "llama3", "yarn")  # their frequencies do not depend on the length

Make = Callable[[torch.Tensor], Linear]  # turns a weight matrix (out, in) into a product


def lean_reason(config: Mapping) -> str | None:
    """What keeps a model of this ``config.json`` from running here, in a few words; None if nothing does."""
    if config.get("model_type") not in FAMILIES:
        return f"{config.get('model_type')} is another architecture"
    if config.get("hidden_act", "silu") != "silu":
        return f"its activation is {config['hidden_act']}"
    if config.get("mlp_bias"):
        return "its MLP has biases"
    if config.get("attention_bias"):
        return "its attention's output has a bias"
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    layer_types = set(config.get("layer_types") or ["full_attention"])
    if layer_types != {"full_attention"} or (window and window < config["max_position_embeddings"]):
        return "its attention looks back over a window"
    rope = config.get("rope_parameters") or {}
    kind = rope.get("rope_type", "default")
    nested = any(isinstance(value, Mapping) for value in rope.values())
    # Frequencies that change at a length do not where the model ends there.
    fixed = kind == "longrope" and (
        rope.get("original_max_position_embeddings", 0) >= config["max_position_embeddings"]
    )
    partial = rope.get("partial_rotary_factor", 1) not in (None, 1)
    if nested or partial or (kind not in FIXED_ROPES and not fixed):
        return f"its rotary embedding ({'one a kind of layer' if nested else kind}) is another"
    return None


@dataclass(frozen=True)
class Layer:
    """``qkv_bias`` (rows of qkv,) and ``qk_norm``, weights of the norms of queries and keys (their heads,
    head_size), are float32, and None where a family has no such thing. The other norms are None where the
    products behind them have taken their weights over."""

    input_norm: torch.Tensor | None
    qkv: Linear
    out: Linear
    mlp_norm: torch.Tensor | None
    gate_up: Linear
    down: Linear
    qkv_bias: torch.Tensor | None = None
    qk_norm: torch.Tensor | None = None

    @property
    def products(self) -> tuple[Linear, ...]:
        return self.qkv, self.out, self.gate_up, self.down


def _pair_halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorders a projection's rows (or a bias) head by head: 0, n, 1, n + 1, ... for heads of 2n rows."""
    paired = weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).transpose(1, 2)
    return paired.reshape(weight.shape)


def _by_group(weight: torch.Tensor, kv_heads: int, group: int) -> torch.Tensor:
    """Reorders the inputs of an output projection from heads in their order to the order attention leaves.

    That is, for a position: one query of each key head, then the next of each.
    """
    parted = weight.reshape(len(weight), kv_heads, group, -1).transpose(1, 2)
    return parted.reshape(weight.shape)


def pack_layer(
    shape: DecoderShape,
    tensors: Mapping[str, torch.Tensor],
    make: Make,
    dtype: torch.dtype,
    rotation: Rotation | None = None,
    make_down: Make | None = None,
) -> Layer:
    """From a layer's tensors under Hugging Face's names; norms are kept in ``dtype``."""
    heads, kv_heads = shape.heads, shape.kv_heads
    norms: list[torch.Tensor | None] = [
        tensors[f"{name}_layernorm.weight"].to(dtype) for name in ("input", "post_attention")
    ]
    if rotation is not None:
        tensors, norms = rotation.layer(tensors, kv_heads), [None, None]

    def qkv(kind: str) -> torch.Tensor:
        q, k, v = (tensors[f"self_attn.{name}_proj.{kind}"] for name in "qkv")
        return torch.cat([_pair_halves(q, heads), _pair_halves(k, kv_heads), v])

    qkv_bias = qk_norm = None
    if "self_attn.q_proj.bias" in tensors:
        qkv_bias = qkv("bias").float()
    if "self_attn.q_norm.weight" in tensors:
        q, k = (_pair_halves(tensors[f"self_attn.{name}_norm.weight"].float(), 1) for name in "qk")
        qk_norm = torch.cat([q.expand(heads, -1), k.expand(kv_heads, -1)])
    return Layer(
        norms[0],
        make(qkv("weight")),
        make(_by_group(tensors["self_attn.o_proj.weight"], kv_heads, heads // kv_heads)),
        norms[1],
        make(torch.cat([tensors["mlp.gate_proj.weight"], tensors["mlp.up_proj.weight"]])),
        (make_down or make)(tensors["mlp.down_proj.weight"]),
        qkv_bias,
        qk_norm,
    )


def _add(x: torch.Tensor, product: Scaled) -> None:
    """Adds what a product's ``unscaled`` gave to ``x``, in place."""
    y, scale = product
    x.add_(y) if scale is None else x.addcmul_(y, scale)


def _activations(embedding: torch.Tensor) -> torch.dtype:
    return torch.float32 if embedding.device.type == "cpu" else embedding.dtype


class Decoder:
    """Layers and final norm of a Llama-like model. Token embedding and head are given, as they may be shared.

    ``embedding`` is (vocabulary, hidden); ``head`` takes (rows, hidden) to (rows, logits), as many as
    the embedding has rows unless ``vocabulary`` says otherwise. ``frequencies`` (head_size / 2,) are those of
    the rotary embedding and ``rope_scale`` its factor, where they are not the shape's plain ones. With a
    ``rotation``, layers and head are those of the rotated stream, and ``norm`` is not looked at.
    ``cache_dtype`` is that of keys and values.
    ``feature_layers`` are the layers whose output caches made from now on keep as ``KVCache.features``, in
    this order; the last layer's is taken after the final norm.
    """

    def __init__(
        self,
        shape: DecoderShape,
        embedding: torch.Tensor,
        layers: Sequence[Layer],
        norm: torch.Tensor,
        head: Callable[[torch.Tensor], torch.Tensor],
        vocabulary: int | None = None,
        frequencies: torch.Tensor | None = None,
        rope_scale: float = 1.0,
        rotation: Rotation | None = None,
        cache_dtype: torch.dtype | None = None,
    ):
        self.shape = shape
        self.device = embedding.device
        self.dtype = _activations(embedding)
        self.embedding = embedding
        self.rotation = rotation
        self._entering = embedding if rotation is None else rotation.embedding(embedding)
        self.layers = list(layers)
        self.norm = None if rotation is not None else norm.to(self.dtype)
        self.head = head
        self.context_length = shape.context_length
        self.vocabulary = len(embedding) if vocabulary is None else vocabulary
        self.readable_ids = len(embedding)
        self.feature_layers: tuple[int, ...] = ()
        if frequencies is None:
            frequencies = shape.rope_theta ** (
                -torch.arange(0, shape.head_size, 2).double() / shape.head_size
            )
        angles = torch.arange(shape.context_length).to(frequencies)[:, None] * frequencies
        turns = torch.polar(torch.full_like(angles, rope_scale), angles).to(torch.complex64)
        self.rotations = turns[:, None, :].to(self.device)
        self._eps = torch.tensor(shape.rms_eps, device=self.device)
        self.cache_dtype = self.dtype if cache_dtype is None else cache_dtype
        self._query_block = QUERY_BLOCK if self.device.type == "cpu" else 1
        if self.device.type == "cuda":
            prefer_plain_kernels()

    @classmethod
    def from_tensors(
        cls,
        shape: DecoderShape,
        tensors: Mapping[str, torch.Tensor],
        make: Make,
        embedding: torch.Tensor,
        head: Callable[[torch.Tensor], torch.Tensor],
        prefix: str = "model.",
        vocabulary: int | None = None,
        rotation: Rotation | None = None,
        make_down: Make | None = None,
        cache_dtype: torch.dtype | None = None,
    ) -> Decoder:
        """From tensors under Hugging Face's names, all on the embedding's device.

        With a ``rotation``, which has turned the ``head`` already, layers are turned here. ``make_down``
        makes the product before which nothing is rotated, where it is not to be made like the others.
        """
        dtype, layers = _activations(embedding), []
        for index in range(shape.layers):
            start = f"{prefix}layers.{index}."
            own = {name[len(start) :]: value for name, value in tensors.items() if name.startswith(start)}
            layers.append(pack_layer(shape, own, make, dtype, rotation, make_down))
        return cls(
            shape,
            embedding,
            layers,
            tensors[prefix + "norm.weight"],
            head,
            vocabulary,
            rotation=rotation,
            cache_dtype=cache_dtype,
        )

    @classmethod
    @torch.no_grad()
    def from_model(
        cls,
        model,
        make: Make,
        make_head: Make | None = None,
    ) -> Decoder:
        """From a causal language model of transformers for whose config ``lean_reason`` is None, where it is.

        The model is used up: each of its layers is given back as soon as it is packed, so that memory holds
        little more than the larger of the two. Models that are loaded come by ``core.models.by_layer``, which
        needs less.
        """
        embedding, head = (m.weight for m in (model.get_input_embeddings(), model.get_output_embeddings()))
        tied, embedding = head is embedding, embedding.detach()
        head = embedding if tied else head.detach()
        shape, inner = DecoderShape.from_config(model.config.to_dict()), model.model
        dtype, layers = _activations(embedding), []
        for index, module in enumerate(inner.layers):
            layers.append(pack_layer(shape, module.state_dict(), make, dtype))
            inner.layers[index] = torch.nn.Identity()
        return cls.around(model, embedding, layers, (make_head or make)(head), len(head))

    @classmethod
    def around(
        cls,
        model,
        embedding: torch.Tensor,
        layers: Sequence[Layer],
        head: Linear,
        vocabulary: int,
        cache_dtype: torch.dtype | None = None,
    ) -> Decoder:
        """From packed layers and the final norm and rotary embedding of a model of transformers."""
        inner = model.model
        return cls(
            DecoderShape.from_config(model.config.to_dict()),
            embedding,
            layers,
            inner.norm.weight.detach(),
            head,
            vocabulary,
            frequencies=inner.rotary_emb.inv_freq.float().cpu(),
            rope_scale=inner.rotary_emb.attention_scaling,
            cache_dtype=cache_dtype,
        )

    def beginning(self, layers: int) -> Decoder:
        """The model with its first ``layers`` alone, and final norm and head behind them."""
        part = copy.copy(self)
        part.shape, part.layers = replace(self.shape, layers=layers), self.layers[:layers]
        part.feature_layers = ()
        return part

    def new_cache(self) -> KVCache:
        return KVCache(self.shape, self.device, self.cache_dtype, len(self.feature_layers))

    def forward(
        self,
        ids: Sequence[int] | torch.Tensor,
        cache: KVCache,
        parents: Sequence[int] | None = None,
        layers: int | None = None,
        many: bool = False,
        inputs: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Appends ``ids`` to ``cache`` and gives their final hidden states, (len(ids), hidden).

        The caller keeps ``cache.length + len(ids)`` within the shape's ``context_length``. With ``parents``
        the ids are a tree: each follows the row of that number, -1 what ``cache`` held before, and sees its
        ancestors alone; ``cache.keep`` then brings a branch together. ``layers`` is how many to run, all
        by default; the final norm is applied whatever their number. ``many`` takes the products for many
        rows, at most ``prompt_chunk``, whose last bits may be others. ``inputs`` (len(ids), hidden), which
        are used up, go in instead of the ids' embeddings.
        """
        shape, rows, start = self.shape, len(ids), cache.length
        first = KEY_BLOCK - start % KEY_BLOCK
        if rows > first and parents is None and self._query_block > 1:
            # A row attends over the block that it ends in, whatever rows come behind it: sums over more keys,
            # though masked, may come out otherwise. On a card nothing is bit-equal anyway.
            parts = (slice(0, first), slice(first, rows))
            made = [
                self.forward(ids[part], cache, None, layers, many, inputs if inputs is None else inputs[part])
                for part in parts
            ]
            return torch.cat(made)
        heads, kv_heads, size = shape.heads, shape.kv_heads, shape.head_size
        group, rotating = heads // kv_heads, heads + kv_heads
        end, queries = start + rows, rows * group
        walk = mask = None  # a chain on a card needs neither: kernels hide there what comes later
        if parents is not None and self._query_block > 1:
            walk = Walk(parents, start)
            ids = torch.as_tensor(ids)[walk.order]
            mask = self._mask(1, start, group)
        elif parents is not None or self._query_block > 1:
            mask = self._mask(rows, start, group, parents)
        cache.reserve(end)
        if parents is None:
            rotation = self.rotations[start:end]
        elif walk is not None:
            rotation = self.rotations[walk.positions]
        else:  # by views and one copy: a card would wait for indices
            at = depths(parents, start)
            turns = [self.rotations[at[a] : at[a] + 1].expand(b - a, -1, -1) for a, b in families(parents)]
            rotation = torch.cat(turns)
        if inputs is None:
            x = F.embedding(torch.as_tensor(ids, device=self.device), self._entering).to(self.dtype)
        else:
            x = inputs.to(self.dtype)
        # Views are made once: one at a time in each layer they would cost as much as the smaller products.
        if mask is None:
            attention = Attention(shape, rows, start, cache)
            views = cache.of_layers(start, end), attention.keys, attention.values
        else:
            views = cache.of_layers(start, end), *cache.seen(mask.shape[1])
        # Every layer's queries, keys and values in turn.
        qkv = torch.empty(rows, (rotating + kv_heads) * size, device=self.device)
        by_head = qkv.view(rows, rotating + kv_heads, size)
        turning = by_head[:, :rotating]
        pairs = torch.view_as_complex(turning.view(rows, rotating, size // 2, 2))
        new = by_head[:, heads:].view(rows, 2, kv_heads, size).transpose(0, 1)
        # The query heads that share a key head become rows of one product; zeros fill up their block.
        flat = (rows, heads * size), (heads * size, 1)
        asked = by_head[:, :heads].view(rows, kv_heads, group, size).transpose(0, 1)
        if mask is None:
            asking = attention.asking
        elif walk is None:
            query = torch.zeros(1, kv_heads, len(mask), size, device=self.device, dtype=self.cache_dtype)
            asking = query[0, :, :queries].view(kv_heads, rows, group, size)
        else:
            walk.begin(cache, new, asked, lambda n, behind: self._mask(n, behind, group))
        running = self.layers if layers is None else self.layers[:layers]
        kept = {layer: kind for kind, layer in enumerate(self.feature_layers)} if layers is None else {}
        for index, (layer, place, keys, values) in enumerate(zip(running, *views, strict=layers is None)):
            y, scale = layer.qkv.unscaled(self._normed(x, layer.input_norm), many)
            qkv.copy_(y) if scale is None else torch.mul(y, scale, out=qkv)
            if layer.qkv_bias is not None:
                qkv.add_(layer.qkv_bias)
            if layer.qk_norm is not None:
                turning.copy_(self._normed(turning, layer.qk_norm))
            pairs.mul_(rotation)
            # As ``out`` takes it, position by position: see ``_by_group``.
            if walk is not None:
                attended = walk.attend(index)
                place.copy_(new[:, walk.back])
            else:
                place.copy_(new)
                asking.copy_(asked)
                if mask is None:
                    attended = attention.attend(index)
                else:
                    attended = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
                    attended = attended.transpose(1, 2).contiguous().as_strided(*flat)
            _add(x, layer.out.unscaled(attended, many))
            y, scale = layer.gate_up.unscaled(self._normed(x, layer.mlp_norm), many)
            gate, up = (y if scale is None else y.mul_(scale)).unsafe_split(y.shape[1] // 2, 1)
            _add(x, layer.down.unscaled(F.silu(gate).mul_(up), many))
            if index in kept and index < len(self.layers) - 1:
                made = self._turned_back(x)
                cache.features[start:end, kept[index]] = made if walk is None else made[walk.back]
        cache.length = end
        x = self._normed(x, self.norm)
        if walk is not None:
            x = x[walk.back]
        if len(self.layers) - 1 in kept:
            feature = self._turned_back(x)
            if self.rotation is not None:
                feature.mul_(self.rotation.norm)
            cache.features[start:end, kept[len(self.layers) - 1]] = feature
        return x

    def _turned_back(self, x: torch.Tensor) -> torch.Tensor:
        """Rows of the residual stream as the model has them."""
        return x if self.rotation is None else self.rotation.back(x)

    def _normed(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """RMS norm over the last dimension. ``weight`` is as wide, or has the shape of a row of ``x``, or
        there is none."""
        size = x.shape[-1]
        if x.is_cuda:
            if weight is None or weight.dim() == 1:
                return F.rms_norm(x, (size,), weight, self.shape.rms_eps)
            return F.rms_norm(x, (size,), None, self.shape.rms_eps).mul_(weight)
        # On a CPU torch's own is nine operations.
        root = torch.linalg.vector_norm(x, 2, -1, True)
        root = torch.addcmul(self._eps, root, root, value=1 / size).sqrt_()
        normed = x.div(root)
        return normed if weight is None else normed.mul_(weight)

    def device_logits(self, ids: torch.Tensor, cache: KVCache) -> torch.Tensor:
        """Appends ``ids`` and gives the logits after each, (len(ids), head rows) float32, on the device."""
        return self.head(self.forward(ids, cache)).float()

    def logits(self, ids: Sequence[int], cache: KVCache) -> torch.Tensor:
        """Appends ``ids`` and gives the logits after each, (len(ids), head rows) float32 on the CPU."""
        return self.device_logits(ids, cache).cpu()

    def device_tree_logits(self, ids: torch.Tensor, parents: Sequence[int], cache: KVCache) -> torch.Tensor:
        """``device_logits`` of a tree, whose ``parents`` are those of ``forward``."""
        return self.head(self.forward(ids, cache, parents)).float()

    def tree_logits(self, ids: Sequence[int], parents: Sequence[int], cache: KVCache) -> torch.Tensor:
        """``logits`` of a tree, whose ``parents`` are those of ``forward``."""
        return self.head(self.forward(ids, cache, parents)).float().cpu()

    def tree_room(self, cache: KVCache) -> int:
        """How many rows a tree behind ``cache`` may have: those of the context that is left."""
        return self.context_length - cache.length

    def next_logits(self, ids: Sequence[int], cache: KVCache) -> torch.Tensor:
        """Appends ``ids`` and gives the logits after the last one, (head rows,) float32 on the CPU."""
        last = max(0, len(ids) - PREFILL_CHUNK)
        self.prefill(ids[:last], cache)
        return self.head(self.forward(ids[last:], cache)[-1:])[0].float().cpu()

    def prefill(self, ids: Sequence[int], cache: KVCache, stop: Stop | None = None) -> None:
        """Appends ``ids`` chunk by chunk, computing no logits, until ``stop`` says so."""
        cache.reserve(cache.length + len(ids))  # at once: step by step it would be copied several times
        for chunk in chunks(ids, stop, cache.length, self.prompt_chunk(len(ids))):
            self.forward(chunk, cache, many=True)

    def prompt_chunk(self, count: int) -> int:
        """How many rows of ``count`` ids a pass reads: on a card as its memory allows, on a processor always
        the same, for there blocks of keys decide which rows are bit-equal."""
        if count <= PREFILL_CHUNK or self._query_block > 1:
            return PREFILL_CHUNK
        shape, gate_up = self.shape, self.layers[0].gate_up
        queries, keys = (heads * shape.head_size for heads in (shape.heads, shape.kv_heads))
        widths = shape.hidden, queries, keys, gate_up.shape[0] // 2
        return prompt_rows(row_bytes(*widths, gate_up.form, self.dtype.itemsize))

    def _mask(self, rows: int, start: int, group: int, parents: Sequence[int] | None = None) -> torch.Tensor:
        """Additive causal mask (rows * group, keys): row i sees the cache and the rows up to i, or of a tree
        those among them that are its ancestors.

        Rows that only fill a block of queries follow; they see everything and are thrown away.
        """
        keys = -(-(start + rows) // KEY_BLOCK) * KEY_BLOCK
        unseen = torch.full((rows, keys), float("-inf"), device=self.device, dtype=self.cache_dtype)
        if parents is None:
            mask = unseen.triu_(start + 1)
        else:
            mask = unseen
            show_ancestors(mask, parents, start)
        mask = mask.repeat_interleave(group, 0)
        surplus = -len(mask) % self._query_block
        return F.pad(mask, (0, 0, 0, surplus)) if surplus else mask
