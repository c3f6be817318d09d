"""What a source is before its weights are touched: folders, GGUF files and a hub, whole and broken."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from core.models import checkpoint, weights
from core.models.checkpoint import fetch, fingerprint, inspect, is_here
from core.models.errors import LoadError
from core.models.gguf_header import Header
from tests.core.fake_hub import FakeHub, connect, connected

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 10,
    "hidden_size": 4,
    "intermediate_size": 6,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": True,
}
PARAMETERS = 10 * 4 + (4 * 4 * 2 + 4 * 2 * 2) + 3 * 4 * 6 + 3 * 4


def tensors(seed: int = 0) -> bytes:
    values = np.random.default_rng(seed).standard_normal((4, 4)).astype(np.float32)
    return safetensors.numpy.save({f"w{seed}": values})


def encoded(content: object) -> bytes:
    return json.dumps(content).encode()


def model_files(**changes: object) -> dict[str, bytes]:
    """A whole model's files; a change adds or replaces one (None: leaves it out)."""
    files = {
        "config.json": encoded(CONFIG),
        "generation_config.json": encoded({"temperature": 0.7}),
        "tokenizer.json": b"{}",
        "tokenizer_config.json": encoded({"model_max_length": 128}),
        "model.safetensors": tensors(),
    }
    files |= {name.replace("__", "/"): content for name, content in changes.items()}
    return {name: content for name, content in files.items() if content is not None}


def sharded(**changes: object) -> dict[str, bytes]:
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = {"metadata": {}, "weight_map": {"w0": names[0], "w1": names[1]}}
    shards = {name: tensors(seed) for seed, name in enumerate(names)}
    given = {"model.safetensors": None, "model.safetensors.index.json": encoded(index), **shards}
    return model_files(**(given | changes))


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def refused(source: str | Path) -> str:
    with pytest.raises(LoadError) as caught:
        inspect(str(source))
    sentence = str(caught.value)
    assert sentence.endswith(".") and "\n" not in sentence and ". " not in sentence
    return sentence


# --- Folders -----------------------------------------------------------------------------------------------


def test_a_folder_says_what_it_holds(tmp_path):
    card = b"---\nlanguage: en\nlicense: apache-2.0\n---\nlicense: mit\n"
    folder = write(tmp_path / "Tiny", model_files(**{"README.md": card, "pytorch_model.bin": b"pickle"}))
    found = inspect(str(folder))
    assert (found.kind, found.name, found.folder, found.cached) == ("folder", "Tiny", folder, True)
    assert found.config == CONFIG and found.generation_config == {"temperature": 0.7}
    assert found.parameters == PARAMETERS and found.licence == "apache-2.0"
    assert found.weight_bytes == len(tensors()) and found.quantized is None and found.gated is None
    assert fetch(found) == found


def test_relative_paths_and_the_home_folder(tmp_path, monkeypatch):
    folder = write(tmp_path / "models" / "tiny", model_files())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for source in ("./models/tiny", "models/tiny", "~/models/tiny", str(folder) + "/"):
        assert inspect(source).folder == folder


def test_a_base_model_without_template_or_generation_config_is_no_fault(tmp_path):
    files = model_files(**{"generation_config.json": None, "tokenizer_config.json": None})
    assert inspect(str(write(tmp_path, files))).generation_config == {}


