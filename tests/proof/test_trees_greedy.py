"""Rule 18 on the pair the app runs: at temperature 0 a reply with trees is the target's own, id for id.

On the suite's prompts and on half a sentence of sixteen of them, which makes sixty. ``REDLINE_PROMPTS`` takes
fewer, from the start.
"""

from __future__ import annotations

import dataclasses
import os

import pytest

from core.engine.loop import Engine
from core.records import Settings
from core.text.chat import encode_chat
from core.text.prompts import load_prompts

PROMPTS = 60


@pytest.mark.proof
def test_trees_write_at_temperature_zero_what_the_target_writes_alone(embedded_pair, capsys):
    texts = [prompt.prompt for prompt in load_prompts()]
    texts += [text[: len(text) // 2] for text in texts[: PROMPTS - len(texts)]]
    texts = texts[: int(os.environ.get("REDLINE_PROMPTS", PROMPTS))]
    settings = Settings(temperature=0, num_draft_tokens=5, tree_width=3, max_new_tokens=96)
    engine, differ, trees = Engine(embedded_pair), [], 0
    for number, text in enumerate(texts):
        ids = encode_chat(embedded_pair.tokenizer, [{"role": "user", "content": text}])
        plain = engine.generate(ids, dataclasses.replace(settings, num_draft_tokens=0))
        list(plain)
        generation = engine.generate(ids, settings, drafter="eagle")
        trees += sum(round_.drafted > round_.num_draft_tokens for round_ in generation)
        if generation.reply.token_ids != plain.reply.token_ids:
            differ.append(number)
        with capsys.disabled():
            print(f"{number + 1 - len(differ)} of {number + 1} replies with trees are the target's own")
    assert trees > 10 * len(texts)
    assert not differ
