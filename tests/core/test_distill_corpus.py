"""Corpora: what is written comes back, what is damaged is refused, and no prompt is on both sides."""

from pathlib import Path

import numpy as np
import pytest

from core.distill.corpus import ARRAYS, HELD_OUT_EVERY, Chat, Corpus, CorpusError, held_out

HELD_OUT = Path(__file__).resolve().parents[2] / "data" / "heldout.npz"


def chat(*ids, prompt_len=2, temperature=1.0):
    return Chat(np.array(ids), prompt_len, temperature)


CHATS = [
    chat(17, 17, 5, 6, temperature=0.5),
    chat(1, 2, 7),
    chat(3, 14, 1, 9, 9, prompt_len=3),
    chat(17, 0, 8),
]


def same(one, other):
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in ARRAYS)


def test_chats_come_back_in_order():
    corpus = Corpus.of(CHATS)
    assert len(corpus) == 4 and corpus.reply_tokens == 2 + 1 + 2 + 1
    for found, given in zip(corpus, CHATS, strict=True):
        assert found.ids.tolist() == given.ids.tolist() and found.temperature == given.temperature
        assert found.prompt.tolist() + found.reply.tolist() == given.ids.tolist()
    assert corpus[-1].reply.tolist() == [8]
    with pytest.raises(IndexError):
        corpus[4]


def test_a_file_gives_the_same_corpus_and_several_give_one(tmp_path):
    corpus = Corpus.of(CHATS)
    corpus.save(tmp_path / "new" / "one.npz")
    assert same(Corpus.load(tmp_path / "new" / "one.npz"), corpus)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["one.npz"]
    Corpus.of(CHATS[:1]).save(tmp_path / "two.npz")
    both = Corpus.load(tmp_path / "new" / "one.npz", tmp_path / "two.npz")
    assert same(both, Corpus.of([*CHATS, CHATS[0]]))


def test_ids_of_a_large_vocabulary_keep_their_value(tmp_path):
    assert Corpus.of(CHATS).ids.dtype == np.uint16
    large = Corpus.of([chat(151_000, 1, 65_536)])
    large.save(tmp_path / "large.npz")
    assert Corpus.load(tmp_path / "large.npz").ids.tolist() == [151_000, 1, 65_536]


def test_an_empty_corpus_is_a_corpus(tmp_path):
    Corpus.of([]).save(tmp_path / "empty.npz")
    assert len(Corpus.load(tmp_path / "empty.npz")) == 0


def test_the_sides_share_no_prompt_and_lose_no_chat():
    draw = np.random.default_rng(0)
    corpus = Corpus.of(chat(*draw.integers(0, 500, 6), prompt_len=4) for _ in range(2000))
    train, kept = corpus.split()
    assert len(train) + len(kept) == 2000
    assert all(sum(c.prompt.tolist()) % HELD_OUT_EVERY for c in train)
    assert not any(sum(c.prompt.tolist()) % HELD_OUT_EVERY for c in kept)
    assert 2000 / HELD_OUT_EVERY / 1.5 < len(kept) < 2000 / HELD_OUT_EVERY * 1.5


def test_the_rule_sums_beyond_the_range_of_16_bits():
    prompt = np.full(17, 65_534, np.uint16)
    assert held_out(prompt) and not held_out(prompt[1:])


def test_a_prompt_is_kept_once_and_the_first_time():
    again = chat(1, 2, 99, 98)
    longer = chat(1, 2, 7, prompt_len=3)  # other ids before the reply: another prompt
    kept = Corpus.of([*CHATS, again, longer]).distinct()
    assert same(kept, Corpus.of([*CHATS, longer]))


def test_a_domain_is_told_by_the_fence_of_the_reply_alone():
    class Letters:
        def decode(self, ids):
            return "".join(map(chr, ids))

    fenced, plain = [ord(c) for c in "a```b"], [ord(c) for c in "ab"]
    assert chat(*plain, *fenced).domain(Letters()) == "code"
    assert chat(*fenced, *plain, prompt_len=5).domain(Letters()) == "prose"


@pytest.mark.parametrize(
    "change",
    [
        {"offsets": np.array([0, 4, 3, 12, 15])},
        {"offsets": np.array([0, 4, 7, 12, 99])},
        {"offsets": np.array([0, 4])},
        {"prompt_len": np.array([5, 2, 3, 2])},
        {"prompt_len": np.array([-1, 2, 3, 2])},
        {"prompt_len": np.array([2.0, 2, 3, 2])},
        {"temperature": np.zeros(3, np.float32)},
        {"ids": np.full(15, -1)},
        {"ids": np.zeros((15, 1), np.uint16)},
    ],
)
def test_arrays_that_do_not_fit_are_refused(tmp_path, change):
    corpus = Corpus.of(CHATS)
    arrays = {name: getattr(corpus, name) for name in ARRAYS}
    np.savez(tmp_path / "whole.npz", **arrays)
    assert same(Corpus.load(tmp_path / "whole.npz"), corpus)
    np.savez(tmp_path / "bad.npz", **arrays | change)
    with pytest.raises(CorpusError, match=r"bad\.npz is damaged"):
        Corpus.load(tmp_path / "bad.npz")


def test_what_is_no_corpus_is_refused_in_a_sentence(tmp_path):
    with pytest.raises(CorpusError, match="There is no corpus"):
        Corpus.load(tmp_path / "none.npz")
    Corpus.of(CHATS).save(tmp_path / "cut.npz")
    whole = (tmp_path / "cut.npz").read_bytes()
    for content in (b"", b"text", whole[:200], whole[:-30]):
        (tmp_path / "cut.npz").write_bytes(content)
        with pytest.raises(CorpusError, match="is not a corpus, or is damaged"):
            Corpus.load(tmp_path / "cut.npz")
    np.savez(tmp_path / "other.npz", ids=np.zeros(3))
    with pytest.raises(CorpusError, match="ids, offsets, prompt_len and temperature"):
        Corpus.load(tmp_path / "other.npz")
    np.savez(tmp_path / "code.npz", **{name: np.array([{}], object) for name in ARRAYS})
    with pytest.raises(CorpusError, match="is not a corpus"):
        Corpus.load(tmp_path / "code.npz")


def test_a_corpus_that_cannot_be_written_leaves_nothing(tmp_path):
    (tmp_path / "taken.npz").mkdir()
    with pytest.raises(CorpusError, match="cannot be written"):
        Corpus.of(CHATS).save(tmp_path / "taken.npz")
    assert [path.name for path in tmp_path.iterdir()] == ["taken.npz"]


def test_the_held_out_chats_that_ship_are_no_training_text(embedded_folder):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(embedded_folder)
    corpus = Corpus.load(HELD_OUT)
    train, kept = corpus.split()
    assert len(train) == 0 and len(kept) == len(corpus) == len(corpus.distinct())
    assert set(corpus.temperature.tolist()) == {1.0}
    tokens = {"code": 0, "prose": 0}
    for one in corpus:
        tokens[one.domain(tokenizer)] += len(one.reply)
    assert min(tokens.values()) >= 8000
