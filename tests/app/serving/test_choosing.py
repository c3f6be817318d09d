"""Which pair a choice on the page is: by the rule of the flags."""

from __future__ import annotations

import pytest

from app.serving.choosing import FORMS, chosen, needed_bytes
from core.models.sources import SpecError
from core.pairs.catalogue import CATALOGUE
from core.pairs.spec import PairSpec, embedded_spec

AUTO = dict.fromkeys(FORMS, "auto")


def test_pairs_by_name_and_by_models():
    assert chosen("embedded", "", "", AUTO) == embedded_spec()
    assert chosen("qwen3-4b", "a/b", "", AUTO | {"quantize": "nf4"}).quantize == "nf4"
    assert chosen("custom", " a/big ", "a/small", AUTO) == PairSpec("custom", "a/big", "a/small")
    assert chosen("custom", "embedded", "embedded", AUTO) == embedded_spec()
    assert chosen("custom", "Qwen/Qwen3-4B", "Qwen/Qwen3-0.6B", AUTO).name == "qwen3-4b"


@pytest.mark.parametrize("draft", ["", " ", "none"])
def test_without_a_draft_the_target_writes_alone(draft):
    for target in ("a/big", "Qwen/Qwen3-4B", "embedded"):
        assert chosen("custom", target, draft, AUTO) == PairSpec("custom", target, None)


def test_what_is_no_model_is_one_sentence():
    for target, draft in (("", ""), (" ", "a/b"), ("gpt2", ""), ("a/b", "x")):
        with pytest.raises(SpecError) as caught:
            chosen("custom", target, draft, AUTO)
        assert str(caught.value).endswith(".")


def test_memory_follows_the_type_of_activations():
    entry = CATALOGUE["qwen3-4b"]
    how = AUTO | {"device": "cpu", "quantize": "none", "draft_quantize": "none"}
    found = {dtype: needed_bytes(entry, how | {"dtype": dtype}) for dtype in ("float32", "bfloat16")}
    # Two bytes a weight; keys and values are float32 there all the same.
    weights = entry.target_parameters + entry.draft_parameters
    assert found["float32"] - found["bfloat16"] == 2 * weights
    assert found["float32"] == entry.needed_bytes("cpu", "none", "none", "float32")
