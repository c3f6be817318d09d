"""The estimate for cards that are not here: counts that are the table's, arithmetic by hand, plain words."""

from __future__ import annotations

import types

import pytest
import torch

from core.bench import __main__ as bench
from core.bench import cards, fake_pairs, nf4_dispatch, roofline, roofline_here
from core.bench import roofline_table as bench_roofline
from core.bench.cards import Card
from core.bench.roofline import Asked, Host, Model, Work
from core.engine.auto_k import MOST
from core.figures.metrics import expected_tokens
from core.models.memory import size_of
from core.pairs.catalogue import CATALOGUE

ENTRY = CATALOGUE["qwen2.5-7b"]
CARD = Card("a card", 24e9, 1e12, (8, 9), 128, measured=True)


@pytest.fixture(scope="module")
def work():
    return roofline.count(ENTRY.target_model.config, ENTRY.draft_model.config, "nf4", torch.bfloat16)


def test_counts_of_whole_models_are_those_of_the_table(work):
    written = fake_pairs.read_table(fake_pairs.DOCUMENT.read_text(encoding="utf-8"), "qwen2.5-7b")

    def both(asked: Asked) -> tuple[float, float]:
        return asked.launches, asked.views

    assert both(work.passed) == written["target's pass"][:2]
    assert both(work.passed + work.plain) == written["plain"][:2]
    drafted = work.passed + work.step.times(fake_pairs.K) + work.judging
    assert both(drafted) == written["model"][:2]
    assert work.passed.products == 4 * ENTRY.target_model.config["num_hidden_layers"] + 1


def test_the_document_has_the_estimates_of_today(work):
    """After a change of what a round asks for: ``python -m core.bench.roofline_table --write``."""
    text = fake_pairs.DOCUMENT.read_text(encoding="utf-8")
    written = text[text.index(bench_roofline.BEGIN) : text.index(bench_roofline.END)]
    assert bench_roofline.table(work) in written


TINY = dict(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, head_dim=16,
    num_key_value_heads=2, vocab_size=1000, model_type="llama", tie_word_embeddings=True,
)  # fmt: skip


def tiny(form: str) -> Model:
    return Model.of(TINY, size_of(TINY), form, torch.bfloat16)


def test_bytes_are_those_of_weights_head_keys_and_values():
    weights = 2 * (64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 128)
    assert size_of(TINY).linear == weights
    rest = 2 * 1000 * 64 + 2 * 512 * (2 * 2 * 32)
    assert tiny("none").bytes_read(1, CARD, 512) == 2 * weights + rest
    assert tiny("none").bytes_read(1, CARD, 257) == 2 * weights + rest  # attention runs over whole blocks
    assert tiny("nf4").bytes_read(1, CARD, 512) == pytest.approx((0.5 + 1 / 64) * weights + rest, rel=1e-3)


def test_the_longer_of_host_and_card_decides():
    parts = Work(Asked(100, 50, 9), Asked(20, 10, 9), Asked(10, 0), Asked(30, 0))
    slow = Host(launch=1e-3, view=1e-4, nf4=1e-2, round=2e-3, kernel=1e-9, copy=1)
    found = roofline.costs(parts, tiny("nf4"), tiny("none"), CARD, slow)
    assert found.verify[0] == pytest.approx(110e-3 + 5e-3 + 8 * 1e-2)  # the head is no product in NF4
    assert found.verify[1] == pytest.approx(130e-3 + 5e-3 + 8 * 1e-2)
    assert found.draft == pytest.approx(21e-3) and found.overhead == 2e-3
    card = Card("slow", 24e9, 1e3, (8, 9), 128)
    quick = Host(0, 0, 0, 0, kernel=1.0, copy=0.5)
    found = roofline.costs(parts, tiny("none"), tiny("none"), card, quick)
    moved = tiny("none").bytes_read(1, card, roofline.CONTEXT) / 500
    assert found.verify[0] == pytest.approx(moved + 91 + 10) and found.draft == pytest.approx(moved + 11)


def test_the_first_model_of_the_issue_comes_out_with_its_assumptions(work):
    """5 µs a launch, NF4 for nothing, 1.3 ms a round: 147 tokens/s plain on an RTX 4090, drafting gains less
    than 1.4 at K = 4 and α = 0.8, and its draft step takes the host 2.3 ms and the card 1.2."""
    models = roofline.models(ENTRY, "nf4", torch.bfloat16)
    first = Host(5e-6, 0.8e-6, 0, 1.3e-3, 0, 0.8)
    found = roofline.costs(work, *models, cards.CARDS["rtx-4090"], first)
    assert 1 / found.round_seconds(0) == pytest.approx(147, rel=0.01)
    assert found.draft == pytest.approx(2.3e-3, rel=0.03)
    assert models[1].bytes_read(1, CARD, 512) / (0.8 * 1008e9) == pytest.approx(1.2e-3, rel=0.03)
    for alpha, tokens in ((0.6, 139), (0.7, 167), (0.8, 202)):
        # That model gave a pass over five rows a tenth more than one over one.
        assert expected_tokens(alpha, 4) / found.round_seconds(4) == pytest.approx(tokens, rel=0.06)


