"""The peer runs the same models and is told the same settings."""

from dataclasses import replace

import pytest
import torch

from core.bench import run as bench_run
from core.bench import with_transformers as bench_transformers
from core.pairs.load import load_pair
from core.pairs.spec import PairSpec, embedded_spec
from tests.core.builders import PAIR
from tests.core.models_on_disk import write_gguf, write_model
from tests.core.pairs.test_load import write_draft

PROMPT = "<|im_start|>user\nName three rivers.<|im_end|>\n<|im_start|>assistant\n"


def silent(sentence, fraction):
    pass


def test_the_assistant_is_the_embedded_draft_and_changes_no_greedy_reply(
    embedded_pair, embedded_home, monkeypatch
):
    monkeypatch.setenv("REDLINE_HOME", str(embedded_home))
    target, assistant = bench_transformers.load(embedded_spec(), embedded_pair.info, silent)
    ids = embedded_pair.tokenizer(PROMPT)["input_ids"]
    drafter = embedded_pair.drafting("model").drafter
    with torch.inference_mode():
        theirs = assistant(torch.tensor([ids])).logits[0, -1].float()
        ours = drafter.model.next_logits(ids, drafter.new_state())
    inside = torch.zeros_like(theirs, dtype=torch.bool)
    inside[drafter.head_ids] = True
    assert theirs[~inside].max() == -torch.inf  # as trimmed as Redline's
    p, q = theirs[inside].softmax(0), ours.softmax(0)
    # Up to bfloat16 there and 4 bits here, in the head as well: 0.85. Another draft has half in common.
    assert torch.minimum(p, q).sum() > 0.8

    def reply(**assistance):
        return bench_transformers.generate(target, ids, embedded_pair.end_ids, 0, 12, 1, **assistance)

    alone, assisted = reply(), reply(assistant=assistant, num_draft_tokens=4)
    assert alone["tokens"] == 11
    assert 11 - 4 <= assisted["tokens"] <= 11
    assert 0 < assisted["ttft_seconds"] <= assisted["seconds"]


def test_any_local_pair_is_loaded_and_suggestions_of_a_model_are_not_followed(tmp_path):
    suggests = dict(repetition_penalty=9.0, do_sample=True, top_k=1)
    folders = [
        str(write_model(tmp_path / name, "qwen2", seed, generation=suggests))
        for seed, name in enumerate(("target", "draft"))
    ]
    spec = PairSpec("custom", *folders)
    target, draft = bench_transformers.load(spec, PAIR, silent)
    assert target.dtype == draft.dtype == torch.bfloat16
    assert draft.generation_config.num_assistant_tokens_schedule == "constant"
    asked = {}

    def generate(batch, generate=target.generate, **settings):
        asked.update(settings)
        return generate(batch, **settings)

    target.generate = generate
    bench_transformers.generate(target, [5, 6, 7], frozenset({0}), 0.8, 8, 1)
    assert (asked["repetition_penalty"], asked["top_k"], asked["temperature"]) == (1.0, 0, 0.8)
    assert bench_transformers.load(PairSpec("custom", folders[0], None), PAIR, silent)[1] is None


@pytest.mark.parametrize("architecture, changes", [("llama", {"tie_word_embeddings": False}), ("qwen3", {})])
def test_a_trained_draft_of_kind_model_is_an_assistant_for_its_target(architecture, changes, tmp_path):
    folder = write_model(tmp_path / "target", architecture, 1, **changes)
    draft = write_draft(tmp_path / "draft", folder, "model")
    spec = PairSpec("custom", str(folder), str(draft))
    drafter = load_pair(replace(spec, draft_quantize="none")).drafter
    _, assistant = bench_transformers.load(spec, PAIR, silent)
    theirs = assistant(torch.tensor([[5, 6, 7]])).logits[0, -1, drafter.head_ids].float()
    ours = drafter.model.next_logits([5, 6, 7], drafter.new_state())
    assert torch.minimum(theirs.softmax(0), ours.softmax(0)).sum() > 0.9


def test_a_draft_that_no_peer_can_run_is_a_sentence_in_the_report(tmp_path):
    folder = write_model(tmp_path / "target", "llama", 1)
    draft = write_draft(tmp_path / "draft", folder, "eagle")
    spec = PairSpec("custom", str(folder), str(draft))
    runs, notes = bench_run.peer_runs(["transformers"], load_pair(spec), spec, 40, silent)
    assert list(runs) == ["transformers"]
    assert notes == [f"No peer can run the draft {draft}: name one of kind model for that."]


def test_a_gguf_file_is_unpacked(tmp_path):
    file = write_gguf(tmp_path / "tiny.gguf", 1)
    model = bench_transformers.load_model(str(file), "none", "cpu", silent)
    assert model.get_input_embeddings().weight.dtype == torch.bfloat16
