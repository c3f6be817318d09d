"""A model of transformers behind the engine's interface, held against its own pass without a cache."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
import torch
from transformers import BloomConfig, T5Config, T5ForConditionalGeneration

from core.drafters.model import ModelDrafter
from core.engine.loop import Engine
from core.models.errors import LoadError
from core.models.rows import row_dependence
from core.models.transformers_decoder import (
    TransformersDecoder,
    check_class,
    check_rollback,
    context_length,
)
from core.pairs.pair import Pair
from core.records import Settings
from tests.core.models_on_disk import CONTEXT, FAMILIES, VOCABULARY, WINDOW, make_model
from tests.core.test_exactness import PROMPT, g_test, joint
from tests.core.toys import INFO, ToyTokenizer

ATTENDING = [family for family in FAMILIES if family != "mamba"]


@pytest.fixture(scope="module", params=ATTENDING)
def decoder(request) -> TransformersDecoder:
    return TransformersDecoder(make_model(request.param, 1))


def some_ids(count: int, seed: int) -> list[int]:
    return torch.randint(VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.inference_mode()
def uncached(decoder: TransformersDecoder, ids: list[int]) -> torch.Tensor:
    return decoder.model(torch.tensor([ids]), use_cache=False).logits[0]


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_what_it_says_of_itself(decoder):
    assert (decoder.context_length, decoder.readable_ids, decoder.vocabulary) == (
        CONTEXT,
        VOCABULARY,
        VOCABULARY,
    )


def test_cached_equals_uncached_after_crops(decoder):
    """Well beyond the window of those that have one, forwards, back and forwards again."""
    first, second, third = some_ids(60, 1), some_ids(5, 2), some_ids(9, 3)
    cache = decoder.new_cache()
    decoder.prefill(first, cache)
    close(decoder.logits(second, cache), uncached(decoder, first + second)[60:])
    cache.crop(62)
    close(decoder.logits(third, cache), uncached(decoder, first + second[:2] + third)[62:])
    assert cache.length == 71
    cache.crop(5 * WINDOW - 1)
    close(decoder.next_logits(third, cache), uncached(decoder, first[:39] + third)[-1])
    cache.crop(1000)
    assert cache.length == 48
    cache.crop(0)
    close(decoder.logits(first, cache), uncached(decoder, first))


def test_the_window_matters_at_these_lengths():
    """Else the test above would not notice a cache that ignores it."""
    ids = some_ids(60, 1)
    for family in ("mistral-window", "gemma2", "gemma3"):
        model = make_model(family, 1)
        before = uncached(TransformersDecoder(model), ids)
        model.config.sliding_window = CONTEXT
        for layer in model.model.layers:
            if getattr(layer.self_attn, "sliding_window", None):
                layer.self_attn.sliding_window = CONTEXT
        assert (uncached(TransformersDecoder(model), ids) - before)[-1].abs().max() > 0.01, family


def test_a_long_prompt_is_read_in_chunks_and_stops_when_told():
    decoder = TransformersDecoder(make_model("llama", 1, max_position_embeddings=700))
    ids = some_ids(600, 1)
    cache, asked = decoder.new_cache(), []

    def stop() -> bool:
        asked.append(cache.length)
        return len(asked) == 3

    decoder.prefill(ids, cache, stop)
    assert asked == [0, 256, 512]
    assert cache.length == 512
    close(decoder.next_logits(ids[512:], cache), uncached(decoder, ids)[-1])
    close(decoder.next_logits(ids, decoder.new_cache()), uncached(decoder, ids)[-1])


def test_caches_are_apart_and_know_their_size():
    decoder = TransformersDecoder(make_model("llama", 1))
    one, other = decoder.new_cache(), decoder.new_cache()
    assert one.nbytes == 0
    decoder.prefill(some_ids(40, 1), one)
    decoder.prefill(some_ids(300, 2), other)
    row = 2 * 2 * 2 * 16 * 4  # layers, keys and values, heads, head size, bytes
    assert one.nbytes >= 40 * row and other.nbytes >= 300 * row
    assert one.nbytes < other.nbytes <= 600 * row
    close(decoder.next_logits([5], one), uncached(decoder, [*some_ids(40, 1), 5])[-1])


def test_a_fork_goes_its_own_way(decoder):
    first, second = some_ids(50, 1), some_ids(9, 2)
    cache = decoder.new_cache()
    decoder.prefill(first, cache)
    other = cache.fork(30)
    assert (cache.length, other.length) == (50, 30)
    close(decoder.logits(second, other), uncached(decoder, first[:30] + second)[30:])
    close(decoder.logits(second, cache), uncached(decoder, first + second)[50:])
    assert cache.fork(1000).length == 59
    assert decoder.new_cache().fork(5).length == 0


def test_a_pass_that_fails_half_way_leaves_the_cache_as_it_was(monkeypatch):
    decoder = TransformersDecoder(make_model("llama", 1))
    ids = some_ids(20, 1)
    cache = decoder.new_cache()
    decoder.prefill(ids, cache)

    def fail(*args):
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(decoder.model.model.layers[1].mlp, "forward", fail)
        with pytest.raises(torch.OutOfMemoryError):
            decoder.logits([1, 2, 3], cache)
    assert cache.length == 20
    close(decoder.next_logits([7], cache), uncached(decoder, [*ids, 7])[-1])


def test_the_model_is_never_moved(monkeypatch):
    """BQ-02: moving a quantised model raises."""
    model = make_model("llama", 1)

    def refuse(*args, **kwargs):
        raise AssertionError("moved")

    for name in ("to", "cuda", "cpu", "float", "half"):
        monkeypatch.setattr(type(model), name, refuse)
    decoder = TransformersDecoder(model)
    check_rollback(decoder)
    assert decoder.logits([1, 2], decoder.new_cache()).shape == (2, VOCABULARY)


def test_logits_are_float32_whatever_the_model_is():
    decoder = TransformersDecoder(make_model("llama", 1).to(torch.bfloat16))
    check_rollback(decoder)
    assert decoder.logits([1, 2], decoder.new_cache()).dtype == torch.float32
    assert decoder.next_logits([1, 2], decoder.new_cache()).dtype == torch.float32


def test_rollback_is_checked(decoder):
    check_rollback(decoder)


def test_a_running_state_is_refused():
    model = make_model("mamba", 1)
    with pytest.raises(LoadError, match="mamba keep a state that cannot be taken back"):
        TransformersDecoder(model)


def test_what_a_model_raises_is_not_taken_for_a_running_state(monkeypatch):
    model = make_model("llama", 1)

    def fail(*args):
        raise ValueError("a shape that does not fit")

    monkeypatch.setattr(model.model.layers[1].mlp, "forward", fail)
    with pytest.raises(ValueError, match="a shape that does not fit"):
        TransformersDecoder(model)


def test_a_head_that_masks_ids_is_no_fault():
    """Rule 5: minus infinity is a mask."""

    class Masking(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x).index_fill(-1, torch.tensor([3, 4]), -torch.inf)

    model = make_model("llama", 1)
    head = Masking(64, VOCABULARY, bias=False)
    head.weight = model.lm_head.weight
    model.lm_head = head
    decoder = TransformersDecoder(model)
    check_rollback(decoder)
    assert decoder.next_logits([1], decoder.new_cache())[3] == -torch.inf


def test_an_encoder_is_refused():
    with pytest.raises(LoadError, match="t5 have an encoder"):
        check_class(T5ForConditionalGeneration, T5Config())


def test_a_cache_that_is_not_cropped_is_noticed(monkeypatch):
    decoder = TransformersDecoder(make_model("llama", 1))
    cache_class = type(decoder.new_cache())
    monkeypatch.setattr(cache_class, "crop", lambda self, length: setattr(self, "length", length))
    with pytest.raises(LoadError, match="cannot be taken back"):
        check_rollback(decoder)


def test_a_cache_that_loses_what_it_read_is_noticed(monkeypatch):
    """The same after a crop as from a fresh cache, and both wrong."""
    decoder = TransformersDecoder(make_model("llama", 1))
    layer_class = decoder.new_cache().layers.layer_class_to_replicate
    monkeypatch.setattr(layer_class, "update", lambda self, keys, values, *args, **kwargs: (keys, values))
    with pytest.raises(LoadError, match="cannot be taken back"):
        check_rollback(decoder)


def test_unusable_numbers_are_named():
    model = make_model("llama", 1)
    model.model.norm.weight.data.fill_(float("nan"))
    with pytest.raises(LoadError, match="unusable numbers"):
        check_rollback(TransformersDecoder(model))


def test_context_of_a_config():
    model = make_model("llama", 1)
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32}
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    model.config.rope_parameters = rope | factors
    assert context_length(model.config) == 32
    with pytest.raises(LoadError, match="does not say how many tokens"):
        context_length(BloomConfig())


def test_rows_of_a_float32_model_depend_on_no_later_row(decoder):
    found = row_dependence(decoder)
    assert found.later == 0
    assert found.alone < 1e-4


# Rule 14, with real models of a tiny vocabulary: window and tied head here, plain attention there.

WORDS, LENGTH, REPLIES = 4, 3, 400
TINY = dict(vocab_size=WORDS, eos_token_id=None, num_hidden_layers=1, initializer_range=0.2)


@pytest.mark.parametrize(
    "family, changes",
    [("qwen3", TINY), ("mistral-window", TINY | dict(sliding_window=2, tie_word_embeddings=True))],
)
def test_replies_are_distributed_as_the_targets_own(family, changes):
    target, draft = (TransformersDecoder(make_model(family, seed, **changes)) for seed in (1, 2))
    pair = Pair(INFO, ToyTokenizer(), target, ModelDrafter(draft), frozenset())
    engine = Engine(pair)
    settings = Settings(temperature=0.8, num_draft_tokens=2, max_new_tokens=LENGTH)
    counts, fates = Counter(), Counter()
    for seed in range(REPLIES):
        generation = engine.generate(PROMPT, dataclasses.replace(settings, seed=seed))
        fates.update(token.fate for round_ in generation for token in round_.tokens)
        counts[generation.reply.token_ids] += 1
    expected = joint(lambda ids: uncached(target, list(ids))[-1].float(), settings, LENGTH, WORDS)
    assert sum(expected.values()) == pytest.approx(1, abs=1e-5)
    assert g_test(counts, expected, REPLIES) > 1e-3
    wrong = joint(lambda ids: uncached(draft, list(ids))[-1].float(), settings, LENGTH, WORDS)
    assert g_test(counts, wrong, REPLIES) < 1e-6
    assert set(fates) == {"accepted", "rejected", "discarded", "resampled", "bonus", "plain"}
