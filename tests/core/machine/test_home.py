from pathlib import Path

from core.machine import home as where
from core.machine.home import home


def test_home_follows_the_variable_and_the_platform(monkeypatch, tmp_path):
    monkeypatch.setenv("REDLINE_HOME", str(tmp_path))
    assert home() == tmp_path
    monkeypatch.delenv("REDLINE_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "l"))
    for platform, expected in {
        "linux": tmp_path / "x" / "redline",
        "win32": tmp_path / "l" / "redline",
        "darwin": Path.home() / "Library" / "Caches" / "redline",
    }.items():
        monkeypatch.setattr(where.sys, "platform", platform)
        assert home() == expected
