"""Chats a target writes itself: what transformers would write, from the distribution, and resumable."""

import copy
import random
import re

import numpy as np
import pytest
import torch
from torch import nn

from core.distill import synthesize as module
from core.distill.corpus import ARRAYS, Corpus, CorpusError, held_out
from core.distill.synthesize import Openings, draw_ids, synthesize
from core.text.chat import encode_chat
from tests.core.models_on_disk import make_model, tokenizer

END = 2  # <|im_end|>
SMALL = dict(slots=12, cohort=4)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(module, "MAX_TURN", 24)
    monkeypatch.setattr(module, "MAX_REPLY", 20)
    monkeypatch.setattr(module, "SHARD", 8)
    monkeypatch.setattr(module, "GROWTH", 4)  # so that caches grow


def target(family="llama"):
    """A tiny model that ends its turns now and then."""
    model = make_model(family, 1)
    head = nn.Linear(*reversed(model.lm_head.weight.shape))
    with torch.no_grad():
        head.weight.copy_(model.lm_head.weight)
        head.bias.zero_()
        head.bias[END] = 4.0
    model.lm_head = head
    return model


def arrays(paths):
    corpus = Corpus.load(*paths)
    return [getattr(corpus, name).tolist() for name in ARRAYS]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_greedy_replies_are_those_of_transformers(tmp_path, family):
    model = target(family)
    corpus = Corpus.load(*synthesize(model, tokenizer(), 12, tmp_path, temperatures={0.0: 1.0}, **SMALL))
    assert len(corpus) >= 12 and len({len(chat.ids) for chat in corpus}) > 4
    model.set_attn_implementation("eager")
    for chat in corpus:
        ids, scored = torch.tensor(chat.ids.astype(np.int64))[None], None
        with torch.inference_mode():
            scored = model(ids).logits[0, chat.prompt_len - 1 : -1]
        chosen = scored.gather(1, ids[0, chat.prompt_len :, None])[:, 0]
        assert (scored.amax(-1) - chosen).max() < 1e-4


def test_prompts_are_as_the_page_writes_them_and_of_one_side(tmp_path):
    encoder, model = tokenizer(), target()
    for kept_out in (False, True):
        folder = tmp_path / str(kept_out)
        corpus = Corpus.load(*synthesize(model, encoder, 3, folder, kept_out=kept_out, **SMALL))
        assert len(corpus) >= 3
        for chat in corpus:
            assert held_out(chat.prompt) == kept_out
            text = encoder.decode(chat.prompt.tolist())
            question = re.fullmatch(
                r"<\|im_start\|>user\n(.*)<\|im_end\|>\n<\|im_start\|>assistant\n", text, re.S
            )
            assert question and "<|" not in question[1]
            if "\ufffd" not in question[1]:
                again = encode_chat(encoder, [{"role": "user", "content": question[1]}])
                assert encoder.decode(again) == text
            assert chat.reply[-1] in (END, 0) or len(chat.reply) == module.MAX_REPLY
            assert not np.isin(chat.reply[:-1], (END, 0)).any()
            assert chat.temperature in np.array(list(module.TEMPERATURES), np.float32)


def test_an_interrupted_call_goes_on_with_what_is_missing(tmp_path):
    model, encoder = target(), tokenizer()
    whole = synthesize(model, encoder, 20, tmp_path / "whole", seed=3, **SMALL)
    assert [path.name for path in whole] == ["chats-3-0000.npz", "chats-3-0001.npz", "chats-3-0002.npz"]

    class Interrupted(Exception):
        pass

    def interrupt(sentence, fraction):
        if fraction > 0.6:
            raise Interrupted

    with pytest.raises(Interrupted):
        synthesize(model, encoder, 20, tmp_path / "cut", seed=3, progress=interrupt, **SMALL)
    first = sorted((tmp_path / "cut").iterdir())
    assert [path.name for path in first] == ["chats-3-0000.npz"]
    written = first[0].stat().st_mtime_ns
    assert arrays(synthesize(model, encoder, 20, tmp_path / "cut", seed=3, **SMALL)) == arrays(whole)
    assert first[0].stat().st_mtime_ns == written
    other = synthesize(model, encoder, 20, tmp_path / "whole", seed=4, **SMALL)
    assert arrays(other) != arrays(whole)


