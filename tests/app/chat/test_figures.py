from __future__ import annotations

import json
from dataclasses import replace

import pytest

from app.chat.answer import Answer
from app.chat.conversation import PLAIN, Turn
from app.chat.figures import comparison, figures_value, seconds
from core.figures.costs import Costs
from core.records import Settings, writes_exactly
from core.text.template import Prompt
from tests.core.builders import PAIR, reply_of, rounds_of


def answer_of(
    *words: str,
    kind: str = "first",
    k: int = 4,
    settings: dict | None = None,
    reason: str = "fixed",
    **changes,
) -> Answer:
    settings = Settings(seed=5, num_draft_tokens=k, **(settings or {}))
    answer = Answer(kind, kind, settings, "auto", PAIR)
    answer.rounds = [replace(made, num_draft_tokens_reason=reason) for made in rounds_of(*words)]
    answer.reply = reply_of(answer.rounds, **changes)
    answer.done.set()
    return answer


def test_figures_of_a_reply():
    texts = json.loads(figures_value(answer_of("aaab", "axdr", reused_tokens=4)))
    assert texts == {
        "ttft": "938 ms",  # 62.5 ms of prefill and the first round's 0.875 s
        "drafting": "model, K = 4, by token",
        "prefill": "62 ms, 3% of the reply",
        "reused": "4 of 10 tokens",
        "speed": "3.4",  # 6 tokens in 1.75 s
        "rate": "66.7%",
        "alpha": "0.750",
        "drift": "0, exact",
        "per_pass": "3.00",
        "rounds": "2",
        "emitted": "6",
        "context": "16 of 8,192 tokens",
        "used": 16 / 8192,
        "seed": "5",
        "finish": "end of text",
    }


def test_what_is_undefined_is_left_out():
    assert "reused" not in json.loads(figures_value(answer_of("p", reused_tokens=None)))
    assert json.loads(figures_value(answer_of("p", reused_tokens=0)))["reused"] == "0 of 10 tokens"
    texts = json.loads(figures_value(answer_of("p", "p", k=0)))
    assert "rate" not in texts and "alpha" not in texts and texts["per_pass"] == "1.00"
    assert figures_value(None) == "{}"


def test_figures_while_the_prompt_is_read():
    answer = Answer("key", "first", Settings(seed=5), "auto", PAIR, Prompt([1, 2, 3]))
    texts = json.loads(figures_value(answer))
    assert texts == {
        "drift": "0, exact",
        "rounds": "0",
        "emitted": "0",
        "drafting": "model, K = 3, by token",
        "context": "3 of 8,192 tokens",
        "used": 3 / 8192,
        "seed": "5",
    }


def test_how_tokens_were_drafted_and_judged():
    def drafting(*words, **how):
        return json.loads(figures_value(answer_of(*words, **how)))["drafting"]

    auto = {"auto_draft_tokens": True, "verifier": "block"}
    assert (
        drafting("aaab", "axr", "p", "aab", settings=auto, reason="auto", k=8)
        == "model, K auto, mean 1.8, by block"
    )
    assert drafting(settings=auto, k=8) == "model, K auto, by block"
    # Costs were not measured: what was asked for is not what happened.
    assert drafting("aaab", settings=auto, k=3) == "model, K = 3, by block"
    assert drafting("p", k=0) == "none, K = 0"
    lossy = {"verifier": "typical", "acceptance_threshold": 0.09}
    assert drafting(settings=lossy) == "model, K = 4, not exact: typical 0.09"
    assert drafting(settings={"verifier": "greedy"}) == "model, K = 4, not exact: greedy"
    marked = json.loads(figures_value(answer_of("aaab", settings=lossy)))
    assert marked["inexact"] is True
    alone = json.loads(figures_value(answer_of("p", k=0, settings=lossy)))  # nothing was judged by the rule
    assert "inexact" not in alone
    assert (alone["drift"], alone["drafting"]) == ("0, exact", "none, K = 0")
    assert not writes_exactly(Settings(verifier="greedy"), "eagle")
    assert writes_exactly(Settings(verifier="greedy"), "plain")  # of page, record and terminal alike


def test_where_reading_the_prompt_takes_most_of_the_time_the_page_says_that_drafting_cannot_help():
    # A round with drafts takes 0.875 s.
    for prefill, said in ((0.5, False), (1.75, True)):
        texts = json.loads(figures_value(answer_of("aaab", prefill_seconds=prefill)))
        assert ("note" in texts) is said
    assert "Reading the prompt took 67% of this reply's time." in texts["note"]
    assert "note" not in json.loads(figures_value(answer_of("p", k=0, prefill_seconds=1.75)))


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


def test_a_rule_that_is_not_exact_stays_marked_beside_the_speeds():
    lossy = {"verifier": "draft-ratio", "acceptance_threshold": 0.9}
    turn = Turn("Count.", [answer_of("aaab", settings=lossy), answer_of("p", kind=PLAIN, k=0)])
    assert "not exact: draft-ratio 0.9" in comparison(turn)
    assert "not exact: draft-ratio 0.9" in turn.drawn()


@pytest.mark.parametrize(
    ("words", "promised"),
    [
        # 2 of 2, 2 of 2 and 1 of 2 kept: E(3) = 1 + 1 + 1 + 1/2 in 0.5 + 0.75 s, where one alone takes 0.5 s
        (("aaab", "aaxr"), "1.40×"),
        # Rounds of K = 1 and K = 3, all kept: 2 + 4 tokens in 0.75 + 1.25 s
        (("ab", "aaab"), "1.50×"),
        (("aaab", "xddr"), "1.00×"),
        (("xddr",), "0.40×"),
        (("aaaab",), None),  # K = 4 was not measured
        (("axdr",), "0.80×"),
    ],
)
def test_the_prediction_from_costs_and_acceptance_stands_beside_the_measurement(words, promised):
    turn = Turn("Count.", [answer_of(*words), answer_of("p", kind=PLAIN, k=0)])
    assert "predicted" not in comparison(turn)
    turn.kept.costs = Costs(draft=0.25, verify=(0.5, 0.5, 0.5, 0.5))
    assert ("predicted" in comparison(turn)) is (promised is not None)
    assert f"predicted <b>{promised}</b>" in comparison(turn) or promised is None


def test_the_speed_up_stands_beside_the_first_reply():
    """6 tokens in 1.75 s, where a plain round takes 0.5 s: 1.71 measured."""
    answer = answer_of("aaab", "axdr")
    assert "speedup" not in json.loads(figures_value(answer))
    answer.costs = Costs(draft=0.25, verify=(0.5,) * 9)
    # 2 of 2, 1 of 2, none tested behind: E(3) = 1 + 1 + 1/2 + 1/2 of 1 in 0.5 + 0.75 s
    assert json.loads(figures_value(answer))["speedup"] == "predicted 1.20×, measured 1.71×"
    answer.costs = Costs(draft=0.25, verify=(0.5, 0.5))  # K = 3 was not measured
    assert json.loads(figures_value(answer))["speedup"] == "predicted –, measured 1.71×"
    plain = answer_of("p", "p", k=0)
    plain.costs = Costs(draft=0.25, verify=(0.5,) * 9)
    assert "speedup" not in json.loads(figures_value(plain))


def test_no_comparison_with_a_reply_that_says_nothing():
    turn = Turn("Count.", [answer_of("aaab"), answer_of(kind=PLAIN, k=0)])
    assert "cannot be compared" in comparison(turn) and "–" in comparison(turn)


def test_seconds():
    assert (seconds(None), seconds(0.0424), seconds(1.239)) == (None, "42 ms", "1.24 s")
