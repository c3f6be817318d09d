"""Where memory ends in a chat: caches take what is counted, others go first, and a sentence is the last."""

from __future__ import annotations

import math
import weakref
from dataclasses import replace

import pytest
import torch

from core.drafters import recycling
from core.engine import rounds
from core.engine.loop import Engine
from core.models import kv_cache, memory
from core.models.decoder import Decoder
from core.models.key_blocks import KEY_BLOCK, PARTS, held_positions
from core.models.kv_cache import DecoderShape, KVCache
from core.records import Settings
from tests.core.test_decoder import IDS, pair_of
from tests.core.test_history import PAIRS, PROMPT, told
from tests.core.tiny import as_decoder, held, tiny_llama

SHAPE = DecoderShape(8, 8, 2, 1, 4, 1e4, 1e-6, 32768)
POSITION = 8 * 2 * 1 * 4 * 2  # bytes of one in bfloat16


class Memory:
    """Of caches alone: ``limit`` bytes, of which ``live`` are in use and ``peak`` were."""

    def __init__(self, monkeypatch, limit=math.inf):
        self.limit, self.live, self.peak = limit, 0, 0
        zeros = kv_cache._zeros

        def counted(*how):
            tensor = zeros(*how)
            if self.live + tensor.nbytes > self.limit:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
            self.live += tensor.nbytes
            self.peak = max(self.peak, self.live)
            weakref.finalize(tensor, self._freed, tensor.nbytes)
            return tensor

        monkeypatch.setattr(kv_cache, "_zeros", counted)

    def _freed(self, count):
        self.live -= count


def reply(engine, ids, **changes):
    settings = Settings(**dict(temperature=0.8, seed=3, num_draft_tokens=3, max_new_tokens=12) | changes)
    generation = engine.generate(ids, settings)
    list(generation)
    return generation.reply


def pair(context=1200):
    return pair_of(
        as_decoder(tiny_llama(1, context=context)), as_decoder(tiny_llama(2, layers=1, context=context))
    )


def prompt(length, first=0):
    return [IDS[(first + i) % len(IDS)] for i in range(length)]


@pytest.mark.parametrize(
    "length, positions",
    [(0, 0), (1, 256), (256, 256), (257, 512), (4096, 4096), (4097, 4608), (8193, 9216), (32768, 32768)],
)
def test_room_comes_in_steps(length, positions):
    assert held_positions(length, 10**6) == positions


def test_no_more_than_an_eighth_lies_idle_and_never_more_than_the_context():
    for length in range(2049, 40000, 37):
        assert length <= held_positions(length, 10**6) <= length * 9 / 8 + 1
    assert held_positions(900, 1000) == 1024 and held_positions(8193, 8500) == 8704


def test_what_is_held_is_what_is_counted(monkeypatch):
    """qwen3-8b at 4,097 tokens held twice what was counted, and three times while it grew."""
    seen = Memory(monkeypatch)
    cache = KVCache(SHAPE, "cpu", torch.bfloat16)
    cache.reserve(4096)
    size = memory.Size(0, 0, cache=8 * 2 * 1 * 4, layer=0, largest=0, table=0, widths=(0,) * 4)
    assert cache.nbytes == size.kept(4096, 32768, "bfloat16") == 4096 * POSITION
    cache.length = 4096
    seen.peak = 0
    cache.reserve(4097)
    assert cache.nbytes == seen.live == size.kept(4097, 32768, "bfloat16") == 4608 * POSITION
    assert seen.peak <= (4608 + 4096 / PARTS) * POSITION


def test_growing_keeps_what_was_read():
    cache = KVCache(SHAPE, "cpu", torch.bfloat16, 1)
    for place, layer in enumerate(cache.of_layers(0, KEY_BLOCK)):
        layer.fill_(place + 1)
    cache.features.fill_(9)
    cache.length = KEY_BLOCK
    cache.reserve(3000)
    wanted = torch.arange(1, 9).bfloat16()[:, None, None, None, None].expand(8, 2, KEY_BLOCK, 1, 4)
    assert held(cache, KEY_BLOCK).equal(wanted) and not held(cache)[:, :, KEY_BLOCK:].any()
    assert (cache.features[:KEY_BLOCK] == 9).all() and len(cache.features) == 3072


