"""Rounds on a fake card: every drafter, verifier, tree, dtype and form goes through; what each asks for."""

from __future__ import annotations

import logging

import pytest
import torch

from core.bench import fake_pairs
from core.bench.fake_card import CUDA, FakeCard
from core.models import memory
from core.models.key_blocks import PARTS
from core.pairs.catalogue import CATALOGUE
from core.records import Settings

ENTRY = CATALOGUE["qwen2.5-7b"]
DRAFTERS = ("plain", "model", "eagle", "medusa", "early-exit", "ngram", "recycling", "auto")


def cut(config: dict, layers: int) -> dict:
    return config | {"num_hidden_layers": layers}


class Bench:
    """A fake card and a pair on it, of few layers; drafters are made once."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16):
        self.card = FakeCard()
        with self.card:
            target = fake_pairs.lean(cut(ENTRY.target_model.config, 2), "nf4", dtype)
            draft = fake_pairs.lean(cut(ENTRY.draft_model.config, 1), "none", dtype)
            makers = fake_pairs.drafters(target, draft)
            self.pairs = {name: fake_pairs.pair_of(*make()) for name, make in makers.items()}

    def round(self, name: str, **settings):
        with self.card:
            return fake_pairs.a_round(self.card, self.pairs[name], Settings(**settings))


@pytest.fixture(scope="module")
def bench():
    return Bench()


@pytest.fixture(scope="module")
def bench_in_float16():
    """As a card below compute capability 8.0 runs."""
    return Bench(torch.float16)


def test_all_drafters_are_there(bench):
    assert set(bench.pairs) == set(DRAFTERS)


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("verifier", ["token", "block", "typical"])
def test_a_round_of_every_drafter_and_verifier(bench, name, verifier):
    """Whatever is made on the wrong device or in another dtype raises: EAGLE's norm was on the CPU."""
    k = 0 if name == "plain" else 2
    counts = bench.round(name, num_draft_tokens=k, verifier=verifier)
    assert counts.launches > 30
    if verifier != "typical":  # on the device: core.engine.batched
        assert (counts.uploads, counts.downloads, counts.waits) == (1, 1, 1)


FILTERS = {
    "greedy": dict(temperature=0),
    "all": dict(temperature=1.3, top_k=8, top_p=0.9, min_p=0.1, repetition_penalty=1.2),
}


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("name", DRAFTERS)
def test_filters_cost_no_wait(bench, name, filters):
    counts = bench.round(name, num_draft_tokens=2 if name != "plain" else 0, **FILTERS[filters])
    assert (counts.uploads, counts.downloads, counts.waits) == (1, 1, 1)


@pytest.mark.parametrize(
    ("name", "width"), [*((name, 1) for name in DRAFTERS), *((name, 2) for name in fake_pairs.TREES)]
)
def test_one_wait_in_float16_too(bench_in_float16, name, width):
    k = 0 if name == "plain" else 2
    counts = bench_in_float16.round(name, num_draft_tokens=k, tree_width=width)
    assert (counts.uploads, counts.downloads, counts.waits) == (1, 1, 1)


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize(("width", "k"), [(2, 2), (4, 3)])
@pytest.mark.parametrize("name", fake_pairs.TREES)
def test_trees_cost_no_wait_either(bench, name, width, k, filters):
    """What a branch that stood leaves in the cache is brought together in the same round."""
    counts = bench.round(name, num_draft_tokens=k, tree_width=width, **FILTERS[filters])
    assert (counts.uploads, counts.downloads, counts.waits) == (1, 1, 1)


