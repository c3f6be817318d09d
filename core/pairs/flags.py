"""A person's words for a pair, flags and environment, become a ``PairSpec``.

Decides from words alone. It opens no model, reaches no network, imports neither torch nor transformers (the
app reads its flags with it before anything heavy is imported) and does not know whether what is named exists:
``core.models.checkpoint`` finds that out.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace

from core.models.asked import DEVICES, DTYPES, QUANTIZE, flag
from core.models.sources import EMBEDDED, SpecError, source_kind
from core.pairs.catalogue import CATALOGUE, spec
from core.pairs.spec import ALONE, CUSTOM, PairSpec, embedded_spec

# The flags by name: what stands for the value, and help. The first three choose the pair.
_CHOOSING = ("pair", "target", "draft")
_HELP = {
    "pair": ("NAME", "{pairs} (python -m core.pairs.catalogue describes them)"),
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


def add_pair_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds --pair, --target, --draft, --quantize, --draft-quantize, --device and --dtype.

    Values stay text, None where not given: ``pair_spec`` checks them, with one sentence for what cannot be
    used.
    """
    pairs = ", ".join([EMBEDDED, *CATALOGUE])
    group = parser.add_argument_group("the pair (without these, the one that comes with Redline)")
    for name, (metavar, text) in _HELP.items():
        group.add_argument(flag(name), metavar=metavar, help=text.format(pairs=pairs))


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
            raise SpecError(f"{flag(name)} is empty: give it a value or leave it away.")
    asked = {name: value for name in _HELP if (value := environment.get(variable(name), "").strip())}
    if any(name in flags for name in _CHOOSING):
        asked = {name: value for name, value in asked.items() if name not in _CHOOSING}
    origin = {name: variable(name) for name in asked}
    origin.update({name: flag(name) for name in flags})
    asked.update(flags)
    return asked, origin


def choose(asked: Mapping[str, str], origin: Mapping[str, str]) -> PairSpec:
    """The pair that ``asked`` names by "pair", or by "target" and perhaps "draft"; ``origin`` is how a person
    said each of these. Raises SpecError.
    """
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
