"""The loop: what ends a reply, what is counted, what a cache holds (SD-01, 02, 03, 11, 13, 15, 16)."""

from __future__ import annotations

import dataclasses
import itertools
import math
import threading

import pytest
import torch

from core.drafters.model import ModelDrafter
from core.engine.loop import Engine
from core.figures import metrics
from core.models.decoder import PREFILL_CHUNK
from core.records import EMITTED, Fate, Settings
from core.text.detokenise import PromptError
from tests.core.toys import ToyDecoder, path, table, toy_pair

PROMPT = [1, 2]
GREEDY = Settings(temperature=0, num_draft_tokens=4, max_new_tokens=16)


def greedy(**changes) -> Settings:
    return dataclasses.replace(GREEDY, **changes)


def run(pair, settings, prompt=PROMPT, **options):
    """(rounds, reply), with everything that must always hold of them checked."""
    generation = Engine(pair).generate(prompt, settings, **options)
    rounds = list(generation)
    reply = generation.reply
    emitted = [t for r in rounds for t in r.tokens if t.fate in EMITTED]
    assert tuple(t.id for t in emitted) == reply.token_ids
    assert [t.emitted_index for t in emitted] == list(range(len(emitted)))
    assert "".join(t.text for t in emitted) + reply.tail == reply.text
    assert "".join(r.text for r in rounds) == reply.visible_text or reply.finish_reason == "cancelled"
    assert reply.num_rounds == len(rounds) == len({r.index for r in rounds})
    for r in rounds:
        assert [t.index for t in r.tokens] == list(range(len(r.tokens)))
        assert r.drafted <= r.num_draft_tokens <= settings.num_draft_tokens
        assert sum(r.count(f) for f in (Fate.REJECTED, Fate.RESAMPLED, Fate.BONUS, Fate.PLAIN)) <= 2
        assert r.count(Fate.REJECTED) == r.count(Fate.RESAMPLED)
        for t in r.tokens:
            tested = t.fate in (Fate.ACCEPTED, Fate.REJECTED)
            assert (t.u is not None) == (t.overlap is not None) == tested
            # The target's correction competed with the draft it replaces.
            assert (t.entropy_q is not None) == bool(t.top_q) == (tested or t.fate is Fate.RESAMPLED)
            assert (t.q is not None) == (t.fate not in (Fate.BONUS, Fate.PLAIN))
            for of_target in (t.p, t.p_raw, t.entropy_p):
                assert (of_target is not None) == bool(t.top_p) == (t.fate is not Fate.DISCARDED)
            if tested:
                assert (t.u * t.q < t.p) == (t.fate is Fate.ACCEPTED)
    return rounds, reply


@pytest.mark.parametrize("at", range(7))
def test_nothing_follows_an_end_of_text(at):
    """SD-01: the end anywhere in the block of four, on the bonus token, and in the next round."""
    end = 9
    ids = [5, 6, 7, 8, 4, 3, 2, 1]
    ids[at] = end
    pair = toy_pair(path(ids, 10, 2), path(ids, 10, 2), eos=end)
    rounds, reply = run(pair, greedy())
    assert list(reply.token_ids) == ids[: at + 1]
    assert reply.finish_reason == "eos_token" == rounds[-1].finish_reason
    assert reply.text == "".join("abcdefghij"[i] for i in ids[:at])
    if at == 4:
        assert rounds[-1].tokens[-1].fate is Fate.BONUS
    last = [t for r in rounds for t in r.tokens if t.emitted][-1]
    assert (last.text, last.label) == ("", f"<{end}>")
    # Caches hold nothing beyond the last committed id but one.
    follow_up = Engine(pair)
    first = follow_up.generate(PROMPT, greedy())
    list(first)
    assert follow_up.cache_bytes  # a toy's bytes are ids
    second = follow_up.generate([*PROMPT, *ids[: at + 1], 3], greedy())
    next(second)
    assert second.reused_tokens == len(PROMPT) + at


