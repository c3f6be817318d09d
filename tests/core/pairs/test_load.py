"""Any pair from disk to replies: by the same code as real ones, with tiny models of each family."""

from __future__ import annotations

import dataclasses
import json
import logging
import time
import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, LlamaForCausalLM

from core.engine.loop import Engine
from core.models import by_layer, card, quantize
from core.models.decoder import Decoder
from core.models.errors import LoadError
from core.models.linear.findings import Evidence, Found
from core.models.linear.forms import maker
from core.models.rows import row_dependence
from core.models.sizes import counted
from core.models.transformers_decoder import TransformersDecoder, whole_pass
from core.pairs import general, load, load_model
from core.pairs import plan as plans
from core.pairs.draft_file import embedding_fingerprint, load_metadata, save_draft
from core.pairs.general import suggested_settings
from core.pairs.load import load_pair
from core.pairs.plan import LEAN_FORMS, choose_device
from core.pairs.spec import PairSpec, embedded_spec
from core.records import Settings
from core.text.chat import encode_chat
from core.text.template import NO_TEMPLATE
from tests.core.models_on_disk import (
    CONTEXT,
    FAMILIES,
    SPECIAL,
    TEMPLATE,
    VOCABULARY,
    make_model,
    write_gguf,
    write_model,
    write_pair,
)
from tests.core.toy_drafts import eagle_tensors, medusa_tensors
from tests.core.toys import table, toy_pair

QUESTION = [{"role": "user", "content": "When does the tide come in?"}]


def spec(target, draft=None, **fields) -> PairSpec:
    options = dict(quantize="none", draft_quantize="none", device="cpu") | fields
    return PairSpec("custom", str(target), draft and str(draft), **options)


