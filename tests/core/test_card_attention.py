"""Attention as a card runs it: no mask in memory, and the same as with one."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn.attention import bias

from core.bench import fake_pairs
from core.bench.fake_card import CUDA, FakeCard
from core.models.card_attention import Attention
from core.models.kv_cache import DecoderShape, KVCache
from core.pairs.catalogue import CATALOGUE
from tests.core.models_on_disk import VOCABULARY
from tests.core.test_decoder import KINDS, family, lean

SIZE = 8
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}  # 16 bits are rounded more than once


@pytest.fixture(autouse=True)
def inference():
    with torch.inference_mode():
        yield


def shape_of(heads: int, kv_heads: int, layers: int = 2) -> DecoderShape:
    return DecoderShape(layers, heads * SIZE, heads, kv_heads, SIZE, 1e4, 1e-5, 1024)


def meant(asked: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int) -> torch.Tensor:
    """By products and a dense mask in float64; ``asked`` (kv_heads, rows, group, size), the others
    (positions, kv_heads, size). In a row the first query of each key head, then the second of each."""
    rows, end = asked.shape[1], start + asked.shape[1]
    keys, values = (some[:end].double().transpose(0, 1)[:, None] for some in (keys, values))
    scores = asked.double().transpose(1, 2) @ keys.transpose(2, 3) / SIZE**0.5  # (kv, group, rows, end)
    later = torch.arange(end) > start + torch.arange(rows)[:, None]
    weights = scores.masked_fill(later, -torch.inf).softmax(-1)
    return (weights @ values).permute(2, 1, 0, 3).reshape(rows, -1)


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (7, 1)])
def test_it_is_attention_with_the_mask(heads, kv_heads, dtype):
    """One row, rows of a verification, chunks of a prompt; from nothing, behind cached keys, over a block."""
    shape, generator = shape_of(heads, kv_heads), torch.Generator().manual_seed(heads)
    for rows, start in itertools.product((1, 2, 5, 17, 300), (0, 1, 255, 256, 300)):
        cache = KVCache(shape, "cpu", dtype)
        cache.reserve(start + rows)
        for part in cache.parts:  # what lies behind the rows must not be seen
            part.copy_(torch.randn(part.shape, generator=generator))
        attention = Attention(shape, rows, start, cache)
        for layer, held in enumerate(cache.of_layers(0, start + rows)):
            asked = torch.randn(kv_heads, rows, heads // kv_heads, SIZE, generator=generator).to(dtype)
            attention.asking.copy_(asked)
            expected = meant(asked, *held, start)
            found = attention.attend(layer)
            assert found.dtype == dtype and found.shape == (rows, heads * SIZE)
            torch.testing.assert_close(found.double(), expected, atol=CLOSE[dtype], rtol=0)


@pytest.mark.parametrize("kind", ["llama", "smollm2", "qwen3"])
def test_a_decoder_thinks_the_same_with_and_without_a_mask(kind, monkeypatch):
    assert kind in KINDS
    decoder = lean(family(kind))
    ids = torch.randint(VOCABULARY, (320,), generator=torch.Generator().manual_seed(3)).tolist()

    def read() -> list[torch.Tensor]:
        cache = decoder.new_cache()
        decoder.prefill(ids[:270], cache)
        found = [decoder.logits(ids[270:275], cache), decoder.logits(ids[275:276], cache)]
        cache.crop(200)
        return [*found, decoder.logits(ids[200:300], cache), decoder.logits(ids[:7], decoder.new_cache())]

    masked = read()
    monkeypatch.setattr(decoder, "_query_block", 1)  # as on a card
    monkeypatch.setattr(decoder, "_mask", None)
    for one, other in zip(read(), masked, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


KERNELS = {
    torch.bfloat16: "_scaled_dot_product_flash_attention",
    torch.float16: "_scaled_dot_product_flash_attention",
    torch.float32: "_efficient_attention_forward",
}


@pytest.mark.parametrize("dtype", KERNELS)
@pytest.mark.parametrize("name", fake_pairs.PAIRS)
def test_no_pass_on_a_card_makes_a_mask(name, dtype, monkeypatch):
    """A kernel without one runs rows behind cached keys: flash where there are 16 bits, else the
    memory-efficient one, to which torch's GQA would be unknown."""
    config = CATALOGUE[name].target_model.config | dict(num_hidden_layers=2)
    monkeypatch.setattr(bias.CausalBias, "_materialize", None)
    with FakeCard() as card:
        target = fake_pairs.lean(config, "none", dtype)
        found = {rows: fake_pairs.a_pass(card, target, rows).kinds for rows in (1, 5)}
        cache = target.new_cache()
        with card.counting() as prompt:
            target.prefill(fake_pairs.PROMPT, cache)
        keys = [key for rows in (1, 5) for key in Attention(target.shape, rows, 60, cache).keys]
    for kinds in (*found.values(), prompt.kinds):
        assert not {"full", "triu_", "tril", "repeat_interleave", "constant_pad_nd"} & {*kinds}
    assert found[1]["scaled_dot_product_attention"] == found[5][KERNELS[dtype]] == 2
    assert prompt.kinds["scaled_dot_product_attention"] == 2
    # Exactly the keys there are, none of them held twice.
    assert {key.shape[2] for key in keys} == {61, 65}
    assert all(key.device == CUDA and key.stride(0) == 0 for key in keys if key.shape[0] > 1)


def test_a_flash_kernel_leaves_rows_as_the_next_product_takes_them():
    """It lays out what it makes as the queries are, so that nothing is copied."""
    config = CATALOGUE["qwen2.5-7b"].target_model.config | dict(num_hidden_layers=2)
    with FakeCard() as card:
        target = fake_pairs.lean(config, "nf4")
        one, five = (fake_pairs.a_pass(card, target, rows) for rows in (1, 5))
    assert one.launches == five.launches and not one.kinds["clone"] + five.kinds["clone"]


def test_cudnns_attention_is_not_asked():
    """It makes a plan for each number of keys, and every step has one more."""
    torch.backends.cuda.enable_cudnn_sdp(True)
    with FakeCard():
        fake_pairs.lean(CATALOGUE["smollm2-1.7b"].target_model.config | dict(num_hidden_layers=1))
    assert not torch.backends.cuda.cudnn_sdp_enabled()
