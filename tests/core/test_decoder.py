"""The lean decoder against transformers, cached against uncached, many rows against one."""

from __future__ import annotations

import random

import pytest
import torch

from core.drafters.model import ModelDrafter
from core.engine import Engine
from core.models.decoder import KEY_BLOCK, PREFILL_CHUNK
from core.models.pair import Pair
from core.records import Fate, Settings
from tests.core.tiny import as_decoder, tiny_llama
from tests.core.toys import INFO, ToyTokenizer

IDS = random.Random(0).choices(range(61), k=KEY_BLOCK + 30)


@pytest.fixture(autouse=True)
def inference():
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def model():
    return tiny_llama(1)


def fresh(decoder, ids):
    """Logits after each of ``ids``, from an empty cache in one pass."""
    return decoder.logits(ids, decoder.new_cache())


def test_parity_with_transformers(model):
    expected = model(torch.tensor([IDS])).logits[0]
    decoder, cache = as_decoder(model), None
    torch.testing.assert_close(fresh(decoder, IDS), expected, atol=1e-4, rtol=0)
    cache = decoder.new_cache()
    decoder.prefill(IDS[:270], cache)  # more than one chunk and more than one block of keys
    assert PREFILL_CHUNK < 270 and cache.length == 270
    torch.testing.assert_close(decoder.logits(IDS[270:], cache), expected[270:], atol=1e-4, rtol=0)
    assert decoder.next_logits([3, 4], decoder.new_cache()).shape == (61,)


@pytest.mark.parametrize("start", [5, KEY_BLOCK - 3])
def test_rows_equal_one_row_passes_bit_for_bit(start):
    # As the target runs; dense products promise no such thing.
    decoder = as_decoder(tiny_llama(1, vocabulary=64), "int4")
    cache = decoder.new_cache()
    decoder.prefill(IDS[:start], cache)
    single = torch.cat([decoder.logits([i], cache) for i in IDS[start : start + 17]])
    for rows in range(1, 18):
        cache.crop(start)
        assert torch.equal(decoder.logits(IDS[start : start + rows], cache), single[:rows]), rows


def test_rollback_is_a_counter(model):
    decoder = as_decoder(model)
    cache = decoder.new_cache()
    decoder.prefill([7, 8, 9], cache)
    decoder.logits([50, 51, 52], cache)  # drafts that did not stand
    cache.crop(4)
    torch.testing.assert_close(
        decoder.logits([11, 12], cache), fresh(decoder, [7, 8, 9, 50, 11, 12])[4:], atol=1e-5, rtol=0
    )


def pair_of(target, draft) -> Pair:
    return Pair(INFO, ToyTokenizerOfAny(), target, ModelDrafter(draft), frozenset())


class ToyTokenizerOfAny(ToyTokenizer):
    def decode(self, ids, **_):
        return "".join(chr(0x4E00 + i) for i in ids)


@pytest.mark.parametrize(
    "temperature, top_k, top_p, min_p, penalty",
    [
        (0, 0, 1, 0, 1),
        (1.0, 0, 1, 0, 1),
        (0.6, 0, 1, 0, 1),
        (1.5, 9, 0.8, 0, 1),
        (1.0, 0, 1, 0.1, 1),
        (0, 0, 1, 0, 1.3),
        (1.2, 30, 0.9, 0.05, 1.5),
    ],
)
def test_a_draft_that_is_the_target_is_always_accepted(model, temperature, top_k, top_p, min_p, penalty):
    """SD-11 (a); and q is filtered as p is, or they would differ here."""
    pair = pair_of(as_decoder(model), as_decoder(model))
    settings = Settings(
        temperature, top_k, top_p, min_p, penalty, num_draft_tokens=4, max_new_tokens=64, seed=1
    )
    rounds = list(Engine(pair).generate(IDS[:7], settings))
    fates = [t.fate for r in rounds for t in r.tokens]
    assert set(fates) <= {Fate.ACCEPTED, Fate.BONUS, Fate.PLAIN}
    assert fates.count(Fate.ACCEPTED) == sum(r.num_draft_tokens for r in rounds)


@pytest.mark.parametrize("draft_seed, draft_noise", [(2, None), (1, 0.02)])
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_caches_agree_with_fresh_passes_after_every_round(model, draft_seed, draft_noise, temperature):
    """SD-11 (b), (c): whatever was accepted or rejected, and while K changes, both caches stay true."""
    other = tiny_llama(draft_seed)
    if draft_noise:  # close to the target, so that long runs are accepted
        for weight in other.parameters():
            weight.add_(draft_noise * torch.randn(weight.shape, generator=torch.Generator().manual_seed(3)))
    target, draft = as_decoder(model), as_decoder(other)
    pair = pair_of(target, draft)
    settings = Settings(temperature=temperature, num_draft_tokens=4, max_new_tokens=60, seed=2)
    engine = Engine(pair)
    generation = engine.generate(IDS[:7], settings)
    ids, fates = list(IDS[:7]), set()
    for number, round_ in enumerate(generation):
        ids += [t.id for t in round_.tokens if t.emitted]
        fates |= {t.fate for t in round_.tokens}
        kept = generation._loop._caches
        for decoder, cache in ((target, kept.cache), (draft, kept.state)):
            length = cache.length
            assert length <= len(ids) - 1
            probe = decoder.logits(ids[length:], cache)
            torch.testing.assert_close(probe, fresh(decoder, ids)[length:], atol=1e-5, rtol=0)
            cache.crop(length)
        if number % 5 == 2:  # a round without drafts in between
            generation._loop._drafter = None
        elif number % 5 == 3:
            generation._loop._drafter = pair.drafter
    assert {Fate.REJECTED, Fate.PLAIN} <= fates
    assert draft_noise is None or {Fate.ACCEPTED, Fate.BONUS} <= fates


def test_speculative_equals_plain_at_temperature_zero(model):
    pair = pair_of(as_decoder(model), as_decoder(tiny_llama(1, layers=1)))
    engine = Engine(pair)
    replies = []
    for k in (0, 1, 4, 16):
        generation = engine.generate(
            IDS[:9], Settings(temperature=0, num_draft_tokens=k, max_new_tokens=80, seed=1)
        )
        list(generation)
        replies.append(generation.reply.token_ids)
    assert len(replies[0]) == 80
    assert all(reply == replies[0] for reply in replies)
