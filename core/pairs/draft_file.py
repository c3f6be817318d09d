"""The file a distilled draft ships in, of every kind, and the check that it was made for this target.

A draft is one safetensors file, alone or as ``draft.safetensors`` in a folder that ``python -m core.distill``
wrote (beside ``config.json``, which repeats the metadata for people and tools, and a card). Matrices are
int8 [out, in] with one float32 scale an output row under ``NAME.scale`` (weight = int8 * scale), vectors
float32, ``head_token_ids`` (n,) int32: the ids that the head scores; all others have q = 0. Packing changes
q a little, so a card's alpha is measured on what was packed. The metadata are strings: ``kind``, ``target``
(a name), ``target_fingerprint`` (``embedding_fingerprint`` of the target), ``hidden``, ``layers``,
``feature_layers`` (comma-separated, as in ``core.models.decoder``; empty for kind ``model``), ``origin``,
``licence``, ``alpha`` and ``fingerprint`` (SHA-256 over all tensors).

Vectors and products below are of width H, the target's hidden size. All kinds borrow the target's embedding E
(vocabulary, H), and on the way out the rows of its head, here E too: the logits of a state z are
``E[head_token_ids] @ (proj.weight @ z)``. Layers, ``layers.N.*`` under Hugging Face's names, are Llama layers
of the target's sizes, rotary embedding and eps; a token's rotary position is its position in the text, from
0. ``rms(x)`` is x / sqrt(mean(x^2) + eps), without a weight. Features of a position are the target's
residual stream behind the layers that ``feature_layers`` numbers from 0, ascending; that of the last layer
is taken after the final norm. Position t holds token x_t.

- ``model`` (a small decoder): in goes E[x_t]; then the layers; z = rms(layers' output) * ``norm.weight``,
  whose logits predict x_{t+1}.
- ``eagle``: at position t, with the k features f of position t - 1,
  g = ``features.weight`` (H, kH) @ concat(rms(f_1), ..., rms(f_k)), zeros at t = 0;
  x = ``token.weight`` @ E[x_t] + ``state.weight`` @ rms(g);  y = layers(x), causal over earlier positions;
  z = rms(y) * ``norm.weight`` predicts x_{t+1}. While drafting there are no features of t for position
  t + 1: there g = y of position t as it is, the layers' output before the norm. Positions that become
  committed are run again with the target's features.
- ``medusa``: head i = 0, 1, ... takes h = rms(feature of position t);
  z = h + silu(``heads.I.block.weight`` @ h + ``heads.I.block.bias``), and with ``heads.I.proj.weight`` in
  the place of ``proj.weight`` its logits predict x_{t+2+i} (the target's own head predicts x_{t+1}).

Knows the file, not how a draft is run or trained.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from core.models.errors import LoadError, is_out_of_memory, too_little_memory

KINDS = ("model", "eagle", "medusa")
FILE, CONFIG, CARD = "draft.safetensors", "config.json", "README.md"  # in a folder
SCALE = ".scale"  # suffix of the tensor that holds a matrix's row scales
HEAD = "head_token_ids"


@dataclass(frozen=True)
class UnpackedDraft:
    """A draft as it was before packing, but for rounding.

    ``tensors`` are float32 by their names in the file; ``head_ids`` (n,) int64, ascending, are the ids that
    the head scores. ``layers`` is 0 where a kind has none. ``metadata`` is what the file says of itself.
    """

    tensors: dict[str, torch.Tensor]
    layers: int
    head_ids: torch.Tensor
    metadata: dict[str, str]

    @property
    def kind(self) -> str:
        return self.metadata["kind"]

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return feature_layers(self.metadata)


def embedding_fingerprint(embedding: torch.Tensor) -> str:
    """SHA-256 (hexadecimal) of a token embedding (vocabulary, hidden), by its values in bfloat16, row by row.

    So that a model held in float32 or bfloat16 has one fingerprint.
    """
    rounded = embedding.detach().to("cpu", torch.bfloat16).contiguous()
    digest = hashlib.sha256(f"{tuple(rounded.shape)}".encode())
    digest.update(rounded.view(torch.int16).numpy().data)
    return digest.hexdigest()


def check_target(metadata: Mapping[str, str], name: str, embedding: torch.Tensor) -> None:
    """Raises LoadError, in one sentence, unless the draft was made for the model of this embedding.

    ``name`` is what the target is called; ``embedding`` (vocabulary, hidden).
    """
    ours, theirs = embedding_fingerprint(embedding), metadata.get("target_fingerprint", "")
    if ours != theirs:
        made_for = f"{metadata.get('target', 'another target')} (embedding {theirs[:12] or 'not named'})"
        raise LoadError(
            f"This draft was made for {made_for}, not for {name} (embedding {ours[:12]}): choose a draft "
            "that was made for this very model, or make one with python -m core.distill."
        )


def save_draft(tensors: Mapping[str, torch.Tensor], path: Path | str, metadata: Mapping[str, str]) -> None:
    """Packs floating-point ``tensors``, ``head_token_ids`` among them, into ``path``, with ``metadata``."""
    packed = pack(tensors)
    save_file(packed, path, {**metadata, "fingerprint": _fingerprint(packed)})


def pack(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors as the file holds them."""
    packed: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if name == HEAD:
            packed[name] = tensor.to(torch.int32)
        elif tensor.dim() == 2:
            weight = tensor.float()
            scale = weight.abs().amax(dim=1) / 127
            # A row of zeros has scale 0; dividing it by anything else leaves it zero.
            steps = weight / torch.where(scale > 0, scale, 1.0).unsqueeze(1)
            packed[name] = steps.round().to(torch.int8)
            packed[name + SCALE] = scale
        else:
            packed[name] = tensor.float()
    return packed


