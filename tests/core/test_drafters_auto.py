"""Auto: who drafts follows from the committed ids alone (rule 7); what comes beyond the model's context."""

from __future__ import annotations

from core.drafters.auto import LONG_MATCH, AutoDrafter
from core.engine.loop import Engine
from core.figures.metrics import summarize
from core.records import Settings
from tests.core.toys import path, table, toy_pair

TEXT = [0, 1, 2, 0, 1, 1, 2, 0, 1]


def longest_repeat(ids: list[int]) -> int:
    endings = range(len(ids) - 1, 0, -1)
    return next((n for n in endings if any(ids[i : i + n] == ids[-n:] for i in range(len(ids) - n))), 0)


def test_who_drafts_follows_from_the_committed_ids_alone():
    """Whatever was drawn, drafted and refused before."""
    pair = toy_pair(table(1, 3), table(2, 3))
    pair.drafter = AutoDrafter(pair.drafter, 64)
    seen: dict[tuple[int, ...], set[str]] = {}
    for seed in range(60):
        ids = list(TEXT)
        settings = Settings(temperature=1.0, num_draft_tokens=3, max_new_tokens=24, seed=seed)
        for round_ in Engine(pair).generate(TEXT, settings):
            if round_.drafted:
                seen.setdefault(tuple(ids), set()).add(round_.drafter)
            ids += [token.id for token in round_.tokens if token.emitted]
    expected = {ids: {"ngram" if longest_repeat(list(ids)) >= LONG_MATCH else "model"} for ids in seen}
    assert seen == expected
    assert {name for names in seen.values() for name in names} == {"ngram", "model"}


def test_repeats_are_proposed_where_the_model_has_no_room():
    """And before that, no more is asked of the model than its context holds."""
    reply = [3, 4, 5] * 12
    pair = toy_pair(path(reply, 6, 2), table(1, 6), draft_context_length=8)
    model = pair.drafter.model
    pair.drafter = AutoDrafter(pair.drafter, 64)
    settings = Settings(temperature=0, num_draft_tokens=3, max_new_tokens=len(reply))
    generation = Engine(pair).generate([0, 1], settings)
    rounds = list(generation)
    assert generation.reply.token_ids == tuple(reply)
    assert all(start + rows <= 8 for start, rows in model.reads)
    late = [r for r in rounds if r.context_tokens - r.emitted > 8 and r.drafted]
    assert late and {r.drafter for r in late} == {"ngram"}
    assert summarize(late).rejected == 0
