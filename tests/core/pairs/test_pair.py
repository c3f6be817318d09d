"""Pairs and their ways to draft; the embedded one as it runs: rows, and speculative against plain."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from core.drafters.base import Drafting
from core.engine.loop import Engine
from core.machine.home import home
from core.models.embedded import DRAFTS
from core.models.key_blocks import KEY_BLOCK
from core.models.linear import evidence, forms
from core.models.linear.findings import Found
from core.models.rows import RowDependence
from core.models.sizes import EMBEDDED
from core.pairs import distilled
from core.pairs.draft_file import load_draft
from core.pairs.pair import LOAD_AGAIN, WARM_UP, build_embedded_pair, look_again, warm_up
from core.records import Settings
from core.text.chat import encode_chat
from core.text.detokenise import PromptError
from core.text.prompts import load_prompts
from tests.core.tiny import held
from tests.core.toys import table, toy_pair


def test_it_says_what_it_is(embedded_pair):
    info = embedded_pair.info
    assert info.quantization == forms.family(embedded_pair.products.layers).replace("float32", "none")
    assert info.draft_quantization in ("int4", "int8", "none")
    assert len(info.target_fingerprint) == len(info.draft_fingerprint) == 64
    assert embedded_pair.end_ids == {2}
    assert len(embedded_pair.drafter.head_ids) == 16384


def test_rows_are_scored_as_one_row_passes_score_them(embedded_pair):
    if embedded_pair.info.exactness_note:
        pytest.skip(embedded_pair.info.exactness_note)
    ids = encode_chat(embedded_pair.tokenizer, [{"role": "user", "content": "Name three rivers."}])
    target = embedded_pair.target
    with torch.inference_mode():
        cache = target.new_cache()
        target.prefill(ids[:-12], cache)
        start = cache.length
        single = torch.cat([target.logits([i], cache) for i in ids[-12:]])
        for rows in (2, 5, 9, 11, 12):
            cache.crop(start)
            assert torch.equal(target.logits(ids[start : start + rows], cache), single[:rows])


def test_a_prompt_read_in_two_parts_leaves_the_keys_of_one_reading(embedded_pair):
    """A follow-up goes on from kept keys, wherever the part before it ended."""
    if embedded_pair.info.exactness_note:
        pytest.skip(embedded_pair.info.exactness_note)
    target, ids = embedded_pair.target, random.Random(1).choices(range(49152), k=330)
    with torch.inference_mode():
        target.prefill(ids, whole := target.new_cache())
        for cut in (37, 107, 150, 293):
            target.prefill(ids[:cut], parts := target.new_cache())
            target.prefill(ids[cut:], parts)
            assert held(parts).equal(held(whole)), cut


def greedy_ids(pair, prompt: str, k: int, length: int, width: int = 1, name=None) -> tuple[int, ...]:
    ids = encode_chat(pair.tokenizer, [{"role": "user", "content": prompt}])
    settings = Settings(temperature=0, num_draft_tokens=k, max_new_tokens=length, tree_width=width)
    generation = Engine(pair).generate(ids, settings, drafter=name)
    assert list(generation)
    return generation.reply.token_ids


def margin_after(pair, prompt: str, written: tuple[int, ...], best: tuple[int, int]) -> float:
    """How far apart the logits of the two likeliest ids are there, which ``best`` must be."""
    ids = encode_chat(pair.tokenizer, [{"role": "user", "content": prompt}])
    with torch.inference_mode():
        top = pair.target.next_logits([*ids, *written], pair.target.new_cache()).topk(2)
    assert set(top.indices.tolist()) == set(best)
    return (top.values[0] - top.values[1]).item()


@pytest.mark.parametrize("prompt", load_prompts()[:2], ids=lambda prompt: prompt.id)
def test_greedy_speculative_equals_plain(embedded_pair, prompt):
    plain = greedy_ids(embedded_pair, prompt.prompt, 0, 32)
    assert greedy_ids(embedded_pair, prompt.prompt, 4, 32) == plain
    assert greedy_ids(embedded_pair, prompt.prompt, 16, 32) == plain


@pytest.mark.proof
@pytest.mark.parametrize("prompt", load_prompts()[:20], ids=lambda prompt: prompt.id)
def test_greedy_speculative_equals_plain_at_length(embedded_pair, prompt):
    """The whole proof: 20 prompts, 128 tokens, K = 4. A difference names its place and the margin there."""
    plain = greedy_ids(embedded_pair, prompt.prompt, 0, 128)
    speculative = greedy_ids(embedded_pair, prompt.prompt, 4, 128)
    if speculative != plain:
        at = next(n for n, (a, b) in enumerate(zip(plain, speculative, strict=False)) if a != b)
        ids = encode_chat(embedded_pair.tokenizer, [{"role": "user", "content": prompt.prompt}])
        with torch.inference_mode():
            logits = embedded_pair.target.next_logits([*ids, *plain[:at]], embedded_pair.target.new_cache())
        best = logits.topk(2).values
        pytest.fail(f"differs at token {at}, where the two best logits lie {best[0] - best[1]:.4f} apart")


def test_it_offers_what_ships_and_what_needs_no_training(embedded_pair):
    offered = {path.stem.removeprefix("draft-") for path in DRAFTS.glob("*.safetensors")}
    assert set(embedded_pair.drafters) == {*offered, "early-exit", "ngram", "recycling", "auto", "plain"}
    for kind in offered:
        file = DRAFTS / f"draft-{kind}.safetensors"
        assert set(load_draft(file).feature_layers) <= set(embedded_pair.target.feature_layers)


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("name", ["eagle", "medusa"])
def test_greedy_replies_of_trained_drafters_are_the_targets_own(embedded_pair, name, width):
    if name not in embedded_pair.drafters:
        pytest.skip(f"no draft of kind {name} ships")
    prompt = load_prompts()[0].prompt
    plain = greedy_ids(embedded_pair, prompt, 0, 24)
    found = greedy_ids(embedded_pair, prompt, 4, 24, width, name)
    if width == 1 or found == plain:
        assert found == plain
    else:  # a tree's rows are exact up to rounding: where they part, two ids were as good as equally likely
        at = next(n for n, (a, b) in enumerate(zip(plain, found, strict=False)) if a != b)
        assert margin_after(embedded_pair, prompt, plain[:at], (plain[at], found[at])) < 0.02
    info = embedded_pair.drafting(name).info
    assert info.drafter == name and len(info.draft_fingerprint) == 64
    assert info.target_fingerprint == embedded_pair.info.target_fingerprint


FLOATS = Found("float32", "float32", "float32", "float32", (), {})


@pytest.mark.parametrize("layers, said", [("int4", None), ("int8-onednn", LOAD_AGAIN)])
def test_looking_again_says_where_other_products_would_run(monkeypatch, layers, said):
    found = Found("int4", "float32", "int4", "float32", (), {})
    monkeypatch.setattr(evidence, "look", lambda sizes, **_: dataclasses.replace(found, layers=layers))
    monkeypatch.setattr(evidence, "_found", {})
    pair = dataclasses.replace(toy_pair(table(1, 3), table(2, 3)), products=found)
    assert look_again(pair) == said
    assert pair.products.layers == "int4"  # what runs
    assert evidence.find(EMBEDDED, home()).layers == layers  # what the next load takes
    assert look_again(dataclasses.replace(pair, products=None)) is None


def test_rows_are_tested_once_for_the_forms_of_a_machine(monkeypatch, embedded_folder, tmp_path):
    """What a self-test found is kept with the evidence and shown again; another look tests anew."""
    tests = []

    def dependence(scorer, say, behind):
        tests.append(behind)
        return RowDependence(0.0, 1e-6)

    monkeypatch.setattr("core.pairs.pair.self_test", dependence)
    monkeypatch.setattr(evidence, "look", lambda sizes, **_: FLOATS)
    monkeypatch.setattr(evidence, "_found", {})
    notes = []
    for _ in range(2):
        pair = build_embedded_pair(embedded_folder, DRAFTS, "12" * 32)
        notes.append(pair.info.exactness_note)
        evidence._found.clear()  # another process
    assert tests == [KEY_BLOCK - 8] and notes == [RowDependence(0.0, 1e-6).sentence] * 2
    assert pair.products.layers == "float32" and FLOATS.sentence in pair.notes
    evidence.find(EMBEDDED, home(), again=True)
    build_embedded_pair(embedded_folder, DRAFTS, "12" * 32)
    assert len(tests) == 2


def test_a_draft_for_the_embedded_target_names_no_end(monkeypatch, embedded_folder, tmp_path):
    monkeypatch.setattr("core.pairs.pair.self_test", lambda *given, **how: RowDependence(0.0, 1e-6))
    monkeypatch.setattr(evidence, "look", lambda sizes, **_: FLOATS)
    monkeypatch.setattr(evidence, "_found", {})
    shipped = distilled.shipped(DRAFTS, "eagle")["medusa"]
    with safe_open(shipped, "pt") as file:
        metadata = file.metadata() | {"eos_token_id": "7"}
    save_file(load_file(shipped), tmp_path / "draft.safetensors", metadata)
    (tmp_path / "config.json").write_text(json.dumps(metadata | {"eos_token_id": 7}))
    pair = build_embedded_pair(embedded_folder, DRAFTS, "12" * 32, draft=tmp_path)
    assert pair.drafter.name == "medusa" and pair.end_ids == {2}


def some_pair(made: list[str]):
    """A toy pair that offers n-grams and EAGLE; making one of them leaves its name in ``made``."""
    pair = toy_pair(table(1, 3), table(2, 3))

    def maker(name: str):
        def make() -> Drafting:
            made.append(name)
            return Drafting(toy_pair(table(1, 3), table(3, 3)).drafter, {"drafter": name, "draft": name}, 0.3)

        return make

    return dataclasses.replace(pair, others={name: maker(name) for name in ("ngram", "eagle")})


def test_another_way_to_draft_is_made_at_its_first_use_and_once():
    pair = some_pair(made := [])
    assert pair.drafters == ("model", "eagle", "ngram", "plain") and not made
    assert pair.drafting(None) is pair.drafting("model") is pair
    eagle = pair.drafting("eagle")
    assert pair.drafting("eagle") is eagle and made == ["eagle"]
    assert (eagle.info.drafter, eagle.info.draft, eagle.acceptance, eagle.costs) == (
        "eagle",
        "eagle",
        0.3,
        None,
    )
    assert eagle.target is pair.target and eagle.info.target == pair.info.target
    plain = pair.drafting("plain")
    assert plain.drafter is None and (plain.info.draft, plain.info.drafter) == ("", "plain")


def test_a_way_that_is_not_offered_is_refused_in_a_sentence():
    with pytest.raises(PromptError, match="no drafter 'medusa': choose one of model, eagle, ngram, plain"):
        some_pair([]).drafting("medusa")


@pytest.mark.parametrize("seconds, passes", [(0.0, 8), (WARM_UP, 1)])
def test_warming_up_tells_how_far_it_is_and_ends_early_where_passes_take_long(seconds, passes):
    ran, said = [], []

    class Watched:
        """A target or a drafter, of which only that something runs is looked at."""

        def __getattr__(self, name):
            return lambda *args: ran.append(name) or self

        def crop(self, length):
            pass

    now = itertools.count()
    warm_up(Watched(), Watched(), lambda *what: said.append(what), lambda: seconds * 0.9 * next(now))
    assert len([name for name in ran if not name.startswith("new_")]) == passes
    fractions = [fraction for _, fraction in said]
    assert fractions == sorted(fractions) and len(fractions) == passes and fractions[0] == 0
