"""A tiny target that keeps features, and random EAGLE and Medusa drafts for it as their files hold them.

The plain forward passes here follow ``core.pairs.draft_file`` word by word, position after position with
nothing kept, for the drafters to be held against.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F

from core.drafters.eagle import EagleDrafter
from core.drafters.medusa import MedusaDrafter
from core.models.decoder import Decoder
from core.models.linear.forms import maker
from core.pairs.pair import Pair
from tests.core.tiny import as_decoder, tiny_llama
from tests.core.toys import INFO, ToyTokenizer

LAYERS = 3  # of the target
KEPT = (0, 1, 2)  # the layers whose features it keeps; an EAGLE draft reads the first and the last
EAGLE_LAYERS, MEDUSA_LAYERS = (0, 2), (2,)
HEADS = 3
FLOAT = maker("float32")


def toy_target(seed: int = 0, vocabulary: int = 26, context: int = 300) -> Decoder:
    model = tiny_llama(seed, vocabulary=vocabulary, context=context, layers=LAYERS)
    model.lm_head.weight.data.mul_(3)  # opinions, not a uniform distribution
    target = as_decoder(model)
    target.feature_layers = KEPT
    return target


def eagle_tensors(target: Decoder, seed: int = 0, layers: int = 1) -> dict[str, torch.Tensor]:
    shape, generator = target.shape, torch.Generator().manual_seed(seed)
    hidden, mlp = shape.hidden, 48
    sizes = {
        "features": (hidden, len(EAGLE_LAYERS) * hidden),
        "token": (hidden, hidden),
        "state": (hidden, hidden),
        "proj": (hidden, hidden),
    }
    for layer in range(layers):
        sizes |= {
            f"layers.{layer}.self_attn.q_proj": (shape.heads * shape.head_size, hidden),
            f"layers.{layer}.self_attn.k_proj": (shape.kv_heads * shape.head_size, hidden),
            f"layers.{layer}.self_attn.v_proj": (shape.kv_heads * shape.head_size, hidden),
            f"layers.{layer}.self_attn.o_proj": (hidden, shape.heads * shape.head_size),
            f"layers.{layer}.mlp.gate_proj": (mlp, hidden),
            f"layers.{layer}.mlp.up_proj": (mlp, hidden),
            f"layers.{layer}.mlp.down_proj": (hidden, mlp),
        }
    tensors = {
        f"{name}.weight": torch.randn(size, generator=generator) * (1.5 / math.sqrt(size[1]))
        for name, size in sizes.items()
    }
    norms = ["norm.weight"]
    for layer in range(layers):
        norms += [f"layers.{layer}.{name}_layernorm.weight" for name in ("input", "post_attention")]
    return tensors | {name: 0.5 + torch.rand(hidden, generator=generator) for name in norms}


def medusa_tensors(target: Decoder, seed: int = 0, heads: int = HEADS) -> dict[str, torch.Tensor]:
    hidden, generator = target.shape.hidden, torch.Generator().manual_seed(seed)
    tensors = {}
    for head in range(heads):
        for name in ("block", "proj"):
            matrix = torch.randn(hidden, hidden, generator=generator) / math.sqrt(hidden)
            tensors[f"heads.{head}.{name}.weight"] = matrix
        tensors[f"heads.{head}.block.bias"] = torch.randn(hidden, generator=generator)
    return tensors


def rows_of(target: Decoder, head_ids: Sequence[int]) -> torch.Tensor:
    """Rows of the toy's head, whose product is a dense one."""
    return target.head.weight[list(head_ids)]


def toy_eagle(target: Decoder, head_ids: Sequence[int], seed: int = 0, layers: int = 1) -> EagleDrafter:
    tensors = eagle_tensors(target, seed, layers)
    ids = torch.tensor(head_ids)
    return EagleDrafter(target, tensors, EAGLE_LAYERS, ids, rows_of(target, head_ids), FLOAT, FLOAT)


def toy_medusa(target: Decoder, head_ids: Sequence[int], seed: int = 0) -> MedusaDrafter:
    tensors = medusa_tensors(target, seed)
    ids = torch.tensor(head_ids)
    return MedusaDrafter(target, tensors, MEDUSA_LAYERS, ids, rows_of(target, head_ids), FLOAT, FLOAT)


TOYS = {"eagle": toy_eagle, "medusa": toy_medusa}


