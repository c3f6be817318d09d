"""The lean decoder against transformers, cached against uncached, many rows against one."""

from __future__ import annotations

import random

import pytest
import torch

from core.drafters.model import ModelDrafter
from core.engine.loop import Engine
from core.models import decoder as decoder_module
from core.models import quantize
from core.models.decoder import KEY_BLOCK, PREFILL_CHUNK, Decoder, KVCache, lean_reason
from core.models.rows import row_dependence
from core.pairs.pair import Pair
from core.records import Fate, Settings
from tests.core.models_on_disk import VOCABULARY, make_model
from tests.core.tiny import as_decoder, held, tiny_llama
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


def test_a_processor_reads_prompts_in_the_same_chunks_whatever_is_free(model, monkeypatch):
    """There blocks of keys decide which rows are bit-equal."""
    monkeypatch.setattr(decoder_module, "prompt_rows", None)
    assert as_decoder(model).prompt_chunk(100_000) == PREFILL_CHUNK == KEY_BLOCK


# Each family as its models come: (of tests.core.models_on_disk, changes to its config).
LONG = dict(max_position_embeddings=2 * KEY_BLOCK)
LLAMA3 = dict(rope_type="llama3", rope_theta=1e4, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=128)
KINDS = {
    "llama": ("llama", LONG),
    "smollm2": (
        "llama",
        LONG | dict(hidden_size=48, num_attention_heads=3, num_key_value_heads=1, tie_word_embeddings=True),
    ),
    "llama3.1": ("llama", LONG | dict(rope_parameters=LLAMA3 | dict(original_max_position_embeddings=64))),
    "linear": ("llama", LONG | dict(rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=2.0))),
    "yarn": ("qwen2", LONG | dict(rope_parameters=YARN)),
    "qwen2": ("qwen2", LONG),
    "qwen3": ("qwen3", LONG | dict(head_dim=48, tie_word_embeddings=True)),
    "mistral": ("mistral", LONG | dict(head_dim=32)),
    "mistral-wide": ("mistral", LONG | dict(sliding_window=2 * KEY_BLOCK)),
}


def family(kind: str):
    """A model of the kind, its biases and norms not those of a new one (0 and 1), which would hide faults."""
    name, changes = KINDS[kind]
    model, generator = make_model(name, 1, **changes), torch.Generator().manual_seed(5)
    for weight in model.parameters():
        if weight.dim() == 1:
            weight.add_(0.3 * torch.randn(weight.shape, generator=generator))
    return model


def lean(model, form: str = "none") -> Decoder:
    """The decoder of a model that is used up."""
    make, make_head = (quantize.maker(form, torch.float32, head) for head in (False, True))
    return Decoder.from_model(model, make, make_head)


@pytest.mark.parametrize("kind", KINDS)
def test_parity_of_each_family(kind):
    """In chunks, over a block of keys, after crops, and up to the last position there is (SD-13)."""
    model = family(kind)
    assert lean_reason(model.config.to_dict()) is None
    ids = random.Random(1).choices(range(VOCABULARY), k=2 * KEY_BLOCK)
    expected = model(torch.tensor([ids])).logits[0]
    other = [*ids[:40], *ids[300:320]]
    elsewhere = model(torch.tensor([other])).logits[0]
    decoder = lean(model)
    assert decoder.context_length == len(ids) and decoder.vocabulary == decoder.readable_ids == VOCABULARY
    cache = decoder.new_cache()
    decoder.prefill(ids[:270], cache)
    close = dict(atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(decoder.logits(ids[270:500], cache), expected[270:500], **close)
    cache.crop(40)
    torch.testing.assert_close(decoder.logits(other[40:], cache), elsewhere[40:], **close)
    cache.crop(40)
    torch.testing.assert_close(decoder.next_logits(ids[40:], cache), expected[-1], **close)
    assert cache.length == len(ids)
    tensor = torch.tensor(ids[:7])
    torch.testing.assert_close(decoder.device_logits(tensor, decoder.new_cache()), expected[:7], **close)


@pytest.mark.usefixtures("has_int8")
@pytest.mark.parametrize(
    "size, heads, kv_heads", [(64, 3, 1), (64, 2, 1), (64, 7, 1), (128, 4, 4), (128, 7, 1)]
)
def test_rows_are_independent_whatever_the_heads(size, heads, kv_heads):
    """Those of Llama, Qwen and Mistral: a kernel of its own for few rows would show."""
    sizes = dict(
        head_dim=size, num_attention_heads=heads, num_key_value_heads=kv_heads, hidden_size=16 * heads
    )
    found = row_dependence(lean(make_model("qwen3", 1, **sizes), "int8"))
    assert (found.later, found.alone) == (0, 0)


@pytest.mark.parametrize(
    "name, changes, reason",
    [
        ("gemma2", {}, "gemma2 is another architecture"),
        ("mistral-window", {}, "window"),
        ("qwen3", dict(use_sliding_window=True, sliding_window=8, max_window_layers=1), "window"),
        ("llama", dict(attention_bias=True), "output has a bias"),
        ("llama", dict(mlp_bias=True), "MLP has biases"),
        ("llama", dict(hidden_act="gelu"), "activation is gelu"),
        ("llama", dict(rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=2.0)), "dynamic"),
    ],
)
def test_what_it_does_not_do_it_says(name, changes, reason):
    assert reason in lean_reason(make_model(name, 1, num_hidden_layers=2, **changes).config.to_dict())


