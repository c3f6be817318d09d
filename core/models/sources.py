"""What names a model: a hub id, a folder, a GGUF file, or the model that comes with Redline.

Decides from the words, and from whether a folder of the name is there. Opens nothing, reaches no network and
imports neither torch nor transformers: ``core.models.checkpoint`` finds out what is behind a name.
"""

from __future__ import annotations

import os
import re
from typing import Literal

EMBEDDED = "embedded"  # as a target: the model that comes with Redline; as a draft: its distilled draft

Kind = Literal["embedded", "hub", "folder", "gguf"]

# As the hub writes them: owner and name of letters, digits, ".", "_" and "-", then perhaps a branch, tag or
# commit.
_HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@((?!/)(?!.*\.\.)[\w./+-]+))?", re.ASCII)


class SpecError(ValueError):
    """What was asked for makes no sense; the message is one sentence that says what to do."""


def source_kind(source: str) -> Kind:
    """How a target or draft is named. A folder that is there goes before a hub id of the same spelling, as in
    transformers. Raises SpecError where it is none of the four.
    """
    if source == EMBEDDED:
        return "embedded"
    if source.lower().endswith(".gguf"):
        return "gguf"
    path = os.path.expanduser(source)
    if os.path.isdir(path) or os.path.isabs(path) or source.startswith((".", "~")) or "\\" in source:
        return "folder"
    if _HUB_ID.fullmatch(source):
        return "hub"
    raise SpecError(
        f"{source!r} is no model: name a hub id (owner/name), a folder that is there, a .gguf file, "
        f"or {EMBEDDED}."
    )


def hub_id(source: str) -> tuple[str, str | None]:
    """Repository id and revision (None: the main one) of a source of kind "hub"."""
    found = _HUB_ID.fullmatch(source)
    if not found:
        raise SpecError(f"{source!r} is no hub id of the form owner/name.")
    return found[1], found[2]
