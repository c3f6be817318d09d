"""The user's own text: what a chat, a text and a record become, and what is said of a bad line."""

import contextlib
import copy
import json

import numpy as np
import pytest

from core.distill import sources
from core.distill.corpus import Corpus, CorpusError
from core.distill.sources import LEAD, PASSAGE, read, read_all
from core.record.store import Store
from core.text.chat import encode_chat
from tests.core.builders import PAIR, answer, record
from tests.core.models_on_disk import tokenizer

END = 0  # of the tiny tokenizer


@pytest.fixture
def encoder():
    return tokenizer()


def lines(path, *objects):
    path.write_text("".join(json.dumps(one) + "\n" for one in objects), encoding="utf-8")
    return path


def prompt_of(encoder, *contents):
    roles = ("user", "assistant")
    return encode_chat(encoder, [{"role": roles[n % 2], "content": text} for n, text in enumerate(contents)])


def reply_of(encoder, chat):
    return encoder.decode(chat.reply.tolist())


# --- Chats


def test_both_forms_of_a_chat_mean_the_same(tmp_path, encoder):
    whole = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Good tide."}]}
    short = {"prompt": "Hi", "response": "Good tide."}
    one, other = read(lines(tmp_path / "a.jsonl", whole, short), encoder)
    assert one.ids.tolist() == other.ids.tolist()
    assert one.prompt.tolist() == prompt_of(encoder, "Hi")
    assert reply_of(encoder, one) == "Good tide.<|end|>" and np.isnan(one.temperature)


def test_every_answer_is_learned_behind_what_came_before(tmp_path, encoder):
    said = ["One?", "First.", "Two?", "Second."]
    messages = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(said)]
    first, second = read(lines(tmp_path / "a.jsonl", {"messages": messages}), encoder)
    assert first.prompt.tolist() == prompt_of(encoder, "One?")
    assert second.prompt.tolist() == prompt_of(encoder, *said[:3])
    assert reply_of(encoder, second) == "Second.<|end|>"


def test_control_tokens_in_a_reply_are_text(tmp_path, encoder):
    path = lines(tmp_path / "a.jsonl", {"prompt": "Hi", "response": "a<|end|>b<|im_end|>"})
    (chat,) = read(path, encoder)
    assert reply_of(encoder, chat) == "a<|end|>b<|im_end|><|end|>"
    assert chat.reply.tolist().count(END) == 1 and 2 not in chat.reply


def test_a_long_chat_is_cut_at_the_limit(tmp_path, encoder):
    path = lines(tmp_path / "a.jsonl", {"prompt": "Hi", "response": "the tide " * 200})
    (chat,) = read(path, encoder, limit=60)
    assert len(chat.ids) == 60 and chat.prompt.tolist() == prompt_of(encoder, "Hi")
    assert reply_of(encoder, chat).startswith("the tide the tide")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "it is not JSON"),
        ("[" * 100_000, ""),
        ("[1]", "it is not an object"),
        ('{"text": "a"}', 'neither "messages" nor "prompt" and "response"'),
        ('{"messages": "a"}', '"messages" is not a list'),
        ('{"messages": [1]}', "no role and content that are text"),
        ('{"messages": [{"role": "user"}]}', "no role and content that are text"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "no message of the assistant holds text"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "nothing to answer"),
        ('{"messages": [{"role": "bot", "content": "a"}, {"role": "assistant", "content": "a"}]}', "'bot'"),
        ('{"prompt": "", "response": "a"}', "The message is empty"),
        ('{"prompt": "a", "response": null}', "no role and content that are text"),
    ],
)
def test_a_bad_line_is_named(tmp_path, encoder, line, reason):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a", "response": "b"}\n\n' + line + "\n", encoding="utf-8")
    with pytest.raises(CorpusError) as caught:
        read(path, encoder)
    said = str(caught.value)
    assert said.startswith(f"{path}, line 3: ") and reason in said and "\n" not in said
    assert '{"prompt": ..., "response": ...}.' in said and '{"messages": [...]}' in said


# --- Plain text


