"""A rotated model is the same model: bit for bit it is not, but nothing that is computed from it moves."""

from __future__ import annotations

import pytest
import torch

from core.models.decoder import Decoder, DecoderShape
from core.models.linear.forms import maker
from core.models.rotation import Rotation
from tests.core.models_on_disk import make_model
from tests.core.tiny import tiny_llama

IDS = [3, 17, 4, 9, 1, 1, 30, 8, 22]
FLOAT = maker("float32")


def both(model) -> tuple[Decoder, Decoder]:
    """The model as it is and rotated, in float32, keeping features of its first and its last layer."""
    tensors, shape = model.state_dict(), DecoderShape.from_config(model.config.to_dict())
    embedding, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    rotation = Rotation.of(shape.head_size, tensors["model.norm.weight"])
    plain = Decoder.from_tensors(shape, tensors, FLOAT, embedding, FLOAT(head))
    turned = Decoder.from_tensors(
        shape, tensors, FLOAT, embedding, FLOAT(rotation.head(head)), rotation=rotation
    )
    for decoder in (plain, turned):
        decoder.feature_layers = (0, shape.layers - 1)
    return plain, turned


def with_norms(model):
    """A model whose norms weigh features differently, as trained ones do: else folding would not show."""
    generator = torch.Generator().manual_seed(5)
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.data = 0.5 + torch.rand(weight.shape, generator=generator)
    return model


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_nothing_that_a_model_says_changes(family):
    """With biases on queries, keys and values (qwen2) and norms of queries and keys (qwen3)."""
    plain, turned = both(with_norms(make_model(family, 1, tie_word_embeddings=False)))
    caches = plain.new_cache(), turned.new_cache()
    for part in (IDS[:5], IDS[5:]):
        one, other = (
            decoder.logits(part, cache) for decoder, cache in zip((plain, turned), caches, strict=True)
        )
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    features = [cache.features[: len(IDS)] for cache in caches]
    torch.testing.assert_close(*features, rtol=1e-3, atol=1e-4)
    assert features[0][:, 0].std() > 1e-3


def test_fewer_layers_end_in_the_same_norm_and_head():
    plain, turned = both(with_norms(tiny_llama(1)))
    logits = [d.head(d.forward(IDS, d.new_cache(), layers=1)) for d in (plain, turned)]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)
    first = [d.beginning(1) for d in (plain, turned)]
    torch.testing.assert_close(first[0].logits(IDS, first[0].new_cache()), logits[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(first[1].logits(IDS, first[1].new_cache()), logits[0], rtol=1e-4, atol=1e-4)


def test_it_is_orthogonal_and_spreads_what_is_large():
    rotation = Rotation.of(64, torch.ones(576))
    for matrix in (rotation.stream, rotation.values):
        torch.testing.assert_close(matrix @ matrix.T, torch.eye(len(matrix)), atol=1e-5, rtol=0)
    row = torch.zeros(1, 576)
    row[0, 17] = 500.0
    turned = row @ rotation.stream
    assert turned.abs().max() < 100 and torch.allclose(rotation.back(turned), row, atol=1e-3)
    again = Rotation.of(64, torch.ones(576))
    assert torch.equal(again.stream, rotation.stream) and torch.equal(again.values, rotation.values)


def test_an_embedding_keeps_its_dtype():
    rotation = Rotation.of(64, torch.ones(64))
    assert rotation.embedding(torch.randn(5, 64).bfloat16()).dtype == torch.bfloat16
