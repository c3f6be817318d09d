"""Packing from the files, a layer at a time: the same model, in all forms and files, in little memory."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from core.models import memory, quantize
from core.models.by_layer import Skeleton
from core.models.decoder import Decoder
from core.models.errors import LoadError
from core.models.tensors import open_tensors
from core.models.transformers_decoder import TransformersDecoder
from core.pairs import load_model, plan
from tests.core.models_on_disk import make_model, write_gguf, write_model

CPU = torch.device("cpu")
silent = lambda *said: None  # noqa: E731


def planned(source, form, dtype="float32"):
    return plan._plan(str(source), form, False, "cpu", dtype, silent)


def opened(made):
    skeleton = Skeleton(made.config, getattr(torch, made.dtype))
    return skeleton, open_tensors(made.checkpoint, made.config, skeleton.wanted)


def scores(decoder):
    return decoder.logits([5, 80, 3, 200, 41, 7], decoder.new_cache())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_it_is_the_model_that_transformers_reads(family, tied, dtype, tmp_path):
    """Bit for bit, and so are the scores that it is held against."""
    made = planned(write_model(tmp_path, family, 1, tie_word_embeddings=tied), "none", dtype)
    skeleton, tensors = opened(made)
    assert skeleton.fits(tensors, lambda name: False)
    told = []
    make = quantize.maker("none", skeleton.dtype)
    decoder, rows = skeleton.pack(tensors, CPU, make, make, None, [5, 80, 3], told.append)
    whole = load_model._read(made)
    assert torch.equal(rows, whole(torch.tensor([[5, 80, 3]])).logits[0].float())
    assert torch.equal(scores(decoder), scores(Decoder.from_model(whole, make)))
    assert told == [0.5, 1.0]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_the_tensors_of_a_gguf_file_are_those_that_transformers_reads(family, tmp_path):
    """The order of rows in queries and keys, biases, and rows unpacked a few at a time."""
    # Of Qwen3's files transformers does not read the size of a head, and takes its own.
    changes = dict(head_dim=128) if family == "qwen3" else {}
    made = planned(write_gguf(tmp_path / "tiny.gguf", 1, family, **changes), "none", "bfloat16")
    skeleton, tensors = opened(made)
    whole = load_model._read(made).state_dict()
    assert skeleton.fits(tensors, lambda name: False) and set(tensors.shapes) == set(whole)
    for rows in (1 << 22, 300):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("core.models.tensors.UNPACKED", rows)
            for name, value in whole.items():
                assert torch.equal(tensors.read(name, torch.bfloat16, CPU), value), name


@pytest.mark.parametrize("form, shown", [("nf4", "nf4"), ("llm-int8", "llm.int8"), ("int8", "int8")])
def test_a_gguf_file_is_packed_like_any_other(form, shown, tmp_path, packed_forms):
    """README's third example was refused on every machine with a card, and NF4 of a GGUF everywhere."""
    if form in quantize.BITSANDBYTES:
        pytest.importorskip("bitsandbytes")
    elif form not in packed_forms:
        pytest.skip("no int8 products on this processor")
    file = write_gguf(tmp_path / "tiny.gguf", 1)
    model, found = load_model.load_model(planned(file, form), silent)
    assert isinstance(model, Decoder) and found == quantize.Quantised(shown, 1.0)
    plain, _ = load_model.load_model(planned(file, "none"), silent)
    one, other = (scores(decoder).softmax(-1) for decoder in (model, plain))
    assert 0 < (one - other).abs().max() < 0.3


def test_llm_int8_runs_lean_as_bitsandbytes_own_layers_run(tmp_path, monkeypatch):
    pytest.importorskip("bitsandbytes")
    made = planned(write_model(tmp_path, "qwen2", 1), "llm-int8")
    lean, found = load_model.load_model(made, silent)
    monkeypatch.setattr(plan, "lean_reason", lambda config: "another is wanted")
    other, same = load_model.load_model(made, silent)
    assert isinstance(lean, Decoder) and isinstance(other, TransformersDecoder) and found == same
    torch.testing.assert_close(scores(lean).softmax(-1), scores(other).softmax(-1), atol=0.01, rtol=0)