def reply(pair, k: int, length: int = 24, engine: Engine | None = None):
    ids = encode_chat(pair.tokenizer, QUESTION)
    settings = Settings(temperature=0, num_draft_tokens=k, max_new_tokens=length)
    generation = (engine or Engine(pair)).generate(ids, settings)
    rounds = list(generation)
    return generation.reply, [token for round_ in rounds for token in round_.tokens]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Llama to load, copy and spoil."""
    return write_model(tmp_path_factory.mktemp("models") / "tiny-llama", "llama", 1)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "mamba"])
def test_speculative_equals_plain(family, tmp_path):
    pair = load_pair(spec(*write_pair(tmp_path, family)))
    plain, _ = reply(pair, 0)
    speculative, tokens = reply(pair, 4)
    assert speculative.error is None
    assert speculative.token_ids == plain.token_ids
    assert {"accepted", "rejected"} <= {token.fate for token in tokens}
    info = pair.info
    assert (info.pair, info.target, info.draft, info.drafter) == ("custom", "target", "draft", "model")
    assert (info.quantization, info.draft_quantization, info.dtype, info.device) == ("none",) * 2 + (
        "float32",
        "cpu",
    )
    assert (info.context_length, info.draft_context_length) == (CONTEXT, CONTEXT)
    assert info.target_fingerprint != info.draft_fingerprint


@pytest.mark.parametrize("form", LEAN_FORMS["cpu"])
def test_the_llama_family_runs_lean(form, tmp_path, packed_forms):
    if form in quantize.BITSANDBYTES:
        pytest.importorskip("bitsandbytes")
    elif form != "none" and form not in packed_forms:
        pytest.skip(f"no {form} products on this processor")
    pair = load_pair(spec(write_model(tmp_path, "qwen3", 1), quantize=form, dtype="bfloat16"))
    assert isinstance(pair.target, Decoder)
    assert (pair.info.quantization, pair.info.device) == (form.replace("m-i", "m.i"), "cpu")
    assert pair.info.dtype == ("bfloat16" if form == "none" else "float32")  # of the products
    assert len(reply(pair, 0, 8)[0].token_ids) == 8


@pytest.mark.parametrize(
    "family, form", [("mistral-window", "none"), ("gemma3", "none"), ("gpt2", "llm-int8")]
)
def test_what_cannot_runs_through_transformers(family, form, tmp_path):
    if form == "llm-int8":
        pytest.importorskip("bitsandbytes")
    pair = load_pair(spec(write_model(tmp_path, family, 1), quantize=form))
    assert isinstance(pair.target, TransformersDecoder)
    assert not any("own modules" in note for note in pair.notes)  # it was never to run elsewhere


def test_lean_scores_that_differ_are_not_used(folder, monkeypatch, caplog):
    """A fault of the lean decoder on a model nobody tried costs speed, not sense."""
    other = lambda model, ids: torch.randn(len(ids), VOCABULARY) * 9  # noqa: E731
    # The pass is made all the same, since weights are packed on its way.
    made = lambda model, ids: (whole_pass(model, ids), other(model, ids))[1]  # noqa: E731
    monkeypatch.setattr(by_layer, "whole_pass", made)
    pair = load_pair(spec(folder))
    assert isinstance(pair.target, TransformersDecoder)
    assert "scores tiny-llama otherwise than transformers" in caplog.text
    said = (
        "tiny-llama runs through transformers' own modules, which are slower: its scores came out otherwise."
    )
    assert said in pair.notes


def test_a_copy_of_the_target_as_draft_is_always_right(folder):
    """SD-11: with caches that are in step, and not shared, all that is tested is accepted."""
    pair = load_pair(spec(folder, folder))
    _, tokens = reply(pair, 4)
    assert {token.fate for token in tokens if token.drafted} == {"accepted"}
    assert pair.info.target_fingerprint == pair.info.draft_fingerprint


def test_the_target_alone(folder):
    pair = load_pair(spec(folder))
    assert pair.drafter is None
    info = pair.info
    assert (info.draft, info.draft_fingerprint, info.draft_context_length, info.drafter) == (
        "",
        "",
        0,
        "plain",
    )
    answer, tokens = reply(pair, 4)
    assert answer.token_ids and {token.fate for token in tokens} == {"plain"}


def test_a_gguf_is_the_model_it_was_made_from(tmp_path, folder):
    pair = load_pair(spec(write_gguf(tmp_path / "tiny.gguf", 1), folder))
    original = load_pair(spec(folder))
    ids = encode_chat(pair.tokenizer, QUESTION)
    assert ids == encode_chat(original.tokenizer, QUESTION)
    rows = [other.target.logits(ids, other.target.new_cache()) for other in (pair, original)]
    difference = (rows[0].softmax(-1) - rows[1].softmax(-1)).abs().max()
    assert 0 < difference < 0.02  # Q8_0 rounds
    speculative, tokens = reply(pair, 4)
    assert speculative.token_ids == reply(pair, 0)[0].token_ids
    assert "accepted" in {token.fate for token in tokens}
    assert pair.info.target == "tiny" and pair.info.quantization == "none"
    assert "The weights in tiny were unpacked and run as float32, not as the file keeps them." in pair.notes


@pytest.mark.parametrize("form, shown", [("nf4", "nf4"), ("llm-int8", "llm.int8")])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_bitsandbytes_on_a_cpu(family, form, shown, tmp_path, caplog):
    pytest.importorskip("bitsandbytes")
    target, draft = write_pair(tmp_path, family)
    with caplog.at_level(logging.WARNING, "bitsandbytes"):
        pair = load_pair(spec(target, draft, quantize=form, draft_quantize=form))
        speculative, tokens = reply(pair, 3, 8)
    assert "float16 during quantization" not in caplog.text
    assert (pair.info.quantization, pair.info.draft_quantization) == (shown, shown)
    assert speculative.error is None and len(speculative.token_ids) == 8
    assert "accepted" in {token.fate for token in tokens}
    assert row_dependence(pair.target).later == 0
    dense = load_pair(spec(target)).target
    ids = encode_chat(pair.tokenizer, QUESTION)
    one, other = (model.logits(ids, model.new_cache()).softmax(-1) for model in (pair.target, dense))
    assert 0 < (one - other).abs().max() < 0.3


def test_evidence_is_taken_in_the_sizes_that_are_loaded(tmp_path, monkeypatch):
    """And of no other model, nor where nothing is quantised."""
    asked = []
    found = Found("int4", "float32", "int4", "bfloat16", (Evidence("float32", layers=(1.0,) * 4),), {})

    def find(sizes, folder, say=None):
        asked.append(sizes)
        return found

    monkeypatch.setattr(quantize.evidence, "find", find)
    monkeypatch.setattr(Found, "best", lambda self, family: "int8x2-onednn")
    dense = maker("float32")
    monkeypatch.setattr(quantize.forms, "maker", lambda form: dense)
    monkeypatch.setattr(plans, "sizes_of", counted)
    target, draft = write_model(tmp_path / "one", "qwen3", 1), write_model(tmp_path / "other", "gpt2", 1)
    load_pair(spec(target))
    assert asked == []
    pair = load_pair(spec(target, quantize="int8"))
    own = counted(AutoConfig.from_pretrained(target))
    assert set(asked) == {own} and pair.target.cache_dtype == torch.bfloat16
    asked.clear()
    load_pair(spec(draft, quantize="int8"))
    assert set(asked) == {counted(AutoConfig.from_pretrained(draft))} != {own}


@pytest.mark.usefixtures("has_int8")
def test_on_a_cpu_auto_is_the_projects_int8(tmp_path):
    pair = load_pair(spec(*write_pair(tmp_path, "qwen2"), quantize="auto", draft_quantize="auto"))
    assert (pair.info.quantization, pair.info.draft_quantization) == ("int8", "int8")
    assert reply(pair, 3)[0].token_ids == reply(pair, 0)[0].token_ids


def test_a_model_that_comes_quantised_is_shown_as_it_is(tmp_path, folder):
    pytest.importorskip("bitsandbytes")
    config = quantize.loading_config("nf4", "float32")
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, device_map="cpu")
    model.save_pretrained(tmp_path)
    load_pair(spec(folder)).tokenizer.save_pretrained(tmp_path)
    assert load_pair(spec(tmp_path, quantize="auto")).info.quantization == "nf4"
    with pytest.raises(LoadError, match=r"comes already quantised \(bitsandbytes\): leave --quantize away"):
        load_pair(spec(tmp_path, quantize="llm-int8"))
    with pytest.raises(LoadError, match="leave --draft-quantize away"):
        load_pair(spec(folder, tmp_path, draft_quantize="nf4"))


def test_weights_that_come_as_llm_int8_run_without_outliers(tmp_path, folder):
    """Rule 13: the threshold that transformers writes picks outliers over all rows of a pass at once."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    config = BitsAndBytesConfig(load_in_8bit=True)
    assert config.llm_int8_threshold == 6.0
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, device_map="cpu")
    model.save_pretrained(tmp_path)
    load_pair(spec(folder)).tokenizer.save_pretrained(tmp_path)
    pair = load_pair(spec(tmp_path, quantize="auto"))
    assert pair.info.quantization == "llm.int8"
    layers = [m for m in pair.target.model.modules() if isinstance(m, bitsandbytes.nn.Linear8bitLt)]
    assert layers and {layer.state.threshold for layer in layers} == {0.0}