def test_a_stored_quantisation_is_named(tmp_path):
    config = CONFIG | {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    assert inspect(str(write(tmp_path, model_files(**{"config.json": encoded(config)})))).quantized == "gptq"


def test_parameters_are_counted_in_the_file_where_the_configuration_cannot_be(tmp_path):
    config = {"model_type": "mamba", "architectures": ["MambaForCausalLM"]}
    found = inspect(str(write(tmp_path, model_files(**{"config.json": encoded(config)}))))
    assert found.parameters == 16


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({}, "has no config.json, so it is no model of transformers"),
        (
            {"adapter_config.json": b"{}", "adapter_model.safetensors": b""},
            r"holds an adapter \(adapter_config",
        ),
        (
            model_files(**{"adapter_config.json": b"{}"}),
            r"holds an adapter \(adapter_config.json\): merge it",
        ),
        ({"x.Q4_K_M.gguf": b""}, "holds GGUF files: name one of them"),
        (model_files(**{"config.json": b"{"}), "config.json of .* is damaged"),
        (model_files(**{"config.json": b"[]"}), "config.json of .* is damaged"),
        (model_files(**{"config.json": b"\xff\xfe"}), "config.json of .* is damaged"),
        (model_files(**{"config.json": b"{}"}), "names no model_type"),
        (model_files(**{"generation_config.json": b"{"}), "generation_config.json of .* is damaged"),
        (model_files(**{"model.safetensors": None}), "holds no weights"),
        (
            model_files(**{"model.safetensors": None, "pytorch_model.bin": b""}),
            "weights as pickle files, which can run any program",
        ),
        (
            model_files(**{"model.safetensors": None, "pytorch_model-00001-of-00002.bin": b""}),
            "weights as pickle files",
        ),
        (
            sharded(**{"model-00002-of-00002.safetensors": None}),
            "is incomplete: model-00002-of-00002.safetensors is missing",
        ),
        (sharded(**{"model.safetensors.index.json": b"{}"}), "index.json of .* names no weights"),
        (
            sharded(**{"model.safetensors.index.json": encoded({"weight_map": {"w0": "a.safetensors"}})}),
            'index.json of .* has no "metadata", which transformers needs',
        ),
        (
            sharded(**{"model.safetensors.index.json": encoded({"weight_map": {"w": "../w.safetensors"}})}),
            "index.json of .* names no weights",
        ),
    ],
)
def test_what_is_no_whole_model_is_refused(tmp_path, files, sentence):
    folder = tmp_path / "m"
    folder.mkdir()
    assert re.search(sentence, refused(write(folder, files)))


def test_a_place_that_is_no_folder_is_refused(tmp_path):
    assert "does not exist: name the folder of a model" in refused(tmp_path / "nowhere")
    (tmp_path / "file.safetensors").touch()
    assert "is a file, not a folder" in refused(tmp_path / "file.safetensors")
    assert "is no model: name a hub id" in refused("nowhere")


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "strange", "auto_map": {"AutoConfig": "configuration_strange.StrangeConfig"}},
        CONFIG | {"architectures": ["OtherLM"], "auto_map": {"AutoModelForCausalLM": "other.OtherLM"}},
    ],
)
def test_code_of_its_own_is_never_run(tmp_path, config):
    files = model_files(**{"config.json": encoded(config), "other.py": b"raise SystemExit"})
    assert "needs code of its own to run (trust_remote_code)" in refused(write(tmp_path, files))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model_type": ["llama"]}, "names no model_type"),
        ({"model_type": ["llama"], "auto_map": 5}, "needs code of its own"),
        ({"architectures": 5, "auto_map": {"AutoModelForCausalLM": "a.B"}}, "needs code of its own"),
        ({"num_hidden_layers": 10**7}, "since its num_hidden_layers is over 1,000: fetch"),
        ({"text_config": {"n_layer": 1e7}}, "since its n_layer is over 1,000: fetch"),
        ({"hidden_size": 10**12}, "a model of its sizes would have over 100,000,000,000,000 parameters"),
    ],
)
def test_a_config_without_sense_is_refused_before_anything_is_built(tmp_path, change, sentence):
    files = model_files(**{"config.json": encoded(CONFIG | change)})
    assert sentence in refused(write(tmp_path, files))


def test_a_gguf_header_without_sense_is_refused_too(tmp_path, monkeypatch):
    header = Header({"model_type": "llama", "num_hidden_layers": 10**7}, "Q4_1", 16, None)
    monkeypatch.setattr(checkpoint, "read_header", lambda path: header)
    (tmp_path / "odd.gguf").touch()
    assert "config of odd.gguf cannot be used, since its num_hidden_layers" in refused(tmp_path / "odd.gguf")


def test_sizes_without_end_count_nothing(tmp_path):
    config = CONFIG | {"hidden_size": float("inf"), "vocab_size_per_layer_input": 262144}
    assert inspect(str(write(tmp_path, model_files(**{"config.json": encoded(config)})))).parameters == 16


@pytest.mark.parametrize("end", ["", ".gguf"])
def test_a_path_that_is_too_long_is_refused_in_few_words(tmp_path, end):
    sentence = refused(f"{tmp_path}/{'a' * 5000}{end}")
    assert sentence.endswith("… cannot be read: file name too long.") and len(sentence) < 200


def test_the_home_of_nobody_does_not_exist():
    assert "~nobody-of-that-name/m does not exist" in refused("~nobody-of-that-name/m")


