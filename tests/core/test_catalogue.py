"""The catalogue: what a person reads before downloading gigabytes must be right."""

from __future__ import annotations

import pytest

from core.models.catalogue import CATALOGUE, Model, fitting, main, spec
from core.models.memory import OVERHEAD
from core.models.spec import SpecError, embedded_spec

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
    from transformers import AutoConfig, AutoModelForCausalLM

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
        assert entry.target_bytes["nf4"] < entry.target_bytes["int8"] < entry.target_bytes["none"]
        form = "none" if name == "smollm2-360m" else "nf4"  # it is small enough to stay as it is
        assert entry.needed_bytes("cuda") == entry.target_bytes[form] + entry.draft_bytes["none"] + OVERHEAD
        whole = entry.target_bytes["none"] + entry.draft_bytes["none"] + OVERHEAD
        assert entry.needed_bytes("cpu") == whole  # int8 is packed from it
        assert entry.needed_bytes("cuda", "none", "nf4") == (
            entry.target_bytes["none"] + entry.draft_bytes["nf4"] + OVERHEAD
        )
        assert entry.download_bytes >= 2 * (entry.target_parameters + entry.draft_parameters)
    assert [name for name, entry in CATALOGUE.items() if entry.gated] == ["llama-3.1-8b"]
    assert "Qwen/Qwen2.5-3B-Instruct" not in MODELS  # its licence is for research only


def test_figures_of_one_pair_worked_out_by_hand():
    """Qwen2.5-7B: 28 layers of 233,046,016 weights in matrices; two tables of 152,064 by 3,584."""
    entry = CATALOGUE["qwen2.5-7b"]
    linear = 28 * 233_046_016
    assert entry.target_model.size.linear == linear
    wide = 2 * (7_615_616_512 - linear)
    cache = 4096 * 28 * 2 * 4 * 128 * 2
    assert entry.target_bytes["nf4"] == pytest.approx(0.55 * linear + wide + cache, abs=1)
    assert entry.cache_bytes == 1000 * 2 * 2 * (28 * 4 * 128 + 24 * 2 * 64)


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
