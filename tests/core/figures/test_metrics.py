"""Figures: the worked examples of the design, identities, and what is undefined."""

import dataclasses
import json
import random

import pytest

from core.figures import metrics
from core.records import Fate
from tests.core import builders
from tests.core.builders import round_of, rounds_of, token


def assert_identities(figures):
    builders.assert_identities(figures.as_row())
    assert figures.tested == figures.accepted + figures.rejected
    assert 0 <= figures.accepted <= figures.drafted


def test_counts_and_rates_of_a_small_reply():
    figures = metrics.summarize(rounds_of("aaxdr", "aaaab", "xdddr", "p"))
    assert_identities(figures)
    counts = {name: getattr(figures, name) for name in ("drafted", "accepted", "rejected", "discarded")}
    assert counts == {"drafted": 12, "accepted": 6, "rejected": 2, "discarded": 4}
    made = {name: getattr(figures, name) for name in ("resampled", "bonus", "plain", "emitted")}
    assert made == {"resampled": 2, "bonus": 1, "plain": 1, "emitted": 10}
    assert (figures.rounds, figures.rounds_with_drafts) == (4, 3)
    assert figures.draft_acceptance_rate == 6 / 12
    assert figures.tested_acceptance_rate == 6 / 8
    assert figures.mean_acceptance_length == 1 + 6 / 3
    assert figures.tokens_per_pass == 10 / 4
    # Positions were accepted in 2, 2, 1, 1 of 3 rounds with drafts and tested in 3, 2, 2, 1 of them.
    assert figures.acceptance_per_position == (2 / 3, 2 / 3, 1 / 3, 1 / 3)
    assert figures.conditional_acceptance == (2 / 3, 1.0, 1 / 2, 1.0)
    assert figures.alpha == 0.75


def test_alpha_is_the_mean_over_tested_tokens_only():
    overlaps = [("a", 0.5), ("x", 0.75), ("d", 0.0)]
    first, second, third = (token(letter, i, i, overlap=value) for i, (letter, value) in enumerate(overlaps))
    correction = token("r", 3, 1, overlap=0.0)
    figures = metrics.summarize([round_of("", tokens=(first, second, third, correction))])
    assert figures.alpha == 0.625


def test_seconds_and_speed():
    figures = metrics.summarize(rounds_of("aaxdr", "p"))
    assert (figures.draft_seconds, figures.target_seconds, figures.overhead_seconds) == (0.25, 1.0, 0.25)
    assert figures.decode_seconds == 1.5
    assert figures.tokens_per_second == 4 / 1.5


def test_nothing_happened_yet_and_everything_is_undefined():
    figures = metrics.summarize([])
    undefined = {name for name, value in figures.as_row().items() if value is None}
    assert undefined == {
        "draft_acceptance_rate", "tested_acceptance_rate", "acceptance_per_position",
        "conditional_acceptance", "mean_acceptance_length", "tokens_per_pass", "alpha", "drift",
        "tokens_per_second",
    }  # fmt: skip
    assert figures.rounds == figures.emitted == 0


def test_plain_decoding_has_no_acceptance():
    figures = metrics.summarize(rounds_of("p", "p"))
    assert_identities(figures)
    assert figures.draft_acceptance_rate is figures.tested_acceptance_rate is figures.alpha is None
    assert figures.mean_acceptance_length is None
    assert figures.acceptance_per_position is figures.conditional_acceptance is None
    assert figures.tokens_per_pass == 1.0


class TestSD15:
    def test_a_match_behind_a_rejection_is_not_accepted(self):
        # The mask is [True, False, True, True]: the engine discards what stands behind the first False.
        figures = metrics.summarize([round_of("axddr")])
        assert figures.accepted == 1

    def test_b_an_accepted_end_of_text_discards_what_stands_behind_it(self):
        figures = metrics.summarize([round_of("aaadd", finish_reason="eos_token")])
        assert (figures.emitted, figures.accepted, figures.bonus, figures.discarded) == (3, 3, 0, 2)
        assert_identities(figures)

    def test_c_and_d_one_token_or_none_leave_the_rate_undefined(self):
        for rounds in (rounds_of("p"), []):
            assert metrics.summarize(rounds).as_row()["draft_acceptance_rate"] is None

    def test_e_a_short_last_round_counts_what_it_drafted(self):
        assert metrics.summarize([round_of("aab", num_draft_tokens=4)]).drafted == 2


def test_sd_16_colours_are_counters():
    rounds = rounds_of("aaaxr", "aaaab", "xdddr")
    figures = metrics.summarize(rounds)
    assert figures.accepted == 7
    assert figures.resampled + figures.bonus == 3
    emitted = [t.fate for r in rounds for t in r.tokens if t.emitted]
    assert emitted == [Fate.ACCEPTED] * 3 + [Fate.RESAMPLED] + [Fate.ACCEPTED] * 4 + [
        Fate.BONUS,
        Fate.RESAMPLED,
    ]


def test_a_tree_counts_a_position_once_a_round():
    # Two siblings at position 0: the first rejected, the second accepted; its child was rejected.
    tokens = (
        token("x", 0, 0),
        token("a", 1, 0, emitted_index=0),
        token("x", 2, 1, parent=1),
        token("r", 3, 1, emitted_index=1, parent=1),
    )
    figures = metrics.summarize([round_of("", tokens=tokens)])
    assert_identities(figures)
    assert (figures.accepted, figures.rejected) == (1, 2)
    assert figures.acceptance_per_position == (1.0, 0.0)
    assert figures.conditional_acceptance == (1.0, 0.0)