def test_the_models_own_attention_is_put_back(tmp_path):
    model = target()
    before = model.config._attn_implementation
    synthesize(model, tokenizer(), 1, tmp_path, **SMALL)
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("family", ["mistral-window", "gemma2", "mamba"])
def test_other_attention_is_refused_in_a_sentence(tmp_path, family):
    with pytest.raises(CorpusError, match="train on your own text"):
        synthesize(make_model(family, 1), tokenizer(), 1, tmp_path, **SMALL)
    assert not list(tmp_path.iterdir())


def test_a_target_without_a_template_is_refused(tmp_path):
    bare = type("Bare", (), {"chat_template": None})()
    with pytest.raises(CorpusError, match="no chat template"):
        synthesize(target(), bare, 1, tmp_path)


def test_a_target_that_never_ends_a_question_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "TRIES", 2)
    model = target()
    with torch.no_grad():
        model.lm_head.bias[: END + 1] = -100.0
    with pytest.raises(CorpusError, match="does not end the questions"):
        synthesize(model, tokenizer(), 1, tmp_path, **SMALL)
    assert not list(tmp_path.iterdir())


def test_chats_stay_within_the_context(tmp_path):
    model = target()
    model.config.max_position_embeddings = 36
    corpus = Corpus.load(*synthesize(model, tokenizer(), 8, tmp_path, **SMALL))
    lengths = {len(chat.ids) for chat in corpus}
    assert max(lengths) == 36 and all(len(chat.reply) for chat in corpus)


@pytest.mark.parametrize("options", [{"count": 0}, {"count": 1, "slots": 4, "cohort": 5}])
def test_impossible_numbers_are_refused(tmp_path, options):
    with pytest.raises(CorpusError, match="at least one chat"):
        synthesize(target(), tokenizer(), out=tmp_path, **options)


# --- Draws


def test_ids_are_drawn_by_their_probabilities():
    torch.manual_seed(0)
    count, size = 4000, 30
    row = torch.randn(size) * 2
    row[7] = -torch.inf
    uniforms = (torch.arange(count) + 0.5) / count
    for temperature in (1.0, 0.5):
        drawn = draw_ids(row.expand(count, -1), torch.full((count,), temperature), uniforms)
        shares = torch.bincount(drawn, minlength=size) / count
        assert (shares - (row / temperature).softmax(-1)).abs().max() < 2 / count


def test_an_impossible_id_is_never_drawn():
    row = torch.full((1, 5), -torch.inf)
    row[0, 2] = 1.0
    for u in (0.0, 1 - 2**-24, 1.0):
        assert draw_ids(row, torch.ones(1), torch.tensor([u])).item() == 2


def test_temperature_0_takes_the_likeliest_whatever_is_drawn():
    logits = torch.tensor([[0.0, 3.0, 2.9], [0.0, 1.0, 5.0]])
    assert draw_ids(logits, torch.tensor([0.0, 1.0]), torch.tensor([0.999, 0.0])).tolist() == [1, 0]


# --- Openings


def test_openings_are_filled_in_and_come_in_their_shares():
    openings, draw = Openings(), random.Random(0)
    picked = [openings.pick(draw) for _ in range(3000)]
    assert not any(re.search(r"[{}]", text) for text in picked)
    assert len(set(picked)) > 1200
    only = Openings(domains={"open": 1.0})
    phrases = {only.pick(random.Random(n)) for n in range(2000)}
    assert any(text.startswith("Solve") for text in phrases) and "Once upon a time," not in phrases


def test_no_opening_is_a_prompt_of_the_suite():
    from core.text.prompts import load_prompts

    openings, draw = Openings(), random.Random(1)
    picked = {openings.pick(draw) for _ in range(5000)}
    assert not picked & {prompt.prompt for prompt in load_prompts()}


def test_a_turn_marker_that_is_added_but_not_special_ends_turns_and_replies():
    encoder = copy.deepcopy(tokenizer())  # the tests share one
    encoder.add_tokens(["<|over|>"])
    encoder.chat_template = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<|over|>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    marker = encoder.convert_tokens_to_ids("<|over|>")
    frame = module._frame(make_model("llama", 1), encoder)
    assert marker not in encoder.all_special_ids and frame.after[0] == marker
    assert marker in frame.ends and marker in frame.special
