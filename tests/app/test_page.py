"""What the page does around its launch."""

from __future__ import annotations

import pytest

from app import page
from app.serving.loading import Loader
from app.serving.options import parse_options
from core.record.store import Store
from tests.core import builders


def test_when_the_page_is_closed_the_record_is_one_whole_file(tmp_path, monkeypatch):
    opened: list[Store] = []

    class Watched(Store):
        def __init__(self, path):
            super().__init__(path)
            opened.append(self)

    def launch(blocks, host, port, *, share):
        builders.record(opened[0], "aab")
        assert (tmp_path / "redline.db-wal").exists()
        raise KeyboardInterrupt

    monkeypatch.setattr(page, "Store", Watched)
    monkeypatch.setattr(page, "launch", launch)
    monkeypatch.setattr(page, "build", lambda desk: None)
    with pytest.raises(KeyboardInterrupt):
        page.serve(parse_options(["--db", str(tmp_path / "redline.db")], {}), 7860, Loader(None))
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["redline.db"]