def comes_as(path, method, **more):
    """A Llama whose config says that its weights come quantised."""
    write_model(path, "llama", 1)
    file = path / "config.json"
    stored = {"quantization_config": {"quant_method": method}}
    file.write_text(json.dumps(json.loads(file.read_text()) | stored | more))
    return path


@pytest.mark.parametrize("packed, shown", [(torch.int32, "gptq"), (None, "none")])
def test_other_forms_are_named_as_they_come(tmp_path, monkeypatch, packed, shown):
    """GPTQ, AWQ, FP8 and the like: by their name where the weights are packed, and not where they are not."""
    path = comes_as(tmp_path / "four-bits", "gptq")

    def as_its_library_would(plan):
        model = LlamaForCausalLM.from_pretrained(tmp_path / "plain").eval()
        if packed:
            model.model.layers[0].mlp.register_buffer("qweight", torch.zeros(8, 16, dtype=packed))
        return model

    write_model(tmp_path / "plain", "llama", 1)
    monkeypatch.setattr(load_model, "_read", as_its_library_would)
    pair = load_pair(spec(path, quantize="auto"))
    assert pair.info.quantization == shown
    note = "four-bits comes quantised as gptq, which was unpacked: it runs as float32."
    assert (note in pair.notes) == (packed is None)


def test_weights_that_come_quantised_need_what_they_take(tmp_path, monkeypatch):
    """And not what they would unquantised; nobody is told to quantise them again."""
    path = comes_as(tmp_path / "four-bits", "awq")
    plan = plans._plan(str(path), "auto", True, "cpu", "float32", lambda *said: None)
    size = (path / "model.safetensors").stat().st_size
    # A block of positions for the tokens, layers, keys and values, heads, head size, bytes; a quarter grows.
    cache = 256 * 2 * 2 * 2 * 16 * 4 * 5 // 4
    assert (plan.need.form, plan.need.bytes, plan.need.smaller) == ("awq", size + cache, None)


