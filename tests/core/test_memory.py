"""Memory: what a model needs, what is free, and a refusal that says what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from core.models import memory
from core.models.errors import LoadError
from core.models.memory import (
    CONTEXT,
    OVERHEAD,
    Need,
    Size,
    check,
    choose_dtype,
    free_bytes,
    gigabytes,
    needed_to_load,
    prompt_rows,
    size_of,
)

CONFIG = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
LINEAR = 3 * (2 * 8 * 8 + 2 * 8 * 4 + 3 * 8 * 12)
PARAMETERS = LINEAR + 100 * 8 + 3 * 2 * 8 + 8


def test_a_size_worked_out_by_hand():
    sizes = dict(
        cache=3 * 2 * 2 * 2, layer=LINEAR // 3, largest=8 * 2 * 12, table=100 * 8, widths=(8, 8, 4, 12)
    )
    assert size_of(CONFIG) == Size(PARAMETERS, LINEAR, **sizes)
    assert size_of(CONFIG | {"tie_word_embeddings": False}).parameters == PARAMETERS + 100 * 8
    assert size_of({"model_type": "both", "text_config": CONFIG}) == size_of(CONFIG)
    del (plain := dict(CONFIG))["num_key_value_heads"]
    assert size_of(plain).cache == 3 * 2 * 8  # a head of keys and values for each of queries


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"model_type": "mamba", "hidden_size": 8},
        CONFIG | {"hidden_size": "many"},
        CONFIG | {"num_attention_heads": 0},
        CONFIG | {"num_hidden_layers": 0},
        CONFIG | {"num_experts": 8},  # most of their weights are elsewhere
        CONFIG | {"num_local_experts": 8},
    ],
)
def test_what_cannot_be_counted_is_unknown(config):
    assert size_of(config) is None
    assert needed_to_load(config, "nf4", "bfloat16", "cuda") is None
    assert needed_to_load(config, "none", "float32", "cpu", parameters=1000) == 4000


def test_a_quantised_form_shrinks_the_layers_alone():
    size = size_of(CONFIG)
    assert size.weights("none", "bfloat16") == 2 * PARAMETERS
    assert size.weights("none", "float32") == 4 * PARAMETERS
    for form, each in memory.WEIGHT_BYTES.items():
        wide = 2 * (PARAMETERS - LINEAR)
        assert size.weights(form, "bfloat16") == pytest.approx(each * LINEAR + wide, abs=1)


def test_the_cache_is_counted_up_to_what_the_model_holds():
    size = size_of(CONFIG)
    grown = CONTEXT * 24 * 2 * 5 // 4  # a quarter is held twice
    unpacked = 2 * 8 * 2 * 12
    need = needed_to_load(CONFIG, "nf4", "float16", "cuda")
    row = 2 * (2 * 8 + 8 + 3 * 12) + 4 * (8 + 2 * 4)  # of activations, on a card
    assert need == size.weights("nf4", "float16") + grown + unpacked + 1024 * row
    short = needed_to_load(CONFIG | {"max_position_embeddings": 128}, "none", "float16", "cuda")
    assert short == size.weights("none", "float16") + 256 * 24 * 2 * 5 // 4 + 128 * row  # a block at least
    assert size.row("none", "float32") == row + 2 * (2 * 8 + 8 + 3 * 12)
    assert size.row("llm-int8", "float16") == row + 4 * 2 * 12  # whole numbers first
    # On a processor activations are float32 whatever the weights are.
    assert needed_to_load(CONFIG, "none", "float16", "cpu") == size.weights("none", "float16") + 2 * grown


def test_the_most_that_loading_takes():
    """A part at a time beside what is packed, or whole weights; what comes quantised is as its files."""
    wide = CONFIG | {"intermediate_size": 10_000_000}
    size, layer, gate_up = size_of(wide), 2 * 8 * 8 + 2 * 8 * 4 + 3 * 8 * 10**7, 2 * 8 * 10**7
    for form, product in (("none", 0), ("llm-int8", 4 + 2), ("int8", 4 + 3), ("int4", 4 + 13)):
        packing = 4 * layer + gate_up * product - OVERHEAD
        assert needed_to_load(wide, form, "float32", "cpu") == size.weights(form, "float32") + packing
    # A head that is packed too may be larger than a layer.
    many = CONFIG | {"vocab_size": 100_000_000}
    need = needed_to_load(many, "int8", "float32", "cpu")
    assert need == size_of(many).weights("int8", "float32") + 8 * 10**8 * (4 + 3) - OVERHEAD
    cache = CONTEXT * 24 * 4 * 5 // 4
    assert needed_to_load(many, "none", "float32", "cpu") == size_of(many).weights("none", "float32") + cache
    for form in ("int8", "int4"):
        need = needed_to_load(wide, form, "float32", "cpu", by_layer=False)
        assert need == size.weights("none", "float32") > size.weights(form, "float32") + cache
    stored = needed_to_load(CONFIG, "none", "float16", "cuda", stored_bytes=777)
    assert stored == 777 + cache // 2 + 1024 * size_of(CONFIG).row("none", "float16")
    assert needed_to_load({}, "none", "float16", "cpu", 1000, stored_bytes=777) == 777
    assert needed_to_load({}, "int8", "float16", "cpu", 1000) == 2000
    assert needed_to_load({}, "int8", "float16", "cpu") is None


def test_dtype(monkeypatch):
    assert choose_dtype("float16", "cpu", 10**8) == "float16"
    assert choose_dtype("auto", "cuda", 10**8) == "bfloat16"
    assert choose_dtype("auto", "cpu", 10**8) == choose_dtype("auto", "cpu", None) == "float32"
    monkeypatch.setattr(memory, "has_fast_bfloat16", lambda: True)
    assert choose_dtype("auto", "cpu", 4 * 10**9) == "bfloat16"
    monkeypatch.setattr(memory, "has_fast_bfloat16", lambda: False)
    assert choose_dtype("auto", "cpu", 4 * 10**9) == "float32"


def test_what_bitsandbytes_takes_is_within_the_estimate():
    """NF4 with double quantisation, as it is loaded: the figure in WEIGHT_BYTES is on the careful side."""
    import bitsandbytes as bnb

    weight = torch.randn(1024, 512)
    packed, state = bnb.functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    held = packed.nbytes + state.absmax.nbytes + state.state2.absmax.nbytes
    assert 0.5 * weight.numel() < held < memory.WEIGHT_BYTES["nf4"] * weight.numel()


@pytest.mark.parametrize(
    ("free", "rows"), [(2 * 2048, 2048), (2 * 2048 - 1, 1024), (2 * 1024 - 1, 512), (100, 256), (None, 1024)]
)
def test_a_card_reads_as_many_rows_as_it_has_room_for(free, rows, monkeypatch):
    """What torch holds and nobody uses is room, too. Where nobody can tell, as many as are counted."""
    monkeypatch.setattr(memory, "free_bytes", lambda device: {"cuda": free and 5 * free - 300}[device])
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 1000)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 700)
    assert prompt_rows(5) == rows


# --- Free --------------------------------------------------------------------------------------------------


def group(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(content)
    return folder


def left(root: Path, membership: str) -> list[int]:
    (root.parent / "membership").write_text(membership)
    return list(memory._left_in_groups(root, root.parent / "membership"))


def test_limits_of_control_groups_version_2(tmp_path):
    root = tmp_path / "cgroup"
    group(root, memory__max="max\n", memory__current="7")
    group(
        root / "a", memory__max="1000\n", memory__current="900\n", memory__stat="anon 5\ninactive_file 300\n"
    )
    group(root / "a" / "b", memory__max="800\n", memory__current="100", memory__stat="anon 100\n")
    assert left(root, "0::/a/b\n") == [700, 400]
    assert left(root, "0::/\n") == []
    assert left(root, "0::/../elsewhere\n") == []  # seen from inside a container


def test_limits_of_control_groups_version_1(tmp_path):
    root = tmp_path / "cgroup"
    files = {"memory__limit_in_bytes": "500", "memory__usage_in_bytes": "600", "memory__stat": "cache 1"}
    group(root / "memory" / "job", **files)
    assert left(root, "5:cpu,cpuacct:/x\n4:memory:/job\n") == [0]  # over the limit is not below zero


def test_no_control_groups_is_no_limit(tmp_path):
    assert list(memory._left_in_groups(tmp_path, tmp_path / "nowhere")) == []
    root = group(tmp_path / "cgroup", memory__max="lots", memory__current="1")
    assert left(root, "0::/\n") == []


def test_free_memory_is_the_least_of_all(tmp_path, monkeypatch):
    whole = free_bytes("cpu")
    assert whole > 0
    root = group(tmp_path / "cgroup", memory__max="5000", memory__current="1000", memory__stat="")
    (tmp_path / "membership").write_text("0::/\n")
    monkeypatch.setattr(memory, "CGROUPS", root)
    monkeypatch.setattr(memory, "MEMBERSHIP", tmp_path / "membership")
    assert free_bytes("cpu") == 4000


def test_free_memory_of_a_card(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (123, 456))
    assert free_bytes("cuda") == 123
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert free_bytes("cuda") is None


# --- The check (BQ-02) -------------------------------------------------------------------------------------

NEEDS = [
    Need("Big-7B", "nf4", 5_000_000_000),
    Need("Small-1B", "none", 1_500_000_000, smaller="--draft-quantize nf4"),
]


def test_enough_memory_passes():
    check(NEEDS, "cuda", free=6_500_000_000 + OVERHEAD)
    check(NEEDS, "cpu", free=10**12)


def test_too_little_memory_names_the_models_the_figures_and_what_to_do():
    with pytest.raises(LoadError) as caught:
        check(NEEDS, "cuda", free=6_500_000_000 + OVERHEAD - 1)
    assert str(caught.value) == (
        "There is too little memory: Big-7B about 5.0 GB (nf4) and Small-1B about 1.5 GB (unquantised) would "
        "need 6.9 GB with room to work, and 6.9 GB are free on the card; choose a smaller model, quantise "
        "(--draft-quantize nf4), or close what else uses it."
    )
    with pytest.raises(LoadError, match="0.10 GB are free in memory; choose a smaller model, or close"):
        check(NEEDS[:1], "cpu", free=100_000_000)


def test_the_machine_is_asked_where_nobody_says_what_is_free(monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda device: {"cpu": 0, "cuda": None}[device])
    with pytest.raises(LoadError, match="too little memory"):
        check(NEEDS, "cpu")
    check(NEEDS, "cuda")  # nobody can tell: no reason to refuse


def test_bytes_for_people():
    assert [
        gigabytes(count) for count in (0, 98_362_432, 994_999_999, 995_000_000, 15_949_999_999, 4e14)
    ] == [
        "0.00 GB",
        "0.10 GB",
        "0.99 GB",
        "1.0 GB",
        "15.9 GB",
        "400,000.0 GB",
    ]


def test_the_command_prints_what_is_free(capsys, monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", {"cpu": 2_000_000_000, "cuda": None}.get)
    memory.main()
    assert capsys.readouterr().out == "cpu: 2.0 GB free\ncuda: – free\n"
