"""The sizes of models' products: those of the model that is loaded, told from its config."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from transformers import AutoConfig, GPT2Config, LlamaConfig

from core.models.decoder import Decoder
from core.models.linear.findings import Sizes
from core.models.linear.products import DenseLinear
from core.models.sizes import EMBEDDED, counted, sizes_of
from tests.core.tiny import tiny_llama


def test_the_sizes_are_those_of_the_embedded_target(embedded_folder):
    assert counted(AutoConfig.from_pretrained(embedded_folder)) == EMBEDDED


def test_they_are_those_of_the_products_that_a_decoder_makes():
    model = tiny_llama(1, vocabulary=64)
    found = counted(model.config)
    decoder = Decoder.from_model(model, lambda weight: DenseLinear(weight))
    assert found.layers == tuple(product.shape for product in decoder.layers[0].products)
    assert (found.count, found.head) == (len(decoder.layers), decoder.head.shape)
    assert found.attention == (4, 2, 8)


def test_another_familys_names_are_known():
    """And sizes that int4 takes: 257 ids are no multiple of 16."""
    found = counted(GPT2Config(n_embd=32, n_head=4, n_layer=3, vocab_size=257))
    assert found == Sizes(((96, 32), (32, 32), (256, 32), (32, 128)), 3, (272, 32), (4, 4, 8))


@pytest.mark.parametrize("changes", [dict(hidden_size=None), dict(num_attention_heads=[4, 8])])
def test_where_a_config_says_too_little_the_embedded_models_stand_for_it(changes):
    told = dict(LlamaConfig().to_dict(), **changes)
    text = SimpleNamespace(**told)
    assert sizes_of(SimpleNamespace(get_text_config=lambda decoder: text)) == EMBEDDED


def test_a_smaller_model_takes_the_embedded_models():
    """Its evidence would be of calls: dense products would win, and int8 be refused who asks for it."""
    larger = LlamaConfig(
        hidden_size=960, intermediate_size=2560, num_attention_heads=15, num_hidden_layers=32
    )
    assert sizes_of(larger) == counted(larger) != EMBEDDED
    assert sizes_of(tiny_llama(1).config) == EMBEDDED != counted(tiny_llama(1).config)
