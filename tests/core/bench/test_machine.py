"""What a pass reads is counted from the models themselves; how fast a machine reads is its best of a few."""

import pytest
import torch
from torch import nn

from core.bench import machine as bench_machine
from core.bench.machine import measure_limit, read_speed, weight_bytes
from core.drafters.model import ModelDrafter
from core.models import quantize
from core.models.transformers_decoder import TransformersDecoder
from core.pairs.pair import Pair
from tests.core.builders import PAIR
from tests.core.models_on_disk import make_model
from tests.core.tiny import as_decoder, tiny_llama
from tests.core.toy_drafts import toy_drafts_pair


def parameters(model, leave=()):
    kept = {id(p): p for name, p in model.named_parameters() if name not in leave}
    return sum(p.numel() for p in kept.values())


EMBEDDING = "model.embed_tokens.weight"


def test_the_lean_decoder_reads_everything_but_its_embedding():
    model = tiny_llama(1)
    assert weight_bytes(as_decoder(model)) == 4 * parameters(model, [EMBEDDING])


def test_a_head_made_of_two_products_counts():
    decoder = as_decoder(tiny_llama(1))
    whole, head = weight_bytes(decoder), decoder.head
    extra = torch.zeros(32, 32)
    decoder.head = lambda hidden: head(hidden @ extra)
    assert weight_bytes(decoder) == whole + extra.nbytes


def test_dense_weights_that_read_prompts_do_not_count():
    lean = weight_bytes(as_decoder(tiny_llama(1, vocabulary=64), "int4"))
    assert weight_bytes(as_decoder(tiny_llama(1, vocabulary=64), "int4+bfloat16")) == lean


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_of_transformers_reads_its_embedding_only_as_its_head(tied):
    model = make_model("llama", 1, tie_word_embeddings=tied)
    read = weight_bytes(TransformersDecoder(model))
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    assert read == 4 * parameters(model, [] if tied else [EMBEDDING]) + buffers


@pytest.mark.usefixtures("has_int8")
def test_packed_weights_count_as_they_are_packed():
    model = make_model("llama", 1)
    before = weight_bytes(TransformersDecoder(model))
    matrices = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    quantize.apply(model, "int8")
    after = weight_bytes(TransformersDecoder(model))
    assert before - 3 * matrices <= after < before - 2 * matrices  # four bytes became one, and scales


def test_the_best_of_several_reads_counts(monkeypatch):
    clock = iter([0, 4, 10, 11, 20, 22])
    monkeypatch.setattr(bench_machine.time, "perf_counter", lambda: next(clock))
    assert read_speed(4000, 2, "cpu") == 4000


def test_the_limit_is_of_both_models(monkeypatch):
    monkeypatch.setattr(bench_machine, "BUFFER_BYTES", 1 << 16)
    target, draft = as_decoder(tiny_llama(1)), as_decoder(tiny_llama(2, layers=1))
    limit = measure_limit(Pair(PAIR, None, target, ModelDrafter(draft), frozenset()))
    assert limit.target_bytes > limit.draft_bytes > 0 and limit.memory_bytes == 1 << 16
    assert limit.memory > 0 and limit.resident > 0
    assert measure_limit(Pair(PAIR, None, target, None, frozenset())).draft_bytes is None


def test_a_step_of_eagle_reads_its_layer_its_head_and_what_joins_token_and_state(monkeypatch):
    monkeypatch.setattr(bench_machine, "BUFFER_BYTES", 1 << 16)
    pair = toy_drafts_pair("eagle", vocabulary=26)
    hidden = pair.target.shape.hidden
    of_layer = bench_machine.held_bytes([pair.drafter._model.layers])
    assert measure_limit(pair).draft_bytes == of_layer + 4 * (26 * hidden + 2 * hidden * hidden)
    assert measure_limit(toy_drafts_pair("medusa")).draft_bytes is None