def test_memory_while_a_gguf_is_unpacked(tmp_path, monkeypatch):
    """To float32 in the processor's memory, also where it is to run on a card: a part at a time, or all of it
    where transformers unpacks it."""
    file = write_gguf(tmp_path / "tiny.gguf", 1)
    parameters = sum(p.numel() for p in make_model("llama", 1).parameters())

    def plan(device):
        return plans._plan(str(file), "none", False, device, "bfloat16", lambda *said: None)

    assert plan("cuda").passing.bytes == 2 * (64 * (2 * 64 + 2 * 32) + 3 * 64 * 128)
    # A block of keys and values comes to it, of which a quarter grows; in float32 on a processor. On a
    # card also activations of a prompt's rows, here of all that the model holds.
    rows = 128 * (2 * (3 * 64 + 3 * 128) + 4 * (64 + 2 * 32))
    on_card = 2 * parameters + 256 * 2 * 2 * 2 * 16 * 2 * 5 // 4 + rows
    assert plan("cuda").need.bytes == on_card
    assert plan("cpu").need.bytes == 2 * parameters + 256 * 2 * 2 * 2 * 16 * 4 * 5 // 4
    assert plan("cpu").need.smaller == "--quantize nf4"
    monkeypatch.setattr(plans, "lean_reason", lambda config: "it is another architecture")
    assert plan("cpu").need.smaller is None
    assert plan("cuda").need.bytes == on_card
    assert plan("cuda").passing.bytes == 4 * parameters
    assert plan("cpu").need.bytes == 4 * parameters
    checked = []
    monkeypatch.setattr(plans, "choose_device", lambda asked: "cuda")
    monkeypatch.setattr(plans.memory, "check", lambda needs, device: checked.append((needs, device)))
    monkeypatch.setattr(general, "fetch", lambda *given: 1 / 0)
    with pytest.raises(LoadError, match="could not be loaded"):
        load_pair(spec(file))
    assert [device for _, device in checked] == ["cuda", "cpu"]
    assert checked[1][0][0].bytes == 4 * parameters


def test_dtypes_may_differ_between_target_and_draft(folder):
    """A draft in float16 with a target in bfloat16 (huggingface/peft#1515)."""
    target = load_pair(spec(folder, dtype="bfloat16"))
    pair = load_pair(spec(folder, folder, dtype="float16"))
    assert (target.info.dtype, pair.info.dtype, pair.info.draft_dtype) == ("bfloat16", "float16", "float16")
    mixed = dataclasses.replace(target, drafter=pair.drafter)
    answer, tokens = reply(mixed, 4)
    assert answer.error is None and "accepted" in {token.fate for token in tokens}


def test_end_ids_are_all_that_the_targets_files_name(tmp_path):
    """SD-02: tokenizer 0, target's generation config 1 and 106, its template 2; not the draft's config, 7."""
    target = write_model(tmp_path / "t", "llama", 1, generation={"eos_token_id": [1, 106]})
    draft = write_model(tmp_path / "d", "llama", 2, eos_token_id=7)
    pair = load_pair(spec(target, draft))
    assert pair.end_ids == pair.drafting("plain").end_ids == {0, 1, 106, 2}


WORD = 7  # an ordinary word of the target


def draft_that_ends_with_a_word(folder, target, where):
    """A draft one of whose files says that ``WORD`` ends a reply."""
    if where == "a gguf's keys":
        keys = {f"tokenizer.ggml.{key}_token_id": WORD for key in ("eot", "eom")}
        return write_gguf(folder.with_suffix(".gguf"), 2, says=keys)
    if where == "a distilled draft's config":
        return write_draft(folder, target, "eagle", {"eos_token_id": str(WORD)})
    draft = write_model(
        folder, "llama", 2, generation={"eos_token_id": [WORD]} if where == "generation" else None
    )
    (word,) = AutoTokenizer.from_pretrained(draft).convert_ids_to_tokens([WORD])
    if where == "tokenizer":
        file = draft / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token": word}))
    if where == "template":
        (draft / "chat_template.jinja").write_text(TEMPLATE.replace(SPECIAL[2], word))
    return draft


@pytest.mark.parametrize(
    "where", ["generation", "tokenizer", "template", "a gguf's keys", "a distilled draft's config"]
)
def test_no_file_of_a_draft_names_an_end(where, tmp_path):
    target = write_model(tmp_path / "target", "llama", 1)
    draft = draft_that_ends_with_a_word(tmp_path / "draft", target, where)
    pair = load_pair(spec(target, draft))
    assert {pair.drafting(name).end_ids for name in pair.drafters} == {frozenset({0, 2})}


def test_no_file_of_a_draft_names_an_end_of_a_gguf(tmp_path):
    target = write_gguf(tmp_path / "target.gguf", 1)
    draft = draft_that_ends_with_a_word(tmp_path / "draft", target, "a gguf's keys")
    assert load_pair(spec(target, draft)).end_ids == {0, 2}
    assert load_pair(spec(draft, target)).end_ids == {0, 2, WORD}  # as a target it does