def test_block_with_an_end_in_its_middle_counts_what_was_emitted():
    """SD-15 (b): d1, d2, end, d4: three emitted, the fourth discarded, no bonus."""
    pair = toy_pair(path([5, 6, 9, 7, 8], 10, 2), path([5, 6, 9, 7, 8], 10, 2), eos=9)
    (only,), reply = run(pair, greedy())
    assert [t.fate for t in only.tokens] == [Fate.ACCEPTED] * 3 + [Fate.DISCARDED]
    assert (only.drafted, only.emitted, len(reply.token_ids)) == (4, 3, 3)


def test_every_declared_end_ends():
    """SD-02: an end that only the generation config names."""
    pair = toy_pair(path([5, 7, 6], 10, 2), path([5, 7, 6], 10, 2), eos=9, extra_end_ids=[7])
    _, reply = run(pair, greedy())
    assert (reply.token_ids, reply.finish_reason) == ((5, 7), "eos_token")


@pytest.mark.parametrize("limit", range(1, 12))
@pytest.mark.parametrize("k", [0, 1, 4])
def test_the_length_limit_is_met_exactly(limit, k):
    """SD-03."""
    ids = list(range(20))
    rounds, reply = run(
        toy_pair(path(ids, 20, 2), path(ids, 20, 2)), greedy(max_new_tokens=limit, num_draft_tokens=k)
    )
    assert list(reply.token_ids) == ids[:limit]
    assert reply.finish_reason == "length"
    assert [t.fate for r in rounds for t in r.tokens].count(Fate.DISCARDED) == 0


def test_k_shrinks_near_the_length_limit_and_says_so():
    """SD-15 (e) and (c): the last rounds draft only what may still be used; one token alone drafts none."""
    ids = list(range(20))
    pair = toy_pair(path(ids, 20, 2), path(ids, 20, 2))
    rounds, _ = run(pair, greedy(max_new_tokens=8))
    assert [(r.num_draft_tokens, r.num_draft_tokens_reason, r.drafted) for r in rounds] == [
        (4, "fixed", 4),
        (2, "length", 2),
    ]
    rounds, _ = run(pair, greedy(max_new_tokens=1))
    figures = metrics.summarize(rounds)
    assert (figures.drafted, figures.plain, figures.draft_acceptance_rate) == (0, 1, None)


def test_colours_counters_and_record_agree():
    """SD-16: 3 accepted + 1 resampled, 4 accepted + bonus, 0 accepted + 1 resampled."""
    target = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    draft = [1, 2, 3, 19, 5, 6, 7, 8, 9, 18, 0]
    rounds, _ = run(toy_pair(path(target, 20, 2), path(draft, 20, 2)), greedy(max_new_tokens=10))
    shown = (Fate.ACCEPTED, Fate.RESAMPLED, Fate.BONUS, Fate.PLAIN)
    assert [tuple(map(r.count, shown)) for r in rounds] == [(3, 1, 0, 0), (4, 0, 1, 0), (0, 0, 0, 1)]
    figures = metrics.summarize(rounds)
    assert (figures.accepted, figures.resampled + figures.bonus + figures.plain) == (7, 3)


@pytest.mark.parametrize(
    "stop, visible, emitted", [("d", "abc", 4), ("cd", "ab", 4), ("bcd", "a", 4), ("a", "", 1)]
)
@pytest.mark.parametrize("k", [0, 4])
def test_stop_strings_across_tokens_and_rounds(stop, visible, emitted, k):
    ids = list(range(10))
    rounds, reply = run(
        toy_pair(path(ids, 10, 2), path(ids, 10, 2)), greedy(stop=(stop,), num_draft_tokens=k)
    )
    assert (reply.visible_text, len(reply.token_ids), reply.finish_reason) == (
        visible,
        emitted,
        "stop_string",
    )
    assert "".join(r.text for r in rounds) == visible
    if k and emitted <= 4:
        assert [t.fate for t in rounds[-1].tokens].count(Fate.DISCARDED) == 4 - emitted


