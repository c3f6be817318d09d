"""What a person weighs before a pair is loaded: memory needed and free, what has to be downloaded, what fits.

Asks ``core.models`` and knows no component and no page. Nothing here imports torch before a card or a
processor is asked what it can.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from app.serving.loading import LoadingState
from core.models import card, checkpoint, memory
from core.models.checkpoint import is_here
from core.models.errors import LoadError
from core.models.sources import EMBEDDED, SpecError
from core.pairs.catalogue import CATALOGUE, Entry, fitting, spec
from core.pairs.flags import choose
from core.pairs.spec import ALONE, CUSTOM, PairSpec

FORMS = ("quantize", "draft_quantize", "device", "dtype")  # fields of PairSpec that say how a pair runs


def device_of(asked: str) -> str:
    """ "cuda" or "cpu": where a pair of this device setting would run on this machine."""
    return "cuda" if asked != "cpu" and memory.free_bytes("cuda") is not None else "cpu"


def needed_bytes(entry: Entry, how: Mapping[str, str]) -> int:
    """Memory that loading ``entry`` takes at most, where ``how`` maps ``FORMS`` to what was chosen."""
    return entry.needed_bytes(device_of(how["device"]), how["quantize"], how["draft_quantize"], how["dtype"])


def chosen(name: str, target: str, draft: str, how: Mapping[str, str]) -> PairSpec:
    """The pair of that name, or the one of these two models; without a draft the target writes alone.

    Raises SpecError with one sentence.
    """
    if name != CUSTOM:
        asked = {"pair": name}
    elif target.strip():
        asked = {"target": target.strip(), "draft": draft.strip() or ALONE}
    else:
        raise SpecError("Name a target: a hub id (owner/name), a folder, or a .gguf file.")
    return replace(choose(asked, {}), **how)


def bytes_to_download(pair: PairSpec) -> int:
    """What loading ``pair`` would fetch from the hub; 0 where all of it is on this disk.

    Asks the hub about models that the catalogue does not know. Raises LoadError.
    """
    try:
        missing = [source for source in (pair.target, pair.draft) if source and not is_here(source)]
    except SpecError as error:
        raise LoadError(str(error)) from error
    return sum(_download_bytes(source) for source in missing)


def _download_bytes(source: str) -> int:
    for entry in CATALOGUE.values():
        for model in (entry.target_model, entry.draft_model):
            if model.repo == source:
                return model.download_bytes
    found = checkpoint.inspect(source)
    return 0 if found.cached else found.weight_bytes


def suggestion() -> Entry | None:
    """The catalogue's pair that fits this machine's card; None without a card that this torch knows, or where
    none fits."""
    free = memory.free_bytes("cuda")
    return None if free is None or card.unknown() else fitting(free, "cuda")


def offer(state: LoadingState) -> Entry | None:
    """A pair to offer while the embedded one runs only because nobody has chosen; or None."""
    if state.engine is None or state.loading or state.spec is not None:
        return None
    return suggestion() if state.engine.pair.info.pair == EMBEDDED else None


def by_machine() -> PairSpec:
    """What runs where nobody has said: the suggested pair if it is on this disk, else the embedded one."""
    entry = suggestion()
    if entry is not None and is_here(entry.target) and is_here(entry.draft):
        return spec(entry.name)
    return spec(EMBEDDED)
