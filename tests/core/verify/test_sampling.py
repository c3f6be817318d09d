"""The maths, on numbers that can be checked by hand (SD-08, SP-01 of the public cases)."""

from __future__ import annotations

import math
import random
from collections import Counter
from itertools import product

import pytest
import torch
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from core.records import Fate, Settings
from core.verify.sampling import (
    BadLogitsError,
    Distribution,
    Proposal,
    accepts,
    block_thresholds,
    correction,
    distribution,
    distributions,
    draw,
    overlap,
    penalise,
    raw_probability,
    residual,
    sample,
    verify_blockwise,
    verify_tokenwise,
)

INF, NAN = math.inf, math.nan


def logs(*probabilities: float) -> torch.Tensor:
    return torch.tensor(probabilities).log()


def exact(*probabilities: float) -> Distribution:
    return Distribution(torch.tensor(probabilities))


def dense(p: Distribution, size: int) -> list[float]:
    return [round(p.at(i), 6) for i in range(size)]


def test_temperature_then_top_k_then_top_p():
    logits = logs(0.4, 0.3, 0.2, 0.1)
    assert dense(distribution(logits, 1.0), 4) == [0.4, 0.3, 0.2, 0.1]
    assert dense(distribution(logits, 1.0, top_p=0.5), 4) == [0.571429, 0.428571, 0, 0]
    assert dense(distribution(logits, 1.0, top_k=3), 4) == [0.444444, 0.333333, 0.222222, 0]
    # After top-k the first id alone has 0.444: top-p counts what top-k left.
    assert dense(distribution(logits, 1.0, top_k=3, top_p=0.44), 4) == [1, 0, 0, 0]
    squared = [0.16, 0.09, 0.04, 0.01]
    expected = [round(x / sum(squared), 6) for x in squared]
    assert dense(distribution(logits, 0.5), 4) == expected


def test_min_p_is_a_share_of_the_most_likely_and_comes_last():
    logits = logs(0.4, 0.3, 0.2, 0.1)
    assert dense(distribution(logits, 1.0, min_p=0.49), 4) == [0.444444, 0.333333, 0.222222, 0]
    assert dense(distribution(logits, 1.0, min_p=0.51), 4) == [0.571429, 0.428571, 0, 0]
    assert dense(distribution(logits, 1.0, min_p=1), 4) == [1, 0, 0, 0]
    # At temperature 0.5 the shares are squared: 0.5 becomes 0.25.
    assert dense(distribution(logits, 0.5, min_p=0.3), 4) == [0.64, 0.36, 0, 0]
    assert dense(distribution(logits, 1.0, top_k=3, top_p=0.7, min_p=0.8), 4) == [1, 0, 0, 0]


def test_the_penalty_divides_positive_and_multiplies_negative_logits_once():
    logits = torch.tensor([2.0, -2.0, 1.0, 0.5])
    assert penalise(logits, [0, 1, 1, 0, 9], 2.0).tolist() == [1.0, -4.0, 1.0, 0.5]
    assert logits.tolist() == [2.0, -2.0, 1.0, 0.5]
    assert penalise(logits, [], 2.0).tolist() == logits.tolist()
    ids = torch.tensor([3, 5, 7, 8])  # of a trimmed head
    assert penalise(logits, [7, 4, 0, 99, 3], 2.0, ids).tolist() == [1.0, -2.0, 0.5, 0.5]


def test_the_chain_agrees_with_transformers():
    """The same processors, in transformers' order, on random logits."""
    generator = torch.Generator().manual_seed(0)
    settings = Settings(temperature=0.7, top_k=20, top_p=0.9, min_p=0.05, repetition_penalty=1.3)
    chain = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(1.3),
            TemperatureLogitsWarper(0.7),
            TopKLogitsWarper(20),
            TopPLogitsWarper(0.9),
            MinPLogitsWarper(0.05),
        ]
    )
    for _ in range(20):
        logits = 3 * torch.randn(50, generator=generator)
        prefix = torch.randint(0, 50, (12,), generator=generator)
        ours, shown = distributions(logits, settings, prefix.tolist())
        theirs = chain(prefix[None], logits[None])[0].softmax(0)
        torch.testing.assert_close(ours.over(torch.arange(50)), theirs, atol=1e-6, rtol=0)
        assert shown is ours


def test_at_temperature_zero_the_record_shows_the_penalised_distribution_at_one():
    logits = logs(0.6, 0.3, 0.1)
    chosen, shown = distributions(logits, Settings(temperature=0, repetition_penalty=3.0), [0])
    # log 0.6 times 3 is log 0.216.
    assert chosen.top() == ((1, 1.0),)
    assert dense(shown, 3) == [round(x / 0.616, 6) for x in (0.216, 0.3, 0.1)]


