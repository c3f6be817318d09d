"""Kept caches: what is taken, copied, cropped and given up; warm replies equal cold ones."""

from __future__ import annotations

import threading

import pytest
import torch

from core.drafters.auto import AutoDrafter
from core.drafters.model import ModelDrafter
from core.engine.loop import Engine
from core.engine.reuse import MAX_KEPT, KeptCaches, common_prefix
from core.records import Settings
from tests.core.test_decoder import IDS, pair_of
from tests.core.tiny import as_decoder, tiny_llama
from tests.core.toys import ToyDecoder, table, toy_pair

PROMPT = [0, 1, 2, 3, 4, 3, 2]


def greedy(k: int = 3, new: int = 12, **changes) -> Settings:
    return Settings(temperature=0, num_draft_tokens=k, max_new_tokens=new, **changes)


def reply_of(engine: Engine, ids, settings: Settings):
    generation = engine.generate(ids, settings)
    list(generation)
    return generation.reply


def toys():
    return toy_pair(table(1, 5), table(2, 5), context_length=200, draft_context_length=200)


@pytest.mark.parametrize("a, b, shared", [([], [1], 0), ([1, 2], [1, 2, 3], 2), ([1, 2, 3], [1, 9, 3], 1)])
def test_common_prefix(a, b, shared):
    assert common_prefix(a, b) == common_prefix(b, a) == shared


def test_a_follow_up_reads_only_what_is_new_in_both_models():
    pair = toys()
    engine = Engine(pair)
    first = reply_of(engine, PROMPT, greedy())
    assert first.reused_tokens == 0
    follow_up = [*PROMPT, *first.token_ids, 4, 4, 1, 0]
    before = len(pair.target.reads), len(pair.drafter.model.reads)
    second = reply_of(engine, follow_up, greedy())
    # The last id of the first reply was never read; the last of the prompt comes with the first round.
    known = len(PROMPT) + len(first.token_ids) - 1
    assert second.reused_tokens == known
    assert pair.target.reads[before[0]] == (known, len(follow_up) - 1 - known)
    start, rows = pair.drafter.model.reads[before[1]]
    assert start <= known and start + rows == len(follow_up) - 1
    cold = reply_of(Engine(pair, cache_bytes=0), follow_up, greedy())
    assert (cold.reused_tokens, cold.token_ids) == (0, second.token_ids)


def test_regenerating_reads_nothing_but_the_last_id():
    pair = toys()
    engine = Engine(pair)
    first = reply_of(engine, PROMPT, greedy())
    again = reply_of(engine, PROMPT, greedy())
    assert again.reused_tokens == len(PROMPT) - 1
    assert again.token_ids == first.token_ids


def test_a_reply_after_a_plain_one_lets_the_draft_catch_up():
    pair = toys()
    engine = Engine(pair)
    plain = reply_of(engine, PROMPT, greedy(0))
    assert pair.drafter.model.reads == []
    warm = reply_of(engine, [*PROMPT, *plain.token_ids, 1], greedy())
    assert pair.drafter.model.reads[0][0] == 0
    assert warm.token_ids == reply_of(Engine(toys()), [*PROMPT, *plain.token_ids, 1], greedy()).token_ids


def test_a_shared_beginning_is_copied_and_the_longer_conversation_stays():
    pair = toys()
    engine = Engine(pair)
    long = [*PROMPT, *([1, 2, 3] * 20)]
    reply_of(engine, long, greedy())
    other = reply_of(engine, [*PROMPT, 0, 0, 4], greedy())
    assert other.reused_tokens == len(PROMPT)
    assert other.token_ids == reply_of(Engine(toys()), [*PROMPT, 0, 0, 4], greedy()).token_ids
    assert reply_of(engine, long, greedy()).reused_tokens == len(long) - 1


def test_an_edited_question_reuses_what_comes_before_it():
    engine = Engine(toys())
    first = reply_of(engine, PROMPT, greedy())
    edited = [*PROMPT[:5], 0, 0, 1]
    assert reply_of(engine, edited, greedy()).reused_tokens == 5
    assert first.token_ids


def test_what_was_read_before_a_cancel_is_not_read_again():
    pair = toys()
    engine, cancel = Engine(pair), threading.Event()
    generation = engine.generate(PROMPT, greedy(new=50), cancel=cancel)
    next(generation)
    cancel.set()
    assert list(generation) == []
    told = [*PROMPT, *generation.reply.token_ids]
    after = reply_of(engine, [*told, 2, 2], greedy())
    assert after.reused_tokens == len(told) - 1
    assert after.token_ids == reply_of(Engine(toys()), [*told, 2, 2], greedy()).token_ids


def test_after_an_error_nothing_is_kept_of_that_reply():
    class Broken(ToyDecoder):
        def logits(self, ids, cache):
            if cache.length > 10:
                raise RuntimeError("out of memory")
            return super().logits(ids, cache)

    pair = toys()
    pair.target = Broken(table(1, 5), 200)
    engine = Engine(pair)
    assert reply_of(engine, PROMPT, greedy()).finish_reason == "error"
    assert engine.cache_bytes == 0
    assert reply_of(engine, PROMPT[:3], greedy(new=3)).reused_tokens == 0


def test_after_unusable_numbers_nothing_is_kept_of_that_reply():
    bad = table(1, 5)
    pair = toys()
    pair.target = ToyDecoder(lambda ids: torch.full((5,), torch.nan) if len(ids) > 12 else bad(ids), 200)
    engine = Engine(pair)
    reply = reply_of(engine, PROMPT, greedy())
    assert reply.finish_reason == "error" and reply.token_ids
    assert engine.cache_bytes == 0


