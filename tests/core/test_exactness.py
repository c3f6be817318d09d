"""Rule 14: replies of the very engine, drafter and verifier the app runs are distributed as the target's own.

Where the draws can be enumerated (probabilities in quarters), the distribution of whole replies is
computed exactly from every combination of draws and compared with the target's own; elsewhere
replies are sampled and held against it by a G-test. ``tests/mutants.py`` shows that these tests
notice each way in which the rule is known to go wrong.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import product

import pytest
import torch

from core.engine.loop import Engine
from core.figures.costs import Costs
from core.records import EMITTED, Settings
from core.verify.sampling import distribution, distributions
from tests.core.toys import LogitsOf, table, toy_pair

pytestmark = pytest.mark.usefixtures("remembered")
PROMPT = [0, 1]
CELLS = 4


class MoreDraws(BaseException):
    """A scripted run needs one draw more than its script has. The engine would catch an Exception."""


def joint(
    target: LogitsOf,
    settings: Settings,
    length: int,
    vocabulary: int,
    eos: int | None = None,
    prompt: Sequence[int] = PROMPT,
) -> dict:
    """The target's own distribution of replies of ``length`` tokens to ``prompt``, by the chain rule."""
    result = {}
    for ids in product(range(vocabulary), repeat=length):
        if eos in ids:
            ids = ids[: ids.index(eos) + 1]
        probability, seen = 1.0, list(prompt)
        for token_id in ids:
            p, _ = distributions(target(tuple(seen)), settings, seen)
            probability *= p.at(token_id)
            seen.append(token_id)
        if probability:
            result[ids] = probability
    return result


def enumerate_replies(run: Callable[[Callable[[], float]], tuple[int, ...]]) -> dict:
    """The exact distribution of ``run``'s result over all combinations of ``CELLS`` equal draws."""
    found: dict[tuple[int, ...], Fraction] = Counter()
    scripts = [()]
    while scripts:
        script = scripts.pop()
        position = 0

        def uniform(script=script):
            nonlocal position
            if position == len(script):
                raise MoreDraws
            position += 1
            return (script[position - 1] + 0.5) / CELLS

        try:
            ids = run(uniform)
        except MoreDraws:
            scripts += [(*script, cell) for cell in range(CELLS)]
        else:
            found[ids] += Fraction(1, CELLS ** len(script))
    return found


def quarters(seed: int, pool: list[tuple[int, int, int]]) -> LogitsOf:
    """Logits whose probabilities are quarters, chosen from ``pool`` by the last two ids."""

    def logits_of(ids: tuple[int, ...]) -> torch.Tensor:
        previous = ids[-2] if len(ids) > 1 else 0
        return (torch.tensor(pool[(seed + 2 * previous + ids[-1]) % len(pool)]) / 4).log()

    return logits_of


# p/q is 1/2, 1 or above 1 wherever q > 0, and residuals are single ids or halves: all in quarters.
TARGETS = [(1, 2, 1), (2, 1, 1), (1, 1, 2)]
DRAFTS = [(2, 1, 1), (1, 2, 1), (2, 2, 0)]


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("k, length", [(1, 2), (0, 3)])
def test_every_combination_of_draws_of_a_reply(k, length, batched):
    target = quarters(0, TARGETS)
    settings = Settings(temperature=1.0, num_draft_tokens=k, max_new_tokens=length)
    expected, fates = joint(target, settings, length, 3), set()
    for seed in range(3):
        pair = toy_pair(target, quarters(seed, DRAFTS))

        def run(uniform, pair=pair) -> tuple[int, ...]:
            engine = Engine(pair, uniforms=lambda _: uniform, batched=batched)
            generation = engine.generate(PROMPT, settings)
            fates.update(token.fate for round_ in generation for token in round_.tokens)
            return generation.reply.token_ids

        found = enumerate_replies(run)
        assert found.keys() == expected.keys()
        for ids, probability in expected.items():
            assert float(found[ids]) == pytest.approx(probability, abs=1e-6), ids
    assert fates == ({"accepted", "rejected", "resampled", "bonus", "plain"} if k else {"plain"})