def test_code_beside_a_model_that_transformers_knows_does_no_harm(tmp_path):
    config = CONFIG | {"auto_map": {"AutoModelForCausalLM": "modeling_llama.LlamaForCausalLM"}}
    assert inspect(str(write(tmp_path, model_files(**{"config.json": encoded(config)})))).config == config


def test_a_model_type_of_the_future_is_named(tmp_path):
    files = model_files(**{"config.json": encoded({"model_type": "llama99"})})
    assert "is a 'llama99' model, which transformers" in refused(write(tmp_path, files))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"version https://git-lfs.github.com/spec/v1\n",
        tensors()[:-3],
        b"\xff" * 64,
        b"\x02" + b"\0" * 7 + b"[]",
    ],
    ids=["empty", "git-lfs pointer", "cut", "noise", "no object"],
)
def test_a_damaged_file_is_named(tmp_path, content):
    found = inspect(str(write(tmp_path, sharded(**{"model-00001-of-00002.safetensors": content}))))
    with pytest.raises(
        LoadError, match="model-00001-of-00002.safetensors of .* is damaged or was not fetched"
    ):
        fetch(found)


def test_the_embedded_model_is_a_source(embedded_home, embedded_folder, monkeypatch):
    monkeypatch.setenv("REDLINE_HOME", str(embedded_home))
    found = inspect("embedded")
    assert (found.kind, found.name, found.folder) == ("embedded", "SmolLM2-135M-Instruct", embedded_folder)
    assert found.parameters == 134_515_008 and found.cached
    marker = json.loads((embedded_folder / "redline.json").read_text())
    assert fingerprint(found) == marker["model_sha256"]


# --- Fingerprints ------------------------------------------------------------------------------------------


def test_a_fingerprint_is_of_the_content_alone(tmp_path):
    one = inspect(str(write(tmp_path / "one", model_files())))
    other = inspect(
        str(write(tmp_path / "other", model_files(**{"config.json": encoded(CONFIG | {"x": 1})})))
    )
    assert fingerprint(one) == fingerprint(other) == hashlib.sha256(tensors()).hexdigest()
    shards = inspect(str(write(tmp_path / "shards", sharded())))
    lines = "".join(hashlib.sha256(tensors(seed)).hexdigest() + "\n" for seed in (0, 1))
    assert fingerprint(shards) == hashlib.sha256(lines.encode()).hexdigest()


def test_files_are_read_once_and_again_when_they_change(tmp_path, monkeypatch):
    """Model files changed on disk, then reloaded: the fingerprint is another."""
    folder = write(tmp_path / "m", model_files())
    read = []
    monkeypatch.setattr(
        weights, "_read", lambda *given, _read=weights._read: read.append(given[0]) or _read(*given)
    )
    before = fingerprint(inspect(str(folder)))
    assert fingerprint(inspect(str(folder))) == before and len(read) == 1
    file = folder / "model.safetensors"
    status = file.stat()
    file.write_bytes(tensors(7))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))  # of the same size, a nanosecond later
    assert file.stat().st_size == status.st_size
    after = fingerprint(inspect(str(folder)))
    assert after != before and after == hashlib.sha256(tensors(7)).hexdigest() and len(read) == 2


@pytest.mark.parametrize("content", ["{", "[]", '{"/x": 1}'])
def test_a_damaged_memory_of_fingerprints_is_begun_anew(tmp_path, monkeypatch, content):
    home = tmp_path / "home"
    home.mkdir()
    (home / "fingerprints.json").write_text(content)
    monkeypatch.setenv("REDLINE_HOME", str(home))
    found = inspect(str(write(tmp_path / "m", model_files())))
    assert fingerprint(found) == hashlib.sha256(tensors()).hexdigest()
    assert len(json.loads((home / "fingerprints.json").read_text())) == 1
    assert not [path for path in home.iterdir() if path.name != "fingerprints.json"]


def test_a_home_that_cannot_be_written_costs_only_time(tmp_path, monkeypatch):
    (tmp_path / "home").write_text("a file where a folder should be")
    monkeypatch.setenv("REDLINE_HOME", str(tmp_path / "home"))
    found = inspect(str(write(tmp_path / "m", model_files())))
    assert fingerprint(found) == hashlib.sha256(tensors()).hexdigest()


def test_weights_that_vanish_are_a_sentence(tmp_path):
    folder = write(tmp_path / "m", model_files())
    found = inspect(str(folder))
    (folder / "model.safetensors").unlink()
    for step in (fetch, fingerprint):
        with pytest.raises(LoadError, match="model.safetensors cannot be read: no such file"):
            step(found)


