"""Text and ids: nothing lost, no half character, stops wherever borders fall (TK-01, TK-03, SD-02)."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from core.engine.transcript import Transcript
from core.text.detokenise import (
    REPLACEMENT,
    Detokenizer,
    StopStrings,
    clean_text,
    decode,
    end_token_ids,
    label,
    shown_alone,
)


@pytest.fixture(scope="module")
def smol(embedded_folder):
    return AutoTokenizer.from_pretrained(embedded_folder)


@pytest.fixture(scope="module")
def byte_tokenizer():
    """One token a byte, as GPT-2's tokenizer falls back to."""
    from core.text.detokenise import _BYTES

    vocabulary = {character: byte for character, byte in _BYTES.items()}
    backend = Tokenizer(models.BPE(vocabulary, [], unk_token=None))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=True)


@pytest.fixture(scope="module")
def llama_like():
    """Sentence pieces with ▁ for spaces and bytes as <0xHH>, as Llama 2 and Mistral have."""
    words = ["▁Hello", "▁world", ",", "▁this", "▁is", "▁", "!", "▁x"]
    vocabulary = {"<unk>": 0} | {f"<0x{b:02X}>": b + 1 for b in range(256)}
    vocabulary |= {word: len(vocabulary) + n for n, word in enumerate(words)}
    backend = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


def streamed(tokenizer, ids) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [detokenizer.push(i) for i in ids]


HARD = [
    "😀",
    "👨‍👩‍👧‍👦 family",
    "🇩🇪🇫🇷",
    "안녕하세요",
    "你好 ñ עברית",
    "x != y and a . b , 'c' n't",
    "    indented\n        more\n\n    Hello\n",
]


@pytest.mark.parametrize("text", HARD)
def test_pieces_join_to_the_text_and_never_hold_half_a_character(byte_tokenizer, smol, text):
    for tokenizer in (byte_tokenizer, smol):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        pieces = streamed(tokenizer, ids)
        assert "".join(pieces) == decode(tokenizer, ids) == text
        assert not any(REPLACEMENT in piece for piece in pieces)


def test_a_character_split_over_tokens_is_given_whole_by_the_last(byte_tokenizer):
    ids = list("😀".encode())
    assert streamed(byte_tokenizer, ids) == ["", "", "", "😀"]
    assert [label(byte_tokenizer, i) for i in ids] == ["⟨F0⟩", "⟨9F⟩", "⟨98⟩", "⟨80⟩"]


def test_a_run_of_real_replacement_characters_is_shown_as_it_comes(byte_tokenizer, llama_like):
    """Not at the reply's end: it is a character as others are, and no half of one."""
    ids = list(REPLACEMENT.encode()) * 3
    assert streamed(byte_tokenizer, ids) == ["", "", REPLACEMENT] * 3
    assert streamed(llama_like, [byte + 1 for byte in ids]) == ["", "", REPLACEMENT] * 3
    with_piece = llama_like.__class__(tokenizer_object=llama_like.backend_tokenizer)
    with_piece.add_tokens([REPLACEMENT])
    own = with_piece.convert_tokens_to_ids(REPLACEMENT)
    assert streamed(with_piece, [own, own]) == [REPLACEMENT, REPLACEMENT]


def test_bytes_that_begin_no_character_are_shown_as_they_come(byte_tokenizer):
    assert streamed(byte_tokenizer, [0xFF, 0xE2, 0x82, 0xAC, 0x80]) == [REPLACEMENT, "", "", "€", REPLACEMENT]
    assert streamed(byte_tokenizer, [0xE2, 0x28]) == ["", REPLACEMENT + "("]


@pytest.mark.parametrize("end", ["length", "eos_token", "cancelled"])
def test_a_stop_string_of_replacement_characters_is_cut_at_the_replys_end_too(byte_tokenizer, end):
    """Half a character reads as one when nothing follows."""
    ends, most = frozenset({0x9F} if end == "eos_token" else ()), 5 if end == "length" else 99
    transcript = Transcript(byte_tokenizer, [5], ends, ("b" + REPLACEMENT,), most, "auto")
    shown = ""
    for id_ in [*b"ab", *"😀".encode()[:2]]:
        transcript.push(id_)
        shown += transcript.newly_safe()
    assert transcript.finish_reason == {"length": "stop_string", "eos_token": "eos_token"}.get(end)
    whole = decode(byte_tokenizer, transcript.ids[1:])
    assert whole == "ab" + REPLACEMENT
    assert shown == "a" and transcript.visible_chars(whole) == 1


