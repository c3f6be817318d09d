"""The folder a training ends in: the packed draft, its ``config.json`` and a card that says what it is worth.

``core.pairs.draft_file`` defines the form. Alpha is measured on what was packed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError

from core.distill.evaluate import Alpha
from core.distill.files import write_whole
from core.distill.kinds import Draft, feature_layers
from core.distill.target import Target
from core.models.errors import first_line
from core.pairs.draft_file import CARD, CONFIG, FILE, HEAD, load_metadata, save_draft

HELD_OUT = (
    "Held out are chats whose prompt's ids sum to a multiple of 17; none of them was trained on, nor any "
    "other reply to their prompts."
)
HELD_OUT_APART = (
    "Held out are chats of a file of their own. Training left out prompts whose ids sum to a multiple of 17 "
    "and no others, so that some of these chats may have been trained on."
)


def metadata(
    draft: Draft,
    target: Target,
    origin: str,
    licence: str,
    found: Mapping[str, Alpha],
    sample: Mapping[str, Alpha],
    *,
    by_rule: bool = True,
) -> dict[str, str]:
    """What a draft's file says of itself; ``found`` is alpha on all held-out replies, ``sample`` on a few.

    ``by_rule``: all of those are chats that no training takes (``core.distill.corpus.held_out``).
    """
    layers = len(getattr(draft, "layers", ()))
    looks = () if draft.kind == "model" else feature_layers(draft.kind, target.shape.layers)
    return {
        "kind": draft.kind,
        "target": target.name,
        "target_fingerprint": target.fingerprint,
        "hidden": str(target.shape.hidden),
        "layers": str(layers),
        "feature_layers": ",".join(map(str, looks)),
        "origin": origin,
        "licence": licence,
        "held_out": HELD_OUT if by_rule else HELD_OUT_APART,
        "alpha": "; ".join(f"{domain} {alpha}" for domain, alpha in found.items()) or "not measured",
        "figures": json.dumps({domain: asdict(alpha) for domain, alpha in found.items()}),
        "sample": json.dumps({domain: asdict(alpha) for domain, alpha in sample.items()}),
    }


def write_folder(
    folder: Path, tensors: Mapping[str, torch.Tensor], head_ids: torch.Tensor, about: Mapping[str, str]
) -> None:
    """The draft, ready for ``--draft FOLDER``; each file whole or as it was. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"part-{FILE}"  # of a name that ``load_metadata`` takes
    try:
        try:
            save_draft({**tensors, HEAD: head_ids}, part, about)
        except SafetensorError as error:  # which hides the system's own
            raise OSError(first_line(error)) from error
        said = load_metadata(part)
        write_whole(folder / FILE, lambda file: file.write(part.read_bytes()))
    finally:
        part.unlink(missing_ok=True)
    parsed = {name: json.loads(said[name]) for name in ("figures", "sample")}
    for name, text in (
        (CONFIG, json.dumps({**said, **parsed}, indent=1) + "\n"),
        (CARD, card(said, len(head_ids))),
    ):
        write_whole(folder / name, lambda file, text=text: file.write(text.encode("utf-8")))


def card(about: Mapping[str, str], scored: int) -> str:
    """The card in Markdown."""
    return f"""# A draft for {about["target"]}

Kind `{about["kind"]}`{f", {about['layers']} layers" if about["layers"] != "0" else ""}, made by `python -m
core.distill`; run it with `--draft` and this folder. It borrows the target's embedding (SHA-256
`{about["target_fingerprint"]}`) and scores {scored:,} of its ids; any other id has q = 0, which exact
verification allows for.

## What it was trained on

{about["origin"]}

## What it is worth

alpha = mean Σ min(p, q) at temperature 1 over every position of held-out replies, with its 95% interval over
replies. {about.get("held_out", HELD_OUT)} By depth: after 1, 2, ... tokens drafted since the
target's last pass, where the kind tells them apart. "code" is a reply with a code fence.

{_table(json.loads(about["figures"]))}

## Licence

{about["licence"]}
"""


def _table(figures: Mapping[str, Mapping]) -> str:
    if not figures:
        return "Not measured: there was no held-out reply."
    rows = ["| | alpha | 95% interval | by depth | tokens | replies |", "|---|---|---|---|---|---|"]
    for domain, of in figures.items():
        interval = "–" if of["interval"] is None else "{:.3f} to {:.3f}".format(*of["interval"])
        depths = ", ".join(f"{value:.3f}" for value in of["by_depth"])
        first, size = of["by_depth"][0], f"{of['tokens']:,} | {of['replies']}"
        rows.append(f"| {domain} | {first:.4f} | {interval} | {depths} | {size} |")
    return "\n".join(rows)
