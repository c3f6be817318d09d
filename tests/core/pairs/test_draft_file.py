from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from core.models.embedded import DRAFTS
from core.models.errors import LoadError
from core.pairs.draft_file import (
    SCALE,
    check_target,
    embedding_fingerprint,
    is_draft_folder,
    load_draft,
    load_metadata,
    save_draft,
)

METADATA = {"kind": "model", "target": "toy", "origin": "here", "licence": "Apache-2.0", "alpha": "none"}


@pytest.fixture
def original() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "layers.1.mlp.up_proj.weight": torch.randn(3, 4),
        "layers.0.mlp.up_proj.weight": torch.randn(6, 4) * torch.logspace(-3, 1, 6).unsqueeze(1),
        "proj.weight": torch.tensor([[0.0, 0.0], [1.0, -2.0]]),
        "norm.weight": torch.randn(4),
        "head_token_ids": torch.tensor([5, 0, 49151], dtype=torch.int64),
    }


@pytest.fixture
def packed(original, tmp_path: Path) -> Path:
    path = tmp_path / "packed.safetensors"
    save_draft(original, path, METADATA)
    return path


def test_every_row_is_kept_to_half_a_step_of_its_own_scale(original, packed):
    weights, raw = load_draft(packed).tensors, load_file(packed)
    for name in ("layers.0.mlp.up_proj.weight", "proj.weight"):
        steps, scale = raw[name], raw[name + SCALE]
        assert steps.dtype == torch.int8 and scale.dtype == torch.float32
        assert steps.shape == original[name].shape and scale.shape == steps.shape[:1]
        assert weights[name].dtype == torch.float32
        error = (weights[name] - original[name]).abs()
        assert (error <= scale.unsqueeze(1) * 0.5001).all()


def test_a_row_of_zeros_stays_zero(packed):
    assert load_draft(packed).tensors["proj.weight"][0].tolist() == [0.0, 0.0]


def test_vectors_and_ids_are_kept_exactly(original, packed):
    draft = load_draft(packed)
    assert draft.tensors["norm.weight"].dtype == torch.float32
    assert draft.tensors["norm.weight"].equal(original["norm.weight"])
    assert draft.head_ids.dtype == torch.int64
    assert draft.head_ids.tolist() == [0, 5, 49151]
    assert {*draft.tensors, "head_token_ids"} == set(original)
    assert draft.layers == 2


def test_a_loaded_draft_stays_as_it_was_when_its_file_is_overwritten_in_place(packed):
    norm = load_draft(packed).tensors["norm.weight"]
    before = norm.clone()
    size = packed.stat().st_size
    with open(packed, "r+b") as file:  # as a copy onto it does: the file stays the same one
        file.write(b"\x5a" * size)
    assert torch.equal(norm, before)


def test_metadata_are_kept_and_read_alone(packed):
    metadata = load_draft(packed).metadata
    assert load_metadata(packed) == metadata
    fingerprint = metadata.pop("fingerprint")
    assert re.fullmatch("[0-9a-f]{64}", fingerprint)
    assert metadata == METADATA


def test_fingerprint_follows_the_tensors_and_nothing_else(original, packed, tmp_path):
    again, other = tmp_path / "again.safetensors", tmp_path / "other.safetensors"
    save_draft(original, again, METADATA | {"target": "another name"})
    assert load_metadata(again)["fingerprint"] == load_metadata(packed)["fingerprint"]
    original["norm.weight"][0] += 1
    save_draft(original, other, METADATA)
    assert load_metadata(other)["fingerprint"] != load_metadata(packed)["fingerprint"]


def test_a_folder_holds_a_draft_or_something_else(packed, tmp_path):
    folder = tmp_path / "draft"
    folder.mkdir()
    assert not is_draft_folder(folder)
    (folder / "config.json").write_text(json.dumps(METADATA))
    assert not is_draft_folder(folder)
    packed.rename(folder / "draft.safetensors")
    assert is_draft_folder(folder)
    assert load_draft(folder).metadata == load_metadata(folder)


def test_what_a_kind_looks_at_and_whether_it_has_layers(original, tmp_path):
    path = tmp_path / "medusa.safetensors"
    heads = {"heads.0.proj.weight": torch.ones(2, 2), "head_token_ids": original["head_token_ids"]}
    save_draft(heads, path, {"kind": "medusa", "feature_layers": "3,12"})
    draft = load_draft(path)
    assert (draft.kind, draft.layers, draft.feature_layers) == ("medusa", 0, (3, 12))
    save_draft(original, path, METADATA)
    assert load_draft(path).feature_layers == ()
    save_draft(heads, path, {"kind": "oracle"})
    with pytest.raises(LoadError, match=r"a kind unknown here \(oracle\): update Redline"):
        load_draft(path)


def test_a_target_is_known_by_its_embedding_in_any_float_type():
    embedding = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    fingerprint = embedding_fingerprint(embedding)
    assert embedding_fingerprint(embedding.float()) == fingerprint
    assert embedding_fingerprint(embedding.float().T.contiguous().T) == fingerprint
    assert embedding_fingerprint(embedding.reshape(4, 5)) != fingerprint
    other = embedding.clone()
    other[4, 3] += 0.1
    assert embedding_fingerprint(other) != fingerprint
    metadata = {"target": "small", "target_fingerprint": fingerprint}
    check_target(metadata, "anything", embedding.float())
    sentence = (
        f"This draft was made for small (embedding {fingerprint[:12]}), not for large (embedding "
        f"{embedding_fingerprint(other)[:12]}): choose a draft that was made for this very model, or make "
        "one with python -m core.distill."
    )
    unnamed = "made for another target (embedding not named), not for"
    for refused, names in ((metadata, sentence), ({}, unnamed)):
        with pytest.raises(LoadError) as caught:
            check_target(refused, "large", other)
        assert names in str(caught.value)


def test_a_flipped_bit_a_cut_file_and_a_missing_file_are_refused_in_words(packed, tmp_path):
    whole = packed.read_bytes()
    flipped = tmp_path / "flipped.safetensors"
    flipped.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(LoadError, match="is damaged"):
        load_draft(flipped)
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(LoadError, match="cannot be read"):
        load_draft(cut)
    with pytest.raises(LoadError, match="cannot be read"):
        load_draft(tmp_path / "missing.safetensors")


@pytest.mark.parametrize("kind, layers, most_bytes", [("model", 3, 12_000_000), ("eagle", 1, 6_000_000)])
def test_drafts_that_ship(kind, layers, most_bytes):
    file = DRAFTS / f"draft-{kind}.safetensors"
    assert file.stat().st_size < most_bytes
    draft = load_draft(file)
    metadata, ids, projection = draft.metadata, draft.head_ids, draft.tensors["proj.weight"]
    assert metadata["kind"] == kind and metadata["licence"] == "Apache-2.0"
    assert "SmolLM2-135M-Instruct" in metadata["target"] and metadata["alpha"] and metadata["origin"]
    assert draft.layers == layers
    assert (ids[1:] > ids[:-1]).all() and 0 <= ids[0] and ids[-1] < 49152
    assert projection.shape == (576, 576) and projection.isfinite().all()