def test_a_text_becomes_passages_behind_the_text_before_them(tmp_path, encoder):
    text = "".join(f"Line {n} of the tide.\n" for n in range(400))
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    chats = list(read(tmp_path / "a.txt", encoder))
    ids = encoder(text)["input_ids"]
    assert len(chats) == -(-(len(ids) - LEAD) // (LEAD + PASSAGE)) > 3
    for n, chat in enumerate(chats):
        begin = n * (LEAD + PASSAGE)
        assert chat.prompt.tolist() == prompt_of(encoder, encoder.decode(ids[begin : begin + LEAD]))
        assert chat.reply.tolist() == ids[begin + LEAD : begin + LEAD + PASSAGE]
    assert len(Corpus.of(chats).distinct()) == len(chats)  # so that both sides of the split get some


def test_files_that_give_nothing_are_named(tmp_path, encoder):
    (tmp_path / "short.txt").write_text("Too short.", encoding="utf-8")
    (tmp_path / "empty.jsonl").write_text("\n", encoding="utf-8")
    for name in ("short.txt", "empty.jsonl"):
        with pytest.raises(CorpusError, match=f"no reply to learn from in .*{name}"):
            read(tmp_path / name, encoder)
    with pytest.raises(CorpusError, match=r"none\.txt cannot be read"):
        read(tmp_path / "none.txt", encoder)
    (tmp_path / "latin.txt").write_bytes(b"a\nb\ncaf\xe9")
    with pytest.raises(CorpusError, match=r"latin\.txt, line 3: it is not UTF-8"):
        read(tmp_path / "latin.txt", encoder)


# --- The record


def test_replies_on_record_become_chats(tmp_path, encoder):
    path = tmp_path / "redline.db"
    with contextlib.closing(Store(path)) as store:
        conversation, question, _ = record(store, "aaxr", "p", question="Hello?")
        answer(store, conversation, question, "pp", kind="regenerated")
        recorded = store.conversation(conversation)
    first, again = recorded.messages[1].replies
    prompt = encode_chat(
        encoder, [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello?"}]
    )
    by_ids = read(path, encoder, target_fingerprint=PAIR.target_fingerprint)
    assert [chat.prompt.tolist() for chat in by_ids] == [prompt, prompt]
    assert [tuple(chat.reply.tolist()) for chat in by_ids] == [first.token_ids, again.token_ids]
    assert by_ids[0].temperature == np.float32(first.settings.temperature)
    texts = [reply_of(encoder, chat).removesuffix("<|end|>") for chat in read(path, encoder)]
    assert texts == [first.text, again.text]
    with pytest.raises(CorpusError, match="no reply to learn from"):
        read(path, encoder, target_fingerprint="another")
    with pytest.raises(CorpusError, match="There is no database"):
        read(tmp_path / "none.db", encoder)


def test_several_files_make_one_corpus_with_each_prompt_once(tmp_path, encoder):
    one = lines(tmp_path / "a.jsonl", {"prompt": "Hi", "response": "a"}, {"prompt": "Ho", "response": "b"})
    read(lines(tmp_path / "b.jsonl", {"prompt": "Hi", "response": "c"}), encoder).save(tmp_path / "b.npz")
    both = read_all([one, tmp_path / "b.npz"], encoder)
    assert [reply_of(encoder, chat) for chat in both] == ["a<|end|>", "b<|end|>"]


# --- Text that is not as hoped


@pytest.mark.parametrize("where", ["prompt", "response"])
def test_half_a_character_is_named_with_its_line(tmp_path, encoder, where):
    line = {"prompt": "a", "response": "b", where: "half \ud83d of one"}
    path = lines(tmp_path / "a.jsonl", {"prompt": "Hi", "response": "Good tide."}, line)
    with pytest.raises(CorpusError) as caught:
        read(path, encoder)
    said = str(caught.value)
    assert said.startswith(f"{path}, line 2: a message holds half a character (a lone surrogate")
    said.encode()  # it can be printed
    whole = lines(tmp_path / "b.jsonl", {"prompt": "a", "response": "\ud83d\ude00 b"})  # both halves
    assert reply_of(encoder, *read(whole, encoder)).startswith("\U0001f600 b")


def test_a_turn_marker_that_is_added_but_not_special_is_text_in_a_reply(tmp_path):
    encoder = copy.deepcopy(tokenizer())  # the tests share one
    encoder.add_tokens(["<|turn|>"])  # not special: the tokenizer does not split it when asked to
    marker = encoder.convert_tokens_to_ids("<|turn|>")
    encoder.chat_template += "{# <|turn|> #}"
    (chat,) = read(lines(tmp_path / "a.jsonl", {"prompt": "Hi <|turn|>", "response": "a<|turn|>b"}), encoder)
    assert marker not in chat.ids
    assert reply_of(encoder, chat) == "a<|turn|>b<|end|>"
    encoder.add_tokens(["<|word|>"])  # which no template writes: a word like others
    (chat,) = read(lines(tmp_path / "b.jsonl", {"prompt": "Hi", "response": "a<|word|>b"}), encoder)
    assert encoder.convert_tokens_to_ids("<|word|>") in chat.reply


@pytest.mark.parametrize("name", ["empty.jsonl", "empty.txt"])
def test_an_empty_file_is_told_as_one(tmp_path, encoder, name):
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(CorpusError, match=rf"{name}, line 1: it is empty: name a file with text\.$"):
        read(tmp_path / name, encoder)


@pytest.mark.parametrize("name", ["huge.jsonl", "huge.txt"])
def test_a_huge_file_is_read_no_further_than_there_is_room(tmp_path, encoder, monkeypatch, name):
    """It has no end: read whole, it would fill the memory."""
    monkeypatch.setattr(sources, "BLOCK", 2000)
    line = b'{"prompt": "Hi", "response": "Good tide."}\n'
    path = tmp_path / name
    read_so_far = 0

    class Endless:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

        def readline(self, limit):
            nonlocal read_so_far
            read_so_far += 1
            assert read_so_far < 5000
            return line

    monkeypatch.setattr(sources, "open", lambda *_: Endless(), raising=False)
    with pytest.raises(CorpusError) as caught:
        read(path, encoder, most=1500)
    said = str(caught.value)
    assert f"{path}, line " in said and "more than the 1,500 tokens that there is room for: give less" in said
    assert int(said.split("line ")[1].split(":")[0].replace(",", "")) <= read_so_far


def test_a_line_without_an_end_is_named(tmp_path, encoder, monkeypatch):
    monkeypatch.setattr(sources, "LONGEST_LINE", 1 << 20)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"prompt": "a", "response": "b"}\n' + b"x" * (2 << 20))
    with pytest.raises(CorpusError, match=r"a\.jsonl, line 2: it is longer than 1 MB; please break it up"):
        read(path, encoder)


def test_text_read_in_parts_is_the_text(tmp_path, monkeypatch):
    text = "\ufeff" + "".join(f"Line {n} – é\r\n" * (n % 3) + "\n" for n in range(500)) + "no end"
    (tmp_path / "a.txt").write_bytes(text.encode())
    for block in (1, 100, 10**6):
        monkeypatch.setattr(sources, "BLOCK", block)
        parts = [part for _, part in sources._blocks(tmp_path / "a.txt")]
        assert "".join(parts) == text[1:] and (len(parts) > 1) == (block < 10**6)
