"""What the lean decoder does for drafters that look into it: trees in one pass, rows kept, features."""

from __future__ import annotations

import random

import pytest
import torch

from core.models.kv_cache import KVCache
from tests.core.tiny import as_decoder, held, tiny_llama

# Children of a row, the last read before the tree being -1: two branches, one of which forks again.
PARENTS = [-1, 0, 0, 1, 2, 2, 5, 0]


def some_ids(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(61), k=count)


def branch(row: int, parents: list[int] = PARENTS) -> list[int]:
    rows = []
    while row >= 0:
        rows.insert(0, row)
        row = parents[row]
    return rows


@pytest.fixture(scope="module")
def decoder():
    decoder = as_decoder(tiny_llama(0, layers=3))
    decoder.feature_layers = (0, 2)
    return decoder


class Alone:
    """A product that gives a row what it gives it alone, as those of the embedded pair do."""

    def __init__(self, product):
        self.product = product

    def __call__(self, x):
        return torch.cat([self.product(row[None]) for row in x])

    def unscaled(self, x, many=False):
        return self(x), None


def row_by_row():
    """A decoder in which attention alone could make a difference."""
    decoder = as_decoder(tiny_llama(0, layers=3))
    decoder.feature_layers = (0, 2)
    for layer in decoder.layers:
        for name in ("qkv", "out", "gate_up", "down"):
            object.__setattr__(layer, name, Alone(getattr(layer, name)))
    decoder.head = Alone(decoder.head)
    return decoder


# Behind these many ids trees end at, before and behind the end of a block of keys.
@pytest.mark.parametrize("start", [0, 30, 245, 252, 253, 256])
def test_rows_of_a_tree_are_those_of_one_row_passes_bit_for_bit(start):
    """A row's ancestors lay apart in the cache, so that its sums were made in another order: at near-ties
    another token won than without trees."""
    decoder, chance, prefix = row_by_row(), random.Random(start), some_ids(start)
    for case in range(2):
        parents = PARENTS if not case else [-1, *(chance.randrange(row) for row in range(1, 14))]
        ids = some_ids(len(parents), 1)
        with torch.inference_mode():
            decoder.prefill(prefix, cache := decoder.new_cache())
            alone = cache.fork(start)
            found = decoder.tree_logits(ids, parents, cache)
            for row in range(len(ids)):
                alone.crop(start)
                logits = [decoder.next_logits([ids[r]], alone) for r in branch(row, parents)]
                assert found[row].equal(logits[-1]), (parents, row)
                place, last = start + row, alone.length - 1
                assert held(cache)[:, :, place].equal(held(alone)[:, :, last])
                assert cache.features[place].equal(alone.features[last])


def test_a_branch_that_crosses_a_block_of_keys_is_attended_for_in_two_pieces(monkeypatch):
    """As a chain's pass is: sums over more keys, though masked, come out otherwise on some processors."""
    decoder, pieces = as_decoder(tiny_llama(0)), []
    mask = decoder._mask
    monkeypatch.setattr(decoder, "_mask", lambda *of: pieces.append(of[:2]) or mask(*of))
    with torch.inference_mode():
        decoder.prefill(some_ids(254), cache := decoder.new_cache())
        pieces.clear()
        decoder.tree_logits(some_ids(5), [-1, 0, 1, 2, 1], cache)
    # Rows and the ids before them: the branch in two, and a sibling at its end.
    assert pieces[-3:] == [(2, 254), (2, 256), (1, 256)]


# Positions at which the tree crosses a block of keys among them.
@pytest.mark.parametrize("start, masked", [(0, False), (1, False), (30, True), (252, False), (256, False)])
def test_rows_of_a_tree_are_those_of_each_branch_read_alone(decoder, start, masked, monkeypatch):
    """Also in one pass behind a mask, as on a card."""
    monkeypatch.setattr(decoder, "_query_block", 1 if masked else 8)
    prefix, ids = some_ids(start), some_ids(len(PARENTS), 1)
    with torch.inference_mode():
        decoder.prefill(prefix, cache := decoder.new_cache())
        found = decoder.tree_logits(ids, PARENTS, cache)
        features = cache.features[start : cache.length].clone()
        assert cache.length == start + len(ids)
        for row in range(len(ids)):
            rows = branch(row)
            decoder.prefill(prefix, alone := decoder.new_cache())
            logits = decoder.logits([ids[r] for r in rows], alone)
            assert torch.allclose(found[row], logits[-1], atol=2e-5), row
            assert torch.allclose(features[row], alone.features[alone.length - 1], atol=2e-5), row