@pytest.mark.parametrize("batched", [False, True])
def test_every_combination_of_draws_of_a_two_draft_round(batched):
    """What a round emits, continued by the target alone, is what the target alone writes."""
    target = quarters(0, TARGETS)
    settings = Settings(temperature=1.0, num_draft_tokens=2, max_new_tokens=3)
    expected, fates = joint(target, settings, 3, 3), set()
    for seed in range(1 if batched else 3):  # a batched round takes all its draws at once: more scripts
        pair = toy_pair(target, quarters(seed, DRAFTS))

        def run(uniform, pair=pair) -> tuple[int, ...]:
            engine = Engine(pair, uniforms=lambda _: uniform, batched=batched)
            generation = engine.generate(PROMPT, settings)
            round_ = next(generation)
            generation.close()
            fates.update(token.fate for token in round_.tokens)
            return tuple(token.id for token in round_.tokens if token.emitted)

        found = enumerate_replies(run)
        for ids, probability in expected.items():
            written = sum(
                share * _continuation(target, emitted, ids)
                for emitted, share in found.items()
                if ids[: len(emitted)] == emitted
            )
            assert float(written) == pytest.approx(probability, abs=1e-6), ids
    assert fates == {"accepted", "rejected", "discarded", "resampled", "bonus"}


def _continuation(target: LogitsOf, prefix: tuple[int, ...], ids: tuple[int, ...]) -> float:
    """The target's probability, at temperature 1, of going on from ``prefix`` to ``ids``."""
    probability, seen = 1.0, [*PROMPT, *prefix]
    for token_id in ids[len(prefix) :]:
        probability *= distribution(target(tuple(seen)), 1.0).at(token_id)
        seen.append(token_id)
    return probability


def g_test(counts: Counter, expected: dict, total: int) -> float:
    """P-value of Wilson and Hilferty's normal approximation to the chi-squared law of G."""
    assert set(counts) <= set(expected), "a reply the target cannot write"
    pooled_seen, pooled_expected, statistic, cells = 0, 0.0, 0.0, 0
    for ids, probability in expected.items():
        mean = probability * total
        if mean < 5:  # rare replies together
            pooled_seen += counts[ids]
            pooled_expected += mean
            continue
        cells += 1
        if counts[ids]:
            statistic += 2 * counts[ids] * math.log(counts[ids] / mean)
    if pooled_expected:
        cells += 1
        if pooled_seen:
            statistic += 2 * pooled_seen * math.log(pooled_seen / pooled_expected)
    freedom = cells - 1
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    return 0.5 * math.erfc(z / math.sqrt(2))


def failing(draft: LogitsOf, lengths: set[int]) -> LogitsOf:
    """A draft without usable numbers at some lengths: K changes in the middle of a reply."""
    return lambda ids: torch.full((3,), math.nan) if len(ids) in lengths else draft(ids)


