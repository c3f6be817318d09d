"""The comparison of domains against ``core.figures.metrics`` on the same rounds, and what it holds apart."""

from __future__ import annotations

import contextlib
import dataclasses
import random

import pytest

from core.figures.intervals import ratio_interval
from core.figures.metrics import by_domain, measured_speedup, summarize
from core.record.domain_table import (
    ALL,
    MEASURES,
    PAIR_NAMES,
    SUM_NAMES,
    choices,
    default_choice,
    domain_table,
)
from core.record.store import Store
from core.record.stored import reading
from core.records import DOMAINS, PairInfo, Round, Settings
from tests.core.builders import PAIR, answer, record, round_of, rounds_of, token

WORDS = ("aaab", "aaxr", "xddr", "axdr", "aab", "p", "aaa", "xr")
PLAIN = Settings(seed=1, num_draft_tokens=0)


@pytest.fixture
def store(tmp_path):
    with contextlib.closing(Store(tmp_path / "redline.db")) as opened:
        yield opened


def found(store):
    with reading(store.path) as connection:
        return choices(connection)


def compared(store, combination=None, session=None):
    with reading(store.path) as connection:
        return domain_table(
            connection, combination or default_choice(choices(connection)).combination, session
        )


def random_rounds(rng: random.Random, words=WORDS) -> list[Round]:
    """Rounds of random fates, times and domains; not all of a round's tokens have its domain."""
    rounds, emitted = [], 0
    for index in range(rng.randrange(1, 9)):
        made = round_of(
            rng.choice(words),
            index,
            emitted,
            draft_seconds=rng.random(),
            target_seconds=rng.random(),
            overhead_seconds=rng.random(),
        )
        tokens = tuple(
            dataclasses.replace(
                t, domain=rng.choice(DOMAINS), overlap=t.overlap and rng.choice([rng.random(), None])
            )
            for t in made.tokens
        )
        rounds.append(dataclasses.replace(made, tokens=tokens))
        emitted += made.emitted
    return rounds


# --- The same figures as core.figures.metrics


def test_every_figure_is_that_of_the_metrics_on_random_replies(store):
    rng = random.Random(5)
    replies = [random_rounds(rng) for _ in range(25)]
    for rounds in replies:
        record(store, rounds=rounds)
    table = compared(store)
    everything = [round_ for rounds in replies for round_ in rounds]
    expected = {**by_domain(everything), ALL: summarize(everything)}
    rows = {row.domain: row for row in (*table.rows, table.whole)}
    assert list(rows) == [*DOMAINS, ALL] == list(expected)
    for domain, figures in expected.items():
        row = rows[domain]
        for name in (*SUM_NAMES, "drafted", "tested", "emitted", "decode_seconds"):
            if name not in ("overlap", "overlaps"):
                assert getattr(row.sums, name) == pytest.approx(getattr(figures, name), rel=1e-12), name
                assert isinstance(getattr(row.sums, name), int) == ("seconds" not in name)
        for name in MEASURES:
            assert row.measures[name].value == pytest.approx(getattr(figures, name), rel=1e-12), name
        clusters = [by_domain(rounds).get(domain) for rounds in replies]
        if domain == ALL:
            clusters = [summarize(rounds) for rounds in replies]
        kept = [one for one in clusters if one is not None]
        assert len(row.replies) == len(kept)
        accepted, drafted = [one.accepted for one in kept], [one.drafted for one in kept]
        assert row.measures["draft_acceptance_rate"].interval == ratio_interval(accepted, drafted)


def test_a_round_is_its_first_tokens_domain_and_one_without_tokens_is_other(store):
    mixed = round_of("", tokens=(token("a", 0, 0, 0, domain="code"), token("b", 1, 1, 1, domain="prose")))
    record(store, rounds=[mixed, round_of("", 1)])
    assert [(row.domain, row.sums.rounds, row.sums.emitted) for row in compared(store).rows] == [
        ("code", 1, 2),
        ("other", 1, 0),
    ]


def test_replies_without_an_end_count_with_every_round_on_record(store):
    record(store, "aab", finish=False)
    record(store, "xr", finish_reason="cancelled")
    table = compared(store)
    assert (table.whole.sums.accepted, table.whole.sums.rejected, len(table.whole.replies)) == (2, 1, 2)


# --- What is undefined


def test_where_nothing_was_drafted_acceptance_is_undefined_and_speed_is_not(store):
    record(store, "p", "p", settings=PLAIN)
    (row,) = compared(store).rows
    values = {name: estimate.value for name, estimate in row.measures.items()}
    assert values["draft_acceptance_rate"] is None and values["alpha"] is None
    assert values["tokens_per_pass"] == 1 and values["tokens_per_second"] == pytest.approx(1 / 0.625)
    assert (row.plain_replies, row.plain_speed.value, row.speedup.value) == (0, None, None)


def test_one_reply_has_figures_and_no_interval(store):
    record(store, "aab", "xr")
    (row,) = compared(store).rows
    assert row.measures["draft_acceptance_rate"].value == pytest.approx(2 / 3)
    assert all(estimate.interval is None for estimate in row.measures.values())
    record(store, "aaab", "aaab")
    (row,) = compared(store).rows
    low, high = row.measures["draft_acceptance_rate"].interval
    assert low == pytest.approx(2 / 3) and high == 1


