"""Where the record is kept, and whether it lasts there: a Space loses its own disk at each restart.

Knows what a Space says of itself (``SPACE_ID``) and its file systems; nothing of the store or the page. See
case DB-05 in tests, and docs/SPACE.md.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

MOUNT = Path("/data")  # where a Space's persistent storage is put unless its owner says otherwise

NOT_LASTING = (
    "The record of this Space is lost when it restarts: attach storage at /data, or name a file on a lasting"
    " volume in REDLINE_DB."
)


def is_lasting(path: Path) -> bool:
    """Whether ``path`` lies on a volume that was mounted, and not on the container's own disk."""
    there = next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
    return there.stat().st_dev != Path("/").stat().st_dev


def place_of_record(
    asked: Path | None,
    otherwise: Path,
    environment: Mapping[str, str],
    mount: Path = MOUNT,
    lasting: Callable[[Path], bool] = is_lasting,
) -> tuple[Path, str | None]:
    """The database's file and, on a Space where it will not last, a sentence about that.

    ``asked`` is what a flag or a variable names, ``otherwise`` the usual file. On a Space with storage at
    ``mount`` that can be written to, the file goes there unless another was asked for.
    """
    path = asked or otherwise
    if not environment.get("SPACE_ID"):
        return path, None
    if asked is None and mount.is_dir() and lasting(mount) and os.access(mount, os.W_OK):
        path = mount / otherwise.name
    return path, None if lasting(path) else NOT_LASTING