@pytest.mark.parametrize("form", ["nf4", "none"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_dtype_and_form_multiplies_in_what_was_asked(form, dtype):
    with FakeCard() as card:
        target = fake_pairs.lean(cut(ENTRY.target_model.config, 1), form, dtype)
        draft = fake_pairs.lean(cut(ENTRY.draft_model.config, 1), "none", dtype)
        pair = fake_pairs.pair_of(*fake_pairs.drafters(target, draft)["model"]())
        fake_pairs.a_round(card, pair, Settings(num_draft_tokens=1))
        products = [*target.layers[0].products, target.head]
        inputs = [torch.empty(1, product.shape[1], device=CUDA, dtype=dtype) for product in products]
        found = [product(x).dtype for product, x in zip(products, inputs, strict=True)]
    in_16_bits = torch.bfloat16 if dtype == torch.float32 else dtype  # NF4 has no fast products in float32
    assert found == [in_16_bits if form == "nf4" else dtype] * 4 + [dtype]
    assert target.dtype == dtype


@pytest.mark.parametrize("form", ["llm-int8", "none"])
def test_through_transformers(form, caplog):
    with FakeCard() as card, caplog.at_level(logging.WARNING):
        target = fake_pairs.through_transformers(cut(ENTRY.target_model.config, 2), form)
        draft = fake_pairs.through_transformers(cut(ENTRY.draft_model.config, 1))
        pair = fake_pairs.pair_of(*fake_pairs.drafters(target, draft)["model"]())
        counts = fake_pairs.a_round(card, pair, Settings(num_draft_tokens=2))
    assert (counts.uploads, counts.downloads, counts.waits) == (1, 1, 1)
    assert "float16" not in caplog.text, "LLM.int8 says at every product that it casts"


@pytest.mark.parametrize("name", CATALOGUE)
def test_targets_of_the_catalogue(name):
    config = CATALOGUE[name].target_model.config
    with FakeCard() as card:
        target = fake_pairs.lean(cut(config, 1), "nf4")
        counts = fake_pairs.a_round(card, fake_pairs.pair_of(target, None), Settings(num_draft_tokens=0))
    assert (counts.uploads, counts.downloads, counts.waits) == (1, 1, 1)


@pytest.mark.parametrize(("free", "passes"), [(None, 3), (10**12, 2), (10**6, 12)])
@pytest.mark.parametrize("lean", [True, False])
def test_a_long_prompt_is_read_in_as_many_passes_as_memory_asks_for(lean, free, passes, monkeypatch):
    """NF4's weights are unpacked anew in each: 256 rows at a time they were 12 times for 3,000 ids."""
    monkeypatch.setattr(memory, "free_bytes", lambda device: free)
    config = cut(ENTRY.target_model.config, 1)
    with FakeCard() as card, torch.inference_mode():
        target = fake_pairs.lean(config, "nf4") if lean else fake_pairs.through_transformers(config)
        cache = target.new_cache()
        with card.counting() as counts:
            target.prefill([fake_pairs.ID] * 3000, cache)
    assert cache.length == 3000 and counts.kinds["embedding"] == passes
    if lean:
        assert counts.kinds["gemm_4bit"] == 4 * passes


def test_logits_and_scores_that_a_model_keeps_are_counted(monkeypatch):
    """A model that makes logits for every row, or attends without a fused kernel, reads fewer at once."""
    with FakeCard():
        model = fake_pairs.through_transformers(cut(ENTRY.target_model.config, 1))
        asked = []
        monkeypatch.setattr(memory, "prompt_rows", lambda row: asked.append(row) or 256)
        model.prompt_chunk(3000, 1000)
        model._last_only = {}
        model.prompt_chunk(3000, 1000)
        model.model.config._attn_implementation = "eager"
        model.prompt_chunk(3000, 1000)
        assert model.prompt_chunk(256, 1000) == 256
    logits, scores = asked[1] - asked[0], asked[2] - asked[1]
    assert len(asked) == 3 and (logits, scores) == (2 * 152_064 * 2, 28 * 4000 * 8)


RECOUNTED = {"qwen2.5-7b": ("model", "recycling"), "smollm2-1.7b": ("plain",)}  # a few of the rows


@pytest.mark.parametrize("name", fake_pairs.PAIRS)
def test_the_documents_table_is_what_is_counted(name):
    """Layers are alike, and a cache has as many parts whatever multiple of these they are: so what whole
    models ask for follows from small ones."""
    only, entry = RECOUNTED[name], CATALOGUE[name]
    some, twice = PARTS, 2 * PARTS
    with FakeCard() as card:
        found = [fake_pairs.rows(card, name, n, only) for n in ((some, some), (twice, some), (some, twice))]
    more = [
        (model.config["num_hidden_layers"] - some) / some for model in (entry.target_model, entry.draft_model)
    ]
    written = fake_pairs.read_table(fake_pairs.DOCUMENT.read_text(encoding="utf-8"), name)
    for label, base in found[0].items():
        grown = [
            a + more[0] * (b - a) + more[1] * (c - a)
            for a, b, c in zip(base.figures, *(rows[label].figures for rows in found[1:]), strict=True)
        ]
        assert tuple(grown) == written[label], label
    kinds = {label.split(",")[0] for label in written}
    assert kinds == {"target's pass", "draft's pass", *DRAFTERS}