def test_a_model_is_used_up_layer_by_layer():
    """Else packing would need the memory of both."""
    model = family("llama")
    left = []

    def make(weight):
        left.append(sum(p.numel() for p in model.model.layers.parameters()))
        return lambda x: x

    Decoder.from_model(model, make)
    assert left[0] == left[3] == 2 * left[4] and sum(p.numel() for p in model.model.layers.parameters()) == 0


@pytest.mark.parametrize("form", ["int4", "int4+bfloat16", "int4+int8x2-qnnpack", "int8"])
def test_a_prompt_read_in_parts_leaves_the_keys_of_one_reading(form):
    """What is kept of an earlier prompt is what a fresh reading makes, bit for bit, wherever it was cut."""
    decoder = as_decoder(tiny_llama(1, vocabulary=64), form)
    whole = decoder.new_cache()
    decoder.prefill(IDS, whole)
    for cut in (1, 17, 40, 255, 256, 270):
        parted = decoder.new_cache()
        decoder.prefill(IDS[:cut], parted)
        decoder.prefill(IDS[cut:], parted)
        assert torch.equal(held(parted, len(IDS)), held(whole, len(IDS))), cut


def test_single_ids_leave_the_keys_of_a_prompt_or_near_them():
    """As a reply does: bit for bit where prompts are read by the same products, else but for rounding."""
    for form in ("int4", "int8", "int4+bfloat16"):
        decoder = as_decoder(tiny_llama(1, vocabulary=64), form)
        whole, single = decoder.new_cache(), decoder.new_cache()
        decoder.prefill(IDS[:260], whole)
        for id in IDS[:260]:
            decoder.forward([id], single)
        one, other = (held(cache, 260).float() for cache in (whole, single))
        assert torch.equal(one, other) == ("+" not in form)
        assert (one - other).norm() < 0.1 * one.norm()


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_keys_are_in_the_dtype_that_was_asked_for(dtype):
    cache = as_decoder(tiny_llama(1, vocabulary=64), cache_dtype=dtype).new_cache()
    assert held(cache).dtype == (dtype or torch.float32)
    assert cache.features.dtype == torch.float32 and not held(cache).any()


def test_a_cache_grows_and_forks(model):
    decoder = as_decoder(model)
    cache = decoder.new_cache()
    assert isinstance(cache, KVCache) and cache.nbytes == 2 * 2 * 2 * KEY_BLOCK * 8 * 4
    decoder.prefill(IDS, cache)
    assert cache.nbytes == 2 * 2 * 2 * 2 * KEY_BLOCK * 8 * 4
    fork = cache.fork(20)
    cache.crop(0)
    decoder.prefill(IDS[::-1], cache)
    assert fork.length == 20 and fork.nbytes < cache.nbytes
    torch.testing.assert_close(
        decoder.logits(IDS[20:24], fork), fresh(decoder, IDS[:24])[20:], atol=1e-5, rtol=0
    )


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
        for decoder, cache in ((target, kept.cache), (draft, kept.state(pair.drafter))):
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