@pytest.mark.parametrize("temperature", [0, 1e-4, 100])
@pytest.mark.parametrize("top_p", [0, 1e-4, 1])
@pytest.mark.parametrize("top_k", [0, 1, 500])
def test_degenerate_settings_stay_finite(temperature, top_p, top_k):
    logits = torch.linspace(-20, 20, 50)
    p = distribution(logits, temperature, top_k, top_p)
    assert torch.isfinite(p.probabilities).all()
    assert p.probabilities.sum().item() == pytest.approx(1)
    if temperature < 1 or top_k == 1 or top_p < 1e-3:
        assert dense(p, 50)[49] == pytest.approx(1) and sample(p, 0.999) == 49


def test_top_p_over_a_flat_large_vocabulary_sorts_everything():
    p = distribution(torch.zeros(5000), 1.0, top_p=0.5)
    assert 2499 <= len(p.probabilities) <= 2501


def test_ids_name_the_columns_of_a_trimmed_head():
    ids = torch.tensor([2, 5, 9])
    p = distribution(logs(0.5, 0.3, 0.2), 1.0, ids=ids)
    assert dense(p, 10) == [0, 0, 0.5, 0, 0, 0.3, 0, 0, 0, 0.2]
    assert distribution(logs(0.5, 0.3, 0.2), 1.0, top_k=2, ids=ids).top() == (
        (2, pytest.approx(0.625)),
        (5, pytest.approx(0.375)),
    )
    assert sample(distribution(logs(0.1, 0.2, 0.7), 0, ids=ids), 0.5) == 9


@pytest.mark.parametrize("row", [[0, NAN, 1], [0, INF, 1], [-INF, -INF, -INF]])
@pytest.mark.parametrize("temperature", [0, 1])
def test_rows_nothing_can_be_drawn_from_are_refused(row, temperature):
    with pytest.raises(BadLogitsError):
        distribution(torch.tensor(row), temperature)


def test_greedy_takes_the_first_of_equal_ids():
    p = distribution(torch.tensor([1.0, 3.0, -INF, 3.0]), 0)
    assert p.top() == ((1, 1.0),)


def test_a_mask_of_minus_infinity_is_legal():
    assert dense(distribution(torch.tensor([-INF, 0.0, 0.0]), 0.7), 3) == [0, 0.5, 0.5]


def test_acceptance_is_strict():
    assert not accepts(0.0, 0.0, 0.5)  # u = 0 must not keep an impossible token
    assert accepts(0.0, 1e-30, 0.5)
    assert not accepts(0.5, 0.25, 0.5)  # u * q == p
    assert accepts(0.4999999, 0.25, 0.5)


def test_acceptance_compares_in_float64():
    q = 0.1
    p = math.nextafter(0.05, 0)
    assert not accepts(0.5, p, q)  # in float32 both sides would be equal to 0.05 or above
    assert accepts(0.5, math.nextafter(0.05, 1), q)


def test_draw_never_returns_weight_zero():
    weights = torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0])
    assert draw(weights, 0.0) == 1
    assert draw(weights, 0.25) == 3
    assert draw(weights, math.nextafter(0.25, 0)) == 1
    assert draw(weights, math.nextafter(1.0, 0)) == 3
    assert {draw(weights * 3e-30, u / 1000) for u in range(1000)} == {1, 3}


def test_residual():
    p, q = exact(0.5, 0.3, 0.2), exact(0.6, 0.3, 0.1)
    assert residual(p, q).tolist() == pytest.approx([0, 0, 0.1], abs=1e-7)
    trimmed = Distribution(torch.tensor([0.5, 0.5]), torch.tensor([0, 2]))
    assert residual(p, trimmed).tolist() == pytest.approx([0, 0.3, 0], abs=1e-7)
    assert residual(trimmed, p).tolist() == pytest.approx([0, 0.3], abs=1e-7)
    assert residual(p, p).tolist() == [0, 0, 0]
    assert correction(p, p, 0.99) == 2  # nothing left: from p itself
    assert residual(p, exact(0.1, 0.3, 0.6), 0.5).tolist() == pytest.approx([0.15, 0, 0], abs=1e-7)
    assert p.probabilities.tolist() == pytest.approx([0.5, 0.3, 0.2])  # and p is untouched


def test_ids_the_target_does_not_have_count_for_nothing():
    p, wide = exact(0.5, 0.5), exact(0.2, 0.2, 0.6)
    assert residual(p, wide).tolist() == pytest.approx([0.3, 0.3], abs=1e-7)
    assert overlap(p, wide) == overlap(wide, p) == pytest.approx(0.4)