def test_what_a_generation_config_suggests(tmp_path):
    given = {"temperature": 0.7, "top_k": 20, "repetition_penalty": 1.05, "do_sample": True}
    pair = load_pair(spec(write_model(tmp_path, "llama", 1, generation=given)))
    assert pair.suggested == {"temperature": 0.7, "top_k": 20, "repetition_penalty": 1.05}
    assert suggested_settings(given | {"do_sample": False}) == {}
    assert suggested_settings({"min_p": 0.1, "top_p": None, "top_k": "many"}) == {"min_p": 0.1}
    assert suggested_settings(None) == {}
    strange = {"temperature": 5, "top_k": -7, "top_p": float("nan"), "repetition_penalty": 0, "min_p": True}
    assert suggested_settings(strange) == {}
    assert suggested_settings(strange | {"temperature": float("inf"), "top_p": 0.9}) == {"top_p": 0.9}


def test_a_padded_draft_is_allowed_with_a_note(tmp_path, folder):
    draft = write_model(tmp_path, "llama", 1, vocab_size=VOCABULARY + 20)
    pair = load_pair(spec(folder, draft))
    assert any("padding only" in note for note in pair.notes)
    assert reply(pair, 4)[0].token_ids == reply(pair, 0)[0].token_ids


def test_a_missing_template_is_noted_for_the_target_only(tmp_path, folder):
    base = write_model(tmp_path, "llama", 2, template=False)
    assert NO_TEMPLATE in load_pair(spec(base, folder)).notes
    assert NO_TEMPLATE not in load_pair(spec(folder, base)).notes


def test_changed_files_give_another_fingerprint(tmp_path):
    write_model(tmp_path, "llama", 1)
    before = load_pair(spec(tmp_path)).info.target_fingerprint
    assert load_pair(spec(tmp_path)).info.target_fingerprint == before
    write_model(tmp_path, "llama", 2)
    assert load_pair(spec(tmp_path)).info.target_fingerprint != before


def test_other_words_behind_the_ids_are_refused(tmp_path, folder):
    """Rule 11; and again after the files changed (lmstudio-ai/lmstudio-bug-tracker#1761)."""
    draft = write_model(tmp_path, "llama", 2)
    load_pair(spec(folder, draft))
    file = draft / "tokenizer.json"
    content = json.loads(file.read_text())
    words = content["model"]["vocab"]
    words["!"], words["?"] = words["?"], words["!"]
    file.write_text(json.dumps(content))
    with pytest.raises(LoadError, match="vocabularies differ: id"):
        load_pair(spec(folder, draft))


def test_the_longrope_note(tmp_path):
    rope = dict(rope_type="longrope", rope_theta=1e4, short_factor=[1.0] * 8, long_factor=[2.0] * 8)
    rope |= dict(original_max_position_embeddings=64, factor=2.0)
    pair = load_pair(spec(write_model(tmp_path / "long", "llama", 1, rope_parameters=rope)))
    assert pair.info.context_length == 64
    assert "long is held to 64 of its 128 tokens" in pair.notes[0]


# Refusals, in words.


def spoiled(path, change):
    """The folder of a Llama with its weights changed."""
    write_model(path, "llama", 1)
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def test_missing_weights_are_refused_not_made_up(tmp_path, folder):
    def drop(tensors):
        del tensors["model.layers.1.mlp.up_proj.weight"]

    with pytest.raises(LoadError, match=r"incomplete \(1 missing, the first is model.layers.1.mlp.up_proj"):
        load_pair(spec(spoiled(tmp_path, drop)))


def changed(path, family="llama", **config):
    """The folder of a model with its config changed."""
    file = write_model(path, family, 1) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return path


def test_weights_that_would_not_be_used_are_refused_not_dropped(tmp_path):
    fewer = changed(tmp_path / "a", num_hidden_layers=1)
    with pytest.raises(LoadError, match=r"leaves 9 of them unused \(the first is model.layers.1.input_lay"):
        load_pair(spec(fewer))
    # Biases of queries, keys and values, which a Llama has not.
    other = changed(tmp_path / "b", "qwen2", model_type="llama")
    sentence = (
        r"those of a Qwen2ForCausalLM, and its config makes a LlamaForCausalLM of them \(6 left over, "
        r"the first is model.layers.0.self_attn.k_proj.bias\): choose"
    )
    with pytest.raises(LoadError, match=sentence):
        load_pair(spec(other))


def test_tensors_that_say_only_what_the_config_says_may_be_left_over(tmp_path, folder):
    def add(tensors):
        for name in ("rotary_emb.inv_freq", "masked_bias"):
            tensors[f"model.layers.0.self_attn.{name}"] = torch.ones(8)

    assert load_pair(spec(spoiled(tmp_path, add))).target is not None