def unpack(packed: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors in float32, as near as packing left them; without ``head_token_ids``."""
    return {
        name: tensor * packed[name + SCALE][:, None] if name + SCALE in packed else tensor
        for name, tensor in packed.items()
        if name != HEAD and not name.endswith(SCALE)
    }


def load_draft(path: Path | str) -> UnpackedDraft:
    """The packed draft of a file or folder, unpacked.

    Raises LoadError where it is missing, damaged or of a kind unknown here.
    """
    path = _file(path)
    packed, metadata = _read(path)
    if metadata.get("fingerprint") != _fingerprint(packed):
        raise LoadError(f"The draft {path} is damaged or was not packed by Redline: fetch it anew.")
    if (kind := metadata.get("kind")) not in KINDS:
        raise LoadError(f"The draft {path} is of a kind unknown here ({kind}): update Redline.")
    tensors = unpack(packed)
    numbers = [int(name.split(".")[1]) for name in tensors if name.startswith("layers.")]
    return UnpackedDraft(tensors, 1 + max(numbers, default=-1), packed[HEAD].long().sort().values, metadata)


def load_metadata(path: Path | str) -> dict[str, str]:
    """What the draft of a file or folder says of itself, without reading its weights. Raises LoadError."""
    path = _file(path)
    try:
        with safe_open(path, "pt") as file:
            return file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise _unreadable(path, error) from error


def feature_layers(metadata: Mapping[str, str]) -> tuple[int, ...]:
    """The target's layers that a draft looks at, as ``core.models.decoder`` numbers them."""
    return tuple(int(layer) for layer in metadata.get("feature_layers", "").split(",") if layer)


def is_draft_folder(path: Path | str) -> bool:
    """Whether a folder holds a draft of this form, and not a model of Hugging Face's."""
    return (Path(path) / FILE).is_file()


def _file(path: Path | str) -> Path:
    return Path(path) / FILE if Path(path).is_dir() else Path(path)


def _read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    try:
        with safe_open(path, "pt") as file:
            # Copied: a view changes when the file is written anew, under a pair that runs.
            return {name: file.get_tensor(name).clone() for name in file.keys()}, file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> LoadError:
    if is_out_of_memory(error):
        return too_little_memory(f"read the draft {path}")
    return LoadError(f"The draft {path} cannot be read ({error}): fetch it anew.")


def _fingerprint(tensors: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()
