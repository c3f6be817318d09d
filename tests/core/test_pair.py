"""The embedded pair as it runs: what it says of itself, rows, and speculative against plain."""

from __future__ import annotations

import random

import pytest
import torch

from core.chat import encode_chat
from core.engine import Engine
from core.models.linear import FORMS
from core.prompts import load_prompts
from core.records import Settings


def test_it_says_what_it_is(embedded_pair):
    info = embedded_pair.info
    assert info.quantization in FORMS and info.draft_quantization in FORMS
    assert len(info.target_fingerprint) == len(info.draft_fingerprint) == 64
    assert embedded_pair.end_ids == {2}
    assert len(embedded_pair.drafter.head_ids) == 16384


def test_rows_are_scored_as_one_row_passes_score_them(embedded_pair):
    if embedded_pair.info.exactness_note:
        pytest.skip(embedded_pair.info.exactness_note)
    ids = encode_chat(embedded_pair.tokenizer, [{"role": "user", "content": "Name three rivers."}])
    target = embedded_pair.target
    with torch.inference_mode():
        cache = target.new_cache()
        target.prefill(ids[:-12], cache)
        start = cache.length
        single = torch.cat([target.logits([i], cache) for i in ids[-12:]])
        for rows in (2, 5, 9, 11, 12):
            cache.crop(start)
            assert torch.equal(target.logits(ids[start : start + rows], cache), single[:rows])


def test_a_prompt_read_in_two_parts_leaves_the_keys_of_one_reading(embedded_pair):
    """A follow-up goes on from kept keys, wherever the part before it ended."""
    if embedded_pair.info.exactness_note:
        pytest.skip(embedded_pair.info.exactness_note)
    target, ids = embedded_pair.target, random.Random(1).choices(range(49152), k=330)
    with torch.inference_mode():
        target.prefill(ids, whole := target.new_cache())
        for cut in (37, 107, 150, 293):
            target.prefill(ids[:cut], parts := target.new_cache())
            target.prefill(ids[cut:], parts)
            assert parts.buffer.equal(whole.buffer), cut


def greedy_ids(pair, prompt: str, k: int, length: int) -> tuple[int, ...]:
    ids = encode_chat(pair.tokenizer, [{"role": "user", "content": prompt}])
    settings = Settings(temperature=0, num_draft_tokens=k, max_new_tokens=length)
    generation = Engine(pair).generate(ids, settings)
    assert list(generation)
    return generation.reply.token_ids


@pytest.mark.parametrize("prompt", load_prompts()[:2], ids=lambda prompt: prompt.id)
def test_greedy_speculative_equals_plain(embedded_pair, prompt):
    plain = greedy_ids(embedded_pair, prompt.prompt, 0, 32)
    assert greedy_ids(embedded_pair, prompt.prompt, 4, 32) == plain
    assert greedy_ids(embedded_pair, prompt.prompt, 16, 32) == plain


@pytest.mark.proof
@pytest.mark.parametrize("prompt", load_prompts()[:20], ids=lambda prompt: prompt.id)
def test_greedy_speculative_equals_plain_at_length(embedded_pair, prompt):
    """The whole proof: 20 prompts, 128 tokens, K = 4. A difference names its place and the margin there."""
    plain = greedy_ids(embedded_pair, prompt.prompt, 0, 128)
    speculative = greedy_ids(embedded_pair, prompt.prompt, 4, 128)
    if speculative != plain:
        at = next(n for n, (a, b) in enumerate(zip(plain, speculative, strict=False)) if a != b)
        ids = encode_chat(embedded_pair.tokenizer, [{"role": "user", "content": prompt.prompt}])
        with torch.inference_mode():
            logits = embedded_pair.target.next_logits([*ids, *plain[:at]], embedded_pair.target.new_cache())
        best = logits.topk(2).values
        pytest.fail(f"differs at token {at}, where the two best logits lie {best[0] - best[1]:.4f} apart")