def test_a_chain_given_as_a_tree_is_the_chain_bit_for_bit(decoder):
    prefix, ids = some_ids(40), some_ids(5, 1)
    with torch.inference_mode():
        decoder.prefill(prefix, cache := decoder.new_cache())
        whole = decoder.logits(ids, cache)
        cache.crop(len(prefix))
        assert decoder.tree_logits(ids, [-1, 0, 1, 2, 3], cache).equal(whole)


@pytest.mark.parametrize("kept", [[0], [0, 2], [0, 2, 5, 6], [0, 1, 3], [0, 7]])
def test_a_kept_branch_is_as_if_it_had_been_read_alone(decoder, kept):
    prefix, ids = some_ids(250), some_ids(len(PARENTS), 1)
    after = some_ids(3, 2)
    with torch.inference_mode():
        decoder.prefill(prefix, cache := decoder.new_cache())
        decoder.tree_logits(ids, PARENTS, cache)
        cache.keep(len(prefix), kept)
        decoder.prefill(prefix, alone := decoder.new_cache())
        decoder.logits([ids[row] for row in kept], alone)
        assert cache.length == alone.length == len(prefix) + len(kept)
        assert torch.allclose(held(cache, cache.length), held(alone, alone.length), atol=2e-5)
        assert torch.allclose(cache.features[: cache.length], alone.features[: alone.length], atol=2e-5)
        assert torch.allclose(decoder.logits(after, cache), decoder.logits(after, alone), atol=2e-5)


def test_kept_rows_are_those_that_were_named():
    """Moved as views at equal distances, which must not write over what is still to be moved."""
    chance, shape = random.Random(1), as_decoder(tiny_llama(0)).shape
    for _ in range(60):
        cache = KVCache(shape, "cpu", torch.float32, 2)
        start, count = chance.randrange(5), chance.randint(1, 20)
        cache.reserve(start + count)
        for tensor in (*cache.parts, cache.features):
            tensor.copy_(torch.randn(tensor.shape))
        rows = sorted(chance.sample(range(count), chance.randint(1, count)))
        places = [*range(start), *(start + row for row in rows)]
        wanted = [held(cache)[:, :, places], cache.features[places]]
        cache.keep(start, rows)
        assert cache.length == len(places)
        assert held(cache, cache.length).equal(wanted[0]), rows
        assert cache.features[: cache.length].equal(wanted[1]), rows


def test_features_are_the_streams_behind_their_layers(decoder):
    """Against a decoder that ends there: of an inner layer before any norm, of the last one behind it."""
    ids = some_ids(20)
    with torch.inference_mode():
        final = decoder.forward(ids, cache := decoder.new_cache())
        assert cache.features.shape[1:] == (2, 32)
        assert cache.features[:20, 1].equal(final)
        # The norm takes the stream's size away and its own weights are ones here.
        normed = decoder.forward(ids, decoder.new_cache(), layers=1)
        inner = cache.features[:20, 0]
        assert torch.allclose(decoder._normed(inner, decoder.norm), normed, atol=1e-5)
        assert not torch.allclose(inner, normed, atol=1e-2)


def test_features_grow_fork_and_are_cropped_with_the_keys(decoder):
    ids = some_ids(300)
    with torch.inference_mode():
        decoder.prefill(ids, whole := decoder.new_cache())
        decoder.prefill(ids[:10], cache := decoder.new_cache())
        copy = cache.fork(6)
        assert copy.features[:6].equal(cache.features[:6]) and copy.length == 6
        decoder.prefill(ids[10:], cache)  # more than it had room for
        decoder.prefill(ids[6:], copy)
        for one in (cache, copy):
            assert torch.allclose(one.features[:300], whole.features[:300], atol=2e-5)
        assert cache.nbytes >= held(cache).nbytes + 300 * 2 * 32 * 4
    assert as_decoder(tiny_llama(0)).new_cache().features.numel() == 0


def test_inputs_in_the_place_of_embeddings(decoder):
    ids = some_ids(7)
    with torch.inference_mode():
        wanted = decoder.forward(ids, decoder.new_cache())
        inputs = decoder.embedding[ids].clone()
        assert decoder.forward([0] * 7, decoder.new_cache(), inputs=inputs).equal(wanted)


def test_a_tree_has_room_to_the_end_of_the_context():
    decoder = as_decoder(tiny_llama(1))
    cache = decoder.new_cache()
    for length, room in ((0, 300), (250, 50), (255, 45), (256, 44), (290, 10)):
        cache.length = length
        assert decoder.tree_room(cache) == room  # a context of 300
