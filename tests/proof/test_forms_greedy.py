"""At temperature 0 a reply with drafts is the reply without, in every form that can be chosen here.

The embedded pair with EAGLE drafting three tokens a round, twenty prompts of the suite. A form whose rows are
bit-equal to one-row passes must give the same ids; another (float32 and bfloat16 on most processors) may give
another id at a near tie, and the test says at what gap.

Run: ``python -m pytest -m proof -s tests/proof/test_forms_greedy.py``; ten minutes on two cores.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from core.engine.loop import Engine
from core.models.embedded import DRAFTS
from core.models.linear import evidence, forms
from core.models.linear.findings import Found
from core.models.rows import row_dependence
from core.models.sizes import EMBEDDED
from core.pairs import pair as pairs
from core.pairs.pair import Pair
from core.records import Settings
from core.text.chat import encode_chat
from core.text.prompts import load_prompts

PROMPTS, TOKENS = 20, 48
NEAR = 0.1  # nats between the two likeliest, below which rounding may turn them round

pytestmark = pytest.mark.proof


def choosable(found: Found) -> list[str]:
    """The forms of layers that are right here, with those that keep another form beside for prompts."""
    right = [entry.form for entry in found.table if entry.right]
    close = [form for form in right if forms.is_close(form)]
    return close + [f"int4+{form}" for form in close if form != "int4" and "int4" in right]


def reply(pair: Pair, ids: list[int], drafts: int) -> list[int]:
    settings = Settings(temperature=0, num_draft_tokens=drafts, max_new_tokens=TOKENS)
    generation = Engine(pair).generate(ids, settings)
    for _round in generation:
        pass
    return generation.reply.token_ids


@torch.inference_mode()
def gap(pair: Pair, ids: list[int]) -> float:
    """Nats between the two likeliest ids after these."""
    two = pair.target.next_logits(ids, pair.target.new_cache()).float().log_softmax(-1).topk(2).values
    return (two[0] - two[1]).item()


def test_drafts_change_no_reply_in_any_form(embedded_home: Path, embedded_folder: Path, monkeypatch):
    found = evidence.find(EMBEDDED, embedded_home)
    monkeypatch.setattr(evidence, "remember", lambda *_: None)
    prompts = load_prompts()[:PROMPTS]
    for form in choosable(found):
        this = replace(found, layers=form, rows_tested=True, rows_note=None)
        monkeypatch.setattr(evidence, "find", lambda *_, this=this, **__: this)
        pair = pairs.build_embedded_pair(embedded_folder, DRAFTS, "")
        alone = row_dependence(pair.target).alone
        differing = []
        for prompt in prompts:
            ids = encode_chat(pair.tokenizer, [{"role": "user", "content": prompt.prompt}])
            plain, drafted = reply(pair, ids, 0), reply(pair, ids, 3)
            if plain != drafted:
                at = next(i for i, (a, b) in enumerate(zip(plain, drafted, strict=False)) if a != b)
                differing.append((prompt.id, at, gap(pair, ids + plain[:at])))
        print(f"{form}: {PROMPTS - len(differing)} of {PROMPTS} equal; rows alone {alone:.2g}; {differing}")
        assert alone > 0 or not differing, form
        assert all(nats < NEAR for _, _, nats in differing), (form, differing)