def test_end_of_text_comes_before_a_stop_string_and_length():
    pair = toy_pair(path([1, 9], 10, 2), path([1, 9], 10, 2), eos=9)
    assert run(pair, greedy(max_new_tokens=2))[1].finish_reason == "eos_token"
    # One token that is both.
    pair = toy_pair(path([1, 2], 10, 2), path([1, 2], 10, 2), extra_end_ids=[2])
    assert run(pair, greedy(max_new_tokens=2, stop=("c",)))[1].finish_reason == "eos_token"
    pair = toy_pair(path([1, 2], 10, 2), path([1, 2], 10, 2))
    assert run(pair, greedy(max_new_tokens=2, stop=("c",)))[1].finish_reason == "stop_string"


@pytest.mark.parametrize("length", [20, 31, 32, 60, 63])
def test_the_context_ends_a_reply_and_the_drafts_end_only_drafting(length):
    """SD-13: target 64, draft 32, K = 5, 30 tokens. (ToyDecoder refuses to read past its context.)"""
    ids = [i % 26 for i in range(64)]
    pair = toy_pair(path(ids, 26, length), path(ids, 26, length), draft_context_length=32)
    prompt = [0] * length
    rounds, reply = run(pair, greedy(num_draft_tokens=5, max_new_tokens=30), prompt)
    assert len(reply.token_ids) == min(30, 64 - length)
    assert list(reply.token_ids) == ids[: len(reply.token_ids)]
    assert reply.finish_reason == "length"
    reasons = {r.num_draft_tokens_reason for r in rounds}
    assert "draft_context" in reasons or length == 63  # where the target's own end is as near
    if length > 32:
        assert not any(r.num_draft_tokens for r in rounds)
    for r in rounds:
        if r.num_draft_tokens_reason == "draft_context":
            assert r.context_tokens - r.emitted + r.num_draft_tokens - 1 <= max(
                32, r.context_tokens - r.emitted
            )


@pytest.mark.parametrize("length", [0, 64, 70])
def test_prompts_without_room_are_refused_in_words(length):
    pair = toy_pair(table(1, 5), table(2, 5))
    with pytest.raises(PromptError, match="please"):
        Engine(pair).generate([0] * length, GREEDY)


@pytest.mark.parametrize("seed", range(3))
def test_reads_one_pass_a_round_and_never_twice(seed):
    """Rule 8: the draft reads whatever it has not read in its first step; no id is read twice or skipped."""
    pair = toy_pair(table(seed, 8), table(seed + 10, 8))
    rounds, _ = run(pair, greedy(temperature=1.0, max_new_tokens=40, seed=seed))
    target_reads, draft_reads = pair.target.reads[1:], pair.drafter.model.reads[1:]
    assert len(target_reads) == len(rounds)
    assert len(draft_reads) == sum(r.num_draft_tokens for r in rounds)
    assert {rows for _, rows in draft_reads} == {1, 2}  # two after a fully accepted round
    assert any(r.count(Fate.BONUS) for r in rounds)
    for (start, rows), (later, _) in itertools.pairwise(draft_reads):
        assert later <= start + rows  # never past what was read


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_target_row_ends_the_reply_and_keeps_what_was_emitted(bad):
    ids = list(range(20))

    def target(seen):
        logits = path(ids, 20, 2)(seen)
        if len(seen) >= 8:  # the seventh token of the reply
            logits[3] = bad
        return logits

    pair = toy_pair(target, path(ids, 20, 2))
    rounds, reply = run(pair, greedy())
    assert list(reply.token_ids) == ids[:6]
    assert reply.finish_reason == "error" and reply.error.endswith(".")
    assert rounds[-1].finish_reason == "error"
    assert [t.fate for t in rounds[-1].tokens] == [Fate.ACCEPTED] + [Fate.DISCARDED] * 3
    engine = Engine(pair)
    list(engine.generate(PROMPT, GREEDY))
    assert not engine.busy