def test_weights_of_another_size_are_refused(tmp_path, folder):
    def cut(tensors):
        tensors["model.norm.weight"] = tensors["model.norm.weight"][:10].clone()

    size = r"another size \(the first is model.norm.weight, \[64\] and not \[10\]\): fetch"
    with pytest.raises(LoadError, match=f"gives 1 of them {size}"):
        load_pair(spec(spoiled(tmp_path, cut)))


def test_weights_that_are_no_numbers_are_refused(tmp_path, folder):
    def poison(tensors):
        tensors["model.norm.weight"].fill_(float("nan"))

    with pytest.raises(LoadError, match="unusable numbers"):
        load_pair(spec(spoiled(tmp_path, poison)))


def test_what_overflows_in_float16_runs_in_float32_and_says_so(tmp_path, folder):
    def peaked(tensors):
        tensors["model.layers.0.mlp.down_proj.weight"].mul_(1e6)

    pair = load_pair(spec(spoiled(tmp_path, peaked), dtype="float16"))
    assert pair.info.dtype == "float32"
    assert "computes numbers that float16 does not hold, so it runs in float32." in " ".join(pair.notes)
    assert reply(pair, 0)[0].error is None


def test_a_model_that_cannot_take_drafts_back_is_refused_before_its_weights_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(general, "fetch", lambda *args: pytest.fail("fetched"))
    with pytest.raises(LoadError, match="mamba keep a state that cannot be taken back"):
        load_pair(spec(write_model(tmp_path, "mamba", 1)))


def test_a_model_that_writes_no_text_is_refused(tmp_path, folder):
    write_model(tmp_path, "llama", 1)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "vit"}))
    with pytest.raises(LoadError, match="type vit, which is no causal language model"):
        load_pair(spec(tmp_path))


