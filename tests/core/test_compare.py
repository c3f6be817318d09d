"""Comparisons of drafters: turns, figures, cancelling, the record and the command."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import json
import os
import signal
import threading

import pytest

from core.compare import CompareError, compare, main, prompts_for, report
from core.drafters.base import Drafting
from core.drafters.untrained import makers
from core.engine.loop import Engine
from core.export import write_csv
from core.models.errors import LoadError
from core.record import compared
from core.record.compared import SPEEDUP, Compared, flat, new_comparison, table, with_replies
from core.record.domain_table import Sums
from core.record.store import Store
from core.records import Settings
from tests.core.toys import ToyTokenizer, toy_pair
from tests.core.toys import table as toy_table

SETTINGS = Settings(temperature=0.8, num_draft_tokens=3, max_new_tokens=12, seed=1)


class Chatty(ToyTokenizer):
    """The toys' tokenizer, which reads any chat as a few ids."""

    chat_template = "see apply_chat_template"
    bos_token_id = None
    added_tokens_decoder: dict = {}

    def apply_chat_template(self, messages, tokenize=False, add_generation_prompt=True) -> str:
        return "".join(message["content"] for message in messages)

    def __call__(self, text, add_special_tokens=True) -> dict:
        return {"input_ids": [ord(letter) % 5 for letter in text[:30]]}


def engine() -> Engine:
    pair = toy_pair(toy_table(1, 5), toy_table(2, 5))
    pair.tokenizer = Chatty()
    own = Drafting(pair.drafter, dict(draft="Toy", draft_fingerprint="f", drafter="model"))
    pair.others = makers(pair.target, pair.info, own)
    return Engine(pair)


def test_all_answer_the_same_prompts_in_turns_and_plain_is_among_them():
    prompts = prompts_for(2)
    assert [p.domain for p in prompts] == ["code", "prose", "code", "prose"]
    steps = list(compare(engine(), ["model", "ngram"], prompts, SETTINGS))
    last = steps[-1]
    assert (last.done, last.total, last.now) == (12, 12, "done") and last.comparison.complete
    order = [reply.drafter for reply in last.comparison.replies]
    assert order[:6] == ["plain", "model", "ngram", "model", "ngram", "plain"]  # another begins each time
    for name in ("plain", "model", "ngram"):
        own = [r for r in last.comparison.replies if r.drafter == name]
        assert [r.prompt_id for r in own] == [p.id for p in prompts]
        assert all(r.sums.emitted == 12 for r in own)
        assert all((r.sums.drafted > 0) == (name != "plain") for r in own if name != "ngram")


def test_cancelling_keeps_what_was_measured():
    cancel, seen = threading.Event(), None
    for seen in compare(engine(), ["model"], prompts_for(3), SETTINGS, cancel):
        if seen.done == 3:
            cancel.set()
    assert seen.now == "cancelled" and seen.done == 3
    assert not seen.comparison.complete and len(seen.comparison.replies) == 3


def test_a_drafter_that_cannot_be_made_is_named_and_the_others_go_on():
    run = engine()

    def broken() -> Drafting:
        raise LoadError("The draft of eagle is damaged: fetch it anew.")

    run.pair.others = {**run.pair.others, "eagle": broken}
    last = list(compare(run, ["eagle", "model"], prompts_for(1), SETTINGS))[-1]
    assert last.problems == ("The draft of eagle is damaged: fetch it anew.",)
    assert {r.drafter for r in last.comparison.replies} == {"plain", "model"} and last.comparison.complete


def test_a_reply_that_fails_is_named_and_does_not_count():
    run, left = engine(), [20]
    score = run.pair.target.logits

    def logits(ids, cache):
        left[0] -= 1
        if left[0] in (0, -1):  # in the first reply that counts, and when its round is played again
            raise RuntimeError("out of memory")
        return score(ids, cache)

    run.pair.target.logits = logits
    last = list(compare(run, ["model"], prompts_for(1), SETTINGS))[-1]
    assert len(last.problems) == 1 and "too little memory" in last.problems[0]
    assert (last.done, last.now) == (4, "done")
    assert len(last.comparison.replies) == 3 and not last.comparison.complete


def test_ctrl_c_keeps_what_was_measured(tmp_path, monkeypatch, capsys):
    toy, replies = engine(), []
    generate = toy.generate

    def interrupted(*given, **more):
        replies.append(1)
        if len(replies) == 5:  # two warm-ups, two replies
            signal.raise_signal(signal.SIGINT)
        return generate(*given, **more)

    toy.generate = interrupted
    monkeypatch.setattr("core.pairs.load.load_pair", lambda spec, say: toy.pair)
    monkeypatch.setattr("core.engine.loop.Engine", lambda pair: toy)
    db = tmp_path / "redline.db"
    assert main(["--drafters", "model", "--prompts", "2", "--max-new-tokens", "8", "--db", str(db)]) == 130
    assert "code, model" in capsys.readouterr().out
    with contextlib.closing(Store(db)) as store:
        (kept,) = store.comparisons()
    assert len(kept.replies) == 2 and not kept.complete


