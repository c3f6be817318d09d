"""The catalogue: what a person reads before downloading gigabytes must be right."""

from __future__ import annotations

import pytest

from core.models import asked
from core.models.memory import OVERHEAD
from core.models.sources import SpecError
from core.pairs.catalogue import CATALOGUE, Model, fitting, main, spec
from core.pairs.spec import embedded_spec

# As the hub shows them, from the safetensors files; a head that is the embedding again is counted once.
PUBLISHED = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": 134_515_008,
    "HuggingFaceTB/SmolLM2-360M-Instruct": 361_821_120,
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": 1_711_376_384,
    "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen/Qwen2.5-1.5B-Instruct": 1_543_714_304,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "meta-llama/Llama-3.2-1B-Instruct": 1_235_814_400,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
}
MODELS = {
    model.repo: model for entry in CATALOGUE.values() for model in (entry.target_model, entry.draft_model)
}


def test_each_model_has_its_published_number_of_parameters():
    assert {repo: model.size.parameters for repo, model in MODELS.items()} == PUBLISHED


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_sizes_are_those_of_the_model_that_transformers_builds(model: Model):
    """All matrices of the layers, and nothing else, are what quantised forms shrink; caches likewise."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin

    assert GenerationMixin  # imported by the look-up, which torch 2.8 cannot do under "meta"
    kind, rest = model.config["model_type"], {k: v for k, v in model.config.items() if k != "model_type"}
    with torch.device("meta"):
        config = AutoConfig.for_model(kind, **(rest | {"num_hidden_layers": 2}))
        built = AutoModelForCausalLM.from_config(config)
    size = Model(model.repo, model.config | {"num_hidden_layers": 2}).size
    assert sum(parameter.numel() for parameter in built.parameters()) == size.parameters
    linear = [module.weight for module in built.model.layers.modules() if hasattr(module, "in_features")]
    assert sum(weight.numel() for weight in linear) == size.linear
    layer = built.model.layers[0].self_attn
    assert size.cache == 2 * (layer.k_proj.out_features + layer.v_proj.out_features)


def test_entries_say_what_a_page_shows():
    for name, entry in CATALOGUE.items():
        assert name == entry.name and entry.title and entry.licence
        assert entry.size_ratio > 2
        assert entry.download_bytes >= 2 * (entry.target_parameters + entry.draft_parameters)
    assert [name for name, entry in CATALOGUE.items() if entry.gated] == ["llama-3.1-8b"]
    assert "Qwen/Qwen2.5-3B-Instruct" not in MODELS  # its licence is for research only


def test_figures_of_one_pair_worked_out_by_hand(monkeypatch):
    """Qwen2.5-7B: 28 layers of 233,046,016 weights in matrices; two tables of 152,064 by 3,584."""
    entry = CATALOGUE["qwen2.5-7b"]
    linear = 28 * 233_046_016
    assert entry.target_model.size.linear == linear
    wide = 2 * (7_615_616_512 - linear)
    # A quarter of a cache is held twice while it grows; NF4 unpacks the largest product for long prompts.
    cache, small_cache = 4096 * 28 * 2 * 4 * 128 * 2 * 5 / 4, 4096 * 24 * 2 * 2 * 64 * 2 * 5 / 4
    # Activations of 1,024 rows of a prompt: the MLP's and the residual stream's, and some always in float32.
    sizes = (3584, 18_944, 1024), (896, 4864, 256)
    in_16, in_32 = (
        [1024 * (wide * (3 * hidden + 3 * inner) + 4 * (hidden + keys)) for hidden, inner, keys in sizes]
        for wide in (2, 4)
    )
    unpacked, draft = 2 * 2 * 3584 * 18_944, 2 * 494_032_768 + small_cache
    monkeypatch.setattr(asked, "has_bitsandbytes", lambda: True)
    card = 0.55 * linear + wide + cache + unpacked + draft + sum(in_16) + OVERHEAD
    assert entry.needed_bytes("cuda") == pytest.approx(card, abs=1)
    packing = 4 * (233_046_016 + 2 * 3584 * 18_944)  # while nothing else is there: less than a conversation
    assert packing - OVERHEAD < 2 * cache + unpacked + in_32[0]
    assert entry.needed_bytes("cuda", dtype="float32") == pytest.approx(
        0.55 * linear + 2 * (wide + cache + draft) + unpacked + sum(in_32) + OVERHEAD, abs=1
    )
    monkeypatch.setattr(asked, "has_bitsandbytes", lambda: False)
    assert entry.needed_bytes("cuda") == 2 * 7_615_616_512 + cache + draft + sum(in_16) + OVERHEAD


def test_a_small_pair_on_a_processor_is_float32():
    cache = 4096 * 4 * 2 * 64 * (32 * 5 + 30 * 3) * 5 // 4
    weights = 4 * (361_821_120 + 134_515_008)
    entry = CATALOGUE["smollm2-360m"]
    assert entry.needed_bytes("cpu", "none", "none") == weights + cache + OVERHEAD
    # Keys and values are float32 there whatever the weights are.
    assert entry.needed_bytes("cpu", "none", "none", "bfloat16") == weights // 2 + cache + OVERHEAD
    linear = 32 * (2 * 960 * 960 + 2 * 960 * 320 + 3 * 960 * 2560) + 30 * (
        2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536
    )
    packed = 1.1 * linear + 4 * (361_821_120 + 134_515_008 - linear)
    assert entry.needed_bytes("cpu") == pytest.approx(packed + cache + OVERHEAD, abs=2)


@pytest.mark.parametrize(
    "device, how", [("cpu", "auto"), ("cpu", "none"), ("cuda", "auto"), ("cuda", "int8")]
)
def test_the_loader_counts_as_the_catalogue_does(device, how, tmp_path, monkeypatch):
    from transformers import AutoConfig

    from core.pairs import plan as plans
    from tests.core.models_on_disk import tokenizer

    monkeypatch.setattr(plans, "LEAST_KNOWN", 10**6)  # the tokenizer is a tiny one
    entry = CATALOGUE["qwen2.5-1.5b"]
    for model, draft in ((entry.target_model, False), (entry.draft_model, True)):
        kind = model.config["model_type"]
        AutoConfig.for_model(
            kind, **{k: v for k, v in model.config.items() if k != "model_type"}
        ).save_pretrained(tmp_path)
        tokenizer().save_pretrained(tmp_path)
        (tmp_path / "model.safetensors").write_bytes(b"")
        plan = plans._plan(str(tmp_path), how, draft, device, "auto", lambda *said: None)
        assert plan.need.bytes == model.needed_to_load(how, device, draft)


def test_a_head_published_twice_is_downloaded_twice():
    assert MODELS["Qwen/Qwen3-0.6B"].download_bytes == 2 * 751_632_384  # 1.5 GB on the hub
    assert MODELS["Qwen/Qwen3-4B"].download_bytes == 2 * 4_022_468_096


def test_the_largest_pair_that_fits_a_card():
    assert fitting(500_000_000) is None
    assert fitting(4_000_000_000).name == "smollm2-1.7b"
    assert fitting(8_000_000_000).name == "qwen2.5-7b"
    assert fitting(80_000_000_000).name == "qwen3-14b"
    for free in range(1, 30):
        best = fitting(free * 10**9)
        assert best is None or best.needed_bytes("cuda") <= free * 10**9 and not best.gated
    # Where only that one is asked about, a gated pair is found too.
    llama = CATALOGUE["llama-3.1-8b"]
    assert fitting(llama.needed_bytes("cpu"), "cpu", gated=True).target_parameters >= llama.target_parameters


def test_a_spec_by_name():
    assert spec("embedded") == embedded_spec()
    made = spec("SmolLM2-1.7B")
    assert (made.name, made.target) == ("smollm2-1.7b", "HuggingFaceTB/SmolLM2-1.7B-Instruct")
    with pytest.raises(SpecError, match="There is no pair 'x'"):
        spec("x")


def test_the_table_names_every_pair(capsys):
    main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(CATALOGUE)
