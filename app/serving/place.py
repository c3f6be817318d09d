"""Where the record is kept, and whether it lasts there: a Space loses its own disk at each restart.

Knows what a Space says of itself (``SPACE_ID``) and its file systems; nothing of the page. See case DB-05 in
tests, and docs/SPACE.md.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from core.record.store import default_path

MOUNT = Path("/data")  # where a Space's storage is attached unless its owner says otherwise

NOT_LASTING = (
    "The record of this Space is lost when it restarts: attach storage at /data, or name a file on a lasting"
    " volume in REDLINE_DB."
)


def is_lasting(path: Path) -> bool:
    """Whether ``path`` lies on a volume that was mounted, and not on the container's own disk."""
    there = next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
    return there.stat().st_dev != Path("/").stat().st_dev


def place_of_record(
    flag: Path | None,
    environment: Mapping[str, str],
    mount: Path = MOUNT,
    lasting: Callable[[Path], bool] = is_lasting,
) -> tuple[Path, tuple[str, ...]]:
    """The database's file, and sentences for the page where it will not last.

    ``flag`` comes first, then ``REDLINE_DB``; then, on a Space with storage at ``mount`` that can be written
    to, a file there; then the usual file of this checkout.
    """
    named = environment.get("REDLINE_DB", "").strip()
    asked = flag or (Path(named).expanduser() if named else None)
    path = asked or default_path()
    if not environment.get("SPACE_ID"):
        return path, ()
    if asked is None and mount.is_dir() and lasting(mount) and os.access(mount, os.W_OK):
        path = mount / path.name
    return path, () if lasting(path) else (NOT_LASTING,)