def test_a_bad_draft_row_ends_drafting_for_that_round_only():
    ids = list(range(20))

    def draft(seen):
        return torch.full((20,), math.nan) if len(seen) in (4, 7) else path(ids, 20, 2)(seen)

    rounds, reply = run(toy_pair(path(ids, 20, 2), draft), greedy())
    assert list(reply.token_ids) == ids[:16]
    assert [r.num_draft_tokens_reason for r in rounds][:3] == ["draft_failed"] * 2 + ["fixed"]
    assert [r.drafted for r in rounds][:2] == [2, 2]


def test_a_draft_that_fails_at_once_leaves_a_plain_round():
    ids = list(range(20))
    pair = toy_pair(path(ids, 20, 2), lambda seen: torch.full((20,), math.nan))
    rounds, _ = run(pair, greedy(max_new_tokens=3))
    assert [t.fate for r in rounds for t in r.tokens] == [Fate.PLAIN] * 3


def test_cancel_keeps_what_was_said_and_frees_the_engine():
    pair = toy_pair(table(1, 5), table(2, 5))
    engine, cancel = Engine(pair), threading.Event()
    generation = engine.generate(PROMPT, greedy(max_new_tokens=50), cancel=cancel)
    first = next(generation)
    assert engine.busy
    cancel.set()
    assert list(generation) == []
    assert generation.reply.finish_reason == "cancelled"
    assert len(generation.reply.token_ids) == first.emitted
    assert not engine.busy


def test_whatever_else_uses_the_models_finds_no_reply_beside_it():
    engine = Engine(toy_pair(table(1, 5), table(2, 5)))
    generation = engine.generate(PROMPT, greedy(max_new_tokens=20))
    next(generation)
    with engine.idle() as free:
        assert not free and engine.busy
    assert engine.busy  # the reply's own hold
    generation.close()
    with engine.idle() as free:
        assert free and engine.busy
        waiting = engine.generate(PROMPT, GREEDY, cancel=threading.Event())
        thread = threading.Thread(target=lambda: next(waiting))
        thread.start()
        thread.join(0.1)
        assert waiting.reused_tokens is None and thread.is_alive()
    thread.join(10)
    assert waiting.reused_tokens is not None


def test_cancel_during_a_long_prompt_does_not_wait_for_all_of_it():
    cancel = threading.Event()

    class Slow(ToyDecoder):
        def _read(self, ids, cache):
            cancel.set()
            return super()._read(ids, cache)

    pair = toy_pair(table(1, 5), table(2, 5), context_length=2000, draft_context_length=2000)
    pair.target = Slow(table(1, 5), 2000)
    engine = Engine(pair)
    generation = engine.generate([1] * 1500, GREEDY, cancel=cancel)
    assert list(generation) == []
    assert generation.reply.finish_reason == "cancelled"
    assert generation.prefill_seconds is None and not engine.busy
    assert pair.target.reads == [(0, PREFILL_CHUNK)] and pair.drafter.model.reads == []


def test_cancel_while_the_draft_reads_a_long_prompt():
    cancel = threading.Event()

    class Slow(ToyDecoder):
        def _read(self, ids, cache):
            cancel.set()
            return super()._read(ids, cache)

    pair = toy_pair(table(1, 5), table(2, 5), context_length=2000)
    pair.drafter = ModelDrafter(Slow(table(2, 5), 2000))
    generation = Engine(pair).generate([1] * 1500, GREEDY, cancel=cancel)
    assert list(generation) == []
    assert generation.reply.finish_reason == "cancelled"
    assert pair.drafter.model.reads == [(0, PREFILL_CHUNK)]


