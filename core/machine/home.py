"""Redline's own folder on this machine: downloads, converted models, and what was measured here."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def home() -> Path:
    """The folder for downloads and converted models: ``REDLINE_HOME`` or the user's cache folder."""
    if chosen := os.environ.get("REDLINE_HOME"):
        return Path(chosen).expanduser().absolute()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "redline"
