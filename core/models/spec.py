"""Which pair is asked for, and how it is to run: flags and environment in, a ``PairSpec`` out.

Decides from words alone. It opens no model, reaches no network, imports neither torch nor transformers (the
app reads its flags with it before anything heavy is imported) and does not know whether what is named exists:
``core.models.checkpoint`` finds that out.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

EMBEDDED = "embedded"  # as a target: the model that comes with Redline; as a draft: its distilled draft
CUSTOM = "custom"  # the name of a pair that is neither the embedded one nor in the catalogue
SMALL = 3_000_000_000  # bytes of weights in 16 bits below which a model on a card is left as it is
ALONE = "none"  # said for a draft: the target alone

QUANTIZE = ("auto", "none", "int8", "int4", "nf4", "llm-int8")
DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16", "float16")

Kind = Literal["embedded", "hub", "folder", "gguf"]

# As the hub writes them: owner and name of letters, digits, ".", "_" and "-", then perhaps a branch, tag or
# commit.
_HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@((?!/)(?!.*\.\.)[\w./+-]+))?", re.ASCII)

# The flags by name: what stands for the value, and help. The first three choose the pair.
_CHOOSING = ("pair", "target", "draft")
_HELP = {
    "pair": ("NAME", "{pairs} (python -m core.models.catalogue describes them)"),
    "target": ("MODEL", "the big model: a hub id owner/name[@revision], a folder, a .gguf file, or embedded"),
    "draft": (
        "MODEL",
        "the small model, named likewise, or a folder of python -m core.distill; none for the target alone",
    ),
    "quantize": (
        "FORM",
        f"the target's weights: {', '.join(QUANTIZE)} (default: auto, what suits the device)",
    ),
    "draft_quantize": ("FORM", "the draft's weights, likewise"),
    "device": ("NAME", f"{', '.join(DEVICES)} (default: auto, CUDA where there is a card)"),
    "dtype": ("NAME", f"of activations: {', '.join(DTYPES)} (default: auto)"),
}
_CHOICES = {"quantize": QUANTIZE, "draft_quantize": QUANTIZE, "device": DEVICES, "dtype": DTYPES}


class SpecError(ValueError):
    """What was asked for makes no sense; the message is one sentence that says what to do."""


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


def automatic_form(device: str, draft: bool, bytes_16bit: int | None = None) -> str:
    """What "auto" means for a model's weights on "cpu" or "cuda"; ``bytes_16bit``: their size in 16 bits.

    On a card a large target is what fills the memory: NF4, where its package is installed. A draft or a small
    target has to be quick and stays in half precision. On a processor int8 is both smaller and quicker than
    full precision.
    """
    if device == "cuda":
        small = bytes_16bit is not None and bytes_16bit < SMALL
        return "none" if draft or small or not has_bitsandbytes() else "nf4"
    return "int8"


def settled_form(asked: str, device: str, draft: bool, bytes_16bit: int | None = None) -> str:
    """What a form asked for means on "cpu" or "cuda", where int8 is LLM.int8."""
    if asked == "auto":
        return automatic_form(device, draft, bytes_16bit)
    return "llm-int8" if device == "cuda" and asked == "int8" else asked


def has_bitsandbytes() -> bool:
    return importlib.util.find_spec("bitsandbytes") is not None


def quantize_flag(draft: bool) -> str:
    """The flag that says the form of a target's or a draft's weights."""
    return _flag("draft_quantize" if draft else "quantize")


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


def draft_folder(source: str | None) -> Path | None:
    """The folder of a draft that ``python -m core.distill`` made, where a source names one."""
    if source in (None, EMBEDDED) or not (path := Path(source).expanduser()).is_dir():
        return None
    from core.models.draft_file import is_draft_folder  # with torch, which the page does not wait for

    return path if is_draft_folder(path) else None


def add_pair_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds --pair, --target, --draft, --quantize, --draft-quantize, --device and --dtype.

    Values stay text, None where not given: ``pair_spec`` checks them, with one sentence for what cannot be
    used.
    """
    from core.models.catalogue import CATALOGUE  # which makes PairSpecs, and so imports this module

    pairs = ", ".join([EMBEDDED, *CATALOGUE])
    group = parser.add_argument_group("the pair (without these, the one that comes with Redline)")
    for name, (metavar, text) in _HELP.items():
        group.add_argument(_flag(name), metavar=metavar, help=text.format(pairs=pairs))


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def variable(name: str) -> str:
    """The environment variable that stands for a flag: REDLINE_DRAFT_QUANTIZE for draft_quantize."""
    return "REDLINE_" + name.upper()


def pair_spec(given: argparse.Namespace, environment: Mapping[str, str]) -> PairSpec | None:
    """The pair asked for by flags, else by REDLINE_PAIR, REDLINE_TARGET, REDLINE_DRAFT, REDLINE_QUANTIZE,
    REDLINE_DRAFT_QUANTIZE, REDLINE_DEVICE and REDLINE_DTYPE (empty: not set); None where nothing was asked
    for.

    A pair named by flags sets aside the one of the environment as a whole, so that halves of two pairs never
    mix. A target whose draft is not named gets the draft of its catalogue pair, or stands alone;
    quantisation, device or dtype without a pair are the embedded pair's. Raises SpecError.
    """
    asked, origin = _asked(given, environment)
    if not asked:
        return None
    for name, choices in _CHOICES.items():
        if name in asked and asked[name] not in choices:
            raise SpecError(f"{origin[name]} must be one of {', '.join(choices)}, not {asked[name]!r}.")
    spec = choose(asked, origin)
    return replace(spec, **{name: asked[name] for name in _CHOICES if name in asked})


def _asked(
    given: argparse.Namespace, environment: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """What was asked for, by field, and where it stood ("--pair" or "REDLINE_PAIR")."""
    flags = {name: value.strip() for name in _HELP if (value := getattr(given, name, None)) is not None}
    for name, value in flags.items():
        if not value:
            raise SpecError(f"{_flag(name)} is empty: give it a value or leave it away.")
    asked = {name: value for name in _HELP if (value := environment.get(variable(name), "").strip())}
    if any(name in flags for name in _CHOOSING):
        asked = {name: value for name, value in asked.items() if name not in _CHOOSING}
    origin = {name: variable(name) for name in asked}
    origin.update({name: _flag(name) for name in flags})
    asked.update(flags)
    return asked, origin


def choose(asked: Mapping[str, str], origin: Mapping[str, str]) -> PairSpec:
    """The pair that ``asked`` names by "pair", or by "target" and perhaps "draft"; ``origin`` is how a person
    said each of these. Raises SpecError.
    """
    from core.models.catalogue import CATALOGUE, spec

    if "pair" in asked:
        for name in ("target", "draft"):
            if name in asked:
                raise SpecError(f"{origin['pair']} names both models: leave {origin[name]} away.")
        return spec(asked["pair"])
    if "target" not in asked:
        if "draft" in asked:
            raise SpecError(f"{origin['draft']} needs a target: name one with --target.")
        return embedded_spec()
    target, draft = asked["target"], asked.get("draft")
    source_kind(target)
    if draft not in (None, ALONE):
        source_kind(draft)
    known = [embedded_spec(), *map(spec, CATALOGUE)]
    for pair in known:
        if pair.target == target and draft in (None, pair.draft):
            return pair
    return PairSpec(name=CUSTOM, target=target, draft=None if draft == ALONE else draft)