def test_nothing_to_compare_is_one_sentence():
    with pytest.raises(CompareError, match="Choose at least one drafter"):
        next(compare(engine(), ["plain"], prompts_for(1), SETTINGS))
    with pytest.raises(CompareError, match="K = 0"):
        next(compare(engine(), ["model"], prompts_for(1), dataclasses.replace(SETTINGS, num_draft_tokens=0)))
    for count in ("none", 0, 11, 1.5, "\u00b2", "9" * 400, "nan", ""):
        with pytest.raises(CompareError, match="whole number from 1 to 10"):
            prompts_for(count)


def reply(drafter: str, prompt: str, seconds: float, emitted: int = 10) -> Compared:
    sums = Sums(rounds=5, plain=emitted, target_seconds=seconds)
    if drafter != "plain":
        sums = Sums(
            rounds=5, rounds_with_drafts=5, accepted=5, rejected=3, discarded=2, resampled=3, bonus=2,
            overlaps=8, overlap=4.0, draft_seconds=seconds / 4, target_seconds=3 * seconds / 4,
        )  # fmt: skip
    return Compared(drafter, "" if drafter == "plain" else "Toy", "code", prompt, sums)


def made() -> compared.Comparison:
    took = [("plain", "a", 2.0), ("plain", "b", 4.0), ("model", "a", 1.0), ("model", "b", 2.0)]
    replies = [reply(*one) for one in took]
    return with_replies(new_comparison("toy", "Toy-135M", SETTINGS, 2), replies, True)


def test_figures_are_sums_over_sums_and_the_speed_up_is_paired():
    plain, model = table(made())
    assert model.figures["alpha"].value == 0.5
    assert model.figures["draft_acceptance_rate"].value == 0.5
    assert model.figures["tokens_per_pass"].value == 2.0
    assert model.figures["seconds_per_round"].value == pytest.approx(3.0 / 4 / 10)
    assert model.figures["seconds_per_draft"].value == pytest.approx(3.0 / 4 / 20)
    assert model.figures["tokens_per_second"].value == pytest.approx(20 / 3)
    # Each prompt is answered at twice the speed: whichever are drawn, the ratio is the same.
    assert model.figures[SPEEDUP].value == pytest.approx(2.0) and model.figures[SPEEDUP].interval is None
    assert plain.figures[SPEEDUP].value is None and plain.figures["alpha"].value is None
    assert "× plain" in report(made()) and "NOT EXACT" not in report(made())


def test_a_comparison_is_kept_listed_exported_and_deleted(tmp_path):
    comparison = made()
    with contextlib.closing(Store(tmp_path / "redline.db")) as store:
        store.add_comparison(comparison)
        store.add_comparison(comparison)  # once more: nothing is entered twice
        assert store.problem is None and store.comparisons() == [comparison]
        rows = write_csv(store, "comparisons", tmp_path / "out.csv")
        assert rows == 2
        with open(tmp_path / "out.csv", encoding="utf-8-sig", newline="") as file:
            _, model = csv.DictReader(file)
        assert (model["drafter"], model["speedup"], model["exact"]) == ("model", "2.0", "1")
        lossy = dataclasses.replace(made(), settings=dataclasses.replace(SETTINGS, verifier="greedy"))
        store.add_comparison(lossy)
        rows = flat(store.comparisons()[0])
        assert [(row["drafter"], row["exact"]) for row in rows] == [("plain", 1), ("model", 0)]
        assert "NOT EXACT" in report(lossy)
        assert store.delete_comparison(comparison.id) and store.comparisons() == [lossy]
        assert store.delete_all() and store.comparisons() == []


def test_the_command_compares_and_keeps_the_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("core.pairs.load.load_pair", lambda spec, say: engine().pair)
    out, db = tmp_path / "table.json", tmp_path / "redline.db"
    how = ["--drafters", "model, ngram", "--prompts", "1", "--max-new-tokens", "8"]
    assert main([*how, "--json", str(out), "--db", str(db)]) == 0
    said = capsys.readouterr().out
    assert "code, model" in said and "prose, ngram" in said
    rows = json.loads(out.read_text())
    assert {row["drafter"] for row in rows} == {"plain", "model", "ngram"} and rows[0]["complete"] == 1
    with contextlib.closing(Store(db)) as store:
        (kept,) = store.comparisons()
    assert len(kept.replies) == 6
    assert main(["--drafters", "hydra"]) == 2
    assert "no drafter 'hydra'" in capsys.readouterr().err
    assert main(["--k", "99"]) == 2 and "whole number from 0 to 16" in capsys.readouterr().err


def test_what_was_measured_is_kept_whoever_reads_the_table(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("core.pairs.load.load_pair", lambda spec, say: engine().pair)
    out, db = tmp_path / "table.json", tmp_path / "redline.db"
    how = ["--drafters", "model", "--prompts", "1", "--max-new-tokens", "8"]
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w", encoding="ascii") as nobody:  # nor has ASCII an alpha
        monkeypatch.setattr("sys.stdout", nobody)
        assert main([*how, "--json", str(out), "--db", str(db)]) == 141
    assert "Error" not in capfd.readouterr().err
    with contextlib.closing(Store(db)) as store:
        assert len(store.comparisons()) == 1 and out.exists()