@pytest.mark.parametrize("auto", [False, True])
def test_after_unusable_numbers_of_the_draft_it_reads_anew(auto):
    """NaN in its keys would make every later draft NaN: what it holds is not known."""
    pair, fine = toys(), table(2, 5)
    draft = ToyDecoder(lambda ids: torch.full((5,), torch.nan) if len(ids) == 12 else fine(ids), 200)
    pair.drafter = AutoDrafter(ModelDrafter(draft), 200) if auto else ModelDrafter(draft)
    engine = Engine(pair)
    reply = reply_of(engine, PROMPT, greedy())
    read = len(draft.reads)
    after = reply_of(engine, [*PROMPT, *reply.token_ids, 1, 2], greedy())
    assert after.reused_tokens == len(PROMPT) + len(reply.token_ids) - 1 and draft.reads[read][0] == 0
    read = len(draft.reads)
    again = reply_of(engine, [*PROMPT, *reply.token_ids, 1, 2, *after.token_ids, 3], greedy())
    assert draft.reads[read][0] > 12 and again.error is None


def test_a_beginning_is_copied_though_the_draft_has_read_none_of_it():
    """A plain reply leaves the draft's state empty, and the copy asks it for more than it has."""
    target, draft = as_decoder(tiny_llama(1, context=900)), as_decoder(tiny_llama(2, layers=1, context=900))
    engine = Engine(pair_of(target, draft))
    shared = [IDS[i % len(IDS)] for i in range(300)]
    reply_of(engine, [*shared, *([7] * 320)], greedy(0, new=3))
    forked = reply_of(engine, [*shared, 8, 9], greedy(new=8))
    assert (forked.error, forked.reused_tokens) == (None, 300)
    cold = reply_of(Engine(pair_of(target, draft)), [*shared, 8, 9], greedy(new=8))
    assert cold.token_ids == forked.token_ids


def test_memory_is_bounded_and_the_least_recently_used_goes_first():
    pair = toys()
    # A toy's cache takes a byte an id, here some 40 with the draft's.
    engine = Engine(pair, cache_bytes=50)
    for last in (1, 2, 3):
        reply_of(engine, [last] * 16, greedy(new=4))
        assert 0 < engine.cache_bytes <= engine.cache_limit + 45
    assert engine.cache_limit == 50
    assert reply_of(engine, [3] * 16, greedy(new=4)).reused_tokens == 15
    assert reply_of(engine, [1] * 16, greedy(new=4)).reused_tokens == 0


def test_the_last_one_used_is_kept_whatever_its_size_and_costs_no_other_its_place():
    engine = Engine(toys(), cache_bytes=50)
    reply_of(engine, [1] * 16, greedy(new=4))
    reply_of(engine, [2] * 120, greedy(new=4))
    assert reply_of(engine, [2] * 120, greedy(new=4)).reused_tokens == 119
    assert reply_of(engine, [1] * 16, greedy(new=4)).reused_tokens == 15


def test_nothing_is_kept_where_nothing_is_to_be():
    engine = Engine(toys(), cache_bytes=0)
    reply_of(engine, PROMPT, greedy())
    assert engine.cache_bytes == 0 and reply_of(engine, PROMPT, greedy()).reused_tokens == 0


def test_no_more_than_so_many_are_kept():
    target = ToyDecoder(table(1, 5), 200)
    caches = KeptCaches(target, 10**9)
    for start in range(MAX_KEPT + 3):
        kept = caches.take([start, 100])
        target.prefill([start], kept.cache)
        caches.give_back(kept, [start, 100])
    assert caches.nbytes == MAX_KEPT
    assert caches.take([0, 100]).cache.length == 0
    assert caches.take([MAX_KEPT + 2, 100]).cache.length == 1


@pytest.mark.parametrize("cut", [0, 3, 30])
def test_warm_and_cold_are_the_same_in_the_real_decoder(cut):
    """Not only the same ids: the kept keys are those that a fresh reading makes, bit for bit."""
    target, draft = as_decoder(tiny_llama(1)), as_decoder(tiny_llama(2, layers=1))
    engine = Engine(pair_of(target, draft))
    first = reply_of(engine, IDS[:40], greedy(new=60))
    told = [*IDS[:40], *first.token_ids]
    follow_up = [*told[: len(told) - cut], *IDS[100:120]]
    warm = reply_of(engine, follow_up, greedy(new=60))
    assert warm.reused_tokens >= len(told) - max(cut, 1)
    cold = reply_of(Engine(pair_of(target, draft)), follow_up, greedy(new=60))
    assert (cold.reused_tokens, cold.token_ids) == (0, warm.token_ids)


def test_growing_and_copying_keep_what_was_read():
    decoder = as_decoder(tiny_llama(1, context=1500))
    ids = [IDS[i % len(IDS)] for i in range(1100)]
    cache = decoder.new_cache()
    small = cache.nbytes
    decoder.prefill(ids[:-1], cache)
    assert small < cache.nbytes <= 8 * small
    copy = cache.fork(600)
    assert (copy.length, cache.length) == (600, 1099) and copy.nbytes < cache.nbytes
    expected = decoder.next_logits(ids[600:700], decoder_at(decoder, ids[:600]))
    assert decoder.next_logits(ids[600:700], copy).equal(expected)
    assert cache.length == 1099


def decoder_at(decoder, ids):
    cache = decoder.new_cache()
    decoder.prefill(ids, cache)
    return cache


def test_a_drafter_reads_from_where_its_state_has_got_to():
    drafter = ModelDrafter(ToyDecoder(table(1, 5), 10))
    state = drafter.new_state()
    for ids in ([1, 2, 3], [1, 2, 3, 4, 0], [1] * 30, [1] * 10):  # past its context nothing will be drafted
        drafter.prefill(ids, state, cache=None)
    assert drafter.model.reads == [(0, 3), (3, 2)] and state.length == 5