def test_growing_that_breaks_off_can_be_done_again(monkeypatch):
    seen = Memory(monkeypatch, limit=6 * KEY_BLOCK * POSITION)
    cache = KVCache(SHAPE, "cpu", torch.bfloat16)
    cache.of_layers(0, 1)[7].fill_(5)
    cache.length = KEY_BLOCK
    with pytest.raises(torch.OutOfMemoryError):
        cache.reserve(1600)
    seen.limit = math.inf
    cache.reserve(1600)
    assert {part.shape[2] for part in cache.parts} == {1792} and (cache.of_layers(0, 1)[7] == 5).all()


def test_a_long_prompt_gets_its_room_at_once(monkeypatch):
    decoder = as_decoder(tiny_llama(1, context=1200))
    cache, rooms = decoder.new_cache(), []
    room = KVCache._room
    monkeypatch.setattr(KVCache, "_room", lambda self, *size: rooms.append(size[1]) or room(self, *size))
    decoder.prefill(prompt(1000), cache)
    assert set(rooms) == {1024}


@pytest.mark.parametrize("batched", [False, True])
def test_other_kept_caches_go_first(batched, monkeypatch):
    """A pair that had room for one conversation ended in the middle of the second."""
    with torch.inference_mode():
        fresh = reply(Engine(pair(), batched=batched), prompt(700, 40))
    seen = Memory(monkeypatch)
    engine = Engine(pair(), batched=batched)
    reply(engine, prompt(700))
    one = seen.live
    assert one == engine.cache_bytes > 0
    seen.limit = 1.6 * one
    second = reply(engine, prompt(700, 40))
    assert (second.error, second.token_ids) == (None, fresh.token_ids)
    assert engine.cache_bytes == seen.live <= one  # of the second alone
    assert reply(engine, [*prompt(700, 40), *second.token_ids, 1]).reused_tokens > 700


@pytest.mark.parametrize("batched", [False, True])
def test_then_it_is_said_and_the_next_reply_has_all_the_room(batched, monkeypatch, caplog):
    seen = Memory(monkeypatch)
    engine = Engine(pair(), batched=batched)
    reply(engine, prompt(200))
    one = seen.live
    seen.limit = 1.5 * one
    long = reply(engine, prompt(900, 40))
    assert long.finish_reason == "error"
    assert long.error.startswith("The reply ended early, because there was too little memory: begin a new")
    assert "the reply ended with an error" in caplog.text
    assert engine.cache_bytes == seen.live == 0
    assert reply(engine, prompt(200)).error is None


@pytest.mark.parametrize("batched", [False, True])
def test_memory_that_ends_in_the_middle_of_a_reply_does_not_change_it(batched, monkeypatch):
    """The round is played again with the draws it had: at any pass of target and draft."""
    pair_ = pair(300)
    whole, forward, calls = reply(Engine(pair_, batched=batched), prompt(20)), Decoder.forward, []
    assert len(set(whole.token_ids)) > 3
    assert {token.fate for round_ in rounds_of(pair_, batched) for token in round_.tokens} >= {
        "accepted",
        "rejected",
    }

    def full_once(self, *given, **how):
        calls.append(len(calls))
        if calls[-1] == ends:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(self, *given, **how)

    monkeypatch.setattr(Decoder, "forward", full_once)
    for ends in range(9):
        calls.clear()
        made = reply(Engine(pair_, batched=batched), prompt(20))
        assert len(calls) > ends and (made.error, made.token_ids) == (None, whole.token_ids), ends


def full_at(monkeypatch, module, name):
    """Has memory end in the call of ``module.name`` whose number is put into the list that is given back."""
    real, calls, ends = getattr(module, name), [], []

    def full_once(*given, **how):
        calls.append(len(calls))
        if ends and calls[-1] == ends[0]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(*given, **how)

    monkeypatch.setattr(module, name, full_once)
    return calls, ends


@pytest.mark.parametrize(
    "name, width, step",
    [
        ("model", 1, "distributions"),
        ("model", 1, "raw_probability"),
        ("recycling", 1, "distributions"),
        ("recycling", 2, "distributions"),
        ("eagle", 2, "distributions"),
    ],
)
def test_memory_that_ends_while_a_round_is_judged_does_not_change_the_reply(name, width, step, monkeypatch):
    """Step by step the round's first tokens stood already, and what the drafter learnt of it was known."""
    settings = Settings(temperature=0.8, seed=3, num_draft_tokens=3, max_new_tokens=6, tree_width=width)
    if step == "raw_probability":  # asked for where the filters changed the numbers
        settings = replace(settings, top_k=3)
    calls, ends = full_at(monkeypatch, rounds, step)
    pair_ = PAIRS[name]()
    whole = told(Engine(pair_, batched=False), PROMPT, settings)
    assert any(len(tokens) > 1 for tokens in whole)
    for end in range(len(calls)):
        calls.clear()
        ends[:] = [end]
        assert told(Engine(pair_, batched=False), PROMPT, settings) == whole, end


