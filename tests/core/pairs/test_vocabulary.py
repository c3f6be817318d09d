"""Vocabularies compared by content (rule 11, SD-05): refused with the first difference, or noted."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer, models
from transformers import PreTrainedTokenizerFast

from core.models.errors import LoadError
from core.pairs.vocabulary import compare


def tokenizer(words: list[str] | dict[str, int], added: tuple[str, ...] = (), **special: str):
    """A fast tokenizer of whole words; added tokens get the next ids."""
    ids = words if isinstance(words, dict) else {word: id_ for id_, word in enumerate(words)}
    inner = Tokenizer(models.WordLevel(ids, unk_token=next(iter(ids))))
    inner.add_special_tokens([AddedToken(token, special=True) for token in added])
    return PreTrainedTokenizerFast(tokenizer_object=inner, **special)


class Listed:
    """A tokenizer as far as the comparison asks one."""

    def __init__(self, words):
        self.words = {word: id_ for id_, word in enumerate(words)}

    def get_vocab(self):
        return self.words


WORDS = ["a", "b", "c", "d"]


def test_the_same_content_needs_no_note():
    assert compare(tokenizer(WORDS), tokenizer(WORDS), 4, 4) == ()
    assert compare(tokenizer(WORDS, ("<e>",)), tokenizer([*WORDS, "<e>"]), 5, 5) == ()


def test_the_widths_of_qwen_are_padding_only():
    """SD-05: 152,064 rows of the 7B against 151,936 of the 0.5B, one tokenizer of 151,665."""
    one = Listed(f"w{id_}" for id_ in range(151_665))
    note = "The vocabularies have 152,064 against 151,936 rows: padding only."
    assert compare(one, one, 152_064, 151_936) == (note,)
    (turned,) = compare(one, one, 151_936, 152_064)
    assert turned == "The vocabularies have 151,936 against 152,064 rows: padding only."
    assert compare(one, one, 151_936, 151_936) == ()
    with pytest.raises(LoadError, match="id 151,664 is 'w151664' for the target and 'x' for the draft"):
        compare(one, Listed([*list(one.words)[:-1], "x"]), 152_064, 151_936)


def test_a_differing_id_is_refused_with_both_strings():
    with pytest.raises(LoadError) as caught:
        compare(tokenizer(WORDS), tokenizer(["a", "b", "x", "y"]), 4, 4)
    assert str(caught.value) == (
        "This pair is refused, because its vocabularies differ: id 2 is 'c' for the target and 'x' for the "
        "draft (2 ids differ); choose two models that share a tokenizer."
    )


def test_the_first_difference_is_by_id_not_by_order_of_words():
    other = {"d": 3, "x": 2, "b": 1, "z": 0}
    with pytest.raises(LoadError, match="id 0 is 'a' for the target and 'z' for the draft"):
        compare(tokenizer(WORDS), tokenizer(other), 4, 4)


def test_added_tokens_are_compared_too():
    with pytest.raises(LoadError, match="id 4 is '<e>' for the target and '<f>' for the draft"):
        compare(tokenizer(WORDS, ("<e>",)), tokenizer(WORDS, ("<f>",)), 5, 5)


def test_a_string_with_two_ids_is_refused():
    moved = {"a": 0, "b": 1, "c": 2, "d": 7}
    with pytest.raises(LoadError, match="'d' is id 3 for the target and id 7 for the draft"):
        compare(tokenizer(WORDS), tokenizer(moved), 8, 8)


def test_tokens_that_one_has_alone_are_noted():
    notes = compare(tokenizer(WORDS, ("<e>", "<f>", "<g>", "<h>")), tokenizer(WORDS), 8, 8)
    assert notes == ("4 tokens are only in the target's vocabulary ('<e>', '<f>', '<g>', …, from id 4).",)
    notes = compare(tokenizer(WORDS), tokenizer(WORDS, ("<e>",)), 4, 6)
    assert notes == (
        "1 token is only in the draft's vocabulary ('<e>', from id 4).",
        "The vocabularies have 4 against 6 rows: 1 token is scored by one model alone.",
    )


def test_padding_that_gguf_files_spell_out_is_padding():
    padded = tokenizer([*WORDS, "[PAD4]", "[PAD5]"])
    assert compare(padded, tokenizer(WORDS), 6, 4) == (
        "The vocabularies have 6 against 4 rows: padding only.",
    )
    with pytest.raises(
        LoadError, match=r"id 4 is '\[PAD9\]' for the target and '<e>'"
    ):  # a word like any other
        compare(tokenizer([*WORDS, "[PAD9]"]), tokenizer(WORDS, ("<e>",)), 5, 5)


def test_special_ids_that_differ_are_noted():
    notes = compare(tokenizer(WORDS, eos_token="c"), tokenizer(WORDS, eos_token="d", bos_token="a"), 4, 4)
    assert notes == (
        "Special ids differ between target and draft (begin of text is none and 0; end of text is 2 and 3): "
        "the target's ends a reply.",
    )
