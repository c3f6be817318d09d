"""Drafts that were trained for one target, over the weights that they borrow from it.

Makes drafters of every kind from the files that ``core.pairs.draft_file`` describes: those that ship for
the embedded target and those that ``python -m core.distill`` writes. Kinds that look into the target need the
lean decoder and the features it keeps: ``keep_features`` sees to that before the first cache is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from core.drafters.base import Drafting
from core.drafters.eagle import EagleDrafter
from core.drafters.medusa import MedusaDrafter
from core.drafters.model import ModelDrafter
from core.models.base import Scorer
from core.models.decoder import Decoder, DecoderShape
from core.models.errors import LoadError
from core.models.linear.forms import DENSE, family, maker
from core.models.linear.products import DenseLinear
from core.pairs.draft_file import (
    KINDS,
    UnpackedDraft,
    check_target,
    feature_layers,
    load_draft,
    load_metadata,
)

ON_TARGET = ("eagle", "medusa")  # kinds that run on the target's features


@dataclass(frozen=True)
class Lender:
    """A target as drafts see it. ``embedding`` (vocabulary, hidden) is on the processor; ``rows`` gives the
    rows of its head, (n, hidden), that score ids (n,)."""

    name: str
    model: Scorer
    shape: DecoderShape
    embedding: torch.Tensor
    rows: Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Forms:
    """How a draft's products run: names of ``core.models.linear.forms``."""

    layers: str
    head: str


def shipped(folder: Path, own: str) -> dict[str, Path]:
    """The drafts for the embedded target in ``folder``, by kind; of kind ``own`` even if it is missing."""
    files = {kind: folder / f"draft-{kind}.safetensors" for kind in KINDS}
    return {kind: file for kind, file in files.items() if kind == own or file.is_file()}


def default_kind(target: Scorer) -> str:
    """The embedded target's own way to draft unless one is named: the fastest in a comparison on a CPU
    (docs/PERFORMANCE.md). Elsewhere what needs nothing of the target; on a card none was compared."""
    return "eagle" if isinstance(target, Decoder) and target.device.type == "cpu" else "model"


def chosen(path: Path, lender: Lender) -> tuple[str, Path]:
    """Kind and place of a draft, a file or folder, that a person named. Raises LoadError where it does not go
    with the target."""
    metadata = load_metadata(path)
    check_target(metadata, lender.name, lender.embedding)
    kind = metadata.get("kind", "")
    if kind not in KINDS:
        raise LoadError(f"The draft {path} is of a kind unknown here ({kind or 'none'}): update Redline.")
    if kind in ON_TARGET and not isinstance(lender.model, Decoder):
        raise LoadError(
            f"The draft {path} is of kind {kind}, which looks into its target, and {lender.name} runs "
            "through transformers' modules here: choose a draft of kind model, or another --quantize."
        )
    return kind, path


def keep_features(target: Decoder, files: Iterable[Path]) -> None:
    """Has the target's caches keep what drafts in these files look at; no weights are read."""
    layers = {layer for file in files for layer in feature_layers(load_metadata(file))}
    target.feature_layers = tuple(sorted(layers))


def makers(files: Mapping[str, Path], lender: Lender, forms: Forms) -> dict[str, Callable[[], Drafting]]:
    """What makes a way to draft of each kind when it is first wanted, of kinds that can run here.

    ``keep_features`` was called with these files.
    """
    lean = isinstance(lender.model, Decoder)
    return {
        kind: lambda file=file: make(file, lender, forms)
        for kind, file in files.items()
        if lean or kind not in ON_TARGET
    }


def make(file: Path, lender: Lender, forms: Forms) -> Drafting:
    """The draft in ``file``, which was made for this target. Raises LoadError where it cannot be read."""
    draft = load_draft(file)
    drafter, name = _MAKE[draft.kind](draft, lender, forms)
    about = dict(
        draft=name,
        draft_fingerprint=draft.metadata["fingerprint"],
        draft_quantization=shown(forms.layers),
        draft_dtype="float32",
        draft_context_length=drafter.context_length,
        drafter=drafter.name,
    )
    return Drafting(drafter, about)


def _model(draft: UnpackedDraft, lender: Lender, forms: Forms) -> tuple[ModelDrafter, str]:
    """Runs on the processor wherever the target does: it shares no more than the embedding with it."""
    make_head = maker(forms.head)
    project = make_head(draft.tensors["proj.weight"])
    score = make_head(lender.rows(draft.head_ids).cpu())
    decoder = Decoder.from_tensors(
        replace(lender.shape, layers=draft.layers),
        draft.tensors,
        maker(forms.layers),
        lender.embedding,
        lambda hidden: score(project(hidden)),
        "",
        len(draft.head_ids),
    )
    if isinstance(lender.model, Decoder):
        decoder.rotations = lender.model.rotations.cpu()  # which need not be the shape's plain ones
    return ModelDrafter(decoder, draft.head_ids), f"distilled, {_counted(draft.layers, 'layer')}"


def _eagle(draft: UnpackedDraft, lender: Lender, forms: Forms) -> tuple[EagleDrafter, str]:
    return EagleDrafter(**_on_target(draft, lender, forms)), f"EAGLE, {_counted(draft.layers, 'layer')}"


def _medusa(draft: UnpackedDraft, lender: Lender, forms: Forms) -> tuple[MedusaDrafter, str]:
    drafter = MedusaDrafter(**_on_target(draft, lender, forms))
    return drafter, f"Medusa, {_counted(drafter.heads, 'head')}"


_MAKE = {"model": _model, "eagle": _eagle, "medusa": _medusa}


def _on_target(draft: UnpackedDraft, lender: Lender, forms: Forms) -> dict[str, object]:
    """What drafters that run where the target does are made of."""
    target = lender.model
    make, make_head = maker(forms.layers), maker(forms.head)
    if target.device.type != "cpu":  # in the type the target runs in: some cards have no bfloat16
        make = make_head = lambda weight: DenseLinear(weight.to(target.dtype))
    return dict(
        target=target,
        tensors={name: tensor.to(target.device) for name, tensor in draft.tensors.items()},
        feature_layers=draft.feature_layers,
        head_ids=draft.head_ids,
        rows=lender.rows(draft.head_ids).to(target.device),
        make=make,
        make_head=make_head,
    )


def head_rows(target: Decoder, ids: torch.Tensor) -> torch.Tensor:
    """Rows ``ids`` (n,) of a head that is no embedding, (n, hidden) float32, as its product has them."""
    size, dtype = target.shape.hidden, target.dtype
    columns = [
        target.head(part.to(target.device, dtype))[:, ids.to(target.device)].float()
        for part in torch.eye(size).split(128)
    ]
    return torch.cat(columns).t()


def shown(form: str) -> str:
    """A form of ``core.models.linear`` as ``PairInfo`` names it."""
    return "none" if family(form) in DENSE else family(form)


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
