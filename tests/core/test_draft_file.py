from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from core.models.draft_file import SCALE, load_draft, pack_draft
from core.models.embedded import DRAFT_FILE
from core.models.errors import LoadError


@pytest.fixture
def source(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    path = tmp_path / "source.safetensors"
    tensors = {
        "layers.1.mlp.up_proj.weight": torch.randn(3, 4),
        "layers.0.mlp.up_proj.weight": torch.randn(6, 4) * torch.logspace(-3, 1, 6).unsqueeze(1),
        "proj.weight": torch.tensor([[0.0, 0.0], [1.0, -2.0]]),
        "norm.weight": torch.randn(4),
        "head_token_ids": torch.tensor([5, 0, 49151], dtype=torch.int64),
    }
    save_file(
        {name: t.half() if t.is_floating_point() else t for name, t in tensors.items()},
        path,
        {"kind": "model"},
    )
    return path


@pytest.fixture
def packed(source: Path, tmp_path: Path) -> Path:
    path = tmp_path / "packed.safetensors"
    pack_draft(source, path, target="toy", origin="here", licence="Apache-2.0", alpha="none")
    return path


def test_every_row_is_kept_to_half_a_step_of_its_own_scale(source, packed):
    weights, original, raw = load_draft(packed).tensors, load_file(source), load_file(packed)
    for name in ("layers.0.mlp.up_proj.weight", "proj.weight"):
        steps, scale = raw[name], raw[name + SCALE]
        assert steps.dtype == torch.int8 and scale.dtype == torch.float32
        assert steps.shape == original[name].shape and scale.shape == steps.shape[:1]
        assert weights[name].dtype == torch.float32
        error = (weights[name] - original[name].float()).abs()
        assert (error <= scale.unsqueeze(1) * 0.5001).all()


def test_a_row_of_zeros_stays_zero(packed):
    assert load_draft(packed).tensors["proj.weight"][0].tolist() == [0.0, 0.0]


def test_vectors_and_ids_are_kept_exactly(source, packed):
    draft, original = load_draft(packed), load_file(source)
    assert draft.tensors["norm.weight"].dtype == torch.float32
    assert draft.tensors["norm.weight"].equal(original["norm.weight"].float())
    assert draft.head_ids.dtype == torch.int64
    assert draft.head_ids.tolist() == [0, 5, 49151]
    assert {*draft.tensors, "head_token_ids"} == set(original)
    assert draft.layers == 2


def test_metadata_of_the_source_and_of_the_packer_are_kept(packed):
    metadata = load_draft(packed).metadata
    fingerprint = metadata.pop("fingerprint")
    assert re.fullmatch("[0-9a-f]{64}", fingerprint)
    assert metadata == {
        "kind": "model",
        "target": "toy",
        "origin": "here",
        "licence": "Apache-2.0",
        "alpha": "none",
    }


def test_fingerprint_follows_the_tensors_and_nothing_else(source, packed, tmp_path):
    again, other = tmp_path / "again.safetensors", tmp_path / "other.safetensors"
    pack_draft(source, again, target="another name")
    assert load_draft(again).metadata["fingerprint"] == load_draft(packed).metadata["fingerprint"]
    tensors = load_file(source)
    tensors["norm.weight"][0] += 1
    save_file(tensors, source, {"kind": "model"})
    pack_draft(source, other)
    assert load_draft(other).metadata["fingerprint"] != load_draft(packed).metadata["fingerprint"]


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


def test_command_packs_what_the_function_packs(source, packed, tmp_path):
    target = tmp_path / "by-command.safetensors"
    command = [sys.executable, "-m", "core.models.draft_file", str(source), str(target)]
    for field, value in {"target": "toy", "origin": "here", "licence": "Apache-2.0", "alpha": "none"}.items():
        command += [f"--{field}", value]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert load_draft(target).metadata == load_draft(packed).metadata  # fingerprint of all tensors included
    assert load_draft(target).metadata["fingerprint"] in done.stdout


def test_the_draft_that_ships():
    assert DRAFT_FILE.stat().st_size < 12_000_000
    draft = load_draft(DRAFT_FILE)
    metadata, ids, projection = draft.metadata, draft.head_ids, draft.tensors["proj.weight"]
    assert metadata["kind"] == "model" and metadata["licence"] == "Apache-2.0"
    assert "SmolLM2-135M-Instruct" in metadata["target"] and metadata["alpha"] and metadata["origin"]
    assert draft.layers == 3
    assert (ids[1:] > ids[:-1]).all() and 0 <= ids[0] and ids[-1] < 49152
    assert projection.shape == (576, 576) and projection.isfinite().all()