@pytest.mark.parametrize("rows", [1, 2, 5, 17])
def test_a_row_of_llm_int8_depends_on_no_other(rows):
    pytest.importorskip("bitsandbytes")
    product = quantize.maker("llm-int8", torch.float32)(torch.randn(48, 64))
    x = torch.randn(rows, 64) * torch.logspace(0, 2, rows)[:, None]
    assert torch.equal(product(x), torch.cat([product(row[None]) for row in x]))


class Live(TorchDispatchMode):
    """The most bytes on the CPU that were in use at once among tensors that operations saw."""

    def __init__(self):
        super().__init__()
        self.peak, self._seen = 0, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, made)):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                known = self._seen.get(storage._cdata)
                if known is None or known[0].expired():
                    self._seen[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                    self._count()
        return made

    def _count(self):
        self._seen = {key: (ref, size) for key, (ref, size) in self._seen.items() if not ref.expired()}
        self.peak = max(self.peak, sum(size for _, size in self._seen.values()))


BIG = dict(num_hidden_layers=12, hidden_size=128, head_dim=32, intermediate_size=512)


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
@pytest.mark.parametrize("form", ["nf4", "none", "int8", "int4", "llm-int8"])
def test_no_more_is_in_memory_than_is_counted(kind, form, tmp_path, packed_forms):
    """Where main memory was short, NF4's target left the lean decoder, and a GGUF was unpacked whole."""
    if form in quantize.BITSANDBYTES:
        pytest.importorskip("bitsandbytes")
    elif form != "none" and form not in packed_forms:
        pytest.skip("no such products on this processor")
    if kind == "gguf":
        source = write_gguf(tmp_path / "big.gguf", 1, **BIG)
    else:
        source = tmp_path
        write_model(source, "llama", 1, **BIG)
        make_model("llama", 1, **BIG).save_pretrained(source, max_shard_size="3MB")
        (source / "model.safetensors").unlink(missing_ok=True)
        assert len(list(source.glob("*.safetensors"))) > 3
    made = planned(source, form)
    size = memory.size_of(made.checkpoint.config)
    with Live() as live:
        model, _ = load_model.load_model(made, silent)
    assert isinstance(model, Decoder)
    small = 4 * 2**20 if form in memory.PACKED else 2 * 2**20  # caches of the check, rotations, a few rows
    assert live.peak <= size.weights(form, "float32") + size.packing(form, "float32") + small
    if form == "nf4":
        assert live.peak < size.weights("none", "float32") / 2


def test_files_that_are_not_as_the_config_says_are_left_to_transformers(tmp_path, monkeypatch, caplog):
    """Which knows more names; and only where memory has room for all of it."""
    write_model(tmp_path, "llama", 1)
    file = tmp_path / "model.safetensors"
    bare = {name.removeprefix("model."): value for name, value in load_file(file).items()}
    save_file(bare, file, {"format": "pt"})
    made = planned(tmp_path, "none")
    with caplog.at_level("INFO"):
        model, _ = load_model.load_model(made, silent)
    assert isinstance(model, TransformersDecoder)
    assert "its files hold other tensors than its config says" in caplog.text
    monkeypatch.setattr(memory, "free_bytes", lambda device: made.need_whole.bytes + memory.OVERHEAD - 1)
    with pytest.raises(LoadError, match="There is too little memory"):
        load_model.load_model(made, silent)


def test_a_head_that_is_not_the_embedding_it_is_said_to_be(tmp_path):
    """Some come with a head that is the embedding again; one that differs is a model of its own."""
    write_model(tmp_path, "qwen3", 1, tie_word_embeddings=True)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, file, {"format": "pt"})
    assert isinstance(load_model.load_model(planned(tmp_path, "none"), silent)[0], Decoder)
    tensors["lm_head.weight"][3] += 1
    save_file(tensors, file, {"format": "pt"})
    assert isinstance(load_model.load_model(planned(tmp_path, "none"), silent)[0], TransformersDecoder)


def test_a_gguf_file_that_cannot_be_packed_says_what_can_be_done(tmp_path, monkeypatch):
    pytest.importorskip("bitsandbytes")
    made = planned(write_gguf(tmp_path / "tiny.gguf", 1), "nf4")
    monkeypatch.setattr(Skeleton, "fits", lambda *given: False)
    sentence = (
        "tiny cannot be packed as nf4, since its files hold .*: choose --quantize none, or name the orig"
    )
    with pytest.raises(LoadError, match=sentence):
        load_model.load_model(made, silent)