def test_overlap_and_raw_probability():
    p = exact(0.5, 0.3, 0.2)
    assert overlap(p, exact(0.6, 0.3, 0.1)) == pytest.approx(0.9)
    assert overlap(p, p) == pytest.approx(1)
    trimmed = Distribution(torch.tensor([0.9, 0.1]), torch.tensor([1, 2]))
    assert overlap(p, trimmed) == overlap(trimmed, p) == pytest.approx(0.4)
    assert overlap(trimmed, trimmed) == pytest.approx(1)
    one, whole = Distribution(torch.ones(1), torch.tensor([1])), Distribution(torch.ones(1))
    assert overlap(p, one) == overlap(one, p) == pytest.approx(0.3)
    assert (overlap(one, one), overlap(trimmed, one)) == (1, pytest.approx(0.9))
    assert (overlap(p, whole), overlap(one, whole)) == (0.5, 0)
    row = 3 + logs(0.7, 0.2, 0.1)
    assert raw_probability(row, 1, row.logsumexp(0)) == pytest.approx(0.2)


def test_top_lists_the_likeliest_and_nothing_impossible():
    assert exact(0.25, 0.0, 0.75).top() == ((2, 0.75), (0, 0.25))
    assert len(distribution(torch.zeros(40), 1.0).top()) == 10


def frequencies(
    p_logits: torch.Tensor, q_logits: torch.Tensor, rounds: int, temperature=1.0, **filters
) -> list[float]:
    """The emitted token of many one-draft rounds, as the engine makes them from two rows of logits."""
    p, q = distribution(p_logits, temperature, **filters), distribution(q_logits, temperature, **filters)
    uniform, counts = random.Random(5).random, Counter()
    for _ in range(rounds):
        proposal = Proposal(sample(q, uniform()), q, q)
        outcomes = list(verify_tokenwise(lambda _: p, [proposal], uniform))
        counts[next(o.id for o in outcomes if o.fate in (Fate.ACCEPTED, Fate.RESAMPLED))] += 1
    return [counts[i] / rounds for i in range(len(p_logits))]


def test_emitted_tokens_follow_p_not_q():
    seen = frequencies(logs(0.5, 0.3, 0.2), logs(0.6, 0.3, 0.1), 20_000)
    assert seen == pytest.approx([0.5, 0.3, 0.2], abs=0.012)  # 3.4 standard deviations


def test_filters_apply_to_both_models():
    seen = frequencies(logs(0.4, 0.3, 0.2, 0.1), logs(0.5, 0.25, 0.15, 0.1), 20_000, top_p=0.5)
    assert seen == pytest.approx([0.571, 0.429, 0, 0], abs=0.012)


def test_greedy_always_gives_the_targets_choice():
    seen = frequencies(logs(0.3, 0.5, 0.2), logs(0.6, 0.3, 0.1), 200, temperature=0)
    assert seen == [0, 1, 0]


def test_impossible_draft_with_u_zero_is_rejected_and_replaced_by_something_possible():
    p, q = exact(0.0, 0.5, 0.5), exact(1.0, 0.0, 0.0)
    rejected, resampled = verify_tokenwise(lambda _: p, [Proposal(0, q, q)], lambda: 0.0)
    assert (rejected.fate, resampled.fate, resampled.id) == (Fate.REJECTED, Fate.RESAMPLED, 1)


def test_zero_residual_draws_from_p():
    # Reached only through rounding: p is q, and the draw says reject all the same.
    p = exact(0.25, 0.75)
    q = Distribution(p.probabilities * (1 + 1e-6))
    draws = iter([1 - 1e-12, 0.9])
    rejected, resampled = verify_tokenwise(lambda _: p, [Proposal(0, q, q)], lambda: next(draws))
    assert (rejected.fate, resampled.id) == (Fate.REJECTED, 1)


def test_one_draft_more_is_one_row_more():
    asked = []

    def target(position):
        asked.append(position)
        return exact(1.0, 0.0)

    q = exact(1.0, 0.0)
    fates = [o.fate for o in verify_tokenwise(target, [Proposal(0, q, q)] * 3, lambda: 0.5)]
    assert fates == [Fate.ACCEPTED] * 3 + [Fate.BONUS]
    assert asked == [0, 1, 2, 3]
    assert [o.fate for o in verify_tokenwise(target, [], lambda: 0.5)] == [Fate.PLAIN]


# --- Block verification ------------------------------------------------------------------------------------


def random_model(seed: int, vocabulary: int = 3):
    """Distributions by prefix; some ids are impossible after some prefixes."""
    known: dict[tuple[int, ...], Distribution] = {}
    generator = torch.Generator().manual_seed(seed)

    def model(prefix: tuple[int, ...]) -> Distribution:
        if prefix not in known:
            weights = torch.rand(vocabulary, generator=generator) ** 3
            weights[torch.rand(vocabulary, generator=generator) < 0.2] = 0
            weights = weights + 1e-3 * (weights.sum() == 0)
            known[prefix] = Distribution(weights / weights.sum())
        return known[prefix]

    return model


