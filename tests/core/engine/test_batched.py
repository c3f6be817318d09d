"""Rounds on the device: the same figures as step by step, and one wait a round."""

from __future__ import annotations

import dataclasses
import math
import random
from collections import Counter

import pytest
import torch

from core.bench.random_pair import SMALL, random_decoder, scripted_pair
from core.bench.synthetic_traffic import Watch
from core.drafters.auto import AutoDrafter
from core.drafters.model import ModelDrafter
from core.drafters.ngram import NgramDrafter
from core.drafters.recycling import RecyclingDrafter
from core.engine import device_rule
from core.engine.batched import Batched, Lookahead
from core.engine.loop import Engine
from core.engine.reuse import Kept
from core.figures.costs import Costs
from core.models.transformers_decoder import TransformersDecoder
from core.pairs.pair import Pair
from core.records import Fate, Settings
from core.verify import sampling
from tests.core.models_on_disk import VOCABULARY, make_model, make_near
from tests.core.test_drafters import Padded, known
from tests.core.toys import INFO, ToyTokenizer, path, table, toy_pair

PROMPT = [1, 2]
EXACT = ("id", "fate", "position", "index", "parent", "text", "u", "emitted_index")
CLOSE = ("p", "q", "h", "overlap", "entropy_p", "entropy_q", "p_raw")


def play(pair: Pair, settings: Settings, batched: bool, prompt=PROMPT):
    generation = Engine(pair, batched=batched).generate(prompt, settings)
    return list(generation), generation.reply


def assert_alike(pair: Pair, settings: Settings, prompt=PROMPT, close: float = 1e-6) -> list:
    """That both ways give the same rounds, figures but for ``close``; returns the tokens."""
    (ours, our_reply), (theirs, their_reply) = (play(pair, settings, way, prompt) for way in (True, False))
    assert (our_reply.token_ids, our_reply.error) == (their_reply.token_ids, their_reply.error)
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        reason, expected = one.num_draft_tokens_reason, other.num_draft_tokens_reason
        assert (reason, one.text, len(one.tokens)) == (expected, other.text, len(other.tokens))
        for token, expected in zip(one.tokens, other.tokens, strict=True):
            for name in EXACT:
                assert getattr(token, name) == getattr(expected, name), name
            for name in CLOSE:
                found, wanted = getattr(token, name), getattr(expected, name)
                assert found == wanted or found == pytest.approx(wanted, abs=close), name
            for found, wanted in ((token.top_p, expected.top_p), (token.top_q, expected.top_q)):
                assert [i for i, _ in found] == [i for i, _ in wanted]
                assert [v for _, v in found] == pytest.approx([v for _, v in wanted], abs=close)
    return [token for round_ in ours for token in round_.tokens]


def near(target, seed: int, head: list[int] | None = None):
    """A draft that is often right: the target's logits and others, those of ``head`` where it is given."""
    other = table(seed, 12, 0.5)

    def logits_of(ids):
        logits = target(ids) + other(ids)
        return logits if head is None else logits[torch.tensor(head)]

    return logits_of


SETTINGS = {
    "plain sampling": Settings(temperature=1.0),
    "cold": Settings(temperature=0.3, num_draft_tokens=5),
    "greedy": Settings(temperature=0, num_draft_tokens=4),
    "greedy, penalty": Settings(temperature=0, repetition_penalty=1.5),
    "one id": Settings(temperature=1.0, top_k=1),
    "top-k": Settings(temperature=1.0, top_k=4),
    "top-p": Settings(temperature=1.2, top_p=0.7),
    "min-p": Settings(temperature=1.5, min_p=0.2, num_draft_tokens=1),
    "penalty": Settings(temperature=1.0, repetition_penalty=1.8, num_draft_tokens=5),
    "all": Settings(temperature=1.3, top_k=8, top_p=0.9, min_p=0.1, repetition_penalty=0.7),
    "no drafts": Settings(temperature=1.0, num_draft_tokens=0),
}


