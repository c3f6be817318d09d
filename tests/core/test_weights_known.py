"""Weights are the ones they are known by: the embedded target's and the shipped drafts'."""

from __future__ import annotations

import hashlib
import json

import pytest

from core.models import checkpoint, embedded, weights
from core.models.embedded import DRAFT_SHA256, DRAFTS, MARKER, checked_fingerprint
from core.models.errors import LoadError


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A target and one draft, small, each with the SHA-256 it is known by."""
    made, drafts = tmp_path / "target", tmp_path / "drafts"
    made.mkdir()
    drafts.mkdir()
    (made / "model.safetensors").write_bytes(b"weights of a target")
    (drafts / "draft-eagle.safetensors").write_bytes(b"weights of a draft")
    (made / MARKER).write_text(json.dumps({"model_sha256": digest(made / "model.safetensors")}))
    monkeypatch.setattr(embedded, "DRAFTS", drafts)
    known = {"draft-eagle.safetensors": digest(drafts / "draft-eagle.safetensors"), "draft-x.safetensors": ""}
    monkeypatch.setattr(embedded, "DRAFT_SHA256", known)
    return made


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_target_that_changed_on_disk_is_refused(folder):
    assert checked_fingerprint(folder) == digest(folder / "model.safetensors")
    (folder / "model.safetensors").write_bytes(b"weights of a tarGet")  # as long as before
    with pytest.raises(LoadError, match="its SHA-256 is another .*made anew at the next start") as refused:
        checked_fingerprint(folder)
    assert str(folder) in str(refused.value)


def test_a_shipped_draft_that_changed_on_disk_is_refused(folder):
    """Also one whose own metadata agree with it."""
    checked_fingerprint(folder)
    (embedded.DRAFTS / "draft-eagle.safetensors").write_bytes(b"weights of a drAft")
    with pytest.raises(LoadError, match="draft-eagle.safetensors is not the file that it was"):
        checked_fingerprint(folder)


def test_they_are_read_once_and_not_at_every_start(folder, monkeypatch):
    read, reads = weights._read, []
    monkeypatch.setattr(weights, "_read", lambda *given: reads.append(given[0].name) or read(*given))
    for _ in range(3):
        checked_fingerprint(folder)
    assert sorted(reads) == ["draft-eagle.safetensors", "model.safetensors"]


def test_the_shipped_drafts_are_the_ones_named():
    assert {path.name: digest(path) for path in DRAFTS.glob("*.safetensors")} == DRAFT_SHA256


def test_a_pair_is_not_begun_with_a_target_that_changed(folder, monkeypatch):
    """Before anything is read or packed of it, whatever pair the embedded target is part of."""
    monkeypatch.setattr(checkpoint, "prepare_embedded", lambda progress: folder)
    (folder / "model.safetensors").write_bytes(b"weights of a tarGet")
    with pytest.raises(LoadError, match="its SHA-256 is another"):
        checkpoint.inspect("embedded")
