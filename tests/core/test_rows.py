"""The self-test of rule 13 notices what depends on a row's neighbours, wherever in the model that lies."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from core.models import decoder as decoder_module
from core.models import rows as rows_module
from core.models.rows import (
    COUNTS,
    MOST_ROWS,
    TELLING,
    TREES,
    RowDependence,
    along_a_branch,
    row_dependence,
    self_test,
)
from core.models.tree_walk import depths
from core.settings import MAX_DRAFT_TOKENS, MAX_TREE_WIDTH
from tests.core.tiny import as_decoder, tiny_llama
from tests.core.toys import ToyDecoder, table

pytestmark = pytest.mark.usefixtures("whole_self_test")


@pytest.fixture
def decoder():
    return as_decoder(tiny_llama(1))


def test_a_decoder_with_independent_rows_passes(decoder):
    found = row_dependence(decoder)
    assert found.later == 0
    assert found.alone < 1e-4 and found.trees < 1e-4
    exact = RowDependence(0.0, 0.0)
    assert exact.sentence is None
    assert row_dependence(ToyDecoder(table(1, 26)), clock=lambda: 0) == exact


def test_a_scale_shared_by_rows_is_noticed(decoder):
    down = decoder.layers[0].down

    def shared_scale(x, many):
        scale = x.abs().max() / 127
        return down((x / scale).round() * scale), None

    object.__setattr__(decoder.layers[0], "down", SimpleNamespace(unscaled=shared_scale))
    found = row_dependence(decoder, budget=0)
    assert found.later > 1e-6
    assert "depends on the tokens behind it" in found.sentence


def test_attention_that_sums_otherwise_at_one_row_count_is_noticed(decoder, monkeypatch):
    """As a kernel that takes another way for some sizes, which a quick look at few counts may pass over."""
    attend, group = decoder_module.F.scaled_dot_product_attention, 2
    odd = decoder._mask(13, 8, group).shape

    def attention(query, key, value, attn_mask):
        attended = attend(query, key, value, attn_mask=attn_mask)
        return attended * 1.001 if attn_mask.shape == odd else attended

    assert decoder._mask(1, 8, group).shape != odd
    monkeypatch.setattr(decoder_module.F, "scaled_dot_product_attention", attention)
    found = row_dependence(decoder)
    assert found.later == 0 and found.alone > 1e-6
    assert "scored alone" in found.sentence and "exact up to rounding" in found.sentence


class Chains(ToyDecoder):
    """Scores no trees, as most models."""

    tree_logits = None


def test_a_short_context_leaves_the_larger_counts_out():
    for kind in (ToyDecoder, Chains):
        model = kind(table(1, 26), context_length=12)
        assert row_dependence(model, clock=lambda: 0) == RowDependence(0.0, 0.0)
        assert max(rows for _, rows in model.reads[1:]) == 4
    model = Chains(table(1, 26))
    row_dependence(model)
    assert {rows for _, rows in model.reads[1:]} == set(range(1, MOST_ROWS + 1))


class Trees(ToyDecoder):
    """Keeps the trees it was asked for; one of ``odd`` rows comes out otherwise than its rows alone."""

    def __init__(self, odd: int = 0):
        super().__init__(table(1, 26), context_length=200)
        self.odd, self.trees, self.now = odd, [], 0.0

    def logits(self, ids, cache):
        self.now += 1
        return super().logits(ids, cache)

    def tree_logits(self, ids, parents, cache):
        self.trees.append(parents)
        self.now += 1
        rows = super().tree_logits(ids, parents, cache)
        if len(ids) == self.odd:
            rows[-1, 0] += 1e-3  # a last sibling alone
        return rows


def test_trees_of_every_shape_that_settings_allow_are_tested():
    model = Trees()
    assert row_dependence(model, clock=lambda: 0) == RowDependence(0.0, 0.0)
    shapes = {(k, width) for k in range(1, MAX_DRAFT_TOKENS + 1) for width in range(2, MAX_TREE_WIDTH + 1)}
    assert len(model.trees) == len(shapes)
    assert {(max(depths(tree, 0)), tree.count(0)) for tree in model.trees} == shapes
    assert along_a_branch(2, 3) == [-1, 0, 0, 0, 1, 1, 1]


def test_a_tree_whose_rows_come_out_otherwise_is_noticed():
    found = row_dependence(Trees(odd=1 + 7 * 5), clock=lambda: 0)
    assert (found.later, found.alone) == (0, 0) and 1e-6 < found.trees < 1e-2
    assert found.sentence == (
        "A token scored beside others came out as the same token scored alone, bit for bit. A token of a"
        f" tree differs from the same token scored alone by up to {found.trees:.1e} in probability, so"
        " replies with trees are exact up to that difference."
    )


def test_where_passes_take_long_some_trees_are_tested_and_the_sentence_says_so():
    model = Trees()
    found = row_dependence(model, budget=60, clock=lambda: model.now)
    some, of = found.trees_tested
    assert found.tested is None and some == len(model.trees) < of == len(TREES)
    assert [(max(depths(tree, 0)), tree.count(0)) for tree in model.trees] == list(TREES[:some])
    assert found.sentence.endswith(f"Passes take long here, so {some} of {of} shapes of trees were tested.")
    model = Trees()
    found = row_dependence(model, budget=8, clock=lambda: model.now)
    assert found.sentence.endswith("so 2 of 16 row counts and 1 of 112 shapes of trees were tested.")


class SlowDecoder(Chains):
    """Its clock moves by a second a pass; from ``odd_from`` rows on, a row comes out otherwise than alone."""

    def __init__(self, odd_from: int = 100):
        super().__init__(table(1, 26))
        self.now, self.odd_from = 0.0, odd_from

    def logits(self, ids, cache):
        self.now += 1
        return super().logits(ids, cache) + (torch.arange(26) / 1e4 if len(ids) >= self.odd_from else 0)

    def tested(self, budget: float) -> tuple[RowDependence, list[int]]:
        """What came out, and the row counts in the order in which they were tested."""
        found = row_dependence(self, budget=budget, clock=lambda: self.now)
        return found, list(dict.fromkeys(rows for _, rows in self.reads[1:] if rows > 1))


def test_where_passes_take_long_the_counts_that_tell_most_are_tested_and_the_sentence_says_so():
    found, tested = SlowDecoder().tested(budget=8)  # 4 passes for the first count, 4 for the second
    assert tested == list(TELLING[:2]) and found == RowDependence(0.0, 0.0, tested=(2, 16))
    assert found.sentence == (
        "A token scored beside others came out as the same token scored alone, bit for bit. Passes take long "
        "here, so 2 of 16 row counts were tested."
    )
    assert SlowDecoder().tested(budget=0.5)[1] == [TELLING[0]]  # one in any case
    assert SlowDecoder().tested(budget=49)[1] == list(COUNTS) and len(set(COUNTS)) == MOST_ROWS - 1
    assert SlowDecoder().tested(budget=49)[0].sentence is None


def test_what_was_found_before_the_time_was_over_counts():
    found, tested = SlowDecoder(odd_from=4).tested(budget=8)
    assert tested == [2, 4] and found.alone > 1e-6 and found.tested == (2, 16)
    assert "exact up to rounding" in found.sentence and "2 of 16 row counts" in found.sentence


@pytest.mark.parametrize("budget", [8, 1000])
def test_the_self_test_tells_how_far_it_is(budget):
    said, model = [], SlowDecoder()
    row_dependence(model, lambda *what: said.append(what), budget, lambda: model.now)
    fractions = [fraction for _, fraction in said]
    assert fractions == sorted(fractions) and fractions[0] == 0 and 0.9 < fractions[-1] <= 1
    assert len(fractions) >= model.now  # before each pass


def test_one_layer_tells_for_all_where_its_rows_are_independent(monkeypatch):
    """The self-test of a model asks its first layer alone, and the whole model where that differs."""
    asked, answers = [], {}

    def dependence(scorer, say, budget=10.0, behind=8):
        asked.append((scorer.shape.layers, budget))
        return answers[scorer.shape.layers]

    monkeypatch.setattr(rows_module, "row_dependence", dependence)
    model = as_decoder(tiny_llama(1, layers=3))
    answers[1] = RowDependence(0.0, 0.0, tested=(3, 16))
    assert self_test(model) == answers[1] and [layers for layers, _ in asked] == [1]
    answers.update({1: RowDependence(0.0, 1e-7), 3: RowDependence(0.0, 2e-7)})
    assert self_test(model) == answers[3] and [layers for layers, _ in asked] == [1, 1, 3]
    assert asked[-1][1] < asked[0][1]  # both together keep to the one budget
    model = ToyDecoder(table(1, 26))  # has no layers
    monkeypatch.undo()
    assert self_test(model) == RowDependence(0.0, 0.0)