@pytest.mark.parametrize("verifier", ["token", "block"])
@pytest.mark.parametrize("name", SETTINGS)
def test_the_same_rounds_as_step_by_step(name, verifier):
    settings = dataclasses.replace(SETTINGS[name], verifier=verifier, max_new_tokens=24)
    fates: Counter = Counter()
    for seed in range(4):
        head = [0, 2, 3, 5, 7, 8, 11] if seed % 2 else None
        target = table(seed, 12)
        pair = toy_pair(target, near(target, seed + 50, head), head_ids=head, eos=9 if seed == 3 else None)
        tokens = assert_alike(pair, dataclasses.replace(settings, seed=seed))
        fates.update(token.fate for token in tokens)
    assert {Fate.REJECTED, Fate.ACCEPTED, Fate.BONUS} <= fates.keys() or not settings.num_draft_tokens


CERTAIN = {
    "ngram": lambda own: NgramDrafter(64),
    "recycling": lambda own: RecyclingDrafter(64),
    "auto, else recycling": lambda own: AutoDrafter(RecyclingDrafter(64), 64),
    "auto, else a model": lambda own: AutoDrafter(own, 64),
}


@pytest.mark.parametrize("verifier", ["token", "block"])
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("kind", CERTAIN)
def test_drafts_that_are_known_before_a_round(kind, name, verifier):
    """Nothing is drawn for them: their draws are those of the tests alone, as step by step."""
    settings = dataclasses.replace(SETTINGS[name], verifier=verifier, max_new_tokens=24)
    fates, drafters = Counter(), set()
    for seed in range(3):
        target = table(seed, 12, 2.5)
        pair = toy_pair(target, near(target, seed + 50), eos=9 if seed == 2 else None)
        pair.drafter = CERTAIN[kind](pair.drafter)
        prompt = [1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6, 1, 2]
        tokens = assert_alike(pair, dataclasses.replace(settings, seed=seed), prompt)
        fates.update(token.fate for token in tokens)
        drafters |= {round_.drafter for round_ in play(pair, settings, True, prompt)[0]}
    if settings.num_draft_tokens:
        assert {Fate.REJECTED, Fate.ACCEPTED} & fates.keys()
        assert "ngram" in drafters or kind == "recycling"


@pytest.mark.parametrize("verifier", ["token", "block"])
@pytest.mark.parametrize("draft_rows, target_rows", [(8, 10), (10, 8)])
def test_padded_vocabularies_of_either_width(draft_rows, target_rows, verifier):
    pair = toy_pair(table(1, 6), table(2, 6))
    pair.target = Padded(known(table(1, 6)), target_rows, share=0.05)
    draft = Padded(known(table(2, 6)), draft_rows, share=0.05)
    pair.drafter = ModelDrafter(draft, vocabulary=target_rows)
    for seed, penalty in enumerate((1.0, 1.0, 1.3, 1.3)):
        settings = Settings(temperature=1.0, repetition_penalty=penalty, seed=seed, verifier=verifier)
        assert_alike(pair, dataclasses.replace(settings, max_new_tokens=25))