def test_closing_and_never_starting():
    engine = Engine(toy_pair(table(1, 5), table(2, 5)))
    generation = engine.generate(PROMPT, greedy())
    next(generation)
    generation.close()
    assert generation.reply.finish_reason == "cancelled" and generation.reply.token_ids
    assert not engine.busy
    unborn = engine.generate(PROMPT, greedy())
    unborn.close()
    assert (unborn.reply.token_ids, unborn.reply.ttft_seconds) == ((), None)


def test_a_second_reply_waits_and_a_waiting_one_can_be_cancelled():
    engine = Engine(toy_pair(table(1, 5), table(2, 5)))
    first = engine.generate(PROMPT, greedy())
    next(first)
    cancel = threading.Event()
    waiting = engine.generate(PROMPT, greedy(), cancel=cancel)
    given: list = []
    thread = threading.Thread(target=lambda: given.extend(waiting))
    thread.start()
    cancel.set()
    thread.join(10)
    assert not thread.is_alive() and given == []
    assert waiting.reply.finish_reason == "cancelled"
    list(first)
    assert list(engine.generate(PROMPT, greedy()))


def test_next_may_be_called_from_different_threads():
    pair = toy_pair(table(1, 5), table(2, 5))
    alone = list(Engine(pair).generate(PROMPT, greedy(temperature=1.0)))
    generation, rounds = Engine(pair).generate(PROMPT, greedy(temperature=1.0)), []
    for _ in alone:
        thread = threading.Thread(target=lambda: rounds.append(next(generation)))
        thread.start()
        thread.join()
    assert [r.tokens for r in rounds] == [r.tokens for r in alone]


@pytest.mark.parametrize(
    "error, said",
    [
        (RuntimeError("no such kernel"), "no such kernel"),
        (RuntimeError("CUDA error: out of memory"), "too little memory"),  # NX-09
        (MemoryError(), "too little memory"),
    ],
)
def test_an_error_in_a_model_is_one_sentence_and_loses_nothing(error, said):
    ids = list(range(20))

    class Broken(ToyDecoder):
        def logits(self, ids_, cache):
            if cache.length > 5:
                raise error
            return super().logits(ids_, cache)

    pair = toy_pair(path(ids, 20, 2), path(ids, 20, 2))
    pair.target = Broken(path(ids, 20, 2))
    engine = Engine(pair)
    generation = engine.generate(PROMPT, greedy())
    rounds = list(generation)
    assert generation.reply.finish_reason == "error"
    assert said in generation.reply.error
    assert list(generation.reply.token_ids) == ids[: sum(r.emitted for r in rounds)]
    assert not engine.busy


def test_same_seed_same_tokens_also_when_another_reply_overlaps():
    """UI-08: each reply draws from a source of its own."""
    pair = toy_pair(table(1, 5), table(2, 5))
    settings = greedy(temperature=1.0, seed=3)
    alone = run(pair, settings)[1].token_ids
    other = Engine(toy_pair(table(1, 5), table(2, 5))).generate(PROMPT, greedy(temperature=1.0, seed=4))
    generation = Engine(pair).generate(PROMPT, settings)
    for _ in generation:
        next(other, None)
    assert generation.reply.token_ids == alone
    assert run(pair, greedy(temperature=1.0, seed=5))[1].token_ids != alone


def test_temperature_zero_records_the_soft_distributions_beside_the_hard_choice():
    rounds, _ = run(toy_pair(table(1, 5), table(2, 5)), greedy())
    tested = [t for r in rounds for t in r.tokens if t.fate in (Fate.ACCEPTED, Fate.REJECTED)]
    for t in tested:
        assert (t.p, t.q, t.overlap) == ((1.0, 1.0, 1.0) if t.fate is Fate.ACCEPTED else (0.0, 1.0, 0.0))
        assert 0 < t.p_raw < 1
        assert len(t.top_p) == len(t.top_q) == 5
        assert sum(p for _, p in t.top_p) == pytest.approx(1)
