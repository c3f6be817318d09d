from __future__ import annotations

import json
from dataclasses import replace

from app.widgets.charts import rounds_value
from tests.core.builders import rounds_of


def test_each_round_is_a_bar():
    value = json.loads(rounds_value(rounds_of("aaaab", "axddr", "p")))
    assert (value["accepted"], value["missed"], value["top"]) == ([4, 1, 0], [0, 3, 0], 4)
    assert value["mean"] == [4.0, 2.5, 1.667]
    assert "5 in 3 rounds" in value["summary"]


def test_k_is_drawn_where_it_was_chosen_before_each_round():
    assert "k" not in json.loads(rounds_value(rounds_of("aab", "ab")))  # the length limit cut the last one
    rounds = [replace(r, num_draft_tokens_reason="auto") for r in rounds_of("aab", "aaxdr", "p")]
    value = json.loads(rounds_value(rounds))
    assert (value["k"], value["top"]) == ([2, 4, 0], 4)
    assert "K was chosen before each round, from 0 to 4." in value["summary"]


def test_nothing_drafted_is_nothing_to_draw():
    assert "accepted" not in json.loads(rounds_value(rounds_of("p", "p")))
    assert json.loads(rounds_value(rounds_of("p")))["note"] == "Nothing was drafted in this reply."
    assert json.loads(rounds_value(()))["note"] == "Accepted tokens per round appear here."