def test_an_empty_record_has_no_choice(store):
    conversation = store.new_conversation()
    assert found(store) == () and default_choice(()) is None
    question = store.add_message(conversation, "user", "Hello?")
    answer(store, conversation, question, finish=False)  # begun, and not one round yet
    assert found(store) == ()


# --- What is held apart, and what is pooled


def variants() -> list[dict]:
    """One change of each thing that a combination holds fixed."""
    other = {"num_draft_tokens": 7, "auto_draft_tokens": True, "temperature": 0.0, "verifier": "lossy"}
    other |= {"tree_width": 3, "acceptance_threshold": 0.09}
    settings = [{"settings": Settings(seed=1, **{name: value})} for name, value in other.items()]
    pairs = [{"pair": dataclasses.replace(PAIR, **{name: "another"})} for name in (*PAIR_NAMES, "drafter")]
    return settings + pairs


@pytest.mark.parametrize("change", variants(), ids=lambda change: str(*change))
def test_what_was_made_differently_is_another_combination(store, change):
    record(store, "aab")
    record(store, "xr", **change)
    newest, oldest = found(store)
    assert newest.combination != oldest.combination
    assert compared(store, oldest.combination).whole.sums.accepted == 2
    assert compared(store, newest.combination).whole.sums.accepted == 0


def test_block_verification_is_exact_and_another_combination(store):
    record(store, "aab")
    record(store, "aaab", settings=Settings(verifier="block"))
    block, token_wise = (choice.combination for choice in found(store))
    assert (block.verifier, block.exact) == ("block", True)
    assert dataclasses.replace(block, verifier="token") == token_wise


def test_two_thresholds_of_a_rule_are_two_combinations_and_neither_is_exact(store):
    for threshold in (0.3, 0.5):
        record(store, "aab", settings=Settings(verifier="threshold", acceptance_threshold=threshold))
    newest, oldest = (choice.combination for choice in found(store))
    assert (oldest.acceptance_threshold, newest.acceptance_threshold) == (0.3, 0.5)
    assert not oldest.exact and not newest.exact
    assert compared(store, newest).whole.sums.accepted == 2


def test_the_pair_is_all_of_a_pair_info_that_makes_a_difference():
    left_out = {"drafter", "context_length", "draft_context_length", "exactness_note"}
    assert set(PAIR_NAMES) == {f.name for f in dataclasses.fields(PairInfo)} - left_out


def test_filters_are_pooled_and_counted(store):
    for settings in (Settings(), Settings(seed=3), Settings(top_p=0.9), Settings(top_k=40, stop=("x",))):
        record(store, "aab", settings=settings)
    (choice,) = found(store)
    assert (choice.replies, choice.filter_settings) == (4, 3)


def test_choices_are_newest_first_and_the_default_has_most_replies_that_drafted(store):
    for _ in range(3):
        record(store, "p", settings=PLAIN)
    for _ in range(2):
        record(store, "aab", settings=Settings(num_draft_tokens=2))
    record(store, "p", settings=Settings(num_draft_tokens=5))  # K was 5, and there was no room to draft
    record(store, "aab", settings=Settings(num_draft_tokens=5))
    assert [(c.combination.num_draft_tokens, c.replies, c.drafted_replies) for c in found(store)] == [
        (5, 2, 1),
        (2, 2, 2),
        (0, 3, 0),
    ]
    assert default_choice(found(store)).combination.num_draft_tokens == 2


def test_one_conversation_alone(store):
    conversation, _, _ = record(store, "aab")
    record(store, "xr")
    with reading(store.path) as connection:
        (choice,) = choices(connection, conversation)
    assert choice.replies == 1
    assert compared(store, session=conversation).whole.sums.rejected == 0
    assert compared(store).whole.sums.rejected == 1


# --- Beside plain decoding


def test_speed_beside_plain_is_of_the_same_target_and_temperature_whatever_the_draft(store):
    rng = random.Random(2)
    drafted = [random_rounds(rng) for _ in range(6)]
    plain = [random_rounds(rng, ("p",)) for _ in range(5)]
    alone = dataclasses.replace(PAIR, pair="custom", draft="", draft_fingerprint="", drafter="plain")
    for rounds in drafted:
        record(store, rounds=rounds)
    for number, rounds in enumerate(plain):
        record(store, rounds=rounds, settings=PLAIN, pair=alone if number % 2 else PAIR)
    record(store, "p", "p", settings=dataclasses.replace(PLAIN, temperature=0.0))
    record(store, "p", "p", settings=PLAIN, pair=dataclasses.replace(PAIR, device="another"))
    whole = compared(store).whole
    ours, theirs = (summarize(r for rounds in of for r in rounds) for of in (drafted, plain))
    assert whole.plain_replies == 5
    assert whole.plain_speed.value == pytest.approx(theirs.tokens_per_second)
    assert whole.speedup.value == pytest.approx(measured_speedup(ours, theirs))
    low, high = whole.speedup.interval
    assert low < whole.speedup.value < high


def test_a_domain_without_plain_replies_has_no_speedup(store):
    record(store, rounds=rounds_of("aab", "aab", domain="code"))
    record(store, rounds=rounds_of("p", domain="prose"), settings=PLAIN)
    table = compared(store)
    assert table.rows[0].speedup.value is None and table.rows[0].plain_replies == 0
    assert table.whole.speedup.value is not None and table.whole.speedup.interval is None
