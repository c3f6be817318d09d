"""Case DB-05: the record goes where it lasts, and where it does not, the page says so."""

from __future__ import annotations

import os
from pathlib import Path

import gradio as gr
import pytest

from app.chat.desk import Desk
from app.chat.record_panel import RecordPanel
from app.serving.place import NOT_LASTING, is_lasting, place_of_record
from core.record.store import Store, default_path

SPACE = {"SPACE_ID": "someone/redline"}
LOST = (NOT_LASTING,)


@pytest.fixture(autouse=True)
def no_variable(monkeypatch):
    monkeypatch.delenv("REDLINE_DB", raising=False)


def under(*places: Path):
    """Volumes mounted at ``places``."""
    return lambda path: any(path.is_relative_to(place) for place in places)


def test_elsewhere_nothing_changes(tmp_path):
    assert place_of_record(None, {}, tmp_path, under(tmp_path)) == (default_path(), ())
    asked = tmp_path / "own.db"
    assert place_of_record(asked, {}, tmp_path, under()) == (asked, ())
    assert place_of_record(None, {"REDLINE_DB": str(asked)}, tmp_path, under()) == (asked, ())


def test_a_space_with_storage_keeps_the_record_there(tmp_path):
    place = place_of_record(None, SPACE, tmp_path, under(tmp_path))
    assert place == (tmp_path / "redline.db", ())


def test_what_was_asked_for_comes_first(tmp_path):
    asked = tmp_path / "volume" / "own.db"
    variable = {**SPACE, "REDLINE_DB": str(asked)}
    assert place_of_record(None, variable, tmp_path, under(tmp_path)) == (asked, ())
    flag = Path("/home/user/own.db")
    assert place_of_record(flag, variable, tmp_path, under(tmp_path)) == (flag, LOST)


def test_a_space_without_storage_says_that_the_record_is_lost(tmp_path):
    assert place_of_record(None, SPACE, tmp_path / "no-data", under()) == (default_path(), LOST)
    # A folder of that name inside the container is no storage.
    assert place_of_record(None, SPACE, tmp_path, under()) == (default_path(), LOST)


def test_storage_that_cannot_be_written_to_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    assert place_of_record(None, SPACE, tmp_path, under(tmp_path)) == (default_path(), LOST)


def test_the_page_says_it_beside_the_record(tmp_path):
    desk = Desk(None, Store(tmp_path / "redline.db"), notices=LOST)
    with gr.Blocks(analytics_enabled=False):
        panel = RecordPanel(desk)
    assert NOT_LASTING in panel.shown()[panel.notice]


def test_another_file_system_than_the_root_is_lasting():
    assert not is_lasting(Path("/no/such/folder/redline.db"))
    assert not is_lasting(Path("/"))
    mounts = [Path(p) for p in ("/proc", "/dev", "/sys") if os.path.ismount(p)]
    if not mounts:
        pytest.skip("nothing is mounted here")
    assert is_lasting(mounts[0])
    assert is_lasting(mounts[0] / "not-there.db")