def test_a_model_that_fills_gaps_is_refused_for_that(tmp_path):
    changed(tmp_path, model_type="bert", architectures=["BertForMaskedLM"])
    with pytest.raises(
        LoadError, match="of type bert, which fills gaps in a text and does not go on with it"
    ):
        load_pair(spec(tmp_path))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"max_position_embeddings": "many"}, "config of .* cannot be used"),
        ({"max_position_embeddings": -1}, "says that it can hold -1 tokens: mend max_position_embeddings"),
        ({"hidden_size": float("inf")}, "config of .* cannot be used"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(tmp_path, change, sentence):
    with pytest.raises(LoadError, match=sentence):
        load_pair(spec(changed(tmp_path, **change)))


def test_a_generation_config_that_makes_no_sense_does_no_harm(tmp_path):
    strange = {"eos_token_id": 2.5, "temperature": 5, "top_k": -7, "repetition_penalty": 0, "do_sample": True}
    (write_model(tmp_path, "llama", 1) / "generation_config.json").write_text(json.dumps(strange))
    pair = load_pair(spec(tmp_path))
    assert (pair.end_ids, pair.suggested) == ({0, 2}, {})  # as the tokenizer and the template say


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_missing_tokenizer_is_refused(tmp_path, family):
    """For Qwen2 transformers makes a tokenizer of one token without a word."""
    write_model(tmp_path, family, 1)
    for file in tmp_path.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(LoadError, match="tokenizer of .* cannot be read.*: put its files beside the weights"):
        load_pair(spec(tmp_path))


def test_too_little_memory_is_refused_before_and_while_loading(folder, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(plans.memory, "free_bytes", lambda device: 1000)
        with pytest.raises(LoadError, match="too little memory"):
            load_pair(spec(folder))

    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(load_model, "open_tensors", full)
    with pytest.raises(LoadError, match="too little memory to load tiny-llama on cpu"):
        load_pair(spec(folder))


def test_a_failing_draft_leaves_no_target_behind(tmp_path, folder, monkeypatch):
    def drop(tensors):
        del tensors["model.norm.weight"]

    draft = spoiled(tmp_path, drop)

    lean, models = load_model._lean, []

    def watched(plan, say):
        model, reason = lean(plan, say)
        models.extend([weakref.ref(model)] if model else [])
        return model, reason

    monkeypatch.setattr(load_model, "_lean", watched)
    with pytest.raises(LoadError, match="incomplete") as caught:
        load_pair(spec(folder, draft))
    assert caught.value and len(models) == 1 and models[0]() is None


@pytest.mark.parametrize("where", ["self_test", "fingerprint", "inspect"])
def test_whatever_fails_is_one_sentence_with_nothing_loaded(folder, monkeypatch, where, caplog):
    decoders, make = [], load_model.TransformersDecoder

    def watched(model):
        decoder = make(model)
        decoders.append(weakref.ref(decoder))
        return decoder

    def fail(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(load_model, "TransformersDecoder", watched)
    monkeypatch.setattr(plans if where == "inspect" else general, where, fail)
    with pytest.raises(LoadError, match="too little memory to load this pair: quantise it further") as caught:
        load_pair(spec(folder))
    assert caught.value and all(decoder() is None for decoder in decoders)
    assert "CUDA out of memory" in caplog.text


def test_a_fault_of_the_lean_path_is_a_sentence_too(monkeypatch):
    def fail(progress):
        raise RuntimeError("no such kernel.\nmore")

    monkeypatch.setattr(load, "load_embedded", fail)
    with pytest.raises(LoadError, match=r"could not be loaded \(no such kernel\): check its files"):
        load_pair(embedded_spec())


def test_sizes_that_bitsandbytes_cannot_take_are_refused(tmp_path, monkeypatch):
    pytest.importorskip("bitsandbytes")
    odd = write_model(tmp_path, "gemma2", 1)

    def fail(*args):
        raise RuntimeError("shape '[64, 1]' is invalid for input of size 96")

    monkeypatch.setattr(load_model, "check_rollback", fail)
    with pytest.raises(LoadError, match="bitsandbytes cannot run .* as nf4 on this machine"):
        load_pair(spec(odd, quantize="nf4"))


def test_the_embedded_draft_goes_with_the_embedded_target_only(folder):
    with pytest.raises(LoadError, match="works with the embedded target only"):
        load_pair(spec(folder, "embedded"))


def write_draft(folder, target, kind, changes=()):
    """A random draft of this kind for the model in the folder ``target``, as ``core.distill`` writes it."""
    weights = load_file(target / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    decoder = Decoder.from_model(
        AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32), maker("float32")
    )
    decoder.feature_layers = (0, 1)
    eagle, medusa = eagle_tensors(decoder), medusa_tensors(decoder)
    not_of_model = ("features.weight", "token.weight", "state.weight")
    tensors = {
        "model": {name: tensor for name, tensor in eagle.items() if name not in not_of_model},
        "eagle": eagle,
        "medusa": medusa,
    }[kind]
    metadata = {
        "kind": kind,
        "target": "the tiny one",
        "target_fingerprint": embedding_fingerprint(embedding),
        "feature_layers": {"model": "", "eagle": "0,1", "medusa": "1"}[kind],
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(metadata | dict(changes)))
    head_ids = torch.arange(0, VOCABULARY, 2)
    save_draft(tensors | {"head_token_ids": head_ids}, folder / "draft.safetensors", metadata | dict(changes))
    return folder


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["model", "eagle", "medusa"])
def test_a_folder_of_core_distill_drafts_for_its_target(kind, tied, tmp_path):
    target = write_model(tmp_path / "target", "llama", 1, tie_word_embeddings=tied)
    draft = write_draft(tmp_path / "draft", target, kind)
    pair = load_pair(spec(target, draft, quantize="int8"))
    assert pair.drafter.name == pair.info.drafter == kind and pair.info.quantization == "int8"
    assert pair.info.draft_fingerprint == load_metadata(draft)["fingerprint"]
    assert pair.info.draft_context_length == CONTEXT
    assert {kind, "ngram", "recycling", "early-exit", "auto", "plain"} == set(pair.drafters)
    # The head's rows are the target's own, as near as int8 keeps them where they are no embedding.
    weights = load_file(target / "model.safetensors")
    rows = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])[::2]
    lender = general._lender(pair.target, general.plan_models(spec(target, draft))[0])
    assert torch.allclose(lender.rows(pair.drafter.head_ids), rows, atol=rows.abs().max().item() / 100)
    plain, _ = reply(pair, 0)
    for k in (1, 4):
        answer, tokens = reply(pair, k)
        assert answer.token_ids == plain.token_ids and answer.error is None
        assert any(token.drafted for token in tokens)


def test_a_draft_made_for_another_target_is_refused(tmp_path, folder):
    other = write_model(tmp_path / "other", "llama", 2)
    for kind in ("model", "eagle"):
        draft = write_draft(tmp_path / kind, other, kind)
        with pytest.raises(LoadError, match="made for the tiny one .* not for .*tiny-llama"):
            load_pair(spec(folder, draft))
        assert load_pair(spec(other, draft)).drafter.name == kind


def test_a_draft_that_looks_into_a_target_needs_a_lean_one(tmp_path, folder, monkeypatch):
    draft = write_draft(tmp_path / "draft", folder, "eagle")
    small = write_draft(tmp_path / "small", folder, "model")
    monkeypatch.setattr(plans, "lean_reason", lambda config: "a test says so")
    with pytest.raises(LoadError, match="of kind eagle, which looks into its target"):
        load_pair(spec(folder, draft))
    pair = load_pair(spec(folder, small))
    assert "early-exit" not in pair.drafters and reply(pair, 3)[0].token_ids == reply(pair, 0)[0].token_ids