def toy_drafts_pair(name: str, vocabulary: int = 26, seed: int = 0, head_ids=None, eos=None) -> Pair:
    """A pair of the toy target and a draft of kind ``name``."""
    target = toy_target(seed, vocabulary)
    return Pair(
        info=dataclasses.replace(INFO, drafter=name, context_length=target.context_length),
        tokenizer=ToyTokenizer(eos),
        target=target,
        drafter=TOYS[name](target, range(vocabulary) if head_ids is None else head_ids, seed + 1),
        end_ids=frozenset({eos} - {None}),
    )


def features_of(target: Decoder, ids: Sequence[int]) -> torch.Tensor:
    """The target's features of all positions, read at once: (len(ids), kinds, hidden)."""
    cache = target.new_cache()
    target.forward(ids, cache)
    return cache.features[: len(ids)]


def rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def plain_eagle(
    target: Decoder,
    tensors: Mapping[str, torch.Tensor],
    ids: Sequence[int],
    drafted: Sequence[int],
    head: torch.Tensor,
) -> torch.Tensor:
    """Logits (1 + len(drafted), n) after committed ``ids`` and after each of ``drafted``."""
    eps, hidden = target.shape.rms_eps, target.shape.hidden
    kinds = [KEPT.index(layer) for layer in EAGLE_LAYERS]
    features = features_of(target, ids[:-1]) if len(ids) > 1 else torch.zeros(0, len(KEPT), hidden)
    before = [torch.zeros(hidden)]
    before += [tensors["features.weight"] @ rms(f[kinds], eps).flatten() for f in features]
    inputs: list[torch.Tensor] = []
    logits = []
    for t, token in enumerate([*ids, *drafted]):
        embedded = target.embedding[token]
        inputs.append(tensors["token.weight"] @ embedded + tensors["state.weight"] @ rms(before[t], eps))
        if t >= len(ids) - 1:
            # The draft's rows before ``t`` stay as they were read: its layers are causal.
            y = _llama(target, tensors, torch.stack(inputs))[-1]
            before.append(y)
            logits.append(head @ (tensors["proj.weight"] @ (rms(y, eps) * tensors["norm.weight"])))
    return torch.stack(logits)


def _llama(target: Decoder, tensors: Mapping[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Llama layers over inputs (positions, hidden), as Hugging Face's modules compute them."""
    shape, rows = target.shape, len(x)
    half = shape.head_size // 2
    angles = torch.arange(rows)[:, None] * shape.rope_theta ** (-torch.arange(half) / half)
    cos, sin = angles.cos().repeat(1, 2)[:, None], angles.sin().repeat(1, 2)[:, None]

    def turned(heads: torch.Tensor) -> torch.Tensor:
        return heads * cos + torch.cat([-heads[..., half:], heads[..., :half]], -1) * sin

    for layer in range(1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("layers."))):
        w = {name.removeprefix(f"layers.{layer}."): tensor for name, tensor in tensors.items()}
        h = rms(x, shape.rms_eps) * w["input_layernorm.weight"]
        projected = (F.linear(h, w[f"self_attn.{n}_proj.weight"]) for n in "qkv")
        q, k, v = (heads.view(rows, -1, shape.head_size) for heads in projected)
        k, v = (a.repeat_interleave(shape.heads // shape.kv_heads, 1) for a in (turned(k), v))
        attended = F.scaled_dot_product_attention(
            turned(q).transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=True
        )
        x = x + F.linear(attended.transpose(0, 1).reshape(rows, -1), w["self_attn.o_proj.weight"])
        h = rms(x, shape.rms_eps) * w["post_attention_layernorm.weight"]
        gate, up = (F.linear(h, w[f"mlp.{n}_proj.weight"]) for n in ("gate", "up"))
        x = x + F.linear(F.silu(gate) * up, w["mlp.down_proj.weight"])
    return x


def plain_medusa(
    target: Decoder, tensors: Mapping[str, torch.Tensor], ids: Sequence[int], head: torch.Tensor
) -> torch.Tensor:
    """Logits (heads, n) for the tokens to follow committed ``ids``."""
    h = rms(features_of(target, ids[:-1])[-1, -1], target.shape.rms_eps)
    logits = []
    for index in range(HEADS):
        w = {name: tensors[f"heads.{index}.{name}"] for name in ("block.weight", "block.bias", "proj.weight")}
        z = h + F.silu(w["block.weight"] @ h + w["block.bias"])
        logits.append(head @ (w["proj.weight"] @ z))
    return torch.stack(logits)
