"""Files that are on the disk, whole, or are not there: a power cut leaves no half one under a good name.

Knows nothing of what is in them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO


def write_whole(path: Path, fill: Callable[[BinaryIO], object]) -> None:
    """Put a file in the place of ``path`` that ``fill`` writes: flushed to the disk first, or not at all.

    Raises what ``fill`` raises, and OSError; nothing is left of what failed.
    """
    part = path.with_name(path.name + ".part")
    try:
        with open(part, "wb") as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise
    flush_folder(path.parent)


def flush_folder(folder: Path) -> None:
    """Have the names in a folder on the disk, where a system can be asked for that."""
    if os.name != "posix":
        return
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
