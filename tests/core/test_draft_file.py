from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from core.models.draft_file import draft_metadata, load_draft, pack_draft
from core.models.embedded import DRAFT_FILE
from core.models.errors import LoadError


@pytest.fixture
def source(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    path = tmp_path / "source.safetensors"
    tensors = {
        "layers.0.mlp.up_proj.weight": torch.randn(6, 4) * torch.logspace(-3, 1, 6).unsqueeze(1),
        "proj.weight": torch.tensor([[0.0, 0.0], [1.0, -2.0]]),
        "norm.weight": torch.randn(4),
        "head_token_ids": torch.tensor([0, 5, 49151], dtype=torch.int64),
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
    weights, original = load_draft(packed), load_file(source)
    for name in ("layers.0.mlp.up_proj.weight", "proj.weight"):
        steps, scale = weights[name]
        assert steps.dtype == torch.int8 and scale.dtype == torch.float32
        assert steps.shape == original[name].shape and scale.shape == steps.shape[:1]
        error = (steps.float() * scale.unsqueeze(1) - original[name].float()).abs()
        assert (error <= scale.unsqueeze(1) * 0.5001).all()


def test_a_row_of_zeros_stays_zero(packed):
    steps, scale = load_draft(packed)["proj.weight"]
    assert (steps.float() * scale.unsqueeze(1))[0].tolist() == [0.0, 0.0]


def test_vectors_and_ids_are_kept_exactly(source, packed):
    weights, original = load_draft(packed), load_file(source)
    assert weights["norm.weight"].dtype == torch.float32
    assert weights["norm.weight"].equal(original["norm.weight"].float())
    assert weights["head_token_ids"].dtype == torch.int32
    assert weights["head_token_ids"].tolist() == [0, 5, 49151]
    assert set(weights) == set(original)


def test_metadata_of_the_source_and_of_the_packer_are_kept(packed):
    metadata = draft_metadata(packed)
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
    assert draft_metadata(again)["fingerprint"] == draft_metadata(packed)["fingerprint"]
    tensors = load_file(source)
    tensors["norm.weight"][0] += 1
    save_file(tensors, source, {"kind": "model"})
    pack_draft(source, other)
    assert draft_metadata(other)["fingerprint"] != draft_metadata(packed)["fingerprint"]


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
    assert draft_metadata(target) == draft_metadata(packed)  # fingerprint of all tensors included
    assert draft_metadata(target)["fingerprint"] in done.stdout


def test_the_draft_that_ships():
    assert DRAFT_FILE.stat().st_size < 12_000_000
    metadata = draft_metadata(DRAFT_FILE)
    assert metadata["kind"] == "model" and metadata["licence"] == "Apache-2.0"
    assert "SmolLM2-135M-Instruct" in metadata["target"] and metadata["alpha"] and metadata["origin"]
    weights = load_draft(DRAFT_FILE)
    ids = weights["head_token_ids"]
    assert (ids[1:] > ids[:-1]).all() and 0 <= ids[0] and ids[-1] < 49152
    steps, scale = weights["proj.weight"]
    assert steps.shape == (576, 576) and scale.isfinite().all()
