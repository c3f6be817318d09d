"""Which pair is asked for, and how it is to run.

A ``PairSpec`` is words alone: it opens no model and does not know whether what is named exists.
``core.pairs.flags`` makes one of what a person says, ``core.pairs.load`` makes a pair of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from core.models.sources import EMBEDDED

CUSTOM = "custom"  # the name of a pair that is neither the embedded one nor in the catalogue
ALONE = "none"  # said for a draft: the target alone


@dataclass(frozen=True)
class PairSpec:
    """A pair as asked for. ``target`` and ``draft`` are "embedded", a hub id "owner/name" (with "@revision"
    where one was given), a folder or a .gguf file; ``draft`` None is the target alone.

    "auto" is settled where the pair is loaded (``quantize`` means: ``settled_form``); the record keeps what
    really runs.
    """

    name: str
    target: str
    draft: str | None
    quantize: str = "auto"
    draft_quantize: str = "auto"
    device: str = "auto"
    dtype: str = "auto"


def embedded_spec() -> PairSpec:
    """The pair that comes with Redline."""
    return PairSpec(name=EMBEDDED, target=EMBEDDED, draft=EMBEDDED)


def draft_folder(source: str | None) -> Path | None:
    """The folder of a draft that ``python -m core.distill`` made, where a source names one."""
    if source in (None, EMBEDDED) or not (path := Path(source).expanduser()).is_dir():
        return None
    from core.pairs.draft_file import is_draft_folder  # with torch, which the page does not wait for

    return path if is_draft_folder(path) else None