def continuation(model, prefix: tuple[int, ...], ids: tuple[int, ...]) -> float:
    probability = 1.0
    for n in range(len(prefix), len(ids)):
        probability *= model(ids[:n]).at(ids[n])
    return probability


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_block_verification_is_exact(seed, length):
    """Every draft, every number kept and every correction, weighted: what is written is the target's own."""
    target, draft = random_model(seed), random_model(seed + 100)
    written: Counter = Counter()
    for drafted in product(range(3), repeat=length):
        of_draft = continuation(draft, (), drafted)
        if not of_draft:
            continue
        block = [
            (target(drafted[:n]), Proposal(drafted[n], draft(drafted[:n]), draft(drafted[:n])))
            for n in range(length)
        ]
        weights, thresholds = block_thresholds(block)
        assert all(0 <= h <= 1 for h in thresholds)
        for kept in range(length + 1):
            of_kept = thresholds[kept - 1] if kept else 1.0
            of_kept *= math.prod(1 - h for h in thresholds[kept:])
            if not of_kept:
                continue
            if kept == length:
                law = target(drafted).probabilities.double()
            else:
                p, proposal = block[kept]
                law = residual(p, proposal.q, weights[kept])
            for own, share in enumerate((law / law.sum()).tolist()):
                written[(*drafted[:kept], own)] += of_draft * of_kept * share
    for ids in product(range(3), repeat=length + 1):
        found = sum(
            share * continuation(target, w, ids) for w, share in written.items() if w == ids[: len(w)]
        )
        assert found == pytest.approx(continuation(target, (), ids), abs=1e-6), ids


def block_of(*pairs):
    """Rows and proposals of id 0, each with p and q of that id."""
    rows = [exact(p, 1 - p) for p, _ in pairs] + [exact(0.5, 0.5)]
    qs = [exact(q, 1 - q) for _, q in pairs]
    return rows.__getitem__, [Proposal(0, q, q) for q in qs]


def test_block_thresholds_by_hand():
    target, proposals = block_of((0.4, 0.8), (0.9, 0.6))
    weights, thresholds = block_thresholds([(target(i), proposal) for i, proposal in enumerate(proposals)])
    assert weights == pytest.approx([1, 0.5, 0.75])
    # Z = max(0, .5 * .9 - .6) + max(0, .5 * .1 - .4) = 0, so nothing is kept unless both are.
    assert thresholds == pytest.approx([0, 0.75])


def test_a_later_draft_that_succeeds_carries_those_before_it():
    target, proposals = block_of((0.4, 0.8), (0.9, 0.6))
    draws = iter([0.9, 0.7, 0.0])
    outcomes = list(verify_blockwise(target, proposals, lambda: next(draws)))
    assert [o.fate for o in outcomes] == [Fate.ACCEPTED, Fate.ACCEPTED, Fate.BONUS]
    assert [(o.u, o.h) for o in outcomes] == [(0.9, 0), (0.7, pytest.approx(0.75)), (None, None)]
    draws = iter([0.0, 0.76, 0.999])
    rejected, resampled = verify_blockwise(target, proposals, lambda: next(draws))
    assert (rejected.fate, rejected.position) == (Fate.REJECTED, 0)  # u = 0 keeps nothing impossible
    assert (resampled.fate, resampled.position, resampled.id) == (Fate.RESAMPLED, 0, 1)


def test_at_temperature_zero_blocks_are_judged_as_tokens_are():
    for rows in product([0, 1], repeat=3):
        p = [Distribution(torch.ones(1), torch.tensor([id])) for id in (*rows, 1)]
        proposals = [Proposal(0, q := Distribution(torch.ones(1), torch.tensor([0])), q)] * 3
        token, block = (
            [(o.id, o.fate) for o in verify(p.__getitem__, proposals, lambda: 0.999)]
            for verify in (verify_tokenwise, verify_blockwise)
        )
        assert token == block


def test_a_block_ends_before_a_bad_row():
    target, proposals = block_of((0.8, 0.8), (0.5, 0.5))

    def rows(bad):
        def row(position):
            if position >= bad:
                raise BadLogitsError("bad")
            return target(position)

        return row

    outcomes = verify_blockwise(rows(1), proposals, lambda: 0.5)
    assert next(outcomes).fate is Fate.ACCEPTED
    with pytest.raises(BadLogitsError):
        next(outcomes)
    with pytest.raises(BadLogitsError):
        next(verify_blockwise(rows(0), proposals, lambda: 0.5))


def test_nothing_proposed_is_plain_in_either_way():
    (only,) = verify_blockwise(lambda _: exact(0.2, 0.8), [], lambda: 0.5)
    assert (only.fate, only.id, only.position) == (Fate.PLAIN, 1, 0)