CASES = {
    "plain sampling": dict(settings=Settings(temperature=1.0)),
    "temperature": dict(settings=Settings(temperature=0.6)),
    "hot": dict(settings=Settings(temperature=1.7, num_draft_tokens=2)),
    "top-k": dict(settings=Settings(temperature=1.0, top_k=2)),
    "top-p": dict(settings=Settings(temperature=1.0, top_p=0.7)),
    "top-k and top-p": dict(settings=Settings(temperature=0.9, top_k=2, top_p=0.8, num_draft_tokens=3)),
    "min-p": dict(settings=Settings(temperature=1.0, min_p=0.4)),
    "repetition penalty": dict(settings=Settings(temperature=1.0, repetition_penalty=1.8)),
    "every filter": dict(
        settings=Settings(temperature=1.3, top_k=2, top_p=0.9, min_p=0.2, repetition_penalty=0.7)
    ),
    "penalty and trimmed head": dict(
        settings=Settings(temperature=1.0, repetition_penalty=2.0, num_draft_tokens=2), head_ids=[0, 2]
    ),
    "one draft": dict(settings=Settings(temperature=1.0, num_draft_tokens=1)),
    "no drafts": dict(settings=Settings(temperature=1.0, num_draft_tokens=0)),
    "K changes": dict(settings=Settings(temperature=1.0), fails_at={3, 5}),
    "trimmed head": dict(settings=Settings(temperature=1.0, num_draft_tokens=2), head_ids=[0, 2]),
    "end of text inside blocks": dict(settings=Settings(temperature=1.0), eos=2),
    "block": dict(settings=Settings(temperature=1.0, verifier="block")),
    "block of two, filters": dict(
        settings=Settings(
            temperature=0.8, top_p=0.9, repetition_penalty=1.3, num_draft_tokens=2, verifier="block"
        )
    ),
    "block, trimmed head": dict(settings=Settings(temperature=1.0, verifier="block"), head_ids=[0, 2]),
    "block, K changes": dict(settings=Settings(temperature=1.0, verifier="block"), fails_at={3, 5}),
    "block, end of text inside": dict(settings=Settings(temperature=1.0, verifier="block"), eos=2),
    "auto K": dict(settings=Settings(temperature=1.0, num_draft_tokens=3, auto_draft_tokens=True)),
    "auto K, block": dict(
        settings=Settings(temperature=1.0, num_draft_tokens=3, auto_draft_tokens=True, verifier="block")
    ),
    "draft is target": dict(settings=Settings(temperature=1.0), draft_seed=1),
}
LENGTH = 4


@pytest.mark.parametrize("batched, replies", [(False, 2000), (True, 100)])
@pytest.mark.parametrize("name", CASES)
def test_sampled_replies(name, batched, replies):
    """Fewer of the batched way, which is held against the other figure by figure (``test_batched.py``). Of
    one seed in ten the second reply with it counts."""
    case = CASES[name]
    settings, eos = case["settings"], case.get("eos")
    target, draft = table(1, 3, 1.2), table(case.get("draft_seed", 2), 3, 1.2)
    if "fails_at" in case:
        draft = failing(draft, case["fails_at"])
    head_ids = case.get("head_ids")
    if head_ids:
        whole = draft
        draft = lambda ids: whole(ids)[torch.tensor(head_ids)]  # noqa: E731
    pair = toy_pair(target, draft, head_ids=head_ids, eos=eos)
    # Costs that make K = 0 and 2 the best choice at one acceptance or another.
    pair.costs = Costs(draft=0.05, verify=(1.0, 1.4, 1.45, 1.9))
    engine = Engine(pair, batched=batched)
    counts: Counter = Counter()
    chosen: set[int] = set()
    for seed in range(replies):
        if seed % 10 == 0:
            list(engine.generate(PROMPT, _with(settings, seed)))
        generation = engine.generate(PROMPT, _with(settings, seed))
        rounds = list(generation)
        chosen |= {r.num_draft_tokens for r in rounds if r.num_draft_tokens_reason == "auto"}
        emitted = [t.id for r in rounds for t in r.tokens if t.fate in EMITTED]
        assert tuple(emitted) == generation.reply.token_ids
        counts[generation.reply.token_ids] += 1
    assert len(chosen) > 1 or not settings.auto_draft_tokens
    expected = joint(target, settings, LENGTH, 3, eos)
    assert sum(expected.values()) == pytest.approx(1, abs=1e-5)
    assert g_test(counts, expected, replies) > 1e-3


def _with(settings: Settings, seed: int) -> Settings:
    return dataclasses.replace(settings, seed=seed, max_new_tokens=LENGTH)


def test_the_g_test_notices_a_wrong_distribution():
    """The yardstick itself: replies sampled from the draft fail it by far."""
    target, draft = table(1, 3, 1.2), table(2, 3, 1.2)
    settings = Settings(temperature=1.0, num_draft_tokens=0)
    engine = Engine(toy_pair(draft, draft))
    counts: Counter = Counter()
    for seed in range(500):
        generation = engine.generate(PROMPT, _with(settings, seed))
        list(generation)
        counts[generation.reply.token_ids] += 1
    assert g_test(counts, joint(target, settings, LENGTH, 3), 500) < 1e-6
