"""The redline view without a browser: what travels, the sentence of every fate, and the figures of a card."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from app.chat.card import locate, token_details
from app.chat.token_view import RedlineView, encode_reply_end, encode_reply_start, encode_round, encode_user
from app.chat.why import explain, number, readable
from core.records import Fate, Round, Token
from tests.app.scripted import scripted_pieces, scripted_rounds

HOSTILE = [
    "<script>alert(1)</script>",
    "</script>",
    "${1+1} {{v}} `a`",
    'a "quoted" \\n \\u003c \\',
    "line\nbreak\r\n\ttab",
    "\x00\x1e\x1f\x7f\x85\u2028\u2029",
    "half \ud83d and \udc00",
    "你好 ñ 😀 עברית \u202e",
    "",
]


def make_round(*tokens: Token, k: int = 4, reason: str = "fixed", finish_reason: str | None = None) -> Round:
    return Round(0, k, reason, tokens, "", 0, 0.0, 0.0, 0.0, finish_reason)


def token(fate: Fate, text: str = " foo", **kw: object) -> Token:
    return Token(**{"index": 0, "id": 7, "text": text, "fate": fate, "position": 0, **kw})


@pytest.mark.parametrize("text", HOSTILE)
def test_every_text_comes_back_exactly(text: str) -> None:
    for line, want in (
        (encode_user(text), ["u", text]),
        (encode_reply_start(text, 0.7, text), ["s", text, 0.7, text]),
        (encode_round(make_round(token(Fate.ACCEPTED, text))), ["r", 0, 4, [["a", text]]]),
        (encode_reply_end(3, "error", text, text), ["e", 3, "error", text, text]),
    ):
        assert line.endswith("\n") and line.count("\n") == 1
        assert "<" not in line
        line.encode("utf-8")  # as the page's connection will
        assert json.loads(line) == want


def test_every_fate_has_its_code_and_a_token_is_no_longer_than_it_must_be() -> None:
    tokens = [token(fate, "x", position=i) for i, fate in enumerate(Fate)]
    tokens += [token(Fate.PLAIN, "x", monospaced=True), token(Fate.BONUS, "", label="<|im_end|>")]
    assert json.loads(encode_round(make_round(*tokens)))[3] == [
        *([code, "x"] for code in "ardsbp"), ["p", "x", 1], ["b", "", 0, "<|im_end|>"],
    ]  # fmt: skip


def test_the_scripted_pair_keeps_the_identities_and_its_own_arithmetic() -> None:
    for temperature in (0.0, 0.7, 1.0):
        rounds = list(scripted_rounds(scripted_pieces(), seed=3, temperature=temperature))
        assert sum(r.count(Fate.REJECTED) for r in rounds) > 0
        for r in rounds:
            assert r.drafted == r.count(Fate.ACCEPTED) + r.count(Fate.REJECTED) + r.count(Fate.DISCARDED)
            assert r.count(Fate.REJECTED) == r.count(Fate.RESAMPLED)
            for t in r.tokens:
                if t.u is not None and t.p is not None:
                    assert (t.u * t.q < t.p) == (t.fate is Fate.ACCEPTED)
        kept = [t for r in rounds for t in r.tokens if t.emitted]
        assert [t.emitted_index for t in kept] == list(range(len(kept)))
        if temperature == 0:
            assert "".join(t.text for t in kept) == "".join(p.text for p in scripted_pieces())


# ---------------------------------------------------------------- sentences


def test_accepted_tells_the_test_in_figures() -> None:
    t = token(Fate.ACCEPTED, " world", p=0.41, q=0.62, u=0.31)
    assert explain(t, make_round(t), 0.7, {}) == (
        "The draft gave “ world” 0.62, the target 0.41; u·q = 0.31·0.62 = 0.19 < 0.41, so it was kept."
    )
    t = token(Fate.ACCEPTED, " world", p=0.7, q=0.62, u=0.99)
    assert explain(t, make_round(t), 0.7, {}) == (
        "The draft gave “ world” 0.62 and the target no less, 0.7, so it was kept whatever the draw."
    )


def test_rejected_and_its_correction_tell_the_same_test() -> None:
    struck = token(Fate.REJECTED, " foo", p=0.12, q=0.6, u=0.917)
    right = token(Fate.RESAMPLED, " bar", index=2, id=8, p=0.5, q=0.1)
    lost = token(Fate.DISCARDED, " baz", index=1, position=1, q=0.4)
    r = make_round(struck, lost, right)
    assert explain(struck, r, 1.0, {}) == (
        "The draft gave “ foo” 0.6, the target only 0.12; u·q = 0.92·0.6 = 0.55 ≥ 0.12, so it was struck out."
    )
    assert explain(right, r, 1.0, {}) == (
        "The draft's “ foo” was rejected (u·q = 0.55 ≥ p = 0.12), and this token was drawn from what the "
        "target wanted and the draft did not (the residual)."
    )
    assert explain(lost, r, 1.0, {}) == (
        "Never tested: “ foo”, earlier in this round, was rejected, "
        "and what the draft wrote after it fell with it."
    )


def test_rejected_where_the_target_says_never() -> None:
    t = token(Fate.REJECTED, p=0.0, q=0.6, u=0.0)
    assert "the target 0: the target would never write it here" in explain(t, make_round(t), 1.0, {})


def test_figures_as_close_as_they_may_be_still_differ_in_print() -> None:
    t = token(Fate.ACCEPTED, p=0.4100001, q=0.82, u=0.5)
    assert "= 0.41 < 0.4100001, so it was kept" in explain(t, make_round(t), 1.0, {})
    t = token(Fate.REJECTED, p=0.41, q=0.82, u=0.5)  # equal: strictly less is asked for
    assert "= 0.41 ≥ 0.41, so it was struck out" in explain(t, make_round(t), 1.0, {})


def test_a_record_that_contradicts_the_fate_is_not_made_to_fit() -> None:
    t = token(Fate.ACCEPTED, p=0.1, q=0.9, u=0.9)
    assert explain(t, make_round(t), 1.0, {}) == "The draft gave “ foo” 0.9, the target 0.1; it was kept."


@pytest.mark.parametrize(
    ("drafts", "start"), [(1, "The one draft was accepted"), (4, "All 4 drafts were accepted")]
)
def test_bonus_counts_the_drafts(drafts: int, start: str) -> None:
    b = token(Fate.BONUS, p=0.5)
    r = make_round(*[token(Fate.ACCEPTED)] * drafts, b)
    assert explain(b, r, 0.7, {}) == f"{start}, so the target's own next token came free (bonus)."


@pytest.mark.parametrize(
    ("reason", "k", "start"),
    [
        ("plain", 0, "Speculation is off (K = 0)"),
        ("length", 0, "No room for a draft was left under the length limit"),
        ("context", 0, "No room for a draft was left in the target's context"),
        ("draft_context", 0, "The text is longer than the draft can read"),
        ("draft_failed", 4, "The draft gave no usable distribution"),
        ("auto", 0, "The automatic draft length was 0"),
        ("fixed", 4, "Nothing was drafted in this round"),
    ],
)
def test_plain_tells_why_nothing_was_drafted(reason: str, k: int, start: str) -> None:
    t = token(Fate.PLAIN, p=0.25)
    r = make_round(t, k=k, reason=reason)
    assert explain(t, r, 0.7, {}) == f"{start}: the target wrote this token alone, giving it 0.25."
    assert explain(t, r, 0, {}) == f"{start}: the target wrote its most likely token alone."


def test_block_verification_tells_its_own_test() -> None:
    kept = token(Fate.ACCEPTED, " yes", p=0.41, q=0.62, u=0.3, h=0.66)
    carried = token(Fate.ACCEPTED, " and", p=0.1, q=0.5, u=0.9, h=0.2, index=1, position=1)
    struck = token(Fate.REJECTED, " no", p=0.12, q=0.6, u=0.5, h=0.25, index=2, position=2)
    lost = token(Fate.DISCARDED, " way", q=0.4, index=3, position=3)
    right = token(Fate.RESAMPLED, " so", p=0.5, q=0.1, index=4, position=2)
    r = make_round(kept, carried, struck, lost, right)
    assert explain(kept, r, 0.7, {}) == (
        "The draft gave “ yes” 0.62, the target 0.41; u = 0.3 < h = 0.66, so the block was kept up to here "
        "at least."
    )
    assert explain(carried, r, 0.7, {}) == (
        "The draft gave “ and” 0.5, the target 0.1; u = 0.9 ≥ h = 0.2, but a later draft of the block "
        "passed, and carried this one with it."
    )
    assert explain(struck, r, 0.7, {}) == (
        "The draft gave “ no” 0.6, the target 0.12; u = 0.5 ≥ h = 0.25, and no later draft of the block "
        "passed, so it was struck out."
    )
    assert explain(lost, r, 0.7, {}) == (
        "Judged with its block: neither “ no”, earlier in this round, nor any draft behind it passed, so "
        "they fell together."
    )
    assert explain(right, r, 0.7, {}) == (
        "The draft's “ no” was rejected (u = 0.5 ≥ h = 0.25), and this token was drawn from what the target "
        "wanted and the draft did not (the residual)."
    )


def test_a_block_at_temperature_zero_is_told_as_any_other() -> None:
    kept = token(Fate.ACCEPTED, " yes", p=1.0, q=1.0, u=0.9, h=1.0)
    struck = token(Fate.REJECTED, " no", p=0.0, q=1.0, u=0.0, h=0.0, top_p=((9, 1.0),), position=1)
    lost = token(Fate.DISCARDED, position=2)
    block = make_round(kept, struck, lost)
    for t in block.tokens:
        by_token = replace(t, h=None)
        alone = make_round(*(replace(other, h=None) for other in block.tokens))
        assert explain(t, block, 0, {9: " so"}) == explain(by_token, alone, 0, {9: " so"})


def test_temperature_zero_speaks_of_the_most_likely_token() -> None:
    kept = token(Fate.ACCEPTED, " yes", p=1.0, q=1.0)
    struck = token(Fate.REJECTED, " no", p=0.0, q=1.0, top_p=((9, 1.0),))
    right = token(Fate.RESAMPLED, " so", id=9, p=1.0)
    r = make_round(kept, struck, right)
    assert explain(kept, r, 0, {}) == (
        "The target's most likely token is “ yes”; the draft proposed it, so it was kept."
    )
    want = "The target's most likely token is “ so”; the draft proposed “ no” instead, so it was struck out."
    assert explain(struck, r, 0, {9: " so"}) == want
    assert explain(replace(struck, top_p=()), r, 0, {}) == want
    assert "is id 9; the draft" in explain(struck, r, 0, {})
    assert "most likely token is “ so”; the draft proposed “ no” instead" in explain(right, r, 0, {})


@pytest.mark.parametrize(
    ("reason", "how"),
    [
        ("eos_token", "with the end-of-text token"),
        ("stop_string", "at a stop string"),
        ("length", "at the length limit"),
    ],
)
def test_discarded_behind_the_end_of_the_reply(reason: str, how: str) -> None:
    t = token(Fate.DISCARDED)
    r = make_round(token(Fate.ACCEPTED), t, finish_reason=reason)
    assert explain(t, r, 0.7, {}) == f"Never tested: the reply ended {how}, earlier in this round."


def test_every_fate_has_a_sentence_without_any_figure() -> None:
    for temperature in (0.0, 0.7):
        for fate in Fate:
            t = token(fate)
            sentence = explain(t, make_round(t), temperature, {})
            assert sentence.endswith(".") and "None" not in sentence and "nan" not in sentence


def test_control_characters_are_named_by_signs() -> None:
    assert readable("a\n\tb\x00\x7f") == "a↵⇥b␀␡"
    t = token(Fate.ACCEPTED, "\n")
    assert "“↵”" in explain(t, make_round(t), 0.7, {})
    t = token(Fate.ACCEPTED, "", label="⟨F0 9F⟩")
    assert "⟨F0 9F⟩" in explain(t, make_round(t), 0.7, {})


# ---------------------------------------------------------------- trees, and rules that are not exact


def of_a_tree() -> Round:
    """“ cat” and “ dog” compete for a place, “ dog” is kept; then “ ran” is refused."""
    first = token(Fate.REJECTED, " cat", p=0.12, q=0.6, u=0.9)
    kept = token(Fate.ACCEPTED, " dog", index=1, p=0.5, q=0.25, u=0.5)
    below = token(Fate.DISCARDED, " sat", index=2, parent=0, position=1, q=0.7)
    struck = token(Fate.REJECTED, " ran", index=3, parent=1, position=1, p=0.1, q=0.5, u=0.75)
    made = token(Fate.RESAMPLED, " lay", index=4, parent=1, position=1, p=0.4)
    return make_round(first, kept, below, struck, made)


def test_a_card_lists_the_siblings_of_a_tree_and_says_what_p_is_of() -> None:
    r = of_a_tree()
    kept = token_details(r, 1, 0.7, lambda ids: [])
    assert kept["sentence"].endswith(
        "Tried before it and refused: “ cat” (u·q = 0.54 ≥ p = 0.12); p is what they left."
    )
    assert kept["siblings"] == [["“ cat”", "rejected", "0.12", "0.6"]]
    assert kept["figures"][0][2].endswith("of what its refused siblings left")
    first = token_details(r, 0, 0.7, lambda ids: [])
    assert "Tried before" not in first["sentence"] and first["siblings"] == [
        ["“ dog”", "accepted", "0.5", "0.25"]
    ]
    assert "left" not in first["figures"][0][2]
    below = token_details(r, 2, 0.7, lambda ids: [])
    assert "“ dog” was accepted first" in below["sentence"] or "“ cat”" in below["sentence"]
    assert below["siblings"] == []
    assert token_details(r, 4, 0.7, lambda ids: [])["siblings"] == [["“ ran”", "rejected", "0.1", "0.5"]]
    assert "a tree of 4 drafts" in kept["round"]
    chain = make_round(token(Fate.ACCEPTED, p=0.5, q=0.25, u=0.5))
    assert token_details(chain, 0, 0.7, lambda ids: [])["siblings"] == []


def test_what_stands_beside_the_text_in_a_tree_travels_under_a_code_of_its_own() -> None:
    codes = [code for code, *_ in json.loads(encode_round(of_a_tree()))[3]]
    assert codes == ["r", "a", "o", "r", "s"]


@pytest.mark.parametrize(
    ("rule", "threshold", "tested"),
    [
        ("greedy", None, "p(x) = 0.4 is not the highest that the target gives here (q(x) = 0.5)"),
        ("threshold", 0.45, "p(x) = 0.4 is not above the bar of 0.45 (q(x) = 0.5)"),
        ("draft-ratio", 0.9, "q(x) = 0.5 is not at least 0.9 times p(x) = 0.4"),
        ("target-ratio", 0.9, "p(x) = 0.4 is not at least 0.9 times q(x) = 0.5"),
        ("typical", 0.09, "where ε = 0.09 (q(x) = 0.5)"),
    ],
)
def test_the_card_explains_the_very_rule_that_judged_and_how_far_it_drifts(rule, threshold, tested) -> None:
    struck = token(Fate.REJECTED, p=0.4, q=0.5, drift=0.12)
    details = token_details(make_round(struck), 0, 0.7, lambda ids: [], rule, threshold)
    sentence = details["sentence"]
    assert sentence.startswith(f"By the rule {rule}, which is not exact: ") and tested in sentence
    assert "“ foo” was struck out, without a draw." in sentence
    assert "the rule's output differs from the target's by 0.12 in total variation." in sentence
    names = [name for name, _, _ in details["figures"]]
    assert "u" not in names and "drift" in names
    kept = token(Fate.ACCEPTED, p=0.4, q=0.5, drift=0.12)
    assert "not at least" not in explain(kept, make_round(kept), 0.7, {}, rule, threshold)
    assert "“ foo” was kept" in explain(kept, make_round(kept), 0.7, {}, rule, threshold)


# ---------------------------------------------------------------- the card's figures


def test_numbers_for_people() -> None:
    figures = [number(x) for x in (None, 0.0, 1.0, 0.5, 0.12345, 0.0001234)]
    assert figures == ["–", "0", "1", "0.5", "0.123", "0.000123"]
    assert number(0.99999) == "0.99999"
    assert number(1.7e-10) == "1.7×10⁻¹⁰"
    assert number(math.nextafter(1, 0)) != "1"


def test_details_of_a_drafted_token() -> None:
    t = token(
        Fate.REJECTED, p=0.12, q=0.6, u=0.9, overlap=0.5, entropy_p=1.5, entropy_q=1.25, position=2,
        top_p=((9, 0.88), (7, 0.12)), top_q=((7, 0.6), (4, 0.4)),
    )  # fmt: skip
    texts = {9: " so", 7: " foo", 4: ""}
    details = token_details(make_round(t), 0, 0.7, lambda ids: [texts[id] for id in ids])
    figures = {name: value for name, value, _ in details["figures"]}
    assert figures == {
        "p": "0.12", "q": "0.6", "p / q": "0.2", "u": "0.9", "overlap": "0.5", "position": "3",
        "entropy of p": "1.5", "entropy of q": "1.25",
    }  # fmt: skip
    assert details["top_p"] == [[" so", 0.88, "0.88", False], [" foo", 0.12, "0.12", True]]
    assert details["top_q"] == [[" foo", 0.6, "0.6", True], ["id 4", 0.4, "0.4", False]]
    assert details["round"] == "round 1, K = 4 (as set), token id 7"
    json.dumps(details)


def test_details_of_a_token_judged_with_its_block() -> None:
    t = token(Fate.REJECTED, p=0.12, q=0.6, u=0.9, h=0.25)
    rows = token_details(make_round(t, k=2, reason="auto"), 0, 0.7, lambda ids: [])["figures"]
    assert [row[:2] for row in rows][:5] == [
        ["p", "0.12"], ["q", "0.6"], ["p / q", "0.2"], ["u", "0.9"], ["h", "0.25"],
    ]  # fmt: skip
    meanings = {name: meaning for name, _, meaning in rows}
    assert "u < h" in meanings["u"] and "block" in meanings["h"] and "kept with" not in meanings["p / q"]
    greedy = token_details(make_round(t, k=2, reason="auto"), 0, 0, lambda ids: [])
    assert [row[0] for row in greedy["figures"]][:6] == ["p", "p_raw", "q", "p / q", "u", "h"]
    assert greedy["round"] == "round 1, K = 2 (chosen automatically), token id 7"


def test_undefined_figures_are_dashes_and_p_raw_comes_with_temperature_zero() -> None:
    def refuse(ids: list[int]) -> list[str]:
        raise AssertionError("nothing to decode")

    t = token(Fate.DISCARDED)
    details = token_details(make_round(t), 0, 0.0, refuse)
    assert {value for name, value, _ in details["figures"] if name != "position"} == {"–"}
    assert [name for name, _, _ in details["figures"]][1] == "p_raw"
    assert details["top_p"] == details["top_q"] == []
    assert details["titles"] == ["target at temperature 1", "draft at temperature 1"]


def test_locate_counts_every_token_of_every_round() -> None:
    rounds = [make_round(token(Fate.PLAIN)), make_round(token(Fate.REJECTED), token(Fate.RESAMPLED))]
    assert [locate(rounds, i) for i in range(3)] == [(rounds[0], 0), (rounds[1], 0), (rounds[1], 1)]
    for i in (-1, 3):
        with pytest.raises(IndexError):
            locate(rounds, i)


# ---------------------------------------------------------------- the component


def test_the_component_answers_only_well_formed_questions() -> None:
    asked = []

    def details(key: str, i: int) -> dict:
        asked.append((key, i))
        raise KeyError(key)

    view = RedlineView(details=details)
    for request in (None, [], ["key"], ["key", "0"], [3, 0], ["key", True], ["key", 0, 1], {"key": 0}):
        assert view.fetch_details(request) == {}
    assert asked == []
    assert view.fetch_details(["key", 0]) == {} and asked == [("key", 0)]


def test_the_template_is_fixed() -> None:
    config = RedlineView(encode_user("${1+1}{{v}}"), details=lambda key, i: {}).get_config()
    assert config["html_template"] == "<div class='rl'></div>" and not config["css_template"]