def test_memory_that_ends_while_a_drafter_learns_does_not_change_the_reply(monkeypatch):
    settings = Settings(temperature=0.8, seed=3, num_draft_tokens=3, max_new_tokens=12)
    calls, ends = full_at(monkeypatch, recycling, "likeliest")
    pair_ = PAIRS["recycling"]()
    whole = told(Engine(pair_, batched=False), PROMPT, settings)
    for end in range(len(calls)):
        calls.clear()
        ends[:] = [end]
        assert told(Engine(pair_, batched=False), PROMPT, settings) == whole, end


def test_memory_that_ends_while_a_trees_rows_are_brought_together_does_not_change_the_reply(monkeypatch):
    settings = Settings(temperature=0.8, seed=3, num_draft_tokens=3, max_new_tokens=6, tree_width=2)
    calls, ends = full_at(monkeypatch, KVCache, "keep")
    pair_ = PAIRS["eagle"]()
    whole = told(Engine(pair_, batched=False), PROMPT, settings)
    assert calls
    for end in range(len(calls)):
        calls.clear()
        ends[:] = [end]
        assert told(Engine(pair_, batched=False), PROMPT, settings) == whole, end


def test_rows_that_cannot_be_brought_together_stand_as_they_did():
    class Full:
        def __getitem__(self, _):
            raise torch.OutOfMemoryError("CUDA out of memory")

    cache = KVCache(SHAPE, "cpu", torch.float32)
    for layer in cache.of_layers(0, 8):
        layer.copy_(torch.arange(8.0)[None, :, None, None].expand_as(layer))
    cache.length, parts = 8, cache.parts
    cache.parts = [*parts[:-1], Full()]
    with pytest.raises(torch.OutOfMemoryError):
        cache.keep(2, [0, 2, 5])
    cache.parts = parts
    assert cache.length == 8 and (held(cache, 8) == torch.arange(8.0)[:, None, None]).all()


def rounds_of(pair_, batched):
    settings = Settings(temperature=0.8, seed=3, num_draft_tokens=3, max_new_tokens=12)
    return list(Engine(pair_, batched=batched).generate(prompt(20), settings))


def test_a_system_that_promises_what_it_has_not_is_asked_first(monkeypatch):
    """On Linux a process that uses memory which was promised to it is ended."""
    engine = Engine(pair())
    monkeypatch.setattr(kv_cache, "ASK", 0)
    monkeypatch.setattr(kv_cache, "free_bytes", lambda device: 10_000)
    assert "too little memory" in reply(engine, prompt(900)).error
    monkeypatch.setattr(kv_cache, "free_bytes", lambda device: None)
    assert reply(engine, prompt(900)).error is None


def test_a_reply_that_somebody_keeps_keeps_no_caches():
    engine = Engine(pair())
    generation = engine.generate(prompt(20), Settings(max_new_tokens=3))
    list(generation)
    caches = [weakref.ref(kept) for kept in engine._kept._kept]
    engine.make_room()
    assert generation.reply is not None and [cache() for cache in caches] == [None]


def test_what_a_conversation_takes_is_counted():
    """Weights, keys and values, what grows of them, and the product that NF4 unpacks: by hand."""
    from core.pairs.catalogue import CATALOGUE

    entry = CATALOGUE["qwen3-8b"]
    size = entry.target_model.size
    assert size.kept(4096, 40960, "bfloat16") == 4096 * 36 * 2 * 8 * 128 * 2 == 603_979_776
    assert size.kept(4097, 40960, "bfloat16") == 4608 * 36 * 2 * 8 * 128 * 2
    need = entry.target_model.needed_to_load("nf4", "cuda", False)
    unpacked = 2 * 2 * 4096 * 12288
    rows = 1024 * (2 * (3 * 4096 + 3 * 12288) + 4 * (4096 + 2 * 1024))  # of a prompt, read at once
    assert need == size.weights("nf4", "bfloat16") + 603_979_776 * 5 // 4 + unpacked + rows