LARGE = {"qkv": (4608, 3584), "out": (3584, 3584), "gate_up": (37888, 3584), "down": (3584, 18944)}


@pytest.mark.parametrize(
    ("name", "dtype", "first"),
    [("a100-80", "bfloat16", 6), ("rtx-4090", "bfloat16", 9), ("t4", "float16", None), ("t4", "bfloat16", 8)],
)
def test_where_bitsandbytes_begins_to_unpack(name, dtype, first):
    card = cards.CARDS[name]

    def unpacks(rows: int) -> bool:
        how = getattr(torch, dtype), card.capability, card.multiprocessors
        return any(not nf4_dispatch.fused(shape, rows, *how) for shape in LARGE.values())

    assert next((rows for rows in range(1, 17) if unpacks(rows)), None) == first


def test_unpacking_costs_bytes_and_an_unknown_rule_costs_none(monkeypatch):
    model, _ = roofline.models(ENTRY, "nf4", torch.bfloat16)
    card = cards.CARDS["a100-80"]
    grown = model.bytes_read(6, card, 512) - model.bytes_read(5, card, 512)
    assert grown == 28 * 4 * (3584 * 3584 + 3584 * 18944)  # out and down, written and read again
    monkeypatch.setattr(nf4_dispatch.importlib.util, "find_spec", lambda name: None)
    nf4_dispatch._rule.cache_clear()
    assert model.bytes_read(6, card, 512) == model.bytes_read(5, card, 512)
    monkeypatch.undo()
    nf4_dispatch._rule.cache_clear()


@pytest.mark.parametrize("name", ["rtx-4090", "RTX 4090", "NVIDIA GeForce RTX 4090", " rtx_4090 "])
def test_cards_are_found_as_people_write_them(name):
    assert cards.find(name) is cards.CARDS["rtx-4090"]


def run(capsys, *arguments) -> tuple[int, str, str]:
    status = bench.main(["--device", "cuda", *arguments], load=None)
    return status, *capsys.readouterr()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--roofline", "voodoo"], "rtx-4090"),
        (["--roofline", "here"], "rtx-4090"),
        (["--roofline", "t4", "--pair", "embedded"], "qwen2.5-7b"),
        (["--roofline", "t4", "--target", "some/model"], "--pair"),
        (["--roofline", "t4", "--quantize", "int4"], "nf4"),
        (["--roofline", "t4", "--alpha", "1.5"], "0 to 1"),
        (["--roofline", "t4", "--host-speed", "0"], "above 0"),
        (["--roofline", "rtx-3070", "--pair", "qwen3-14b"], "8.0 GB"),
    ],
)
def test_what_cannot_be_estimated_is_one_sentence(capsys, arguments, named):
    status, said, told = run(capsys, *arguments)
    assert status == 2 and not said and len(told.splitlines()) == 1 and named in told


def test_the_command_says_that_it_is_an_estimate(capsys, monkeypatch, work):
    asked = []
    monkeypatch.setattr(roofline, "count", lambda *how: asked.append(how[2:]) or work)
    status, said, _ = run(capsys, "--roofline", "T4", "--alpha", "0.5", "0.9")
    assert status == 0 and asked == [("nf4", torch.float16)]  # a T4 has no bfloat16 of its own
    assert said.startswith("An estimate, not a measurement")
    assert "Target in NF4, draft unquantised, in float16" in said and "Not in it" in said
    lines = [line.split() for line in said.splitlines()]
    ks = [int(line[0]) for line in lines if line and line[0].isdigit()]
    assert ks == list(range(MOST + 1)) and "α = 0.5" in said and "α = 0.9" in said
    assert run(capsys, "--roofline", "a100-80", "--quantize", "none")[1].count("in NF4,") == 1
    assert asked[-1] == ("none", torch.bfloat16)


def test_a_card_that_is_here_is_measured(capsys, monkeypatch, work):
    monkeypatch.setattr(roofline, "count", lambda *how: work)
    facts = types.SimpleNamespace(
        name="A card", total_memory=48e9, major=8, minor=6, multi_processor_count=84
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    monkeypatch.setattr(roofline_here, "copy_speed", lambda size, device: 600e9)
    timed = Host(3e-6, 1e-6, 30e-6, 1e-3, 1e-6, 1.0)
    monkeypatch.setattr(roofline_here, "measure_host", lambda device: timed)
    status, said, _ = run(capsys, "--roofline", "here")
    assert status == 0 and said.startswith("An estimate: of this card")
    assert "A card: 600 GB/s, measured here; capability 8.6" in said and "3.0 µs a launch" in said


def test_the_host_is_timed_by_single_calls():
    found = roofline_here.measure_host(torch.device("cpu"))
    assert found.launch > 0 and found.view > 0 and found.copy == 1 and found.kernel == roofline.HOST.kernel
