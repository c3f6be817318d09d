"""What was found of a machine, kept by name in one JSON file of the cache folder.

Each entry is replaced as a whole and the file by renaming, so that a process that is killed, or two that
keep at once, leave a file that can be read. Knows nothing of what is kept; whoever reads it takes nothing for
granted.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path


def keep(path: Path, name: str, value: Mapping[str, object]) -> None:
    """Puts ``value`` into the file under ``name``, beside what else is there; a damaged file is begun anew.

    Raises OSError where it cannot be written; nothing is left lying then.
    """
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        kept = {}
    if not isinstance(kept, dict):
        kept = {}
    kept[name] = value
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        part.write_text(json.dumps(kept, indent=1), encoding="utf-8")
        os.replace(part, path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink()
        raise
