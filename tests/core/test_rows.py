"""The self-test of rule 13 notices what depends on a row's neighbours, wherever in the model that lies."""

from __future__ import annotations

import pytest

from core.models import decoder as decoder_module
from core.models.rows import FEW_COUNTS, MOST_ROWS, RowDependence, row_dependence
from tests.core.tiny import as_decoder, tiny_llama
from tests.core.toys import ToyDecoder, table


@pytest.fixture
def decoder():
    return as_decoder(tiny_llama(1))


def test_a_decoder_with_independent_rows_passes(decoder):
    found = row_dependence(decoder)
    assert found.later == 0
    assert found.alone < 1e-4
    exact = RowDependence(0.0, 0.0)
    assert exact.sentence is None
    assert row_dependence(ToyDecoder(table(1, 26))) == exact


def test_a_scale_shared_by_rows_is_noticed(decoder):
    down = decoder.layers[0].down

    def shared_scale(x):
        scale = x.abs().max() / 127
        return down((x / scale).round() * scale)

    object.__setattr__(decoder.layers[0], "down", shared_scale)
    found = row_dependence(decoder)
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


def test_a_short_context_leaves_the_larger_counts_out():
    model = ToyDecoder(table(1, 26), context_length=12)
    assert row_dependence(model) == RowDependence(0.0, 0.0)
    assert max(rows for _, rows in model.reads[1:]) == 4
    model = ToyDecoder(table(1, 26))
    row_dependence(model)
    assert {rows for _, rows in model.reads[1:]} == set(range(1, MOST_ROWS + 1))
    model = ToyDecoder(table(1, 26))
    row_dependence(model, thorough=False)
    assert {rows for _, rows in model.reads[1:]} == {1, *FEW_COUNTS}
