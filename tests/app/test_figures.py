from __future__ import annotations

import json

from app.conversation import PLAIN, Answer, Turn
from app.figures import comparison, figures_value, seconds
from core.records import Settings
from tests.core.builders import reply_of, rounds_of


def answer_of(*words: str, kind: str = "first", k: int = 4) -> Answer:
    answer = Answer(kind, kind, Settings(seed=5, num_draft_tokens=k), "auto")
    answer.rounds = rounds_of(*words)
    answer.reply = reply_of(answer.rounds)
    answer.done.set()
    return answer


def test_figures_of_a_reply():
    texts = json.loads(figures_value(answer_of("aaab", "axdr"), 8192))
    assert texts == {
        "ttft": "938 ms",  # 62.5 ms of prefill and the first round's 0.875 s
        "prefill": "62 ms",
        "speed": "3.4",  # 6 tokens in 1.75 s
        "rate": "66.7%",
        "alpha": "0.750",
        "per_pass": "3.00",
        "rounds": "2",
        "emitted": "6",
        "context": "16 of 8,192",
        "seed": "5",
        "finish": "end of text",
    }


def test_what_is_undefined_is_left_out():
    texts = json.loads(figures_value(answer_of("p", "p", k=0), 8192))
    assert "rate" not in texts and "alpha" not in texts and texts["per_pass"] == "1.00"
    assert figures_value(None, None) == "{}"


def test_figures_while_the_prompt_is_read():
    answer = Answer("key", "first", Settings(seed=5), "auto", [1, 2, 3])
    texts = json.loads(figures_value(answer, 100))
    assert texts == {"rounds": "0", "emitted": "0", "context": "3 of 100", "seed": "5"}


def test_the_comparison_is_measured():
    turn = Turn("Count.", [answer_of("aaab", "aaab")])
    assert comparison(turn) == "" and comparison(None) == ""
    turn.answers.append(answer_of("p", "p", kind=PLAIN, k=0))
    # 8 tokens in 2 rounds of 0.875 s against 2 tokens in 2 rounds of 0.625 s
    shown = comparison(turn)
    assert "<b>4.6</b> tokens/s" in shown and "<b>1.6</b> tokens/s" in shown and "<b>2.86×</b>" in shown
    assert "pays off" in shown
    turn.answers = [answer_of("xr"), answer_of("p", kind=PLAIN, k=0)]
    assert "costs more" in comparison(turn)


def test_no_comparison_with_a_reply_that_says_nothing():
    turn = Turn("Count.", [answer_of("aaab"), answer_of(kind=PLAIN, k=0)])
    assert "cannot be compared" in comparison(turn) and "–" in comparison(turn)


def test_seconds():
    assert (seconds(None), seconds(0.0424), seconds(1.239)) == (None, "42 ms", "1.24 s")
