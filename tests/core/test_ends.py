"""What ends a reply of a target, as its file, tokenizer, configs and template say (NX-06)."""

from __future__ import annotations

import pytest

from core.engine.transcript import Transcript
from core.models.checkpoint import inspect
from core.models.ends import end_ids, gguf_ends
from core.pairs.general import _end_ids
from core.pairs.plan import plan_models
from core.pairs.spec import PairSpec
from tests.core.models_on_disk import SPECIAL, TEMPLATE, tokenizer, write_gguf, write_model

END, START, CLOSE = range(3)  # "<|end|>", "<|im_start|>", "<|im_end|>"


def ends_of(path):
    (plan,) = plan_models(PairSpec(name="x", target=str(path), draft=None, quantize="none", device="cpu"))
    return _end_ids(plan), plan.tokenizer


def written(tokenizer, ends, ids):
    transcript = Transcript(tokenizer, [5], ends, (), 100, "auto")
    for id_ in ids:
        transcript.push(id_)
        if transcript.finish_reason:
            break
    return transcript.newly_safe(), transcript.finish_reason


def says_on():
    """ "Hello", the end of the turn, and a turn of the user's."""
    encode = tokenizer().encode
    return [*encode("Hello"), CLOSE, *encode("\n"), START, *encode("user\nAnd you?")]


def test_nx_06_a_token_that_only_the_files_eot_key_names(tmp_path):
    """The template closes a turn with nothing here, so that the key alone knows."""
    keys = {"tokenizer.ggml.eot_token_id": CLOSE}
    file = write_gguf(tmp_path / "x.gguf", 1, says=keys, template="{{ messages[-1].content }}")
    ends, tokens = ends_of(file)
    assert ends == {END, CLOSE} and written(tokens, ends, says_on()) == ("Hello", "eos_token")


@pytest.mark.parametrize("key", ["eot", "eom", "fim_pad", "fim_rep", "fim_sep"])
def test_nx_06_every_key_by_which_a_gguf_names_an_end(key):
    words = ["a", "b", "c", "d"]
    said = {"tokenizer.ggml.eos_token_id": 0, f"tokenizer.ggml.{key}_token_id": 2}
    assert gguf_ends(said, words) == {0, 2}
    assert gguf_ends({f"tokenizer.ggml.{key}_token_id": 4}, words) == set()  # no id of this vocabulary


def test_nx_06_what_llama_cpp_takes_for_an_end_by_its_text():
    words = [
        "a",
        "<|eot_id|>",
        "<|eom_id|>",
        "<end_of_turn>",
        "<|im_end|>",
        "<|endoftext|>",
        "</s>",
        "<|im_start|>",
    ]
    assert gguf_ends({}, words) == {1, 2, 3, 4, 5, 6}


def test_what_ends_a_message_within_a_reply_ends_no_reply():
    """gpt-oss thinks in a message of its own; Gemma 4's "</s>" is text."""
    harmony = ["<|end|>", "<|return|>", "<|call|>"]
    assert gguf_ends({"tokenizer.ggml.eot_token_id": 0}, harmony) == {1, 2}
    assert gguf_ends({}, ["<|end|>", "x"]) == {0}
    assert gguf_ends({}, ["</s>", "<|tool_response>", "<turn|>"]) == {1, 2}
    told = tokenizer().__class__(
        tokenizer_object=tokenizer().backend_tokenizer,
        extra_special_tokens=["<|end|>", "<|return|>", "<|call|>"],
    )
    told.chat_template = TEMPLATE.replace(SPECIAL[CLOSE], "<|end|>")
    assert end_ids(told, {"eos_token_id": 1}) == {1}


def test_nx_06_a_token_that_only_the_template_knows(tmp_path):
    ends, tokens = ends_of(write_model(tmp_path, "llama", 1))
    assert ends == {END, CLOSE} and written(tokens, ends, says_on()) == ("Hello", "eos_token")
    bare, tokens = ends_of(write_model(tmp_path / "bare", "llama", 1, template=False))
    assert bare == {END}


def test_the_files_ends_are_part_of_the_checkpoint(tmp_path):
    found = inspect(str(write_gguf(tmp_path / "x.gguf", 1)))
    assert found.end_ids == {END, CLOSE}  # by eos key, and by their texts