def test_a_distilled_draft_has_no_form_of_bitsandbytes(tmp_path, folder):
    draft = write_draft(tmp_path / "draft", folder, "eagle")
    with pytest.raises(LoadError, match="cannot run as nf4: choose --draft-quantize int4, int8 or none"):
        load_pair(spec(folder, draft, draft_quantize="nf4"))


def test_a_damaged_draft_leaves_one_sentence(tmp_path, folder):
    draft = write_draft(tmp_path / "draft", folder, "medusa")
    (draft / "draft.safetensors").write_bytes(b"nothing")
    with pytest.raises(LoadError, match="cannot be read .*: fetch it anew"):
        load_pair(spec(folder, draft))


def test_a_draft_of_a_later_kind_is_refused(tmp_path, folder):
    draft = write_draft(tmp_path / "draft", folder, "model", {"kind": "oracle"})
    with pytest.raises(LoadError, match="kind unknown here .oracle.: update Redline"):
        load_pair(spec(folder, draft))


def test_every_pair_offers_what_needs_no_training(folder):
    pair = load_pair(spec(folder))
    assert pair.drafters == ("early-exit", "ngram", "recycling", "auto", "plain")
    engine = Engine(pair)
    plain, _ = reply(pair, 0, engine=engine)
    for name in pair.drafters:
        generation = engine.generate(
            encode_chat(pair.tokenizer, QUESTION),
            Settings(temperature=0, num_draft_tokens=3, max_new_tokens=24),
            drafter=name,
        )
        assert list(generation) and generation.reply.token_ids == plain.token_ids


def test_a_card_that_is_not_there(folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(LoadError, match="no CUDA card"):
        load_pair(spec(folder, device="cuda"))
    assert choose_device("auto") == choose_device("cpu") == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(card, "unknown", lambda: None)
    assert choose_device("auto") == choose_device("cuda") == "cuda" and choose_device("cpu") == "cpu"


# The embedded models.


def test_the_embedded_pair_without_wishes_takes_the_lean_path(monkeypatch, tmp_path, folder):
    lean = toy_pair(table(1, 3), table(2, 3))
    automatic = dict(quantize="auto", draft_quantize="auto", device="auto")
    draft = write_draft(tmp_path / "draft", folder, "eagle")
    monkeypatch.setattr(load, "load_embedded", lambda progress, draft: draft)
    assert load_pair(spec("embedded", draft, **automatic)) == draft
    monkeypatch.setattr(load, "load_embedded", lambda progress: lean)
    assert load_pair(spec("embedded", "embedded", **automatic)) is lean
    alone = load_pair(spec("embedded", **automatic))
    assert alone.target is lean.target and alone.drafter is None
    assert (alone.info.draft, alone.info.drafter, alone.info.draft_context_length) == ("", "plain", 0)


@pytest.fixture
def real_home(monkeypatch, embedded_home, embedded_folder):
    monkeypatch.setenv("REDLINE_HOME", str(embedded_home))


def test_the_embedded_draft_has_no_form_of_bitsandbytes():
    with pytest.raises(LoadError, match="embedded draft cannot run as nf4"):
        load_pair(spec("embedded", "embedded", draft_quantize="nf4"))


@pytest.mark.proof
@pytest.mark.parametrize("form", ["nf4", "llm-int8", "int8", "none"])
def test_the_embedded_target_in_other_forms(form, real_home, capsys):
    """Both answer; how far a score depends on its neighbours and how fast it is are printed, not judged."""
    pair = load_pair(spec("embedded", "embedded", quantize=form, draft_quantize="auto"))
    assert pair.info.quantization == {"llm-int8": "llm.int8"}.get(form, form)
    answers = {}
    for k in (0, 3):
        start = time.perf_counter()
        answers[k], tokens = reply(pair, k, 32)
        answer = answers[k]
        assert answer.error is None and answer.text.strip() and answer.finish_reason in ("eos", "length")
        speed = len(answer.token_ids) / (time.perf_counter() - start)
        with capsys.disabled():
            print(
                f"\n{form}, K = {k}: {speed:.1f} tokens/s, {answer.num_rounds} rounds: {answer.text[:60]!r}"
            )
    assert answers[3].num_rounds < len(answers[3].token_ids)
    found = row_dependence(pair.target)
    assert found.later == 0
    with capsys.disabled():
        print(f"{form}: rows depend on later ones by {found.later:.1e}, on being alone by {found.alone:.1e}")