# --- GGUF --------------------------------------------------------------------------------------------------


def write_gguf(path: Path, architecture: str = "llama", **fields: object) -> Path:
    """A GGUF file with one table of numbers and a header."""
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(8)
    writer.add_block_count(2)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_token_list(["a", "b", "c"])
    for name, value in fields.items():
        getattr(writer, f"add_{'uint32' if isinstance(value, int) else 'string'}")(
            name.replace("__", "."), value
        )
    writer.add_tensor("token_embd.weight", np.zeros((3, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_says_what_it_holds(tmp_path):
    path = write_gguf(tmp_path / "Tiny.Q8_0.gguf", general__license="mit")
    found = inspect(str(path))
    assert (found.kind, found.name, found.folder, found.gguf_file) == (
        "gguf",
        "Tiny.Q8_0",
        tmp_path,
        "Tiny.Q8_0.gguf",
    )
    assert found.config == {
        "model_type": "llama",
        "max_position_embeddings": 128,
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "vocab_size": 3,
        "tie_word_embeddings": True,
    }
    assert (found.quantized, found.parameters, found.licence) == ("Q8_0", 24, "mit")
    assert fetch(found) is found and fingerprint(found) == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_file_type_of_the_future_is_told_from_the_tensors(tmp_path):
    import gguf

    path = write_gguf(tmp_path / "x.gguf")
    reader = gguf.GGUFReader(path, "r+")
    reader.fields["general.file_type"].parts[-1][0] = 999
    reader.data.flush()
    assert inspect(str(path)).quantized == "F32"


def test_a_gguf_architecture_by_its_other_name(tmp_path):
    assert inspect(str(write_gguf(tmp_path / "x.gguf", "qwen2moe"))).config["model_type"] == "qwen2_moe"


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"architecture": "clip"}, "holds a 'clip' model, which transformers cannot read from GGUF"),
        ({"general__type": "adapter"}, "holds no whole model (adapter)"),
        ({"split__count": 3}, "is part of 3 files: join them first (llama-gguf-split --merge)"),
    ],
)
def test_a_gguf_file_that_is_no_model_is_refused(tmp_path, fields, sentence):
    assert sentence in refused(write_gguf(tmp_path / "x.gguf", **fields))


def test_a_gguf_header_with_values_of_other_types_is_refused(tmp_path, monkeypatch):
    import gguf

    assert "x.gguf is no GGUF file" in refused(write_gguf(tmp_path / "x.gguf", split__count="three"))
    number = lambda self: self.add_uint32("general.architecture", 7)  # noqa: E731
    monkeypatch.setattr(gguf.GGUFWriter, "add_architecture", number)
    assert "y.gguf is no GGUF file" in refused(write_gguf(tmp_path / "y.gguf"))


