from __future__ import annotations

import json

from app.charts import rounds_value
from tests.core.builders import rounds_of


def test_each_round_is_a_bar():
    value = json.loads(rounds_value(rounds_of("aaaab", "axddr", "p")))
    assert (value["accepted"], value["missed"], value["top"]) == ([4, 1, 0], [0, 3, 0], 4)
    assert value["mean"] == [4.0, 2.5, 1.667]
    assert "5 in 3 rounds" in value["summary"]


def test_nothing_drafted_is_nothing_to_draw():
    assert "accepted" not in json.loads(rounds_value(rounds_of("p", "p")))
    assert json.loads(rounds_value(rounds_of("p")))["note"] == "Nothing was drafted in this reply."
    assert json.loads(rounds_value(()))["note"] == "Accepted tokens per round appear here."