def test_ids_that_read_alike_are_told_apart_by_bytes_and_id(byte_tokenizer, llama_like):
    assert shown_alone(byte_tokenizer, 0xF0) == "⟨F0⟩ id 240"
    assert shown_alone(byte_tokenizer, 0x9F) == "⟨9F⟩ id 159"
    assert shown_alone(llama_like, 0x9F + 1) == "⟨9F⟩ id 160"
    assert shown_alone(byte_tokenizer, ord("a")) == "a"


def test_words_of_a_llama_tokenizer_keep_their_spaces(llama_like):
    pieces = ["▁Hello", "▁world", ",", "▁this", "▁is"]
    ids = llama_like.convert_tokens_to_ids(pieces)
    assert streamed(llama_like, ids) == ["Hello", " world", ",", " this", " is"]
    korean = [b + 1 for b in "안".encode()]
    assert streamed(llama_like, [*ids, *korean])[-3:] == ["", "", "안"]
    assert label(llama_like, korean[0]) == "⟨EC⟩"


@pytest.mark.parametrize("seed", range(20))
def test_any_ids_at_all(byte_tokenizer, smol, seed):
    """Bytes that form no character come out as the whole decode has them, at the latest at the end."""
    generator = random.Random(seed)
    for tokenizer, size in ((byte_tokenizer, 256), (smol, 49152)):
        ids = generator.choices(range(size), k=60)
        given = "".join(streamed(tokenizer, ids))
        whole = decode(tokenizer, ids)
        assert whole.startswith(given)
        assert set(whole[len(given) :]) <= {REPLACEMENT}


def test_peeking_takes_nothing(byte_tokenizer):
    detokenizer = Detokenizer(byte_tokenizer)
    first, *rest = "é".encode()
    assert detokenizer.push(first) == ""
    assert detokenizer.peek([*rest, ord("!")]) == ["é", "!"]
    assert detokenizer.peek([ord("a")]) == [REPLACEMENT + "a"]
    assert detokenizer.push(rest[0]) == "é"


def test_labels_of_special_tokens(smol):
    assert label(smol, 2) == "<|im_end|>"
    assert label(smol, 10**6) == "⟨id 1000000⟩"


def test_a_special_token_in_the_stream_shows_its_name_and_no_text(smol):
    """And is counted once, like any other."""
    ids = smol("Hello there", add_special_tokens=False)["input_ids"]
    transcript = Transcript(smol, [1, 7], frozenset({2}), [], 100, "auto")
    pieces = [transcript.push(token_id) for token_id in [*ids, 0, 2]]
    assert [piece.label for piece in pieces] == [None] * len(ids) + ["<|endoftext|>", "<|im_end|>"]
    assert "".join(piece.text for piece in pieces) == transcript.newly_safe() == "Hello there"
    assert transcript.finish_reason == "eos_token" and transcript.emitted == len(ids) + 2


def test_end_ids_are_a_union(smol):
    assert end_token_ids(smol, {"eos_token_id": [1, 106]}, {"eos_token_id": 7}, None, {}) == {2, 1, 106, 7}
    strange = [2.5, -1, [5, -7, 6.0, "8", True, None], "abc", {"a": 1}, True]
    assert end_token_ids(smol, *({"eos_token_id": value} for value in strange), "text", 3) == {2, 5}


@pytest.mark.parametrize("pieces", [["abcEND"], ["ab", "cE", "ND"], ["abcEN", "D tail"], list("abcEND")])
def test_stop_strings_are_found_across_pieces_and_never_shown(pieces):
    stops, text, shown = StopStrings(["END", "STOP"]), "", []
    for piece in pieces:
        text += piece
        found = stops.push(piece)
        shown.append(text[: stops.safe_length()])
        if found:
            break
    assert found and stops.cut == 3
    assert all("abc".startswith(s) for s in shown)


def test_what_only_began_like_a_stop_string_is_shown_later():
    stops = StopStrings(["###"])
    assert not stops.push("a##") and stops.safe_length() == 1
    assert not stops.push(" b") and stops.safe_length() == 5


def test_of_several_stop_strings_the_earliest_cuts():
    stops = StopStrings(["cd", "bcd"])
    assert stops.push("abcd") and stops.cut == 1
    assert not StopStrings([]).push("anything") and StopStrings([""]).safe_length() == 0


def test_db_04_what_can_be_stored_of_text_that_utf_8_cannot_hold():
    assert clean_text("hi \ud83d") == "hi \ufffd"
    assert clean_text("\ude00\ud83d") == "\ufffd\ufffd"
    assert clean_text("a\x00b") == "a\ufffdb"
    assert clean_text("\ud83d\ude00") == "😀"
    assert clean_text("plain é 你好") == "plain é 你好"