def test_a_damaged_gguf_file_is_refused(tmp_path):
    whole = write_gguf(tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    for content in (b"", b"GGUF", b"GGML" + whole[4:], whole[:60], whole[: len(whole) // 2], whole[:-16]):
        path.write_bytes(content)
        assert "cut.gguf is no GGUF file or was not fetched whole" in refused(path)
    assert "does not exist: name a .gguf file" in refused(tmp_path / "nowhere.gguf")


# --- The hub -----------------------------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with connected(FakeHub(), monkeypatch, tmp_path / "cache") as made:
        made.add(
            "owner/tiny",
            model_files(**{"README.md": b"card", "model.py": b"raise", "original__model.pth": b"pickle"}),
            cardData={"license": "apache-2.0"},
            gated=False,
            safetensors={"parameters": {"F32": 16}, "total": 16},
        )
        yield made


def offline(monkeypatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def fetched(hub: FakeHub) -> set[str]:
    return {request.rsplit("/", 1)[1] for request in hub.requests if request.startswith("GET /owner/")}


def test_looking_fetches_small_files_and_fetching_the_weights_alone(hub):
    said = []
    found = inspect("owner/tiny", lambda sentence, fraction: said.append((sentence, fraction)))
    assert (found.kind, found.name, found.revision) == ("hub", "tiny", hub.commit("owner/tiny"))
    assert (found.licence, found.gated, found.parameters, found.cached) == ("apache-2.0", False, 16, False)
    assert found.config == CONFIG and found.weight_bytes == len(tensors())
    small = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert fetched(hub) == {path.name for path in found.folder.iterdir()} == small
    assert said[0] == ("Asking the hub about owner/tiny", None) and said[-1][1] == 1.0
    assert fingerprint(found) == hashlib.sha256(tensors()).hexdigest()  # known before it is fetched
    said.clear()
    whole = fetch(found, lambda sentence, fraction: said.append((sentence, fraction)))
    assert whole == dataclasses.replace(found, cached=True)
    assert fetched(hub) == small | {"model.safetensors"}
    assert (found.folder / "model.safetensors").read_bytes() == tensors()
    assert said[0][0].startswith("Fetching owner/tiny (") and said[-1][1] == 1.0


def test_what_is_cached_is_not_asked_for_again(hub, monkeypatch):
    assert not is_here("owner/tiny")
    before = fetch(inspect("owner/tiny"))
    assert is_here("owner/tiny")
    hub.requests.clear()
    again = inspect("owner/tiny")
    assert again.cached and fetch(again).folder == before.folder and not fetched(hub)
    offline(monkeypatch)
    alone = inspect("owner/tiny")
    assert (alone.cached, alone.folder, alone.revision) == (True, before.folder, before.revision)
    assert fetch(alone) == alone and fingerprint(alone) == fingerprint(before)


def test_a_new_commit_with_the_same_weights_needs_no_download(hub, monkeypatch):
    fetch(inspect("owner/tiny"))
    new = hub.add("owner/tiny", model_files(**{"config.json": encoded(CONFIG | {"x": 1})}))
    hub.requests.clear()
    found = inspect("owner/tiny")
    assert found.revision == new and found.cached and fetch(found).config["x"] == 1
    assert fetched(hub) == {"config.json"}
    offline(monkeypatch)
    assert inspect("owner/tiny").revision == new


def test_a_model_that_was_only_looked_at_does_not_hide_the_whole_one(hub, monkeypatch):
    old = fetch(inspect("owner/tiny"))
    hub.add("owner/tiny", model_files(**{"model.safetensors": tensors(5)}))
    assert not inspect("owner/tiny").cached
    offline(monkeypatch)
    assert inspect("owner/tiny").revision == old.revision


def test_a_revision_can_be_named(hub):
    commit = hub.commit("owner/tiny")
    assert inspect(f"owner/tiny@{commit}").revision == commit == inspect("owner/tiny@main").revision
    assert "owner/tiny has no revision 'v9'" in refused("owner/tiny@v9")


def test_shards_come_from_the_index(hub):
    hub.add("owner/big", sharded())
    whole = fetch(inspect("owner/big"))
    assert [file.name for file in whole.weights] == [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    assert all((whole.folder / file.name).is_file() for file in whole.weights)
    assert not inspect("owner/big@main").gated


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        (model_files(**{"model.safetensors": None, "pytorch_model.bin": b"x"}), "weights as pickle files"),
        ({"adapter_config.json": b"{}", "adapter_model.safetensors": b""}, "holds an adapter"),
        ({"x.gguf": b"", "README.md": b""}, "holds GGUF files: name one of them on this disk"),
        ({"README.md": b""}, "has no config.json"),
        (model_files(**{"model.safetensors": None}), "holds no weights"),
        (
            model_files(**{"config.json": encoded({"model_type": "odd", "auto_map": {"AutoModel": "a.B"}})}),
            "needs code of its own",
        ),
        (
            sharded(**{"model-00001-of-00002.safetensors": None}),
            "model-00001-of-00002.safetensors is missing",
        ),
    ],
)
def test_a_repository_that_cannot_be_used_is_refused_before_its_weights_move(hub, files, sentence):
    hub.add("owner/odd", files)
    assert sentence in refused("owner/odd")
    assert not {name for name in fetched(hub) if name.endswith((".safetensors", ".bin", ".gguf", ".py"))}


def test_a_gated_model_says_where_to_ask(hub, monkeypatch):
    """The list of files is open; the files are not."""
    hub.add("owner/gated", model_files(), gated="manual")
    hub.fail("/owner/gated/resolve", 403, X_Error_Code="GatedRepo")
    sentence = refused("owner/gated")
    assert "owner/gated is gated: ask for access on " in sentence and "/owner/gated, then log in" in sentence
    assert "`hf auth login`" in sentence and "HF_TOKEN" in sentence
    hub.failures.clear()
    assert inspect("owner/gated").gated is True
    hub.fail("model.safetensors", 401, X_Error_Code="GatedRepo")  # access was taken back
    with pytest.raises(LoadError, match="owner/gated is gated"):
        fetch(inspect("owner/gated"))


def test_a_model_that_is_not_there(hub):
    assert "The hub knows no model owner/nothing: check the name on " in refused("owner/nothing")


@pytest.mark.parametrize(
    ("status", "sentence"),
    [
        (403, "The hub refuses access to owner/tiny: ask for it on"),
        (429, "too many requests from here"),
        (500, "The hub answered 500 when asked for owner/tiny"),
    ],
)
def test_an_answer_that_is_a_fault_is_a_sentence_unless_the_cache_does(hub, status, sentence):
    hub.fail("/api/models", status)
    assert sentence in refused("owner/tiny")
    hub.failures.clear()
    fetch(inspect("owner/tiny"))
    hub.fail("/api/models", status)
    assert inspect("owner/tiny").cached


def test_no_network(hub, tmp_path, monkeypatch):
    fetch(inspect("owner/tiny"))
    connect(monkeypatch, "http://127.0.0.1:1", tmp_path / "cache")  # where nobody listens
    assert inspect("owner/tiny").cached
    connect(monkeypatch, "http://127.0.0.1:1", tmp_path / "empty")
    sentence = refused("owner/tiny")
    assert "cannot be reached, and owner/tiny is not in the cache: connect this computer" in sentence
    assert sentence.endswith("or name a local folder.")


def test_no_network_with_small_files_only(hub, tmp_path, monkeypatch):
    """Looked at, never fetched: what is missing is on the hub, so the sentence is about the hub."""
    found = inspect("owner/tiny")
    connect(monkeypatch, "http://127.0.0.1:1", tmp_path / "cache")
    assert "cannot be reached" in refused(f"owner/tiny@{found.revision}")


def test_offline_by_wish(hub, monkeypatch):
    offline(monkeypatch)
    sentence = refused("owner/tiny")
    assert "HF_HUB_OFFLINE forbids fetching it: unset HF_HUB_OFFLINE, or name a local folder" in sentence


def test_a_hub_that_does_not_answer(hub, monkeypatch):
    import httpx2

    def late(*_: object, **__: object):
        raise httpx2.ReadTimeout("The read operation timed out")

    monkeypatch.setattr("huggingface_hub.model_info", late)
    assert "did not answer in time when asked for owner/tiny: try again" in refused("owner/tiny")


def test_a_disk_without_room_is_seen_before_the_download(hub, monkeypatch):
    found = inspect("owner/tiny")
    monkeypatch.setattr(checkpoint.hub.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 10})())
    hub.requests.clear()
    with pytest.raises(LoadError, match="owner/tiny needs .* more in .*cache, where .* are free: make room"):
        fetch(found)
    assert not hub.requests


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (OSError(28, "No space left on device"), "The disk that holds .* is full: make room"),
        (RuntimeError("Data processing error: No space left on device (os error 28)"), "is full: make room"),
        (PermissionError(13, "Permission denied"), "cannot be written: set HF_HOME"),
        (OSError(30, "Read-only file system"), "cannot be written: set HF_HOME"),
    ],
)
def test_a_disk_that_fails_during_the_download(hub, monkeypatch, error, sentence):
    found = inspect("owner/tiny")

    def fail(*_: object, **__: object):
        raise error

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fail)
    with pytest.raises(LoadError, match=sentence):
        fetch(found)


def test_an_interrupted_download_leaves_whole_files_and_nothing_else(hub):
    hub.add("owner/big", sharded())
    found = inspect("owner/big")

    def stop(sentence: str, fraction: float | None) -> None:
        if fraction and fraction > 0.6:  # in the second shard
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(found, stop)
    cache = found.folder.parents[1]
    assert not list(cache.rglob("*.incomplete")) and not is_here("owner/big")
    hub.requests.clear()
    fetch(inspect("owner/big"))
    assert fetched(hub) == {"model-00002-of-00002.safetensors"}


def test_the_command_prints_what_it_finds(tmp_path, capsys, monkeypatch):
    folder = write(tmp_path / "tiny", model_files())
    monkeypatch.setattr("sys.argv", ["checkpoint", str(folder)])
    checkpoint.main()
    assert "tiny (folder, llama)" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["checkpoint", str(folder / "no")])
    with pytest.raises(SystemExit, match="does not exist"):
        checkpoint.main()