def test_a_position_that_was_never_tested_has_no_conditional_acceptance():
    figures = metrics.summarize([round_of("xdr")])
    assert figures.acceptance_per_position == (0.0, 0.0)
    assert figures.conditional_acceptance == (0.0, None)
    assert json.loads(figures.as_row()["conditional_acceptance"]) == [0.0, None]


def test_rows_have_the_names_of_the_figures_and_flat_values():
    row = metrics.summarize(rounds_of("axr")).as_row()
    assert tuple(row) == metrics.FIGURE_NAMES
    assert all(value is None or isinstance(value, (int, float, str)) for value in row.values())
    assert json.loads(row["acceptance_per_position"]) == [1.0, 0.0]


def test_identities_hold_for_random_replies_and_their_domains():
    random.seed(0)
    for _ in range(50):
        words = []
        for _ in range(random.randrange(6)):
            kept, k = random.randrange(4), random.randrange(1, 5)
            full = "a" * k + "b" if k > 1 else "p"
            words.append(full if kept >= k else "a" * kept + "x" + "d" * (k - kept - 1) + "r")
        rounds = [
            dataclasses.replace(r, tokens=tuple(dataclasses.replace(t, domain=d) for t in r.tokens))
            for r, d in zip(rounds_of(*words), random.choices(["code", "prose"], k=len(words)), strict=True)
        ]
        whole, parts = metrics.summarize(rounds), metrics.by_domain(rounds).values()
        assert_identities(whole)
        for part in parts:
            assert_identities(part)
        for name in ("rounds", "drafted", "accepted", "emitted", "decode_seconds"):
            assert sum(getattr(part, name) for part in parts) == getattr(whole, name)


def test_a_round_belongs_to_its_first_tokens_domain():
    mixed = round_of("", tokens=(token("a", 0, 0, 0, domain="code"), token("b", 1, 1, 1, domain="prose")))
    other = round_of("ab", domain="prose")
    found = metrics.by_domain([other, mixed])
    assert list(found) == ["code", "prose"]
    assert (found["code"].emitted, found["prose"].emitted) == (2, 2)


def test_a_tally_gives_the_figures_so_far():
    rounds = rounds_of("aaxr", "ab", "p")
    tally = metrics.Tally()
    for seen, round_ in enumerate(rounds, 1):
        tally.add(round_)
        assert tally.figures() == metrics.summarize(rounds[:seen])


class TestExpectedTokens:
    def test_the_worked_example(self):
        # 1 + 0.8 + 0.64 + 0.512 + 0.4096: the design prints it as 3.36.
        assert metrics.expected_tokens(0.8, 4) == pytest.approx((1 - 0.8**5) / (1 - 0.8))
        assert f"{metrics.expected_tokens(0.8, 4):.2f}" == "3.36"

    def test_bounds(self):
        assert metrics.expected_tokens(1.0, 4) == 5
        assert metrics.expected_tokens(0.0, 4) == 1
        assert metrics.expected_tokens(0.5, 0) == 1

    def test_one_acceptance_for_each_position(self):
        assert metrics.expected_tokens((0.5, 0.5, 1.0), 3) == 1 + 0.5 + 0.25 + 0.25

    def test_positions_that_were_never_measured(self):
        assert metrics.expected_tokens(None, 2) is None
        assert metrics.expected_tokens((0.5,), 2) is None
        assert metrics.expected_tokens((0.5, None), 2) is None
        assert metrics.expected_tokens((0.0, None), 2) == 1  # the second is never reached

    def test_a_negative_k_is_refused(self):
        with pytest.raises(ValueError, match="K must be 0 or more"):
            metrics.expected_tokens(0.5, -1)

    def test_it_is_the_mean_of_what_measured_acceptance_gives(self):
        rounds = rounds_of("aab", "axr", "xdr", "aab")
        figures = metrics.summarize(rounds)
        expected = metrics.expected_tokens(figures.conditional_acceptance, 2)
        assert expected == pytest.approx(figures.tokens_per_pass)


def test_predicted_speedup():
    parts = dict(plain_seconds=0.01, draft_seconds=0.004, target_seconds=0.012, overhead_seconds=0.002)
    assert metrics.predicted_speedup(3.6, **parts) == pytest.approx(2.0)
    assert metrics.predicted_speedup(None, **parts) is None
    assert metrics.predicted_speedup(3.6, **{**parts, "plain_seconds": None}) is None
    assert metrics.predicted_speedup(3.6, **{**parts, "target_seconds": None}) is None
    zero = dict(plain_seconds=0.01, draft_seconds=0.0, target_seconds=0.0, overhead_seconds=0.0)
    assert metrics.predicted_speedup(1.0, **zero) is None


def test_measured_speedup():
    fast, slow = metrics.summarize(rounds_of("aaab")), metrics.summarize(rounds_of("p"))
    assert metrics.measured_speedup(fast, slow) == pytest.approx((4 / 0.875) / (1 / 0.625))
    assert metrics.measured_speedup(fast, metrics.summarize([])) is None
