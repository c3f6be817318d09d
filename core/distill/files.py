"""Files that are on the disk, whole, or are not there: a power cut leaves no half one under a good name.

Knows nothing of what is in them.
"""

from __future__ import annotations

import contextlib
import errno
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


def remedy(error: BaseException | None) -> str:
    """What a person can do about a file that could not be read or written, as the end of a sentence."""
    number = getattr(error, "errno", None)
    if number in (errno.ENOSPC, errno.EDQUOT):
        return "make room there"
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "give yourself the right to, or name another folder with --out"
    if number == errno.EFBIG:
        return "raise the limit on the size of a file (ulimit -f), or name another folder with --out"
    if number == errno.ENAMETOOLONG:
        return "name a folder with a shorter name with --out"
    if number in (errno.EIO, errno.ENXIO, errno.ENODEV):
        return "see to its disk, or name another folder with --out"
    if number is None:  # as from torch's writer, which says no more than that it failed
        return "make room there, or name another folder with --out"
    return "put that right, or name another folder with --out"


def flush_folder(folder: Path) -> None:
    """Have the names in a folder on the disk, where a system can be asked for that."""
    if os.name != "posix":
        return
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
