from __future__ import annotations

import contextlib
from pathlib import Path

import gradio as gr
import pytest

from app.widgets.exports import FORMS, USUAL, Exports
from core.record.store import Store
from tests.core.builders import record


def test_a_file_of_its_own_each_time_and_nothing_left_of_what_failed(tmp_path):
    with gr.Blocks(analytics_enabled=False):
        exports = Exports("file")
    with contextlib.closing(Store(tmp_path / "record.db")) as store:
        first, *_ = record(store, "aab")
        record(store, "p")
        all_of_it, one = exports.write(store, "replies"), exports.write(store, "replies", first)
        with pytest.raises(gr.Error, match="There is no session nobody"):
            exports.write(store, "replies", "nobody")
    assert [len(Path(path).read_bytes().splitlines()) for path in (all_of_it, one)] == [3, 2]
    folder = Path(exports._folder.name)
    assert {Path(path).parent for path in (all_of_it, one)} == set(folder.iterdir())
    assert Path(one).name.startswith("redline-replies-")


def test_nx_26_a_form_for_the_spreadsheets_of_other_countries(tmp_path):
    with gr.Blocks(analytics_enabled=False):
        exports = Exports("file")
    assert exports.form.value == USUAL and [value for _, value in exports.form.choices] == list(FORMS)
    with contextlib.closing(Store(tmp_path / "record.db")) as store:
        record(store, "aab", question="1/2")
        written = {form: Path(exports.write(store, "replies", form=form)) for form in FORMS}
    text = {form: path.read_text(encoding="utf-8-sig") for form, path in written.items()}
    for form, (between, decimals) in {
        "Commas, 0.5": (",", "0.25"),
        "Semicolons, 0,5": (";", "0,25"),
        "Tabs, 0.5": ("\t", "0.25"),
    }.items():
        assert f"{between}'1/2{between}" in text[form] and f"{between}{decimals}{between}" in text[form]
    assert written["Tabs, 0.5"].suffix == ".tsv" and written[USUAL].suffix == ".csv"
