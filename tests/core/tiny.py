"""A tiny random Llama in float32, made by transformers, and the same weights in Redline's decoder."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from core.models import quantize
from core.models.decoder import Decoder, DecoderShape
from core.models.kv_cache import KVCache
from core.models.linear.forms import maker


def tiny_llama(seed: int, *, vocabulary: int = 61, context: int = 300, layers: int = 2) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        initializer_range=0.15,  # large enough for varied predictions
        attn_implementation="eager",
    )
    return LlamaForCausalLM(config).eval()


def held(cache: KVCache, end: int | None = None) -> torch.Tensor:
    """Its keys and values up to a position, (layers, 2, positions, kv_heads, head_size)."""
    return torch.stack(cache.of_layers(0, cache.parts[0].shape[2] if end is None else end))


def as_decoder(model: LlamaForCausalLM, form: str = "float32", **how) -> Decoder:
    """``form``: one of ``core.models.linear.forms``, or ``int8``: as it runs on this machine."""
    tensors = model.state_dict()
    make = maker(quantize.kernel(form) if form == "int8" else form)
    return Decoder.from_tensors(
        DecoderShape.from_config(model.config.to_dict()),
        tensors,
        make,
        tensors["model.embed_tokens.weight"],
        make(tensors["lm_head.weight"]),
        **how,
    )