@pytest.mark.parametrize("verifier", ["token", "block"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("penalty", [1.0, 1.4])
def test_bad_rows_of_either_model(bad, verifier, penalty):
    def spoilt(logits_of, lengths):
        def of(ids):
            logits = logits_of(ids).clone()
            if len(ids) in lengths:
                logits[:] = bad if bad == -math.inf else logits
                logits[2] = bad
            return logits

        return of

    settings = Settings(temperature=1.0, num_draft_tokens=4, max_new_tokens=16, verifier=verifier)
    ends, reasons = set(), set()
    for seed in range(6):
        pair = toy_pair(spoilt(table(seed, 8), {13}), spoilt(table(seed, 8, 1.2), {2, 5, 9}))
        given = dataclasses.replace(settings, seed=seed, repetition_penalty=penalty)
        assert_alike(pair, given)
        rounds, reply = play(pair, given, True)
        ends.add(reply.finish_reason)
        reasons |= {round_.num_draft_tokens_reason for round_ in rounds}
        assert len(reply.token_ids) == 11 and reply.error.endswith(".")
    assert ends == {"error"} and "draft_failed" in reasons


def test_auto_k_chooses_alike():
    pair = toy_pair(table(1, 5), table(1, 5, 0.9))
    pair.costs = Costs(draft=0.3, verify=(1.0, 1.4, 1.45, 1.9))
    settings = Settings(temperature=1.0, auto_draft_tokens=True, num_draft_tokens=3, max_new_tokens=40)
    assert_alike(pair, settings)
    assert len({r.num_draft_tokens for r in play(pair, settings, True)[0]}) > 1


def test_lookahead_uses_every_draw_once_and_in_order():
    numbers = iter(range(100))
    draws = Lookahead(lambda: next(numbers))
    assert draws.peek(3) == [0, 1, 2]
    draws.use(2)
    assert draws.peek(3) == [2, 3, 4]
    draws.use(3)
    assert draws.peek(1) == [5]


@pytest.mark.parametrize("at", [5, 6, 7])
def test_an_id_just_beyond_the_embedding_is_read_as_the_first(at):
    """Of a draft that has six ids: 5 is its last, 6 is none of them."""
    pair = toy_pair(path([at, 1], 8, 2), table(2, 6))
    pair.target = Padded(lambda ids: path([at, 1], 8, 2)(ids), 8)
    pair.drafter = ModelDrafter(Padded(known(table(2, 6)), 6), vocabulary=8)
    assert_alike(pair, Settings(temperature=1.0, max_new_tokens=6, seed=1))


TIES = [
    (dict(top_p=0.3), [0, 0, 0, 0, 0], [0, 1]),
    (dict(top_k=2), [0, 0, 0, 0, 0], [0, 1]),
    (dict(top_k=3), [1, 0, 2, 1, 1], [0, 2, 3]),
    (dict(top_k=4, top_p=0.6), [0, 1, 0, 0, 0, 0], [0, 1]),
    (dict(top_p=0.75), [0] * 4 + [2], [0, 1, 4]),
    (dict(top_k=2, min_p=0.5), [-1, 0, 0, 0], [1, 2]),
    (dict(top_k=5), [0, -math.inf, -math.inf, 0, 0, -math.inf], [0, 3, 4]),
    (dict(top_p=0.5), [0] * 600, list(range(300))),  # more than top-p looks at first
]


@pytest.mark.parametrize("filters, logits, kept", TIES)
def test_of_equal_ids_the_lowest_are_kept_either_way(filters, logits, kept):
    """Both ways keep the same, so that a seed gives one reply."""
    settings = Settings(temperature=1.0, **filters)
    row = torch.tensor(logits, dtype=torch.float32)
    one, _ = sampling.distributions(row, settings, [])
    rows = device_rule.distributions(torch.stack([row, row]), settings).p
    assert [i for i in range(len(row)) if one.at(i)] == kept
    assert all(found.nonzero()[:, 0].tolist() == kept for found in rows)
    torch.testing.assert_close(one.over(torch.arange(len(row))), rows[0], atol=1e-6, rtol=0)


def test_ties_of_any_kind_are_cut_alike():
    generator = torch.Generator().manual_seed(0)
    chance = random.Random(0)
    for case in range(400):
        size = chance.randrange(2, 12)
        logits = torch.randint(0, 4, (3, size), generator=generator).float()
        logits[:, chance.randrange(size)] -= chance.choice([0.0, math.inf])
        settings = Settings(
            temperature=chance.choice([0.7, 1.0]),
            top_k=chance.randrange(size + 2),
            top_p=chance.choice([1.0, 0.3, 0.61, 0.93]),
            min_p=chance.choice([0.0, 0.1]),
        )
        rows = device_rule.distributions(logits, settings).p
        for row, found in zip(logits, rows, strict=True):
            if row.max() > -math.inf:
                one, _ = sampling.distributions(row, settings, [])
                assert one.over(torch.arange(size)).gt(0).equal(found.gt(0)), (case, row, settings)


# --- Rules on single tensors --------------------------------------------------------------------------------


def test_a_draw_is_that_of_the_reference_at_the_edges_too():
    weights = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]])
    for u in (0.0, 0.2499999, 0.25, 0.74, 0.75, 0.999, 1 - 2**-53):
        found = device_rule.draw(weights, torch.tensor([u], dtype=torch.float64))
        assert found.tolist() == [sampling.draw(weights[0], u)], u
    rows = torch.rand(50, 40, generator=torch.Generator().manual_seed(1)) ** 4
    rows[rows < 0.2] = 0
    u = torch.rand(50, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    found = device_rule.draw(rows, u).tolist()
    assert found == [sampling.draw(row, x) for row, x in zip(rows, u.tolist(), strict=True)]


def test_a_sum_that_does_not_rise_draws_nothing_impossible(monkeypatch):
    """Rule 6 where a parallel sum is rounded differently at each place: here by a bit either way."""
    exact, weights = torch.Tensor.cumsum, torch.tensor([[0.0, 0.25, 0.0, 0.0, 0.5, 0.0, 0.25, 0.0]])
    wobble = torch.tensor([0, 0, 1e-16, -1e-16, 0, 2e-16, -2e-16, 2e-16], dtype=torch.float64)
    monkeypatch.setattr(torch.Tensor, "cumsum", lambda x, dim: exact(x, dim) + wobble)
    for u in (0.0, 0.25, 0.25 + 1e-16, 0.75, 0.75 + 1e-16, 1 - 2**-53):
        index = device_rule.draw(weights, torch.tensor([u], dtype=torch.float64))
        assert weights[0, index] > 0, u


def judged(p, q, drafts, draws, verifier="token"):
    rows = torch.tensor(p)
    whole = device_rule.Rows(rows, rows, torch.ones(len(p), dtype=torch.bool), rows.amax(1))
    k = len(drafts)
    q = torch.tensor(q) if k else rows[:0]
    draws = torch.tensor(draws, dtype=torch.float64)
    drafts = torch.tensor(drafts, dtype=torch.int64)
    return device_rule.judge(whole, q, drafts, torch.tensor(k), draws, verifier)


@pytest.mark.parametrize("verifier", ["token", "block"])
def test_u_zero_keeps_nothing_impossible(verifier):
    found = judged([[0.0, 1.0], [1.0, 0.0]], [[1.0, 0.0]], [0], [0.3, 0.0, 0.5], verifier)
    assert (found.kept.tolist(), found.own.tolist()) == (0, [1])


def test_a_residual_without_mass_means_p_itself():
    """Reached through rounding alone: q a little above p, and a draw between."""
    found = judged([[0.25, 0.75], [1.0, 0.0]], [[0.25001, 0.75001]], [1], [0.5, 0.99999, 0.9])
    assert (found.kept.tolist(), found.own.tolist()) == (0, [1])


def test_block_thresholds_are_those_of_the_reference():
    generator = torch.Generator().manual_seed(5)
    for k in range(1, 7):
        p, q = (torch.rand(n, 5, generator=generator) ** 3 for n in (k + 1, k))
        p[0, 1] = 0
        p, q = p / p.sum(1, keepdim=True), q / q.sum(1, keepdim=True)
        drafts = [1 + n % 3 for n in range(k)]
        block = [
            (sampling.Distribution(p[n]), sampling.Proposal(drafts[n], d := sampling.Distribution(q[n]), d))
            for n in range(k)
        ]
        _, thresholds = sampling.block_thresholds(block)
        found = judged(p.tolist(), q.tolist(), drafts, [0.5] * (2 * k + 1), "block")
        assert found.h.tolist() == pytest.approx(thresholds, abs=1e-12)


# --- Waits --------------------------------------------------------------------------------------------------


def real_pair(**changes) -> Pair:
    target = TransformersDecoder(make_model("qwen2", 1, **changes))
    draft = TransformersDecoder(make_near("qwen2", 1, 2, **changes))
    return Pair(INFO, ToyTokenizer(), target, ModelDrafter(draft), frozenset())


class Letters(ToyTokenizer):
    def decode(self, ids, **_):
        return "x" * len(ids)


@pytest.mark.parametrize("verifier", ["token", "block"])
@pytest.mark.parametrize("name", SETTINGS)
def test_one_transfer_a_round(name, verifier):
    pair = real_pair()
    pair.tokenizer = Letters()
    settings = dataclasses.replace(SETTINGS[name], verifier=verifier, max_new_tokens=12)
    generation = Engine(pair, batched=True).generate([5, 6, 7], settings)
    rounds = [next(generation)]  # warms the models up
    with Watch().watching() as watch:
        rounds += generation
    assert watch.waits == Counter(tolist=len(rounds) - 1)


def test_what_counts_waits_notices_them():
    pair = real_pair()
    pair.tokenizer = Letters()
    with Watch().watching() as watch:
        list(Engine(pair, batched=False).generate([5, 6, 7], Settings(top_p=0.9, max_new_tokens=3)))
        x = torch.arange(3)
        assert x[x > 1] and x.sum() > 1
    assert {"item", "tolist", "index", "_local_scalar_dense"} <= watch.waits.keys()


@pytest.mark.parametrize("verifier", ["token", "block"])
def test_a_round_needs_no_value_and_mixes_no_devices(verifier):
    """On tensors without numbers: whoever asks for a value there, or brings one of the CPU's, fails."""
    meta = torch.device("meta")
    with meta:
        real = real_pair()
    trimmed = ModelDrafter(real.drafter.model, torch.arange(VOCABULARY))
    trimmed = dataclasses.replace(real, drafter=trimmed)
    lean = scripted_pair(*(random_decoder(sizes, "none", meta) for sizes in SMALL), 0.5, "none")
    names = ("all", "penalty", "greedy, penalty", "no drafts")
    for pair, name in zip((trimmed, lean, real, lean), names, strict=True):
        settings = SETTINGS[name]
        settings = dataclasses.replace(settings, num_draft_tokens=min(2, settings.num_draft_tokens))
        caches = Kept(pair.target.new_cache())
        way = Batched(pair, dataclasses.replace(settings, verifier=verifier), lambda: 0.5)
        turn = way.turn([3, 4, 5], settings.num_draft_tokens, caches)
        packed = way.launch([3, 4, 5], turn, caches)
        assert packed.device.type == "meta" and packed.dtype == torch.float64
        assert caches.cache.length == settings.num_draft_tokens + 1
        with pytest.raises(RuntimeError):
            packed[0].item()


def test_which_pairs_it_suits():
    pair = real_pair()
    assert not Batched.suits(pair) and not Engine(pair).batched
    assert Engine(pair, batched=True).batched
    toys = toy_pair(path([1], 3, 1), path([1], 3, 1))
    toys.target.device = torch.device("cuda")  # and the draft is on the CPU
    assert not Batched.suits(toys)
    assert Batched.suits(dataclasses.replace(toys, drafter=None))
    recycling = RecyclingDrafter(64)
    for drafter in (NgramDrafter(64), recycling, AutoDrafter(recycling, 64)):
        pair = dataclasses.replace(toys, drafter=drafter)
        assert Batched.suits(pair) and not Batched.suits(pair, "typical")
    assert not Batched.suits(dataclasses.replace(toys, drafter=AutoDrafter(toys.drafter, 64)))
